"""What kernels are told of expert-sorted rows: blocks of 128, made once in XLA, shared by forward and backward."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moax.groups import align_up

BLOCK = 128  # rows of a block, and contracted elements that share a scale


class Blocks(NamedTuple):
    """The blocks of rows of groups that start at multiples of 128.

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


class Operand(NamedTuple):
    """An FP8 operand of a product, K-major: x ~ data * scale, the contracted dim last and contiguous.

    Rows: data [R, K], scale [ceil(K / 128), R] f32 (R rounded up to 128 where it is no multiple): 1 x 128 blocks.
    Weights: data [E, R, K], scale [E, ceil(R / 128), ceil(K / 128)] f32: 128 x 128 blocks.
    """

    data: Float[Array, ...]
    scale: Float[Array, ...]


def make_blocks(group_sizes: Int[Array, " E"], num_rows: int) -> Blocks:
    """The blocks of `num_rows` rows (a multiple of 128) in groups of these sizes."""
    count = -(-group_sizes // BLOCK)
    last = jnp.cumsum(count)
    first = last - count
    index = jnp.arange(num_rows // BLOCK, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(last, index, side="right"), group_sizes.shape[0] - 1).astype(jnp.int32)
    rows = jnp.clip(group_sizes[group] - (index - first[group]) * BLOCK, 0, BLOCK)
    rows = jnp.where(index < last[-1], rows, 0)
    return Blocks(group, rows.astype(jnp.int32), last[-1:], first, count)


def whole_blocks(num_rows: int) -> int:
    """Rows rounded up to whole blocks."""
    return align_up(num_rows, BLOCK)
