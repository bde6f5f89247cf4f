"""The end of a run: it draws the plot, and reports the held-out losses and what the recipe saved on the wire."""

from __future__ import annotations

import math
import statistics
from typing import Any

from moax.text import plural
from moax.train import plot, processes, traffic
from moax.train.loop import Result


def finish(result: Result) -> dict[str, Any]:
    """Draws the curves, and returns how the run ended.

    The first of several processes draws and reads files. All of them compile the program without the recipe, since
    the processes compile together.

    Returns:
      A dict that JSON can hold. A value is None where the run did not get that far. `held_out_loss` has the `first`
      loss, the `last` one and the `step` of the last one, in nats a byte. `weight_gathers` has the `bytes` that a
      device sends in an update, and the `unquantized_bytes` that it would send without a recipe.
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
        "passes": max(row["passes"] for row in steps) if steps else None,
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in steps) if steps else None,
        "weight_gathers": gathered and {"bytes": gathered[0], "unquantized_bytes": gathered[1]},
        "curves": str(result.run.curves) if steps else None,
    }


def lines(result: Result, end: dict[str, Any]) -> list[str]:
    """Returns the lines that `moax train` prints for `end`, which `finish` returned."""
    text, held_out, gathered = [], end["held_out_loss"], end["weight_gathers"]
    if held_out and held_out["step"]:
        bits = held_out["last"] / math.log(2)
        text.append(
            f"held-out loss   {held_out['first']:.3f} -> {held_out['last']:.3f} nats a byte ({bits:.2f} bits) after "
            f"{plural(held_out['step'], 'step')}"
        )
    if end["dropped"] is not None:
        text.append(f"dropped         {end['dropped']} of all (token, expert) pairs")
    if end["passes"] is not None and end["passes"] > 1:
        text.append(f"passes          up to {end['passes']} in a step over the buffers of the experts")
    if gathered:
        text.append(f"weight gathers  {traffic.describe(result.config, **gathered)}")
    if end["curves"]:
        text.append(f"curves          {end['curves']}")
    return text
