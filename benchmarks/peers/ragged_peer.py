"""`lax.ragged_all_to_all` measured in other processes, before this one takes devices: XLA reads its flags once."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

from benchmarks.processes import environment
from benchmarks.report import why
from benchmarks.tokens import Tokens
from moax.tune.timing import Repeats

SECONDS = 200  # for a process; its collective has been seen to hang, under other flags
WORKER = "benchmarks.peers.ragged"
DECOMPOSE = "--xla_gpu_unsupported_enable_ragged_all_to_all_decomposer=true"
# XLA's flags, and whether it writes in place: as installed, and as XLA makes an all-to-all of padded rows of it.
WAYS = {"ragged_all_to_all": ("", True), "ragged_all_to_all decomposed": (DECOMPOSE, False)}
Answers = dict[str, list[dict[str, Any]]]


def answers(cases: list[Tokens], devices: int | None, repeats: Repeats) -> Answers:
    """For each of WAYS what its process said, a dict a line; the last says why there is no more."""
    request = {
        "cases": [dataclasses.asdict(case) for case in cases],
        "devices": devices,
        "repeats": dataclasses.asdict(repeats),
    }
    return {name: _run(request | {"in_place": in_place}, flags) for name, (flags, in_place) in WAYS.items()}


def find(said: list[dict[str, Any]], case: str, wire: str, direction: str) -> dict[str, Any]:
    """What was said of that; else the reason that was given last."""
    wanted = {"case": case, "wire": wire, "direction": direction}
    about = [line for line in said if wanted.items() <= line.items()]
    return (about or said[-1:] or [{"note": "it was not asked"}])[0]


def _run(request: dict[str, Any], flags: str) -> list[dict[str, Any]]:
    changed = environment(
        XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        XLA_PYTHON_CLIENT_PREALLOCATE="false",  # other processes may hold most of the memory
    )
    command, pipe = [sys.executable, "-m", WORKER, json.dumps(request)], subprocess.PIPE
    try:
        process = subprocess.Popen(command, env=changed, stdout=pipe, stderr=pipe, text=True)
    except OSError as error:
        return [{"note": why(error)}]
    try:
        said, errors = process.communicate(timeout=SECONDS)
        reason = f"exit code {process.returncode}: {errors.strip()[-300:]}"
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
        reason = f"killed after {SECONDS} s"
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    whole = found and "case" not in found[-1]
    return found if whole else [*found, {"note": reason}]
