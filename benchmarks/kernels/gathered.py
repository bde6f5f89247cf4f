"""`python -m benchmarks permute`: one kernel reads the rows of tokens once, sorts them by expert and quantizes them.

    gather-quantize          rows[n] = x[source[n]], quantized by rows and by columns
    gather-quantize rows     by rows alone: forward where backward makes the sorted rows again
    gather-quantize columns  by columns alone, transposed: the sorted rows that backward makes again

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

KINDS = {
    "gather-quantize": (True, True),
    "gather-quantize rows": (True, False),
    "gather-quantize columns": (False, True),
}


def rows(cases: list[Tokens], peers: bool, repeats: Repeats, found: dict[str, Any]) -> Iterator[Row]:
    """Yields the rows of the one kernel, the two kernels and plain jnp, by case and kind; `found` are the limits."""
    for case in cases:
        x, source, blocks = expert_sorted(case)
        for kind, wanted in KINDS.items():
            builds = {
                OURS: (HOPPER, functools.partial(ours.gather_quantize, *wanted)),
                f"{OURS}, apart": (HOPPER, functools.partial(ours.gather_then_quantize, *wanted)),
            }
            if peers:
                builds[JNP] = "xla", functools.partial(_plain, *wanted)
            written = sum(wanted) * (1 + 4 / BLOCK)  # bytes of the quantized copies of a value, with its scales
            group = [
                measure(
                    Row("permute", case.name, kind, impl, "fp8_block", path=path, extra=dataclasses.asdict(case)),
                    build,
                    (x, source, blocks),
                    nbytes=case.tokens * case.top_k * case.width * (2 + written),
                    judge=functools.partial(_error, case, x, np.asarray(source)),
                    repeats=repeats,
                    found=found,
                )
                for impl, (path, build) in builds.items()
            ]
            compare(group)
            yield from group


def _plain(first: bool, second: bool):
    """Returns the function in plain jnp that makes the first and the second result of the kernel."""

    def plain(x, source, blocks):
        rows = jnp.take(x, source, axis=0, mode="fill", fill_value=0)
        return quantize_rows(rows) if first else None, quantize_rows(rows.T) if second else None

    return jax.jit(plain)


def _error(
    case: Tokens, x: jax.Array, source: np.ndarray, out: tuple[KMajorFp8 | None, KMajorFp8 | None]
) -> error.Error:
    """Returns the error of sampled rows quantized by rows, and of sampled columns quantized by columns."""
    by_rows, by_columns = out
    real, got, want = np.flatnonzero(source < case.tokens), [], []
    if by_rows is not None:
        some = real[np.linspace(0, len(real) - 1, min(len(real), SAMPLE)).astype(np.int64)]
        got.append(error.operand_rows(by_rows, some))
        want.append(error.double(x[source[some]]))
    if by_columns is not None:
        columns = np.linspace(0, case.width - 1, min(case.width, SAMPLE)).astype(np.int64)
        got.append(error.operand_rows(by_columns, columns)[:, real])
        want.append(error.double(x[:, columns]).T[:, source[real]])
    return error.Error(error.relative(got, want))
