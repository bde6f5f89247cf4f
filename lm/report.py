"""The lines of a run: its settings, its steps, and its end with the bytes of weights on the wire."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING, Any, TextIO

import jax
import numpy as np

from lm.config import LIMITED_FACTOR, TrainConfig, mesh_over_devices
from lm.data import Corpus
from lm.model import AXES, count, pick_attention
from lm.processes import is_first
from lm.run import Run
from lm.step import jit_update
from moax import inspect

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
        self.config = config
        self.every = max(1, config.steps // 20)
        if self.stream:
            self.note("\n".join([*describe(config, mesh, corpus), "compiling ..."]))

    def ready(self, run: Run, done: int, seconds: float) -> None:
        """The run calls this when it has compiled, `seconds` after `start`, and has the state of step `done`."""
        resumed = f", resumed at step {done}" if done else ""
        self.note(f"ready after {seconds:.0f} s{resumed}; see {run.path}/")

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
        *([f"from   {config.origin}"] if config.origin else []),
    ]


def crossing(mesh: Any) -> tuple[str, ...]:
    """Returns the names of the axes along which two neighbouring devices belong to different processes."""
    owners = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    changes = [np.diff(owners, axis=dim).any() for dim in range(owners.ndim)]
    return tuple(name for name, changed in zip(mesh.axis_names, changes, strict=True) if changed)


def finish(result: Result, report: Report | None = None) -> list[str]:
    """Draws the curves, and returns the lines that say how the run ended; of several processes, in the first alone.

    All of them compile the program without the recipe, since the processes compile together. `report` prints a line
    before each stage.
    """
    from lm import plots  # here, as `python -m lm arms` draws no run, and may run without matplotlib

    config = result.config
    report = report or Report()
    text = []
    if result.interrupted:
        gathers = []
    else:
        gathers = _describe_gathers(config, result.update, report)
    if not is_first():
        return []
    report.note("drawing the curves ...")
    plots.draw_run(result.run, config)
    steps = result.run.rows("loss")
    evaluations = result.run.rows("held_out_loss")
    if evaluations and (last := evaluations[-1])["step"]:
        initial_loss = evaluations[0]["held_out_loss"]
        loss = last["held_out_loss"]
        bits = f"({loss / math.log(2):.2f} bits) after {last['step']} steps"
        text.append(f"held-out loss   {initial_loss:.3f} -> {loss:.3f} nats a byte {bits}")
    if steps:
        speed = statistics.median(row["tokens_per_s"] for row in steps)
        text.append(f"speed           {speed:,.0f} tokens/s in the median step")
        dropped = sum(row["dropped"] for row in steps)
        text.append(f"dropped         {dropped} of all (token, expert) pairs")
        rounds = max(row["rounds"] for row in steps)
        if rounds > 1 and config.buffer_factor is not None:
            factor = LIMITED_FACTOR if config.buffer_factor == "auto" else config.buffer_factor
            text.append(
                f"rounds          up to {rounds} in a step over the buffers of the experts; --buffer-factor "
                f"{factor * rounds:g} (now {factor:g}) makes one, in {rounds} times their memory"
            )
    return text + gathers + [f"curves          {result.run.curves}"] * bool(steps)


def _describe_gathers(config: TrainConfig, update: jax.stages.Compiled, report: Report) -> list[str]:
    """Returns the line of the bytes of weights that a device sends in `update`, and without a recipe; [] for none."""
    report.note("reading the bytes of weights in the compiled step ...")
    sent = plain = _gather_bytes(update)
    # Every backend gathers float32 as it is. A CPU's compiled program gathers bfloat16 as float32, its lowered one not.
    if config.recipe or config.dtype != "float32":
        report.note(f"lowering the step in {config.dtype} without a recipe, to compare its bytes of weights ...")
        mesh = mesh_over_devices(config.mesh)
        with jax.set_mesh(mesh):
            step, args = jit_update(dataclasses.replace(config, recipe=None), mesh)
            plain = _gather_bytes(step.lower(*args))
    if not plain:
        return []
    if not config.recipe:
        return [f"weight gathers  a device sends {plain / 1e6:.2f} MB in a step"]
    part = f"{sent / plain:.2f} of the {plain / 1e6:.2f} MB in {config.dtype} without"
    return [f"weight gathers  a device sends {sent / 1e6:.2f} MB in a step with {config.recipe}, {part}"]


def _gather_bytes(program: jax.stages.Lowered | jax.stages.Compiled) -> int:
    """Returns the bytes of weights and scales that a device sends in one update, with one round over the buffers."""
    collectives = [c for c in inspect.collectives(program) if not c.open_loop]
    return inspect.total_bytes(inspect.weight_gathers(collectives, AXES.fsdp))
