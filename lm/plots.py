"""The plots: curves.png of one run, and comparison.png of several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes as Plot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from lm.config import TrainConfig
from lm.run import Run

INK = "#2b2d33"
SOFT = "#9aa0a8"
GRID = "#e6e8eb"
BLUE, ORANGE, GREEN, PURPLE, OCHRE, TEAL = COLORS = ("#2f6fb0", "#d9601a", "#3f8f5b", "#8a5fb0", "#b0892f", "#3f9ea3")
LOSSES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5)  # the ticks of a logarithmic axis


def make_figure(width: float, height: float, title: str = "") -> Figure:
    """Returns an empty figure of that many inches, which `savefig` writes without a screen."""
    figure = Figure(
        figsize=(width, height),
        dpi=140,
        layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08),
    )
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK, weight="bold")
    return figure


def style(plot: Plot, title: str, x: str, y: str = "") -> None:
    """Sets the title, which names the quantity and its unit, the axis labels, the frame, and lines across y."""
    plot.set_title(title, loc="left", fontsize=10, color=INK)
    plot.set_xlabel(x, color=INK, fontsize=9)
    plot.set_ylabel(y, color=INK, fontsize=9)
    plot.tick_params(colors=INK, labelsize=8)
    plot.spines[["top", "right"]].set_visible(False)
    plot.spines[["left", "bottom"]].set_color(SOFT)
    plot.set_axisbelow(True)
    plot.grid(axis="y", color=GRID, linewidth=0.8)


def draw_run(run: Run, config: TrainConfig) -> None:
    """Draws `run.curves` from the metrics of the run: the losses, and the share of the busiest expert."""
    steps = run.rows("loss")
    evaluations = run.rows("held_out_loss")
    if not steps:
        return
    mesh = ", ".join(f"{axis}={size}" for axis, size in config.mesh) or "one axis"
    model = config.model
    title = f"{config.name}: {model.num_layers} layers, {model.num_experts} experts, top-{model.top_k}"
    figure = make_figure(11, 4.2, f"{title}; recipe {config.recipe or 'none'}, mesh {mesh}")
    losses, shares = figure.subplots(1, 2)
    step, loss = _series(steps, "loss")
    losses.plot(step, loss, color=BLUE, alpha=0.25, linewidth=1)
    losses.plot(step, _smooth(loss), color=BLUE, linewidth=1.8, label="training")
    held_out = _series(evaluations, "held_out_loss")
    losses.plot(*held_out, "o-", color=ORANGE, linewidth=1.4, markersize=5, label="held out")
    losses.legend(frameon=False, fontsize=9)
    style(losses, "Loss, nats a byte", "step")
    step, share = _series(steps, "busiest")
    shares.plot(step, 100 * share, color=BLUE, alpha=0.25, linewidth=1)
    shares.plot(step, 100 * _smooth(share), color=BLUE, linewidth=1.8)
    shares.axhline(100 / model.num_experts, color=SOFT, linestyle="--", linewidth=1)
    shares.set_ylim(0)
    dropped = sum(row["dropped"] for row in steps)
    style(
        shares,
        f"Busiest expert of a layer, % of tokens; dashed: an even share; {dropped:,} dropped",
        "step",
    )
    figure.savefig(run.curves)


def draw_comparison(results: dict[str, Any], path: Path) -> None:
    """Draws the result of `compare.compare` to `path`; nothing where no run was evaluated."""
    if not any(run["steps"] for run in results["held_out"]):
        return
    color = {arm: COLORS[i % len(COLORS)] for i, arm in enumerate(results["arms"])}
    config = results["config"]["model"]
    sizes = f"{config['num_layers']} layers, {config['num_experts']} experts, top-{config['top_k']}"
    figure = make_figure(15, 3.6, f"{sizes}; in {results['dtype']}, seeds: {results['seeds']}")
    losses, gaps, speeds = figure.subplots(1, 3)
    _losses(losses, results, color)
    _gaps(gaps, results, color)
    _speeds(speeds, results, color)
    figure.savefig(path)


def _losses(plot: Plot, results: dict[str, Any], color: dict[str, str]) -> None:
    """Draws the held-out loss of every run by step; runs of one arm have one colour."""
    for run in results["held_out"]:
        arm = run["arm"]
        is_labelled = run["seed"] == results["held_out"][0]["seed"]
        line_style = dict(
            color=color[arm],
            linewidth=2.6 if arm == results["arms"][0] else 1.2,
            alpha=0.7,
        )
        plot.plot(run["steps"], run["losses"], label=arm if is_labelled else None, **line_style)
    plot.legend(frameon=False, loc="upper right", fontsize=9)
    plot.set_yscale("log")
    losses = [loss for run in results["held_out"] for loss in run["losses"]]
    ticks = [tick for tick in LOSSES if min(losses) <= tick <= max(losses)]
    plot.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    plot.minorticks_off()
    style(plot, "Held-out loss, nats a byte; a line is a seed", "step")


def _gaps(plot: Plot, results: dict[str, Any], color: dict[str, str]) -> None:
    """Draws the mean gap of each arm and the gaps of its seeds, on the band of the first arm's own seeds."""
    base = results["arms"][0]
    for arm in results["arms"][1:]:
        rows = [row for row in results["gaps"] if row["arm"] == arm]
        banded = [row for row in rows if row["between_seeds"] is not None]
        band = [(row["step"], row["between_seeds"] / 2) for row in banded]
        steps, half = np.array(band).reshape(-1, 2).T
        plot.fill_between(steps, -half, half, color=SOFT, alpha=0.25, linewidth=0)
        plot.plot(
            [row["step"] for row in rows],
            [row["mean"] for row in rows],
            color=color[arm],
            linewidth=1.8,
        )
        points = [(row["step"], gap) for row in rows for gap in row["gaps"]]
        plot.plot(*np.array(points).reshape(-1, 2).T, "o", color=color[arm], markersize=4)
    plot.axhline(0, color=color[base], linewidth=1.4)
    title = f"Loss less that of {base}, by seed and mean"
    if results["seeds"] > 1:
        title += "; grey: as far as its seeds differ"
    if results["bar"] is not None:
        plot.axhline(results["bar"], color=SOFT, linestyle="--", linewidth=1)
        title += "; dashed: the bar"
    style(plot, title, "step")


def _speeds(plot: Plot, results: dict[str, Any], color: dict[str, str]) -> None:
    """Draws a bar for the speed of every run, under its arm and the share of pairs that it dropped."""
    for place, run in enumerate(results["held_out"]):
        if run["tokens_per_s"]:
            plot.barh(-place, run["tokens_per_s"] / 1e6, height=0.35, color=color[run["arm"]])
            label = f"{run['arm']}, seed {run['seed']}: {run['dropped']:.3%} dropped"
            plot.text(0, 0.25 - place, label, fontsize=8, color=INK, va="bottom")
    plot.set_ylim(0.6 - len(results["held_out"]), 0.7)
    plot.set_yticks([])
    style(plot, "Speed of the median step, million tokens/s", "")


def _series(rows: list[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps of the rows, and the value `name` of each."""
    return np.array([row["step"] for row in rows]), np.array([row[name] for row in rows])


def _smooth(values: np.ndarray) -> np.ndarray:
    """Returns the mean over a centred window of a twentieth of the run; the window is shorter at both ends."""
    half = max(1, len(values) // 40)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    start = np.maximum(np.arange(len(values)) - half, 0)
    last = np.minimum(np.arange(len(values)) + half + 1, len(values))
    return (sums[last] - sums[start]) / (last - start)
