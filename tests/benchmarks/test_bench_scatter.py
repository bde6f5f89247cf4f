"""`python -m benchmarks scatter` on the CPU devices of the tests."""

import json

import pytest

from benchmarks import command
from moax.mesh.collectives import GRAD_REDUCE

pytestmark = [pytest.mark.more, pytest.mark.loose]


def test_scatter(capsys):
    """Breaks if a choice of `grad_reduce_dtype` sends other bytes than it says, or has the error of another one."""
    assert command.main(["scatter", "--cases", "tiny", "--quick", "--json"]) == 0
    found = {row["recipe"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert set(found) == set(GRAD_REDUCE) and all(row["us"] > 0 for row in found.values()), found
    elements = 4 * 3 * 64 * 32  # of the tiny block
    sent = {choice: row["extra"]["sent_bytes"] for choice, row in found.items()}
    half = 2 * elements * 7 // 8
    assert sent == {"bfloat16": half, "bfloat16_sum_float32": half, "float32": 2 * half}
    error = {choice: row["error"] for choice, row in found.items()}
    assert error["float32"] < 1e-6 < error["bfloat16_sum_float32"] < 2.0**-8
    assert "speedup" in found["float32"]["extra"]
