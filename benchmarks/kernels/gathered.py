"""`python -m benchmarks permute`, fused with quantization: rows of tokens gathered by expert and quantized in one read.

    gather-quantize   x[source] by rows and by columns

Beside it the gather and the quantization as two kernels, and plain jnp. Bytes are real rows, read once for each of
their experts, and data and scales written.
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

BY_TWO = 2 + 2 * (1 + 4 / BLOCK)  # bytes of a value in bf16, and quantized twice with its share of the scales


def rows(cases: list[Tokens], peers: bool, repeats: Repeats, found: dict[str, Any]) -> Iterator[Row]:
    """For each case the one kernel, the two, then plain jnp."""
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
    """Of some rows, and of some columns of all real rows, each as it was quantized."""
    by_rows, by_columns = out
    real = np.flatnonzero(source < case.tokens)
    some = real[np.linspace(0, len(real) - 1, min(len(real), SAMPLE)).astype(np.int64)]
    columns = np.linspace(0, case.width - 1, min(case.width, SAMPLE)).astype(np.int64)
    got = [error.operand_rows(by_rows, some), error.operand_rows(by_columns, columns)[:, real]]
    want = [error.double(x[source[some]]), error.double(x[:, columns]).T[:, source[real]]]
    return error.Error(error.relative(got, want))
