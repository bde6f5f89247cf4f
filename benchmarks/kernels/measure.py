"""One row of a kernel that moves data: quantization, permutation and what is fused with them."""

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
      row: says what is measured.
      build: makes the function that is timed; where there is no such kernel here, it raises.
      args: what the function is called with.
      nbytes: bytes that one call reads and writes at least.
      judge: the error of what the function returns, against float64.
      repeats: how often.
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
