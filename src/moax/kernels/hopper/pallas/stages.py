"""The tile of a matmul kernel, and the shared memory of its stages: their layout, and how many fit.

A stage holds a part of each operand, as wide as the copy engine and wgmma take it.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from moax.checks import Unsupported
from moax.kernels.hopper.formats import KMajorFp8

ROWS = 64  # the rows of a product of a consumer
LINE = 128  # the bytes of a row or a column in a stage
SHARED_BYTES = 225 * 1024  # the shared memory of a block of threads, less what barriers take
LEAST_STAGES = 3  # with two stages of wide tiles, a matmul waits for its operands
NARROW = 128  # the columns of a narrow tile


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """The tile of a matmul kernel.

    Attributes:
      tile_n: the columns of a tile.
      stages: the stages of operands that shared memory holds.
      width: so many row tiles sweep the columns together, so that they find the operands in L2.
      consumers: the warpgroups that multiply. wgrad may have 3; elsewhere a tile is a block of 128 rows.
      products: so many times 64 rows of a tile belong to each consumer. wgrad may have 2.
      waves: the most blocks of threads for each SM, one after another; the result has the same bits for any number.
    """

    tile_n: int
    stages: int
    width: int = 8
    consumers: int = 2
    products: int = 1
    waves: int = 1

    @property
    def rows(self) -> int:
        """The rows of a tile."""
        return ROWS * self.consumers * self.products


def check_dtypes(name: str, x, other) -> None:
    """Raises Unsupported unless both operands are FP8, or both bfloat16."""
    if isinstance(x, KMajorFp8):
        return
    if x.dtype != jnp.bfloat16 or other.dtype != jnp.bfloat16:
        raise Unsupported(f"x is {x.dtype} and {name} is {other.dtype}; the kernel takes bfloat16 for both")


def swizzle_of(*rows: int, boxes: int = 1) -> int:
    """Returns the swizzle, in bytes, of contiguous dims of these bytes, each of at least `boxes` boxes of this width.

    Raises:
      Unsupported: a size is no multiple of 32 bytes, or too small.
    """
    # A box of the copy engine is as wide as the swizzle, and wgmma takes both operands in the same swizzle.
    for swizzle in (128, 64, 32):
        if all(size % swizzle == 0 and size >= boxes * swizzle for size in rows):
            return swizzle
    sizes = ", ".join(map(str, rows))
    least = f" of at least {32 * boxes}" * (boxes > 1)
    raise Unsupported(f"contiguous dims have {sizes} bytes; each must be a multiple of 32{least}")


def swizzled(dtype, swizzle: int) -> tuple:
    """Returns the transforms of shared memory for wgmma and the copy engine: tiles of 8 rows by `swizzle` bytes."""
    columns = swizzle // jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)


def stage(tile: TileConfig, rows: int, columns: int, dtype, swizzle: int):
    """Returns the shared memory of all stages of an operand; a stage is [rows, columns]."""
    return plgpu.SMEM((tile.stages, rows, columns), dtype, transforms=swizzled(dtype, swizzle))


def leave_room(tile: TileConfig, line: int, total) -> TileConfig:
    """Returns the tile with as many stages as fit beside a tile of `total`, or a narrower tile where few fit.

    Each row and column of a tile has `line` bytes in a stage; a `total` of None takes no room.
    """
    if total is None:
        return tile
    room = SHARED_BYTES - tile.rows * tile.tile_n * total.dtype.itemsize
    stages = room // (line * (tile.rows + tile.tile_n))
    smaller = dataclasses.replace(tile, tile_n=NARROW, products=1)
    if stages < LEAST_STAGES and smaller.rows * smaller.tile_n < tile.rows * tile.tile_n:
        return leave_room(smaller, line, total)
    return dataclasses.replace(tile, stages=max(2, min(tile.stages, stages)))
