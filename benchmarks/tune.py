"""This program measures the tiles of each grouped matmul on this GPU, and keeps the fastest in the user's table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import cases
from benchmarks.kernels.ours import KERNELS, dims, hopper_gemm
from benchmarks.problem import Problem
from benchmarks.timing import Repeats, kernel_time
from lm import program
from moax.checks import Unsupported
from moax.kernels.device import find_device, why_not_hopper
from moax.kernels.hopper.pallas import tiles
from moax.kernels.hopper.pallas.stages import TileConfig

NAME = "python -m benchmarks.tune"
DESCRIPTION = """\
Measures the tiles of every grouped matmul of the cases on this GPU. A table in your cache folder
(~/.cache/moax/tiles.json, or --out FILE) keeps the fastest tile of each shape, if it is at least 1 % faster than the
tile of the heuristic. Kernels read your table before the one in the package.
"""
GAIN = 1.01
WGRAD_FP8 = TileConfig(128, 4, 8, 3)


def main(argv: list[str] | None = None) -> int:
    """Runs `python -m benchmarks.tune ARGV`, and returns the exit code; see `lm.program`."""
    args = parser().parse_args(argv)
    return program.run(NAME, lambda: run(args), traceback=args.traceback)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    command_line = argparse.ArgumentParser(
        prog=NAME, description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = command_line.add_argument
    add(
        "--cases",
        default="perf",
        metavar="SETS",
        help=f"sets of cases, with commas: {', '.join(cases.NAMES)} (default: %(default)s)",
    )
    add(
        "--only",
        action="append",
        metavar="WORD",
        help="measure only cases whose name contains WORD; repeatable",
    )
    add(
        "--ops",
        default=",".join(KERNELS),
        metavar="NAMES",
        help="ops, with commas (default: %(default)s)",
    )
    add("--out", metavar="FILE", help="the table to update (default: the one in your cache folder)")
    add("--traceback", action="store_true", help="show where an error arose")
    return command_line


def run(args: argparse.Namespace) -> int:
    """Measures every grouped matmul of the cases, and writes the table after each case. Returns 0."""
    program.start()
    unknown = set(args.ops.split(",")) - KERNELS.keys()
    if unknown:
        raise ValueError(f"--ops: unknown {', '.join(sorted(unknown))}; the ops are {', '.join(KERNELS)}")
    device = find_device().device_kind
    if why_not_hopper():
        raise Unsupported(f"this command needs an NVIDIA Hopper GPU, not {device!r}")
    path = Path(args.out) if args.out else tiles.user_table()
    table = tiles.load(path)
    packaged = tiles.load(tiles.TABLE).get(device, {})
    mine = table.setdefault(device, {})
    for case in cases.select(args.cases, args.only):
        problem = Problem(case)
        for op in args.ops.split(","):
            for direction in KERNELS[op][2]:
                key, tile, us, gain = tune(problem, op, direction)
                line = f"{case.name} {op} {direction}: tile {tile} takes {us:.0f} us; the heuristic's tile takes"
                print(f"{line} {gain:.3f} times as long", flush=True)
                # The measured tile also replaces a tile of the packaged table.
                if gain >= GAIN or key in packaged:
                    mine[key] = tile
                else:
                    mine.pop(key, None)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render(table))
    return 0


def tune(
    problem: Problem,
    op: str,
    direction: cases.Direction,
) -> tuple[str, list[int], float, float]:
    """Measures the heuristic's tile and all candidates; returns the key, the fastest tile, its us, and its gain."""
    case = problem.case
    size = dims(problem, direction)
    operands = problem.quantized(direction) if op.endswith("_fp8") else None
    default = tiles.pick_tile(op, *size)
    times = {}
    for tile in dict.fromkeys([default, *candidates(op, size[1])]):
        try:
            call = hopper_gemm(problem, op, direction, operands, tile)
            times[tile] = kernel_time(call.f, call.args, Repeats(2, 7)).us
        except (Unsupported, ValueError) as error:
            print(f"{case.name} {op} {tile}: {error}", file=sys.stderr)
    best = min(times, key=times.__getitem__)
    return tiles.tile_key(op, *size), tiles.to_numbers(best), times[best], times[default] / times[best]


def candidates(op: str, columns: int) -> list[TileConfig]:
    """Returns the tiles to try: those whose last columns are not mostly idle."""
    sizes = {tile.tile_n: tile.stages for tile in tiles.HEURISTIC[op]}
    waste = {n: -(-columns // n) * n / columns for n in sizes}
    widths = [n for n in sizes if waste[n] <= 1.15 * min(waste.values())]
    tiles_by_width = [TileConfig(n, sizes[n], width) for n in widths for width in (8, 16)]
    return tiles_by_width + [WGRAD_FP8] * (op == "wgrad_fp8")


def render(table: dict[str, dict[str, list[int]]]) -> str:
    """Returns the table {device: {key: tile}} as JSON, sorted, with one entry a line."""

    def lines() -> Iterator[str]:
        for device, entries in sorted(table.items()):
            inner = ",\n".join(f"  {json.dumps(key)}: {json.dumps(tile)}" for key, tile in sorted(entries.items()))
            yield f" {json.dumps(device)}: {{\n{inner}\n }}"

    return "{\n" + ",\n".join(lines()) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
