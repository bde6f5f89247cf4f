"""Where the groups of expert-sorted rows lie: group g starts at a multiple of `align`, right after group g - 1.

With sizes (3, 0, 5) and align 4 the starts are (0, 4, 4); rows 3 and 9.. are padding and may hold anything.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def align_up(n, align: int):
    """The least multiple of `align` that is not below n."""
    return -(-n // align) * align


def group_starts(group_sizes: Int[Array, " G"], align: int) -> Int[Array, " G"]:
    """First row of each group."""
    padded = align_up(group_sizes, align)
    return jnp.cumsum(padded) - padded


def row_groups(group_sizes: Int[Array, " G"], align: int, num_rows: int) -> tuple[Int[Array, " M"], Bool[Array, " M"]]:
    """The group of each of `num_rows` rows, and whether the row is real. The group of padding is any valid id."""
    starts = group_starts(group_sizes, align)
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    group = jnp.searchsorted(starts, rows, side="right").astype(jnp.int32) - 1
    return group, rows < starts[group] + group_sizes[group]


def zero_rows(x: Float[Array, "M ..."], real: Bool[Array, " M"]) -> Float[Array, "M ..."]:
    """x with 0 in the rows that are not real, whatever they hold."""
    return jnp.where(real.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.zeros((), x.dtype))


@dataclasses.dataclass(frozen=True)
class Groups:
    """How the rows that enter a product lie, on one device; an implementation may add fields of its own.

    sizes: [E] i32, or None: one group, all rows. align: rows to which group starts are aligned. real: [M] bool, or None
    where all are.
    """

    sizes: Any
    align: int
    real: Any


def find_groups(group_sizes: Int[Array, " E"] | None, align: int, num_rows: int) -> Groups:
    """The Groups of `num_rows` rows; None: one group holds all of them."""
    real = None if group_sizes is None else row_groups(group_sizes, align, num_rows)[1]
    return Groups(group_sizes, align, real)


def rows_of_groups(values: Float[Array, "E C"], groups: Groups, num_rows: int) -> Float[Array, "M C"]:
    """values[g(m)] for each of `num_rows` rows m; padding has those of any group."""
    return values[row_groups(groups.sizes, groups.align, num_rows)[0]]
