"""The grouped products of Hopper, in bfloat16 and FP8: matmul, wgrad and the gradient of a bias."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moax.backend import device_kind
from moax.kernels.hopper.between import activate_rows, takes_activation
from moax.kernels.hopper.formats import (
    BLOCK,
    GATHER_WIDTH,
    KERNEL_WIDTH,
    BlockedGroups,
    Blocks,
    GatheredRows,
    KMajorFp8,
)
from moax.kernels.scales import dequantize
from moax.mesh.collectives import is_alone, typed
from moax.types import QArray

# In one wave, clusters with few half tiles fall behind those that read the same weights, which L2 then no longer has.
# A product whose tiles take equal times needs several waves beside a collective alone, since they cost it 1 to 3 %.
WAVES = 4
HALVES = ("matmul", "matmul_transposed")  # the products with half tiles


def matmul(
    x: Any, w: Any, groups: BlockedGroups, dtype: Any, bias: Any = None, *, transpose: bool = False
) -> Float[Array, "M N"]:
    """y[m] = x[m] w[g(m)] + bias[g(m)], or with `transpose` y[m] = x[m] w[g(m)]^T + bias[g(m)].

    Args:
      x: [M, K], or with `transpose` [M, N]; or GatheredRows of these.
      w: [E, K, N]; in FP8 it lies K-major, so that `transpose` does not matter.
      groups: the layout of the rows.
      dtype: the dtype of the result, and of operands that are not FP8.
      bias: [E, *C] or None, added before the product is rounded.

    Returns:
      [M, N], or with `transpose` [M, K]. Padding may hold anything.
    """
    bias = None if bias is None else bias.reshape(bias.shape[0], -1)
    if isinstance(x, KMajorFp8):
        return _matmul_fp8(x, w, groups.blocks, dtype, bias)
    x, source = _with_source(x, dtype)
    return _matmul(x, _plain(w, dtype), groups.blocks, dtype, bias, transpose, source)


@typed
def _matmul_fp8(x: KMajorFp8, w: KMajorFp8, blocks: Blocks, dtype, bias):
    """Computes the FP8 product, by a kernel with the tile for these sizes."""
    from moax.kernels.hopper.pallas.matmul_fp8 import grouped_matmul_fp8

    tile = _pick_tile("matmul_fp8", x.data.shape[1], w.data.shape[1], blocks)
    return grouped_matmul_fp8(x, w, blocks, tile, bias=bias, out_dtype=dtype)


@typed
def _matmul(x, w, blocks: Blocks, dtype, bias, transpose: bool, source):
    """Computes the bfloat16 product, by a kernel with the tile for these sizes. With a `source` it gathers x."""
    from moax.kernels.hopper.pallas.matmul import grouped_matmul

    columns = w.shape[1] if transpose else w.shape[2]
    tile = _pick_tile("matmul_transposed" if transpose else "matmul", x.shape[1], columns, blocks)
    tile = tile if source is None else dataclasses.replace(tile, cluster=1)
    return grouped_matmul(x, w, blocks, tile, transpose=transpose, bias=bias, source=source, out_dtype=dtype)


def matmul_activate(
    x: Any, w: Any, groups: BlockedGroups, dtype: Any, act: Callable, gates: int, bias: Any = None
) -> tuple[Float[Array, "M GF"], Any]:
    """h[m] = x[m] w[g(m)] + bias[g(m)], with a = act(h) [M, F] from one kernel where that takes it, else with None.

    The kernel takes 16-bit operands without a bias, 64 | K and 64 | F, and activations that Mosaic knows. It needs jax
    0.11.2. In FP8 the scale of a row of a has 128 columns of gate and of up, for whose sums a consumer lacks registers.
    """
    from moax.kernels.hopper.pallas.compat import MERGES_DIMS

    if isinstance(x, KMajorFp8) or bias is not None or not MERGES_DIMS or not takes_activation(act, gates == 2):
        return matmul(x, w, groups, dtype, bias), None
    (x, source), w = _with_source(x, dtype), _plain(w, dtype)
    if w.shape[1] % GATHER_WIDTH or w.shape[2] % (gates * GATHER_WIDTH):
        return _matmul(x, w, groups.blocks, dtype, None, False, source), None

    @jax.custom_batching.custom_vmap
    def together(*operands):
        return _matmul_activate(act, gates, *operands)

    @together.def_vmap
    def apart(size, batched, *operands):  # the copy engine takes a weight with gate and up in no more dims
        def each(x, w, blocks, source):
            h = _matmul(x, w, blocks, dtype, None, False, source)
            return h, activate_rows(h, blocks, act, gates)

        axes = [jax.tree.map(lambda one: 0 if one else None, of) for of in batched]
        return jax.vmap(each, axes, axis_size=size)(*operands), (True, True)

    return together(x, w, groups.blocks, source)


@typed
def _matmul_activate(act: Callable, gates: int, x, w, blocks: Blocks, source):
    """Computes the product [M, G F] and its activation, by a kernel with the tile for these sizes."""
    from moax.kernels.hopper.pallas.matmul_activate import matmul_activate
    from moax.kernels.hopper.pallas.tiles import with_projections

    w = w.reshape(*w.shape[:2], gates, -1)
    tile = with_projections(_pick_tile("matmul", w.shape[1], gates * w.shape[3], blocks), gates, w.shape[3])
    h, a = matmul_activate(x, w, blocks, tile, act, source=source)
    return h.reshape(h.shape[0], -1), a


def wgrad(
    x: Any, dy: Any, groups: BlockedGroups, dtype: Any, out_dtype: Any = None, total: Any = None
) -> Float[Array, "E K N"]:
    """dw[g] = sum over rows m of group g: x[m]^T dy[m], in float32. `out_dtype` None means `dtype`.

    x is [M, K] and dy is [M, N]; in FP8 they are transposed, [K, M] and [N, M]. Both are 0 in padding. One of them may
    be GatheredRows. With `total` [E, K, N] it returns total + dw in the dtype of `total`, and in its memory.
    """
    out_dtype = total.dtype if total is not None else dtype if out_dtype is None else out_dtype
    if isinstance(x, KMajorFp8):
        return _wgrad_fp8(x, dy, groups.blocks, out_dtype, total)
    (x, source), (dy, source_dy) = (_with_source(v, dtype) for v in (x, dy))
    sources = (source, "x") if source_dy is None else (source_dy, "dy")
    return _wgrad(x, dy, groups.blocks, out_dtype, total, *sources)


@typed
def _wgrad_fp8(x: KMajorFp8, dy: KMajorFp8, blocks: Blocks, dtype, total):
    """Computes the FP8 gradient of a weight, by a kernel with the tile for these sizes."""
    from moax.kernels.hopper.pallas.wgrad_fp8 import grouped_wgrad_fp8

    tile = _pick_tile("wgrad_fp8", x.data.shape[0], dy.data.shape[0], blocks)
    return grouped_wgrad_fp8(x, dy, blocks, tile, out_dtype=dtype, total=total)


@typed
def _wgrad(x, dy, blocks: Blocks, dtype, total=None, source=None, gathers: str = "x"):
    """Computes the bfloat16 gradient of a weight, by a kernel with the tile for these sizes.

    With a `source` it gathers the operand that `gathers` names.
    """
    from moax.kernels.hopper.pallas.tiles import turn_tile
    from moax.kernels.hopper.pallas.wgrad import grouped_wgrad

    tile = _pick_tile("wgrad", x.shape[1], dy.shape[1], blocks)
    tile = tile if source is None else dataclasses.replace(tile, cluster=1)
    tile = turn_tile(tile, x.shape[1]) if source is not None and gathers == "dy" else tile
    return grouped_wgrad(x, dy, blocks, tile, source=source, gathers=gathers, out_dtype=dtype, total=total)


def bias_grad(dy: Float[Array, "M *C"], groups: BlockedGroups) -> Float[Array, "E *C"]:
    """dbias[g] = sum over rows m of group g: dy[m], in float32. dy is 0 in padding.

    A product with ones takes a fraction of the time of XLA's scatter.
    """
    if groups.sizes is None:
        return dy.astype(jnp.float32).sum(0, keepdims=True)
    ones = jnp.ones((dy.shape[0], KERNEL_WIDTH), dy.dtype)
    sums = _wgrad(ones, dy.reshape(dy.shape[0], -1), groups.blocks, jnp.float32)
    return sums[:, 0].reshape(groups.sizes.shape[0], *dy.shape[1:])


def _with_source(x, dtype):
    """Returns the rows of an operand in this dtype, and their source where the product gathers them, else None."""
    return (x.x.astype(dtype), x.source) if isinstance(x, GatheredRows) else (_plain(x, dtype), None)


def _plain(x, dtype):
    """Returns x as an array of this dtype, dequantized if it is a QArray."""
    return dequantize(x, dtype) if isinstance(x, QArray) else x.astype(dtype)


def _pick_tile(op: str, contracted: int, columns: int, blocks: Blocks):
    """Returns the TileConfig of a product with these blocks on this device."""
    from moax.kernels.hopper.pallas.tiles import pick_tile

    rows = blocks.group.shape[0] * BLOCK // blocks.sizes.shape[0]
    tile = pick_tile(op, contracted, columns, rows, device_kind())
    return tile if is_alone() and op not in HALVES else dataclasses.replace(tile, waves=WAVES)
