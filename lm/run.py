"""A run's folder holds config.json, metrics.jsonl, checkpoints/ and curves.png.

A checkpoint has an array for each name, and any mesh can restore it. Several processes save and restore together in a
folder that they share; each reads and writes its own shards.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from lm.config import TrainConfig
from lm.data import Corpus
from lm.machine import describe_machine
from lm.step import TrainState

KEPT = 2
FIXED = ("model", "seed", "batch", "seq")
NOT_SETTINGS = ("fingerprint", "machine")  # what config.json has beside the settings


class Run:
    """The files of one run. A step has a row of metrics with `loss`, an evaluation one with `held_out_loss`."""

    def __init__(self, path: Path):
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.curves = path / "curves.png"

    def log(self, **row: Any) -> None:
        """Appends one row to metrics.jsonl."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self, having: str = "step") -> list[dict[str, Any]]:
        """Returns the rows of metrics.jsonl that have `having`, but for a last row that a killed process left cut."""
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_text().splitlines(keepends=True)
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return [row for row in rows if having in row]

    def forget_after(self, step: int) -> None:
        """Drops the rows of steps after `step`, which a resumed run writes again."""
        rows = [json.dumps(row) + "\n" for row in self.rows() if row["step"] <= step]
        self.metrics.write_text("".join(rows))

    def write_config(self, config: TrainConfig, corpus: Corpus) -> None:
        """Writes config.json: the settings, the fingerprint of the text, and what `describe_machine` returns."""
        beside = {"fingerprint": corpus.fingerprint, "machine": describe_machine()}
        self.config.write_text(json.dumps(config.to_json() | beside, indent=2) + "\n")

    def read_settings(self) -> TrainConfig:
        """Reads the settings of config.json."""
        data = json.loads(self.config.read_text())
        return TrainConfig.from_json({name: value for name, value in data.items() if name not in NOT_SETTINGS})

    def saved_steps(self) -> list[int]:
        """Returns the steps of the checkpoints, the newest last."""
        return sorted(int(path.name) for path in self.checkpoints.glob("*") if path.name.isdecimal())


def create(config: TrainConfig) -> TrainConfig:
    """Makes the folder out/name, or out/name-2, ... where the name is taken; returns the settings with its name."""
    name = config.name
    number = 1
    while True:
        try:
            Path(config.out, name).mkdir(parents=True)
            return dataclasses.replace(config, name=name)
        except FileExistsError:
            number += 1
            name = f"{config.name}-{number}"


def read_config(out: str, name: str | None) -> TrainConfig:
    """Reads the settings of the run `name` in the folder `out`; None takes the run that began or resumed last.

    Raises:
      ValueError: `out` has no such run; the message names the runs that it has.
    """
    files = sorted(Path(out).glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    named = [file for file in files if name in (None, file.parent.name)]
    if not named:
        if files:
            runs = f"its runs are {', '.join(sorted(file.parent.name for file in files))}"
        else:
            runs = "there are no runs"
        raise ValueError(f"--resume: {out}/ has no run{f' {name!r}' if name else ''}; {runs}")
    return Run(named[-1].parent).read_settings()


def reopen(config: TrainConfig, corpus: Corpus) -> Run:
    """Returns the earlier run that `config` continues on the text `corpus`.

    Raises:
      ValueError: the run began with another model, seed, batch size, sequence length or text.
    """
    earlier = read_config(config.out, config.name)
    run = Run(Path(config.out, config.name))
    option = f"--resume {config.name}"
    check_fixed(earlier, config, option)
    check_text(run, corpus, option)
    return run


def check_origin(config: TrainConfig, corpus: Corpus) -> TrainConfig:
    """Returns the settings of a run that begins with another's checkpoint, with `origin` as the checkpoint's folder.

    Raises:
      ValueError: there is no such checkpoint, or its run has another model, seed, batch size, sequence length or text.
    """
    if config.origin is None:
        return config
    run, step = find_checkpoint(config.origin)
    option = f"--from {config.origin}"
    check_fixed(run.read_settings(), config, option)
    check_text(run, corpus, option)
    if step >= config.steps:
        raise ValueError(f"{option}: the checkpoint has {step} steps; give --steps of more (now {config.steps})")
    return dataclasses.replace(config, origin=str(run.checkpoints / str(step)))


def find_checkpoint(origin: str) -> tuple[Run, int]:
    """Returns the run and the step of a checkpoint, "runs/a/checkpoints/60" -> (Run("runs/a"), 60).

    The folder of a run, "runs/a", means its newest checkpoint.

    Raises:
      ValueError: there is no such run or checkpoint.
    """
    folder = Path(origin)
    names_step = folder.parent.name == "checkpoints"
    run = Run(folder.parent.parent if names_step else folder)
    if not run.config.is_file():
        raise ValueError(
            f"--from {origin}: {run.path} has no config.json; give the folder of a run, as runs/tiny, or of one of its "
            "checkpoints, as runs/tiny/checkpoints/60"
        )
    steps = run.saved_steps()
    if not steps:
        raise ValueError(f"--from {origin}: {run.path} has no checkpoint; Ctrl-C and the end of a run save one")
    if not names_step:
        return run, steps[-1]
    if folder.name not in map(str, steps):
        saved = ", ".join(map(str, steps))
        raise ValueError(f"--from {origin}: no such checkpoint; {run.path} has those of the steps {saved}")
    return run, int(folder.name)


def check_fixed(earlier: TrainConfig, config: TrainConfig, option: str) -> None:
    """Raises a ValueError if a setting of FIXED differs; the capacity factor of a model may, as it is in no array."""
    for field in FIXED:
        before = getattr(earlier, field)
        now = getattr(config, field)
        if field == "model":
            now = dataclasses.replace(now, capacity_factor=before.capacity_factor)
        if before != now:
            raise ValueError(f"{option}: {field} was {before}, and is now {now}; it cannot change")


def check_text(run: Run, corpus: Corpus, option: str) -> None:
    """Raises a ValueError if `run` began on another text."""
    if json.loads(run.config.read_text()).get("fingerprint") != corpus.fingerprint:
        raise ValueError(f"{option}: the text ({corpus.source}) is not the text that the run began with")


class Checkpoints:
    """The newest two checkpoints of a run. A save goes on in the background; leaving the context waits for the last."""

    def __init__(self, folder: Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT)
        handler = ocp.StandardCheckpointHandler()
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=options,
            item_handlers=handler,
        )

    def latest(self) -> int | None:
        """Returns the step of the newest checkpoint; None where there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState) -> None:
        """Writes `state` as the checkpoint of `step`, unless that exists. The caller may then donate the state."""
        if step != self.latest():
            self._manager.save(step, args=ocp.args.StandardSave(_flatten_by_path(state)))

    def restore(self, step: int, like: TrainState) -> TrainState:
        """Reads the checkpoint of `step` into the shardings of `like`, the state as ShapeDtypeStructs."""
        wanted = _flatten_by_path(like)
        restored = self._manager.restore(step, args=ocp.args.StandardRestore(wanted))
        return jax.tree.unflatten(jax.tree.structure(like), [restored[name] for name in wanted])

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind, error, traceback) -> None:
        # A save waits for all processes. After an error in one of several processes it might wait for ever.
        if kind is None or jax.process_count() == 1:
            self._manager.wait_until_finished()
            self._manager.close()


def _flatten_by_path(state: PyTree) -> dict[str, object]:
    """Returns {"params.layers.wqkv": leaf, ...}: a reader of the file needs no class of ours."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
