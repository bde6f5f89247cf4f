"""This module measures PyTorch's grouped products in another process, before this one takes memory of the GPU."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.processes import environment
from benchmarks.report import Row, why
from moax.tune.cases import DIRECTIONS, Case
from moax.tune.timing import Repeats

SECONDS = 400
NAME = {"none": "torch_grouped_mm", "fp8_rowwise": "torch_scaled_grouped_mm"}


def rows(cases: list[Case], repeats: Repeats) -> list[Row]:
    """Returns a row for each case, direction and recipe; its note has the reason where PyTorch does not run."""
    request = {
        "cases": [
            {"name": c.name, "sizes": c.sizes.tolist(), "contracted": c.contracted, "columns": c.columns} for c in cases
        ],
        "warmups": repeats.warmups,
        "measured": repeats.measured,
    }
    try:
        found, reason = _run(request)
    except (OSError, subprocess.SubprocessError, ValueError, RuntimeError) as error:
        found, reason = [], why(error)
    measured = {(row["case"], row["direction"], row["recipe"]): row for row in found}
    missing = {"note": reason or "the process ended before it"}
    return [
        _row(case, direction, recipe, measured.get((case.name, direction, recipe), missing))
        for case in cases
        for direction in DIRECTIONS
        for recipe in NAME
    ]


def _run(request: dict) -> tuple[list[dict], str]:
    """Returns (the measured rows, the reason why others are missing)."""
    command = [sys.executable, "-m", "benchmarks.peers.torch_grouped", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment())
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found = [line for line in lines if "case" in line]
    failed = [line["error"] for line in lines if "case" not in line]
    if done.returncode and not failed:
        failed = [f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"]
    return found, "".join(failed[:1])


def _row(case: Case, direction: str, recipe: str, found: dict) -> Row:
    dtype = "bfloat16" if recipe == "none" else "e4m3"
    row = Row("gemm", case.name, direction, NAME[recipe], recipe, dtype, "peer", note=found.get("note", ""))
    if found.get("us"):
        row.us, row.method = found["us"], "events"
        row.tflops = case.flops / row.us * 1e-6
        row.error, row.error_worst = found["error"], found["error_worst"]
        row.error_unquantized = found["error_unquantized"]
    return row
