"""The forms that the Hopper kernels take: blocks of expert-sorted rows, gathered rows, and K-major FP8 operands."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moax.kernels import xla
from moax.kernels.groups import Groups, align_up, sum_before
from moax.recipe import Recipe

BLOCK = 128  # the most rows of a block, and the elements for each scale
# A warpgroup multiplies the rows of half a block, and groups in bf16 start at multiples of it.
HALF = 64
COPY_WIDTH = 16  # the copy engine strides over multiples of so many FP8 elements
GATHER_WIDTH = 64  # the producer of a matmul gathers lines of so many bf16 elements


class KMajorFp8(NamedTuple):
    """An FP8 operand, x ~ data * scale, K-major: the contracted dim K is last and contiguous. The scales are f32.

    Rows have 1 x 128 blocks: data [R, K], scale [ceil(K / 128), R], where R of the scale is rounded up to 128. The
    scale of data[5, 200] is scale[1, 5]. Weights have 128 x 128 blocks: data [E, R, K], scale [E, ceil(R / 128), ceil(K
    / 128)].
    """

    data: Float[Array, "..."]
    scale: Float[Array, "..."]


def data_of(x: Any) -> Any:
    """Returns the values of an operand, in FP8 without their scales."""
    return x.data if isinstance(x, KMajorFp8) else x


class GatheredRows(NamedTuple):
    """An operand of 16 bits whose rows a matmul gathers itself: row n is x[gather_idx[n]], or 0 where it is R or more.

    Attributes:
      x: [R, H], the rows as they arrived; H is a multiple of 64.
      gather_idx: [N] i32, the received row of each sorted row.
    """

    x: Float[Array, "R H"]
    gather_idx: Int[Array, " N"]


def supports_fp8(recipe: Recipe) -> bool:
    """Returns whether FP8 matmuls take the formats of a recipe: blocks of 128, and of weights 128 x 128."""
    if recipe.x is None or recipe.w is None or recipe.dy is None:
        return False
    blocks = {recipe.x.block, recipe.w.block, recipe.dy.block}
    return blocks == {BLOCK} and recipe.w.tile == BLOCK


class Blocks(NamedTuple):
    """The blocks of at most 128 rows of groups that start at multiples of 64: no block holds rows of two groups.

    With group sizes (130, 0, 5), groups at multiples of 64 and 256 rows, halves 0 to 2 belong to group 0 and half 3 to
    group 2: group is (0, 0, 2), start (0, 2, 3), rows (128, 2, 5), first_half (0, 3, 3, 4) and before (0, 2, 2, 3). FP8
    matmuls take groups at multiples of 128, which start at even halves.

    Attributes:
      group: [B] i32, the group of each block; any valid group for a block without rows.
      start: [B] i32, the half of all rows at which each block begins: its first row over 64.
      rows: [B] i32, the number of real rows of each block, which come first in the block.
      first_half: [E + 1] i32, the half at which each group begins; last, the half after the last group.
      before: [E + 1] i32, the number of blocks before each group; last, the number of blocks that hold rows, which come
        first of all blocks.
      sizes: [E] i32, the number of real rows of each group.
    """

    group: Int[Array, " B"]
    start: Int[Array, " B"]
    rows: Int[Array, " B"]
    first_half: Int[Array, " E+1"]
    before: Int[Array, " E+1"]
    sizes: Int[Array, " E"]


def make_blocks(group_sizes: Int[Array, " E"], num_rows: int, align: int = BLOCK) -> Blocks:
    """Returns the Blocks of `num_rows` rows, in groups of these sizes that start at multiples of `align`.

    `align` and `num_rows` are multiples of 64, and `num_rows` has room for all groups.
    """
    groups = group_sizes.shape[0]
    num_blocks = (num_rows // HALF + groups) // 2
    if align % BLOCK == 0:
        num_blocks = -(-num_rows // BLOCK)
    blocks = -(-group_sizes // BLOCK)
    halves = align_up(group_sizes, align) // HALF
    first_half = sum_before(jnp.pad(halves, (0, 1)))
    before = sum_before(jnp.pad(blocks, (0, 1)))
    # These sums over groups, of one shape, become one kernel; a search and gathers would be several.
    index = jnp.arange(num_blocks, dtype=jnp.int32)[:, None]
    # A block lies so many blocks after the first one of a group, [B, E].
    after = index - before[None, :-1]
    own = (after >= 0) & (after < blocks[None])
    group = jnp.where(own, jnp.arange(groups, dtype=jnp.int32)[None], 0).sum(1)
    start = jnp.where(own, first_half[None, :-1] + after * (BLOCK // HALF), 0).sum(1)
    rows = jnp.where(own, jnp.clip(group_sizes[None] - after * BLOCK, 0, BLOCK), 0).sum(1)
    return Blocks(group, start, rows, first_half, before, group_sizes)


@dataclasses.dataclass(frozen=True)
class BlockedGroups(Groups):
    """The layout of groups that start at multiples of 64, with their Blocks."""

    blocks: Any


def find_groups(
    group_sizes: Int[Array, " E"] | None, align: int, num_rows: int, expected: int | None = None
) -> BlockedGroups:
    """Returns the BlockedGroups of `num_rows` rows; with `group_sizes` None one group holds all of them."""
    groups = xla.find_groups(group_sizes, align, num_rows, expected)
    if group_sizes is None:
        blocks = make_blocks(jnp.full(1, num_rows, jnp.int32), num_rows, BLOCK)
    else:
        blocks = make_blocks(group_sizes, num_rows, align)
    return BlockedGroups(**vars(groups), blocks=blocks)
