"""Which TileConfig a product takes: the measured one of its shape, else a heuristic's.

Measured tiles are in two files of one form, {device: {key: the fields of a TileConfig}}: the table that moax brings,
`tiles.json` beside this file, and the user's own, which `moax tune` writes. An entry of the user's table goes before
the packaged one. Nothing is measured at run time.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from pathlib import Path

from moax.kernels.hopper.pallas.pipeline import TileConfig

logger = logging.getLogger("moax")
TABLE = Path(__file__).with_name("tiles.json")
Table = dict[str, dict[str, list[int]]]
OPS = ("matmul", "matmul_transposed", "wgrad", "matmul_fp8", "wgrad_fp8")

# Each op's tiles by the share of its speed that one reaches on an H200 where its columns divide evenly.
HEURISTIC = {
    "matmul": {TileConfig(256, 4): 1.0, TileConfig(192, 4): 0.92, TileConfig(128, 6): 0.86},
    "matmul_transposed": {TileConfig(256, 4): 1.0, TileConfig(192, 4): 0.92, TileConfig(128, 6): 0.86},
    "wgrad": {TileConfig(256, 4): 1.0, TileConfig(192, 4): 0.94, TileConfig(128, 6): 0.9},
    "matmul_fp8": {TileConfig(192, 4): 1.0, TileConfig(128, 5): 0.92},
    "wgrad_fp8": {TileConfig(128, 4, 16, 1, 3): 1.0, TileConfig(192, 4): 0.92},
}
WGRAD_FP8 = (TileConfig(128, 4, 8, 1, 3), TileConfig(128, 4, 8, 2, 3), TileConfig(128, 4, 16, 2, 3))


def tile_key(op: str, contracted: int, columns: int, rows_per_group: int) -> str:
    """The key of a product's shape: rows a group in powers of two."""
    return f"{op} K{contracted} N{columns} R{1 << max(0, rows_per_group - 1).bit_length()}"


def user_table() -> Path:
    """The user's table, which `moax tune` writes; it may be missing."""
    return Path.home() / ".cache" / "moax" / "tiles.json"


@functools.cache
def read_table() -> Table:
    """The packaged table with the user's entries over it; a user's table that cannot be read is logged and left out."""
    table = load(TABLE)
    try:
        own = load(user_table())
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        logger.warning("the user's tiles are left out: %s", error)
        return table
    return {device: table.get(device, {}) | own.get(device, {}) for device in table | own}


def load(path: Path) -> Table:
    """A table of tiles; {} where there is no such file.

    Raises:
      ValueError: the file is no table of tiles. OSError: it cannot be read.
    """
    if not path.exists():
        return {}
    try:
        table = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: no JSON: {error}") from None
    if not isinstance(table, dict) or not all(isinstance(entries, dict) for entries in table.values()):
        raise ValueError(f"{path}: a table of tiles is {{device: {{key: numbers}}}}")
    most = len(dataclasses.fields(TileConfig))
    for entries in table.values():
        for key, tile in entries.items():
            if not isinstance(tile, list) or not 2 <= len(tile) <= most or not all(type(n) is int for n in tile):
                raise ValueError(f"{path}: {key}: {tile!r} must be a list of 2 to {most} ints")
    return table


def candidates(op: str, columns: int) -> list[TileConfig]:
    """The tiles that `moax tune` tries: those of the heuristic in more orders and clusters, less those whose columns
    would stand idle."""
    sizes = {tile.tile_n: tile.stages for tile in HEURISTIC[op]}
    waste = {n: -(-columns // n) * n / columns for n in sizes}
    kept = [n for n in sizes if waste[n] <= 1.15 * min(waste.values())]
    found = [TileConfig(n, sizes[n], width) for n in kept for width in (8, 16)]
    return found + [tile for tile in WGRAD_FP8 if op == "wgrad_fp8"]


def pick_tile(op: str, contracted: int, columns: int, rows_per_group: int, device: str = "") -> TileConfig:
    """The TileConfig of a product of these sizes on a device of this kind."""
    found = read_table().get(device, {}).get(tile_key(op, contracted, columns, rows_per_group))
    if found is not None:
        return TileConfig(*found)

    def speed(tile: TileConfig) -> float:
        span = tile.tile_n * tile.cluster
        return HEURISTIC[op][tile] * columns / (-(-columns // span) * span)

    return max(HEURISTIC[op], key=speed)
