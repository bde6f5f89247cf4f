"""The lines of a run: its settings, its steps, and its end with the bytes of weights on the wire."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from typing import TYPE_CHECKING, Any, TextIO

import jax
import numpy as np

from lm.config import TrainConfig
from lm.data import Corpus
from lm.model import AXES, count, pick_attention
from lm.processes import is_first
from lm.run import Run
from lm.step import jit_update
from moax import inspect
from moax.program import mesh_over_devices

if TYPE_CHECKING:
    from lm.loop import Result


class Report:
    """Prints the settings, about twenty steps, and each evaluation to `stream`; None prints nothing."""

    def __init__(self, stream: TextIO | None = None):
        self.stream = stream

    def note(self, text: str) -> None:
        """Prints a line."""
        if self.stream:
            print(text, file=self.stream, flush=True)

    def start(self, config: TrainConfig, mesh, corpus: Corpus) -> None:
        """The run calls this before it compiles."""
        self.config, self.every = config, max(1, config.steps // 20)
        if self.stream:
            for line in describe(config, mesh, corpus):
                self.note(line)
            self.note("compiling ...")

    def ready(self, run: Run, done: int, seconds: float) -> None:
        """The run calls this when it has compiled, `seconds` after `start`, and has the state of step `done`."""
        self.note(f"ready after {seconds:.0f} s" + (f", resumed at step {done}" if done else "") + f"; see {run.path}/")

    def step(self, row: dict[str, Any]) -> None:
        """The run calls this after each step with the step's row of metrics.jsonl."""
        if row["step"] % self.every == 0 or row["step"] == 1:
            even = 1 / self.config.model.num_experts
            self.note(
                f"step {row['step']:>6}/{self.config.steps}  loss {row['loss']:.3f}  {row['tokens_per_s']:,.0f} tok/s  "
                f"dropped {row['dropped']}  rounds {row['rounds']}  busiest {row['busiest']:.1%} (even {even:.1%})"
            )

    def held_out(self, step: int, loss: float) -> None:
        """The run calls this after each evaluation; `loss` is in nats a byte."""
        self.note(f"step {step:>6}/{self.config.steps}  held-out loss {loss:.3f}")


def make_report(*, json: bool = False) -> Report:
    """Returns the report of this process: the first one prints to stdout, or to stderr where stdout is for JSON."""
    return Report((sys.stderr if json else sys.stdout) if is_first() else None)


def describe(config: TrainConfig, mesh: jax.sharding.Mesh, corpus: Corpus) -> list[str]:
    """Returns the lines that say what a run trains, on which devices and on which text."""
    model = config.model
    total, active = count(model)
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    devices = f"{mesh.size} {mesh.devices.flat[0].platform} devices"
    if jax.process_count() > 1:
        devices += f" in {jax.process_count()} processes, with {' and '.join(crossing(mesh))} across them"
    return [
        f"model  {total / 1e6:.1f} M parameters, {active / 1e6:.1f} M of them active: {model.num_layers} layers of "
        f"width {model.d_model}, each with {model.num_experts} experts of width {model.d_ff}, top-{model.top_k}",
        f"runs   in {config.dtype}, recipe {config.recipe or 'none'}, exchange {config.exchange}, "
        f"attention {pick_attention(config)}, balance {model.balance}",
        f"mesh   {axes}: {devices}",
        f"text   {corpus.train.size / 1e6:.1f} MB to train on, {corpus.held_out.size / 1e6:.2f} MB held out, "
        f"from {corpus.source}",
        f"steps  {config.steps} of {config.batch} x {config.seq} bytes",
    ]


def crossing(mesh: Any) -> tuple[str, ...]:
    """Returns the names of the axes along which two neighbouring devices belong to different processes."""
    owners = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    return tuple(name for dim, name in enumerate(mesh.axis_names) if np.diff(owners, axis=dim).any())


def finish(result: Result) -> dict[str, Any]:
    """Draws the curves, and returns how the run ended, as a dict that JSON can hold.

    The first of several processes draws and reads files. All of them compile the program without the recipe, since
    the processes compile together. A value is None where the run did not get that far. `weight_gathers` has the
    `bytes` that a device sends in an update, and the `unquantized_bytes` that it would send without a recipe.
    """
    from lm import plots

    config = result.config
    gathered = None if result.interrupted else measure_gathers(config, result.update)
    rows = result.run.rows() if is_first() else []
    if is_first():
        plots.draw_run(result.run, config)
    steps = [row for row in rows if "loss" in row]
    evaluations = [row for row in rows if "held_out_loss" in row]
    held_out = None
    if evaluations:
        first, last = evaluations[0], evaluations[-1]
        held_out = {"first": first["held_out_loss"], "last": last["held_out_loss"], "step": last["step"]}
    return {
        "name": config.name,
        "folder": str(result.run.path),
        "steps": result.steps,
        "interrupted": result.interrupted,
        "loss": steps[-1]["loss"] if steps else None,
        "held_out_loss": held_out,
        "dropped": sum(row["dropped"] for row in steps) if steps else None,
        "rounds": max(row["rounds"] for row in steps) if steps else None,
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in steps) if steps else None,
        "weight_gathers": gathered,
        "curves": str(result.run.curves) if steps else None,
    }


def lines(config: TrainConfig, end: dict[str, Any]) -> list[str]:
    """Returns the lines that a run prints for `end`, the result of `finish`."""
    text, held_out, gathered = [], end["held_out_loss"], end["weight_gathers"]
    if held_out and held_out["step"]:
        bits = held_out["last"] / math.log(2)
        text.append(
            f"held-out loss   {held_out['first']:.3f} -> {held_out['last']:.3f} nats a byte ({bits:.2f} bits) after "
            f"{held_out['step']} steps"
        )
    if end["dropped"] is not None:
        text.append(f"dropped         {end['dropped']} of all (token, expert) pairs")
    if end["rounds"] is not None and end["rounds"] > 1 and config.buffer_factor is not None:
        enough = config.buffer_factor * end["rounds"]
        text.append(
            f"rounds          up to {end['rounds']} in a step over the buffers of the experts; --buffer-factor "
            f"{enough:g} (now {config.buffer_factor:g}) makes one, in {end['rounds']} times their memory"
        )
    if gathered:
        sent, plain = gathered["bytes"], gathered["unquantized_bytes"]
        said = f"a device sends {sent / 1e6:.2f} MB in a step"
        if config.recipe:
            said += f" with {config.recipe}, {sent / plain:.2f} of the {plain / 1e6:.2f} MB in {config.dtype} without"
        text.append(f"weight gathers  {said}")
    if end["curves"]:
        text.append(f"curves          {end['curves']}")
    return text


def measure_gathers(config: TrainConfig, update: jax.stages.Compiled) -> dict[str, int] | None:
    """Returns the bytes of weights that a device sends in `update`, and those without a recipe; None for no gather."""
    sent = plain = gather_bytes(update)
    # Every backend gathers float32 as it is. A CPU's compiled program gathers bfloat16 as float32, its lowered one not.
    if config.recipe or config.dtype != "float32":
        mesh = mesh_over_devices(config.mesh)
        with jax.set_mesh(mesh):
            step, args = jit_update(dataclasses.replace(config, recipe=None), mesh)
            plain = gather_bytes(step.lower(*args))
        sent = sent if config.recipe else plain
    return {"bytes": sent, "unquantized_bytes": plain} if plain else None


def gather_bytes(program: jax.stages.Lowered | jax.stages.Compiled) -> int:
    """Returns the bytes of weights and scales that a device sends in one update, with one round over the buffers."""
    found = [c for c in inspect.collectives(program) if not c.open_loop]
    return inspect.total_bytes(inspect.weight_gathers(found, AXES.fsdp))
