"""Several processes of one run: how they join, agree, act as one, and leave.

Each process runs the same program on the same settings, and has some of the devices. What is computed on a mesh needs
nothing from here; what a process does by itself does: read arguments and text, name a run, print, write files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from typing import Any, NoReturn, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

HEARTBEAT = 100  # seconds; JAX's own default


def add_options(group) -> None:
    """The flags of `join`."""
    add = group.add_argument
    add("--distributed", action="store_true", help="join the other processes of this Slurm or MPI job, as JAX finds it")
    add("--coordinator", metavar="HOST:PORT", help="without such a job: where process 0 listens, the same for all")
    add("--num-processes", type=int, metavar="N", help="how many processes there are")
    add("--process-id", type=int, metavar="I", help="which of them this is, from 0")
    add("--heartbeat-timeout", type=int, default=HEARTBEAT, metavar="SECONDS", help="end where another process has not "
        "been heard of for so long (default: %(default)s)")  # fmt: skip


def flags(args: argparse.Namespace) -> list[str]:
    """What to type to join again, for a hint."""
    if args.coordinator:
        return ["--coordinator", "HOST:PORT", "--num-processes", str(args.num_processes), "--process-id", "I"]
    return ["--distributed"] if args.distributed else []


def join(args: argparse.Namespace) -> None:
    """Connects to the other processes, if there are any; must come before anything starts JAX's backend.

    Raises:
      ValueError: flags that do not fit together. RuntimeError: nobody answers, or JAX finds no job.
    """
    given = {
        f"--{name.replace('_', '-')}": getattr(args, name) for name in ("coordinator", "num_processes", "process_id")
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == 3 and not args.distributed:
        return
    if args.distributed and len(missing) < 3:
        raise ValueError(f"--distributed finds {', '.join(given)} itself; give it alone, or those three without it")
    if not args.distributed and missing:
        raise ValueError(f"{', '.join(missing)} missing: one of several processes needs all of {', '.join(given)}")
    if args.heartbeat_timeout < 1:
        raise ValueError(f"--heartbeat-timeout {args.heartbeat_timeout} must be at least 1 second")
    if not args.distributed:
        if not 0 <= args.process_id < args.num_processes:
            raise ValueError(
                f"--process-id {args.process_id} must be at least 0 and below --num-processes {args.num_processes}"
            )
        if not args.coordinator.rpartition(":")[0] or not args.coordinator.rpartition(":")[2].isdecimal():
            raise ValueError(f"--coordinator {args.coordinator} must be HOST:PORT, as in node0:1234")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            args.coordinator,
            args.num_processes,
            args.process_id,
            # Under Slurm the detection gives a process one GPU; where all is said, it keeps those that it sees.
            cluster_detection_method=None if args.distributed else "deactivate",
            heartbeat_timeout_seconds=args.heartbeat_timeout,
        )
    except ValueError as error:  # JAX's words for a job that it did not find
        raise ValueError(
            f"--distributed: JAX finds no Slurm or MPI job here ({error}); give {', '.join(given)}"
        ) from error


def is_first() -> bool:
    """Whether this is the process that prints, and writes what is written once."""
    return jax.process_index() == 0


def gather(text: str) -> list[str]:
    """Every process's text, on all of them."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = np.ravel(multihost_utils.process_allgather(np.int32(data.size)))
    padded = np.zeros(max(1, sizes.max()), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def together[T](act: Callable[[], T]) -> T:
    """act(), an error of one process being an error of all: nobody then waits for a process that is gone."""
    result, mine = None, None
    try:
        result = act()
    except Exception as error:
        mine = error
    failed = gather("" if mine is None else str(mine) or type(mine).__name__)
    if mine is not None:
        _end(mine)
    for process, why in enumerate(failed):
        if why:
            _end(ValueError(f"process {process} cannot go on: {why}"))
    return cast(T, result)


def agree(**values: Any) -> None:
    """Raises ValueError on every process where they were started with different values (of JSON), naming them."""
    said = [json.loads(text) for text in gather(json.dumps({n: _digest(v) for n, v in values.items()}))]
    for name in values:
        other = next((i for i, one in enumerate(said) if one[name] != said[0][name]), None)
        if other is not None:
            _end(ValueError(f"{name} is not the same in processes 0 and {other}; start all of them alike"))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _end(error: Exception) -> NoReturn:
    """Raises `error`, which all processes have, with the ties between them cut: none cuts another's last words off."""
    if jax.process_count() > 1:
        jax.distributed.shutdown()
    raise error
