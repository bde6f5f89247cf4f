"""`python -m benchmarks.fuzz`: random blocks by the kernels, beside XLA and beside float32.

    python -m benchmarks.fuzz                                      201 cases by the Hopper kernels, on a Hopper GPU
    python -m benchmarks.fuzz --seeds 17 --draw 1                  one of them again
    python -m benchmarks.fuzz --named --mesh --gpus 4              the fixed cases, then 201 cases on meshes of 4 GPUs
    python -m benchmarks.fuzz --named --seeds 0:0                  the fixed cases alone
    python -m benchmarks.fuzz --seeds 0:8 --kernels xla --tiny     the program itself, on any machine
    python -m benchmarks.fuzz --seeds 0:8 --kernels xla --tiny --mesh     the same on 4 emulated devices

A seed names a block: shapes, recipe, options. Compilation takes nearly all of the time, so each block is compiled once
and runs on several draws of its run-time arguments. A case is one draw of one block: the values, the loads of the
experts (equal, skewed, nearly all on one expert, half of the experts empty), the padding and the choices of nobody.
So 201 cases by `--draws 3` are 201 inputs of 67 programs, and not 201 programs.

Each case runs forward and backward three times: by the kernels, by XLA with the same recipe, and by `moax.reference`
in float32 with the same experts. The error of the kernels may not be much larger than that of XLA, and that of XLA may
not exceed a bound by recipe. A line has the errors of both. The exit code is 1 if a case is wrong, if a process died,
or if no case ended. Several processes share a GPU.

With `--mesh` a seed also draws a mesh of up to all devices of the machine (dp, fsdp, ep, tp and cp of 2 or 4 devices,
Auto or Explicit) and an exchange. The kernels then run on the mesh, twice, and the two runs must give the same bits;
XLA runs on one device. Processes compile at the same time, and one of them executes.

With `--named` fixed cases of what hung or broke other libraries run first; `benchmarks.fuzz.named` and
`benchmarks.fuzz.large` have them. Those of `large` have a GPU of about 80 GB to themselves.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks.fuzz import large, named
from benchmarks.fuzz.cases import Case, draw, make_inputs
from benchmarks.fuzz.meshes import draw_on_mesh, make_mesh_programs
from benchmarks.fuzz.oracle import check, make_programs
from benchmarks.report import header

EMULATED = 4  # the devices of a CPU with --tiny
# What an initializer of a process leaves for its cases: the lock that a case on a mesh holds while it executes.
locks: list[Any] = []


def make_case(label: str, tiny: bool, mesh: bool) -> Case:
    """Returns the case of a name or of a seed."""
    devices = jax.device_count()
    if not label.isdecimal():
        return named.make_case(label, devices, tiny)
    if mesh:
        return draw_on_mesh(int(label), devices, tiny)
    return draw(int(label), tiny)


def run_case(label: str, indices: list[int], kernels: str, tiny: bool, mesh: bool) -> list[dict[str, Any]]:
    """Runs draws of a case, and returns their rows: an error that one raises is a wrong result too."""
    case = make_case(label, tiny, mesh)
    rows = []
    programs = None
    with contextlib.ExitStack() as turn:
        for index in indices:
            start = time.monotonic()
            words = ""
            try:
                words, inputs = make_inputs(case, index)
                if programs is None:
                    if case.layout is None:
                        programs = make_programs(case, kernels)
                    else:
                        programs = make_mesh_programs(case, kernels, inputs)
                    if mesh:
                        asked = time.monotonic()
                        for lock in locks:
                            turn.enter_context(lock)
                        start += time.monotonic() - asked  # no case is slow because it waits for another one
                right, errors = check(case, programs, inputs)
                row = dict(right=right, errors=errors)
            except Exception as why:
                row = dict(right=False, raised=f"{type(why).__name__}: {why}"[:500])
            seconds = round(time.monotonic() - start, 1)
            words = f"{case} {words}"
            rows.append(dict(seed=case.label, draw=index, case=words, seconds=seconds) | row)
    jax.clear_caches()
    return rows


def run_large(label: str, kernels: str, tiny: bool) -> list[dict[str, Any]]:
    """Runs a large case, and returns its row."""
    start = time.monotonic()
    try:
        row = large.check_large(label, kernels, tiny)
    except Exception as why:
        seconds = round(time.monotonic() - start, 1)
        row = dict(seed=label, draw=0, case=label, seconds=seconds, right=False)
        row["raised"] = f"{type(why).__name__}: {why}"[:500]
    jax.clear_caches()
    return [row]


def take_gpu(turns: Any, gpus: int) -> None:
    """Lets a process see one of several GPUs: the next one in turn."""
    with turns.get_lock():
        if gpus > 1:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(turns.value % gpus)
        turns.value += 1


@dataclasses.dataclass(frozen=True)
class Phase:
    """Cases that run side by side.

    Attributes:
      labels: the names and seeds of the cases.
      draws: the rows of a case.
      function, arguments: what runs a case: `function(label, *arguments)`.
      jobs: the number of processes.
      gpus: the GPUs of which each process sees one in turn; 1 means that each process sees all.
    """

    labels: list[str]
    draws: int
    function: Callable[..., list[dict[str, Any]]]
    arguments: tuple
    jobs: int
    gpus: int


def phases(args: argparse.Namespace, seeds: list[str], indices: list[int]) -> list[Phase]:
    """Returns what a command line asks for, in order: no other case may share a GPU with a large one."""
    phases = []
    labels = []
    if args.named:
        labels = named.names(args.mesh)
        settings = (args.kernels, args.tiny)
        gpus = min(args.gpus, len(large.CASES))
        phases.append(Phase(list(large.CASES), 1, run_large, settings, gpus, args.gpus))
    labels += seeds
    if labels:
        settings = (indices, args.kernels, args.tiny, args.mesh)
        gpus = args.gpus
        if args.mesh:
            gpus = 1
        phases.append(Phase(labels, len(indices), run_case, settings, args.jobs, gpus))
    return phases


def start_process(turns: Any, gpus: int, lock: Any) -> None:
    """Prepares a process for its cases."""
    take_gpu(turns, gpus)
    locks.append(lock)


def run_phase(phase: Phase, seconds: float | None) -> Iterator[dict[str, Any]]:
    """Yields each row when its case ends, and ends all processes of the phase at last.

    Raises:
      TimeoutError: the time is over.
      BrokenExecutor: a process died.
    """
    spawn = multiprocessing.get_context("spawn")
    shared = (spawn.Value("i", 0), phase.gpus, spawn.Lock())
    pool = concurrent.futures.ProcessPoolExecutor(phase.jobs, spawn, start_process, shared)
    try:
        waiting = [pool.submit(phase.function, label, *phase.arguments) for label in phase.labels]
        for done in concurrent.futures.as_completed(waiting, seconds):
            yield from done.result()
    finally:
        processes = multiprocessing.active_children()
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()


def line(row: dict[str, Any]) -> str:
    """Returns a row as a line: each error as that of the kernels / that of XLA."""
    by_name = sorted(row.get("errors", {}).items())
    errors = [f"{name} {ours:.0e}/{xla:.0e}" for name, (ours, xla) in by_name]
    state = "right" if row["right"] else "WRONG"
    name = f"{row['seed']:>5}.{row['draw']} {row['seconds']:5.1f} s"
    return f"{state} {name}  {row['case']}  {' '.join(errors) or row['raised']}"


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code, 1 if a case is wrong."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add(
        "--seeds",
        default="0:67",
        metavar="FROM:TO",
        help="the seeds, FROM included, or one (default: %(default)s)",
    )
    add("--draws", type=int, default=3, metavar="N", help="cases of a seed (default: %(default)s)")
    add("--draw", type=int, metavar="I", help="only draw I of each seed, counted from 0")
    add("--kernels", default="hopper", help="the implementation (default: %(default)s)")
    add(
        "--jobs",
        type=int,
        default=os.cpu_count(),
        metavar="N",
        help="processes at a time (default: one a core)",
    )
    add(
        "--gpus",
        type=int,
        default=1,
        metavar="N",
        help="GPUs that the processes share (default: %(default)s)",
    )
    add("--seconds", type=float, metavar="S", help="end after so many seconds, whatever still runs")
    add("--mesh", action="store_true", help="each seed draws a mesh too")
    add("--named", action="store_true", help="run the fixed cases first")
    add("--tiny", action="store_true", help="sizes for a CPU")
    add("--out", type=Path, metavar="FILE", help="write the rows as JSON")
    add("--sha", help="the tested commit (default: git tells it)")
    args = parser.parse_args(argv)
    first_seed, *last = map(int, args.seeds.split(":"))
    seeds = range(first_seed, last[0] if last else first_seed + 1)
    indices = list(range(args.draws)) if args.draw is None else [args.draw]
    # The processes share the GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if args.mesh and args.tiny:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(EMULATED))
    command = ["python", "-m", "benchmarks.fuzz", *(sys.argv[1:] if argv is None else argv)]
    head = header(command, args.sha, {}) if args.out else {}

    start = time.monotonic()
    rows: list[dict[str, Any]] = []
    died = False
    total = 0
    asked: list[str] = []
    for phase in phases(args, [str(seed) for seed in seeds], indices):
        asked += phase.labels
        total += len(phase.labels) * phase.draws
    try:
        for phase in phases(args, [str(seed) for seed in seeds], indices):
            left = None
            if args.seconds is not None:
                left = args.seconds - (time.monotonic() - start)
            for row in run_phase(phase, left):
                rows.append(row)
                print(line(row), flush=True)
                if args.out:  # a run that is cut leaves what ended
                    args.out.write_text(json.dumps(head | dict(rows=rows), indent=1) + "\n")
    except TimeoutError:
        print(f"The time of {args.seconds:.0f} s is over.")
    except concurrent.futures.BrokenExecutor as why:
        died = True
        print(f"A process died: {why}")
    wrong = sorted(f"{row['seed']}.{row['draw']}" for row in rows if not row["right"])
    ended = {row["seed"] for row in rows}
    missing = [label for label in asked if label not in ended]
    seconds = time.monotonic() - start
    right = len(rows) - len(wrong)
    print(f"{len(rows)} cases of {total} ended in {seconds:.0f} s: {right} right, {len(wrong)} wrong")
    not_run = " ".join(map(str, missing)) or "none"
    print(f"wrong: {' '.join(wrong) or 'none'}; seeds that did not run: {not_run}")
    return int(bool(wrong) or died or not rows)
