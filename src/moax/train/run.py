"""The folder of a run: config.json, metrics.jsonl, checkpoints/, curves.png."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from moax.train.data import Corpus
from moax.train.presets import TrainConfig

FIXED = ("model", "seed", "batch", "seq")


@dataclasses.dataclass(frozen=True)
class Run:
    """Paths of one run, and its metrics: a row a step, and a row a held-out evaluation (which has `held_out_loss`)."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def log(self, **row: Any) -> None:
        """Appends one row to metrics.jsonl."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All rows of metrics.jsonl, but for one that a killed process left unfinished."""
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def forget_after(self, step: int) -> None:
        """Drops the rows of steps past `step`, which a resumed run will write anew."""
        kept = [json.dumps(row) + "\n" for row in self.rows() if row["step"] <= step]
        self.metrics.write_text("".join(kept))

    def write_config(self, config: TrainConfig, corpus: Corpus) -> None:
        """config.json: the settings, and the fingerprint of the text."""
        data = config.to_json() | {"fingerprint": corpus.fingerprint}
        (self.path / "config.json").write_text(json.dumps(data, indent=2) + "\n")


def create(config: TrainConfig) -> tuple[Run, TrainConfig]:
    """A new folder out/name, or name-2, name-3, ... where that is taken: no run is ever overwritten."""
    name, number = config.name, 1
    while True:
        path = Path(config.out, name)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
            name = f"{config.name}-{number}"
        else:
            return Run(path), dataclasses.replace(config, name=name)


def read_config(out: str, name: str) -> TrainConfig:
    """The settings of an earlier run, for `--resume`.

    Raises:
      ValueError: no such run; the message names those that are there.
    """
    path = Path(out, name, "config.json")
    if not path.is_file():
        there = ", ".join(sorted(found.parent.name for found in Path(out).glob("*/config.json")))
        raise ValueError(f"--resume: no run {name!r} in {out}/; {f'there are: {there}' if there else 'it has no runs'}")
    data = json.loads(path.read_text())
    data.pop("fingerprint", None)
    return TrainConfig.from_json(data)


def newest(out: str) -> str:
    """The name of the run in `out` that began or resumed last.

    Raises:
      ValueError: there is none.
    """
    configs = sorted(Path(out).glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    if not configs:
        raise ValueError(f"--resume: there are no runs in {out}/")
    return configs[-1].parent.name


def reopen(config: TrainConfig, corpus: Corpus) -> Run:
    """The folder of an earlier run that `config` continues.

    Raises:
      ValueError: the model, the seed, the batches or the text are not those it began with.
    """
    earlier = read_config(config.out, config.name)
    for field in FIXED:
        before, now = getattr(earlier, field), getattr(config, field)
        if before != now:
            raise ValueError(f"--resume {config.name}: {field} was {before}, and is now {now}; it cannot change")
    run = Run(Path(config.out, config.name))
    fingerprint = json.loads((run.path / "config.json").read_text()).get("fingerprint")
    if fingerprint != corpus.fingerprint:
        raise ValueError(f"--resume {config.name}: the text ({corpus.source}) is not what the run began with")
    return run
