"""This program draws time and memory against imbalance: python -m benchmarks.block.plot_imbalance FILE --out PLOT

FILE is what `python -m benchmarks imbalance` wrote. Each case of the file is one figure row of three plots: the wall
clock of a step, the ratio to X balanced steps on the busiest GPU, and bytes of a device.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes as Plot

from moax.figures import BLUE, GREEN, INK, ORANGE, SOFT, make_figure, style

LIMIT = 1.15  # of the ratio: a step with a rank of twice its share, beside two balanced ones


def main(argv: list[str] | None = None) -> int:
    """Draws the file that `argv` names. Returns 0, or 2 where the file has no row to draw."""
    parser = argparse.ArgumentParser(prog="plot_imbalance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--out", type=Path, required=True, metavar="PLOT", help="the file to draw, .png or .svg")
    args = parser.parse_args(argv)
    results = json.loads(args.file.read_text())
    rows = [row for row in results["rows"] if row["op"] == "imbalance" and row["us"]]
    if not rows:
        print(f"{args.file} has no measured row of `python -m benchmarks imbalance`", file=sys.stderr)
        return 2
    draw(rows, results["header"]["device"], args.out)
    return 0


def draw(rows: list[dict[str, Any]], device: str, path: Path) -> None:
    """Draws the measured rows of a result file, of GPUs of the name `device`, to `path`."""
    cases: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        cases[f"{row['case'].split(' X=')[0]}, {row['recipe']}"].append({"us": row["us"], **row["extra"]})
    figure = make_figure(12, 3.9 * len(cases))
    for part, (case, found) in zip(figure.subfigures(len(cases), squeeze=False)[:, 0], cases.items(), strict=True):
        part.suptitle(f"{case}, exchange {found[0]['exchange']}, {device}", x=0.01, ha="left", color=INK, weight="bold")
        times, ratios, memory = part.subplots(1, 3)
        _draw_times(times, found)
        _draw_ratios(ratios, found)
        _draw_memory(memory, found)
    figure.savefig(path)


def _lines(found: list[dict[str, Any]]) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Returns (label, colour, rows by imbalance) of each buffer_factor whose rows stand for themselves."""
    by_factor: dict[float | None, list[dict[str, Any]]] = defaultdict(list)
    for row in found:
        if row["stands_for"] == row["imbalance"]:
            by_factor[row["buffer_factor"]].append(row)
    return [
        (f"buffer_factor {factor}", ORANGE if factor is None else BLUE, sorted(some, key=lambda r: r["imbalance"]))
        for factor, some in by_factor.items()
    ]


def _draw_times(plot: Plot, found: list[dict[str, Any]]) -> None:
    """Draws the wall clock by imbalance, with the passes where there are several."""
    for label, color, some in _lines(found):
        at, ms = [row["imbalance"] for row in some], [row["us"] / 1e3 for row in some]
        plot.plot(at, ms, "o-", color=color, linewidth=1.6, markersize=5, label=label)
        for row in some:
            if row["passes"] > 1:
                plot.annotate(
                    f"{row['passes']} passes", (row["imbalance"], row["us"] / 1e3), xytext=(-4, 6),
                    textcoords="offset points", ha="right", fontsize=8, color=color,
                )  # fmt: skip
        if color == BLUE and at[0] == 1:
            plot.plot(at, [x * ms[0] for x in at], "--", color=SOFT, linewidth=1.2, label="X balanced steps")
    plot.set_ylim(0)
    plot.legend(frameon=False, fontsize=8, loc="lower right")
    style(plot, "Forward and backward, ms of wall clock", "load of the busiest rank X, in balanced loads", grid="y")


def _draw_ratios(plot: Plot, found: list[dict[str, Any]]) -> None:
    """Draws the ratio by the imbalance that a row stands for; hollow dots are of smaller buffers."""
    for label, color, some in _lines(found):
        known = [row for row in some if row["ratio"] is not None]
        at, ratios = [row["imbalance"] for row in known], [row["ratio"] for row in known]
        plot.plot(at, ratios, "o-", color=color, linewidth=1.6, markersize=5, label=label)
    smaller = [row for row in found if row["stands_for"] != row["imbalance"] and row["ratio"] is not None]
    if smaller:
        at, ratios = [row["stands_for"] for row in smaller], [row["ratio"] for row in smaller]
        label = f"X = {smaller[0]['imbalance']:g}, buffers as full as at this X"
        plot.plot(at, ratios, "o", color=BLUE, markersize=6, markerfacecolor="white", label=label)
        for row in smaller:
            plot.annotate(
                f"{row['passes']} passes", (row["stands_for"], row["ratio"]), xytext=(0, 7),
                textcoords="offset points", ha="center", fontsize=8, color=BLUE,
            )  # fmt: skip
    plot.axhline(1, color=SOFT, linestyle="--", linewidth=1.2)
    plot.axhline(LIMIT, color=GREEN, linestyle=":", linewidth=1.4, label=f"goal at X = 2: {LIMIT}")
    plot.set_ylim(0)
    plot.legend(frameon=False, fontsize=8, loc="lower right")
    clock = {"busiest_kernel": "kernels of the busiest GPU", "wall": "wall clock"}[found[0]["ratio_of"]]
    style(plot, f"Time over X balanced ones; {clock}", "X", grid="y")


def _draw_memory(plot: Plot, found: list[dict[str, Any]]) -> None:
    """Draws the bytes of a device by imbalance: those of the program's temporaries, and the saved ones among them."""
    for label, color, some in _lines(found):
        at = [row["imbalance"] for row in some]
        for name, form, what in (("temp_bytes", "o-", "temporaries"), ("saved_bytes", "s:", "saved for backward")):
            gigabytes = [row[name] / 1e9 for row in some]
            plot.plot(at, gigabytes, form, color=color, linewidth=1.6, markersize=4, label=f"{label}, {what}")
    plot.set_ylim(0, 1.6 * max(row["temp_bytes"] for row in found) / 1e9)  # room for the legend
    plot.legend(frameon=False, fontsize=8, loc="upper left")
    style(plot, "GB of a device", "load of the busiest rank X, in balanced loads", grid="y")


if __name__ == "__main__":
    raise SystemExit(main())
