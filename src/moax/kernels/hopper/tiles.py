"""Which TileConfig a product takes: the table of measured ones for its shape, else a heuristic.

`tiles.json` beside this file is written by `moax tune` on the machine: {device: {key: the fields of a TileConfig}}.
Nothing is measured at run time.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

from moax.kernels.hopper.pipeline import TileConfig

TABLE = Path(__file__).with_name("tiles.json")
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


@functools.cache
def read_table() -> dict[str, dict[str, list[int]]]:
    """The table that is checked in."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


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
