"""A run from start to end: it restores or initialises, steps, evaluates and saves, and Ctrl-C stops it in order.

Several processes all run this module. The first one writes metrics and config; all of them write checkpoints.
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

from lm import processes
from lm import run as runs
from lm import step as steps
from lm.config import TrainConfig, check_batch, mesh_over_devices
from lm.data import Corpus, load
from lm.report import Report


@dataclasses.dataclass(frozen=True)
class Result:
    """The end of a run: its settings with the name that its folder has, and whether Ctrl-C stopped it.

    `steps` is the number of updates, including those before a `--resume`, and `update` the compiled `train_step`.
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
    """Trains until `config.steps` updates are done.

    Args:
      config: the settings of the run.
      resume: continue the run `config.name` from its last checkpoint.
      report: shows the progress; None shows nothing.
      on_step: called with the row of metrics of each step. In a single process it may raise KeyboardInterrupt, which
        saves the state and stops the run.

    Raises:
      ValueError: the text, the mesh or the batch do not fit, or the run to resume or to begin from is another one.
    """
    report = report or Report()

    def prepare():
        corpus = load(config.text, config.seq)
        mesh = mesh_over_devices(config.mesh)
        check_batch(config, mesh)
        if resume:
            return corpus, mesh, config, runs.reopen(config, corpus)
        return corpus, mesh, runs.check_origin(config, corpus), None

    corpus, mesh, config, run = processes.together(prepare)
    # Each process may read a copy of the text; the copies must have the same contents, not the same path.
    processes.agree(**(config.to_json() | {"text": corpus.fingerprint}), resume=resume)
    with jax.set_mesh(mesh):
        began = time.perf_counter()
        report.start(config, mesh, corpus)
        program = steps.build(config, mesh)
        if run is None:
            run, config = _create(config)
        if processes.is_first():
            run.write_config(config, corpus)
        with runs.Checkpoints(run.checkpoints) as checkpoints:
            loop = _Loop(config, corpus, program, run, checkpoints, report)
            report.ready(run, loop.done, time.perf_counter() - began)
            loop.go(on_step)
    return Result(
        config,
        run,
        loop.done,
        interrupted=loop.done < config.steps,
        update=program.update,
    )


def _create(config: TrainConfig) -> tuple[runs.Run, TrainConfig]:
    """Makes the folder of a new run in the first process, and tells its name to the others."""
    name = processes.together(lambda: runs.create(config).name if processes.is_first() else "")
    config = dataclasses.replace(config, name=processes.gather(name)[0])
    run = runs.Run(Path(config.out, config.name))

    def check():
        if not run.path.is_dir():
            raise ValueError(f"--out {config.out}: {run.path} is missing; all processes must share this folder")

    processes.together(check)
    return run, config


class _Loop:
    """A run in progress: `state` is the training state after `done` steps, that of the newest checkpoint at first."""

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        program: steps.Program,
        run: runs.Run,
        checkpoints,
        report: Report,
    ):
        self.config = config
        self.corpus = corpus
        self.program = program
        self.run = run
        self.checkpoints = checkpoints
        self.report = report
        self.routed = np.zeros((config.model.num_layers, config.model.num_experts), np.int64)
        # A network file system may show each process another folder for a while, so the first process decides.
        saved = json.loads(processes.gather(json.dumps(checkpoints.latest()))[0])
        self.has_begun = bool(saved)
        if saved is not None:
            self.done = saved
            self.state = checkpoints.restore(saved, program.like)
        elif config.origin is not None:
            origin, self.done = runs.find_checkpoint(config.origin)
            with runs.Checkpoints(origin.checkpoints) as others:
                self.state = others.restore(self.done, program.like)
        else:
            self.done = 0
            self.state = program.init()
        if processes.is_first():
            # A run without steps evaluates again, so its row of that evaluation goes.
            run.forget_after(self.done if self.has_begun else -1)

    def go(self, on_step: Callable[[dict], None] | None) -> None:
        """Runs steps until the end or Ctrl-C, then saves; `on_step` is called with the row of each step."""
        if not self.has_begun:
            self.evaluate()
        with _asked_to_stop(self.report) as asked:
            try:
                while self.done < self.config.steps and not asked(self.done):
                    row = self.step()
                    if on_step:
                        on_step(row)
            except KeyboardInterrupt:
                # An update donates the old state, so that in the middle of an update only the last checkpoint is left.
                # One of several processes cannot save alone.
                several = jax.process_count() > 1
                if several or any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state)):
                    raise
            self.report.note(f"saving the state after step {self.done} ...")
            self.checkpoints.save(self.done, self.state)

    def step(self) -> dict:
        """Makes one update, then the evaluation and the checkpoint that are due; returns the step's row of metrics."""
        config = self.config
        began = time.perf_counter()
        batch = self.feed(
            partial(
                self.corpus.batch,
                config.seed,
                self.done,
                config.batch,
                config.seq,
            )
        )
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
            self.evaluate()
        if config.save_every and self.done % config.save_every == 0:
            self.checkpoints.save(self.done, self.state)
        return row

    def evaluate(self) -> None:
        """Logs the held-out loss, and the tokens that each expert had since the last evaluation."""
        config = self.config
        total = 0.0
        for index in range(config.eval_batches):
            place = partial(
                self.corpus.held_out_batch,
                index,
                config.eval_batches,
                config.batch,
                config.seq,
            )
            total += float(self.program.evaluate(self.state, self.feed(place)))
        loss = total / config.eval_batches
        self.log(step=self.done, held_out_loss=loss, tokens_per_expert=self.routed.tolist())
        self.routed[:] = 0
        self.report.held_out(self.done, loss)

    def feed(self, rows: Callable[[slice], np.ndarray]) -> jax.Array:
        """Returns the global batch [B, S + 1]; each process makes the sequences of its own devices by `rows(slice)`."""
        shape = (self.config.batch, self.config.seq + 1)
        return jax.make_array_from_callback(
            shape,
            self.program.rows,
            lambda index: rows(cast(Any, index)[0]),
        )

    def log(self, **row) -> None:
        """Writes a row of metrics in the first process; the metrics are the same in every process."""
        if processes.is_first():
            self.run.log(**row)


@contextlib.contextmanager
def _asked_to_stop(report: Report) -> Iterator[Callable[[int], bool]]:
    """Yields a function of the number of steps, which says whether to stop.

    The first Ctrl-C makes it return True; a second Ctrl-C raises KeyboardInterrupt. Several processes stop after the
    same step when any of them gets Ctrl-C or SIGTERM. A thread that is not the main one gets no Ctrl-C.
    """
    asked = threading.Event()
    several = jax.process_count() > 1

    def handle(number, frame):
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        with contextlib.suppress(RuntimeError):  # The signal may arrive in the middle of a print.
            report.note("Ctrl-C: the run saves its state after this step. A second Ctrl-C stops it at once.")
        if several:  # JAX tells the other processes, and agrees with them on the step.
            os.kill(os.getpid(), signal.SIGTERM)

    if several:
        stop = multihost_utils.reached_preemption_sync_point
    else:

        def stop(done):
            return asked.is_set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGINT, handle)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
