"""Programs that compile in processes of their own, all at once, and are then measured one after the other."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.processes import environment
from benchmarks.report import why

READY = "ready"  # what a process prints once it has compiled
SECONDS = 500  # for all to compile, and for one to be measured


class Worker:
    """A process of `module` that compiles a block, waits, and measures it for each number of tokens, ascending."""

    def __init__(self, module: str, request: dict[str, Any]):
        self.tokens, self.errors = request["tokens"], tempfile.TemporaryFile("w+")
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
        """Until it has compiled, or has ended."""
        for line in self.process.stdout or ():
            if line.strip() == READY:
                break
        self.limit.cancel()

    def measure(self) -> list[dict]:
        """What it says of each number of tokens."""
        try:
            said, _ = self.process.communicate("go\n", timeout=SECONDS)
            answers = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
            self.errors.seek(0)
            reason = f"exit code {self.process.returncode}: {self.errors.read().strip()[-600:]}"
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            self.process.kill()  # now, not when all are done: it may hold a GPU's memory
            answers, reason = [], why(error)
        heard = {answer["tokens"] for answer in answers}
        return answers + [{"tokens": size, "note": reason} for size in self.tokens if size not in heard]

    def close(self) -> None:
        """Ends the process, where it has not."""
        self.limit.cancel()
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            if stream is not None and not stream.closed:
                stream.close()


def answers[Key](workers: Iterable[tuple[Key, Worker]]) -> Iterator[tuple[Key, dict[str, Any]]]:
    """(key, answer) of each number of tokens of each worker, once all have compiled; ends them."""
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
