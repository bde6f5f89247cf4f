"""The tiles of a product over blocks of rows: at most 128 rows of one group, 64 a consumer, by the columns of a tile.

The last block of a group may have at most 64 real rows. The second consumer then neither multiplies nor stores: with
group sizes (130, 5), the blocks have 128, 2 and 5 rows, and four of their six halves are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from moax.kernels.hopper.formats import BLOCK, HALF, Blocks
from moax.kernels.hopper.pallas.pipeline import TileConfig, sweep


class BlockTile(NamedTuple):
    """The place of a tile.

    Attributes:
      group: [] i32, the group of its rows.
      row: [] i32, its first row.
      rows: [] i32, the number of its real rows, which come first.
      column: [] i32, the number of its tile of columns.
    """

    group: Int[Array, ""]
    row: Int[Array, ""]
    rows: Int[Array, ""]
    column: Int[Array, ""]


def operands_of(blocks: Blocks) -> tuple[jax.Array, ...]:
    """Returns the operands of a kernel that say where its blocks are."""
    return blocks.group, blocks.start, blocks.rows, blocks.before


def over_blocks(tile: TileConfig, tiles_n: int, first: int) -> dict[str, Callable]:
    """Returns keywords of `pipeline.run`, with `tiles_n` cluster tiles a block, and `operands_of` from `first` on."""

    def count(*operands):
        before = operands[first + 3]
        return before[before.shape[0] - 1] * tiles_n

    def locate(i, block, *operands):
        group, start, rows, before = operands[first : first + 4]
        at, column = sweep(i, before[before.shape[0] - 1], tiles_n, tile.width)
        return BlockTile(group[at], start[at] * HALF, rows[at], column * tile.cluster + block)

    def target(place, warpgroup, column, width, out):
        return out.at[rows_of(place, warpgroup), pl.ds(place.column * tile.tile_n + column, width)]

    def has_rows(place, warpgroup):
        return warpgroup * HALF < place.rows

    return dict(count=count, locate=locate, target=target, has_rows=has_rows)


def load_rows(x, place: BlockTile, columns, stage, barrier, shared: Any = None) -> None:
    """Copies the rows of a tile, and these columns of x, to a stage. Of at most 64 real rows it copies 64."""

    def copy(rows: int) -> None:
        part, to = x.at[pl.ds(place.row, rows), columns], stage.at[pl.ds(0, rows)]
        plgpu.copy_gmem_to_smem(part, to, barrier, collective_axes=shared)

    pl.when(place.rows > HALF)(lambda: copy(BLOCK))
    pl.when(place.rows <= HALF)(lambda: copy(HALF))


def rows_of(place: BlockTile, warpgroup):
    """Returns the rows of all rows that a consumer has."""
    return pl.ds(place.row + warpgroup * HALF, HALF)
