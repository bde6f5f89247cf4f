"""Quantization by XLA: the values and scales of rows and of weights.

    data = round_to_format(x * (1 / scale)),     x ~ data * scale

The Hopper kernels compute the product with the reciprocal too, and XLA turns a division by a broadcast into it. A NaN
or Inf becomes NaN in its own element.
"""

from __future__ import annotations

import dataclasses
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
    find_weight_blocks,
    finite_abs,
    share_weight_maxima,
    spread_scales,
    to_exponent,
    to_scale,
    weight_block,
    weight_format,
)
from moax.mesh.axes import Names
from moax.mesh.collectives import gather_weight, reduce_max
from moax.recipe import Contracted, Format, Recipe
from moax.types import QArray, QShard

Block = tuple[int | None, ...]


def quantize(
    x: Array, format: Format, block: Block, amax_over: Names = (), real: Bool[Array, " M"] | None = None
) -> QArray:
    """Returns the QArray of x in blocks of these lengths; a length None makes the whole dim one block.

    Args:
      x: any shape, floating point.
      format: the format of values and scales.
      block: the block length of each dim.
      amax_over: the mesh axes that split a dim of one block.
      real: [M] bool, whether each row of x is real. Other rows are quantized to 0 and do not enter a scale.
    """
    x = x.astype(jnp.float32)
    if real is not None:
        x = zero_rows(x, real)
    scale = to_scale(reduce_max(_block_max(finite_abs(x), block), amax_over), format)
    q = QArray(x, scale, format.dtype, block)
    data = round_to_format(x * expand_scales(1.0 / scale, q), x, format)
    return dataclasses.replace(q, data=data, scale=_stored(scale, format))


def dequantize_wire(
    data: Array, words: Array, ends: Array | None, format: Format, dtype: DTypeLike
) -> Float[Array, "R C"]:
    """Returns rows [R, C] from their bytes and words; see `moax.kernels.Implementation`."""
    count = -(-data.shape[1] // (format.block or data.shape[1]))
    scale = lax.bitcast_convert_type(words[:, :count], jnp.float32)
    return dequantize(QArray(data, scale, format.dtype, format.row_block(2, "columns")), dtype)


def quantize_for_matmul(
    x: Array, recipe: Recipe, role: str, groups: Groups, amax_over: Names = (),
    *, rows: bool = True, columns: bool = True,
) -> tuple[Array | QArray, Array | QArray]:  # fmt: skip
    """Returns rows [M, ..., C] as [M, C] in blocks of columns and of rows, or in their own dtype without a format.

    It returns both whatever the caller takes, because XLA drops what is not used.
    """
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
    return QArray(data, _stored(scale, format), format.dtype, (1, None))


def max_of_groups(values: Float[Array, " M"], groups: Groups) -> Float[Array, " M"]:
    """Returns for each row the maximum of `values`, which are not negative, over the rows of its group."""
    if groups.sizes is None:
        return jnp.broadcast_to(values.max(), values.shape)
    group = row_groups(groups.sizes, groups.align, values.shape[0])[0]
    return jax.ops.segment_max(values, group, num_segments=groups.sizes.shape[0])[group]


def quantize_and_gather(
    w: Array, recipe: Recipe, contracted: Contracted, gather: Sequence[Names], amax_over: Names, dtype: DTypeLike
) -> Array | QArray:
    """Returns the whole weight [E, K, C] from its shard [E, K, *C]; see `moax.kernels.Implementation`."""
    if recipe.w is None:
        whole = gather_weight(w.astype(dtype), gather)
        return whole.reshape(*whole.shape[:2], -1)
    return gather_shard(quantize_shard(w, recipe, contracted, gather, amax_over), recipe, contracted, gather)


def quantize_shard(
    w: Array, recipe: Recipe, contracted: Contracted, gather: Sequence[Names], amax_over: Names
) -> QShard:
    """Returns the bytes and the scales of a weight's shard [E, K, *C]."""
    format = weight_format(recipe)
    with jax.named_scope("quantize"):
        data, scale = quantize_weight(w, format, contracted, gather, amax_over)
    return QShard(data, _stored(scale, format))


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
    """Quantizes a weight's shard [E, K, *C], gathered over the axes `gather`, in the blocks of the whole weight.

    Returns the data uint8, in the shape of w, and scales f32 of each block, with the dims that `find_scale_axes` gives.
    Where shards end inside a block, these are the scales of the whole matrix. `amax_over` are the mesh axes that split
    the matrix of one expert.
    """
    flat = w.reshape(*w.shape[:2], -1).astype(jnp.float32)
    if format.block is None:
        scale = to_scale(reduce_max(finite_abs(flat).max((1, 2), keepdims=True), amax_over), format)
        inverse = 1.0 / scale
    elif cuts_blocks(w.shape, gather, block := weight_block(format, contracted)):
        blocks = find_weight_blocks(w.shape, gather, block)
        names = tuple(name for names in gather[1:] for name in names)
        scale = to_scale(share_weight_maxima(flat, blocks, names), format)
        inverse = spread_scales(1.0 / scale, blocks, w.shape[1])
    else:
        scale = to_scale(_block_max(finite_abs(flat), (1, *block)), format)
        inverse = expand_scales(1.0 / scale, QArray(flat, scale, format.dtype, (1, *block)))
        if any(gather[2:]):  # each dim of the scale has its own axes, since no block lies in two shards of the last dim
            scale = scale.reshape(*scale.shape[:2], *w.shape[2:-1], -1)
    return round_to_format(flat * inverse, flat, format).reshape(w.shape), scale


def round_to_format(scaled: Array, x: Array, format: Format) -> Array:
    """Returns the bits of `scaled`, which is x * (1 / scale), in the format; NaN where x is not finite."""
    data = scaled.astype(DTYPES[format.dtype])
    if format.dtype == "e5m2":  # e5m2 has an infinity, which becomes NaN as in e4m3
        data = jnp.where(jnp.isfinite(x), data, jnp.array(jnp.nan, data.dtype))
    # XLA on GPUs removes a cast to fewer bits and back; the barrier keeps the rounding.
    return lax.optimization_barrier(lax.bitcast_convert_type(data, jnp.uint8))


def _stored(scale, format: Format):
    return to_exponent(scale) if format.scale == "e8m0" else scale


def _block_max(x, block: Block):
    """Returns the maximum of each block of x, which has no negative values."""
    full = tuple(max(n, 1) if b is None else b for b, n in zip(block, x.shape, strict=True))
    padding = [(0, -n % b) for n, b in zip(x.shape, full, strict=True)]
    x = jnp.pad(x, padding) if any(p for _, p in padding) else x
    split = [m for n, b in zip(x.shape, full, strict=True) for m in (n // b, b)]
    return x.reshape(split).max(axis=tuple(range(1, 2 * x.ndim, 2)))
