"""`python -m benchmarks permute`: one kernel reads the rows of tokens once, sorts them by expert and quantizes them.

    gather-quantize   rows[n] = x[source[n]], quantized by rows and by columns

The peers are the gather and the quantization as two kernels, and plain jnp. The bytes are those of real rows: the row
of a token is read once for each of its experts, data and scales are written.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import error
from benchmarks.kernels import ours
from benchmarks.kernels.measure import measure
from benchmarks.kernels.permute import SAMPLE, expert_sorted
from benchmarks.report import HOPPER, JNP, OURS, Row, compare
from benchmarks.tokens import Tokens
from moax.kernels.hopper.formats import BLOCK, KMajorFp8
from moax.tune.problem import quantize_rows
from moax.tune.timing import Repeats

BY_TWO = 2 + 2 * (1 + 4 / BLOCK)  # bytes of a bf16 value and of its two quantized copies, shares of scales included


def rows(cases: list[Tokens], peers: bool, repeats: Repeats, found: dict[str, Any]) -> Iterator[Row]:
    """Yields the rows of the one kernel, the two kernels and plain jnp for each case; `found` are the limits."""
    for case in cases:
        x, source, blocks = expert_sorted(case)
        builds = {OURS: (HOPPER, ours.gather_quantize), f"{OURS}, apart": (HOPPER, ours.gather_then_quantize)}
        if peers:
            builds[JNP] = "xla", lambda: _plain
        extra = dataclasses.asdict(case)
        group = [
            measure(
                Row("permute", case.name, "gather-quantize", impl, "fp8_block", path=path, extra=extra),
                build,
                (x, source, blocks),
                nbytes=case.tokens * case.top_k * case.width * BY_TWO,
                judge=functools.partial(_error, case, x, np.asarray(source)),
                repeats=repeats,
                found=found,
            )
            for impl, (path, build) in builds.items()
        ]
        compare(group)
        yield from group


@jax.jit
def _plain(x, source, blocks):
    rows = jnp.take(x, source, axis=0, mode="fill", fill_value=0)
    return quantize_rows(rows), quantize_rows(rows.T)


def _error(case: Tokens, x: jax.Array, source: np.ndarray, out: tuple[KMajorFp8, KMajorFp8]) -> error.Error:
    """Returns the error of sampled rows quantized by rows, and of sampled columns quantized by columns."""
    by_rows, by_columns = out
    real = np.flatnonzero(source < case.tokens)
    some = real[np.linspace(0, len(real) - 1, min(len(real), SAMPLE)).astype(np.int64)]
    columns = np.linspace(0, case.width - 1, min(case.width, SAMPLE)).astype(np.int64)
    got = [error.operand_rows(by_rows, some), error.operand_rows(by_columns, columns)[:, real]]
    want = [error.double(x[source[some]]), error.double(x[:, columns]).T[:, source[real]]]
    return error.Error(error.relative(got, want))
