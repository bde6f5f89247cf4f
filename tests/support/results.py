"""The files of benchmarks/results: their rows, the commits that they measured, and how old these commits are."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
# What a result measures.
MEASURED = [f"src/moax/{folder}" for folder in ("kernels", "block", "ops", "exchange", "mesh", "adapters")]


class Origin(NamedTuple):
    """The commit and the day of a result file."""

    sha: str
    date: str


def read(name: str) -> dict:
    return json.loads((RESULTS / name).read_text())


def read_rows(name: str) -> list[dict]:
    return read(name)["rows"]


def origin(name: str) -> Origin:
    body = read(name)
    head = body.get("header", body)
    return Origin(head["git_sha"][:7], head["date"][:10])


def is_current(sha: str) -> bool:
    """Whether the commit is the last one that changed `MEASURED`, or a later one; False for a commit of no history."""
    last = git("log", "-1", "--format=%H", "--", *MEASURED).stdout.strip()
    return git("merge-base", "--is-ancestor", last, sha).returncode == 0


def git(*command: str) -> subprocess.CompletedProcess:
    """What git says; it fails where this tree has no repository of its own, and where there is no git."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        return subprocess.CompletedProcess(command, 1, "", "")
    return subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True)


def age_of(sha: str) -> int | None:
    """The commits after this one that changed `MEASURED`; None for a commit that is not in today's history."""
    if git("merge-base", "--is-ancestor", sha, "HEAD").returncode != 0:
        return None
    return int(git("rev-list", "--count", f"{sha}..HEAD", "--", *MEASURED).stdout)


def cited_files(text: str) -> list[str]:
    """The result files that a text cites, each once: `x.json` and `benchmarks/results/x.json`."""
    return list(dict.fromkeys(re.findall(r"`(?:[\w/]*/)?(\w+\.json)`", text)))


def complete_history() -> bool:
    return git("rev-parse", "--is-shallow-repository").stdout.strip() == "false"
