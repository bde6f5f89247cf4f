"""The error of a product against float64: norm of the difference over the norm, on a sample of every expert.

direction    sample                                                 result
fwd, dgrad   a few real rows and columns of each expert             out[m, n] = left[m] . right[g(m), n]
wgrad        a few rows and columns of each expert's matrix         out[g, k, n] = left[k, g] . right[n, g]

g(m) is the expert of row m. In wgrad, left[k, g] and right[n, g] are the values of column k or n in the rows of g.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.cases import Direction
from benchmarks.problem import Problem
from moax.kernels.hopper.formats import BLOCK, KMajorFp8

ROWS = 4  # sampled rows of each expert
ELEMENTS = 1 << 24  # about as many elements of weights are copied to the host


class Sample(NamedTuple):
    """A sample of a product."""

    rows: list[np.ndarray]
    columns: np.ndarray
    want: list[np.ndarray]


class Error(NamedTuple):
    """The error of a product."""

    total: float
    worst: float | None = None
    rounding: float | None = None


def sample(problem: Problem, direction: Direction, operands: tuple[KMajorFp8, KMajorFp8] | None = None) -> Sample:
    """Returns sampled float64 products of the bf16 operands of `problem`, or of the FP8 `operands`."""
    if operands is None:
        if direction not in problem.samples:
            problem.samples[direction] = _sample(problem, direction, None)
        return problem.samples[direction]
    return _sample(problem, direction, operands)


def _sample(problem: Problem, direction: Direction, operands: tuple[KMajorFp8, KMajorFp8] | None) -> Sample:
    case = problem.case
    contracted, columns = (case.contracted, case.columns)[:: -1 if direction == "dgrad" else 1]
    count = min(columns, max(8, min(32, ELEMENTS // (case.groups * contracted))))
    some = np.linspace(0, columns - 1, count).astype(np.int32)
    sizes, starts = problem.sizes, problem.starts
    if direction == "wgrad":
        rows = np.linspace(0, contracted - 1, min(ROWS, contracted)).astype(np.int32)
        if operands is None:
            left, right = double(problem.x[:, rows]).T, double(problem.dy[:, some]).T
        else:
            left, right = (operand_rows(o, r) for o, r in zip(operands, (rows, some), strict=True))
        spans = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        return Sample([rows] * case.groups, some, [left[:, span] @ right[:, span].T for span in spans])
    rows = [start + np.unique(np.linspace(0, size - 1, min(ROWS, size)).astype(np.int32)) if size else
            np.zeros(0, np.int32) for start, size in zip(starts, sizes, strict=True)]  # fmt: skip
    flat = np.concatenate(rows)
    if operands is None:
        left = double((problem.x if direction == "fwd" else problem.dy)[flat])
        w = problem.w[:, :, some].swapaxes(1, 2) if direction == "fwd" else problem.w[:, some, :]
        right = double(w)
    else:
        left, right = operand_rows(operands[0], flat), operand_columns(operands[1], some)
    ends = np.cumsum([len(r) for r in rows])
    want = [left[end - len(r) : end] @ right[g].T for g, (end, r) in enumerate(zip(ends, rows, strict=True))]
    return Sample(rows, some, want)


def measure(out, found: Sample, direction: Direction, problem: Problem, *, packed: bool = False) -> Error:
    """Error of `out`, whose rows lie as the problem's, or without padding between groups (`packed`)."""
    if direction == "wgrad":
        # The rows of the sample are the same for every expert.
        whole = double(out[:, found.rows[0]][:, :, found.columns])
        return compare(list(whole), found.want)
    shift = problem.starts - problem.packed_starts if packed else np.zeros_like(problem.starts)
    flat = np.concatenate([rows - by for rows, by in zip(found.rows, shift, strict=True)]).astype(np.int32)
    whole = double(out[flat][:, found.columns])
    ends = np.cumsum([len(rows) for rows in found.rows])
    got = [whole[end - len(rows) : end] for end, rows in zip(ends, found.rows, strict=True)]
    return compare(got, found.want)


def compare(got: list[np.ndarray], want: list[np.ndarray]) -> Error:
    """Returns the error of blocks of numbers; any number other than a wanted block of zeros is an infinite error."""
    worst, rounded = 0.0, [w.astype(ml_dtypes.bfloat16).astype(np.float64) for w in want]
    for g, w in zip(got, want, strict=True):
        worst = max(worst, relative([g], [w]), key=lambda e: np.inf if np.isnan(e) else e)
    return Error(relative(got, want), worst, relative(rounded, want))


def relative(got: list[np.ndarray], want: list[np.ndarray]) -> float:
    """Returns the norm of the difference over the norm, of several arrays as one vector."""
    difference = sum(float(np.sum((g - w) ** 2)) for g, w in zip(got, want, strict=True))
    norm = sum(float(np.sum(w**2)) for w in want)
    if norm == 0.0:
        return 0.0 if difference == 0.0 else float("nan" if np.isnan(difference) else "inf")
    return float(np.sqrt(difference / norm))


def operand_rows(operand: KMajorFp8, rows: np.ndarray) -> np.ndarray:
    """Returns data[r, k] * scale[k // 128, r] of the given rows r, in float64."""
    scale = np.repeat(double(operand.scale[:, rows]).T, BLOCK, axis=1)
    return double(operand.data[rows]) * scale[:, : operand.data.shape[1]]


def operand_columns(operand: KMajorFp8, columns: np.ndarray) -> np.ndarray:
    """Returns data[e, n, k] * scale[e, n // 128, k // 128] of the given n, in float64."""
    scale = np.repeat(double(operand.scale[:, columns // BLOCK]), BLOCK, axis=2)
    return double(operand.data[:, columns]) * scale[:, :, : operand.data.shape[2]]


def double(x) -> np.ndarray:
    """Returns a JAX or NumPy array as float64 of NumPy."""
    return np.asarray(jnp.asarray(x)).astype(np.float64)
