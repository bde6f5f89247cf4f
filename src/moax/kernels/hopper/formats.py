"""What the Hopper kernels take: blocks of 128 expert-sorted rows, and K-major FP8 operands."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moax.groups import Groups, row_groups
from moax.recipe import Recipe

BLOCK = 128  # rows of a block, and elements of a block of scales
COPY_WIDTH = 16  # elements of FP8: the least that the copy engine strides over
KERNEL_WIDTH = 32  # elements: 32 bytes of FP8, the least box that the copy engine swizzles


class KMajorFp8(NamedTuple):
    """An FP8 operand, K-major: x ~ data * scale, the contracted dim last and contiguous.

    Rows: data [R, K], scale [ceil(K / 128), R] f32 (R rounded up to 128 where it is no multiple): 1 x 128 blocks.
    Weights: data [E, R, K], scale [E, ceil(R / 128), ceil(K / 128)] f32: 128 x 128 blocks.
    """

    data: Float[Array, "..."]
    scale: Float[Array, "..."]


def takes_fp8(recipe: Recipe) -> bool:
    """Whether Hopper's FP8 products take the formats of a recipe: a scale for each 128 x 128 of a weight and each 128
    of a row, or one for each tensor. Other operands are dequantized before the product."""
    if recipe.x is None or recipe.w is None or recipe.dy is None:
        return False
    blocks = {recipe.x.block, recipe.w.block, recipe.dy.block}
    return blocks == {None} or (blocks == {BLOCK} and recipe.w.tile == BLOCK)


class Blocks(NamedTuple):
    """The blocks of 128 rows of groups that start at multiples of 128: no block holds rows of two groups.

    With group sizes (130, 0, 5) and 512 rows: group (0, 0, 2, 2), rows (128, 2, 5, 0), used 3, first (0, 2, 2),
    count (2, 0, 1).

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
class BlockedGroups(Groups):
    """Groups that start at multiples of 128, and their blocks."""

    blocks: Any


def find_groups(group_sizes: Int[Array, " E"] | None, align: int, num_rows: int) -> BlockedGroups:
    """The groups of `num_rows` rows; align and num_rows are multiples of 128. None: one group holds all rows."""
    if group_sizes is None:
        return BlockedGroups(None, align, None, make_blocks(jnp.full(1, num_rows, jnp.int32), num_rows))
    real = row_groups(group_sizes, align, num_rows)[1]
    return BlockedGroups(group_sizes, align, real, make_blocks(group_sizes, num_rows))
