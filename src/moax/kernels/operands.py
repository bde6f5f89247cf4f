"""The operands of products, as all implementations share them: rows in groups, and values in blocks with a scale each.

Rows are sorted by expert: group g starts at the first multiple of `align` after group g - 1. With sizes (3, 0, 5),
align 4 and 12 rows, the groups start at rows (0, 4, 4). Row 3 and rows 9 to 11 are padding, which may hold anything.

    scale[b] = max |x| over block b / max of the format (rounded up to a power of two where the format says so)
    data     = x * (1 / scale), rounded to the format,     x ~ data * scale

A NaN or Inf becomes NaN in its own element and does not enter a maximum. A block of zeros has scale 1. The Hopper
kernels compute the product with the reciprocal too, and XLA turns a division by a broadcast into it.

Blocks of a weight [E, K, *C] divide K, and all columns *C as one dim. They begin at the corner of the whole matrix,
whatever shard of it a device holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from moax.mesh.axes import Names
from moax.mesh.collectives import gather_weight, reduce_max, vary_like
from moax.recipe import Contracted, Format, Recipe
from moax.types import QArray, QShard

Block = tuple[int | None, ...]
DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
TINY = 2.0**-126  # the smallest normal float32


def align_up(n, align: int):
    """Returns n, rounded up to a multiple of `align`: 5 with align 4 is 8."""
    return -(-n // align) * align


def allot_rows(balanced: float, buffer_factor: float | None, worst: int) -> int:
    """Returns the rows of a buffer for a load that depends on the routing: `buffer_factor` times the balanced load.

    The buffer has at least the mean, five times its square root and 64 rows, since random routing alone needs more than
    a small mean; with a factor below 1 that part of them. 10000 balanced rows and a factor of 1.25 give 12500 rows, 100
    give 214 rows, and with a factor of 0.5 they give 107. It has at most the `worst` case, which None allots.
    """
    if buffer_factor is None or not isinstance(balanced, int | float):  # of a symbolic size nobody knows the noise
        return worst
    chance = balanced + 5 * math.sqrt(balanced) + 64
    return max(1, min(worst, math.ceil(max(buffer_factor * balanced, min(buffer_factor, 1.0) * chance))))


def sum_before(values: Int[Array, " G"]) -> Int[Array, " G"]:
    """Returns the sum of the values before each one: (0, 3, 3) for (3, 0, 5)."""
    # Each index is compared with each, which is one kernel on a GPU; a cumulative sum is several.
    index = jnp.arange(values.shape[0], dtype=jnp.int32)
    return jnp.where(index[None] < index[:, None], values[None], 0).sum(1, dtype=jnp.int32)


def zero_rows(x: Float[Array, "M ..."], real: Bool[Array, " M"] | None) -> Float[Array, "M ..."]:
    """Returns x, with 0 in the rows that are not real. Such a row may hold NaN. None: all rows are real."""
    if real is None:
        return x
    return jnp.where(real.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))


def scale_rows(x: Float[Array, "M ..."], weights: Float[Array, " M"], groups: Groups) -> Float[Array, "M ..."]:
    """Returns each real row times its weight, multiplied in float32 and returned in the dtype of x; padding is 0."""
    weights = weights.reshape(-1, *[1] * (x.ndim - 1))
    return zero_rows(x.astype(jnp.float32) * weights, groups.real).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Groups:
    """The layout of the rows that enter a product, on one device. An implementation may add fields of its own.

    With sizes (3, 0, 2), align 4 and 8 rows, `index` is (0, 0, 0, 0, 2, 2, 2, 2), and rows 3, 6 and 7 are not real.

    Attributes:
      sizes: [E] i32, the rows of each group; None means that one group holds all rows.
      align: each group starts at a multiple of so many rows.
      index: [M] i32, the group of each row, any group for padding; None where one group holds all rows.
      real: [M] bool, whether each row is real, that is no padding; None means that all rows are real.
      expected: the rows that all groups have together at a balanced load; None where this is not known. It may decide
        how a product is computed, so that the size M of a buffer does not.
    """

    sizes: Any
    align: int
    index: Any
    real: Any
    expected: int | None


def find_groups(group_sizes: Int[Array, " E"] | None, align: int, num_rows: int, expected: int | None = None) -> Groups:
    """Returns the Groups of `num_rows` rows. With `group_sizes` None one group holds all rows."""
    if group_sizes is None:
        return Groups(None, align, None, None, expected)
    starts, rows = sum_before(align_up(group_sizes, align)), jnp.arange(num_rows, dtype=jnp.int32)
    index = jnp.searchsorted(starts, rows, side="right").astype(jnp.int32) - 1
    return Groups(group_sizes, align, index, rows < starts[index] + group_sizes[index], expected)


def gather_rows(
    x: Float[Array, "R H"], gather_idx: Int[Array, " N"], groups: Groups | None = None
) -> Float[Array, "N H"]:
    """rows[n] = x[gather_idx[n]], 0 where it is R or more, but for rows past the `groups`."""
    return jnp.take(x, gather_idx, axis=0, mode="fill", fill_value=0)


def block_max(x: Array, block: Block) -> Float[Array, "..."]:
    """Returns the maximum of |x| over the finite elements of each block, in float32; 0 where there are none."""
    x = x.astype(jnp.float32)
    x = jnp.where(jnp.isfinite(x), jnp.abs(x), 0.0)
    full = tuple(max(n, 1) if b is None else b for b, n in zip(block, x.shape, strict=True))
    padding = [(0, -n % b) for n, b in zip(x.shape, full, strict=True)]
    x = jnp.pad(x, padding) if any(p for _, p in padding) else x
    split = [m for n, b in zip(x.shape, full, strict=True) for m in (n // b, b)]
    return x.reshape(split).max(axis=tuple(range(1, 2 * x.ndim, 2)))


def to_scale(amax: Float[Array, "..."], format: Format, of_zero: float = 1.0) -> Float[Array, "..."]:
    """Returns the float32 scales of blocks with the maxima `amax`; `of_zero` where one is too small to divide by."""
    largest = float(jnp.finfo(DTYPES[format.dtype]).max)
    scale = amax * (1.0 / largest)  # XLA may turn a division by a constant into a product
    scale = jnp.where(scale < TINY, of_zero, scale)
    if format.scale == "float32":
        return scale
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    return lax.bitcast_convert_type((bits + 0x7FFFFF) & ~0x7FFFFF, jnp.float32)  # up, unless it is a power of two


def encode(
    x: Float[Array, "..."], scale: Float[Array, "..."], inverse: Float[Array, "..."], format: Format
) -> tuple[Array, Array]:
    """Returns the bytes of x * inverse in the format, and the scales, as a QArray stores both.

    `inverse` is 1 / scale of each element, or broadcasts to it. A value that is not finite becomes NaN.
    """
    data = (x * inverse).astype(DTYPES[format.dtype])
    if format.dtype == "e5m2":  # e5m2 has an infinity, which becomes NaN as in e4m3
        data = jnp.where(jnp.isfinite(x), data, jnp.array(jnp.nan, data.dtype))
    if format.scale == "e8m0":  # the exponent alone
        scale = (lax.bitcast_convert_type(scale, jnp.int32) >> 23).astype(jnp.uint8)
    # XLA on GPUs removes a cast to fewer bits and back; the barrier keeps the rounding.
    return lax.optimization_barrier(lax.bitcast_convert_type(data, jnp.uint8)), scale


def dequantize(q: QArray | Array, dtype: Any = jnp.float32) -> Float[Array, "..."]:
    """x = data * scale, rounded once to `dtype`; an array that is not quantized is only cast."""
    if not isinstance(q, QArray):
        return q.astype(dtype)
    data, scale = lax.bitcast_convert_type(q.data, DTYPES[q.dtype]).astype(jnp.float32), q.scale
    if scale.dtype == jnp.uint8:  # an exponent is never 0, the subnormal 2**-127
        scale = lax.bitcast_convert_type(scale.astype(jnp.int32) << 23, jnp.float32)
    return (data * expand_scales(scale, data.shape, q.block)).astype(dtype)


def expand_scales(scale: Array, shape: Sequence[Any], block: Block) -> Array:
    """Returns the scale of each element of this shape. A dim of one block keeps size 1, so that it broadcasts."""
    for dim, (n, b) in enumerate(zip(shape, block, strict=True)):
        if b == 1 or scale.shape[dim] == 1:
            continue
        scale = jnp.repeat(scale, n if b is None else b, axis=dim)
        # In this form JAX sees that whole blocks have no less than a symbolic n.
        whole = n if b is None else -(-n // b) * b
        scale = scale.reshape(*scale.shape[:dim], whole, *scale.shape[dim + 1 :])
        scale = lax.slice_in_dim(scale, 0, n, axis=dim)
    return scale


def find_scale_axes(
    shape: Sequence[int], format: Format, contracted: Contracted, gather: Sequence[Names]
) -> tuple[Names, ...] | None:
    """Returns the mesh axes over which each dim of a weight's scales is gathered, as `gather` has those of its data.

    None means that a shard [E, K, *C] may end inside a block of the whole weight; every shard then has the scales of
    the whole matrix. The columns of the scales are one dim, unless columns are gathered: then each of them has its own
    axes, and no block lies in two shards of the last one.
    """
    if format.block is None:  # one scale holds for a matrix
        return (gather[0], (), ())
    _, rows, columns = format.weight_block(3, contracted)
    for size, block, names in ((shape[1], rows, gather[1]), (shape[-1], columns, sum(gather[2:], ()))):
        if names and size % (block or 1):
            return None
    return tuple(gather) if any(gather[2:]) else (gather[0], gather[1], ())


def quantize(x: Array, format: Format, block: Block, amax_over: Names = ()) -> QArray:
    """Returns the values and scales of x in blocks of any lengths, as `moax.ops.quantize` returns them."""
    x = x.astype(jnp.float32)
    scale = to_scale(reduce_max(block_max(x, block), amax_over), format)
    return QArray(*encode(x, scale, expand_scales(1.0 / scale, x.shape, block), format), format.dtype, block)


def dequantize_wire(
    data: Array, words: Array, ends: Array | None, format: Format, dtype: DTypeLike
) -> Float[Array, "R C"]:
    """Returns the rows [R, C] before ends[-1], from their bytes and `words` [R, W] i32, which begin with the scales."""
    count = -(-data.shape[1] // (format.block or data.shape[1]))
    scale = lax.bitcast_convert_type(words[:, :count], jnp.float32)
    return dequantize(QArray(data, scale, format.dtype, format.row_block(2, "columns")), dtype)


def quantize_for_matmul(
    x: Array, recipe: Recipe, role: str, groups: Groups, amax_over: Names = (),
    *, gather_idx: Int[Array, " N"] | None = None, in_products: bool = False, rows: bool = True, columns: bool = True,
) -> tuple[Array | QArray, Array | QArray]:  # fmt: skip
    """Returns rows [M, ..., C] as two Operands: for a product over columns (forward, dgrad), and for wgrad.

    With `gather_idx` it takes the rows x[gather_idx], in one read where the implementation can. With `in_products` too,
    where `choose_rows` says so, the products gather them from x instead. The first may be None if the caller
    takes no `rows`, and the second if it takes no `columns`.
    """
    format: Format | None = getattr(recipe, role)
    if gather_idx is not None:
        with jax.named_scope("permute"):
            x = gather_rows(x, gather_idx)
    x = x.reshape(x.shape[0], -1)
    if format is None:
        return x, x
    with jax.named_scope("quantize"):
        x = x.astype(jnp.float32)
        real = zero_rows(x, groups.real)
        if format.by_group:  # each row carries the scale of its group
            scale = to_scale(max_of_groups(x, groups), format)[:, None]
            return (QArray(*encode(real, scale, 1.0 / scale, format), format.dtype, (1, None)),) * 2
        # Padding must not enter a scale that all rows share.
        whole, over = (x, ()) if format.block else (real, amax_over)
        by_columns = quantize(whole, format, format.row_block(2, "columns"), over)
        return by_columns, quantize(real, format, format.row_block(2, "rows"), over)


def max_of_groups(x: Float[Array, "M C"], groups: Groups) -> Float[Array, " M"]:
    """Returns for each row the maximum of |x| over the finite elements of its group."""
    values = block_max(zero_rows(x, groups.real), (1, None))[:, 0]
    if groups.sizes is None:
        return jnp.broadcast_to(values.max(), values.shape)
    return jax.ops.segment_max(values, groups.index, num_segments=groups.sizes.shape[0])[groups.index]


def quantize_shard(
    w: Array, recipe: Recipe, contracted: Contracted, gather: Sequence[Names], amax_over: Names
) -> QShard:
    """Returns the bytes and scales of a weight's shard [E, K, *C], in the blocks of the whole weight."""
    format, flat = cast(Format, recipe.w), w.reshape(*w.shape[:2], -1).astype(jnp.float32)
    with jax.named_scope("quantize"):
        if find_scale_axes(w.shape, format, contracted, gather) is None:
            scale, inverse = _scale_shared_blocks(flat, w.shape, format, contracted, gather)
            data, scale = encode(flat, scale, inverse, format)
            return QShard(data.reshape(w.shape), scale)
        q = quantize(flat, format, format.weight_block(3, contracted), () if format.block else amax_over)
        # The scales of gathered columns have the dims of the columns, since no block lies in two shards of the last.
        columns = w.shape[2:-1] if format.block and any(gather[2:]) else ()
        return QShard(q.data.reshape(w.shape), q.scale.reshape(*q.scale.shape[:2], *columns, -1))


def gather_shard(shard: QShard, recipe: Recipe, contracted: Contracted, gather: Sequence[Names]) -> QArray:
    """Returns the whole weight as an Operand from a quantized shard; an array [E, K, C] is an Operand too."""
    format = cast(Format, recipe.w)
    along = find_scale_axes(shard.data.shape, format, contracted, gather) or (gather[0], (), ())
    whole = gather_weight(shard.data, gather), gather_weight(shard.scale, along)
    data, scale = (v.reshape(*v.shape[:2], -1) for v in whole)
    return QArray(data, scale, format.dtype, format.weight_block(3, contracted))


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
    maxima = block_max(lax.dynamic_update_slice_in_dim(maxima, flat, first[1] % rows, 1), (1, rows, 1))
    maxima = jax.ops.segment_max(jnp.moveaxis(maxima, 2, 0), column_block, num_segments=count)
    maxima = jnp.moveaxis(jnp.maximum(maxima, 0.0), 0, 2)  # segment_max gives -inf where the shard has no column
    blocks = vary_like(jnp.zeros((shape[0], row_count + touched, count), jnp.float32), maxima)
    blocks = lax.dynamic_update_slice_in_dim(blocks, maxima, first[1] // rows, 1)
    scale = to_scale(reduce_max(blocks[:, :row_count], sum(gather[1:], ())), format)
    row_block = (first[1] + jnp.arange(shape[1], dtype=jnp.int32)) // rows
    return scale, jnp.take(jnp.take(1.0 / scale, row_block, axis=1), column_block, axis=2)
