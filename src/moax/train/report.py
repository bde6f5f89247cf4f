"""What a run says: plain lines for logs, a live bar for a terminal, and the summary at the end."""

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

STEP = len("step 10000/10000")  # columns that a narrow terminal leaves to the number of the step


class Report:
    """Says nothing; the others override what they show."""

    def start(self, config: TrainConfig, mesh, corpus: Corpus) -> None:
        """Before compiling."""

    def ready(self, run: Run, done: int, seconds: float) -> None:
        """Compiled and initialised, or restored at step `done`."""

    def step(self, row: dict) -> None:
        """After a step; `row` as in metrics.jsonl."""

    def held_out(self, step: int, loss: float) -> None:
        """After an evaluation."""

    def note(self, text: str) -> None:
        """Something to tell in between."""

    def close(self) -> None:
        """At the end, also after an error."""


class PlainReport(Report):
    """A line at the start, about twenty lines of steps, and a line for each evaluation."""

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
    """One bar that moves, with the numbers of the last step beside it; evaluations stay above it as lines."""

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


def for_stream(*, json: bool = False) -> Report:
    """The live bar on a terminal, plain lines elsewhere (on stderr, where stdout is for JSON); nothing in any but the
    first of several processes."""
    if not is_first():
        return Report()
    if json:
        return PlainReport(sys.stderr)
    console = Console()
    return LiveReport(console) if console.is_terminal else PlainReport()


def describe(config: TrainConfig, mesh, corpus: Corpus) -> list[str]:
    """What will be trained, on what, where."""
    model = config.model
    total, active = count(model)
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return [
        f"model  {total / 1e6:.1f} M parameters, of which a byte meets {active / 1e6:.1f} M: "
        f"{plural(model.num_layers, 'layer')} of width {model.d_model}, each with {model.num_experts} experts of width "
        f"{model.d_ff}, {model.top_k} a byte",
        f"runs   in {config.dtype}, recipe {config.recipe or 'none'}, exchange {config.exchange}, "
        f"balance {model.balance}",
        f"mesh   {axes}: {mesh.size} {backend.platform()} devices{_spread(mesh)}",
        f"text   {corpus.train.size / 1e6:.1f} MB to train on, {corpus.held_out.size / 1e6:.2f} MB held out, "
        f"from {corpus.source}",
        f"steps  {config.steps} of {config.batch} x {config.seq} bytes",
    ]


def _spread(mesh) -> str:
    """Which axes are between processes, so that a wrong order of them shows; nothing for one process."""
    count, across = jax.process_count(), crossing(mesh)
    return f" in {count} processes, with {' and '.join(across)} across them" if count > 1 else ""


def status(row: dict, config: TrainConfig, held_out: float | None = None) -> str:
    """One step's numbers: the even share of an expert stands behind the busiest one's."""
    even = 1 / config.model.num_experts
    last = "" if held_out is None else f"held-out {held_out:.3f}  "
    return (
        f"loss {row['loss']:.3f}  {last}{row['tokens_per_s']:,.0f} tok/s  dropped {row['dropped']}  "
        f"busiest {row['busiest']:.1%} (even {even:.1%})"
    )
