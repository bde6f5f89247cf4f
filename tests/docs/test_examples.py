"""Every program of examples/ runs as it stands, on 8 emulated devices, and prints what it shows.

Covers: one example here, all of them in `make test-more`; the form of each.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import processes
import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# What the last line must say, in numbers that can be wrong: a name, and the values that it may have.
SHOWS = {
    "compose_ops": [r"by [0-9]e(\+00|-0[6-9]), and the gradients of 4 arrays by at most [0-9]e-0[6-9]$"],
    "explicit_mesh": ["y has the type of x; 3 of 3 gradients"],
    "finetune_hf": [r"-> 0\.\d\d\d in", r"holds \(1, 64, 2, 128\) of wi", "wrote 52 tensors, 2 as they were"],
    "loss_free_balancing": [r"busiest expert [3-9]\d\.\d% -> 1[2-7]\.\d% of"],
    "multi_host": [r"in 1 process\(es\), mesh {'fsdp': 2, 'ep': 4}, loss 1\.191\d* -> 0\.[78]"],
    "pipeline_stage": [r"by (0\.0e\+00|\d\.\de-0[6-9]) \(y\) and (0\.0e\+00|\d\.\de-0[6-9]) \(gradient"],
    "plain_optax": ["donated: True", "like weights: True"],
}


def run(path: Path, *argv: str) -> subprocess.CompletedProcess:
    """The program in a process of its own, which says itself how many devices it has."""
    flags = {"XLA_FLAGS": processes.FLAGS, "PYTHONPATH": str(ROOT / "src")}
    environment = os.environ | flags
    command = [sys.executable, "-W", "error", str(path), *argv]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)


def test_there_are_examples():
    assert set(SHOWS) <= {path.stem for path in EXAMPLES}


@pytest.mark.more
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path):
    """Breaks if a reader's copy of it fails, warns, falls back to another layout, or shows something else."""
    done = run(path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert not done.stderr, "it warned, or logged that something else runs"
    last = done.stdout.strip().splitlines()[-1]
    assert " on 8 devices: " in last, last
    for pattern in SHOWS.get(path.stem, []):
        assert re.search(pattern, last), (pattern, last)


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_example_is_short_and_says_what_it_shows(path):
    text = path.read_text()
    assert len(text.splitlines()) < 80, "an example is read in one go"
    assert text.startswith('"""') and f"python examples/{path.name}" in text
