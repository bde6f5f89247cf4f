"""Covering sets: tables of cases in which every pair of options meets, and a report of which row holds which pair.

    options = {"mesh": ("2x4", "8x1"), "engine": ("shard_map", "explicit"), "recipe": (None, "fp8_block")}
    rows = [("2x4", "shard_map", None), ("2x4", "explicit", "fp8_block"),
            ("8x1", "shard_map", "fp8_block"), ("8x1", "explicit", None)]

These four rows hold all 12 pairs; the full product has 8 rows. `make test` may run the first rows alone. `make
test-more` runs the others, and adds rows for triples, but few enough for its time. `PYTHONPATH=src:tests python -m
support.covering FILE` prints the tables of a test file: after each row, the pairs that no row above it holds.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest


def some(cases: Iterable, count: int) -> list:
    """The cases as parameters, those after the first `count` for `make test-more`."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if i < count else pytest.mark.more) for i, case in enumerate(cases)]


def spread(short: int | Iterable[tuple], *options: Iterable) -> list:
    """Every combination as parameters: first those of `short`, or as many that hold most pairs; the others for `make
    test-more`."""
    table = Table("", {str(i): tuple(values) for i, values in enumerate(options)}, [])
    first = table.more(short, min(2, len(table.options))) if isinstance(short, int) else list(short)
    return some([*first, *(case for case in table.cases() if case not in first)], len(first))


def _everything(**_) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Table:
    """The cases of one suite.

    Attributes:
      name: of the suite.
      options: the values of each column.
      rows: the first cases, a value of each column.
      possible: whether values can be in one case; called with every column by name.
    """

    name: str
    options: dict[str, tuple]
    rows: list[tuple]
    possible: Callable[..., bool] = _everything

    def __post_init__(self):
        for row in self.rows:
            if len(row) != len(self.options) or any(
                v not in o for v, o in zip(row, self.options.values(), strict=True)
            ):
                raise ValueError(f"{self.name}: the row {row} is not of the options {self.options}")
            if not self.possible(**dict(zip(self.options, row, strict=True))):
                raise ValueError(f"{self.name}: the row {row} is not possible")

    def sets(self, row: tuple, strength: int = 2) -> Iterator[tuple]:
        """The pairs (or triples) of (column, value) that a row holds."""
        return itertools.combinations(zip(self.options, row, strict=True), strength)

    def wanted(self, strength: int = 2) -> set[tuple]:
        """Every pair (or triple) of values of different columns that is in some possible case."""
        return {s for row in self.cases() for s in self.sets(row, strength)}

    def missing(self, strength: int = 2) -> set[tuple]:
        """The pairs (or triples) that no row holds."""
        return self.wanted(strength) - {s for row in self.rows for s in self.sets(row, strength)}

    def complete(self) -> Table:
        """The table with as many more rows as it takes to hold every pair."""
        return dataclasses.replace(self, rows=[*self.rows, *self.more(sys.maxsize, 2)])

    def cases(self) -> Iterator[tuple]:
        """Every possible case."""
        for row in itertools.product(*self.options.values()):
            if self.possible(**dict(zip(self.options, row, strict=True))):
                yield row

    def more(self, count: int, strength: int = 3) -> list[tuple]:
        """At most `count` further rows for the missing triples: at each step the case that holds most of them."""
        missing, rows, rng = self.missing(strength), [], random.Random(0)
        cases = [(row, set(self.sets(row, strength))) for row in self.cases()]
        while missing and len(rows) < count:
            some = [case for case in rng.sample(cases, min(len(cases), 200)) if case[1] & missing]
            row, held = max(some or cases, key=lambda case: len(case[1] & missing))
            rows.append(row)
            missing -= held
        return rows

    def parameters(self, more: int = 16, strength: int = 3, short: int | None = None) -> list:
        """The complete rows, those after the first `short` marked `more`, as are the rows that hold most triples."""
        pairs = self.complete()
        rows = [*pairs.rows, *pairs.more(more, strength)]
        late = len(pairs.rows) if short is None else short
        marks = [() if i < late else pytest.mark.more for i in range(len(rows))]
        return [pytest.param(*r, id="-".join(map(str, r)), marks=m) for r, m in zip(rows, marks, strict=True)]

    def report(self) -> str:
        """The rows, after each the pairs that it is the first to hold."""
        seen: set[tuple] = set()
        lines = [f"{self.name}: {len(self.rows)} rows of {sum(1 for _ in self.cases())} possible cases, columns "
                 + ", ".join(self.options)]  # fmt: skip
        for i, row in enumerate(self.rows, 1):
            new = [pair for pair in self.sets(row) if pair not in seen]
            seen.update(new)
            lines.append(f"{i:4d}  " + "  ".join(map(str, row)))
            lines += [f"        {a[0]}={a[1]} with {b[0]}={b[1]}" for a, b in new]
        return "\n".join(lines)


def load(path: Path):
    """A test file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(*paths: str) -> None:
    for path in paths:
        for value in vars(load(Path(path))).values():
            if isinstance(value, Table):
                print(value.complete().report(), end="\n\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
