"""The grouped products of Hopper, in bfloat16 and FP8, and the activation between them, which may quantize."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moax.backend import device_kind, log_once
from moax.groups import zero_rows
from moax.kernels import HOPPER_WIDTH, xla
from moax.kernels.hopper.formats import (
    BLOCK,
    GATHER_WIDTH,
    BlockedGroups,
    Blocks,
    GatheredRows,
    KMajorFp8,
    supports_fp8,
)
from moax.kernels.hopper.operands import quantize_for_matmul
from moax.kernels.hopper.pallas import activation as kernels
from moax.kernels.hopper.pallas.activation import activate_grad_rows, activate_rows
from moax.kernels.hopper.pallas.matmul import MERGES_DIMS, grouped_matmul, grouped_matmul_activate
from moax.kernels.hopper.pallas.tiles import pick_tile, turn_tile, with_projections
from moax.kernels.hopper.pallas.wgrad import grouped_wgrad
from moax.kernels.quantization import to_array
from moax.mesh.axes import Names
from moax.mesh.collectives import is_alone
from moax.recipe import Format, Recipe, Recipes

# With one wave, thread-block clusters drift apart, and weights leave L2 before every cluster has read them.
# A product whose tiles take equal times needs several waves beside a collective alone, since they cost it 1 to 3 %.
WAVES = 4
HALVES = ("matmul", "matmul_transposed")  # the products with half tiles


def matmul(
    x: Any, w: Any, groups: BlockedGroups, dtype: Any, bias: Any = None, *, transpose: bool = False
) -> Float[Array, "M N"]:
    """y[m] = x[m] w[g(m)] + bias[g(m)], or with `transpose` y[m] = x[m] w[g(m)]^T + bias[g(m)].

    x may be GatheredRows. In FP8 w is K-major, so that `transpose` does not matter. The bias [E, *C] is added before
    the product is rounded.
    """
    bias, blocks = None if bias is None else bias.reshape(bias.shape[0], -1), groups.blocks
    if isinstance(x, KMajorFp8):
        tile = _pick_tile("matmul_fp8", x.data.shape[1], w.data.shape[1], blocks)
        return grouped_matmul(x, w, blocks, tile, bias=bias, out_dtype=dtype)
    (x, gather_idx), w = _with_gather_idx(x, dtype), to_array(w, dtype)
    return _matmul(x, w, blocks, dtype, bias, transpose, gather_idx)


def _matmul(x, w, blocks: Blocks, dtype, bias, transpose: bool, gather_idx):
    columns = w.shape[1] if transpose else w.shape[2]
    tile = _pick_tile("matmul_transposed" if transpose else "matmul", x.shape[1], columns, blocks)
    tile = tile if gather_idx is None else dataclasses.replace(tile, cluster=1)
    return grouped_matmul(x, w, blocks, tile, transpose=transpose, bias=bias, source=gather_idx, out_dtype=dtype)


def matmul_activate(
    x: Any, w: Any, groups: BlockedGroups, dtype: Any, act: Callable, gates: int, bias: Any = None
) -> tuple[Float[Array, "M GF"], Any]:
    """h[m] = x[m] w[g(m)] + bias[g(m)], with a = act(h) [M, F] from one kernel where that takes it, else with None.

    The kernel takes 16-bit operands without a bias, 64 | K and 64 | F, and activations that Mosaic knows. It needs jax
    0.11.2. In FP8 the scale of a row of a has 128 columns of gate and of up, for whose sums a consumer lacks registers.
    """
    if isinstance(x, KMajorFp8) or bias is not None or not MERGES_DIMS or not supports_activation(act, gates == 2):
        return matmul(x, w, groups, dtype, bias), None
    (x, gather_idx), w = _with_gather_idx(x, dtype), to_array(w, dtype)
    if w.shape[1] % GATHER_WIDTH or w.shape[2] % (gates * GATHER_WIDTH):
        return _matmul(x, w, groups.blocks, dtype, None, False, gather_idx), None

    @jax.custom_batching.custom_vmap
    def together(x, w, blocks, gather_idx):
        w = w.reshape(*w.shape[:2], gates, -1)
        tile = with_projections(_pick_tile("matmul", w.shape[1], gates * w.shape[3], blocks), gates, w.shape[3])
        h, a = grouped_matmul_activate(x, w, blocks, tile, act, source=gather_idx)
        return h.reshape(h.shape[0], -1), a

    @together.def_vmap
    def apart(size, batched, *operands):  # the copy engine takes a weight with gate and up in no more dims
        def each(x, w, blocks, gather_idx):
            h = _matmul(x, w, blocks, dtype, None, False, gather_idx)
            return h, activate_rows(h, blocks, act, gated=gates == 2)

        axes = [jax.tree.map(lambda one: 0 if one else None, of) for of in batched]
        return jax.vmap(each, axes, axis_size=size)(*operands), (True, True)

    return together(x, w, groups.blocks, gather_idx)


def wgrad(
    x: Any, dy: Any, groups: BlockedGroups, dtype: Any, out_dtype: Any = None, total: Any = None
) -> Float[Array, "E K N"]:
    """dw[g] = sum over rows m of group g: x[m]^T dy[m], in float32.

    In FP8 the operands are transposed, [K, M] and [N, M]. Both are 0 in padding, and one of them may be GatheredRows.
    The sum with `total` is in the memory of `total`.
    """
    out_dtype = total.dtype if total is not None else dtype if out_dtype is None else out_dtype
    if isinstance(x, KMajorFp8):
        tile = _pick_tile("wgrad_fp8", x.data.shape[0], dy.data.shape[0], groups.blocks)
        return grouped_wgrad(x, dy, groups.blocks, tile, out_dtype=out_dtype, total=total)
    (x, of_x), (dy, of_dy) = (_with_gather_idx(v, dtype) for v in (x, dy))
    tile = _pick_tile("wgrad", x.shape[1], dy.shape[1], groups.blocks)
    tile = tile if of_x is None and of_dy is None else dataclasses.replace(tile, cluster=1)
    tile = tile if of_dy is None else turn_tile(tile, x.shape[1])
    source, gathers = (of_x, "x") if of_dy is None else (of_dy, "dy")
    return grouped_wgrad(x, dy, groups.blocks, tile, out_dtype=out_dtype, total=total, source=source, gathers=gathers)


def bias_grad(dy: Float[Array, "M *C"], groups: BlockedGroups) -> Float[Array, "E *C"]:
    """dbias[g] = sum over rows m of group g: dy[m], in float32. dy is 0 in padding."""
    if groups.sizes is None:
        return dy.astype(jnp.float32).sum(0, keepdims=True)
    ones = jnp.ones((dy.shape[0], HOPPER_WIDTH), dy.dtype)  # a product takes a fraction of the time of XLA's scatter
    sums = wgrad(ones, dy.reshape(dy.shape[0], -1), groups, dy.dtype, jnp.float32)
    return sums[:, 0].reshape(groups.sizes.shape[0], *dy.shape[1:])


def activate(
    h: Float[Array, "N G F"], act: Callable, recipe: Recipe, groups: BlockedGroups, *, weights: Any, amax_over: Names
) -> Any:
    """Returns the Operand of act(h) times the weight of each row; XLA computes what the kernels do not know."""
    flat, gated = h.reshape(h.shape[0], -1), h.shape[1] == 2
    with jax.named_scope("activate"):
        if not supports_activation(act, gated):
            ones = jnp.ones(h.shape[0], jnp.float32) if weights is None else weights
            a = xla.activate_rows(h, act, groups, ones)
        elif _fuses(recipe, recipe, h.shape[2]):
            format = cast(Format, recipe.x)
            return kernels.activate_quantize(flat, groups.blocks, act, gated=gated, weights=weights, format=format)
        else:
            a = activate_rows(flat, groups.blocks, act, gated=gated, weights=weights)
    return quantize_for_matmul(a, recipe, "x", groups, amax_over, columns=False)[0]


def activate_grad(
    h: Float[Array, "N G F"], d_a: Float[Array, "N F"], act: Callable, groups: BlockedGroups,
    weights: Float[Array, " N"],
) -> tuple[Float[Array, "N F"], Float[Array, "N G F"], Float[Array, " N"]]:  # fmt: skip
    """Returns act(h) times the weights, d_h, and inner [N], which is <d_a, act(h)> of each row."""
    if not supports_activation(act, h.shape[1] == 2):
        a, d_h, inner = xla.activate_grad(h, d_a, act, groups, weights)
        return a, zero_rows(d_h, groups.real), inner  # padding of h may hold NaN, which 0 does not undo
    with jax.named_scope("activate"):
        a, d_h, inner = activate_grad_rows(h.reshape(h.shape[0], -1), d_a, groups.blocks, act, weights=weights)
    return a, d_h.reshape(h.shape), inner.sum(0)


def activate_grad_quantize(
    h: Float[Array, "N G F"], d_a: Float[Array, "N F"], act: Callable, recipes: Recipes, groups: BlockedGroups, *,
    weights: Float[Array, " N"], amax_over: Names,
) -> tuple[Any, Any, Any, Float[Array, " N"]]:  # fmt: skip
    """Computes the backward of `activate`, quantized."""
    if supports_activation(act, h.shape[1] == 2) and _fuses(recipes.wo, recipes.wi, h.shape[2]):
        flat = h.reshape(h.shape[0], -1)
        how: Any = dict(weights=weights, of_a=recipes.wo.x, of_h=recipes.wi.dy)
        with jax.named_scope("activate"):
            found = kernels.activate_grad_quantize(flat, d_a, groups.blocks, act, **how)
        return *found[:3], found[3].sum(0)
    a, d_h, inner = activate_grad(h, d_a, act, groups, weights)
    _, a = quantize_for_matmul(a, recipes.wo, "x", groups, amax_over, rows=False)
    return a, *quantize_for_matmul(d_h, recipes.wi, "dy", groups, amax_over), inner


def supports_activation(act: Callable, gated: bool) -> bool:
    """Returns whether the kernels can compute an activation; the log says once why they cannot."""
    why = kernels.why_not_in_kernels(act, gated)
    if why is not None:
        log_once(f"kernels='hopper': the kernels do not know {why} of the activation; XLA computes it, which is slower")
    return why is None


def _fuses(of_a: Recipe, of_h: Recipe, width: int) -> bool:
    """Returns whether one kernel activates and quantizes: a by one recipe, and d_h by another."""
    if not supports_fp8(of_a) or not supports_fp8(of_h) or width % BLOCK:
        return False
    x, dy = cast(Format, of_a.x), cast(Format, of_h.dy)  # a kernel takes powers of two, or none, for all scales
    return x.block is not None and dy.block is not None and (x.scale == "float32") == (dy.scale == "float32")


def _with_gather_idx(x, dtype):
    """Returns the rows of an operand in this dtype, and their gather_idx where the product gathers them."""
    return (x.x.astype(dtype), x.gather_idx) if isinstance(x, GatheredRows) else (to_array(x, dtype), None)


def _pick_tile(op: str, contracted: int, columns: int, blocks: Blocks):
    """Returns the TileConfig of a product with these blocks on this device."""
    rows = blocks.group.shape[0] * BLOCK // blocks.sizes.shape[0]
    tile = pick_tile(op, contracted, columns, rows, device_kind())
    return tile if is_alone() and op not in HALVES else dataclasses.replace(tile, waves=WAVES)
