"""Where the groups of expert-sorted rows lie: group g starts at a multiple of `align`, right after group g - 1.

With sizes (3, 0, 5) and align 4 the starts are (0, 4, 4); rows 3 and 9.. are padding and may hold anything.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


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
