"""Workers are processes that compile at the same time, and are then measured one after the other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import moax
from benchmarks.report import why

ROOT = Path(__file__).parents[2]

READY = "ready"  # A worker prints this line when it has compiled.
SECONDS = 500  # limit of the compilation of all workers, and of the measurement of one


def environment(**changes: str) -> dict[str, str]:
    """Returns this process's environment with `changes`; Python finds `benchmarks` and this moax by it anywhere."""
    known = os.environ | changes
    folders = [str(ROOT), str(Path(str(moax.__file__)).parents[1]), known.get("PYTHONPATH", "")]
    return known | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


def config_of(request: dict[str, Any]) -> moax.MoEConfig:
    """Returns the config of a request."""
    return moax.MoEConfig(
        **request["config"] | {"router": moax.RouterConfig(**request["config"]["router"])},
    )


def refuse(tokens: list[int], error: Exception) -> int:
    """Answers each number of tokens with the reason why a worker cannot measure it. Returns 0."""
    print(READY, flush=True)
    sys.stdin.readline()
    for size in tokens:
        print(json.dumps({"tokens": size, "note": why(error)}), flush=True)
    return 0


class Worker:
    """A process that compiles a program, waits, and measures it for each number of tokens.

    Args:
      module: the module to run, such as `block_worker`.
      request: its request; `tokens` is a list in ascending order.
    """

    def __init__(self, module: str, request: dict[str, Any]):
        self.tokens = request["tokens"]
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(request)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment(),
        )
        self.limit = threading.Timer(SECONDS, self.process.kill)
        self.limit.start()

    def wait(self) -> None:
        """Waits until the process has compiled, or has ended."""
        for line in self.process.stdout or ():
            if line.strip() == READY:
                break
        self.limit.cancel()

    def measure(self) -> list[dict]:
        """Returns the answer for each number of tokens; an answer that is missing has a note with the reason."""
        try:
            output, _ = self.process.communicate("go\n", timeout=SECONDS)
            answers = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
            self.errors.seek(0)
            reason = f"exit code {self.process.returncode}: {self.errors.read().strip()[-600:]}"
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            self.process.kill()  # The process may hold GPU memory that the next one needs.
            answers = []
            reason = why(error)
        answered = {answer["tokens"] for answer in answers}
        return answers + [{"tokens": size, "note": reason} for size in self.tokens if size not in answered]

    def close(self) -> None:
        """Ends the process if it still runs."""
        self.limit.cancel()
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            if stream is not None and not stream.closed:
                stream.close()


def answers[Key](workers: Iterable[tuple[Key, Worker]]) -> Iterator[tuple[Key, dict[str, Any]]]:
    """Yields (key, answer) for each worker and number of tokens, after all workers have compiled; it ends them."""
    workers = list(workers)
    try:
        for _, worker in workers:
            worker.wait()
        for key, worker in workers:
            for answer in worker.measure():
                yield key, answer
    finally:
        for _, worker in workers:
            worker.close()
