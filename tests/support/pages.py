"""The programs of README.md and docs/**/*.md: what they are, and how they run as a reader would run them.

A page is one session: its ```python blocks run in order in a new interpreter, in an empty folder, without any variable
of the environment that JAX, XLA or moax reads, but for those that a test sets. An ```output block after a block holds
what that printed, with ... for any text. A block after `<!-- not run: REASON -->` is not run.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [path for path in PAGES if "_build" not in path.parts]
KEPT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH")  # a reader's variables, beside those that find moax
END = "\x1e"  # A process prints this between the blocks of its page.


@dataclass
class Block:
    """A fenced block: its language, text and first line; why it is not run, if so; what it must print, if said."""

    path: Path
    language: str
    text: str
    line: int
    not_run: str | None
    output: str | None = None

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def read(path: Path) -> list[Block]:
    """Returns the fenced blocks of a page; an `output` block belongs to the block before it."""
    results: list[Block] = []
    fence = language = reason = None
    body: list[str] = []
    adjacent = False  # Only blank lines stand between this line and the block before.
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        opened = re.match(r"(`{3,})(.*)$", line)
        if fence is None and opened:
            fence = opened[1]
            language = opened[2].strip()
            body = []
        elif fence is not None and line.rstrip() == fence:
            text = "\n".join(body)
            if language == "output":
                if not (results and adjacent):
                    raise ValueError(f"{path}:{number}: an output block must follow the block that prints it")
                results[-1].output = text
            else:
                results.append(Block(path, language or "", text, number - len(body), reason))
            fence, reason, adjacent = None, None, True
        elif fence is not None:
            body.append(line)
        elif said := re.match(r"<!-- not run: (.+) -->$", line):
            reason = said[1]
        elif line.strip():
            reason, adjacent = None, False
    if fence is not None:
        raise ValueError(f"{path}: a block is not closed")
    return results


def programs(path: Path) -> list[Block]:
    return [b for b in read(path) if b.language == "python" and b.not_run is None]


def check(block: Block, printed: str) -> None:
    """Raises AssertionError where a block did not print what the page says."""
    if block.output is not None:
        want = re.sub(r"[ \t]+$", "", block.output.strip("\n"), flags=re.M) + "\n"
        got = re.sub(r"[ \t]+$", "", printed.strip("\n"), flags=re.M) + "\n"
        same = doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS)
        assert same, f"{block} says it prints\n{want}\nand it prints\n{got}"


def run_page(path: Path, **settings: str) -> None:
    """Runs the programs of a page with these variables of the environment, and compares what they print."""
    blocks = programs(path)
    program = f"\nprint({END!r}, end='', flush=True)\n".join(block.text for block in blocks)
    command = [sys.executable, "-W", "error", "-c", program]
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    environment |= {"PYTHONPATH": str(ROOT / "src")} | settings
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=300)
    assert done.returncode == 0, f"{path}\n{done.stderr[-3000:]}"
    for block, printed in zip(blocks, done.stdout.split(END), strict=True):
        check(block, printed)
