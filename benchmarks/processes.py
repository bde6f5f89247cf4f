"""The environment of the processes that benchmarks start."""

from __future__ import annotations

import os
from pathlib import Path

import moax

ROOT = Path(__file__).parent.parent


def environment(**changes: str) -> dict[str, str]:
    """Returns this process's environment with `changes`.

    A Python process with this environment finds `benchmarks` and the same moax from any folder.
    """
    known = os.environ | changes
    folders = [str(ROOT), str(Path(str(moax.__file__)).parent.parent), known.get("PYTHONPATH", "")]
    return known | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}
