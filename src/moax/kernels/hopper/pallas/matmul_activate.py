"""Grouped matmul with the activation in its epilogue, of 16-bit operands: h[m] = x[m] w[g(m)], a[m] = act(h[m]).

A tile has the same columns of gate and of up, so that a consumer holds both in registers: with 256 columns, F = 768 and
gate and up, tile 1 has the columns 128 to 255 of each. The kernel writes h, rounded, and computes a from the rounded h,
so that the bits are those of a product and the kernel of `activation_bf16`. It stores 64 columns of gate, of up and of
a, then the next ones.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moax.errors import Unsupported
from moax.kernels.hopper.formats import BLOCK, Blocks
from moax.kernels.hopper.pallas.activation import evaluate, rounded
from moax.kernels.hopper.pallas.blocks import count_used, has_rows, load_rows, locate, operands_of, rows_of
from moax.kernels.hopper.pallas.gather import check_gather, copy_rows, load_sources
from moax.kernels.hopper.pallas.matmul import STEP, contract
from moax.kernels.hopper.pallas.pipeline import TileConfig, run, stage, swizzle_of, swizzled

PIECE = 64  # the columns of a projection that are activated and stored at one time


def matmul_activate(
    x: Float[Array, "R K"],
    w: Float[Array, "E K G F"],
    blocks: Blocks,
    tile: TileConfig,
    act: Callable,
    *,
    source: Int[Array, " M"] | None = None,
) -> tuple[Float[Array, "M G F"], Float[Array, "M F"]]:
    """h[m] = x[m] w[g(m)], a[m] = act(h[m]).

    Args:
      x: [M, K], bf16 or f16, its rows in blocks; padding may hold anything. With `source` it is [R, K], in any order.
      w: [E, K, G, F] in the dtype of x: gate, then up, or up alone.
      blocks: the blocks of the rows.
      tile: see TileConfig; `tile_n` / G is a multiple of 64, and `cluster` is 1.
      act: act(gate, up), or act(up) where G is 1. It works on f32 arrays elementwise.
      source: row m of the product is x[source[m]], or 0 where source[m] >= R. None means row m itself.

    Returns:
      h [M, G, F] and a [M, F] in the dtype of x. Padding may hold anything.

    Raises:
      Unsupported: x and w have other dtypes, the tile has other columns, or a contiguous dim is no multiple of 32
        bytes, with `source` of 128.
    """
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
        raise Unsupported(f"x is {x.dtype} and w is {w.dtype}; the kernel takes bfloat16, or float16, for both")
    gates, hidden = w.shape[2:]
    part = tile.tile_n // gates  # the columns of a projection in a tile
    if part * gates != tile.tile_n or part % PIECE or tile.cluster > 1:
        raise Unsupported(
            f"tile_n={tile.tile_n} and cluster={tile.cluster} for {gates} projections; each must have a multiple of "
            f"{PIECE} columns of a tile, and cluster must be 1"
        )
    rows, contracted = (x if source is None else source).shape[0], x.shape[1]
    if contracted % STEP:  # the rows of all experts are one dim, so that a last stage would end in the next expert
        raise Unsupported(f"w has shape {w.shape}; the kernel takes multiples of {STEP} for K")
    swizzle = swizzle_of(2 * contracted, 2 * hidden)
    if source is not None:
        check_gather(swizzle, tile)
    tiles_n, n_steps = pl.cdiv(hidden, part), pl.cdiv(contracted, STEP)
    beside = plgpu.TilingTransform((8, 1, swizzle // x.dtype.itemsize)), plgpu.SwizzleTransform(swizzle)

    def load(place, step, slot, barrier, stages, x, w, *_, held=None):
        k, columns = pl.ds(step * STEP, STEP), pl.ds(place.column * part, part)
        if held is not None:
            copy_rows(x, step * STEP, held, stages["x"].at[slot], swizzled(x.dtype, swizzle))
        else:
            load_rows(x, place, k, stages["x"].at[slot], barrier)
        rows = pl.ds(place.group * contracted + step * STEP, STEP)
        plgpu.copy_gmem_to_smem(w.at[rows, :, columns], stages["w"].at[slot], barrier)

    def load_ahead(place, step, *operands):
        return load_sources(operands[-1], place.row, BLOCK, place.rows)

    def multiply(place, steps, at, warpgroup, stages, full, empty, *_):
        total = contract(tile, steps, at, warpgroup, stages, full, empty)
        for n in range(0, part, PIECE):  # a piece is stored before the next one takes registers
            of_h = [rounded(total[:, gate * part + n : gate * part + n + PIECE]) for gate in range(gates)]
            yield from of_h
            yield from evaluate(act, *of_h)

    def target(place, warpgroup, column, width, h, a):
        piece, inside = divmod(column, PIECE)
        n, which = divmod(piece, gates + 1)
        mine = rows_of(place, warpgroup)
        columns = pl.ds(place.column * part + n * PIECE + inside, width)
        return a.at[mine, columns] if which == gates else h.at[mine, which, columns]

    return run(
        (x, w.reshape(-1, gates, hidden), *operands_of(blocks), *(() if source is None else (source,))),
        (jax.ShapeDtypeStruct((rows, gates, hidden), x.dtype), jax.ShapeDtypeStruct((rows, hidden), x.dtype)),
        tile,
        {
            "x": stage(tile, BLOCK, STEP, x.dtype, swizzle),
            "w": plgpu.SMEM((tile.stages, STEP, gates, part), x.dtype, transforms=beside),
        },
        count=lambda x, w, group, start, rows, before, *_: count_used(before) * tiles_n,
        locate=lambda i, block, x, w, *of: locate(i, block, tile, tiles_n, *of[:4]),
        steps=lambda *_: n_steps,
        load=load,
        multiply=multiply,
        target=target,
        has_rows=has_rows,
        name="grouped_matmul_activate",
        sources=None if source is None else load_ahead,
    )
