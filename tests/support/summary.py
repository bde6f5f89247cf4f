"""This module makes the table of what a run of the tests covered: the parameters of the tests of each suite."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from moax.recipe import RECIPES
from support.meshes import MESHES, WAYS

# The columns of the table: a parameter is of a column where its value, or its value and its name, say so.
TRANSPORTS = ("all_gather", "all_to_all")
COLUMNS = {
    "ways": set(WAYS),
    "meshes": set(MESHES),
    "recipes": {"none", *RECIPES},
    "transports": set(TRANSPORTS),
}
PROPERTY = "covers"


def suite_of(nodeid: str) -> str:
    """tests/ops/test_route.py::test_x -> ops/route; tests/docs/... -> docs; a file of tests/ itself -> its own name."""
    parts = Path(nodeid.split("::")[0]).with_suffix("").parts[1:]
    name = parts[-1].removeprefix("test_")
    if len(parts) == 1:
        return name
    return f"{parts[0]}/{name}" if parts[0] in ("ops", "block") else parts[0]


def covered_by(item) -> list[tuple[str, str]]:
    """Yields (column, value) for each parameter of a test that the table counts."""
    results = []
    callspec = getattr(item, "callspec", None)
    for name, value in {} if callspec is None else callspec.params.items():
        value = "none" if value is None and name == "recipe" else value
        for column, known in COLUMNS.items():
            if isinstance(value, str) and value in known and (value != "none" or name == column[:-1]):
                results.append((column, value))
    return results


def table(reports: Iterable) -> list[str]:
    """Returns the lines of the table: the tests of each suite, and the number of values of each column."""
    tests = Counter()
    values = defaultdict(set)
    for report in reports:
        suite = suite_of(report.nodeid)
        tests[suite] += 1
        for name, results in report.user_properties:
            if name == PROPERTY:
                for column, value in results:
                    values[suite, column].add(value)
                    values["all", column].add(value)
    tests["all"] = sum(tests.values())
    width = max(map(len, tests))
    lines = [f"{'suite':{width}}  tests  " + "  ".join(f"{column:>10}" for column in COLUMNS)]
    for suite in [*sorted(tests.keys() - {"all"}), "all"]:
        cells = (f"{len(values[suite, column]) or '':>10}" for column in COLUMNS)
        lines.append(f"{suite:{width}}  {tests[suite]:5}  " + "  ".join(cells))
    for column in COLUMNS:
        lines.append(f"{column}: {', '.join(sorted(values['all', column]))}")
    return [line.rstrip() for line in lines]
