"""Where the groups of expert-sorted rows lie: group g starts at a multiple of `align`, right after group g - 1.

With sizes (3, 0, 5) and align 4 the starts are (0, 4, 4); rows 3 and 9.. are padding and may hold anything.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BLOCK = 128  # rows of a block of the kernels


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


class Blocks(NamedTuple):
    """The blocks of 128 rows of groups that start at multiples of 128: no block holds rows of two groups.

    group: [B] i32, the group of each block; of blocks past the last, any valid one.
    rows: [B] i32, real rows of each block, the first ones; 0 past the last block.
    used: [1] i32, how many blocks hold rows: the first ones.
    first: [E] i32, the first block of each group. count: [E] i32, the blocks of each group.
    """

    group: Int[Array, " B"]
    rows: Int[Array, " B"]
    used: Int[Array, " 1"]
    first: Int[Array, " E"]
    count: Int[Array, " E"]


def make_blocks(group_sizes: Int[Array, " E"], num_rows: int) -> Blocks:
    """The blocks of `num_rows` rows (a multiple of 128) in groups of these sizes."""
    count = -(-group_sizes // BLOCK)
    last = jnp.cumsum(count)
    first = last - count
    index = jnp.arange(num_rows // BLOCK, dtype=jnp.int32)
    group = jnp.minimum(
        jnp.searchsorted(last, index, side="right", method="compare_all"), group_sizes.shape[0] - 1
    ).astype(jnp.int32)
    rows = jnp.clip(group_sizes[group] - (index - first[group]) * BLOCK, 0, BLOCK)
    rows = jnp.where(index < last[-1], rows, 0)
    return Blocks(group, rows.astype(jnp.int32), last[-1:], first, count)


@dataclasses.dataclass(frozen=True)
class Groups:
    """How the rows that enter a product lie, on one device.

    sizes: [E] i32, or None: one group, all rows. align: rows to which group starts are aligned. real: [M] bool, or None
    where all are. blocks: the Blocks for the kernels, or None: XLA computes.
    """

    sizes: Any
    align: int
    real: Any
    blocks: Any = None


def find_groups(group_sizes: Int[Array, " E"] | None, align: int, num_rows: int, *, blocks: bool = False) -> Groups:
    """The Groups of `num_rows` rows; with `blocks`, which needs both multiples of 128, for the kernels."""
    if group_sizes is None:
        whole = make_blocks(jnp.full(1, num_rows, jnp.int32), num_rows) if blocks else None
        return Groups(None, align, None, whole)
    real = row_groups(group_sizes, align, num_rows)[1]
    return Groups(group_sizes, align, real, make_blocks(group_sizes, num_rows) if blocks else None)
