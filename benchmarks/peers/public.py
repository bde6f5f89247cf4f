"""The MoE layer of JAX's fastest public parts: it gathers tokens, and runs `jax.experimental.pallas.ops.gpu`.

    router -> all_gather over ep -> sort own rows by expert -> product, silu, product -> weighted sum -> psum_scatter

Weights are gathered as in `native`. All shapes take one tile, the widest that divides most of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from benchmarks.peers import native
from benchmarks.peers.pallas_mgpu import GRADIENT, PRODUCT, WIDTHS
from moax import MoEConfig, MoEParams
from moax.backend import on_hopper, platform
from moax.errors import Unsupported

NO_KERNELS = "products by lax.ragged_dot: the kernels of jax.experimental.pallas.ops.gpu need a GPU"
TILE = 128  # columns of a product, and rows of a weight's gradient


def layer(
    x: Float[Array, "T H"],
    router: Float[Array, "H E"],
    wi: Float[Array, "shard H 2 F"],
    wo: Float[Array, "shard F H"],
    *,
    top_k: int,
    product: Callable,
) -> Float[Array, "T H"]:
    """Computes `native.layer` with `product`.

    product(rows [N, K], w [G, K, M], group_sizes [G]) returns [N, M]; its rows of no group may have any value.
    """
    tokens, width = x.shape
    wi, wo = (lax.all_gather(w.astype(x.dtype), "fsdp", tiled=True) for w in (wi, wo))
    here, ranks = wi.shape[0], router.shape[1] // wi.shape[0]

    logits = jnp.dot(x.astype(jnp.float32), router.astype(jnp.float32), precision="highest")
    best, chosen = lax.top_k(logits, top_k)
    x, chosen, weights = (lax.all_gather(v, "ep", tiled=True) for v in (x, chosen, jax.nn.softmax(best)))

    expert = chosen.reshape(-1) - lax.axis_index("ep") * here
    expert = jnp.where((expert >= 0) & (expert < here), expert, here)  # Index `here` is an expert of another rank.
    order = jnp.argsort(expert)
    group_sizes = jnp.bincount(expert, length=here + 1)[:here]
    room = ranks * tokens * min(top_k, here)
    real = (jnp.arange(room) < group_sizes.sum())[:, None]
    rows = jnp.where(real, x[order[:room] // top_k], 0)
    gate, up = jnp.split(product(rows, wi.reshape(here, width, -1), group_sizes), 2, axis=-1)
    o = jnp.where(real, product(jnp.where(real, jax.nn.silu(gate) * up, 0), wo, group_sizes), 0)

    own = (expert < here).reshape(-1, top_k)
    position = jnp.minimum(jnp.argsort(order), room - 1).reshape(-1, top_k)
    y = jnp.einsum("tkh,tk->th", o[position], jnp.where(own, weights, 0.0).astype(x.dtype))
    return lax.psum_scatter(y, "ep", scatter_dimension=0, tiled=True)


@jax.custom_vjp
def kernel_product(
    rows: Float[Array, "N K"], w: Float[Array, "G K M"], group_sizes: Int[Array, " G"]
) -> Float[Array, "N M"]:
    """Computes rows[i] @ w[group of i] by the kernels; rows of no group are 0, also in gradients."""
    return _product(rows, w, group_sizes, transpose=False)


def _product(rows, w, group_sizes, transpose: bool):
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    m, n, k, steps = PRODUCT[0]
    width = _width(w.shape[1 if transpose else 2], n)
    tile = dict(block_m=m, block_n=n, block_k=k, max_concurrent_steps=steps, grid_block_n=width)
    out = ragged_dot(rows, w, group_sizes=group_sizes, transpose_rhs=transpose, **tile)
    return _real(out, group_sizes)


def _real(rows, group_sizes):
    """Returns the rows with 0 in the rows of no group, which the kernels do not write."""
    return jnp.where((jnp.arange(rows.shape[0]) < group_sizes.sum())[:, None], rows, 0)


def _width(columns: int, block: int) -> int:
    return next(w for w in WIDTHS if columns % (w * block) == 0)


def _product_fwd(rows, w, group_sizes):
    return kernel_product(rows, w, group_sizes), (rows, w, group_sizes)


def _product_bwd(saved, dy):
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    rows, w, group_sizes = saved
    dy = _real(dy, group_sizes)
    m, n, k, steps = GRADIENT[0]
    tile = dict(block_m=m, block_n=n, block_k=k, max_concurrent_steps=steps, grid_block_n=_width(w.shape[2], n))
    dw = transposed_ragged_dot(_real(rows, group_sizes), dy, group_sizes=group_sizes, **tile)
    dw = jnp.where((group_sizes > 0)[:, None, None], dw, 0)
    return _product(dy, w, group_sizes, transpose=True), dw, None


kernel_product.defvjp(_product_fwd, _product_bwd)


def block(config: MoEConfig, mesh: Mesh) -> tuple[Callable[[jax.Array, MoEParams[jax.Array]], jax.Array], str]:
    """Returns the layer as a function (x [T, H], params) -> y [T, H], and a note on a substitute on a CPU, or "".

    Raises:
      Unsupported: the layer does not support the config or mesh, or the kernels do not support the GPU or widths.
    """
    native.check(config, mesh)
    gpu = platform() != "cpu"
    if gpu and not on_hopper():
        raise Unsupported("jax.experimental.pallas.ops.gpu: its grouped kernels are for compute capability 9.0")
    if gpu and (config.d_model % TILE or config.d_ff % TILE):
        raise Unsupported(f"none of its tiles divides d_model={config.d_model}, d_ff={config.d_ff}")
    local = functools.partial(layer, top_k=config.top_k, product=kernel_product if gpu else lax.ragged_dot)
    return native.on_mesh(local, mesh), "" if gpu else NO_KERNELS
