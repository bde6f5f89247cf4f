"""Grouped matmul of 16-bit operands: y[m] = x[m] w[g(m)] + bias[g(m)], or x[m] w[g(m)]^T.

The kernel reads the weight as it lies for both products, since wgmma takes 16-bit operands in either order. Sums are
float32.

With the activation in the epilogue, a tile has the same columns of gate and of up, so that a consumer holds both in
registers: with 256 columns, F = 768 and gate and up, tile 1 has the columns 128 to 255 of each. The kernel writes h,
rounded, and computes a from the rounded h, so that a product and the kernel of `activation_bf16` give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moax.checks import Unsupported
from moax.kernels.hopper.formats import BLOCK, HALF, Blocks
from moax.kernels.hopper.pallas.activation import evaluate, rounded
from moax.kernels.hopper.pallas.blocks import load_rows, operands_of, over_blocks, rows_of
from moax.kernels.hopper.pallas.gather import check_gather, copy_rows, load_sources
from moax.kernels.hopper.pallas.pipeline import TileConfig, add_bias, pad_bias, run, stage, swizzle_of, swizzled
from moax.mesh.collectives import with_vma_of_inputs

STEP = 64  # the contracted elements of a stage, 128 bytes
MERGES_DIMS = jax.__version_info__ >= (
    0,
    11,
    2,
)  # an older Mosaic finds no layout for a stage of three dims read as two
PIECE = 64  # the columns whose bias, or whose activation, is in registers at one time


@with_vma_of_inputs
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
      blocks, tile: the blocks of the rows, and a TileConfig.
      transpose: whether w is transposed; x is then [M, N] and y [M, K].
      bias: one value for each column of y, added in f32.
      source: row m of the product is x[source[m]], or 0 where source[m] >= R. None means row m itself.
      out_dtype: the dtype of y; None means x.dtype.

    Returns:
      y: [M, N], or [M, K] with `transpose`. Padding may hold anything.

    Raises:
      Unsupported: x and w have other dtypes, or a contiguous dim is no multiple of 32 bytes, with `source` of 128.
    """
    _check_dtypes(x, w)
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

    def load(place, step, slot, barrier, stages, x, w, *_, held=None):
        k, n = pl.ds(step * STEP, STEP), pl.ds(place.column * tile.tile_n, tile.tile_n)
        _load_x(x, place, step, k, stages["x"].at[slot], barrier, held, swizzle, shared)
        part = w.at[place.group, n, k] if transpose else w.at[place.group, k, n]
        plgpu.copy_gmem_to_smem(part, stages["w"].at[slot], barrier)

    def multiply(place, steps, at, warpgroup, stages, full, empty, x, w, group, start, rows, before, *biases):
        total = contract(tile, steps, at, warpgroup, stages, full, empty, transpose)
        if bias is None:
            return [total]
        first, pieces = place.column * tile.tile_n, range(0, tile.tile_n, PIECE)
        return [add_bias(total[:, n : n + PIECE], biases[0], place.group, first + n) for n in pieces]

    more = [] if bias is None else [pad_bias(bias, tile.tile_n * tile.cluster)]
    more += [] if source is None else [source]
    return run(
        (x, w, *operands_of(blocks), *more),
        out,
        tile,
        {"x": stage(tile, BLOCK, STEP, x.dtype, swizzle), "w": stage(tile, *w_stage, x.dtype, swizzle)},
        **over_blocks(tile, tiles_n, 2),
        steps=lambda *_: n_steps,
        load=load,
        multiply=multiply,
        name="grouped_matmul_transposed" if transpose else "grouped_matmul",
        sources=None if source is None else _load_sources,
    )


@with_vma_of_inputs
def grouped_matmul_activate(
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
      x, source: see `grouped_matmul`.
      w: [E, K, G, F] in the dtype of x: gate, then up, or up alone.
      blocks, tile: the blocks of the rows, and a TileConfig; `tile_n` / G is a multiple of 64, and `cluster` is 1.
      act: act(gate, up), or act(up) where G is 1. It works on f32 arrays elementwise.

    Returns:
      h [M, G, F] and a [M, F] in the dtype of x. Padding may hold anything.

    Raises:
      Unsupported: x and w have other dtypes, the tile has other columns, or a contiguous dim is no multiple of 32
        bytes, with `source` of 128.
    """
    _check_dtypes(x, w)
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
    w_boxes = plgpu.TilingTransform((8, 1, swizzle // x.dtype.itemsize)), plgpu.SwizzleTransform(swizzle)

    def load(place, step, slot, barrier, stages, x, w, *_, held=None):
        k, columns = pl.ds(step * STEP, STEP), pl.ds(place.column * part, part)
        _load_x(x, place, step, k, stages["x"].at[slot], barrier, held, swizzle)
        rows = pl.ds(place.group * contracted + step * STEP, STEP)
        plgpu.copy_gmem_to_smem(w.at[rows, :, columns], stages["w"].at[slot], barrier)

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
            "w": plgpu.SMEM((tile.stages, STEP, gates, part), x.dtype, transforms=w_boxes),
        },
        **over_blocks(tile, tiles_n, 2) | dict(target=target),
        steps=lambda *_: n_steps,
        load=load,
        multiply=multiply,
        name="grouped_matmul_activate",
        sources=None if source is None else _load_sources,
    )


def _check_dtypes(x, w) -> None:
    if x.dtype != w.dtype or x.dtype not in (jnp.bfloat16, jnp.float16):
        raise Unsupported(f"x is {x.dtype} and w is {w.dtype}; the kernel takes bfloat16, or float16, for both")


def _load_sources(place, step, *operands):
    return load_sources(operands[-1], place.row, BLOCK, place.rows)


def _load_x(x, place, step, k, stage, barrier, held, swizzle: int, shared=None) -> None:
    """Copies the columns k, those of a step, of the rows that `held` names, or else of the tile, to a stage."""
    if held is not None:
        copy_rows(x, step * STEP, held, stage, swizzled(x.dtype, swizzle))
    else:
        load_rows(x, place, k, stage, barrier, shared)


def contract(tile: TileConfig, steps, at, warpgroup, stages, full, empty, transpose: bool = False):
    """Returns the product [64, tile_n] f32 of a consumer's rows of the stages `x` and the stages `w`.

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
