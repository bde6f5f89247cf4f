"""`moax bench permute`, fused with quantization: rows of tokens gathered by expert and quantized in one read.

    gather-quantize   x[source] by rows and by columns

Beside it the gather and the quantization as two kernels, and plain jnp. Bytes are real rows, read once for each of
their experts, and data and scales written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import error, limits
from benchmarks.kernels import ours
from benchmarks.kernels.permute import SAMPLE, expert_sorted
from moax.tune.problem import quantize_rows
from benchmarks.report import Row, compare, why
from moax.tune.timing import Repeats, kernel_time
from benchmarks.tokens import Tokens
from moax.groups import BLOCK

BY_TWO = 2 + 2 * (1 + 4 / BLOCK)  # bytes of a value in bf16, and quantized twice with its share of the scales


def rows(cases: list[Tokens], peers: bool, repeats: Repeats, found: dict[str, Any]) -> Iterator[Row]:
    """For each case the one kernel, the two, then plain jnp."""
    for case in cases:
        x, source, blocks = expert_sorted(case)
        builds = {"moax": ("mosaic", ours.gather_quantize), "moax, apart": ("mosaic", ours.gather_then_quantize)}
        if peers:
            builds["jnp"] = "xla", lambda: _plain
        group = [_row(case, impl, *builds[impl], (x, source, blocks), repeats, found) for impl in builds]
        compare(group)
        yield from group


@jax.jit
def _plain(x, source, blocks):
    rows = jnp.take(x, source, axis=0, mode="fill", fill_value=0)
    return quantize_rows(rows), quantize_rows(rows.T)


def _row(case, impl, path, build, args, repeats: Repeats, found) -> Row:
    row = Row("permute", case.name, "gather-quantize", impl, "fp8_block", path=path, extra=dataclasses.asdict(case))
    try:
        f = build()
        timing = kernel_time(f, args, repeats)
        by_rows, by_columns = f(*args)
        source = np.asarray(args[1])
        real = np.flatnonzero(source < case.tokens)
        some = real[np.linspace(0, len(real) - 1, min(len(real), SAMPLE)).astype(np.int64)]
        columns = np.linspace(0, case.width - 1, min(case.width, SAMPLE)).astype(np.int64)
        got = [error.operand_rows(by_rows, some), error.operand_rows(by_columns, columns)[:, real]]
        row.error = error.relative(
            got, [error.double(args[0][source[some]]), error.double(args[0][:, columns]).T[:, source[real]]]
        )
        row.us, row.method = timing.us, timing.method
    except Exception as failure:
        row.us, row.note = None, why(failure)
        return row
    nbytes = case.tokens * case.top_k * case.width * BY_TWO
    row.tb_s = nbytes / row.us * 1e-6
    row.limit, row.fraction = limits.fraction(found, row.us, 0.0, nbytes, "bf16")
    return row
