"""scripts/check_processes.py: what it calls equal, and a run of it on emulated devices."""

import importlib
import json
import subprocess
import sys

import numpy as np
import pytest

from support import ROOT


@pytest.fixture
def tool(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("check_processes")


def write(folder, process: int, values: dict, **row):
    """What a worker writes of one block."""
    folder.mkdir(exist_ok=True)
    np.savez(folder / f"values.{process}.npz", **{f"block|{key}": value for key, value in values.items()})
    row = {"name": "block", "path": "xla", "bytes": {"all-gather": 8}, "passes": 1} | row
    (folder / f"blocks.{process}.json").write_text(json.dumps({"header": {}, "rows": [row]}))


SHARDS = {
    "['y']|0": np.float32([1, 2]),
    "['y']|1": np.float32([3, 4]),
    "['stats'].dropped|0": np.int32(512),
    "['stats'].dropped|1": np.int32(512),
}


@pytest.mark.parametrize(
    ("change", "row", "error"),
    [
        ({}, {}, 0.0),
        ({"['y']|1": np.float32([3, 4.01])}, {}, 0.01 / 4),
        ({"['y']|1": np.float32([3, 4.1])}, {}, None),
        ({"['y']|1": np.float32([3, np.nan])}, {}, None),
        ({"['y']|1": np.float32([3])}, {}, None),
        ({"['y']|1": None}, {}, None),
        ({"['stats'].dropped|1": np.int32(513)}, {}, None),
        ({}, {"path": "hopper"}, None),
        ({}, {"bytes": {"all-to-all": 8}}, None),
        ({}, {"note": "out of memory"}, None),
    ],
)
def test_what_two_processes_may_differ_in(tool, tmp_path, change, row, error):
    """Breaks if a wrong or missing shard, a count, other kernels, other bytes or an error of one process passes. None
    for a block that must fail."""
    write(tmp_path / "one", 0, SHARDS)
    for process in (0, 1):
        mine = {key: change.get(key, value) for key, value in SHARDS.items() if key.endswith(f"|{process}")}
        write(
            tmp_path / "several", process, {k: v for k, v in mine.items() if v is not None}, **(row if process else {})
        )
    (found,) = tool.compare_blocks(tmp_path / "one", tmp_path / "several", 2)
    assert found["ok"] == (error is not None), found
    assert tool.line(found).startswith("ok" if found["ok"] else "FAILED")
    if error is not None:
        np.testing.assert_allclose(found["error"], error, rtol=1e-4)


@pytest.mark.more
def test_on_emulated_devices(tmp_path):
    """Breaks if blocks need one process, or the file lacks what a reader needs. Slow: three processes that compile."""
    out = tmp_path / "found.json"
    command = [sys.executable, "scripts/check_processes.py", "--tiny", "--parts", "blocks", "times", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert {"device", "versions", "git_sha", "command"} <= found["header"].keys()
    blocks, times = ([row for row in found["rows"] if row["part"] == part] for part in ("block", "time"))
    assert [row["error"] for row in blocks] == [0.0, 0.0] and all(row["passes"] > 1 for row in blocks)
    assert [row["exchange"] for row in times] == ["all_gather", "all_to_all"]
    assert all(row["us"] > 0 and row["us_of_several"] > 0 for row in times)
