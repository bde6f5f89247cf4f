"""Grouped weight gradient of 16-bit operands: dw[g] = sum over rows m of g: x[m]^T dy[m].

The kernel reads both operands as they lie, and wgmma transposes them. Sums are float32. The gradient of an empty group
is exactly 0. Padding inside the last half of a group, its last 64 rows, must be 0 in both operands.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moax.checks import Unsupported
from moax.kernels.hopper.formats import HALF, Blocks
from moax.kernels.hopper.pallas.gather import check_gather, copy_rows, load_sources
from moax.kernels.hopper.pallas.pipeline import ROWS, TileConfig, leave_room, run, stage, sweep, swizzle_of, swizzled
from moax.mesh.collectives import with_vma_of_inputs

STEP = HALF  # the rows of a stage


@with_vma_of_inputs
def grouped_wgrad(
    x: Float[Array, "R K"],
    dy: Float[Array, "S N"],
    blocks: Blocks,
    tile: TileConfig,
    *,
    source: Int[Array, " M"] | None = None,
    gathers: str = "x",
    out_dtype=None,
    total=None,
) -> Float[Array, "E K N"]:
    """dw[g] = sum over rows m of group g: x[m]^T dy[m].

    Args:
      x: [M, K], bf16 or f16, its rows in blocks; 0 in the padding of each group's last half.
      dy: [M, N], like x in dtype and padding.
      blocks, tile: the blocks of the rows, and a TileConfig.
      source: row m of the operand that `gathers` names, "x" or "dy", is its row source[m], or 0 where there is none: it
        is then [R, K] or [R, N], in any order. None means row m itself.
      out_dtype: the dtype of dw; None means x.dtype.
      total: [E, K, N] in `out_dtype`, to which the kernel adds, or None. The sum is returned, in the memory of `total`.

    Raises:
      Unsupported: x and dy have other dtypes, or a row is no multiple of 32 bytes, with `source` of 128.
    """
    if x.dtype != dy.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
        raise Unsupported(f"x is {x.dtype} and dy is {dy.dtype}; the kernel takes bfloat16, or float16, for both")
    rows, columns = x.shape[1], dy.shape[1]
    swizzle = swizzle_of(2 * rows, 2 * columns)
    groups = blocks.sizes.shape[0]
    out = jax.ShapeDtypeStruct((groups, rows, columns), x.dtype if out_dtype is None else out_dtype)
    tile = leave_room(tile, lambda tile: STEP * (tile.rows + tile.tile_n) * x.dtype.itemsize, total)
    tile_m, each = tile.rows, tile.products
    if source is not None:
        check_gather(swizzle, tile)
    tiles_m, tiles_n = pl.cdiv(rows, tile_m), pl.cdiv(columns, tile.tile_n * tile.cluster)
    shared = "block" if tile.cluster > 1 else None

    def locate(i, block, x, dy, first, *_):
        g, inside = lax.div(i, tiles_m * tiles_n), lax.rem(i, tiles_m * tiles_n)
        row, column = sweep(inside, tiles_m, tiles_n, tile.width)
        return g, row, column * tile.cluster + block, first[g]

    def load(place, step, slot, barrier, stages, x, dy, *_, held=None):
        _, row, column, half = place
        tokens = pl.ds((half + step) * STEP, STEP)
        for name, ref, first, width in (("x", x, row * tile_m, tile_m), ("dy", dy, column * tile.tile_n, tile.tile_n)):
            if held is not None and name == gathers:
                copy_rows(ref, first, held, stages[name].at[slot], swizzled(ref.dtype, swizzle))
            else:
                axes, part = shared if name == "x" else None, ref.at[tokens, pl.ds(first, width)]
                plgpu.copy_gmem_to_smem(part, stages[name].at[slot], barrier, collective_axes=axes)

    def load_ahead(place, step, *operands):
        return load_sources(operands[-1], (place[-1] + step) * STEP, STEP)

    def multiply(place, steps, at, warpgroup, stages, full, empty, *_):
        mine = [pl.ds((warpgroup * each + i) * ROWS, ROWS) for i in range(each)]

        def accumulate(*accs):
            def step(k, at):
                slot = lax.rem(at, tile.stages)
                plgpu.barrier_wait(full.at[slot])
                for acc, rows in zip(accs, mine, strict=True):
                    plgpu.wgmma(acc, stages["x"].at[slot, :, rows].T, stages["dy"].at[slot])
                plgpu.wgmma_wait(each)  # the products before these have read their stage
                pl.when(k > 0)(lambda: plgpu.barrier_arrive(empty.at[lax.rem(at + tile.stages - 1, tile.stages)]))
                return at + 1

            end = lax.fori_loop(0, steps, step, at)
            totals = [acc[...] for acc in accs]
            last = lax.rem(end + tile.stages - 1, tile.stages)
            pl.when(steps > 0)(lambda: plgpu.barrier_arrive(empty.at[last]))
            return totals

        return pl.run_scoped(accumulate, *[plgpu.ACC((ROWS, tile.tile_n), jnp.float32)] * each)

    def target(place, warpgroup, column, width, out):
        g, row, tile_column, _ = place
        product, inside = divmod(column, tile.tile_n)
        first = row * tile_m + (warpgroup * each + product) * ROWS
        return out.at[g, pl.ds(first, ROWS), pl.ds(tile_column * tile.tile_n + inside, width)]

    return run(
        (x, dy, blocks.first, blocks.sizes, *(() if source is None else (source,))),
        out,
        tile,
        {"x": stage(tile, STEP, tile_m, x.dtype, swizzle), "dy": stage(tile, STEP, tile.tile_n, x.dtype, swizzle)},
        count=lambda *_: groups * tiles_m * tiles_n,
        locate=locate,
        steps=lambda place, x, dy, first, sizes, *_: lax.div(sizes[place[0]] + STEP - 1, STEP),
        load=load,
        multiply=multiply,
        target=target,
        name="grouped_wgrad",
        total=total,
        sources=None if source is None else load_ahead,
    )
