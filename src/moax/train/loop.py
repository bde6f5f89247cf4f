"""A run from start to end: restore or initialise, step, evaluate, save, and stop well on Ctrl-C.

With several processes, all of them run this; the first writes metrics and config, and all of them checkpoints.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from moax.arguments import mesh_over_devices
from moax.train import processes
from moax.train import run as runs
from moax.train import step as steps
from moax.train.checkpoint import Checkpoints
from moax.train.data import Corpus, load
from moax.train.mesh import check_batch
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
    """Trains to `config.steps`; `on_step` sees every step's row, and in a single process it may raise KeyboardInterrupt
    to save and stop."""
    report = report or Report()

    def prepare():
        corpus, mesh = load(config.text, config.seq), mesh_over_devices(config.mesh)
        check_batch(config.batch, mesh)
        return corpus, mesh, runs.reopen(config, corpus) if resume else None

    corpus, mesh, run = processes.together(prepare)
    # Each may have a copy of the text of its own; what is in it counts.
    processes.agree(**(config.to_json() | {"text": corpus.fingerprint}), resume=resume)
    with jax.set_mesh(mesh), contextlib.closing(report):
        began = time.perf_counter()
        report.start(config, mesh, corpus)
        program = steps.build(config, mesh)
        if run is None:
            run, config = _create(config)
        if processes.is_first():
            run.write_config(config, corpus)
        with Checkpoints(run.checkpoints) as checkpoints:
            loop = _Loop(config, corpus, program, run, checkpoints, report)
            loop.begin()
            report.ready(run, loop.done, time.perf_counter() - began)
            loop.go(on_step)
    return Result(config, run, loop.done, interrupted=loop.done < config.steps, update=program.update)


def _create(config: TrainConfig) -> tuple[runs.Run, TrainConfig]:
    """`runs.create` by the first process, for all of them."""
    name = processes.together(lambda: runs.create(config)[1].name if processes.is_first() else "")
    config = dataclasses.replace(config, name=processes.gather(name)[0])
    run = runs.Run(Path(config.out, config.name))

    def check():
        if not run.path.is_dir():
            raise ValueError(f"--out {config.out}: {run.path} is not here; all processes must share this folder")

    processes.together(check)
    return run, config


class _Loop:
    """A run in progress: `state` after `done` steps, and how it advances."""

    def __init__(self, config, corpus: Corpus, program: steps.Program, run: runs.Run, checkpoints, report: Report):
        self.config, self.corpus, self.program = config, corpus, program
        self.run, self.checkpoints, self.report = run, checkpoints, report
        self.routed = np.zeros((config.model.num_layers, config.model.num_experts), np.int64)

    def begin(self) -> None:
        """Restores the newest checkpoint, or starts anew."""
        # A network's file system may show each process another folder for a while: the first one's word goes.
        saved = json.loads(processes.gather(json.dumps(self.checkpoints.latest()))[0])
        self.done = saved or 0
        self.state = self.program.init() if saved is None else self.checkpoints.restore(saved, self.program.like)
        if processes.is_first():
            self.run.forget_after(self.done or -1)  # a run without steps evaluates once more

    def go(self, on_step: Callable[[dict], None] | None) -> None:
        """Steps until the end or Ctrl-C, then saves."""
        if not self.done:
            self.held_out()
        with _asked_to_stop(self.report) as asked:
            try:
                while self.done < self.config.steps and not asked(self.done):
                    row = self.step()
                    if on_step:
                        on_step(row)
            except KeyboardInterrupt:
                # Inside an update the old state is already given away: then only the last checkpoint is left. And one
                # of several processes cannot save alone.
                if jax.process_count() > 1 or any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
                    raise
            self.checkpoints.save(self.done, self.state)

    def feed(self, rows: Callable[[slice], np.ndarray]) -> jax.Array:
        """The global batch, of which each process makes the rows of its own devices."""
        shape = (self.config.batch, self.config.seq + 1)
        return jax.make_array_from_callback(shape, self.program.rows, lambda index: rows(cast(Any, index)[0]))

    def log(self, **row) -> None:
        """A row of metrics, which are the same in every process."""
        if processes.is_first():
            self.run.log(**row)

    def step(self) -> dict:
        """One update, and what is due after it; returns the step's row of metrics."""
        config, began = self.config, time.perf_counter()
        batch = self.feed(partial(self.corpus.batch, config.seed, self.done, config.batch, config.seq))
        self.state, metrics = self.program.update(self.state, batch)
        metrics = jax.device_get(metrics)
        seconds = time.perf_counter() - began
        self.done += 1
        routed = metrics.pop("tokens_per_expert")
        self.routed += routed
        row = {"step": self.done} | {name: value.item() for name, value in metrics.items()}
        row["busiest"] = float((routed.max(1) / routed.sum(1).clip(1)).max())
        row["tokens_per_s"] = config.batch * config.seq / seconds
        self.log(**row)
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
            place = partial(self.corpus.held_out_batch, index, config.eval_batches, config.batch, config.seq)
            total += float(self.program.evaluate(self.state, self.feed(place)))
        loss = total / config.eval_batches
        self.log(step=self.done, held_out_loss=loss, tokens_per_expert=self.routed.tolist())
        self.routed[:] = 0
        self.report.held_out(self.done, loss)


@contextlib.contextmanager
def _asked_to_stop(report: Report) -> Iterator[Callable[[int], bool]]:
    """Whether to stop after so many steps: once after the first Ctrl-C; a second raises KeyboardInterrupt.

    Several processes stop after the same step, when any of them gets Ctrl-C or SIGTERM. Outside the main thread there
    is no Ctrl-C.
    """
    asked, several = threading.Event(), jax.process_count() > 1

    def handle(number, frame):
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        with contextlib.suppress(RuntimeError):  # the signal came in the middle of a print
            report.note("Ctrl-C: this step ends, then the state is saved. Once more stops at once.")
        if several:  # JAX tells the others, and finds the step
            os.kill(os.getpid(), signal.SIGTERM)

    stop = multihost_utils.reached_preemption_sync_point if several else lambda done: asked.is_set()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
