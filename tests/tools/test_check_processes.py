"""scripts/check_processes.py: what it calls equal, and a run of it on emulated devices."""

import subprocess
import sys
import time

import jax
import numpy as np
import processes
import pytest
from check_processes import Run, differ, finish

from support import ROOT
from support.gpus import alone


def test_comparison():
    """Breaks if a shard that is missing, another or not finite passes, or if an integer may differ."""
    y = np.float32([3, 4])
    count = np.int32(512)
    for near in (y, np.float32([3, 4 * (1 + 2.0**-8)])):
        assert not differ(near, y)
    for other in (
        np.float32([3, 4 * (1 + 2.0**-6)]),
        np.float32([3, np.nan]),
        np.float32([3]),
        None,
    ):
        assert differ(other, y) and differ(y, other)
    assert not differ(count, count) and differ(np.int32(513), count)


def test_the_outputs_of_all_processes_are_shown(tmp_path):
    """Breaks if the output of a process is lost where another one fails, or its progress where the output is long."""
    runs = []
    for case, program in enumerate(("print('lowered', 'x' * 5000)", "raise SystemExit('the reason')")):
        folder = tmp_path / str(case)
        runs.append(Run(case, folder, processes.start(folder, ["-c", program], processes=1, devices=None)))
    with pytest.raises(SystemExit) as error:
        finish(runs, time.monotonic() + 60)
    output = str(error.value)
    assert "code 0:\nlowered x" in output and "code 1:\nthe reason" in output and len(output) < 3000


@pytest.mark.more
def test_on_emulated_devices():
    """Breaks if blocks need one process. Slow: six processes that compile."""
    command = [sys.executable, "scripts/check_processes.py", "--tiny"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "one process and several agree\n"


@pytest.mark.gpu
@pytest.mark.more
def test_on_gpus():
    """Breaks if blocks on GPUs have other values in one process than in a process for each GPU."""
    if jax.device_count() < 2:
        pytest.skip("it needs two GPUs")
    with alone():
        command = [sys.executable, "scripts/check_processes.py", "--seconds", "450"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "one process and several agree\n"
