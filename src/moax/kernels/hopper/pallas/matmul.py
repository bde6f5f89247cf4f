"""Grouped matmul: y[m] = x[m] w[g(m)] + bias[g(m)], or x[m] w[g(m)]^T, with sums in float32.

    16 bits   the kernel reads the weight as it lies for both matmuls, since wgmma takes it in either order
    FP8       y[m] = sum over blocks k of 128: sx[k, m] sw[g, n / 128, k] (x[m, k] . w[g, n, k])

FP8 wgmma takes K-major operands alone. Forward takes w^T, so the weight is transposed when it is quantized, on its
shard and before the gather; dgrad takes w as it lies. 128 x 128 blocks have the same scales in both. Partial sums of
128 elements are promoted to float32 registers, since the FP8 accumulators of Hopper keep fewer bits.

A tile is a block of at most 128 rows of one group, 64 a consumer, by the columns of a TileConfig. The last block of a
group may have at most 64 real rows, which the first consumer stores alone: with group sizes (130, 5), the blocks have
128, 2 and 5 rows, and four of their six halves are stored. The second consumer still multiplies, whatever is in its
half of the stages. Were its tile shorter, SMs that read one weight would drift apart, and read the weight again after
it left L2: with 256 rows a group, the matmuls of gpt-oss took 5 to 13 % longer.

With the activation in the epilogue, a tile has the same columns of gate and of up, so that a consumer holds both in
registers: with 256 columns, F = 768 and gate and up, tile 1 has the columns 128 to 255 of each. The kernel writes h,
rounded, and computes a from the rounded h, so that a matmul and `activation.activate_rows` give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moax.checks import Unsupported
from moax.kernels.hopper.formats import BLOCK, HALF, Blocks, KMajorFp8, data_of
from moax.kernels.hopper.pallas import pipeline
from moax.kernels.hopper.pallas.activation import evaluate, rounded
from moax.kernels.hopper.pallas.gather import check_gather, copy_rows, load_sources
from moax.kernels.hopper.pallas.pipeline import PIECE, Ring
from moax.kernels.hopper.pallas.ptx import trace_once
from moax.kernels.hopper.pallas.stages import LINE, TileConfig, check_dtypes, stage, swizzle_of, swizzled

STEP = 64  # the contracted 16-bit elements of a stage
# An older Mosaic finds no layout for a stage of three dims read as two.
MERGES_DIMS = jax.__version_info__ >= (0, 11, 2)


@trace_once
def grouped_matmul(
    x: Float[Array, "R K"] | KMajorFp8,
    w: Float[Array, "E K N"] | Float[Array, "E N K"] | KMajorFp8, blocks: Blocks, tile: TileConfig,
    *, transpose: bool = False, bias: Float[Array, "E N"] | None = None,
    gather_idx: Int[Array, " M"] | None = None, out_dtype=jnp.bfloat16,
) -> Float[Array, "M N"]:  # fmt: skip
    """y[m] = x[m] w[g(m)] + bias[g(m)]; with `transpose`, and in FP8, y[m] = x[m] w[g(m)]^T + bias[g(m)].

    Args:
      x: [M, K], bf16 or FP8, its rows in blocks; padding may hold anything. With `gather_idx`, in bf16, it is
        [R, K], in any order.
      w: [E, K, N] in the dtype of x, with `transpose` and in FP8 [E, N, K].
      blocks, tile: the blocks of the rows, and a TileConfig, in FP8 with a multiple of 64 for `tile_n`.
      transpose: whether a w in bf16 is transposed.
      bias: one value for each column of y, added in f32.
      gather_idx: row m of the matmul is x[gather_idx[m]], or 0 where gather_idx[m] >= R. None means row m itself.
      out_dtype: the dtype of y.

    Returns:
      y: [M, N]. Padding may hold anything.

    Raises:
      Unsupported: x and w have other dtypes, or a contiguous dim is no multiple of 32 bytes, with `gather_idx` of 128.
    """
    fp8 = isinstance(x, KMajorFp8)
    check_dtypes("w", x, w)
    if fp8 and tile.tile_n % PIECE:
        raise Unsupported(f"tile_n={tile.tile_n} must be a multiple of {PIECE}")
    w_is_transposed = transpose or fp8
    _, *dims = data_of(w).shape
    contracted = data_of(x).shape[1]
    dtype = data_of(x).dtype
    swizzle = swizzle_of(contracted * dtype.itemsize, dims[1] * dtype.itemsize)
    depth = LINE // dtype.itemsize
    columns = dims[1]
    w_stage = (depth, tile.tile_n)
    if w_is_transposed:
        columns = dims[0]
        w_stage = (tile.tile_n, depth)
    if gather_idx is not None:
        check_gather(swizzle, tile)

    def load(place, step, slot, ring, x, w, *_, sources=None):
        k = pl.ds(step * depth, depth)
        n = pl.ds(place.column * tile.tile_n, tile.tile_n)
        _load_x(x, place, step, k, slot, ring, sources, swizzle)
        part = w.at[place.group, n, k] if transpose else w.at[place.group, k, n]
        ring.copy(part, "w", slot)

    def load_fp8(place, step, slot, ring, x, w, *_):
        k = pl.ds(step * depth, depth)
        _load_x(x.data, place, step, k, slot, ring, None, swizzle)
        ring.copy(x.scale.at[step, pl.ds(place.row, BLOCK)], "sx", slot)
        part = w.data.at[place.group, pl.ds(place.column * tile.tile_n, tile.tile_n), k]
        ring.copy(part, "w", slot)

    def multiply(place, steps, number, warpgroup, ring, x, w, blocks, bias, _):
        (total,) = _contract(tile.tile_n, steps, number, warpgroup, ring, transpose)
        if bias is None:
            return [total]
        pieces = []
        column = place.column * tile.tile_n
        for n in range(0, tile.tile_n, PIECE):
            piece = total[:, n : n + PIECE]
            pieces.append(pipeline.add_bias(piece, bias, place.group, column + n))
        return pieces

    def multiply_fp8(place, steps, number, warpgroup, ring, x, w, blocks, bias, _):
        pieces = _contract_fp8(tile.tile_n, place, steps, number, warpgroup, ring, w.scale)
        if bias is None:
            return pieces
        sums = []
        for i, piece in enumerate(pieces):
            column = place.column * tile.tile_n + i * PIECE
            sums.append(pipeline.add_bias(piece, bias, place.group, column))
        return sums

    def target(place, warpgroup, column, width, out):
        return out.at[_rows_of(place, warpgroup), pl.ds(place.column * tile.tile_n + column, width)]

    stages = {
        "x": stage(tile, BLOCK, depth, dtype, swizzle),
        "w": stage(tile, *w_stage, data_of(w).dtype, swizzle),
    }
    name = "grouped_matmul_transposed" if transpose else "grouped_matmul"
    if fp8:
        stages["sx"] = plgpu.SMEM((tile.stages, BLOCK), jnp.float32)
        name = "grouped_matmul_fp8"
    if bias is not None:
        padding = -columns % tile.tile_n  # edge tiles read past N
        bias = jnp.pad(bias.astype(jnp.float32), ((0, 0), (0, padding)))
    rows = data_of(x).shape[0] if gather_idx is None else gather_idx.shape[0]
    return _run(
        (x, w, blocks, bias, gather_idx),
        jax.ShapeDtypeStruct((rows, columns), out_dtype),
        tile,
        stages,
        tiles_n=pl.cdiv(columns, tile.tile_n),
        n_steps=pl.cdiv(contracted, depth),
        load=load_fp8 if fp8 else load,
        multiply=multiply_fp8 if fp8 else multiply,
        target=target,
        name=name,
    )


@trace_once
def grouped_matmul_activate(
    x: Float[Array, "R K"], w: Float[Array, "E K G F"], blocks: Blocks, tile: TileConfig,
    act: Callable, *, gather_idx: Int[Array, " M"] | None = None,
) -> tuple[Float[Array, "M G F"], Float[Array, "M F"]]:  # fmt: skip
    """h[m] = x[m] w[g(m)], a[m] = act(h[m]).

    Args:
      x, gather_idx: see `grouped_matmul`.
      w: [E, K, G, F] in the dtype of x: gate, then up, or up alone.
      blocks, tile: the blocks of the rows, and a TileConfig; `tile_n` / G is a multiple of 64.
      act: act(gate, up), or act(up) where G is 1. It works on f32 arrays elementwise.

    Returns:
      h [M, G, F] and a [M, F] in the dtype of x. Padding may hold anything.

    Raises:
      Unsupported: x and w have other dtypes, the tile has other columns, or a contiguous dim is no multiple of 32
        bytes, with `gather_idx` of 128.
    """
    check_dtypes("w", x, w)
    gates, hidden = w.shape[2:]
    part = tile.tile_n // gates  # the columns of a projection in a tile
    if part * gates != tile.tile_n or part % PIECE:
        raise Unsupported(
            f"tile_n={tile.tile_n} for {gates} projections; each must have a multiple of {PIECE} columns of a tile"
        )
    rows = x.shape[0] if gather_idx is None else gather_idx.shape[0]
    contracted = x.shape[1]
    # The rows of all experts are one dim, so that a last stage would end in the next expert.
    if contracted % STEP:
        raise Unsupported(f"w has shape {w.shape}; the kernel takes multiples of {STEP} for K")
    swizzle = swizzle_of(2 * contracted, 2 * hidden)
    if gather_idx is not None:
        check_gather(swizzle, tile)

    def load(place, step, slot, ring, x, w, *_, sources=None):
        k = pl.ds(step * STEP, STEP)
        columns = pl.ds(place.column * part, part)
        _load_x(x, place, step, k, slot, ring, sources, swizzle)
        rows = pl.ds(place.group * contracted + step * STEP, STEP)
        ring.copy(w.at[rows, :, columns], "w", slot)

    def multiply(place, steps, number, warpgroup, ring, *_):
        (total,) = _contract(tile.tile_n, steps, number, warpgroup, ring)
        for n in range(0, part, PIECE):  # a piece is stored before the next one takes registers
            columns = [gate * part + n for gate in range(gates)]
            h = [rounded(total[:, column : column + PIECE]) for column in columns]
            yield from h
            yield from evaluate(act, *h)

    def target(place, warpgroup, column, width, h, a):
        piece, inside = divmod(column, PIECE)
        n, which = divmod(piece, gates + 1)
        mine = _rows_of(place, warpgroup)
        columns = pl.ds(place.column * part + n * PIECE + inside, width)
        if which == gates:
            return a.at[mine, columns]
        return h.at[mine, which, columns]

    boxes = plgpu.TilingTransform((8, 1, swizzle // 2)), plgpu.SwizzleTransform(swizzle)
    w_stage = plgpu.SMEM((tile.stages, STEP, gates, part), x.dtype, transforms=boxes)
    return _run(
        (x, w.reshape(-1, gates, hidden), blocks, None, gather_idx),
        (
            jax.ShapeDtypeStruct((rows, gates, hidden), x.dtype),
            jax.ShapeDtypeStruct((rows, hidden), x.dtype),
        ),
        tile,
        {"x": stage(tile, BLOCK, STEP, x.dtype, swizzle), "w": w_stage},
        tiles_n=pl.cdiv(hidden, part),
        n_steps=contracted // STEP,
        load=load,
        multiply=multiply,
        target=target,
        name="grouped_matmul_activate",
    )


class Place(NamedTuple):
    """The place of a tile: the group of its rows, its first row, its real rows, which come first, and its column."""

    group: Int[Array, ""]
    row: Int[Array, ""]
    rows: Int[Array, ""]
    column: Int[Array, ""]


def _run(
    operands: tuple, out, tile: TileConfig, stages: dict, *, tiles_n: int, n_steps: int, load: Callable,
    multiply: Callable, target: Callable, name: str,
):  # fmt: skip
    """Runs a matmul of these operands, of `tiles_n` tiles a block of rows, each of `n_steps` stages."""
    x, w, blocks, bias, gather_idx = operands

    def count(x, w, blocks, *_):
        return count_blocks(blocks) * tiles_n

    def count_blocks(blocks):
        return blocks.before[blocks.before.shape[0] - 1]

    def locate(i, x, w, blocks, *_):
        row, column = pipeline.sweep(i, count_blocks(blocks), tiles_n, tile.width)
        group = blocks.group[row]
        start = blocks.start[row] * HALF
        return Place(group, start, blocks.rows[row], column)

    def load_tile_sources(place, step, *operands):
        return load_sources(operands[-1], place.row, BLOCK, place.rows)

    work = pipeline.Work(
        count=count,
        locate=locate,
        steps=lambda *_: n_steps,
        load=load,
        multiply=multiply,
        target=target,
        has_rows=lambda place, warpgroup: warpgroup * HALF < place.rows,
        sources=None if gather_idx is None else load_tile_sources,
    )
    operands = (x, w, blocks._replace(first_half=None, sizes=None), bias, gather_idx)
    return pipeline.run(operands, out, tile, stages, work, name=name)


def _load_x(x, place: Place, step, k, slot, ring: Ring, sources, swizzle: int) -> None:
    """Copies the columns k of a step to a slot, of the rows that `sources` names, or else of the tile."""
    stage = ring.stages["x"].at[slot]

    def copy(rows: int) -> None:
        part = x.at[pl.ds(place.row, rows), k]
        plgpu.copy_gmem_to_smem(part, stage.at[pl.ds(0, rows)], ring.full.at[slot])

    if sources is not None:
        copy_rows(x, step * STEP, sources, stage, swizzled(x.dtype, swizzle))
    else:  # there may be no 64 rows after the last block
        pl.when(place.rows > HALF)(lambda: copy(BLOCK))
        pl.when(place.rows <= HALF)(lambda: copy(HALF))


def _rows_of(place: Place, warpgroup):
    """Returns the rows of all rows that a consumer has."""
    return pl.ds(place.row + warpgroup * HALF, HALF)


def _contract(tile_n: int, steps, number, warpgroup, ring: Ring, transpose: bool = False) -> list:
    """Returns the matmul f32 of a consumer's rows of the stages "x" and of "w", alone in a list."""
    mine = pl.ds(warpgroup * HALF, HALF)

    def add(slot, accs):
        # w is [64, tile_n], or [64, G, tile_n / G], or with `transpose` [tile_n, 64].
        w = ring.stages["w"].at[slot]
        if len(w.shape) == 3:
            w = w.reshape(STEP, tile_n)
        plgpu.wgmma(accs[0], ring.stages["x"].at[slot, mine], w.T if transpose else w)

    return pipeline.contract(steps, number, ring, add, tile_n)


def _contract_fp8(tile_n: int, place: Place, steps, number, warpgroup, ring: Ring, sw) -> tuple:
    """Returns the matmul f32 of a consumer's rows, dequantized block by block, in pieces of columns."""
    mine = pl.ds(warpgroup * HALF, HALF)
    pieces = range(tile_n // PIECE)
    # Each piece of columns has a block of the weight's scales. Two neighbouring pieces often share one.
    last = sw.shape[1] - 1
    columns = (place.column * tile_n + i * PIECE for i in pieces)
    blocks = [jnp.minimum(lax.div(column, BLOCK), last) for column in columns]
    own = [i for i in pieces if tile_n % BLOCK or i % (BLOCK // PIECE) == 0]

    def scales(step):
        return tuple(sw[place.group, blocks[i], step] for i in own)

    def step(k, carry):
        totals, sw_now = carry
        # The scale is loaded one step early, since it comes from device memory.
        sw_next = scales(jnp.minimum(k + 1, steps - 1))
        slot, part, sx = pipeline.multiply_fp8(number + k, mine, ring, "w", tile_n)
        plgpu.barrier_arrive(ring.empty.at[slot])
        by_row = {}
        for i, scale in zip(own, sw_now, strict=True):
            by_row[i] = lax.broadcast_in_dim(sx * scale, (HALF, PIECE), [0])
        totals = tuple(
            total + part[:, i * PIECE : (i + 1) * PIECE] * by_row[max(j for j in own if j <= i)]
            for i, total in enumerate(totals)
        )
        return totals, sw_next

    return lax.fori_loop(0, steps, step, ((pipeline.zeros(),) * len(pieces), scales(0)))[0]
