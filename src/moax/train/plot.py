"""This module draws curves.png: the losses, the tokens of each expert, and the share of the busiest expert by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes as Plot
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from moax.figures import BLUE, GREEN, INK, ORANGE, PURPLE, SOFT, make_figure, style
from moax.text import plural
from moax.train.presets import TrainConfig
from moax.train.run import Run

TRAIN, HELD_OUT = BLUE, ORANGE


def draw(run: Run, config: TrainConfig) -> None:
    """Draws `run.curves` from the metrics.jsonl of the run; a run without a step gets no plot."""
    rows = run.rows()
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "held_out_loss" in row]
    if not steps:
        return
    figure = make_figure(11, 5.6)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.35, 1), height_ratios=(1.15, 1))
    mesh = ", ".join(f"{axis}={size}" for axis, size in config.mesh) or "one axis"
    model = config.model
    figure.suptitle(
        f"{config.name}: {plural(model.num_layers, 'layer')}, {model.num_experts} experts, top-{model.top_k}; "
        f"recipe {config.recipe or 'none'}, mesh {mesh}",
        x=0.01, ha="left", fontsize=12, color=INK, weight="bold",
    )  # fmt: skip
    _losses(figure.add_subplot(grid[:, 0]), steps, evaluations)
    last = next((row for row in reversed(evaluations) if np.any(row["tokens_per_expert"])), None)
    if last:
        before = max((row["step"] for row in evaluations if row["step"] < last["step"]), default=0)
        tokens = np.asarray(last["tokens_per_expert"], float)
        _experts(figure.add_subplot(grid[0, 1]), figure, tokens, f"steps {before + 1} to {last['step']}")
    _busiest(figure.add_subplot(grid[1, 1]), steps, model.num_experts)
    figure.savefig(run.curves)


def compare(runs: list[Run], path: Path) -> list[tuple[str, float, float]]:
    """Draws the losses of several runs on one plot and, below it, by how much each run differs from the first.

    A line is the training loss, smoothed; a dot is a held-out loss. Lines of later runs are thinner, so that a run
    which lies on another one hides nothing.

    Args:
      runs: the folders of the runs.
      path: the file of the plot.

    Returns:
      The name, the last held-out loss in nats a byte and the median tokens a second of each run.

    Raises:
      ValueError: a run has no step, or no held-out loss.
    """
    losses = [(_series(run.rows(), "loss"), _series(run.rows(), "held_out_loss")) for run in runs]
    for run, series in zip(runs, losses, strict=True):
        if any(len(steps) == 0 for steps, _ in series):
            raise ValueError(f"{run.path} has no step, or no held-out loss, to draw")
    figure = make_figure(9, 5.6 if len(runs) > 1 else 4)
    plots = figure.subplots(2, sharex=True, height_ratios=(2, 1)) if len(runs) > 1 else [figure.add_subplot()]
    (first_steps, first_loss), (first_dots, first_held) = losses[0]
    for i, (run, ((steps, loss), (dots, held))) in enumerate(zip(runs, losses, strict=True)):
        color, width = (TRAIN, HELD_OUT, GREEN, PURPLE)[i % 4], max(1.4, 4.2 - 1.4 * i)
        plots[0].plot(steps, loss, color=color, alpha=0.15, linewidth=1)
        plots[0].plot(steps, _smooth(loss), color=color, linewidth=width, label=run.path.name)
        plots[0].plot(dots, held, "o", color=color, markersize=3 + width, markeredgecolor="white")
        if i > 0:
            common, here, there = np.intersect1d(steps, first_steps, return_indices=True)
            plots[1].plot(common, _smooth(loss)[here] - _smooth(first_loss)[there], color=color, linewidth=1.6)
            common, here, there = np.intersect1d(dots, first_dots, return_indices=True)
            gaps = held[here] - first_held[there]
            plots[1].plot(common, gaps, "o", color=color, markersize=6, markeredgecolor="white")
    plots[0].legend(frameon=False, loc="upper right", fontsize=9)
    title = "Loss, nats a byte; a line is training, smoothed, and a dot is held out"
    style(plots[0], title, "" if len(runs) > 1 else "step", grid="y")
    if len(runs) > 1:
        plots[1].axhline(0, color=TRAIN, linewidth=1.6)
        style(plots[1], f"By how much a loss exceeds that of {runs[0].path.name}", "step", grid="y")
    figure.savefig(path)
    rates = [float(np.median(_series(run.rows(), "tokens_per_s")[1])) for run in runs]
    return [(run.path.name, float(held[1][-1]), rate) for run, (_, held), rate in zip(runs, losses, rates, strict=True)]


def _losses(plot: Plot, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
    """Draws the training loss and the held-out loss by step."""
    step, loss = _series(steps, "loss")
    plot.plot(step, loss, color=TRAIN, alpha=0.25, linewidth=1)
    plot.plot(step, _smooth(loss), color=TRAIN, linewidth=1.8, label="training")
    if evaluations:
        step, loss = _series(evaluations, "held_out_loss")
        plot.plot(step, loss, color=HELD_OUT, linewidth=1.4, marker="o", markersize=5, label="held out")
        plot.annotate(
            f"{loss[-1]:.2f}", (step[-1], loss[-1]), xytext=(9, 0), textcoords="offset points",
            va="center", color=HELD_OUT, weight="bold", annotation_clip=False,
        )  # fmt: skip
        plot.margins(x=0.07)
    plot.legend(frameon=False, loc="upper right")
    style(plot, "Loss, nats a byte", "step", grid="y")


def _experts(plot: Plot, figure: Figure, tokens: Float[np.ndarray, "L E"], when: str) -> None:
    """Draws the tokens [L, E] of each expert as multiples of an even share: tokens[l, e] * E / (sum of tokens[l])."""
    load = tokens / tokens.mean(axis=1, keepdims=True).clip(1)
    norm = TwoSlopeNorm(1.0, 0.0, max(2.0, float(load.max())))
    image = plot.imshow(load, cmap="PuOr_r", norm=norm, aspect="auto")
    layers, experts = load.shape
    if layers * experts <= 128:
        for layer in range(layers):
            for expert in range(experts):
                ink = "white" if abs(float(norm(load[layer, expert])) - 0.5) > 0.33 else INK
                plot.text(expert, layer, f"{load[layer, expert]:.1f}", ha="center", va="center", fontsize=8, color=ink)
    plot.set_xticks(range(0, experts, max(1, experts // 8)))
    plot.set_yticks(range(0, layers, max(1, layers // 8)))
    bar = figure.colorbar(image, ax=plot, pad=0.02, aspect=14)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8, colors=INK, length=0)
    bar.ax.set_yscale("linear")
    style(plot, f"Tokens of each expert, {when}; 1 = an even share", "expert", "layer")
    plot.spines[:].set_visible(False)
    plot.tick_params(length=0)


def _busiest(plot: Plot, steps: list[dict[str, Any]], experts: int) -> None:
    """Draws the share of the busiest expert of any layer by step, in percent."""
    step, share = _series(steps, "busiest")
    plot.plot(step, 100 * share, color=TRAIN, alpha=0.25, linewidth=1)
    plot.plot(step, 100 * _smooth(share), color=TRAIN, linewidth=1.8)
    plot.axhline(100 / experts, color=SOFT, linestyle="--", linewidth=1)
    plot.annotate("even", (step[0], 100 / experts), xytext=(2, 3), textcoords="offset points", fontsize=8, color=SOFT)
    plot.set_ylim(0)
    dropped = sum(row["dropped"] for row in steps)
    style(plot, f"Share of the busiest expert of any layer, %; {dropped:,} dropped in all", "step", grid="y")


def _series(rows: list[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps of the rows that hold `name`, and that value of each of them."""
    held = [row for row in rows if name in row]
    return np.array([row["step"] for row in held]), np.array([row[name] for row in held])


def _smooth(values: np.ndarray) -> np.ndarray:
    """Returns the mean over a centred window of a twentieth of the run; the window is shorter at both ends."""
    half = max(1, len(values) // 40)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    first = np.maximum(np.arange(len(values)) - half, 0)
    last = np.minimum(np.arange(len(values)) + half + 1, len(values))
    return (sums[last] - sums[first]) / (last - first)
