"""This script kills one of two training processes, resumes, and compares the losses with those of an undisturbed run:

    python scripts/kill_and_resume.py [--kill 0|1] [--at STEP] [--steps N] [--folder FOLDER]

Each process has four emulated devices of this machine; no GPU is needed. tests/lm/test_multiprocess.py uses it too.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Level 0 compiles in four seconds instead of ten; the steps are slower.
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_collective_call_terminate_timeout_seconds=600"
MODEL = ["--d-model", "32", "--d-ff", "32", "--layers", "1", "--heads", "2", "--experts", "8"]
MODEL += ["--seq", "32", "--batch", "8", "--lr", "0.02", "--eval-every", "8", "--save-every", "3"]


def free_port() -> int:
    """Returns a free port of this machine."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


def start(
    folder: Path, command: list[str], *, processes: int = 2, devices: int | None = 4, own: tuple[list[str], ...] = ()
) -> list[subprocess.Popen]:
    """Starts a command in one or several processes; the output of process i goes to FOLDER/said.i."""
    address = f"localhost:{free_port()}"
    folder.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"XLA_FLAGS": FLAGS, "PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    started = []
    for i in range(processes):
        joined = ["--coordinator", address, "--num-processes", str(processes), "--process-id", str(i)]
        argv = [sys.executable, *command, *(["--cpu-devices", str(devices)] if devices else [])]
        argv += [*(joined if processes > 1 else []), *(own[i] if own else [])]
        with (folder / f"said.{i}").open("w") as said:
            started.append(subprocess.Popen(argv, stdout=said, stderr=subprocess.STDOUT, env=environment, cwd=ROOT))
    return started


def train(*options: str) -> list[str]:
    """Returns the command `python -m lm train`, whose processes notice a dead process after five seconds."""
    return ["-m", "lm", "train", *options, "--engine", "shard_map", "--heartbeat-timeout", "5"]


def finish(folder: Path, started: list[subprocess.Popen], timeout: float = 240) -> list[tuple[int, str]]:
    """Waits for the processes, and kills those that do not end in time."""
    end = time.monotonic() + timeout
    for process in started:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return [(process.returncode, (folder / f"said.{i}").read_text()) for i, process in enumerate(started)]


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kill", type=int, default=1, choices=(0, 1), help="which process (default: %(default)s)")
    parser.add_argument("--at", type=int, default=7, help="after which step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="steps of the whole run (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where runs and outputs go (default: a temporary folder)")
    args = parser.parse_args()
    if not 3 < args.at < args.steps:
        parser.error(f"--at {args.at} must be between the first checkpoint, after step 3, and --steps {args.steps}")
    folder = args.folder or Path(tempfile.mkdtemp(prefix="kill_and_resume_"))
    common = [*MODEL, "--steps", str(args.steps), "--mesh", "fsdp=2,ep=4", "--out", str(folder)]

    print("two processes of four devices, mesh fsdp=2, ep=4 (fsdp between the processes)")
    whole = finish(folder / "whole-said", start(folder / "whole-said", train(*common, "--name", "whole")))
    print(f"uninterrupted: exit codes {[code for code, _ in whole]}")

    started = start(folder / "killed-said", train(*common, "--name", "killed"))
    await_step(folder / "killed", args.at, started)
    started[args.kill].send_signal(signal.SIGKILL)
    began = time.monotonic()
    killed = finish(folder / "killed-said", started)
    died = losses(folder / "killed")
    print(f"killed process {args.kill} after step {args.at}: exit codes {[code for code, _ in killed]}; the other "
          f"ended {time.monotonic() - began:.0f} s later, saying")  # fmt: skip
    words = killed[1 - args.kill][1].splitlines()
    print(
        next(f"  {line}" for line in words if "another process may have ended" in line or "another task died" in line)
    )

    resumed = ["--resume", "--name", "killed", "--out", str(folder)]
    resumed = finish(folder / "resumed-said", start(folder / "resumed-said", train(*resumed)))
    print(f"resumed: exit codes {[code for code, _ in resumed]}")
    print(next(f"  {line}" for line in resumed[0][1].splitlines() if "resumed at step" in line))

    want, got = losses(folder / "whole"), losses(folder / "killed")
    print(f"{'step':>4}  {'uninterrupted':>14}  {'killed':>14}  {'resumed':>14}")
    for step in sorted(want):
        cells = [f"{found[step]:14.9f}" if step in found else " " * 14 for found in (want, died, got)]
        print(f"{step:>4}  {'  '.join(cells)}")
    same = want == got
    print("the resumed run has exactly the losses of the uninterrupted run" if same else "the losses DIFFER")
    return 0 if same and [code for code, _ in (*whole, *resumed)] == [0] * 4 else 1


if __name__ == "__main__":
    sys.exit(main())
