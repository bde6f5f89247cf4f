"""The implementation for Hopper GPUs: the functions of `moax.kernels.xla` by Pallas Mosaic kernels.

Each file of the folder `pallas` has the kernels of one op, which take arrays and a TileConfig and know neither meshes
nor configs. Every product works on blocks of 128 expert-sorted rows (`formats.Blocks`), and FP8 operands are K-major
(`formats.KMajorFp8`). XLA computes what the kernels do not take: it quantizes operands of other recipes, and the
products multiply them in bfloat16.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from moax.checks import log_once
from moax.kernels import Role, xla
from moax.kernels.device import HOPPER_WIDTH, find_device
from moax.kernels.groups import Groups, Packing, align_up, sum_before, zero_rows
from moax.kernels.hopper.formats import (
    BLOCK,
    COPY_WIDTH,
    GATHER_WIDTH,
    HALF,
    BlockedGroups,
    Blocks,
    GatheredRows,
    KMajorFp8,
    data_of,
    find_groups,
    supports_fp8,
)
from moax.kernels.hopper.pallas import activation, permute, plan
from moax.kernels.hopper.pallas.exchange import put_rows as put_rows
from moax.kernels.hopper.pallas.matmul import MERGES_DIMS, grouped_matmul, grouped_matmul_activate
from moax.kernels.hopper.pallas.permute import gather_sum as gather_sum
from moax.kernels.hopper.pallas.quantize import dequantize_rows, quantize_rows, quantize_weight
from moax.kernels.hopper.pallas.tiles import pick_tile, turn_tile, with_projections
from moax.kernels.hopper.pallas.wgrad import grouped_wgrad
from moax.kernels.scales import DTYPES, block_max, dequantize, find_scale_axes, max_of_groups, to_scale
from moax.mesh.axes import Names
from moax.mesh.collectives import gather_weight, is_alone, reduce_max
from moax.recipe import FULL, Contracted, Format, Recipe, Recipes
from moax.types import QArray, QShard

__all__ = xla.__all__
# With one wave, thread-block clusters drift apart, and weights leave L2 before every cluster has read them.
# A product whose tiles take equal times needs several waves beside a collective alone, since they cost it 1 to 3 %.
WAVES = 4
HALVES = ("matmul", "matmul_transposed")  # the products with half tiles
GATHER_HIDDEN = 1536  # for wider experts it is faster to sort the rows first (benchmarks/LOG.md, 2026-11-24)


def choose_rows(recipe: Recipe, role: Role, width: int, hidden: int) -> tuple[int, bool]:
    """Returns the alignment of groups, and whether products shall gather rows: those of narrow experts."""
    # In FP8 128 rows share a scale, and 64 else suffice.
    align = math.lcm(recipe.row_alignment, BLOCK if supports_fp8(recipe) else HALF)
    # Products that gather take up to 29 % longer. A kernel that sorts the rows first takes longer than that; in FP8 it
    # quantizes rows for wgrad too.
    narrow = width % GATHER_WIDTH == 0 == hidden % GATHER_WIDTH and hidden <= GATHER_HIDDEN
    return align, narrow and getattr(recipe, role) is None


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def top_k(x: Float[Array, "T E"], k: int):
    """Returns the k largest of each row of x and their indices i32."""
    return plan.top_k_rows(x, k) if plan.supports_top_k(x.shape, k) else xla.top_k(x, k)


@top_k.defjvp
def _top_k_jvp(k: int, primals, tangents):
    values, indices = top_k(*primals, k)
    tangent = jnp.take_along_axis(tangents[0], indices, axis=1)
    return (values, indices), (tangent, np.zeros(indices.shape, jax.dtypes.float0))


def build_permutation(
    experts: Int[Array, "R K"], num_groups: int, align: int, num_rows: int, weights: Any = None,
    keep: Callable | None = None,
):  # fmt: skip
    """Returns gather_idx, scatter_idx, group sizes and row weights."""
    if not plan.supports(experts.shape, num_groups):
        return xla.build_permutation(experts, num_groups, align, num_rows, weights, keep)
    counted = plan.count_groups(experts, num_groups)
    part = None if keep is None else keep(counted.counts.sum(0)[:num_groups])
    return plan.build_permutation(experts, counted, num_groups, align, num_rows, weights, part)


def gather_rows(x: Float[Array, "R H"], gather_idx: Int[Array, " N"], groups: Groups | None = None):
    """rows[n] = x[gather_idx[n]]."""
    rows = gather_idx.shape[0]
    gather_idx = jnp.pad(gather_idx, (0, -rows % HALF), constant_values=x.shape[0])
    blocks = groups.blocks if isinstance(groups, BlockedGroups) else None
    return permute.gather_rows(x, gather_idx, blocks)[:rows]


def pack_rows(group_sizes: Int[Array, " E"] | None, align: int, num_rows: int) -> Packing:
    """Packs rows to groups at multiples of 128: in groups (3, 2) at align 4, row 4 moves to row 128."""
    if group_sizes is None or align == BLOCK:
        groups = find_groups(group_sizes, BLOCK, align_up(num_rows, BLOCK))

        def pad(x):
            return zero_rows(jnp.pad(x, [(0, -x.shape[0] % BLOCK), *[(0, 0)] * (x.ndim - 1)]), groups.real)

        return Packing(groups, pad, lambda y: zero_rows(y, groups.real)[:num_rows])

    rows = align_up(num_rows + group_sizes.shape[0] * (BLOCK - 1), BLOCK)
    groups = find_groups(group_sizes, BLOCK, rows)
    unpacked, packed = (sum_before(align_up(group_sizes, multiple)) for multiple in (align, BLOCK))

    def index(of, to, align, size, none):
        """Returns the row at `to` of each of `size` rows that lie at `of`, and `none` for padding."""
        at = xla.find_groups(group_sizes, align, size)
        return jnp.where(at.real, to[at.index] + jnp.arange(size, dtype=jnp.int32) - of[at.index], none)

    gather_idx = index(packed, unpacked, BLOCK, rows, num_rows)
    scatter_idx = index(unpacked, packed, align, num_rows, rows)

    def pack(x):
        return gather_rows(x.reshape(x.shape[0], -1), gather_idx).reshape(-1, *x.shape[1:])

    return Packing(groups, pack, lambda y: gather_rows(y, scatter_idx))


def quantize_for_matmul(
    x: Array, recipe: Recipe, role: Role, groups: BlockedGroups, amax_over: Names = (),
    *, gather_idx: Any = None, in_products: bool = False, rows: bool = True, columns: bool = True,
) -> tuple[Any, Any]:  # fmt: skip
    """Quantizes rows as [M, C] for a product over columns and as [C, M] for wgrad, in one read, sorted or not."""
    if not (rows or columns):
        return None, None
    format: Any = getattr(recipe, role)
    if in_products and format is None:
        return (GatheredRows(x, gather_idx),) * 2
    fp8 = supports_fp8(recipe)
    if gather_idx is not None and not (fp8 and format.block):  # the kernel gathers where each block has a scale
        with jax.named_scope("permute"):
            x, gather_idx = gather_rows(x, gather_idx, groups), None
    if not fp8:
        return xla.quantize_for_matmul(x, recipe, role, groups, amax_over)
    with jax.named_scope("quantize"):
        x, scale = x.reshape(x.shape[0], -1), None
        if format.by_group:  # a block of 128 rows lies in one group
            scale = to_scale(max_of_groups(x, groups)[::BLOCK], format)
        elif format.block is None:
            amax = block_max(zero_rows(x, groups.real), (None, None))
            scale = to_scale(reduce_max(amax, amax_over), format).reshape(1)
        how: Any = dict(rows=rows, columns=columns, scale=scale, source=gather_idx)
        return quantize_rows(x, groups.blocks, format=format, **how)


def matmul(
    x: Any, w: Any, groups: BlockedGroups, dtype: Any, bias: Any = None, *, transpose: bool = False
) -> Float[Array, "M N"]:
    """y[m] = x[m] w[g(m)] + bias[g(m)], rounded after the bias. In FP8 w is K-major: `transpose` does not matter."""
    bias = None if bias is None else bias.reshape(bias.shape[0], -1)
    (x, source), (w, _) = _unpack(x, dtype), _unpack(w, dtype)
    return _matmul(x, w, groups.blocks, dtype, source, bias, transpose)


def _matmul(x, w, blocks: Blocks, dtype, source=None, bias=None, transpose: bool = False):
    fp8 = isinstance(x, KMajorFp8)
    op = "matmul_fp8" if fp8 else "matmul_transposed" if transpose else "matmul"
    columns = data_of(w).shape[1 if fp8 or transpose else 2]
    tile = _pick_tile(op, data_of(x).shape[1], columns, blocks, source)
    return grouped_matmul(x, w, blocks, tile, transpose=transpose, bias=bias, source=source, out_dtype=dtype)


def matmul_activate(
    x: Any, w: Any, groups: BlockedGroups, dtype: Any, act: Callable, gates: int, bias: Any = None
) -> tuple[Float[Array, "M GF"], Any]:
    """h[m] = x[m] w[g(m)] + bias[g(m)], with a = act(h) [M, F] from one kernel where that takes it, else with None.

    The kernel takes 16-bit operands without a bias, 64 | K and 64 | F, and activations that Mosaic knows. It needs jax
    0.11.2. In FP8 the scale of a row of a has 128 columns of gate and of up, for whose sums a consumer lacks registers.
    """
    if isinstance(x, KMajorFp8) or bias is not None or not MERGES_DIMS or not supports_activation(act, gates == 2):
        return matmul(x, w, groups, dtype, bias), None
    (x, source), (w, _) = _unpack(x, dtype), _unpack(w, dtype)
    if w.shape[1] % GATHER_WIDTH or w.shape[2] % (gates * GATHER_WIDTH):
        return _matmul(x, w, groups.blocks, dtype, source), None

    @jax.custom_batching.custom_vmap
    def together(x, w, blocks, source):
        w = w.reshape(*w.shape[:2], gates, -1)
        tile = _pick_tile("matmul", w.shape[1], gates * w.shape[3], blocks)
        h, a = grouped_matmul_activate(x, w, blocks, with_projections(tile, gates, w.shape[3]), act, source=source)
        return h.reshape(h.shape[0], -1), a

    @together.def_vmap
    def apart(size, batched, *operands):  # the copy engine takes a weight with gate and up in no more dims
        def each(x, w, blocks, source):
            h = _matmul(x, w, blocks, dtype, source)
            return h, activation.activate_rows(h, blocks, act, gated=gates == 2)

        axes = [jax.tree.map(lambda one: 0 if one else None, of) for of in batched]
        return jax.vmap(each, axes, axis_size=size)(*operands), (True, True)

    return together(x, w, groups.blocks, source)


def wgrad(
    x: Any, dy: Any, groups: BlockedGroups, dtype: Any, out_dtype: Any = None, total: Any = None
) -> Float[Array, "E K N"]:
    """dw[g] = sum over rows m of group g: x[m]^T dy[m], of operands with 0 in padding; FP8 has [K, M] and [N, M]."""
    out_dtype = total.dtype if total is not None else dtype if out_dtype is None else out_dtype
    (x, of_x), (dy, of_dy) = _unpack(x, dtype), _unpack(dy, dtype)
    op, dim = ("wgrad_fp8", 0) if isinstance(x, KMajorFp8) else ("wgrad", 1)
    source, gathers = (of_x, "x") if of_dy is None else (of_dy, "dy")
    rows, columns = (data_of(v).shape[dim] for v in (x, dy))
    tile = _pick_tile(op, rows, columns, groups.blocks, source)
    tile = tile if of_dy is None else turn_tile(tile, rows)
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
            a = zero_rows(xla.activate(h, act, FULL, groups, weights=weights, amax_over=()), groups.real)
        elif _fuses(recipe, recipe, h.shape[2]):
            format = cast(Format, recipe.x)
            return activation.activate_quantize(flat, groups.blocks, act, gated=gated, weights=weights, format=format)
        else:
            a = activation.activate_rows(flat, groups.blocks, act, gated=gated, weights=weights)
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
        flat = h.reshape(h.shape[0], -1)
        a, d_h, inner = activation.activate_grad_rows(flat, d_a, groups.blocks, act, weights=weights)
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
            found = activation.activate_grad_quantize(flat, d_a, groups.blocks, act, **how)
        return *found[:3], found[3].sum(0)
    a, d_h, inner = activate_grad(h, d_a, act, groups, weights)
    _, a = quantize_for_matmul(a, recipes.wo, "x", groups, amax_over, rows=False)
    return a, *quantize_for_matmul(d_h, recipes.wi, "dy", groups, amax_over), inner


def supports_activation(act: Callable, gated: bool) -> bool:
    """Returns whether the kernels can compute an activation; the log says once why they cannot."""
    why = activation.why_not_in_kernels(act, gated)
    if why is not None:
        log_once(f"kernels='hopper': the kernels do not know {why} of the activation; XLA computes it, which is slower")
    return why is None


def _fuses(of_a: Recipe, of_h: Recipe, width: int) -> bool:
    """Returns whether one kernel activates and quantizes: a by one recipe, and d_h by another."""
    if not supports_fp8(of_a) or not supports_fp8(of_h) or width % BLOCK:
        return False
    x, dy = cast(Format, of_a.x), cast(Format, of_h.dy)
    return x.block is not None and dy.block is not None and (x.scale == "float32") == (dy.scale == "float32")


def _unpack(x, dtype) -> tuple[Any, Any]:
    """Returns an operand as a product takes it, in this dtype unless it is FP8, and its gather_idx or None."""
    if isinstance(x, KMajorFp8):
        return x, None
    return (x.x.astype(dtype), x.gather_idx) if isinstance(x, GatheredRows) else (dequantize(x, dtype), None)


def _pick_tile(op: str, contracted: int, columns: int, blocks: Blocks, source=None):
    """Returns the TileConfig of a product with these blocks on this device, which gathers by `source`."""
    rows = blocks.group.shape[0] * BLOCK // blocks.sizes.shape[0]
    tile = pick_tile(op, contracted, columns, rows, find_device().device_kind)
    waves = tile.waves if is_alone() and op not in HALVES else WAVES
    return dataclasses.replace(tile, cluster=tile.cluster if source is None else 1, waves=waves)


def stores_weight_transposed(recipe: Recipe, contracted: Contracted) -> bool:
    """Returns whether a quantized shard has the dims (E, *C, K): FP8 products read both operands along K."""
    return supports_fp8(recipe) and contracted == "rows"


@jax.named_scope("quantize")
def quantize_shard(
    w: Array, recipe: Recipe, contracted: Contracted, gather: Sequence[Names], amax_over: Names
) -> QShard:
    """Quantizes a weight's shard [E, K, *C], and turns it for a product over rows."""
    if not supports_fp8(recipe):
        return xla.quantize_shard(w, recipe, contracted, gather, amax_over)
    format, turned = cast(Format, recipe.w), stores_weight_transposed(recipe, contracted)
    (experts, rows, *columns), apart = w.shape, any(gather[2:])
    whole_blocks = find_scale_axes(w.shape, format, contracted, gather) is not None
    # Where a shard ends inside a block, the maximum of the block comes from several devices.
    if not whole_blocks or rows % COPY_WIDTH or math.prod(columns) % COPY_WIDTH:
        if format.scale == "e8m0":  # the products take these scales in float32
            recipe = dataclasses.replace(recipe, w=dataclasses.replace(format, scale="pow2"))
        made = xla.quantize_shard(w, recipe, contracted, gather, amax_over)
        return QShard(*(jnp.moveaxis(v, 1, -1) if turned else v for v in made))
    flat, given = w.reshape(experts, rows, -1), None
    if format.block is None:
        given = to_scale(reduce_max(block_max(flat, (1, None, None)), amax_over), format)
    made: Any = quantize_weight(flat, format=format, transposed=turned, scale=None if given is None else given[:, 0, 0])
    data = lax.bitcast_convert_type(made.data, jnp.uint8).reshape(_turn(w.shape, turned))
    if given is not None:
        return QShard(data, given)
    blocks = (*columns[:-1], columns[-1] // BLOCK) if apart else (-(-math.prod(columns) // BLOCK),)
    return QShard(data, made.scale.reshape(_turn((experts, -(-rows // BLOCK), *blocks), turned)))


def gather_shard(shard: QShard, recipe: Recipe, contracted: Contracted, gather: Sequence[Names]) -> Any:
    """Returns the whole weight, K-major, from a quantized shard of it: [E, C, K] for a product over rows."""
    if not supports_fp8(recipe):
        return xla.gather_shard(shard, recipe, contracted, gather)
    format, turned, shape = cast(Format, recipe.w), stores_weight_transposed(recipe, contracted), shard.data.shape
    shape = (shape[0], shape[-1], *shape[1:-1]) if turned else shape
    along = find_scale_axes(shape, format, contracted, gather) or (gather[0], (), ())
    whole = gather_weight(shard.data, _turn(gather, turned)), gather_weight(shard.scale, _turn(along, turned))
    # [E, *C, K] becomes [E, C, K], and [E, K, *C] becomes [E, K, C].
    data, scale = (v.reshape(v.shape[0], *((-1, v.shape[-1]) if turned else (v.shape[1], -1))) for v in whole)
    blocks = (data.shape[0], -(-data.shape[1] // BLOCK), -(-data.shape[2] // BLOCK))
    return KMajorFp8(lax.bitcast_convert_type(data, DTYPES[format.dtype]), jnp.broadcast_to(scale, blocks))


def _turn(dims: Sequence, turned: bool) -> tuple:
    """Returns the dims (e, k, *c) as (e, *c, k) if `turned`."""
    return (dims[0], *dims[2:], dims[1]) if turned else tuple(dims)


def quantize(x: Array, format: Format, block: tuple[int | None, ...], amax_over: Names = ()) -> QArray:
    """Returns the QArray of x in blocks of any lengths. The kernel takes blocks of 128 columns."""
    if block != format.row_block(x.ndim, "columns") or not _supports_wire(format, math.prod(x.shape[:-1]), x.shape[-1]):
        return xla.quantize(x, format, block, amax_over)
    made: Any = quantize_rows(x.reshape(-1, x.shape[-1]), None, format=format, columns=False, by_row=True)[0]
    data = lax.bitcast_convert_type(made.data, jnp.uint8).reshape(x.shape)
    return QArray(data, made.scale.reshape(*x.shape[:-1], -1), format.dtype, block)


def dequantize_wire(data: Array, words: Array, ends: Int[Array, " N"], format: Format, dtype: Any):
    """Returns rows [R, C] from their bytes and words."""
    if not _supports_wire(format, *data.shape):
        return xla.dequantize_wire(data, words, ends, format, dtype)
    return dequantize_rows(lax.bitcast_convert_type(data, DTYPES[format.dtype]), words, ends, dtype=dtype)


def _supports_wire(format: Format, rows: int, width: int) -> bool:
    """Returns whether the kernels quantize and dequantize so many rows of this format and width for the wire."""
    return format.block == BLOCK and format.scale != "e8m0" and rows % BLOCK == 0 and width % HOPPER_WIDTH == 0
