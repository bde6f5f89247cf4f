"""The programs of README.md and docs/**/*.md: what they are, and how they run as a reader would run them.

A page is one session: its ```python blocks run in order in one namespace, in a process of its own. An ```output block
after a block holds what that printed, with ... for any text. A block after `<!-- not run: REASON -->` is not run.
"""

from __future__ import annotations

import doctest
import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import jax

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [path for path in PAGES if "_build" not in path.parts]
SERVER = Path(__file__).with_name("page_server.py")
# What a reader has not set: devices, platform, flags of XLA and of JAX.
VARIABLES = re.compile(r"JAX_|XLA_|TF_|MOAX_|PYTHON|OPENBLAS_NUM_THREADS|OMP_NUM_THREADS")


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
    found: list[Block] = []
    fence = language = reason = None
    body: list[str] = []
    adjacent = False  # Only blank lines stand between this line and the block before.
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        opened = re.match(r"(`{3,})(.*)$", line)
        if fence is None and opened:
            fence, language, body = opened[1], opened[2].strip(), []
        elif fence is not None and line.rstrip() == fence:
            text = "\n".join(body)
            if language == "output":
                if not (found and adjacent):
                    raise ValueError(f"{path}:{number}: an output block must follow the block that prints it")
                found[-1].output = text
            else:
                found.append(Block(path, language or "", text, number - len(body), reason))
            fence, reason, adjacent = None, None, True
        elif fence is not None:
            body.append(line)
        elif said := re.match(r"<!-- not run: (.+) -->$", line):
            reason = said[1]
        elif line.strip():
            reason, adjacent = None, False
    if fence is not None:
        raise ValueError(f"{path}: a block is not closed")
    return found


def programs(path: Path) -> list[Block]:
    return [b for b in read(path) if b.language == "python" and b.not_run is None]


def check(block: Block, printed: str) -> None:
    """Raises AssertionError where a block did not print what the page says."""
    if block.output is not None:
        want, got = (re.sub(r"[ \t]+$", "", text.strip("\n"), flags=re.M) + "\n" for text in (block.output, printed))
        same = doctest.OutputChecker().check_output(want, got, doctest.ELLIPSIS)
        assert same, f"{block} says it prints\n{want}\nand it prints\n{got}"


def run_page(path: Path) -> None:
    """Runs the programs of a page as a reader would who pastes them, and compares what they print.

    The page has a process of its own, in an empty folder, without the variables by which the tests choose devices and
    flags. The cache of compiled programs is that of the tests, but for a page that prints the log: XLA asks for no
    partition rule of a cached program, and some lines are those of rules.
    """
    blocks = programs(path)
    prints_log = any("logging." in block.text for block in blocks)
    request = {
        "path": str(path),
        "blocks": [{"text": block.text, "line": block.line} for block in blocks],
        "cache": None if prints_log else jax.config.jax_compilation_cache_dir,
    }
    server = _server()
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer = json.loads(server.stdout.readline() or '{"printed": [], "error": "the server of pages ended"}')
    for block, text in zip(blocks, answer["printed"], strict=False):
        check(block, text)
    assert answer["error"] is None, answer["error"]


@functools.cache
def _server() -> subprocess.Popen:
    """The process of `page_server.py` that runs the pages of this test worker; it ends with its input."""
    kept = {name: value for name, value in os.environ.items() if not VARIABLES.match(name)}
    command = [sys.executable, "-W", "error", str(SERVER)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=kept | {"PYTHONPATH": str(ROOT / "src")}
    )
