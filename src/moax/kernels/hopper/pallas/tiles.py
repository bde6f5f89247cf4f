"""The TileConfig of a matmul: the measured one of its shape, or else the choice of a heuristic.

Measured tiles are in two files of one form, {device: {key: the fields of a TileConfig but its waves}}. One is the
packaged table, `tiles.json` beside this file. The other is the user's table, which
`python -m benchmarks.tune` writes, and whose entries win. Nothing is measured at run time.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from pathlib import Path

from moax.kernels.hopper.pallas.stages import LINE, SHARED_BYTES, TileConfig

logger = logging.getLogger("moax")
TABLE = Path(__file__).with_name("tiles.json")
Table = dict[str, dict[str, list[int]]]

# The tiles of each op, with their speed relative to the fastest tile, measured on an H200 where the columns of the tile
# divide the columns of the matmul.
HEURISTIC = {
    "matmul": {TileConfig(256, 4): 1.0, TileConfig(192, 4): 0.92, TileConfig(128, 6): 0.86},
    "matmul_transposed": {TileConfig(256, 4): 1.0, TileConfig(192, 4): 0.92, TileConfig(128, 6): 0.86},
    "wgrad": {TileConfig(256, 4): 1.0, TileConfig(192, 4): 0.94, TileConfig(128, 6): 0.9},
    "matmul_fp8": {TileConfig(192, 4): 1.0, TileConfig(128, 5): 0.92},
    "wgrad_fp8": {TileConfig(128, 4, 16, 3): 1.0, TileConfig(192, 4): 0.92},
}


def tile_key(op: str, contracted: int, columns: int, rows_per_group: int) -> str:
    """Returns the key of a shape, with the rows of a group rounded up to a power of two: 300 rows have R512."""
    return f"{op} K{contracted} N{columns} R{1 << max(0, rows_per_group - 1).bit_length()}"


def user_table() -> Path:
    """Returns the path of the user's table, which `python -m benchmarks.tune` writes; there may be no such file."""
    return Path.home() / ".cache" / "moax" / "tiles.json"


@functools.cache
def read_table() -> Table:
    """Returns the packaged table, updated by the user's table; the log says where that cannot be read."""
    table = load(TABLE)
    try:
        own = load(user_table())
    except (OSError, ValueError, RuntimeError) as error:  # a RuntimeError: there is no home folder
        logger.warning("the user's tiles are left out: %s", error)
        return table
    return {device: table.get(device, {}) | own.get(device, {}) for device in table | own}


def load(path: Path) -> Table:
    """Returns the table of tiles in a file; {} if there is no such file.

    Raises:
      ValueError: the file is no table of tiles.
      OSError: the file cannot be read.
    """
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: the file is no JSON: {error}") from None
    if not isinstance(table, dict) or not all(isinstance(entries, dict) for entries in table.values()):
        raise ValueError(f"{path}: the file must be a table of tiles, {{device: {{key: numbers}}}}")
    max_numbers = len(dataclasses.fields(TileConfig)) - 1
    for entries in table.values():
        for key, tile in entries.items():
            is_list = isinstance(tile, list) and all(type(n) is int for n in tile)
            if not is_list or not 2 <= len(tile) <= max_numbers:
                raise ValueError(f"{path}: {key}: {tile!r} must be a list of 2 to {max_numbers} ints")
            if not _has_kernel(key, TileConfig(*tile)):
                raise ValueError(f"{path}: {key}: {tile!r} must be a tile of a kernel, such as [128, 4]; tune again")
    return table


def _has_kernel(key: str, tile: TileConfig) -> bool:
    """Returns whether the kernel of a key takes the tile, and shared memory holds its stages."""
    if tile.tile_n not in (64, 128, 192, 256) or tile.width < 1:
        return False
    if key.startswith("wgrad"):
        has_rows = tile.consumers in (2, 3) and tile.products in (1, 2)
    else:
        has_rows = tile.consumers == 2 and tile.products == 1
    stage_bytes = LINE * (tile.rows + tile.tile_n)
    return has_rows and 2 <= tile.stages <= SHARED_BYTES // stage_bytes


def with_projections(tile: TileConfig, gates: int, hidden: int) -> TileConfig:
    """Returns a tile for a matmul whose epilogue activates `gates` projections of `hidden` columns.

    It has 256 columns, or 128 where fewer idle ones make up for the lower speed. With 192
    columns of gate and of up, two tiles of 256 columns leave 64 of 256 columns of each idle, and three of 128 none.
    """
    sizes = {size.tile_n: size for size in HEURISTIC["matmul"] if size.tile_n != 192}

    def speed(size: TileConfig) -> float:
        part = size.tile_n // gates
        return HEURISTIC["matmul"][size] * hidden / (-(-hidden // part) * part)

    best = max(sizes.values(), key=speed)
    return dataclasses.replace(tile, tile_n=best.tile_n, stages=best.stages)


def turn_tile(tile: TileConfig, rows: int) -> TileConfig:
    """Returns a tile of twice the rows and half the columns, for a wgrad [rows, N] that gathers its columns.

    Copies of gathered columns take longer than those of the copy engine. It is the tile itself where it is no tile of
    256 columns, or where the turned one would have a tenth more idle rows.
    """
    if tile.tile_n != 256:
        return tile
    turned = dataclasses.replace(tile, tile_n=tile.tile_n // 2, products=2)
    rows_of_turned = -(-rows // turned.rows) * turned.rows
    rows_of_tile = -(-rows // tile.rows) * tile.rows
    return tile if rows_of_turned > 1.1 * rows_of_tile else turned


def to_numbers(tile: TileConfig) -> list[int]:
    """Returns the fields of a tile as a table has them: all but `waves`, which the matmuls choose."""
    return list(dataclasses.astuple(tile)[:-1])


def pick_tile(
    op: str, contracted: int, columns: int, rows_per_group: int, device: str = "",
) -> TileConfig:  # fmt: skip
    """Returns the TileConfig of a matmul of these sizes on a device of this kind."""
    measured = read_table().get(device, {}).get(tile_key(op, contracted, columns, rows_per_group))
    if measured is not None:
        return TileConfig(*measured)

    def speed(tile: TileConfig) -> float:
        # The speed is less by the share of idle columns.
        return HEURISTIC[op][tile] * columns / (-(-columns // tile.tile_n) * tile.tile_n)

    return max(HEURISTIC[op], key=speed)
