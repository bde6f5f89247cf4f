"""Rows in groups, as the matmuls of all implementations take them.

Rows are sorted by expert: group g starts at the first multiple of `align` after group g - 1. With sizes (3, 0, 5),
align 4 and 12 rows, the groups start at rows (0, 4, 4). Row 3 and rows 9 to 11 are padding, which may hold anything.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer


def align_up(n, align: int):
    """Returns n, rounded up to a multiple of `align`: 5 with align 4 is 8."""
    return -(-n // align) * align


def allot_rows(balanced: float, buffer_factor: float | None, worst: int) -> int:
    """Returns the rows of a buffer for a load that depends on the routing: `buffer_factor` times the balanced load.

    The buffer has at least the mean, five times its square root and 64 rows, since random routing alone needs more than
    a small mean; with a factor below 1 that part of them. 10000 balanced rows and a factor of 1.25 give 12500 rows, 100
    give 214 rows, and with a factor of 0.5 they give 107. It has at most the `worst` case, which None allots.
    """
    # Nobody knows the noise of a symbolic size.
    if buffer_factor is None or not isinstance(balanced, int | float):
        return worst
    with_noise = balanced + 5 * math.sqrt(balanced) + 64
    wanted = max(buffer_factor * balanced, min(buffer_factor, 1.0) * with_noise)
    return max(1, min(worst, math.ceil(wanted)))


def narrow_ids(ids: Integer[Array, "... K"], num_experts: int) -> Int[Array, "... K"]:
    """Returns expert ids as i32. An id that a cast would wrap becomes -1 below 0, and `num_experts` above it."""
    limits = jnp.iinfo(ids.dtype)
    if limits.max > jnp.iinfo(jnp.int32).max:
        ids = ids.clip(max(-1, limits.min), num_experts)
    return ids.astype(jnp.int32)


def sum_before(values: Int[Array, " G"]) -> Int[Array, " G"]:
    """Returns the sum of the values before each one: (0, 3, 3) for (3, 0, 5)."""
    # Each index is compared with each, which is one kernel on a GPU; a cumulative sum is several.
    index = jnp.arange(values.shape[0], dtype=jnp.int32)
    return jnp.where(index[None] < index[:, None], values[None], 0).sum(1, dtype=jnp.int32)


def zero_rows(x: Float[Array, "M ..."], real: Bool[Array, " M"] | None) -> Float[Array, "M ..."]:
    """Returns x, with 0 in the rows that are not real. Such a row may hold NaN. None: all rows are real."""
    if real is None:
        return x
    return jnp.where(real.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))


def scale_rows(
    x: Float[Array, "M ..."], weights: Float[Array, " M"], groups: Groups,
) -> Float[Array, "M ..."]:  # fmt: skip
    """Returns each real row times its weight, multiplied in float32 and returned in the dtype of x; padding is 0."""
    weights = weights.reshape(-1, *[1] * (x.ndim - 1))
    return zero_rows(x.astype(jnp.float32) * weights, groups.real).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Groups:
    """The layout of the rows that enter a matmul, on one device. An implementation may add fields of its own.

    With sizes (3, 0, 2), align 4 and 8 rows, `index` is (0, 0, 0, 0, 2, 2, 2, 2), and rows 3, 6 and 7 are not real.

    Attributes:
      sizes: [E] i32, the rows of each group; None means that one group holds all rows.
      align: each group starts at a multiple of so many rows.
      index: [M] i32, the group of each row, any group for padding; None where one group holds all rows.
      real: [M] bool, whether each row is real, that is no padding; None means that all rows are real.
      expected: the rows that all groups have together at a balanced load; None where this is not known. It may decide
        how a matmul is computed, so that the size M of a buffer does not.
    """

    sizes: Any
    align: int
    index: Any
    real: Any
    expected: int | None


def find_groups(
    group_sizes: Int[Array, " E"] | None, align: int, num_rows: int, expected: int | None = None,
) -> Groups:  # fmt: skip
    """Returns the Groups of `num_rows` rows. With `group_sizes` None one group holds all rows."""
    if group_sizes is None:
        return Groups(None, align, None, None, expected)
    starts = sum_before(align_up(group_sizes, align))
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    index = jnp.searchsorted(starts, rows, side="right").astype(jnp.int32) - 1
    real = rows < starts[index] + group_sizes[index]
    return Groups(group_sizes, align, index, real, expected)


class Packing(NamedTuple):
    """How rows move from groups at multiples of any `align` to the layout `groups` of matmuls.

    Attributes:
      groups: the layout.
      pack: rows [M, ...] -> the rows [P, ...] in the layout, with 0 in the padding that a matmul reads.
      unpack: rows [P, N] of a matmul -> the rows [M, N], with 0 in padding.
    """

    groups: Groups
    pack: Callable[[Float[Array, "M ..."]], Float[Array, "P ..."]]
    unpack: Callable[[Float[Array, "P N"]], Float[Array, "M N"]]
