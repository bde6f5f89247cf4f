"""The time of a call is the median over repeats, after warm-ups; every output is awaited.

kernel_time   the sum of the times of one call's kernels on the GPU (CUPTI), without the host
call_time     the wall clock of back-to-back calls, divided by their number
"""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from moax.kernels.device import find_device

logger = logging.getLogger("moax")
KEPT_BYTES = 8e9  # the most bytes of outputs that a batch of calls holds


@dataclasses.dataclass(frozen=True)
class Repeats:
    """The number of calls: `warmups` before the measurement, and `measured` ones."""

    warmups: int = 10
    measured: int = 20

    @classmethod
    def quick(cls) -> Repeats:
        """Returns few repeats, for a first look."""
        return cls(3, 7)


STANDARD = Repeats()


@dataclasses.dataclass(frozen=True)
class Timing:
    """A measured time."""

    us: float
    method: str
    kernels: tuple[tuple[str, float], ...] = ()


def kernel_time(f: Callable, args: tuple, repeats: Repeats = STANDARD) -> Timing:
    """Measures the kernel time of `f(*args)`, or the wall clock where CUPTI does not work.

    The arguments of benchmarks exceed the L2 cache, so that a call finds little of the data of the call before it.
    """
    _warm(f, args, repeats)
    if find_device().platform != "gpu":
        return _wall(f, args, repeats)
    try:
        return _cupti(f, args, repeats)
    except (RuntimeError, ImportError, AttributeError, TypeError, ValueError) as error:
        # The kernels of the program may differ from call to call, or another process may hold the profiler.
        logger.warning("no kernel times by CUPTI (%s); wall clock instead", error)
        return _wall(f, args, repeats)


def call_time(f: Callable, args: tuple, repeats: Repeats = STANDARD) -> Timing:
    """Measures the wall clock of `f(*args)`: the median over batches of back-to-back calls; see `kernel_time`."""
    _warm(f, args, repeats)
    return _wall(f, args, repeats)


def _warm(f, args, repeats: Repeats) -> None:
    for _ in range(repeats.warmups):
        jax.block_until_ready(f(*args))


def _cupti(f, args, repeats: Repeats) -> Timing:
    from jax.experimental.mosaic.gpu import profiler

    batch = _batch(f, args)
    runs: list[Any] = []
    while len(runs) < repeats.measured:
        count = min(batch, repeats.measured - len(runs))
        _, times = profiler.measure(f, aggregate=False, iterations=count)(*args)
        if not times:
            raise RuntimeError("the profiler saw no kernel")
        runs.extend([times] if count == 1 else times)
    totals = [sum(ms for _, ms in run) for run in runs]
    middle = min(range(len(runs)), key=lambda i: abs(totals[i] - statistics.median(totals)))
    return Timing(
        1e3 * statistics.median(totals),
        "cupti",
        tuple((name, 1e3 * ms) for name, ms in runs[middle]),
    )


def _wall(f, args, repeats: Repeats) -> Timing:
    batches = 5 if repeats.measured >= 10 else 3
    calls = min(math.ceil(repeats.measured / batches), max(2, _batch(f, args)))
    times = []
    for _ in range(batches):
        start = time.perf_counter()
        jax.block_until_ready([f(*args) for _ in range(calls)])
        times.append((time.perf_counter() - start) / calls)
    return Timing(1e6 * statistics.median(times), "wall")


def _batch(f, args) -> int:
    """Returns how many calls' outputs fit in `KEPT_BYTES` together."""
    results = f.out_info if isinstance(f, jax.stages.Compiled) else ()
    if isinstance(f, jax.stages.Wrapped):
        results = jax.eval_shape(f, *args)
    nbytes = sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in jax.tree.leaves(results))
    return max(1, int(KEPT_BYTES / max(nbytes, 1)))
