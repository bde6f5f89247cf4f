"""Grouped weight gradient of FP8 operands: dw[g] = sum over blocks b of g: sx[b, k] sdy[b, n] (x[k, b] . dy[n, b]).

FP8 wgmma takes K-major operands alone, and this product contracts rows, so the kernel that quantizes both operands
transposes them too. Partial sums of 128 rows are promoted to float32. The gradient of an empty group is exactly 0.
Padding inside the last block of a group is 0 in both operands, because the quantization writes 0 there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moax.checks import Unsupported
from moax.kernels.hopper.formats import BLOCK, HALF, Blocks, KMajorFp8
from moax.kernels.hopper.pallas.pipeline import ROWS, TileConfig, leave_room, run, stage, sweep
from moax.mesh.collectives import with_vma_of_inputs

PIECE = 64  # the columns whose scales are in registers at one time
HALVES = BLOCK // HALF  # `Blocks` has first halves, and a step contracts a block


@with_vma_of_inputs
def grouped_wgrad_fp8(
    x: KMajorFp8, dy: KMajorFp8, blocks: Blocks, tile: TileConfig, *, out_dtype=jnp.bfloat16, total=None
) -> Float[Array, "E K N"]:
    """dw[g] = sum over rows m of group g: x[:, m] dy[:, m]^T, dequantized block by block.

    Args:
      x: data [K, M], with a scale for each 128 of the M rows.
      dy: data [N, M], with scales like those of x.
      blocks, tile, total: see `grouped_wgrad`.
      out_dtype: the dtype of dw.

    Raises:
      Unsupported: x or dy is no 8-bit float.
    """
    if x.data.dtype.itemsize != 1 or dy.data.dtype.itemsize != 1:
        raise Unsupported(f"x is {x.data.dtype} and dy is {dy.data.dtype}; the kernel takes 8-bit floats")
    rows, columns = x.data.shape[0], dy.data.shape[0]
    groups = blocks.sizes.shape[0]
    out = jax.ShapeDtypeStruct((groups, rows, columns), out_dtype)
    tile = leave_room(tile, lambda tile: (BLOCK + 4) * (tile.rows + tile.tile_n), total)  # with the scales, of 4 bytes
    tile_m = tile.rows
    tiles_m, tiles_n = pl.cdiv(rows, tile_m), pl.cdiv(columns, tile.tile_n * tile.cluster)
    shared = "block" if tile.cluster > 1 else None

    def locate(i, block, x, sx, dy, sdy, first, sizes):
        g, inside = lax.div(i, tiles_m * tiles_n), lax.rem(i, tiles_m * tiles_n)
        row, column = sweep(inside, tiles_m, tiles_n, tile.width)
        return g, row, column * tile.cluster + block, lax.div(first[g], HALVES)

    def load(place, step, slot, barrier, stages, x, sx, dy, sdy, first, sizes):
        _, row, column, start = place
        tokens = pl.ds((start + step) * BLOCK, BLOCK)
        k, n = pl.ds(row * tile_m, tile_m), pl.ds(column * tile.tile_n, tile.tile_n)
        plgpu.copy_gmem_to_smem(x.at[k, tokens], stages["x"].at[slot], barrier, collective_axes=shared)
        plgpu.copy_gmem_to_smem(dy.at[n, tokens], stages["dy"].at[slot], barrier)
        plgpu.copy_gmem_to_smem(sx.at[start + step, k], stages["sx"].at[slot], barrier)
        plgpu.copy_gmem_to_smem(sdy.at[start + step, n], stages["sdy"].at[slot], barrier)

    def multiply(place, steps, at, warpgroup, stages, full, empty, *_):
        mine, shape = pl.ds(warpgroup * ROWS, ROWS), (ROWS, PIECE)

        def step(k, totals):
            slot = lax.rem(at + k, tile.stages)
            plgpu.barrier_wait(full.at[slot])

            def product(acc):
                plgpu.wgmma(acc, stages["x"].at[slot, mine], stages["dy"].at[slot].T)
                sx_now = plgpu.load(stages["sx"].at[slot, mine], layout=plgpu.Layout.WGMMA.reduce(1))
                return acc[...], sx_now

            part, sx_now = pl.run_scoped(product, plgpu.ACC((ROWS, tile.tile_n), jnp.float32))
            by_row, new = lax.broadcast_in_dim(sx_now, shape, [0]), []
            for i, total in enumerate(totals):  # the scales of all columns do not fit in registers
                some = pl.ds(i * PIECE, PIECE)
                sdy_now = plgpu.load(stages["sdy"].at[slot, some], layout=plgpu.Layout.WGMMA.reduce(0))
                scaled = part[:, i * PIECE : (i + 1) * PIECE] * by_row
                new.append(total + scaled * lax.broadcast_in_dim(sdy_now, shape, [1]))
            plgpu.barrier_arrive(empty.at[slot])
            return tuple(new)

        zero = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        return lax.fori_loop(0, steps, step, (zero,) * (tile.tile_n // PIECE))

    def target(place, warpgroup, column, width, out):
        g, row, tile_column, _ = place
        at = tile_column * tile.tile_n + column
        return out.at[g, pl.ds(row * tile_m + warpgroup * ROWS, ROWS), pl.ds(at, width)]

    return run(
        (x.data, x.scale, dy.data, dy.scale, blocks.first, blocks.sizes),
        out,
        tile,
        {
            "x": stage(tile, tile_m, BLOCK, x.data.dtype, BLOCK),
            "dy": stage(tile, tile.tile_n, BLOCK, dy.data.dtype, BLOCK),
            "sx": plgpu.SMEM((tile.stages, tile_m), jnp.float32),
            "sdy": plgpu.SMEM((tile.stages, tile.tile_n), jnp.float32),
        },
        count=lambda *_: groups * tiles_m * tiles_n,
        locate=locate,
        steps=lambda place, x, sx, dy, sdy, first, sizes: lax.div(sizes[place[0]] + BLOCK - 1, BLOCK),
        load=load,
        multiply=multiply,
        target=target,
        name="grouped_wgrad_fp8",
        total=total,
    )
