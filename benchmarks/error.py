"""The error of a grouped matmul against float64: norm of the difference over the norm, on a sample of every expert.

direction    sample                                                 result
fwd, dgrad   a few real rows and columns of each expert             out[m, n] = left[m] . right[g(m), n]
wgrad        a few rows and columns of each expert's matrix         out[g, k, n] = left[k, g] . right[n, g]

g(m) is the expert of row m. In wgrad, left[k, g] and right[n, g] are the values of column k or n in the rows of g.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from benchmarks.cases import Direction
from benchmarks.problem import Problem, dequantize
from moax.kernels.hopper.formats import KMajorFp8

ROWS = 4  # sampled rows of each expert
ELEMENTS = 1 << 24  # about as many elements of weights are copied to the host


class Sample(NamedTuple):
    """A sample of a grouped matmul: its rows by expert, its columns, and their values by expert in float64."""

    rows: list[np.ndarray]
    columns: np.ndarray
    want: list[np.ndarray]


class Error(NamedTuple):
    """The error of a grouped matmul, and that of its worst expert."""

    total: float
    worst: float


def sample(
    problem: Problem,
    direction: Direction,
    operands: tuple[KMajorFp8, KMajorFp8] | None = None,
) -> Sample:
    """Returns sampled float64 matmuls of the bf16 operands of `problem`, or of the FP8 `operands`."""
    if operands:
        left, right = map(dequantize, operands)
    else:
        left, right = problem.operands(direction)
    count = max(8, min(32, ELEMENTS // (problem.case.groups * right.shape[-1])))
    columns = spread(right.shape[-2], count)
    if direction == "wgrad":
        rows = spread(left.shape[0], ROWS)
        ends = problem.starts + problem.sizes
        a = double(left[rows])
        b = double(right[columns])
        want = [a[:, start:end] @ b[:, start:end].T for start, end in zip(problem.starts, ends, strict=True)]
        return Sample([rows] * len(want), columns, want)
    by_expert = [start + spread(size, ROWS) for start, size in zip(problem.starts, problem.sizes, strict=True)]
    b = double(right[:, columns])
    return Sample(
        by_expert,
        columns,
        [double(left[rows]) @ w.T for rows, w in zip(by_expert, b, strict=True)],
    )


def spread(size: int, limit: int) -> np.ndarray:
    """Returns at most so many indices in [0, size), the first and the last among them."""
    return np.unique(np.linspace(0, size - 1, min(limit, size)).astype(np.int32))


def measure(
    out,
    sampled: Sample,
    direction: Direction,
    problem: Problem,
    *,
    packed: bool = False,
) -> Error:
    """Returns the error of `out`, whose rows lie as the problem's, or without padding between groups (`packed`)."""
    if direction == "wgrad":  # The rows of the sample are the same for every expert.
        return compare(list(double(out[:, sampled.rows[0]][:, :, sampled.columns])), sampled.want)
    if packed:
        shift = problem.starts - problem.packed_starts
    else:
        shift = np.zeros_like(problem.starts)
    flat = np.concatenate([rows - by for rows, by in zip(sampled.rows, shift, strict=True)])
    whole = double(out[flat.astype(np.int32)][:, sampled.columns])
    ends = np.cumsum([len(rows) for rows in sampled.rows])
    return compare(np.split(whole, ends[:-1]), sampled.want)


def compare(got: list[np.ndarray], want: list[np.ndarray]) -> Error:
    """Returns the error of blocks of numbers; any number other than a wanted block of zeros is an infinite error."""
    return Error(
        relative(got, want),
        float(np.max([relative([g], [w]) for g, w in zip(got, want, strict=True)])),
    )


def relative(got: list[np.ndarray], want: list[np.ndarray]) -> float:
    """Returns the norm of the difference over the norm, of several arrays as one vector."""
    difference = sum(float(np.sum((g - w) ** 2)) for g, w in zip(got, want, strict=True))
    norm = sum(float(np.sum(w**2)) for w in want)
    if norm == 0.0:
        if difference == 0.0:
            return 0.0
        return float("nan" if np.isnan(difference) else "inf")
    return float(np.sqrt(difference / norm))


def double(x) -> np.ndarray:
    """Returns a JAX or NumPy array as float64 of NumPy."""
    return np.asarray(jnp.asarray(x)).astype(np.float64)
