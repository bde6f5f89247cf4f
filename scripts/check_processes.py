"""This script compares one process of N devices with N processes of one device each: the same mesh, the same values.

    PYTHONPATH=src python scripts/check_processes.py [--size quick|tiny] [--out FILE]

Blocks are compared by values, gradients and stats, `moax train` by its losses. A layer of Qwen3-30B is timed by
`all_gather` and by `all_to_all`, and the bytes of both are read from the programs. The script exits with 1 where
something differs by more than the limits below. It needs N GPUs; without GPUs, N devices are emulated, on which `--size
tiny` takes a minute and the other sizes very long.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from kill_and_resume import FLAGS, MODEL, ROOT, finish, free_port, losses

BLOCK_LIMIT = 2.0**-7  # a rounding of bfloat16, of the largest value of a tensor
LOSS_LIMIT = 2.0**-5  # sums in another order change a token's experts in the course of a run
FLOAT_STATS_LIMIT = 1e-6
TRAIN = {
    "full": ["--preset", "small", "--batch", "16", "--steps", "100", "--eval-every", "100"],
    "quick": ["--preset", "small", "--batch", "16", "--steps", "30", "--eval-every", "30"],
    "tiny": [*MODEL[:-4], "--steps", "6", "--eval-every", "6", "--engine", "shard_map"],
}
TRAIN = {size: [*options, "--recipe", "none" if size == "tiny" else "fp8_block"] for size, options in TRAIN.items()}
PARTS = ("blocks", "times", "train")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=TRAIN, default="full", help="default: %(default)s")
    parser.add_argument("--quick", dest="size", action="store_const", const="quick", help="short for --size quick")
    parser.add_argument("--tiny", dest="size", action="store_const", const="tiny", help="short for --size tiny")
    parser.add_argument("--devices", type=int, help="N (default: the GPUs of this machine, or 2)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument(
        "--shares", type=int, help="groups of programs, each with its own processes (default: by cores)"
    )
    parser.add_argument("--limit", type=float, default=300, help="seconds of a part (default: %(default)s)")
    parser.add_argument("--sha", help="the measured commit (default: git's)")
    parser.add_argument("--out", type=Path, help="write the rows to this file, as JSON")
    args = parser.parse_args()
    gpus = find_gpus()
    devices = args.devices or len(gpus) or 2
    if gpus and devices > len(gpus):
        parser.error(f"--devices {devices} must be at most {len(gpus)}, the GPUs of this machine")
    found: dict[str, Any] = {"rows": []}
    with tempfile.TemporaryDirectory(prefix="check_processes_") as folder:
        if set(args.parts) & {"blocks", "times"}:
            found = run_worker(args, Path(folder), gpus[:devices], devices)
        if "train" in args.parts:
            found["rows"] += show(run_train(args, Path(folder), gpus[:devices], devices))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    bad = [row for row in found["rows"] if not row["ok"]]
    print(f"{len(bad)} of {len(found['rows'])} rows differ or failed" if bad else "one process and several agree")
    return int(bool(bad))


def find_gpus() -> list[str]:
    """Returns the GPUs as CUDA_VISIBLE_DEVICES names them; none where JAX_PLATFORMS is `cpu`."""
    if os.environ.get("JAX_PLATFORMS") == "cpu" or not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    every = [str(i) for i, _ in enumerate(re.findall(r"^GPU \d+", listed, re.MULTILINE))]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return every if visible is None else [name for name in visible.split(",") if name]


def start(folder: Path, commands: list[list[str]], gpus: list[str]) -> list[subprocess.Popen]:
    """Starts a process for each command; the output of process i goes to FOLDER/said.i.

    Args:
      folder: the folder of the outputs.
      commands: the arguments behind the Python interpreter.
      gpus: a command alone gets all of these GPUs, and of several commands each gets one; [] for emulated devices.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")]))
    shared = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    shared |= {"NCCL_NVLS_ENABLE": "0"} if gpus else {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    started = []
    for i, command in enumerate(commands):
        own = {"CUDA_VISIBLE_DEVICES": gpus[i] if len(commands) > 1 else ",".join(gpus)} if gpus else {}
        with (folder / f"said.{i}").open("w") as said:
            started.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    env=os.environ | shared | own,
                    cwd=ROOT,
                )
            )
    return started


@contextlib.contextmanager
def ended(groups: dict[Path, list[subprocess.Popen]]):
    """Ends all processes of the groups at the end of the context."""
    try:
        yield
    finally:
        for process in (process for started in groups.values() for process in started):
            process.kill()
            process.wait()


def wait(groups: dict[Path, list[subprocess.Popen]], folder: Path, name: str, limit: float) -> None:
    """Waits until each process of the group of `folder` has written the file FOLDER/NAME.I.json.

    Raises:
      RuntimeError: a process of any group ended with an error, or `limit` seconds passed.
    """
    end = time.monotonic() + limit
    while any(not (folder / f"{name}.{i}.json").exists() for i, _ in enumerate(groups[folder])):
        for at, started in groups.items():
            for i, process in enumerate(started):
                if process.poll() or time.monotonic() > end:
                    why = f"exit code {process.poll()}" if process.poll() else f"no {name} after {limit:.0f} s"
                    raise RuntimeError(f"{at.name}, process {i}: {why}:\n{(at / f'said.{i}').read_text()[-3000:]}")
        time.sleep(0.05)


def run_worker(args: argparse.Namespace, folder: Path, gpus: list[str], devices: int) -> dict[str, Any]:
    """Returns {"header", "rows"} of blocks and times.

    A program takes seconds of one core in JAX's lowering, so that the programs are dealt to several pairs of groups, as
    the cores allow. All compile at once; the times of each group are measured alone.
    """
    parts = [part for part in args.parts if part != "train"]
    shares = args.shares or max(1, min(5, (os.cpu_count() or 1) // (devices + 1) // 2))
    groups: dict[Path, list[subprocess.Popen]] = {}
    pairs = [(folder / f"one-{share}", folder / f"several-{share}") for share in range(shares)]
    for share, pair in enumerate(pairs):
        for at, count in zip(pair, (1, devices), strict=True):
            request = {"folder": str(at), "size": args.size, "parts": parts, "devices": devices, "processes": count}
            request |= {"coordinator": f"localhost:{free_port()}", "sha": args.sha, "command": ["python", *sys.argv]}
            request |= {"share": [share, shares]}
            commands = [["scripts/processes_worker.py", json.dumps(request | {"process": i})] for i in range(count)]
            groups[at] = start(at, commands, gpus)
    with ended(groups):
        found: dict[str, Any] = {"header": {}, "rows": []}
        try:
            for at in groups:
                wait(groups, at, "blocks", args.limit)
            head = json.loads((pairs[0][0] / "blocks.0.json").read_text())["header"]
            found["header"] = head | {"devices": devices}
            for one, several in pairs:
                found["rows"] += show(compare_blocks(one, several, devices))
            for pair in pairs if "times" in parts else ():
                for at in pair:
                    (at / "go").touch()
                    wait(groups, at, "times", args.limit)
                found["rows"] += show(compare_times(*pair, devices))
        except RuntimeError as error:  # What was found before stays.
            failed = {"part": "time" if found["rows"] else "block", "name": "all", "ok": False, "note": str(error)}
            found["rows"] += show([failed])
    return found


def show(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prints the rows, and returns them."""
    for row in rows:
        print(line(row), flush=True)
    return rows


def read(folder: Path, name: str, processes: int) -> list[Any]:
    """Returns what each process wrote into FOLDER/NAME.I.json."""
    return [json.loads((folder / f"{name}.{i}.json").read_text()) for i in range(processes)]


def compare_blocks(one: Path, several: Path, devices: int) -> list[dict[str, Any]]:
    """Returns a row for each block: the largest relative error of a tensor, and which tensor has it."""
    want, got = load(one, 1), load(several, devices)
    (alone,), others = read(one, "blocks", 1), read(several, "blocks", devices)
    rows = []
    for i, row in enumerate(alone["rows"]):
        twins = [other["rows"][i] for other in others]
        keys = {key for key in want.keys() | got.keys() if key.startswith(row["name"] + "|")}
        errors = {key: error_of(got.get(key), want.get(key)) for key in keys}
        stats = {key: error for key, error in errors.items() if "['stats']" in key}
        worst = max(errors, key=lambda key: errors[key], default="")
        limits = {key: 0.0 if want[key].dtype.kind in "iu" else FLOAT_STATS_LIMIT for key in stats if key in want}
        note = row.get("note") or next((twin["note"] for twin in twins if "note" in twin), "")
        same = all((twin.get("path"), twin.get("bytes")) == (row.get("path"), row.get("bytes")) for twin in twins)
        note = note or ("" if same else "several processes run other kernels, or send other bytes")
        unequal = [key for key, error in errors.items() if error == float("inf")]
        note = note or (f"missing, of another shape or not finite: {unequal[0]}" if unequal else "")
        ok = bool(keys) and not note and errors[worst] <= BLOCK_LIMIT
        ok = ok and all(errors[key] <= limits.get(key, 0.0) for key in stats)
        rows.append({"part": "block", **row, "note": note, "error": None if unequal else errors.get(worst), "ok": ok})
        rows[-1] |= {"worst": worst.split("|")[1] if worst and errors[worst] else "", "tensors": len(keys)}
    return rows


def load(folder: Path, processes: int) -> dict[str, np.ndarray]:
    """Returns the shards that all processes wrote, by block, tensor and device."""
    values = {}
    for i in range(processes):
        with np.load(folder / f"values.{i}.npz") as file:
            values |= dict(file)
    return values


def error_of(got: np.ndarray | None, want: np.ndarray | None) -> float:
    """Returns max |got - want| / max |want|; infinity for a shard that is missing, and where a value is not finite."""
    if got is None or want is None or got.shape != want.shape or not (np.isfinite(got) & np.isfinite(want)).all():
        return float("inf")
    off, scale = (float(np.max(np.abs(v), initial=0)) for v in (got.astype(np.float64) - want, want))
    return 0.0 if off == 0 else off / scale if scale else float("inf")


def compare_times(one: Path, several: Path, devices: int) -> list[dict[str, Any]]:
    """Returns a row for each layer; the time of several processes is that of the slowest."""
    (alone,), others = read(one, "times", 1), read(several, "times", devices)
    rows = []
    for i, row in enumerate(alone):
        twins = [other[i] for other in others]
        note = row.get("note") or next((twin["note"] for twin in twins if "note" in twin), "")
        rows.append({"part": "time", **row, "ok": not note})
        if not note:
            rows[-1] |= {"us_of_several": max(t["us"] for t in twins), "bytes_of_several": twins[0]["bytes"]}
        rows[-1] |= {"note": note}
    return rows


def run_train(args: argparse.Namespace, folder: Path, gpus: list[str], devices: int) -> list[dict[str, Any]]:
    """Returns a row that compares the losses of `moax train`, step by step; no row where its extra is missing."""
    missing = [name for name in ("optax", "orbax", "matplotlib", "rich") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"skipped moax train: {', '.join(missing)} missing (pip install 'moax[train]')", flush=True)
        return []
    options = [*TRAIN[args.size], "--save-every", "0", "--mesh", f"fsdp=1,ep={devices}"]
    groups = {}
    for name, count in (("one", 1), ("several", devices)):
        command = ["-m", "moax", "train", *options, "--out", str(folder / "runs"), "--name", name]
        command += [] if gpus else ["--cpu-devices", str(devices // count)]
        joined = ["--coordinator", f"localhost:{free_port()}", "--num-processes", str(count), "--process-id"]
        commands = [[*command, *([*joined, str(i)] if count > 1 else [])] for i in range(count)]
        groups[folder / f"train-{name}"] = start(folder / f"train-{name}", commands, gpus)
    with ended(groups):
        said = {at.name: finish(at, started, args.limit) for at, started in groups.items()}
    want, got = losses(folder / "runs" / "one"), losses(folder / "runs" / "several")
    failed = [f"{name}, process {i}: exit code {code}:\n{words[-2000:]}"
              for name, found in said.items() for i, (code, words) in enumerate(found) if code]  # fmt: skip
    errors = {step: abs(got[step] / want[step] - 1) for step in want.keys() & got.keys()}
    first = min((step for step, error in errors.items() if error), default=None)
    ok = not failed and bool(want) and want.keys() == got.keys() and max(errors.values()) <= LOSS_LIMIT
    row = {"part": "train", "name": " ".join(options), "steps": len(errors), "note": "\n".join(failed), "ok": ok}
    row |= {"error": max(errors.values(), default=None), "first_step_that_differs": first}
    return [row | {"losses": list(want.values()), "losses_of_several": list(got.values())}]


def line(row: dict[str, Any]) -> str:
    """Returns a row as a line of text."""
    state = "ok    " if row["ok"] else "FAILED"
    if row.get("note"):
        return f"{state} {row['part']:5} {row['name']}: {row['note']}"
    if row["part"] == "block":
        where = f" ({row['worst']})" if row["worst"] else ""
        return f"{state} block {row['name']:42} {row['path']:6} passes {row['passes']}, error {row['error']:.1e}{where}"
    if row["part"] == "time":
        sent = ", ".join(f"{kind} {count / 1e6:.2f}" for kind, count in row["bytes"].items())
        same = "the same" if row["bytes_of_several"] == row["bytes"] else f"{row['bytes_of_several']}"
        us = f"{row['us']:8.0f} us in one process, {row['us_of_several']:8.0f} in several"
        return f"{state} time  {row['name']:42} {row['path']:6} {us}; MB sent: {sent}; in several {same}"
    differs = f", first at step {row['first_step_that_differs']}" if row["error"] else ""
    return f"{state} train {row['steps']} steps, largest relative error of a loss {row['error']:.1e}{differs}"


if __name__ == "__main__":
    sys.exit(main())
