"""Grouped matmul of 16-bit operands: y[m] = x[m] w[g(m)] + bias[g(m)], or x[m] w[g(m)]^T.

The kernel reads the weight as it lies for both products, since wgmma takes 16-bit operands in either order. Sums are
float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moax.errors import Unsupported
from moax.kernels.hopper.formats import BLOCK, HALF, Blocks
from moax.kernels.hopper.pallas.blocks import count_used, has_rows, load_rows, locate, operands_of, rows_of
from moax.kernels.hopper.pallas.gather import check_gather, copy_rows, load_sources
from moax.kernels.hopper.pallas.pipeline import (
    TileConfig,
    add_bias,
    pad_bias,
    run,
    stage,
    swizzle_of,
    swizzled,
)

STEP = 64  # the contracted elements of a stage, 128 bytes
PIECE = 64  # the columns whose bias is in registers at one time


def grouped_matmul(
    x: Float[Array, "R K"],
    w: Float[Array, "E K N"] | Float[Array, "E N K"],
    blocks: Blocks,
    tile: TileConfig,
    *,
    transpose: bool = False,
    bias: Float[Array, "E N"] | None = None,
    source: Int[Array, " M"] | None = None,
    out_dtype=None,
) -> Float[Array, "M N"]:
    """y[m] = x[m] w[g(m)] + bias[g(m)]; with `transpose` y[m] = x[m] w[g(m)]^T + bias, for x [M, N], w [E, K, N].

    Args:
      x: [M, K], bf16 or f16, its rows in blocks; padding may hold anything. With `source` it is [R, K], in any order.
      w: [E, K, N] in the dtype of x.
      blocks: the blocks of the rows.
      tile: see TileConfig.
      transpose: whether w is transposed; x is then [M, N] and y [M, K].
      bias: one value for each column of y, added in float32.
      source: row m of the product is x[source[m]], or 0 where source[m] >= R. None means row m itself.
      out_dtype: the dtype of y; None means x.dtype.

    Returns:
      y: [M, N], or [M, K] with `transpose`. Padding may hold anything.

    Raises:
      Unsupported: x and w have other dtypes, or a contiguous dim is no multiple of 32 bytes, with `source` of 128.
    """
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
        raise Unsupported(f"x is {x.dtype} and w is {w.dtype}; the kernel takes bfloat16, or float16, for both")
    rows, contracted = (x if source is None else source).shape[0], x.shape[1]
    columns = w.shape[1] if transpose else w.shape[2]
    swizzle = swizzle_of(2 * contracted, 2 * w.shape[2])
    out = jax.ShapeDtypeStruct((rows, columns), x.dtype if out_dtype is None else out_dtype)
    tiles_n = pl.cdiv(columns, tile.tile_n * tile.cluster)
    n_steps = pl.cdiv(contracted, STEP)
    w_stage = (tile.tile_n, STEP) if transpose else (STEP, tile.tile_n)
    shared = "block" if tile.cluster > 1 else None
    if source is not None:
        check_gather(swizzle, tile)
    gathered = () if source is None else (source,)

    def load(place, step, slot, barrier, stages, x, w, *_, held=None):
        k, n = pl.ds(step * STEP, STEP), pl.ds(place.column * tile.tile_n, tile.tile_n)
        if held is not None:
            copy_rows(x, step * STEP, held, stages["x"].at[slot], swizzled(x.dtype, swizzle))
        else:
            load_rows(x, place, k, stages["x"].at[slot], barrier, shared)
        part = w.at[place.group, n, k] if transpose else w.at[place.group, k, n]
        plgpu.copy_gmem_to_smem(part, stages["w"].at[slot], barrier)

    def load_ahead(place, step, *operands):
        return load_sources(operands[-1], place.row, BLOCK, place.rows)

    def multiply(place, steps, at, warpgroup, stages, full, empty, x, w, group, start, rows, before, *biases):
        total = contract(tile, steps, at, warpgroup, stages, full, empty, transpose)
        if bias is None:
            return [total]
        first, pieces = place.column * tile.tile_n, range(0, tile.tile_n, PIECE)
        return [add_bias(total[:, n : n + PIECE], biases[0], place.group, first + n) for n in pieces]

    def target(place, warpgroup, column, width, out):
        return out.at[rows_of(place, warpgroup), pl.ds(place.column * tile.tile_n + column, width)]

    biases = () if bias is None else (pad_bias(bias, tile.tile_n * tile.cluster),)
    return run(
        (x, w, *operands_of(blocks), *biases, *gathered),
        out,
        tile,
        {"x": stage(tile, BLOCK, STEP, x.dtype, swizzle), "w": stage(tile, *w_stage, x.dtype, swizzle)},
        count=lambda x, w, group, start, rows, before, *_: count_used(before) * tiles_n,
        locate=lambda i, block, x, w, *of: locate(i, block, tile, tiles_n, *of[:4]),
        steps=lambda *_: n_steps,
        load=load,
        multiply=multiply,
        target=target,
        has_rows=has_rows,
        name="grouped_matmul_transposed" if transpose else "grouped_matmul",
        sources=None if source is None else load_ahead,
    )


def contract(tile: TileConfig, steps, at, warpgroup, stages, full, empty, transpose: bool = False):
    """Returns the product [64, tile_n] f32 of a consumer's rows of the stages `x` and the stages `w`, as `run` asks.

    A stage of `w` is [64, tile_n], or [64, G, tile_n / G], or with `transpose` [tile_n, 64].
    """
    mine = pl.ds(warpgroup * HALF, HALF)

    def accumulate(acc):
        def step(k, at):
            slot = lax.rem(at, tile.stages)
            plgpu.barrier_wait(full.at[slot])
            part = stages["w"].at[slot]
            part = part.reshape(STEP, tile.tile_n) if len(part.shape) == 3 else part
            plgpu.wgmma(acc, stages["x"].at[slot, mine], part.T if transpose else part)
            plgpu.wgmma_wait(1)  # the product before this one has read its stage
            pl.when(k > 0)(lambda: plgpu.barrier_arrive(empty.at[lax.rem(at + tile.stages - 1, tile.stages)]))
            return at + 1

        end = lax.fori_loop(0, steps, step, at)
        total = acc[...]
        plgpu.barrier_arrive(empty.at[lax.rem(end + tile.stages - 1, tile.stages)])
        return total

    return pl.run_scoped(accumulate, plgpu.ACC((HALF, tile.tile_n), jnp.float32))
