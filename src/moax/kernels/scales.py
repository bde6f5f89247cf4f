"""Values in blocks with a scale each, as all implementations quantize them.

    scale[b] = max |x| over block b / max of the format (rounded up to a power of two where the format says so)
    data     = x * (1 / scale), rounded to the format,     x ~ data * scale

A NaN or Inf becomes NaN in its own element and does not enter a maximum. A block of zeros has scale 1. The Hopper
kernels compute the product with the reciprocal too, and XLA turns a division by a broadcast into it.

Blocks of a weight [E, K, *C] divide K, and all columns *C as one dim. They begin at the corner of the whole matrix,
whatever shard of it a device holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from moax.mesh.axes import Names, ResolvedAxes
from moax.recipe import Format, Use
from moax.types import QArray

Block = tuple[int, ...]  # the block length of each dim
DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
TINY = 2.0**-126  # the smallest normal float32


def block_max(x: Array, block: Block) -> Float[Array, "..."]:
    """Returns the maximum of |x| over the finite elements of each block, in float32; 0 where there are none."""
    x = x.astype(jnp.float32)
    x = jnp.where(jnp.isfinite(x), jnp.abs(x), 0.0)
    padding = [(0, -n % b) for n, b in zip(x.shape, block, strict=True)]
    if any(after for _, after in padding):
        x = jnp.pad(x, padding)
    split = [size for n, b in zip(x.shape, block, strict=True) for size in (n // b, b)]
    return x.reshape(split).max(axis=tuple(range(1, 2 * x.ndim, 2)))


def to_scale(
    amax: Float[Array, "..."], format: Format, of_zero: float = 1.0,
) -> Float[Array, "..."]:  # fmt: skip
    """Returns the float32 scales of blocks with the maxima `amax`; `of_zero` where one is too small to divide by."""
    largest = float(jnp.finfo(DTYPES[format.dtype]).max)
    scale = amax * (1.0 / largest)  # XLA may turn a division by a constant into a product
    scale = jnp.where(scale < TINY, of_zero, scale)
    if format.scale == "float32":
        return scale
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    # A scale is rounded up, unless it is a power of two.
    return lax.bitcast_convert_type((bits + 0x7FFFFF) & ~0x7FFFFF, jnp.float32)


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
    # XLA on GPUs removes a cast to fewer bits and back (openxla/xla#41605); the barrier keeps the rounding.
    return lax.optimization_barrier(lax.bitcast_convert_type(data, jnp.uint8)), scale


def dequantize(q: QArray | Array, dtype: Any = jnp.float32) -> Float[Array, "..."]:
    """x = data * scale, rounded once to `dtype`; an array that is not quantized is only cast."""
    if not isinstance(q, QArray):
        return q.astype(dtype)
    data = lax.bitcast_convert_type(q.data, DTYPES[q.dtype]).astype(jnp.float32)
    scale = q.scale
    if scale.dtype == jnp.uint8:  # an exponent is never 0, the subnormal 2**-127
        scale = lax.bitcast_convert_type(scale.astype(jnp.int32) << 23, jnp.float32)
    return (data * expand_scales(scale, data.shape, q.block)).astype(dtype)


def expand_scales(scale: Array, shape: Sequence[Any], block: Block) -> Array:
    """Returns the scale of each element of this shape. A dim of one block keeps size 1, so that it broadcasts."""
    for dim, (n, b) in enumerate(zip(shape, block, strict=True)):
        if b == 1 or scale.shape[dim] == 1:
            continue
        scale = jnp.repeat(scale, b, axis=dim)
        # In this form JAX sees that whole blocks have no less than a symbolic n.
        whole = -(-n // b) * b
        scale = scale.reshape(*scale.shape[:dim], whole, *scale.shape[dim + 1 :])
        scale = lax.slice_in_dim(scale, 0, n, axis=dim)
    return scale


def shards_cut_blocks(shape: Sequence[int], format: Format, use: Use, gather: Sequence[Names]) -> bool:
    """Returns whether shards [E, K, *C] of a weight, which is gathered over `gather`, may end inside its blocks."""
    _, rows, columns = format.weight_block(3, use)
    cuts_rows = bool(gather[1]) and shape[1] % rows > 0
    cuts_columns = any(gather[2:]) and shape[-1] % columns > 0
    return cuts_rows or cuts_columns


def find_scale_axes(shape: Sequence[int], format: Format, use: Use, gather: Sequence[Names]) -> tuple[Names, ...]:
    """Returns the mesh axes over which each dim of a weight's scales is gathered, as `gather` has those of its data.

    Where shards [E, K, *C] cut blocks, every shard has all scales of its matrices. The columns of the scales are one
    dim, unless columns are gathered: then each of them has its own axes.
    """
    if shards_cut_blocks(shape, format, use, gather):
        return (gather[0], (), ())
    if any(gather[2:]):
        return tuple(gather)
    return (gather[0], gather[1], ())


def scale_shape(
    shape: Sequence[int], format: Format, use: Use, gather: Sequence[Names], axes: ResolvedAxes
) -> tuple[int, ...]:
    """Returns the shape of the scales of a weight's shard [E, K, *C]; see `find_scale_axes`."""
    _, row_block, column_block = format.weight_block(3, use)
    experts, rows, *columns = shape
    if shards_cut_blocks(shape, format, use, gather):
        rows, *columns = (n * axes.size(names) for n, names in zip(shape[1:], gather[1:], strict=True))
    elif any(gather[2:]):
        return (experts, -(-rows // row_block), *columns[:-1], -(-columns[-1] // column_block))
    return (experts, -(-rows // row_block), -(-math.prod(columns) // column_block))


def turn_dims[Dim](dims: Sequence[Dim], transposed: bool) -> tuple[Dim, ...]:
    """Returns the dims (e, k, *c) of a weight as (e, *c, k) if `transposed`."""
    if transposed:
        return (dims[0], *dims[2:], dims[1])
    return tuple(dims)


def flatten_columns(x: Array, transposed: bool) -> Array:
    """Returns values or scales [E, K, *C] as [E, K, C], or if `transposed` [E, *C, K] as [E, C, K]."""
    if transposed:
        return x.reshape(x.shape[0], -1, x.shape[-1])
    return x.reshape(*x.shape[:2], -1)
