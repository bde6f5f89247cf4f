"""The plan of a permutation by XLA: sums over comparisons find the place of each assignment, and a scatter inverts it.

    earlier[a] = how many assignments before a, in a's block of assignments, have the expert of a
    before[b, e] = how many assignments of the blocks before b have the expert e

An assignment a of block b to expert e is therefore arrival before[b, e] + earlier[a] of its expert. A sort would find
the same in many kernels, and these sums are three.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moax.groups import group_starts

COUNTED = 256  # the assignments of a block, each of which is compared with each
COMPARED = 1 << 26  # the most comparisons of blocks; a cumulative sum is several kernels, and few additions


def build_permutation(
    experts: Int[Array, "R K"], num_groups: int, align: int, num_rows: int,
    weights: Float[Array, "R K"] | None = None, keep: Callable | None = None,
) -> tuple[Int[Array, " N"], Int[Array, "R K"], Int[Array, " G"], Float[Array, " N"] | None]:  # fmt: skip
    """Returns gather_idx, scatter_idx, group sizes and row weights; see `moax.kernels.Implementation`."""
    flat, received = experts.reshape(-1), experts.shape[0]
    before, sizes, earlier = count_arrivals(flat, num_groups)
    if keep is not None:
        begin, sizes = keep(sizes)
        before = before - begin[None]
    # An assignment follows its group's first assignment in its block by as many rows as are earlier in the block.
    starts = group_starts(sizes, align)
    some, group = flat < num_groups, jnp.minimum(flat, num_groups - 1)
    block = lax.div(lax.iota(jnp.int32, flat.shape[0]), jnp.int32(COUNTED))
    row = (before + starts[None]).reshape(-1)[block * num_groups + group] + earlier
    if keep is not None:
        some &= (row >= starts[group]) & (row < (starts + sizes)[group])
    scatter_idx = jnp.where(some, row, num_rows).reshape(experts.shape)
    which = lax.broadcasted_iota(jnp.int32, experts.shape, 0)
    gather_idx = jnp.full(num_rows, received, jnp.int32).at[scatter_idx].set(which, mode="drop")
    row_weights = None
    if weights is not None:
        row_weights = jnp.zeros(num_rows, jnp.float32).at[scatter_idx].set(weights, mode="drop")
    return gather_idx, scatter_idx, sizes, row_weights


def count_arrivals(flat: Int[Array, " A"], groups: int) -> tuple[Int[Array, "B G"], Int[Array, " G"], Int[Array, " A"]]:
    """Returns before [B, G], arrived [G] and earlier [A] of experts [A] i32, of which `groups` stands for none.

    `arrived` counts the assignments of each group in all blocks. With blocks of 3 in place of `COUNTED`, the experts
    (1, 0, 1, 1, 2, 1) have before ((0, 0, 0), (1, 2, 0)), arrived (1, 4, 1) and earlier (0, 0, 1, 0, 0, 1).
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
