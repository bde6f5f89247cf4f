"""The operands of XLA's matmuls: gathered rows, and values of 8 bits with scales, as `QArray`s."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moax.kernels.groups import Groups, zero_rows
from moax.kernels.scales import (
    Block,
    block_max,
    encode,
    expand_scales,
    flatten_columns,
    shards_cut_blocks,
    to_scale,
)
from moax.mesh.axes import Names
from moax.mesh.collectives import reduce_max, vary_like
from moax.recipe import Format, Recipe, Use
from moax.types import QArray, QShard


def gather_rows(
    x: Float[Array, "R H"], gather_idx: Int[Array, " N"], groups: Groups | None = None
) -> Float[Array, "N H"]:
    """rows[n] = x[gather_idx[n]], 0 where gather_idx[n] is R or more."""
    return jnp.take(x, gather_idx, axis=0, mode="fill", fill_value=0)


def quantize(x: Array, format: Format, block: Block) -> QArray:
    """Returns the values and scales of x in blocks of any lengths."""
    x = x.astype(jnp.float32)
    scale = to_scale(block_max(x, block), format)
    inverse = expand_scales(1.0 / scale, x.shape, block)
    return QArray(*encode(x, scale, inverse, format), format.dtype, block)


def quantize_for_matmul(
    x: Array, recipe: Recipe, role: str, groups: Groups, *,
    gather_idx: Int[Array, " N"] | None = None, in_matmul: bool = False,
    fprop_or_dgrad: bool = True, wgrad: bool = True,
) -> tuple[Array | QArray, Array | QArray]:  # fmt: skip
    """Returns rows [M, ..., C], or x[gather_idx], for fprop or dgrad, and for wgrad.

    XLA drops an operand that the caller does not use, so `fprop_or_dgrad` and `wgrad` change nothing.
    """
    format: Format | None = getattr(recipe, role)
    if gather_idx is not None:
        with jax.named_scope("permute"):
            x = gather_rows(x, gather_idx)
    x = x.reshape(x.shape[0], -1)
    if format is None:
        return x, x
    with jax.named_scope("quantize"):
        x = x.astype(jnp.float32)
        operand = quantize(x, format, format.row_block(2, "fprop"))
        wgrad_operand = quantize(zero_rows(x, groups.real), format, format.row_block(2, "wgrad"))
        return operand, wgrad_operand


def quantize_shard(w: Array, recipe: Recipe, use: Use, gather: Sequence[Names]) -> QShard:
    """Returns the bytes and scales of a weight's shard [E, K, *C], in the blocks of the whole weight."""
    format = cast(Format, recipe.w)
    flat = w.reshape(*w.shape[:2], -1).astype(jnp.float32)
    with jax.named_scope("quantize"):
        if shards_cut_blocks(w.shape, format, use, gather):
            scale, inverse = _scale_shared_blocks(flat, w.shape, format, use, gather)
            data, scale = encode(flat, scale, inverse, format)
            return QShard(data.reshape(w.shape), scale)
        q = quantize(flat, format, format.weight_block(3, use))
        scale = q.scale
        if any(gather[2:]):
            # The scales of gathered columns have the dims of the columns, since no block lies in two shards of the last
            # dim.
            scale = scale.reshape(*scale.shape[:2], *w.shape[2:-1], -1)
        return QShard(q.data.reshape(w.shape), scale)


def make_weight_operand(whole: QShard, recipe: Recipe, use: Use) -> QArray:
    """Returns a quantized weight that is whole as the operand of a matmul."""
    format = cast(Format, recipe.w)
    data, scale = whole
    data = flatten_columns(data, False)
    scale = flatten_columns(scale, False)
    return QArray(data, scale, format.dtype, format.weight_block(3, use))


def _scale_shared_blocks(flat, shape, format: Format, use: Use, gather: Sequence[Names]):
    """Returns the scales of all blocks of the whole weight, and 1 / scale of each element of this shard."""
    # With K = 320, blocks of 128 and two shards of 160 rows, the first shard has block 0 (rows 0 to 127) and a part of
    # block 1 (rows 128 to 159), the second one the rest of block 1 and block 2: both take the maximum of block 1.
    _, rows, columns = format.weight_block(3, use)
    whole = [n * lax.axis_size(names) for n, names in zip(shape, gather, strict=True)]
    starts = [lax.axis_index(names).astype(jnp.int32) * n for n, names in zip(shape, gather, strict=True)]
    column = jnp.zeros((1,), jnp.int32)
    # The columns count row-major over the whole dims *C.
    for size, start, n in zip(whole[2:], starts[2:], shape[2:], strict=True):
        index = start + jnp.arange(n, dtype=jnp.int32)
        column = (column[:, None] * size + index[None]).reshape(-1)
    column_block = column // columns
    num_column_blocks = -(-math.prod(whole[2:]) // columns)
    num_row_blocks = -(-whole[1] // rows)

    touched = (shape[1] + 2 * rows - 2) // rows  # as many blocks as the rows of a shard may touch
    maxima = vary_like(jnp.zeros((shape[0], touched * rows, flat.shape[2]), jnp.float32), flat, starts[1])
    maxima = block_max(lax.dynamic_update_slice_in_dim(maxima, flat, starts[1] % rows, 1), (1, rows, 1))
    maxima = jax.ops.segment_max(jnp.moveaxis(maxima, 2, 0), column_block, num_segments=num_column_blocks)
    # `segment_max` gives -inf where the shard has no column.
    maxima = jnp.moveaxis(jnp.maximum(maxima, 0.0), 0, 2)
    blocks = vary_like(jnp.zeros((shape[0], num_row_blocks + touched, num_column_blocks), jnp.float32), maxima)
    blocks = lax.dynamic_update_slice_in_dim(blocks, maxima, starts[1] // rows, 1)
    scale = to_scale(reduce_max(blocks[:, :num_row_blocks], sum(gather[1:], ())), format)
    row_block = (starts[1] + jnp.arange(shape[1], dtype=jnp.int32)) // rows
    inverse = jnp.take(1.0 / scale, row_block, axis=1)
    return scale, jnp.take(inverse, column_block, axis=2)
