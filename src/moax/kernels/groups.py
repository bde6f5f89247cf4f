"""The layout of expert-sorted rows: group g starts at the first multiple of `align` after group g - 1.

With sizes (3, 0, 5), align 4 and 12 rows, the groups start at rows (0, 4, 4). Row 3 and rows 9 to 11 are padding, which
may hold anything.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def align_up(n, align: int):
    """Returns n, rounded up to a multiple of `align`: 5 with align 4 is 8."""
    return -(-n // align) * align


def allot_rows(balanced: float, buffer_factor: float | None, worst: int) -> int:
    """Returns the rows of a buffer for a load that depends on the routing: `buffer_factor` times the balanced load.

    The buffer has at least the mean, five times its square root and 64 rows, since random routing alone needs more than
    a small mean; with a factor below 1 that part of them. 10000 balanced rows and a factor of 1.25 give 12500 rows, 100
    give 214 rows, and with a factor of 0.5 they give 107. It has at most the `worst` case, which None allots.
    """
    if buffer_factor is None or not isinstance(balanced, int | float):  # of a symbolic size nobody knows the noise
        return worst
    chance = balanced + 5 * math.sqrt(balanced) + 64
    return max(1, min(worst, math.ceil(max(buffer_factor * balanced, min(buffer_factor, 1.0) * chance))))


def sum_before(values: Int[Array, " G"]) -> Int[Array, " G"]:
    """Returns the sum of the values before each one: (0, 3, 3) for (3, 0, 5)."""
    # Each index is compared with each, which is one kernel on a GPU; a cumulative sum is several.
    index = jnp.arange(values.shape[0], dtype=jnp.int32)
    return jnp.where(index[None] < index[:, None], values[None], 0).sum(1, dtype=jnp.int32)


def row_groups(group_sizes: Int[Array, " G"], align: int, num_rows: int) -> tuple[Int[Array, " M"], Bool[Array, " M"]]:
    """Returns the group of each of `num_rows` rows, any group for padding, and whether the row is real, that is no
    padding.

    With sizes (3, 0, 2), align 4 and 8 rows, the groups are (0, 0, 0, 0, 2, 2, 2, 2), and rows 3, 6 and 7 are padding.
    """
    starts = sum_before(align_up(group_sizes, align))
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    group = jnp.searchsorted(starts, rows, side="right").astype(jnp.int32) - 1
    return group, rows < starts[group] + group_sizes[group]


def zero_rows(x: Float[Array, "M ..."], real: Bool[Array, " M"] | None) -> Float[Array, "M ..."]:
    """Returns x, with 0 in the rows that are not real. Such a row may hold NaN. None: all rows are real."""
    if real is None:
        return x
    return jnp.where(real.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))


def scale_rows(x: Float[Array, "M ..."], weights: Float[Array, " M"], groups: Groups) -> Float[Array, "M ..."]:
    """Returns each real row times its weight, multiplied in float32 and returned in the dtype of x; padding is 0."""
    weights = weights.reshape(-1, *[1] * (x.ndim - 1))
    return zero_rows(x.astype(jnp.float32) * weights, groups.real).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Groups:
    """The layout of the rows that enter a product, on one device. An implementation may add fields of its own.

    Attributes:
      sizes: [E] i32, the rows of each group; None means that one group holds all rows.
      align: each group starts at a multiple of so many rows.
      real: [M] bool, whether each row is real; None means that all rows are real.
      expected: the rows that all groups have together at a balanced load; None where this is not known. It may decide
        how a product is computed, so that the size M of a buffer does not.
    """

    sizes: Any
    align: int
    real: Any
    expected: int | None = dataclasses.field(default=None, kw_only=True)


def find_groups(group_sizes: Int[Array, " E"] | None, align: int, num_rows: int) -> Groups:
    """Returns the Groups of `num_rows` rows. With `group_sizes` None one group holds all rows."""
    real = None if group_sizes is None else row_groups(group_sizes, align, num_rows)[1]
    return Groups(group_sizes, align, real)


def gather_rows(
    x: Float[Array, "R H"], gather_idx: Int[Array, " N"], groups: Groups | None = None
) -> Float[Array, "N H"]:
    """rows[n] = x[gather_idx[n]], 0 where it is R or more, but for rows past the `groups`."""
    return jnp.take(x, gather_idx, axis=0, mode="fill", fill_value=0)


def rows_of_groups(values: Float[Array, "E C"], groups: Groups, num_rows: int) -> Float[Array, "M C"]:
    """Returns values[g(m)] for each of `num_rows` rows m; a padding row has the values of any group."""
    return values[row_groups(groups.sizes, groups.align, num_rows)[0]]
