"""Commands in several processes of this machine, each with emulated devices; no GPU is needed."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
# XLA compiles three times as fast at level 0 and by its older emitters; the newer ones run MLIR passes for each kernel.
# The code is slower, and its tanh is off by 6e-8. Emulated devices share a few cores: a rendezvous may take a while.
FLAGS = (
    "--xla_backend_optimization_level=0 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters "
    "--xla_cpu_collective_call_terminate_timeout_seconds=600"
)
MODEL = ["--d-model", "32", "--d-ff", "32", "--layers", "1", "--heads", "2", "--experts", "8"]
MODEL += ["--seq", "32", "--batch", "8", "--lr", "0.02", "--eval-every", "8", "--save-every", "3"]


def free_port() -> int:
    """Returns a free port of this machine."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def start(
    folder: Path,
    command: list[str],
    *,
    processes: int = 2,
    devices: int | None = 4,
    own: tuple[list[str], ...] = (),
) -> list[subprocess.Popen]:
    """Starts a command in one or several processes; the output of process i goes to FOLDER/said.i."""
    address = f"localhost:{free_port()}"
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"XLA_FLAGS": FLAGS, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    environment = os.environ | settings
    started = []
    for i in range(processes):
        argv = [sys.executable, *command]
        if devices:
            argv += ["--cpu-devices", str(devices)]
        if processes > 1:
            argv += ["--coordinator", address]
            argv += ["--num-processes", str(processes), "--process-id", str(i)]
        if own:
            argv += own[i]
        with (folder / f"said.{i}").open("w") as said:
            output = dict(stdout=said, stderr=subprocess.STDOUT)
            process = subprocess.Popen(argv, env=environment, cwd=ROOT, **output)
            started.append(process)
    return started


def train(*options: str) -> list[str]:
    """Returns the command `python -m lm train`, whose processes notice a dead process after five seconds."""
    return ["-m", "lm", "train", *options, "--engine", "shard_map", "--heartbeat-timeout", "5"]


def finish(
    folder: Path,
    started: list[subprocess.Popen],
    timeout: float = 240,
) -> list[tuple[int, str]]:
    """Waits for the processes, and kills those that do not end in time."""
    end = time.monotonic() + timeout
    for process in started:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    results = []
    for i, process in enumerate(started):
        results.append((process.returncode, (folder / f"said.{i}").read_text()))
    return results


def losses(run: Path) -> dict[int, float]:
    """Returns {step: training loss} of the complete lines of a run's metrics.jsonl."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def await_step(run: Path, step: int, started: list[subprocess.Popen], timeout: float = 240) -> None:
    """Waits until the run has done `step`; if a process ends before, it kills all and raises RuntimeError."""
    end = time.monotonic() + timeout
    while step not in losses(run):
        if time.monotonic() > end or any(process.poll() is not None for process in started):
            codes = [process.poll() for process in started]
            for process in started:
                process.kill()
            raise RuntimeError(f"{run.name} did not get to step {step}: exit codes {codes}")
        time.sleep(0.05)
