"""How many assignments of each expert arrive, and how many of them a rank or a pass keeps.

    earlier[a] = how many assignments before a, in a's block of assignments, have the expert of a
    before[b, e] = how many assignments of the blocks before b have the expert e

An assignment a of block b to expert e is therefore arrival before[b, e] + earlier[a] of its expert. A sort would find
the same in many kernels, and these sums are three.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int

COUNTED = 256  # the assignments of a block, each of which is compared with each
COMPARED = 1 << 26  # the most comparisons of blocks; a cumulative sum is several kernels, and few additions


def count_arrivals(flat: Int[Array, " A"], groups: int) -> tuple[Int[Array, "B G"], Int[Array, " G"], Int[Array, " A"]]:
    """Counts the assignments of each group, in blocks of `COUNTED` assignments.

    Blocks of 3 assignments, in place of `COUNTED`, and the experts (1, 0, 1, 1, 2, 1) of 3 groups have `before`
    ((0, 0, 0), (1, 2, 0)), `arrived` (1, 4, 1) and `earlier` (0, 0, 1, 0, 0, 1).

    Args:
      flat: [A] i32, the expert of each assignment; `groups` stands for none.
      groups: the number of groups.

    Returns:
      before: [B, groups] i32, how many assignments each group has in the blocks before.
      arrived: [groups] i32, how many assignments each group has.
      earlier: [A] i32, how many assignments before this one in its block have the same expert.
    """
    count = flat.shape[0]
    num_blocks = (count + COUNTED - 1) // COUNTED  # either may be a symbolic dimension of `jax.export`
    blocks = jnp.pad(flat, (0, num_blocks * COUNTED - count), constant_values=groups).reshape(num_blocks, COUNTED)
    own = (blocks[:, :, None] == jnp.arange(groups, dtype=jnp.int32)[None, None]).sum(1, dtype=jnp.int32)
    if isinstance(num_blocks, int) and num_blocks**2 * groups <= COMPARED:
        index = jnp.arange(num_blocks + 1, dtype=jnp.int32)
        before = jnp.where((index[None, :-1] < index[:, None])[:, :, None], own[None], 0).sum(1, dtype=jnp.int32)
    else:
        before = jnp.cumsum(jnp.pad(own, ((1, 0), (0, 0))), axis=0)
    place = jnp.arange(COUNTED, dtype=jnp.int32)
    same = (blocks[:, :, None] == blocks[:, None, :]) & (place[None, :] < place[:, None])[None]
    return before[:-1], before[-1], same.sum(2, dtype=jnp.int32).reshape(-1)[:count]


def cut_groups(
    kept: Int[Array, " E"], start: int | Int[Array, ""], room: int
) -> tuple[Int[Array, " E"], Int[Array, " E"]]:
    """Returns, of groups that keep `kept` [E] rows, the first row and the number of rows in a pass.

    The pass has `room` rows of all groups together, from row `start` on. Of groups of 3 and 5 rows, the pass of 4 rows
    from row 4 on has rows 3 (none) of the first group and 1 to 4 of the second one: (3, 1) and (0, 4).
    """
    before = jnp.cumsum(kept) - kept
    begin, end = (jnp.clip(edge - before, 0, kept) for edge in (start, start + room))
    return begin, end - begin


def limit_groups(arrived: Int[Array, " E"], capacity: int) -> Int[Array, " E"]:
    """Returns the rows that each group keeps, at most `capacity` in all, of the rows [E] that arrived.

    All groups have one limit. The first groups above the limit share the rest, one row each: of (5, 1, 6) rows and a
    capacity of 10, the limit is 4, one row is left, and (5, 1, 4) rows are kept.
    """
    size = arrived.shape[0]
    ascending = jnp.sort(arrived)
    below = jnp.cumsum(ascending) - ascending  # the rows of all smaller groups
    above = size - jnp.arange(size, dtype=jnp.int32)  # the groups that share the rest of the capacity
    level = (capacity - below) // above
    cut = jnp.argmax(ascending > level)  # the index of the smallest group that does not fit whole
    fits = arrived.sum() <= capacity
    limit = jnp.where(fits, ascending[-1], level[cut])
    rest = jnp.where(fits, 0, (capacity - below[cut]) % above[cut])
    over = arrived > limit
    extra = over & (jnp.cumsum(over.astype(jnp.int32)) <= rest)
    return jnp.minimum(arrived, limit) + extra.astype(jnp.int32)
