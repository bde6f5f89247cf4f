"""This module draws arms.png: losses of all runs, gaps beside the seeds' own, gradient errors, and values lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes as Plot

from moax.figures import BLUE, GREEN, INK, ORANGE, PURPLE, SOFT, make_figure, style

COLORS = (BLUE, ORANGE, GREEN, PURPLE)
LOSSES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5)  # the ticks of a logarithmic axis


def draw(results: dict[str, Any], path: Path) -> None:
    """Draws what `arms.compare` returned to `path`; nothing where no run was evaluated.

    The gradients and the lost values have panels where there are some.
    """
    if not any(run["steps"] for run in results["held_out"]):
        return
    color = {recipe: COLORS[i % len(COLORS)] for i, recipe in enumerate(results["recipes"])}
    rows = 2 if results["gradients"] else 1
    figure = make_figure(11, 3.6 * rows)
    grid = figure.add_gridspec(rows, 2)
    figure.suptitle(
        f"{results['name']}: {', '.join(results['recipes'])} in {results['dtype']}, seeds: {results['seeds']}",
        x=0.01, ha="left", fontsize=12, color=INK, weight="bold",
    )  # fmt: skip
    _losses(figure.add_subplot(grid[0, 0]), results, color)
    _gaps(figure.add_subplot(grid[0, 1]), results, color)
    if results["gradients"]:
        _errors(figure.add_subplot(grid[1, 0]), results, color)
        _lost(figure.add_subplot(grid[1, 1]), results, color)
    figure.savefig(path)


def _losses(plot: Plot, results: dict[str, Any], color: dict[str, str]) -> None:
    """Draws the held-out loss of every run by step; runs of one recipe have one colour."""
    named = set()
    for run in results["held_out"]:
        recipe = run["recipe"]
        width = 2.6 if recipe == results["recipes"][0] else 1.2
        label = None if recipe in named else recipe
        plot.plot(run["steps"], run["losses"], color=color[recipe], linewidth=width, alpha=0.7, label=label)
        named.add(recipe)
    plot.legend(frameon=False, loc="upper right", fontsize=9)
    plot.set_yscale("log")
    losses = [loss for run in results["held_out"] for loss in run["losses"]]
    ticks = [tick for tick in LOSSES if min(losses) <= tick <= max(losses)]
    plot.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    plot.minorticks_off()
    style(plot, "Held-out loss, nats a byte; a line is a seed", "step", grid="y")


def _gaps(plot: Plot, results: dict[str, Any], color: dict[str, str]) -> None:
    """Draws the mean gap of each recipe and the gaps of its seeds, on the band of the first recipe's own seeds."""
    base = results["recipes"][0]
    for recipe in results["recipes"][1:]:
        rows = [row for row in results["gaps"] if row["recipe"] == recipe]
        band = [row for row in rows if row["between_seeds"] is not None]
        if band:
            half = np.array([row["between_seeds"] for row in band]) / 2
            plot.fill_between([row["step"] for row in band], -half, half, color=SOFT, alpha=0.25, linewidth=0)
        plot.plot([row["step"] for row in rows], [row["mean"] for row in rows], color=color[recipe], linewidth=1.8)
        for row in rows:
            at = [row["step"]] * len(row["gaps"])
            plot.plot(at, row["gaps"], "o", color=color[recipe], markersize=4, markeredgecolor="white")
    plot.axhline(0, color=color[base], linewidth=1.4)
    style(plot, f"Loss less that of {base}, by seed and mean; grey: as far as its seeds differ", "step", grid="y")


def _errors(plot: Plot, results: dict[str, Any], color: dict[str, str]) -> None:
    """Draws the gradient error of every expert as a dot, by projection, and the median as a bar."""
    names, count = list(results["gradients"][0]["projections"]), len(results["gradients"])
    for i, found in enumerate(results["gradients"]):
        for j, name in enumerate(names):
            errors = [e for row in found["projections"][name]["by_expert"] for e in row if e is not None]
            at = j + (i - (count - 1) / 2) * 0.8 / count
            spread = np.linspace(-0.25, 0.25, len(errors)) / count if len(errors) > 1 else np.zeros(len(errors))
            percent = 100 * np.sort(errors)
            plot.plot(at + spread, percent, ".", color=color[found["recipe"]], markersize=3, alpha=0.6)
            median = 100 * found["projections"][name]["median"]
            plot.plot([at - 0.3 / count, at + 0.3 / count], [median] * 2, color=INK, linewidth=1.6)
    plot.set_xticks(range(len(names)), names)
    plot.set_ylim(0)
    style(plot, "Error of a gradient against float32, %; a dot is an expert of a layer", "projection", grid="y")


def _lost(plot: Plot, results: dict[str, Any], color: dict[str, str]) -> None:
    """Draws the shares of values that become 0 and of those that become the largest value, by operand."""
    names = list(results["quantization"][0]["operands"]) if results["quantization"] else []
    count = max(1, len(results["quantization"]))
    for i, found in enumerate(results["quantization"]):
        at = np.arange(len(names)) + (i - (count - 1) / 2) * 0.8 / count
        counts = {n: {what: sum(of[what]) for what in of} for n, of in found["operands"].items()}
        for shift, what, alpha in ((-0.18, "underflow", 1.0), (0.18, "saturated", 0.4)):
            share = [100 * counts[n][what] / max(1, counts[n]["values"]) for n in names]
            label = f"{found['recipe']}: {'become 0' if what == 'underflow' else 'the largest value'}"
            bars = at + shift / count
            plot.bar(bars, share, 0.34 / count, color=color[found["recipe"]], alpha=alpha, label=label)
    plot.set_xticks(range(len(names)), names)
    plot.margins(y=0.3)  # room for the legend
    if names:
        plot.legend(frameon=False, fontsize=8, loc="upper left")
    style(plot, "Values that quantization loses, % of those that are not 0", "operand", grid="y")
