"""The machine and the commit of a run, as its files and those of benchmarks note them."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax


def describe_machine() -> dict[str, Any]:
    """Returns the devices, the versions, the commit of this clone (None without git) and the time."""
    return {
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "versions": {"python": sys.version.split()[0], "jax": jax.__version__},
        "git_sha": git_sha("src", "lm"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def git_sha(*code: str) -> str | None:
    """Returns the commit of this clone, with `-dirty` where the paths `code` differ from it; None without git."""
    root = str(Path(__file__).parent.parent)
    sha = output_of("git", "-C", root, "rev-parse", "HEAD")
    if sha and output_of("git", "-C", root, "status", "--porcelain", "--", *code):
        sha += "-dirty"
    return sha


def output_of(*command: str) -> str | None:
    """Returns what a command prints, or None where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
