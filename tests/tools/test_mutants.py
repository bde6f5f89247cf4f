"""The faults of scripts/mutants.py, which `make test-more` plants: whether they can be planted, and are in the table.

Covers: scripts.mutants.
"""

import importlib.util
import sys

import pytest

from support import ROOT


@pytest.fixture(scope="module")
def mutants():
    """The module scripts/mutants.py."""
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "scripts" / "mutants.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # for its dataclasses
    spec.loader.exec_module(module)
    yield module
    del sys.modules["mutants"]


def test_each_fault_has_its_place(mutants):
    """Breaks if the sources no longer have the text that a fault replaces, so that it cannot be planted."""
    for fault in mutants.FAULTS:
        text = (ROOT / "src" / "moax" / fault.path).read_text()
        assert text.count(fault.old) == 1, fault.name


def test_the_table_has_each_fault(mutants):
    """Breaks if tests/mutants.md lists a fault that nobody plants, or another file than its own."""
    lines = (ROOT / "tests" / "mutants.md").read_text().splitlines()[2:]
    assert [tuple(line[2:].split(" | ")[:2]) for line in lines] == [
        (fault.name, f"`{fault.path}`") for fault in mutants.FAULTS
    ]
