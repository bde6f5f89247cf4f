"""How a command reads a mesh, starts JAX, prints an error, and exits.

Exit codes are 0 for success, 1 where the program cannot run on this machine, 2 where an argument is wrong, and
130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable

import jax

import moax

ROLES = ("dp", "fsdp", "cp", "ep", "tp")
Sizes = tuple[tuple[str, int], ...]  # (axis, devices along it)


def run(name: str, act: Callable[[], int], *, traceback: bool = False) -> int:
    """Returns the exit code of `act()`, or of an expected error, which it prints as `NAME: error: MESSAGE`.

    `name` is the program as the user typed it. With `traceback` it raises the error, so that Python shows its place.
    """
    try:
        code = act()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)
        code = 130
    except Exception as error:
        if traceback or (explained := explain(error)) is None:
            raise
        message, code = explained
        print(f"{name}: error: {message}", file=sys.stderr)
    if jax.distributed.is_initialized():
        # An orderly exit would wait for all processes, and those that still run would wait for this one.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def explain(error: Exception) -> tuple[str, int] | None:
    """Returns (message, exit code) of an error that the user can mend; None for a bug, which keeps its traceback."""
    if not isinstance(error, ValueError | moax.Unsupported | OSError | jax.errors.JaxRuntimeError):
        return None
    message = str(error).strip() or type(error).__name__
    if isinstance(error, jax.errors.JaxRuntimeError) and jax.distributed.is_initialized():
        message += "; another process may have ended: see its output"
    return message, 2 if isinstance(error, ValueError) else 1


def start(cpu_devices: int | None = None) -> None:
    """Starts JAX on this many emulated CPU devices, or with None on its own choice; Unsupported where it has none."""
    if cpu_devices is not None:
        emulate(cpu_devices)
    try:
        jax.device_count()
    # JAX asserts that this machine has a platform it was told to use.
    except (RuntimeError, AssertionError) as error:
        why = str(error).strip() or f"this machine has none of the platforms {jax.config.jax_platforms}"
        raise moax.Unsupported(f"JAX cannot start: {why}") from error


def emulate(count: int) -> None:
    """Makes JAX run on `count` emulated CPU devices; ValueError where it already runs on another number."""
    if count < 1:
        raise ValueError(f"--cpu-devices {count} must be at least 1")
    # With many devices on few cores, a rendezvous may take longer than the 40 seconds after which XLA gives up.
    flag = "--xla_cpu_collective_call_terminate_timeout_seconds"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}=600".strip()
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX has started already; the next line counts its devices.
    if (running := jax.local_device_count()) != count:
        raise ValueError(f"--cpu-devices {count}: JAX already runs in this process, on {running} devices")


def factor(text: str) -> float:
    """Parses the value of --capacity-factor for argparse: `none` is infinite."""
    return math.inf if text == "none" else float(text)


def factor_or_auto(text: str) -> float | str:
    """Parses the value of --buffer-factor for argparse: `none` is infinite, and `auto` stays."""
    return text if text == "auto" else factor(text)


def mesh_of(text: str) -> Sizes:
    """Parses the value of --mesh for argparse: `"ep=4,fsdp=2"` -> (("fsdp", 2), ("ep", 4)).

    The axes come out in the order dp, fsdp, cp, ep, tp, so that neighbours along tp and ep are neighbouring devices.
    """
    parts = [part.partition("=") for part in text.replace(" ", "").split(",")]
    sizes = {}
    for name, _, size in parts:
        if name in ROLES and size.isdecimal() and int(size):
            sizes[name] = int(size)
    if len(sizes) < len(parts):
        wanted = f"must have sizes of the axes {', '.join(ROLES)}, each at most once, as fsdp=2,ep=4"
        raise argparse.ArgumentTypeError(f"{text!r} {wanted}")
    return tuple((name, sizes[name]) for name in ROLES if name in sizes)
