"""The scales of blocks. All implementations share this arithmetic, so that they give the same numbers.

    scale[b] = max |x| over block b / format.max        (rounded up to a power of two where the format says so)

A NaN or Inf does not enter a maximum. A block of zeros has scale 1.

Blocks of a weight [E, K, *C] divide K, and all columns *C as one dim. They begin at the corner of the whole matrix,
whatever shard of it a device holds. With K = 320, blocks of 128 and two shards of 160 rows, the first shard has
block 0 (rows 0 to 127) and a part of block 1 (rows 128 to 159), the second the rest of block 1 (160 to 255) and
block 2 (256 to 319). Both devices take the maximum of block 1 over both shards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moax.mesh.axes import Names
from moax.mesh.collectives import reduce_max, vary_like
from moax.recipe import Contracted, Format, Recipe
from moax.types import QArray

DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
TINY = 2.0**-126  # the smallest normal float32


def finite_abs(x: Array) -> Float[Array, "..."]:
    """Returns |x| in float32, 0 where x is not finite."""
    x = x.astype(jnp.float32)
    return jnp.where(jnp.isfinite(x), jnp.abs(x), 0.0)


def is_pow2(format: Format) -> bool:
    """Returns whether the scales of a format are powers of two."""
    return format.scale != "float32"


def to_scale(amax: Float[Array, "..."], format: Format) -> Float[Array, "..."]:
    """Returns the float32 scales of blocks with the maxima `amax`."""
    scale = amax * (1.0 / format.max)  # XLA may turn a division by a constant into a product
    scale = jnp.where(scale < TINY, 1.0, scale)
    if not is_pow2(format):
        return scale
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    return lax.bitcast_convert_type((bits + 0x7FFFFF) & ~0x7FFFFF, jnp.float32)  # up, unless it is a power of two


def to_exponent(scale: Float[Array, "..."]) -> Array:
    """Returns the uint8 exponents of scales that are powers of two: scale = 2**(exponent - 127)."""
    return (lax.bitcast_convert_type(scale, jnp.int32) >> 23).astype(jnp.uint8)


def from_exponent(exponent: Array) -> Float[Array, "..."]:
    """Returns 2**(exponent - 127) as float32; `to_exponent` never writes 0, the subnormal 2**-127."""
    return lax.bitcast_convert_type(exponent.astype(jnp.int32) << 23, jnp.float32)


def dequantize(q: QArray, dtype: Any = jnp.float32) -> Float[Array, ...]:
    """x = data * scale, rounded once to `dtype`."""
    data = lax.bitcast_convert_type(q.data, DTYPES[q.dtype]).astype(jnp.float32)
    scale = from_exponent(q.scale) if q.scale.dtype == jnp.uint8 else q.scale
    return (data * expand_scales(scale, q)).astype(dtype)


def to_array(x: Array | QArray, dtype: Any) -> Array:
    """Returns x as an array of this dtype, dequantized if it is a QArray."""
    return dequantize(x, dtype) if isinstance(x, QArray) else x.astype(dtype)


def expand_scales(scale: Array, q: QArray) -> Array:
    """Returns the scale of each element of q. A dim of one block keeps size 1, so that it broadcasts."""
    for dim, (n, b) in enumerate(zip(q.shape, q.block, strict=True)):
        if b == 1 or scale.shape[dim] == 1:
            continue
        scale = jnp.repeat(scale, n if b is None else b, axis=dim)
        # In this form JAX sees that whole blocks have no less than a symbolic n.
        whole = n if b is None else -(-n // b) * b
        scale = scale.reshape(*scale.shape[:dim], whole, *scale.shape[dim + 1 :])
        scale = lax.slice_in_dim(scale, 0, n, axis=dim)
    return scale


class WeightBlocks(NamedTuple):
    """The blocks of a whole weight [E, K, *C], seen from one shard of the weight.

    Attributes:
      block: the block lengths over K and over the columns.
      count: the number of blocks of the whole matrix over K and over the columns.
      first_row: [] i32, the row of the whole matrix that is row 0 of the shard.
      columns: [C of the shard] i32, the block of each column of the shard.
    """

    block: tuple[int, int]
    count: tuple[int, int]
    first_row: Int[Array, ""]
    columns: Int[Array, " C"]


def weight_block(format: Format, contracted: Contracted) -> tuple[int, int]:
    """Returns the block lengths of a weight over K and over its columns. Raises ValueError without blocks."""
    _, rows, columns = format.weight_block(3, contracted)
    if rows is None or columns is None:
        raise ValueError(f"format={format} has one scale for each matrix; it must have blocks")
    return rows, columns


def cuts_blocks(shape: Sequence[int], gather: Sequence[Names], block: tuple[int, int]) -> bool:
    """Returns whether a shard [E, K, *C], gathered over these axes, may end inside a block of the whole weight."""
    rows = bool(gather[1]) and shape[1] % block[0] != 0
    return rows or (any(gather[2:]) and shape[-1] % block[1] != 0)


def weight_format(recipe: Recipe) -> Format:
    """Returns the format of weights. Raises ValueError where the recipe quantizes no weight."""
    if recipe.w is None:
        raise ValueError(f"recipe={recipe} quantizes no weight; its field w must be a Format")
    return recipe.w


def find_scale_axes(
    shape: Sequence[int], format: Format, contracted: Contracted, gather: Sequence[Names]
) -> tuple[Names, ...]:
    """Returns the mesh axes over which each dim of a weight's scales is gathered, as `gather` has those of its data.

    Where a shard [E, K, *C] ends inside a block, or one scale holds for a matrix, every shard has the scales of the
    whole matrix, and E alone is gathered. The columns of the scales are one dim, unless columns are gathered: then each
    of them has its own axes, and no block lies in two shards of the last one.
    """
    if format.block is None or cuts_blocks(shape, gather, weight_block(format, contracted)):
        return (gather[0], (), ())
    return tuple(gather) if any(gather[2:]) else (gather[0], gather[1], ())


def find_weight_blocks(shape: Sequence[int], gather: Sequence[Names], block: tuple[int, int]) -> WeightBlocks:
    """Returns the blocks of the whole weight over this device's shard [E, K, *C]."""
    whole = [n * math.prod(map(lax.axis_size, names)) for n, names in zip(shape, gather, strict=True)]
    first = [_find_offset(n, names) for n, names in zip(shape, gather, strict=True)]
    column = jnp.zeros((1,), jnp.int32)
    for size, start, n in zip(whole[2:], first[2:], shape[2:], strict=True):  # row-major over the whole dims *C
        column = (column[:, None] * size + start + jnp.arange(n, dtype=jnp.int32)[None]).reshape(-1)
    count = -(-whole[1] // block[0]), -(-math.prod(whole[2:]) // block[1])
    return WeightBlocks(block, count, first[1], column // block[1])


def share_weight_maxima(w: Float[Array, "E K C"], blocks: WeightBlocks, names: Names) -> Float[Array, "E KB CB"]:
    """Returns the maximum of |w| in each block of the whole weight, over all devices along `names`."""
    (experts, rows, width), size = w.shape, blocks.block[0]
    touched = (rows + 2 * size - 2) // size  # as many blocks as the rows may touch
    padded = vary_like(jnp.zeros((experts, touched * size, width), jnp.float32), w, blocks.first_row)
    padded = lax.dynamic_update_slice_in_dim(padded, finite_abs(w), blocks.first_row % size, 1)
    row_maxima = padded.reshape(experts, touched, size, width).max(2)
    maxima = jax.ops.segment_max(jnp.moveaxis(row_maxima, 2, 0), blocks.columns, num_segments=blocks.count[1])
    maxima = jnp.moveaxis(jnp.maximum(maxima, 0.0), 0, 2)  # segment_max gives -inf where the shard has no column
    whole = vary_like(jnp.zeros((experts, blocks.count[0] + touched, blocks.count[1]), jnp.float32), maxima)
    whole = lax.dynamic_update_slice_in_dim(whole, maxima, blocks.first_row // size, 1)
    return reduce_max(whole[:, : blocks.count[0]], names)


def spread_scales(scale: Float[Array, "E KB CB"], blocks: WeightBlocks, rows: int) -> Float[Array, "E K C"]:
    """Returns the scale of each element of a shard of `rows` rows."""
    row = (blocks.first_row + jnp.arange(rows, dtype=jnp.int32)) // blocks.block[0]
    return jnp.take(jnp.take(scale, row, axis=1), blocks.columns, axis=2)


def _find_offset(size: int, names: Names):
    """Returns the index at which this device's shard begins in a dim sharded over `names`, outermost first."""
    index = jnp.int32(0)
    for name in names:
        index = index * lax.axis_size(name) + lax.axis_index(name)
    return index * size
