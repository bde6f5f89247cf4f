"""Grouped matmul of FP8 operands: y[m] = sum over blocks k of 128: sx[k, m] sw[g, n/128, k] (x[m, k] . w[g, n, k]).

FP8 wgmma takes K-major operands alone. Forward takes w^T, so the weight is transposed when it is quantized, on its
shard and before the gather. dgrad takes w as it lies. 128 x 128 blocks have the same scales in both. Partial sums of
128 elements are promoted to float32 registers, since the FP8 accumulators of Hopper keep fewer bits.
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
from moax.kernels.hopper.pallas.blocks import load_rows, operands_of, over_blocks
from moax.kernels.hopper.pallas.pipeline import TileConfig, add_bias, pad_bias, run, stage, swizzle_of
from moax.mesh.collectives import with_vma_of_inputs

PIECE = 64  # so many columns always share a scale of the weight


@with_vma_of_inputs
def grouped_matmul_fp8(
    x: KMajorFp8,
    w: KMajorFp8,
    blocks: Blocks,
    tile: TileConfig,
    *,
    bias: Float[Array, "E N"] | None = None,
    out_dtype=jnp.bfloat16,
) -> Float[Array, "M N"]:
    """y[m] = x[m] w[g(m)]^T + bias[g(m)], dequantized block by block.

    Args:
      x: data [M, K], its rows in blocks; padding may hold anything.
      w: data [E, N, K].
      blocks, tile: the blocks of the rows, and a TileConfig whose tile_n is a multiple of 64.
      bias: one value for each column of y, added in f32.
      out_dtype: the dtype of y.

    Returns:
      y: [M, N]. Padding may hold anything.

    Raises:
      Unsupported: x or w is no 8-bit float, or tile_n is no multiple of 64.
    """
    if x.data.dtype.itemsize != 1 or w.data.dtype.itemsize != 1:
        raise Unsupported(f"x is {x.data.dtype} and w is {w.data.dtype}; the kernel takes 8-bit floats")
    if tile.tile_n % PIECE:
        raise Unsupported(f"tile_n={tile.tile_n} must be a multiple of {PIECE}")
    rows, contracted = x.data.shape
    columns = w.data.shape[1]
    swizzle = swizzle_of(contracted)
    out = jax.ShapeDtypeStruct((rows, columns), out_dtype)
    tiles_n = pl.cdiv(columns, tile.tile_n * tile.cluster)
    n_steps, last_scale = pl.cdiv(contracted, BLOCK), w.scale.shape[1] - 1
    shared = "block" if tile.cluster > 1 else None
    pieces = tile.tile_n // PIECE

    def load(place, step, slot, barrier, stages, x, sx, w, *_):
        k = pl.ds(step * BLOCK, BLOCK)
        load_rows(x, place, k, stages["x"].at[slot], barrier, shared)
        plgpu.copy_gmem_to_smem(sx.at[step, pl.ds(place.row, BLOCK)], stages["sx"].at[slot], barrier)
        part = w.at[place.group, pl.ds(place.column * tile.tile_n, tile.tile_n), k]
        plgpu.copy_gmem_to_smem(part, stages["w"].at[slot], barrier)

    def multiply(place, steps, at, warpgroup, stages, full, empty, x, sx, w, sw, group, start, rows, before, *biases):
        column, g = place.column, place.group
        mine = pl.ds(warpgroup * HALF, HALF)
        # The block of the weight's scales that each piece of columns has. Two neighbouring pieces often share one.
        scale_blocks = [
            jnp.minimum(lax.div(column * tile.tile_n + i * PIECE, BLOCK), last_scale) for i in range(pieces)
        ]
        own = [i for i in range(pieces) if tile.tile_n % BLOCK or i % (BLOCK // PIECE) == 0]

        def scales(step):
            return tuple(sw[g, scale_blocks[i], step] for i in own)

        def step(k, carry):
            totals, sw_now = carry
            sw_next = scales(jnp.minimum(k + 1, steps - 1))  # loaded one step early, since it comes from device memory
            slot = lax.rem(at + k, tile.stages)
            plgpu.barrier_wait(full.at[slot])

            def product(acc):
                plgpu.wgmma(acc, stages["x"].at[slot, mine], stages["w"].at[slot].T)
                sx_now = plgpu.load(stages["sx"].at[slot, mine], layout=plgpu.Layout.WGMMA.reduce(1))
                return acc[...], sx_now

            part, sx_now = pl.run_scoped(product, plgpu.ACC((HALF, tile.tile_n), jnp.float32))
            plgpu.barrier_arrive(empty.at[slot])
            by_row = {i: lax.broadcast_in_dim(sx_now * s, (HALF, PIECE), [0]) for i, s in zip(own, sw_now, strict=True)}
            totals = tuple(
                total + part[:, i * PIECE : (i + 1) * PIECE] * by_row[max(j for j in own if j <= i)]
                for i, total in enumerate(totals)
            )
            return totals, sw_next

        zero = plgpu.layout_cast(jnp.zeros((HALF, PIECE), jnp.float32), plgpu.Layout.WGMMA)
        totals, _ = lax.fori_loop(0, steps, step, ((zero,) * pieces, scales(0)))
        if bias is None:
            return totals
        return [add_bias(t, biases[0], g, column * tile.tile_n + i * PIECE) for i, t in enumerate(totals)]

    biases = () if bias is None else (pad_bias(bias, tile.tile_n * tile.cluster),)
    return run(
        (x.data, x.scale, w.data, w.scale, *operands_of(blocks), *biases),
        out,
        tile,
        {
            "x": stage(tile, BLOCK, BLOCK, x.data.dtype, swizzle),
            "w": stage(tile, tile.tile_n, BLOCK, w.data.dtype, swizzle),
            "sx": plgpu.SMEM((tile.stages, BLOCK), jnp.float32),
        },
        **over_blocks(tile, tiles_n, 4),
        steps=lambda *_: n_steps,
        load=load,
        multiply=multiply,
        name="grouped_matmul_fp8",
    )
