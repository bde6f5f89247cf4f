"""The end of a run: the plot, held-out loss at start and end, and what quantizing saved on the wire."""

from __future__ import annotations

import math
import statistics
from typing import Any

from moax.train import plot, processes, traffic
from moax.train.loop import Result


def finish(result: Result) -> dict[str, Any]:
    """Draws the curves and returns how the run went, as JSON holds it; None for what it did not get to. Of several
    processes the first alone draws and reads files, but all compile what is compared: compilers work together too.

    `held_out_loss` has the `first`, the `last`, and the `step` of that; `weight_gathers` the bytes of an update and
    device, and those without a recipe.
    """
    config = result.config
    gathered = None if result.interrupted else traffic.measure(config, result.update)
    rows = result.run.rows() if processes.is_first() else []
    if processes.is_first():
        plot.draw(result.run, config)
    losses = [row for row in rows if "held_out_loss" in row]
    steps = [row for row in rows if "loss" in row]
    first, last = (losses[0], losses[-1]) if losses else (None, None)
    return {
        "name": config.name,
        "folder": str(result.run.path),
        "steps": result.steps,
        "interrupted": result.interrupted,
        "loss": steps[-1]["loss"] if steps else None,
        "held_out_loss": first
        and last
        and {"first": first["held_out_loss"], "last": last["held_out_loss"], "step": last["step"]},
        "dropped": sum(row["dropped"] for row in steps) if steps else None,
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in steps) if steps else None,
        "weight_gathers": gathered and {"bytes": gathered[0], "unquantized_bytes": gathered[1]},
        "curves": str(result.run.curves) if steps else None,
    }


def lines(result: Result, found: dict[str, Any]) -> list[str]:
    """What `finish` found, for people."""
    said, held, gathered = [], found["held_out_loss"], found["weight_gathers"]
    if held and held["step"]:
        bits = held["last"] / math.log(2)
        said.append(
            f"held-out loss   {held['first']:.3f} -> {held['last']:.3f} nats a byte ({bits:.2f} bits) after "
            f"{held['step']} steps"
        )
    if found["dropped"] is not None:
        said.append(f"dropped         {found['dropped']} of all tokens' expert assignments")
    if gathered:
        said.append(f"weight gathers  {traffic.describe(result.config, **gathered)}")
    if found["curves"]:
        said.append(f"curves          {found['curves']}")
    return said
