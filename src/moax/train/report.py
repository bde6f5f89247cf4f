"""The reports of a run: plain lines for logs, and a live bar for a terminal."""

from __future__ import annotations

import sys
import time

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from moax import backend
from moax.mesh.devices import crossing
from moax.text import plural
from moax.train.data import Corpus
from moax.train.model import count
from moax.train.presets import TrainConfig
from moax.train.processes import is_first
from moax.train.run import Run

STEP = len("step 10000/10000")  # A narrow terminal leaves at least these columns to the number of the step.


class Report:
    """The report that shows nothing. Its subclasses override the events that they show."""

    def start(self, config: TrainConfig, mesh, corpus: Corpus) -> None:
        """The run calls this before it compiles."""

    def ready(self, run: Run, done: int, seconds: float) -> None:
        """The run calls this when it has compiled, and has initialised the state or restored it at step `done`.

        Args:
          run: the folder of the run.
          done: the updates of the restored state; 0 for a new run.
          seconds: the time since `start`.
        """

    def step(self, row: dict) -> None:
        """The run calls this after each step with the step's row of metrics.jsonl."""

    def held_out(self, step: int, loss: float) -> None:
        """The run calls this after each evaluation; `loss` is in nats a byte."""

    def note(self, text: str) -> None:
        """The run calls this with a line for the user."""

    def close(self) -> None:
        """The run calls this at the end, also after an error."""


class PlainReport(Report):
    """The report that prints lines: the settings, about twenty steps, and each evaluation."""

    def __init__(self, stream=None):
        self.stream = stream or sys.stdout

    def start(self, config: TrainConfig, mesh, corpus: Corpus) -> None:
        self.config, self.every, self.last = config, max(1, config.steps // 20), float("nan")
        for line in describe(config, mesh, corpus):
            self.note(line)
        self.note("compiling ...")

    def ready(self, run: Run, done: int, seconds: float) -> None:
        self.note(f"ready after {seconds:.0f} s" + (f", resumed at step {done}" if done else "") + f"; see {run.path}/")

    def step(self, row: dict) -> None:
        if row["step"] % self.every == 0 or row["step"] == 1:
            self.note(f"step {row['step']:>6}/{self.config.steps}  {status(row, self.config)}")

    def held_out(self, step: int, loss: float) -> None:
        self.last = loss
        self.note(f"step {step:>6}/{self.config.steps}  held-out loss {loss:.3f}")

    def note(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


class LiveReport(PlainReport):
    """The report that draws one bar, with the numbers of the last step beside it; evaluations are lines above it."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console()
        self.progress = Progress(
            TextColumn("step {task.completed}/{task.total}", table_column=Column(no_wrap=True, min_width=STEP)),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(compact=True),
            console=self.console,
        )

    def ready(self, run: Run, done: int, seconds: float) -> None:
        super().ready(run, done, seconds)
        self.task = self.progress.add_task("", total=self.config.steps, completed=done, status="")
        self.progress.start()
        self.shown = time.monotonic()

    def step(self, row: dict) -> None:
        self.progress.update(self.task, completed=row["step"], status=status(row, self.config, self.last))

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self.progress.stop()


class Passes:
    """The steps of a run that took more than one pass over the buffers of the experts.

    Args:
      buffer_factor: the argument of the run.
      many: the number of such steps that is worth a word.
    """

    def __init__(self, buffer_factor: float | None, many: int = 20):
        self.buffer_factor, self.many = buffer_factor, many
        self.steps, self.repeated, self.most = 0, 0, 1

    def advise(self, passes: int) -> str | None:
        """Counts a step of so many passes, and returns once which argument a user may raise and to what value.

        It does when `many` steps, and at least half of all, took more than one pass; else it returns None.
        """
        self.steps, self.repeated, self.most = self.steps + 1, self.repeated + (passes > 1), max(self.most, passes)
        if self.repeated != self.many or 2 * self.repeated < self.steps or self.buffer_factor is None:
            return None
        enough = self.buffer_factor * self.most
        return (
            f"{self.repeated} of {self.steps} steps took up to {self.most} passes over the buffers of the experts: "
            f"--buffer-factor {enough:g} (now {self.buffer_factor:g}) makes one pass of each, in {self.most} times the "
            "memory of these buffers"
        )


def for_stream(*, json: bool = False) -> Report:
    """Returns the report of this process: the live bar on a terminal, and plain lines elsewhere.

    Args:
      json: stdout is for JSON, so that the lines go to stderr.

    Returns:
      A report that shows nothing in all processes but the first.
    """
    if not is_first():
        return Report()
    if json:
        return PlainReport(sys.stderr)
    console = Console()
    return LiveReport(console) if console.is_terminal else PlainReport()


def describe(config: TrainConfig, mesh, corpus: Corpus) -> list[str]:
    """Returns the lines that say what a run trains, on which devices and on which text."""
    model = config.model
    total, active = count(model)
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return [
        f"model  {total / 1e6:.1f} M parameters, {active / 1e6:.1f} M of them active: "
        f"{plural(model.num_layers, 'layer')} of width {model.d_model}, each with {model.num_experts} experts of width "
        f"{model.d_ff}, top-{model.top_k}",
        f"runs   in {config.dtype}, recipe {config.recipe or 'none'}, exchange {config.exchange}, "
        f"balance {model.balance}",
        f"mesh   {axes}: {mesh.size} {backend.platform()} devices{_spread(mesh)}",
        f"text   {corpus.train.size / 1e6:.1f} MB to train on, {corpus.held_out.size / 1e6:.2f} MB held out, "
        f"from {corpus.source}",
        f"steps  {config.steps} of {config.batch} x {config.seq} bytes",
    ]


def _spread(mesh) -> str:
    """Returns which mesh axes cross processes, so that a wrong order of the axes shows; "" for one process."""
    count, across = jax.process_count(), crossing(mesh)
    return f" in {count} processes, with {' and '.join(across)} across them" if count > 1 else ""


def status(row: dict, config: TrainConfig, held_out: float | None = None) -> str:
    """Returns the numbers of one step as text; the share of the busiest expert stands beside an even share."""
    even = 1 / config.model.num_experts
    last = "" if held_out is None else f"held-out {held_out:.3f}  "
    return (
        f"loss {row['loss']:.3f}  {last}{row['tokens_per_s']:,.0f} tok/s  dropped {row['dropped']}  "
        f"passes {row['passes']}  busiest {row['busiest']:.1%} (even {even:.1%})"
    )
