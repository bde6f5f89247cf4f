"""This module measures one row of a kernel that moves data: quantization, permutation, or a fusion with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import limits
from benchmarks.error import Error
from benchmarks.report import Row, why
from moax.tune.timing import Repeats, kernel_time


def measure(
    row: Row,
    build: Callable[[], Callable],
    args: tuple,
    *,
    nbytes: float,
    judge: Callable[[Any], Error],
    repeats: Repeats,
    found: dict[str, Any],
) -> Row:
    """Fills time, rate and error of `row`, or the note that says why the kernel does not run here.

    Args:
      row: the row to fill.
      build: returns the function to time; it raises where this machine has no such kernel.
      args: the arguments of the function.
      nbytes: the least bytes that one call reads and writes.
      judge: returns the error of the function's result against float64.
      repeats: the number of calls.
      found: the limits of this run, as `limits.measure` returns them.

    Returns:
      `row`.
    """
    try:
        f = build()
        timing = kernel_time(f, args, repeats)
        row.error, row.error_worst, row.error_rounding = judge(f(*args))
        row.us, row.method = timing.us, timing.method
    except Exception as failure:
        row.us, row.note = None, why(failure)
        return row
    row.tb_s = nbytes / timing.us * 1e-6
    row.limit, row.fraction = limits.fraction(found, timing.us, 0.0, nbytes, "bf16")
    return row
