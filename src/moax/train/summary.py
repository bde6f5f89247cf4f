"""The end of a run: the plot, held-out loss at start and end, and what quantizing saved on the wire."""

from __future__ import annotations

import math

from moax.train import plot, traffic
from moax.train.loop import Result


def finish(result: Result) -> list[str]:
    """Draws the curves and returns the lines to print."""
    config, rows = result.config, result.run.rows()
    plot.draw(result.run, config)
    losses = [(row["step"], row["held_out_loss"]) for row in rows if "held_out_loss" in row]
    steps = [row for row in rows if "loss" in row]
    lines = []
    if len(losses) > 1:
        (_, first), (at, last) = losses[0], losses[-1]
        bits = last / math.log(2)
        lines.append(f"held-out loss   {first:.3f} -> {last:.3f} nats a byte ({bits:.2f} bits) after {at} steps")
    if steps:
        lines.append(f"dropped         {sum(row['dropped'] for row in steps)} of all tokens' expert assignments")
    if not result.interrupted and (traffic_line := traffic.describe(config, result.update)):
        lines.append(f"weight gathers  {traffic_line}")
    if steps:
        lines.append(f"curves          {result.run.curves}")
    return lines
