"""How many of the assignments that arrive a rank keeps, and which of them are in a pass."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int


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
