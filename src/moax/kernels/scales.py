"""The scales of blocks. All implementations share this arithmetic, so that they give the same numbers.

    scale[b] = max |x| over block b / format.max        (rounded up to a power of two where the format says so)

A NaN or Inf does not enter a maximum. A block of zeros has scale 1.

Blocks of a weight [E, K, *C] divide K, and all columns *C as one dim. They begin at the corner of the whole matrix,
whatever shard of it a device holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from moax.mesh.axes import Names
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


def store_scale(scale: Float[Array, "..."], format: Format) -> Array:
    """Returns scales as a QArray stores them: for `e8m0` uint8 exponents, with scale = 2**(exponent - 127)."""
    return (lax.bitcast_convert_type(scale, jnp.int32) >> 23).astype(jnp.uint8) if format.scale == "e8m0" else scale


def dequantize(q: QArray, dtype: Any = jnp.float32) -> Float[Array, ...]:
    """x = data * scale, rounded once to `dtype`."""
    data, scale = lax.bitcast_convert_type(q.data, DTYPES[q.dtype]).astype(jnp.float32), q.scale
    if scale.dtype == jnp.uint8:  # an exponent is never 0, the subnormal 2**-127
        scale = lax.bitcast_convert_type(scale.astype(jnp.int32) << 23, jnp.float32)
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


def weight_format(recipe: Recipe) -> Format:
    """Returns the format of weights. Raises ValueError where the recipe quantizes no weight."""
    if recipe.w is None:
        raise ValueError(f"recipe={recipe} quantizes no weight; its field w must be a Format")
    return recipe.w


def cuts_blocks(shape: Sequence[int], gather: Sequence[Names], format: Format, contracted: Contracted) -> bool:
    """Returns whether a shard [E, K, *C], gathered over these axes, may end inside a block of the whole weight."""
    _, rows, columns = format.weight_block(3, contracted)
    dims = (shape[1], rows, gather[1]), (shape[-1], columns, sum(gather[2:], ()))
    return any(block is not None and names and size % block != 0 for size, block, names in dims)


def find_scale_axes(
    shape: Sequence[int], format: Format, contracted: Contracted, gather: Sequence[Names]
) -> tuple[Names, ...]:
    """Returns the mesh axes over which each dim of a weight's scales is gathered, as `gather` has those of its data.

    Where a shard [E, K, *C] ends inside a block, or one scale holds for a matrix, every shard has the scales of the
    whole matrix, and E alone is gathered. The columns of the scales are one dim, unless columns are gathered: then each
    of them has its own axes, and no block lies in two shards of the last one.
    """
    if format.block is None or cuts_blocks(shape, gather, format, contracted):
        return (gather[0], (), ())
    return tuple(gather) if any(gather[2:]) else (gather[0], gather[1], ())
