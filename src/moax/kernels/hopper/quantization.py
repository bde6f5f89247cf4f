"""Quantization for Hopper: rows and weights as operands of FP8 products, and rows on the wire; else by XLA."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moax.groups import zero_rows
from moax.kernels.hopper import WIDTH
from moax.kernels.hopper.formats import BLOCK, COPY_WIDTH, BlockedGroups, Blocks, GatheredRows, KMajorFp8, supports_fp8
from moax.kernels.hopper.pallas import quantize as kernels
from moax.kernels.hopper.rows import gather_rows
from moax.kernels.scales import (
    DTYPES,
    cuts_blocks,
    find_scale_axes,
    finite_abs,
    is_pow2,
    to_scale,
    weight_format,
)
from moax.kernels.xla import quantization as xla
from moax.mesh.axes import Names
from moax.mesh.collectives import gather_weight, reduce_max
from moax.recipe import Contracted, Format, Recipe
from moax.types import QArray, QShard


def quantize_for_matmul(
    x: Array, recipe: Recipe, role: str, groups: BlockedGroups, amax_over: Names = (),
    *, rows: bool = True, columns: bool = True,
) -> tuple[Any, Any]:  # fmt: skip
    """Quantizes rows as [M, C] for a product over columns and as [C, M] for wgrad, in one read."""
    if not supports_fp8(recipe):
        return xla.quantize_for_matmul(x, recipe, role, groups, amax_over)
    format: Format = getattr(recipe, role)
    with jax.named_scope("quantize"):
        x, scale = x.reshape(x.shape[0], -1), None
        real = x if groups.real is None or format.block is not None else zero_rows(x, groups.real)
        if format.by_group:  # a block of 128 rows lies in one group
            scale = to_scale(xla.max_of_groups(finite_abs(real).max(1), groups)[::BLOCK], format)
        elif format.shared:
            scale = to_scale(reduce_max(jnp.max(finite_abs(real)), amax_over), format).reshape(1)
        return _quantize_rows(x, groups.blocks, format, scale=scale, rows=rows, columns=columns)


def gather_and_quantize(
    x: Float[Array, "R H"],
    gather_idx: Int[Array, " N"],
    recipe: Recipe,
    role: str,
    groups: BlockedGroups,
    amax_over: Names = (),
    *,
    rows: bool = True,
    columns: bool = True,
    in_products: bool = False,
) -> tuple[Any, Any]:
    """Runs `quantize_for_matmul` on the rows x[gather_idx], in one kernel where each block has a scale."""
    format: Format | None = getattr(recipe, role)
    if in_products and format is None:
        return (GatheredRows(x, gather_idx),) * 2
    if supports_fp8(recipe) and format is not None and format.block is not None:
        with jax.named_scope("quantize"):
            return _quantize_rows(x, groups.blocks, format, source=gather_idx, rows=rows, columns=columns)
    with jax.named_scope("permute"):
        gathered = gather_rows(x, gather_idx, groups)
    return quantize_for_matmul(gathered, recipe, role, groups, amax_over, rows=rows, columns=columns)


def _quantize_rows(x, blocks: Blocks, format: Format, *, scale=None, source=None, rows=True, columns=True):
    if not (rows or columns):
        return None, None
    options = dict(source=source, dtype=DTYPES[format.dtype], pow2=is_pow2(format), scale=scale)
    return kernels.quantize_rows(x, blocks, rows=rows, columns=columns, **options)


def gather_shard(shard: QShard, recipe: Recipe, contracted: Contracted, gather: Sequence[Names]) -> Any:
    """Returns the whole weight, K-major, from a quantized shard of it: [E, C, K] for a product over rows."""
    if not supports_fp8(recipe):
        return xla.gather_shard(shard, recipe, contracted, gather)
    format, turned, shape = weight_format(recipe), stores_weight_transposed(recipe, contracted), shard.data.shape
    shape = (shape[0], shape[-1], *shape[1:-1]) if turned else shape
    along = find_scale_axes(shape, format, contracted, gather)
    data, scale = gather_weight(shard.data, _turn(gather, turned)), gather_weight(shard.scale, _turn(along, turned))
    data, scale = _flatten_columns(data, turned), _flatten_columns(scale, turned)
    blocks = (data.shape[0], -(-data.shape[1] // BLOCK), -(-data.shape[2] // BLOCK))
    return KMajorFp8(lax.bitcast_convert_type(data, DTYPES[format.dtype]), jnp.broadcast_to(scale, blocks))


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
    format, turned = weight_format(recipe), stores_weight_transposed(recipe, contracted)
    (experts, rows, *columns), apart = w.shape, any(gather[2:])
    cut = cuts_blocks(w.shape, gather, format, contracted)
    # Where a shard ends inside a block, the maximum of the block comes from several devices.
    if cut or rows % COPY_WIDTH or math.prod(columns) % COPY_WIDTH:
        made = xla.quantize_weight(w, format, contracted, gather, amax_over)
        return QShard(*(jnp.moveaxis(v, 1, -1) if turned else v for v in made))
    flat, given = w.reshape(experts, rows, -1), None
    if format.block is None:
        given = to_scale(reduce_max(finite_abs(flat).max((1, 2)), amax_over), format)
    how = dict(dtype=DTYPES[format.dtype], pow2=is_pow2(format), scale=given)
    made: Any = kernels.quantize_weight(flat, native=not turned, transposed=turned, **how)[turned]
    data = lax.bitcast_convert_type(made.data, jnp.uint8).reshape(experts, *_turn((1, rows, *columns), turned)[1:])
    if given is not None:
        return QShard(data, given[:, None, None])
    blocks = (*columns[:-1], columns[-1] // BLOCK) if apart else (-(-math.prod(columns) // BLOCK),)
    scale = made.scale.reshape(experts, *_turn((1, -(-rows // BLOCK), *blocks), turned)[1:])
    return QShard(data, scale)


def _turn(dims: Sequence, turned: bool) -> tuple:
    """Returns the dims (e, k, *c) as (e, *c, k) if `turned`."""
    return (dims[0], *dims[2:], dims[1]) if turned else tuple(dims)


def _flatten_columns(v, turned: bool):
    """Returns [E, *C, K] as [E, C, K] if `turned`, else [E, K, *C] as [E, K, C]."""
    return v.reshape(v.shape[0], -1, v.shape[-1]) if turned else v.reshape(*v.shape[:2], -1)


def quantize(x: Array, format: Format, block: tuple[int | None, ...], amax_over: Names = ()) -> QArray:
    """Returns the QArray of x in blocks of any lengths. The kernel takes blocks of 128 columns, and XLA all others."""
    if block != format.row_block(x.ndim, "columns") or not supports_wire(format, math.prod(x.shape[:-1]), x.shape[-1]):
        return xla.quantize(x, format, block, amax_over)
    how = dict(dtype=DTYPES[format.dtype], pow2=is_pow2(format), columns=False, by_row=True)
    made: Any = kernels.quantize_rows(x.reshape(-1, x.shape[-1]), None, **how)[0]
    data = lax.bitcast_convert_type(made.data, jnp.uint8).reshape(x.shape)
    return QArray(data, made.scale.reshape(*x.shape[:-1], -1), format.dtype, block)


def supports_wire(format: Format, rows: int, width: int) -> bool:
    """Returns whether the kernels quantize and dequantize so many rows of this format and width for the wire."""
    return format.block == BLOCK and format.scale != "e8m0" and rows % BLOCK == 0 and width % WIDTH == 0


def dequantize_wire(data: Array, words: Array, ends: Int[Array, " N"], format: Format, dtype: Any):
    """Returns rows [R, C] from their bytes and words; see `moax.kernels.Implementation`."""
    if not supports_wire(format, *data.shape):
        return xla.dequantize_wire(data, words, ends, format, dtype)
    return kernels.dequantize_rows(lax.bitcast_convert_type(data, DTYPES[format.dtype]), words, ends, dtype=dtype)
