"""The operands of Hopper's products: rows sorted, packed and quantized; weights quantized and gathered.

XLA computes what the kernels do not take.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from moax.groups import Groups, align_up, group_starts, row_groups, zero_rows
from moax.groups import find_groups as find_unblocked
from moax.kernels import HOPPER_WIDTH, Packing, Role, quantization, xla
from moax.kernels.hopper.formats import (
    BLOCK,
    COPY_WIDTH,
    HALF,
    BlockedGroups,
    GatheredRows,
    KMajorFp8,
    find_groups,
    supports_fp8,
)
from moax.kernels.hopper.pallas import permute, plan
from moax.kernels.hopper.pallas import quantize as kernels
from moax.kernels.quantization import DTYPES, cuts_blocks, find_scale_axes, finite_abs, to_scale, weight_format
from moax.mesh.axes import Names
from moax.mesh.collectives import gather_weight, reduce_max
from moax.recipe import Contracted, Format, Recipe
from moax.types import QArray, QShard


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
    own = find_unblocked(group_sizes, align, num_rows).real
    if group_sizes is None or align == BLOCK:
        groups = find_groups(group_sizes, BLOCK, align_up(num_rows, BLOCK))

        def pad(x):
            return zero_rows(jnp.pad(x, [(0, -x.shape[0] % BLOCK), *[(0, 0)] * (x.ndim - 1)]), groups.real)

        return Packing(groups, pad, lambda y: zero_rows(y[:num_rows], own))

    rows = align_up(num_rows + group_sizes.shape[0] * (BLOCK - 1), BLOCK)
    groups = find_groups(group_sizes, BLOCK, rows)
    unpacked, packed = group_starts(group_sizes, align), group_starts(group_sizes, BLOCK)

    def index(of, to, align, size, none):
        """Returns the row at `to` of each of `size` rows that lie at `of`, and `none` for padding."""
        group, real = row_groups(group_sizes, align, size)
        return jnp.where(real, to[group] + jnp.arange(size, dtype=jnp.int32) - of[group], none)

    gather_idx, scatter_idx = (
        index(packed, unpacked, BLOCK, rows, num_rows),
        index(unpacked, packed, align, num_rows, rows),
    )

    def pack(x):
        return gather_rows(x.reshape(x.shape[0], -1), gather_idx).reshape(-1, *x.shape[1:])

    return Packing(groups, pack, lambda y: gather_rows(y, scatter_idx))


def quantize_for_matmul(
    x: Array, recipe: Recipe, role: Role, groups: BlockedGroups, amax_over: Names = (),
    *, rows: bool = True, columns: bool = True,
) -> tuple[Any, Any]:  # fmt: skip
    """Quantizes rows as [M, C] for a product over columns and as [C, M] for wgrad, in one read."""
    if not supports_fp8(recipe):
        return quantization.quantize_for_matmul(x, recipe, role, groups, amax_over)
    format: Format = getattr(recipe, role)
    with jax.named_scope("quantize"):
        x, scale = x.reshape(x.shape[0], -1), None
        real = x if format.block is not None else zero_rows(x, groups.real)
        if format.by_group:  # a block of 128 rows lies in one group
            scale = to_scale(quantization.max_of_groups(finite_abs(real).max(1), groups)[::BLOCK], format)
        elif format.shared:
            scale = to_scale(reduce_max(jnp.max(finite_abs(real)), amax_over), format).reshape(1)
        return _quantize_rows(x, groups, format, rows, columns, scale=scale)


def gather_and_quantize(
    x: Float[Array, "R H"], gather_idx: Int[Array, " N"], recipe: Recipe, role: Role, groups: BlockedGroups,
    amax_over: Names = (), *, rows: bool = True, columns: bool = True, in_products: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Runs `quantize_for_matmul` on the rows x[gather_idx], in one kernel where each block has a scale."""
    format: Format | None = getattr(recipe, role)
    if in_products and format is None:
        return (GatheredRows(x, gather_idx),) * 2
    if supports_fp8(recipe) and format is not None and format.block is not None:
        with jax.named_scope("quantize"):
            return _quantize_rows(x, groups, format, rows, columns, source=gather_idx)
    with jax.named_scope("permute"):
        gathered = gather_rows(x, gather_idx, groups)
    return quantize_for_matmul(gathered, recipe, role, groups, amax_over, rows=rows, columns=columns)


def _quantize_rows(x, groups: BlockedGroups, format: Format, rows: bool, columns: bool, **given):
    if not (rows or columns):
        return None, None
    return kernels.quantize_rows(x, groups.blocks, format=format, rows=rows, columns=columns, **given)


def stores_weight_transposed(recipe: Recipe, contracted: Contracted) -> bool:
    """Returns whether a quantized shard has the dims (E, *C, K): FP8 products read both operands along K."""
    return supports_fp8(recipe) and contracted == "rows"


@jax.named_scope("quantize")
def quantize_shard(
    w: Array, recipe: Recipe, contracted: Contracted, gather: Sequence[Names], amax_over: Names
) -> QShard:
    """Quantizes a weight's shard [E, K, *C], and turns it for a product over rows."""
    if not supports_fp8(recipe):
        return quantization.quantize_shard(w, recipe, contracted, gather, amax_over)
    format, turned = weight_format(recipe), stores_weight_transposed(recipe, contracted)
    (experts, rows, *columns), apart = w.shape, any(gather[2:])
    cut = cuts_blocks(w.shape, gather, format, contracted)
    # Where a shard ends inside a block, the maximum of the block comes from several devices.
    if cut or rows % COPY_WIDTH or math.prod(columns) % COPY_WIDTH:
        made = quantization.quantize_weight(w, format, contracted, gather, amax_over)
        return QShard(*(jnp.moveaxis(v, 1, -1) if turned else v for v in made))
    flat, given = w.reshape(experts, rows, -1), None
    if format.block is None:
        given = to_scale(reduce_max(finite_abs(flat).max((1, 2)), amax_over), format)
    made: Any = kernels.quantize_weight(flat, format=format, transposed=turned, scale=given)
    data = lax.bitcast_convert_type(made.data, jnp.uint8).reshape(experts, *_turn((1, rows, *columns), turned)[1:])
    if given is not None:
        return QShard(data, given[:, None, None])
    blocks = (*columns[:-1], columns[-1] // BLOCK) if apart else (-(-math.prod(columns) // BLOCK),)
    scale = made.scale.reshape(experts, *_turn((1, -(-rows // BLOCK), *blocks), turned)[1:])
    return QShard(data, scale)


def gather_shard(shard: QShard, recipe: Recipe, contracted: Contracted, gather: Sequence[Names]) -> Any:
    """Returns the whole weight, K-major, from a quantized shard of it: [E, C, K] for a product over rows."""
    if not supports_fp8(recipe):
        return quantization.gather_shard(shard, recipe, contracted, gather)
    format, turned, shape = weight_format(recipe), stores_weight_transposed(recipe, contracted), shard.data.shape
    shape = (shape[0], shape[-1], *shape[1:-1]) if turned else shape
    along = find_scale_axes(shape, format, contracted, gather)
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
        return quantization.quantize(x, format, block, amax_over)
    made: Any = kernels.quantize_rows(x.reshape(-1, x.shape[-1]), None, format=format, columns=False, by_row=True)[0]
    data = lax.bitcast_convert_type(made.data, jnp.uint8).reshape(x.shape)
    return QArray(data, made.scale.reshape(*x.shape[:-1], -1), format.dtype, block)


def dequantize_wire(data: Array, words: Array, ends: Int[Array, " N"], format: Format, dtype: Any):
    """Returns rows [R, C] from their bytes and words."""
    if not _supports_wire(format, *data.shape):
        return quantization.dequantize_wire(data, words, ends, format, dtype)
    return kernels.dequantize_rows(lax.bitcast_convert_type(data, DTYPES[format.dtype]), words, ends, dtype=dtype)


def _supports_wire(format: Format, rows: int, width: int) -> bool:
    """Returns whether the kernels quantize and dequantize so many rows of this format and width for the wire."""
    return format.block == BLOCK and format.scale != "e8m0" and rows % BLOCK == 0 and width % HOPPER_WIDTH == 0
