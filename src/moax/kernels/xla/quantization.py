"""Quantization by XLA: the values and scales of rows and of weights.

    data = round_to_format(x * (1 / scale)),     x ~ data * scale

The Hopper kernels compute the product with the reciprocal too, and XLA turns a division by a broadcast into it. A NaN
or Inf becomes NaN in its own element.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from moax.groups import Groups, row_groups, zero_rows
from moax.kernels.scales import (
    DTYPES,
    cuts_blocks,
    dequantize,
    expand_scales,
    find_scale_axes,
    finite_abs,
    store_scale,
    to_scale,
    weight_format,
)
from moax.mesh.axes import Names
from moax.mesh.collectives import gather_weight, reduce_max, vary_like
from moax.recipe import Contracted, Format, Recipe
from moax.types import QArray, QShard

Block = tuple[int | None, ...]


def quantize(
    x: Array, format: Format, block: Block, amax_over: Names = (), real: Bool[Array, " M"] | None = None
) -> QArray:
    """Returns the QArray of x; rows that are not `real` are quantized to 0 and do not enter a scale."""
    x = x.astype(jnp.float32)
    if real is not None:
        x = zero_rows(x, real)
    scale = to_scale(reduce_max(_block_max(finite_abs(x), block), amax_over), format)
    q = QArray(x, scale, format.dtype, block)
    data = round_to_format(x * expand_scales(1.0 / scale, q), x, format)
    return dataclasses.replace(q, data=data, scale=store_scale(scale, format))


def dequantize_wire(
    data: Array, words: Array, ends: Array | None, format: Format, dtype: DTypeLike
) -> Float[Array, "R C"]:
    """Returns rows [R, C] from their bytes and words."""
    count = -(-data.shape[1] // (format.block or data.shape[1]))
    scale = lax.bitcast_convert_type(words[:, :count], jnp.float32)
    return dequantize(QArray(data, scale, format.dtype, format.row_block(2, "columns")), dtype)


def quantize_for_matmul(
    x: Array, recipe: Recipe, role: str, groups: Groups, amax_over: Names = (),
    *, rows: bool = True, columns: bool = True,
) -> tuple[Array | QArray, Array | QArray]:  # fmt: skip
    """Returns rows [M, ..., C] as [M, C] in blocks of columns and of rows; XLA drops what the caller does not take."""
    format: Format | None = getattr(recipe, role)
    x = x.reshape(x.shape[0], -1)
    if format is None:
        return x, x
    with jax.named_scope("quantize"):
        if format.by_group:
            return (quantize_groups(x, format, groups),) * 2
        over = amax_over if format.shared else ()
        real = groups.real if format.shared else None  # padding must not enter a scale that all rows share
        by_columns = quantize(x, format, format.row_block(2, "columns"), over, real)
        return by_columns, quantize(x, format, format.row_block(2, "rows"), over, groups.real)


def quantize_groups(x: Float[Array, "M C"], format: Format, groups: Groups) -> QArray:
    """Returns the QArray of rows with a scale for each group, which each row carries: the scales are [M, 1]."""
    x = x.astype(jnp.float32)
    x = x if groups.real is None else zero_rows(x, groups.real)
    scale = to_scale(max_of_groups(finite_abs(x).max(1), groups), format)[:, None]
    data = round_to_format(x * (1.0 / scale), x, format)
    return QArray(data, store_scale(scale, format), format.dtype, (1, None))


def max_of_groups(values: Float[Array, " M"], groups: Groups) -> Float[Array, " M"]:
    """Returns for each row the maximum of `values`, which are not negative, over the rows of its group."""
    if groups.sizes is None:
        return jnp.broadcast_to(values.max(), values.shape)
    group = row_groups(groups.sizes, groups.align, values.shape[0])[0]
    return jax.ops.segment_max(values, group, num_segments=groups.sizes.shape[0])[group]


def quantize_shard(
    w: Array, recipe: Recipe, contracted: Contracted, gather: Sequence[Names], amax_over: Names
) -> QShard:
    """Returns the bytes and the scales of a weight's shard [E, K, *C], in the blocks of the whole weight."""
    format = weight_format(recipe)
    with jax.named_scope("quantize"):
        data, scale = quantize_weight(w, format, contracted, gather, amax_over)
    return QShard(data, store_scale(scale, format))


def gather_shard(shard: QShard, recipe: Recipe, contracted: Contracted, gather: Sequence[Names]) -> QArray:
    """Returns the whole weight [E, K, C] from a quantized shard of it."""
    format = weight_format(recipe)
    along = find_scale_axes(shard.data.shape, format, contracted, gather)
    whole = gather_weight(shard.data, gather), gather_weight(shard.scale, along)
    data, scale = (v.reshape(*v.shape[:2], -1) for v in whole)
    return QArray(data, scale, format.dtype, format.weight_block(3, contracted))


def quantize_weight(
    w: Array, format: Format, contracted: Contracted, gather: Sequence[Names], amax_over: Names
) -> tuple[Array, Array]:
    """Returns the bytes of `quantize_shard`, in the shape of w, and float32 scales."""
    block, flat = format.weight_block(3, contracted), w.reshape(*w.shape[:2], -1).astype(jnp.float32)
    if cuts_blocks(w.shape, gather, format, contracted):
        scale, inverse = _scale_shared_blocks(flat, w.shape, format, contracted, gather)
    else:
        scale = to_scale(reduce_max(_block_max(finite_abs(flat), block), () if format.block else amax_over), format)
        inverse = expand_scales(1.0 / scale, QArray(flat, scale, format.dtype, block))
        if format.block and any(gather[2:]):
            # Each dim of the scale has its own axes, since no block lies in two shards of the last dim.
            scale = scale.reshape(*scale.shape[:2], *w.shape[2:-1], -1)
    return round_to_format(flat * inverse, flat, format).reshape(w.shape), scale


def _scale_shared_blocks(flat, shape, format: Format, contracted: Contracted, gather: Sequence[Names]):
    """Returns the scales of all blocks of the whole weight, and 1 / scale of each element of this shard."""
    # With K = 320, blocks of 128 and two shards of 160 rows, the first shard has block 0 (rows 0 to 127) and a part of
    # block 1 (rows 128 to 159), the second one the rest of block 1 and block 2: both take the maximum of block 1.
    rows, columns = (n or 1 for n in format.weight_block(3, contracted)[1:])
    whole = [n * lax.axis_size(names) for n, names in zip(shape, gather, strict=True)]
    first = [lax.axis_index(names).astype(jnp.int32) * n for n, names in zip(shape, gather, strict=True)]
    column = jnp.zeros((1,), jnp.int32)
    for size, start, n in zip(whole[2:], first[2:], shape[2:], strict=True):  # row-major over the whole dims *C
        column = (column[:, None] * size + start + jnp.arange(n, dtype=jnp.int32)[None]).reshape(-1)
    column_block, count, row_count = column // columns, -(-math.prod(whole[2:]) // columns), -(-whole[1] // rows)

    touched = (shape[1] + 2 * rows - 2) // rows  # as many blocks as the rows of a shard may touch
    maxima = vary_like(jnp.zeros((shape[0], touched * rows, flat.shape[2]), jnp.float32), flat, first[1])
    maxima = lax.dynamic_update_slice_in_dim(maxima, finite_abs(flat), first[1] % rows, 1)
    maxima = maxima.reshape(shape[0], touched, rows, -1).max(2)
    maxima = jax.ops.segment_max(jnp.moveaxis(maxima, 2, 0), column_block, num_segments=count)
    maxima = jnp.moveaxis(jnp.maximum(maxima, 0.0), 0, 2)  # segment_max gives -inf where the shard has no column
    blocks = vary_like(jnp.zeros((shape[0], row_count + touched, count), jnp.float32), maxima)
    blocks = lax.dynamic_update_slice_in_dim(blocks, maxima, first[1] // rows, 1)
    scale = to_scale(reduce_max(blocks[:, :row_count], sum(gather[1:], ())), format)
    row_block = (first[1] + jnp.arange(shape[1], dtype=jnp.int32)) // rows
    return scale, jnp.take(jnp.take(1.0 / scale, row_block, axis=1), column_block, axis=2)


def round_to_format(scaled: Array, x: Array, format: Format) -> Array:
    """Returns the bits of `scaled`, which is x * (1 / scale), in the format; NaN where x is not finite."""
    data = scaled.astype(DTYPES[format.dtype])
    if format.dtype == "e5m2":  # e5m2 has an infinity, which becomes NaN as in e4m3
        data = jnp.where(jnp.isfinite(x), data, jnp.array(jnp.nan, data.dtype))
    # XLA on GPUs removes a cast to fewer bits and back; the barrier keeps the rounding.
    return lax.optimization_barrier(lax.bitcast_convert_type(data, jnp.uint8))


def _block_max(x, block: Block):
    """Returns the maximum of each block of x, which has no negative values."""
    full = tuple(max(n, 1) if b is None else b for b, n in zip(block, x.shape, strict=True))
    padding = [(0, -n % b) for n, b in zip(x.shape, full, strict=True)]
    x = jnp.pad(x, padding) if any(p for _, p in padding) else x
    split = [m for n, b in zip(x.shape, full, strict=True) for m in (n // b, b)]
    return x.reshape(split).max(axis=tuple(range(1, 2 * x.ndim, 2)))
