"""A run's folder holds config.json, metrics.jsonl, checkpoints/ and curves.png."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from lm.config import TrainConfig
from lm.data import Corpus

FIXED = ("model", "seed", "batch", "seq")


@dataclasses.dataclass(frozen=True)
class Run:
    """The files of one run. A step has a row of metrics with `loss`, an evaluation one with `held_out_loss`."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def curves(self) -> Path:
        """The file of the plot."""
        return self.path / "curves.png"

    @property
    def metrics(self) -> Path:
        """The file of the metrics, one JSON object a line."""
        return self.path / "metrics.jsonl"

    def log(self, **row: Any) -> None:
        """Appends one row to metrics.jsonl."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """Returns all rows of metrics.jsonl, but for a last row that a killed process left unfinished."""
        if not self.metrics.exists():
            return []
        lines = self.metrics.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def forget_after(self, step: int) -> None:
        """Drops the rows of steps after `step`, which a resumed run writes again."""
        kept = [json.dumps(row) + "\n" for row in self.rows() if row["step"] <= step]
        self.metrics.write_text("".join(kept))

    def write_config(self, config: TrainConfig, corpus: Corpus) -> None:
        """Writes config.json: the settings, and the fingerprint of the text."""
        data = config.to_json() | {"fingerprint": corpus.fingerprint}
        (self.path / "config.json").write_text(json.dumps(data, indent=2) + "\n")


def create(config: TrainConfig) -> tuple[Run, TrainConfig]:
    """Makes the folder out/name, or out/name-2, out/name-3, ... where the name is taken.

    Returns:
      The run, and the settings with the name of its folder.
    """
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


def read_config(out: str, name: str | None) -> TrainConfig:
    """Reads the settings of the run `name` in the folder `out`; None takes the run that began or resumed last.

    Raises:
      ValueError: `out` has no such run; the message names the runs that it has.
    """
    files = sorted(Path(out).glob("*/config.json"), key=lambda path: path.stat().st_mtime)
    found = [file for file in files if name in (None, file.parent.name)]
    if not found:
        runs = f"its runs are {', '.join(sorted(file.parent.name for file in files))}" if files else "there are no runs"
        raise ValueError(f"--resume: {out}/ has no run{f' {name!r}' if name else ''}; {runs}")
    data = json.loads(found[-1].read_text())
    data.pop("fingerprint", None)
    return TrainConfig.from_json(data)


def reopen(config: TrainConfig, corpus: Corpus) -> Run:
    """Returns the earlier run that `config` continues on the text `corpus`.

    Raises:
      ValueError: the run began with another model, seed, batch size, sequence length or text.
    """
    earlier = read_config(config.out, config.name)
    for field in FIXED:
        before, now = getattr(earlier, field), getattr(config, field)
        if before != now:
            raise ValueError(f"--resume {config.name}: {field} was {before}, and is now {now}; it cannot change")
    run = Run(Path(config.out, config.name))
    fingerprint = json.loads((run.path / "config.json").read_text()).get("fingerprint")
    if fingerprint != corpus.fingerprint:
        raise ValueError(f"--resume {config.name}: the text ({corpus.source}) is not the text that the run began with")
    return run
