"""Several processes of one run: how they join, agree, act as one, and leave.

Each process runs the same program with the same settings, and has some of the devices. A computation on a mesh needs
nothing from this module; the work outside of it does: to read arguments and text, name a run, print, and write files.
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

HEARTBEAT = 100  # seconds, as JAX's default


def add_options(group) -> None:
    """Adds the flags that `join` reads to `group`."""
    add = group.add_argument
    add(
        "--distributed",
        action="store_true",
        help="join the other processes of this Slurm or MPI job, as JAX finds it",
    )
    add(
        "--coordinator",
        metavar="HOST:PORT",
        help="without such a job: the address at which process 0 listens",
    )
    add("--num-processes", type=int, metavar="N", help="number of processes")
    add("--process-id", type=int, metavar="I", help="number of this process, from 0")
    add(
        "--heartbeat-timeout",
        type=int,
        default=HEARTBEAT,
        metavar="SECONDS",
        help="end when another process has sent no sign of life for so long (default: %(default)s)",
    )


def flags(args: argparse.Namespace) -> list[str]:
    """Returns the flags with which to join again, for the hint how to resume."""
    if args.coordinator:
        return [
            "--coordinator",
            "HOST:PORT",
            "--num-processes",
            str(args.num_processes),
            "--process-id",
            "I",
        ]
    return ["--distributed"] if args.distributed else []


def join(args: argparse.Namespace) -> None:
    """Connects to the other processes, if there are any. The call must come before JAX's backend starts.

    Raises:
      ValueError: the flags do not fit together, or JAX finds no Slurm or MPI job.
      RuntimeError: the coordinator does not answer.
    """
    names = ("coordinator", "num_processes", "process_id")
    flags = {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}
    all_flags = ", ".join(flags)
    missing = [name for name, value in flags.items() if value is None]
    if len(missing) == 3 and not args.distributed:
        return
    if args.distributed and len(missing) < 3:
        raise ValueError(
            f"--distributed finds {all_flags} itself; give --distributed alone, or the three flags without it",
        )
    if not args.distributed and missing:
        absent = ", ".join(missing)
        raise ValueError(f"{absent} missing: one of several processes needs all of {all_flags}")
    if args.heartbeat_timeout < 1:
        raise ValueError(f"--heartbeat-timeout {args.heartbeat_timeout} must be at least 1 second")
    if not args.distributed:
        if not 0 <= args.process_id < args.num_processes:
            raise ValueError(
                f"--process-id {args.process_id} must be at least 0 and below --num-processes {args.num_processes}"
            )
        host, _, port = args.coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"--coordinator {args.coordinator} must be HOST:PORT, as in node0:1234")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            args.coordinator,
            args.num_processes,
            args.process_id,
            # Under Slurm the detection gives a process one GPU. Without detection, a process keeps the GPUs it sees.
            cluster_detection_method=None if args.distributed else "deactivate",
            heartbeat_timeout_seconds=args.heartbeat_timeout,
        )
    except ValueError as error:  # JAX raises ValueError where it finds no job.
        reason = f"--distributed: JAX finds no Slurm or MPI job ({error}); give {all_flags}"
        raise ValueError(reason) from error


def is_first() -> bool:
    """Returns whether this is process 0, which prints, and writes the files that are written once."""
    return jax.process_index() == 0


def gather(text: str) -> list[str]:
    """Returns the texts of all processes, in the order of the processes, to each of them."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = np.ravel(multihost_utils.process_allgather(np.int32(data.size)))
    padded = np.zeros(max(1, sizes.max()), np.uint8)
    padded[: data.size] = data
    rows = multihost_utils.process_allgather(padded)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def together[T](act: Callable[[], T]) -> T:
    """Calls `act()` in every process; an error in one process is raised in all, so that none waits for a dead one.

    Raises:
      ValueError: `act()` failed in another process; its own error is raised where it failed.
    """
    result = None
    own_error = None
    try:
        result = act()
    except Exception as error:
        own_error = error
    messages = gather("" if own_error is None else str(own_error) or type(own_error).__name__)
    if own_error is not None:
        _end(own_error)
    for process, message in enumerate(messages):
        if message:
            _end(ValueError(f"process {process} cannot go on: {message}"))
    return cast(T, result)


def agree(**values: Any) -> None:
    """Checks that all processes were started with the same values, which JSON can hold.

    Raises:
      ValueError: two processes have different values; every process raises it, and the message names the value.
    """
    own_digests = json.dumps({name: _digest(value) for name, value in values.items()})
    digests = [json.loads(text) for text in gather(own_digests)]
    for name in values:
        other = next((i for i, one in enumerate(digests) if one[name] != digests[0][name]), None)
        if other is not None:
            _end(ValueError(f"{name} is not the same in processes 0 and {other}; start all of them alike"))


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _end(error: Exception) -> NoReturn:
    """Raises `error`, which every process raises, after it has left the others, so that each can print its error."""
    if jax.process_count() > 1:
        jax.distributed.shutdown()
    raise error
