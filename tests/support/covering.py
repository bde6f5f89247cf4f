"""Covering sets: tables of cases in which every pair of options meets.

    options = {"mesh": ("2x4", "8x1"), "engine": ("shard_map", "explicit"), "recipe": (None, "fp8_block")}
    rows = [("2x4", "shard_map", None), ("2x4", "explicit", "fp8_block"),
            ("8x1", "shard_map", "fp8_block"), ("8x1", "explicit", None)]

These four rows hold all 12 pairs; the full product has 8 rows. `make test` may run the first rows alone. `make
test-more` runs the others, and adds rows for triples, but few enough for its time.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator

import pytest


def mark_rest(cases: Iterable, count: int) -> list:
    """Returns the cases as parameters, those after the first `count` for `make test-more`."""
    cases = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*case, marks=() if i < count else pytest.mark.more) for i, case in enumerate(cases)]


def spread(short: int | Iterable[tuple], *options: Iterable) -> list:
    """Returns every combination as parameters: first those of `short`, or as many that hold most pairs; the others
    for `make test-more`."""
    table = Table("", {str(i): tuple(values) for i, values in enumerate(options)}, [])
    table_rows = table.sample_rows(short, min(2, len(table.options))) if isinstance(short, int) else list(short)
    return mark_rest(
        [*table_rows, *(case for case in table.cases() if case not in table_rows)],
        len(table_rows),
    )


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
        """Returns every pair (or triple) of values of different columns that is in some possible case."""
        return {s for row in self.cases() for s in self.sets(row, strength)}

    def missing(self, strength: int = 2) -> set[tuple]:
        """Returns the pairs (or triples) that no row holds."""
        return self.wanted(strength) - {s for row in self.rows for s in self.sets(row, strength)}

    def complete(self) -> Table:
        """Returns the table with as many more rows as it takes to hold every pair."""
        return dataclasses.replace(self, rows=[*self.rows, *self.sample_rows(sys.maxsize, 2)])

    def cases(self) -> Iterator[tuple]:
        """Returns every possible case."""
        for row in itertools.product(*self.options.values()):
            if self.possible(**dict(zip(self.options, row, strict=True))):
                yield row

    def sample_rows(self, count: int, strength: int = 3) -> list[tuple]:
        """Returns at most `count` further rows for the missing triples: at each step the case that holds most of
        them."""
        missing = self.missing(strength)
        rows = []
        rng = random.Random(0)
        cases = [(row, set(self.sets(row, strength))) for row in self.cases()]
        while missing and len(rows) < count:
            sampled = [case for case in rng.sample(cases, min(len(cases), 200)) if case[1] & missing]
            row, held = max(sampled or cases, key=lambda case: len(case[1] & missing))
            rows.append(row)
            missing -= held
        return rows

    def parameters(self, extra: int = 16, strength: int = 3, short: int | None = None) -> list:
        """Returns the complete rows, those after the first `short` marked `more`, as are the rows that hold most
        triples."""
        pairs = self.complete()
        rows = [*pairs.rows, *pairs.sample_rows(extra, strength)]
        late = len(pairs.rows) if short is None else short
        marks = [() if i < late else pytest.mark.more for i in range(len(rows))]
        return [pytest.param(*r, id="-".join(map(str, r)), marks=m) for r, m in zip(rows, marks, strict=True)]
