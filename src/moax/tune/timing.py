"""Time of a call: the median over repeats, after warm-ups, every output awaited.

kernel_time   the sum of the GPU's kernel times of one call (CUPTI), the host left out
call_time     wall clock of back-to-back calls, divided by their number
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

from moax import backend

logger = logging.getLogger("moax")
KEPT_BYTES = 8e9  # outputs held at a time


@dataclasses.dataclass(frozen=True)
class Repeats:
    """How often: calls before measuring, and measured calls."""

    warmups: int = 10
    measured: int = 20

    @classmethod
    def quick(cls) -> Repeats:
        """For a first look."""
        return cls(3, 7)


STANDARD = Repeats()


@dataclasses.dataclass(frozen=True)
class Timing:
    """us: of one call, the median. method: `cupti` or `wall`. kernels: (name, us) of one call in order, by CUPTI."""

    us: float
    method: str
    kernels: tuple[tuple[str, float], ...] = ()


def kernel_time(f: Callable, args: tuple, repeats: Repeats = STANDARD) -> Timing:
    """Median kernel time of `f(*args)`; wall clock where CUPTI is not to be had. f: jitted, or compiled.

    Arguments of benchmarks exceed the L2 cache, so a call finds little of what the one before it left there.
    """
    _warm(f, args, repeats)
    if backend.platform() != "gpu":
        return _wall(f, args, repeats)
    try:
        return _cupti(f, args, repeats)
    except (RuntimeError, ImportError, AttributeError, TypeError, ValueError) as error:
        # A program whose kernels differ from call to call, or a profiler that another one holds.
        logger.warning("no kernel times by CUPTI (%s); wall clock instead", error)
        return _wall(f, args, repeats)


def call_time(f: Callable, args: tuple, repeats: Repeats = STANDARD) -> Timing:
    """Median over batches of the wall clock of back-to-back calls."""
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
    return Timing(1e3 * statistics.median(totals), "cupti", tuple((name, 1e3 * ms) for name, ms in runs[middle]))


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
    """Calls whose outputs fit in memory together."""
    made = f.out_info if isinstance(f, jax.stages.Compiled) else ()
    made = jax.eval_shape(f, *args) if isinstance(f, jax.stages.Wrapped) else made
    nbytes = sum(math.prod(shape.shape) * shape.dtype.itemsize for shape in jax.tree.leaves(made))
    return max(1, int(KEPT_BYTES / max(nbytes, 1)))
