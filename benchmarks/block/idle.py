"""What a GPU does in back-to-back calls: the time of its kernels, and the time in which it runs none.

Kernels that a profiler measures one call at a time run on a cooler card, at a higher clock. The difference of their sum
and the wall clock is therefore no idle time. Here both come from one profile of calls that follow each other.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax

from moax.inspect import Kernel
from moax.inspect.intervals import length, union
from moax.inspect.profiles import read_profile

WARM, CALLS = 100, 20  # calls until the card has its clock under load, and profiled calls


def back_to_back(f: Callable, args: tuple) -> dict[str, float]:
    """Returns `split` of calls f(*args) that follow each other without a wait."""
    result: Any = None
    for _ in range(WARM):
        result = f(*args)
    jax.block_until_ready(result)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                result = f(*args)
            jax.block_until_ready(result)
        return split(read_profile(folder), CALLS)


def split(kernels: Sequence[Kernel], calls: int) -> dict[str, float]:
    """Returns, for one of so many calls: the launches, the us in which a kernel runs, and the us in which none does."""
    running = union((kernel.start, kernel.end) for kernel in kernels)
    busy = length(running)
    idle = running[-1][1] - running[0][0] - busy
    return {"launches": len(kernels) / calls, "busy_us": busy / calls / 1e3, "idle_us": idle / calls / 1e3}
