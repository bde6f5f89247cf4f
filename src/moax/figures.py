"""This module holds the one style of plots: their colours, fonts and frames. It needs matplotlib (moax[train])."""

from __future__ import annotations

from matplotlib.axes import Axes as Plot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

INK, SOFT, GRID = "#2b2d33", "#9aa0a8", "#e6e8eb"
BLUE, ORANGE, GREEN, PURPLE, PALE = "#2f6fb0", "#d9601a", "#3f8f5b", "#8a5fb0", "#9cc3e5"


def make_figure(width: float, height: float) -> Figure:
    """Returns an empty figure of that many inches, which `savefig` writes without a screen."""
    figure = Figure(figsize=(width, height), dpi=140, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    FigureCanvasAgg(figure)
    return figure


def style(plot: Plot, title: str, x: str, y: str = "", grid: str | None = None) -> None:
    """Sets the title, the axis labels and the frame of a plot.

    Args:
      plot: the plot.
      title: the title, which says what is drawn and in which unit.
      x: the label of the horizontal axis.
      y: the label of the vertical axis.
      grid: the axis that gets grid lines: "x", "y", or None.
    """
    plot.set_title(title, loc="left", fontsize=10, color=INK)
    plot.set_xlabel(x, color=INK, fontsize=9)
    plot.set_ylabel(y, color=INK, fontsize=9)
    plot.tick_params(colors=INK, labelsize=8)
    plot.spines[["top", "right"]].set_visible(False)
    plot.spines[["left", "bottom"]].set_color(SOFT)
    plot.set_axisbelow(True)
    if grid == "x":
        plot.grid(axis="x", color=GRID, linewidth=0.8)
    elif grid == "y":
        plot.grid(axis="y", color=GRID, linewidth=0.8)
