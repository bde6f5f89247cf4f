"""scripts/check_processes.py: what it calls equal, and a run of it on emulated devices."""

import importlib
import subprocess
import sys

import numpy as np
import pytest

from support import ROOT

SHARDS = {
    "block|['y']|0": np.float32([1, 2]),
    "block|['y']|1": np.float32([3, 4]),
    "block|['stats'].dropped|0": np.int32(512),
}


@pytest.mark.parametrize(
    ("change", "error", "ok"),
    [
        ({}, 0.0, True),
        ({"block|['y']|1": np.float32([3, 4 * (1 + 2.0**-8)])}, 2.0**-8, True),
        ({"block|['y']|1": np.float32([3, 4 * (1 + 2.0**-6)])}, 2.0**-6, False),
        ({"block|['y']|1": np.float32([3, np.nan])}, np.inf, False),
        ({"block|['y']|1": np.float32([3])}, np.inf, False),
        ({"block|['stats'].dropped|0": np.int32(513)}, 1 / 512, False),
        ({"block|['y']|2": np.float32([3])}, np.inf, False),
    ],
)
def test_comparison(change, error, ok, monkeypatch):
    """Breaks if a shard that is missing, another or not finite passes, or if an integer may differ."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    (found,) = importlib.import_module("check_processes").compare(SHARDS, SHARDS | change)
    assert found["ok"] == ok and found["error"] == pytest.approx(error)


@pytest.mark.more
def test_on_emulated_devices():
    """Breaks if blocks need one process. Slow: three processes that compile."""
    command = [sys.executable, "scripts/check_processes.py", "--tiny"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("'error': 0.0") == 2
