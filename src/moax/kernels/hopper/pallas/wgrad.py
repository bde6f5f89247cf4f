"""Grouped weight gradient of 16-bit operands: dw[g] = sum over rows m of g: x[m]^T dy[m].

The kernel reads both operands as they lie, and wgmma transposes them. Sums are float32. The gradient of an empty group
is exactly 0. Padding inside the last block of a group must be 0 in both operands.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moax.errors import Unsupported
from moax.kernels.hopper.formats import BLOCK, Blocks
from moax.kernels.hopper.pallas.pipeline import ROWS, TileConfig, leave_room, run, stage, sweep, swizzle_of

STEP = 64  # the rows of a stage


def grouped_wgrad(
    x: Float[Array, "M K"], dy: Float[Array, "M N"], blocks: Blocks, tile: TileConfig, *, out_dtype=None, total=None
) -> Float[Array, "E K N"]:
    """dw[g] = sum over rows m of g: x[m]^T dy[m].

    Args:
      x: [M, K], bf16 or f16, its rows in blocks; 0 in the padding of used blocks.
      dy: [M, N], like x in dtype and padding.
      blocks: the blocks of the rows.
      tile: see TileConfig.
      out_dtype: the dtype of dw; None means x.dtype.
      total: [E, K, N] in `out_dtype`, to which the kernel adds, or None. The sum is returned, in the memory of `total`.

    Raises:
      Unsupported: x and dy have other dtypes, or a row is no multiple of 32 bytes.
    """
    if x.dtype != dy.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
        raise Unsupported(f"x is {x.dtype} and dy is {dy.dtype}; the kernel takes bfloat16, or float16, for both")
    rows, columns = x.shape[1], dy.shape[1]
    swizzle = swizzle_of(2 * rows, 2 * columns)
    groups = blocks.first.shape[0]
    out = jax.ShapeDtypeStruct((groups, rows, columns), x.dtype if out_dtype is None else out_dtype)
    tile_m = ROWS * tile.consumers
    tile = leave_room(tile, lambda tile_n: STEP * (tile_m + tile_n) * x.dtype.itemsize, total)
    tiles_m, tiles_n = pl.cdiv(rows, tile_m), pl.cdiv(columns, tile.tile_n * tile.cluster)
    shared = "block" if tile.cluster > 1 else None

    def locate(i, block, x, dy, first, count):
        g, inside = lax.div(i, tiles_m * tiles_n), lax.rem(i, tiles_m * tiles_n)
        row, column = sweep(inside, tiles_m, tiles_n, tile.width)
        return g, row, column * tile.cluster + block, first[g] * BLOCK

    def load(place, step, slot, barrier, stages, x, dy, first, count):
        _, row, column, start = place
        tokens = pl.ds(start + step * STEP, STEP)
        plgpu.copy_gmem_to_smem(
            x.at[tokens, pl.ds(row * tile_m, tile_m)], stages["x"].at[slot], barrier, collective_axes=shared
        )
        part = dy.at[tokens, pl.ds(column * tile.tile_n, tile.tile_n)]
        plgpu.copy_gmem_to_smem(part, stages["dy"].at[slot], barrier)

    def multiply(place, steps, at, warpgroup, stages, full, empty, *_):
        mine = pl.ds(warpgroup * ROWS, ROWS)

        def accumulate(acc):
            def step(k, at):
                slot = lax.rem(at, tile.stages)
                plgpu.barrier_wait(full.at[slot])
                plgpu.wgmma(acc, stages["x"].at[slot, :, mine].T, stages["dy"].at[slot])
                plgpu.wgmma_wait(1)  # the product before this one has read its stage
                pl.when(k > 0)(lambda: plgpu.barrier_arrive(empty.at[lax.rem(at + tile.stages - 1, tile.stages)]))
                return at + 1

            end = lax.fori_loop(0, steps, step, at)
            total = acc[...]
            last = lax.rem(end + tile.stages - 1, tile.stages)
            pl.when(steps > 0)(lambda: plgpu.barrier_arrive(empty.at[last]))
            return total

        return [pl.run_scoped(accumulate, plgpu.ACC((ROWS, tile.tile_n), jnp.float32))]

    def target(place, warpgroup, column, width, out):
        g, row, tile_column, _ = place
        at = tile_column * tile.tile_n + column
        return out.at[g, pl.ds(row * tile_m + warpgroup * ROWS, ROWS), pl.ds(at, width)]

    return run(
        (x, dy, blocks.first, blocks.count),
        out,
        tile,
        {"x": stage(tile, STEP, tile_m, x.dtype, swizzle), "dy": stage(tile, STEP, tile.tile_n, x.dtype, swizzle)},
        count=lambda *_: groups * tiles_m * tiles_n,
        locate=locate,
        steps=lambda place, x, dy, first, count: count[place[0]] * (BLOCK // STEP),
        load=load,
        multiply=multiply,
        target=target,
        name="grouped_wgrad",
        total=total,
    )
