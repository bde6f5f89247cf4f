"""This module measures `lax.ragged_all_to_all` in other processes, since a process reads the flags of XLA once.

The measurement must come before this process takes the devices.
"""

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

SECONDS = 200  # limit of a process, whose collective can hang under other flags
WORKER = "benchmarks.peers.ragged"
DECOMPOSE = "--xla_gpu_unsupported_enable_ragged_all_to_all_decomposer=true"
# {peer: (XLA's flags, whether it writes in place)}. The decomposition makes an all-to-all of padded rows.
WAYS = {"ragged_all_to_all": ("", True), "ragged_all_to_all decomposed": (DECOMPOSE, False)}
Answers = dict[str, list[dict[str, Any]]]


def answers(cases: list[Tokens], devices: int | None, repeats: Repeats) -> Answers:
    """Returns the answers of the process of each peer in `WAYS`.

    Returns:
      {peer: dicts}, where each dict is an answer of `peers.ragged`. The last dict has only a note if the process ended
      early.
    """
    request = {
        "cases": [dataclasses.asdict(case) for case in cases],
        "devices": devices,
        "repeats": dataclasses.asdict(repeats),
    }
    return {name: _run(request | {"in_place": in_place}, flags) for name, (flags, in_place) in WAYS.items()}


def find(answers: list[dict[str, Any]], case: str, wire: str, direction: str) -> dict[str, Any]:
    """Returns the answer for a case, wire and direction; without one, the last answer, which has the reason."""
    wanted = {"case": case, "wire": wire, "direction": direction}
    matching = [answer for answer in answers if wanted.items() <= answer.items()]
    return (matching or answers[-1:] or [{"note": "it was not measured"}])[0]


def _run(request: dict[str, Any], flags: str) -> list[dict[str, Any]]:
    changed = environment(
        XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip(),
        XLA_PYTHON_CLIENT_PREALLOCATE="false",  # Other processes may hold most of the memory.
    )
    command, pipe = [sys.executable, "-m", WORKER, json.dumps(request)], subprocess.PIPE
    try:
        process = subprocess.Popen(command, env=changed, stdout=pipe, stderr=pipe, text=True)
    except OSError as error:
        return [{"note": why(error)}]
    try:
        output, errors = process.communicate(timeout=SECONDS)
        reason = f"exit code {process.returncode}: {errors.strip()[-300:]}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        reason = f"killed after {SECONDS} s"
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    whole = lines and "case" not in lines[-1]
    return lines if whole else [*lines, {"note": reason}]
