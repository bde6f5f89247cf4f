"""Problems of a grouped matmul: sizes of groups that break things, operands whose padding is poison."""

from __future__ import annotations

import numpy as np

from support.inputs import random
from support.oracle.ops import first_rows

PATTERNS = {
    "nothing divides": (7, 13, 1, 5, 11),
    "empty groups": (0, 20, 0, 9, 0),
    "all on one": (0, 0, 48, 0, 0),
    "all on the last": (0, 0, 0, 0, 37),
    "size one": (1, 1, 1, 1, 1),
    "nobody": (0, 0, 0, 0, 0),
    "full": (8, 8, 16, 8, 8),
}


def real_rows(sizes, align, num_rows):
    real = np.zeros(num_rows, bool)
    for start, n in zip(first_rows(sizes, align)[0], sizes, strict=True):
        real[start : start + n] = True
    return real


def problem(sizes, align, num_rows, width, columns, shards=1, experts=None):
    """Returns x, w, sizes, bias and dy. Padding rows of x and dy hold NaN, and numbers that ruin any scale or sum."""
    experts = experts or len(sizes)
    local = len(sizes) // shards
    real = np.concatenate(
        [real_rows(sizes[s * local :][:local], align, num_rows) for s in range(shards)],
    )
    x = random(0, num_rows * shards, width)
    dy = random(1, num_rows * shards, *columns)
    for v in (x, dy):
        v[~real] = np.nan
        v[np.flatnonzero(~real)[::2]] = 1e30
    w = random(2, experts, width, *columns) / np.float32(width**0.5)
    bias = random(3, experts, *columns)
    return (x, w, np.asarray(sizes, np.int32), bias, dy), real
