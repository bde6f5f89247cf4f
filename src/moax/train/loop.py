"""A run from start to end: restore or initialise, step, evaluate, save, and stop well on Ctrl-C."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

from moax.train import run as runs
from moax.train import step as steps
from moax.train.checkpoint import Checkpoints
from moax.train.data import Corpus, load
from moax.train.mesh import check_batch, make_mesh
from moax.train.presets import TrainConfig
from moax.train.report import Report


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
      config: as it ran; its name may differ from the one asked for.
      run: its folder.
      steps: updates done, counted from the run's very start.
      interrupted: stopped by Ctrl-C before `config.steps`.
      update: the compiled `train_step`.
    """

    config: TrainConfig
    run: runs.Run
    steps: int
    interrupted: bool
    update: jax.stages.Compiled


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    report: Report | None = None,
    on_step: Callable[[dict], None] | None = None,
) -> Result:
    """Trains to `config.steps`; `on_step` sees every step's row and may raise KeyboardInterrupt to save and stop."""
    report = report or Report()
    corpus = load(config.text, config.seq)
    mesh = make_mesh(config.mesh)
    check_batch(config.batch, mesh)
    with jax.set_mesh(mesh), contextlib.closing(report):
        began = time.perf_counter()
        report.start(config, mesh, corpus)
        run = runs.reopen(config, corpus) if resume else None
        program = steps.build(config, mesh)
        if run is None:
            run, config = runs.create(config)
        run.write_config(config, corpus)
        with contextlib.closing(Checkpoints(run.checkpoints)) as checkpoints:
            loop = _Loop(config, corpus, program, run, checkpoints, report)
            loop.begin()
            report.ready(run, loop.done, time.perf_counter() - began)
            loop.go(on_step)
    return Result(config, run, loop.done, interrupted=loop.done < config.steps, update=program.update)


class _Loop:
    """A run in progress: `state` after `done` steps, and how it advances."""

    def __init__(self, config, corpus: Corpus, program: steps.Program, run: runs.Run, checkpoints, report: Report):
        self.config, self.corpus, self.program = config, corpus, program
        self.run, self.checkpoints, self.report = run, checkpoints, report
        self.routed = np.zeros((config.model.num_layers, config.model.num_experts), np.int64)

    def begin(self) -> None:
        """Restores the newest checkpoint, or starts anew."""
        saved = self.checkpoints.latest()
        self.done = saved or 0
        self.state = self.program.init() if saved is None else self.checkpoints.restore(saved, self.program.like)
        self.run.forget_after(self.done)

    def go(self, on_step: Callable[[dict], None] | None) -> None:
        """Steps until the end or Ctrl-C, then saves."""
        if not self.done:
            self.held_out()
        with _sigint(self.report) as asked:
            try:
                while self.done < self.config.steps and not asked.is_set():
                    row = self.step()
                    if on_step:
                        on_step(row)
            except KeyboardInterrupt:
                # Inside an update the old state is already given away: then only the last checkpoint is left.
                if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
                    raise
            self.checkpoints.save(self.done, self.state)

    def step(self) -> dict:
        """One update, and what is due after it; returns the step's row of metrics."""
        config, began = self.config, time.perf_counter()
        batch = self.corpus.batch(config.seed, self.done, config.batch, config.seq)
        self.state, metrics = self.program.update(self.state, jax.device_put(batch, self.program.rows))
        metrics = jax.device_get(metrics)
        seconds = time.perf_counter() - began
        self.done += 1
        routed = metrics.pop("tokens_per_expert")
        self.routed += routed
        row = {"step": self.done} | {name: value.item() for name, value in metrics.items()}
        row["busiest"] = float((routed.max(1) / routed.sum(1).clip(1)).max())
        row["tokens_per_s"] = config.batch * config.seq / seconds
        self.run.log(**row)
        self.report.step(row)
        if self.done % config.eval_every == 0 or self.done == config.steps:
            self.held_out()
        if config.save_every and self.done % config.save_every == 0:
            self.checkpoints.save(self.done, self.state)
        return row

    def held_out(self) -> None:
        """Logs the held-out loss, and the tokens that each expert had since the last time."""
        config, total = self.config, 0.0
        for index in range(config.eval_batches):
            batch = self.corpus.held_out_batch(index, config.eval_batches, config.batch, config.seq)
            total += float(self.program.evaluate(self.state, jax.device_put(batch, self.program.rows)))
        loss = total / config.eval_batches
        self.run.log(step=self.done, held_out_loss=loss, tokens_per_expert=self.routed.tolist())
        self.routed[:] = 0
        self.report.held_out(self.done, loss)


@contextlib.contextmanager
def _sigint(report: Report) -> Iterator[threading.Event]:
    """The first Ctrl-C sets the event, a second raises KeyboardInterrupt. Outside the main thread: nothing."""
    asked = threading.Event()

    def handle(number, frame):
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        with contextlib.suppress(RuntimeError):  # the signal came in the middle of a print
            report.note("Ctrl-C: this step ends, then the state is saved. Once more stops at once.")

    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
