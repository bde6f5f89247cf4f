"""Grouped weight gradient: dw[g] = sum over rows m of group g: x[m]^T dy[m].

    16 bits   the kernel reads both operands as they lie, and wgmma transposes them
    FP8       dw[g] = sum over blocks b of g: sx[b, k] sdy[b, n] (x[k, b] . dy[n, b])

Sums are float32, and the gradient of an empty group is exactly 0. FP8 wgmma takes K-major operands alone, and this
matmul contracts rows, so the kernel that quantizes the operands transposes them too. Partial sums of 128 rows are
promoted to float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moax.kernels.hopper.formats import HALF, Blocks, KMajorFp8, data_of
from moax.kernels.hopper.pallas import pipeline
from moax.kernels.hopper.pallas.gather import check_gather, copy_rows, load_sources
from moax.kernels.hopper.pallas.pipeline import PIECE, Ring
from moax.kernels.hopper.pallas.ptx import trace_once
from moax.kernels.hopper.pallas.stages import (
    LINE,
    ROWS,
    TileConfig,
    check_dtypes,
    leave_room,
    stage,
    swizzle_of,
    swizzled,
)


@trace_once
def grouped_wgrad(
    x: Float[Array, "R K"] | KMajorFp8, dy: Float[Array, "S N"] | KMajorFp8, blocks: Blocks,
    tile: TileConfig, *, gather_idx: Int[Array, " M"] | None = None, gathers: str = "x",
    out_dtype=jnp.bfloat16, total=None,
) -> Float[Array, "E K N"]:  # fmt: skip
    """dw[g] = sum over rows m of group g: x[m]^T dy[m].

    Args:
      x: [M, K], bf16, its rows in blocks; 0 in the padding of each group's last half. In FP8 it has data [K, M],
        a scale for each 128 of the M rows, and 0 in the padding of each group's last block.
      dy: [M, N], in FP8 data [N, M], like x in dtype, scales and padding.
      blocks, tile: the blocks of the rows, and a TileConfig.
      gather_idx: row m of the operand that `gathers` names, "x" or "dy", is its row gather_idx[m], or 0 where
        gather_idx[m] is R or more: the operand is then [R, K] or [R, N], in any order. None means row m itself, as FP8
        needs.
      out_dtype: the dtype of dw.
      total: [E, K, N] in `out_dtype`, to which the kernel adds, or None. The sum is returned, in the memory of `total`.

    Raises:
      Unsupported: x and dy have other dtypes, or a row is no multiple of 32 bytes, with `gather_idx` of 128.
    """
    fp8 = isinstance(x, KMajorFp8)
    check_dtypes("dy", x, dy)
    dtype = data_of(x).dtype
    rows, columns = (data_of(v).shape[0 if fp8 else 1] for v in (x, dy))
    swizzle = LINE if fp8 else swizzle_of(2 * rows, 2 * columns)
    step_rows = LINE // dtype.itemsize  # the rows of a stage: 64, and 128 in FP8
    groups = blocks.sizes.shape[0]
    out = jax.ShapeDtypeStruct((groups, rows, columns), out_dtype)
    tile = leave_room(tile, LINE + 4 * fp8, total)  # a scale has 4 bytes
    tile_m = tile.rows
    if gather_idx is not None:
        check_gather(swizzle, tile)
    tiles_m = pl.cdiv(rows, tile_m)
    tiles_n = pl.cdiv(columns, tile.tile_n)

    def locate(i, x, dy, first_half, *_):
        group = lax.div(i, tiles_m * tiles_n)
        inside = lax.rem(i, tiles_m * tiles_n)
        row, column = pipeline.sweep(inside, tiles_m, tiles_n, tile.width)
        start = first_half[group]
        if fp8:
            start = lax.div(start, step_rows // HALF)
        return Place(group, row, column, start)

    def list_sides(place, x, dy):
        return (
            Side("x", x, place.row * tile_m, tile_m),
            Side("dy", dy, place.column * tile.tile_n, tile.tile_n),
        )

    def load(place, step, slot, ring, x, dy, *_, sources=None):
        tokens = pl.ds((place.start + step) * step_rows, step_rows)
        for side in list_sides(place, x, dy):
            if sources is not None and side.name == gathers:
                target = ring.stages[side.name].at[slot]
                copy_rows(side.operand, side.first, sources, target, swizzled(dtype, swizzle))
            else:
                part = side.operand.at[tokens, pl.ds(side.first, side.width)]
                ring.copy(part, side.name, slot)

    def load_fp8(place, step, slot, ring, x, dy, *_):
        tokens = pl.ds((place.start + step) * step_rows, step_rows)
        sides = list_sides(place, x, dy)
        for side in sides:
            part = side.operand.data.at[pl.ds(side.first, side.width), tokens]
            ring.copy(part, side.name, slot)
        for side in sides:
            scale = side.operand.scale.at[place.start + step, pl.ds(side.first, side.width)]
            ring.copy(scale, f"s{side.name}", slot)

    def load_ahead(place, step, *operands):
        return load_sources(operands[-1], (place.start + step) * step_rows, step_rows)

    def multiply(place, steps, number, warpgroup, ring, *_):
        if fp8:
            return _contract_fp8(tile.tile_n, steps, number, warpgroup, ring)
        return _contract(tile, steps, number, warpgroup, ring)

    def target(place, warpgroup, column, width, out):
        product, inside = divmod(column, tile.tile_n)
        row = place.row * tile_m + (warpgroup * tile.products + product) * ROWS
        columns = pl.ds(place.column * tile.tile_n + inside, width)
        return out.at[place.group, pl.ds(row, ROWS), columns]

    def count_steps(place, x, dy, first_half, sizes, _):
        return lax.div(sizes[place.group] + step_rows - 1, step_rows)

    stages: dict = {}
    for name, v, n in (("x", x, tile_m), ("dy", dy, tile.tile_n)):
        shape = (n, step_rows) if fp8 else (step_rows, n)
        stages[name] = stage(tile, *shape, data_of(v).dtype, swizzle)
        if fp8:
            stages[f"s{name}"] = plgpu.SMEM((tile.stages, n), jnp.float32)
    work = pipeline.Work(
        count=lambda *_: groups * tiles_m * tiles_n,
        locate=locate,
        steps=count_steps,
        load=load_fp8 if fp8 else load,
        multiply=multiply,
        target=target,
        sources=None if gather_idx is None else load_ahead,
    )
    operands = (x, dy, blocks.first_half, blocks.sizes, gather_idx)
    name = "grouped_wgrad_fp8" if fp8 else "grouped_wgrad"
    return pipeline.run(operands, out, tile, stages, work, name=name, total=total)


class Place(NamedTuple):
    """The place of a tile of dw: its group, its row and column among the group's tiles, and the group's first stage."""

    group: Int[Array, ""]
    row: Int[Array, ""]
    column: Int[Array, ""]
    start: Int[Array, ""]


class Side(NamedTuple):
    """An operand of a tile: its columns `first` to `first + width - 1`."""

    name: str
    operand: Any
    first: Int[Array, ""]
    width: int


def _contract(tile: TileConfig, steps, number, warpgroup, ring: Ring) -> list:
    """Returns the matmuls f32 of a consumer, of 64 rows each."""
    each = tile.products
    mine = [pl.ds((warpgroup * each + i) * ROWS, ROWS) for i in range(each)]

    def add(slot, accs):
        for acc, rows in zip(accs, mine, strict=True):
            plgpu.wgmma(acc, ring.stages["x"].at[slot, :, rows].T, ring.stages["dy"].at[slot])

    return pipeline.contract(steps, number, ring, add, tile.tile_n, each)


def _contract_fp8(tile_n: int, steps, number, warpgroup, ring: Ring) -> tuple:
    """Returns the matmul f32 of a consumer, dequantized stage by stage, in pieces of columns."""
    mine = pl.ds(warpgroup * ROWS, ROWS)
    shape = (ROWS, PIECE)

    def step(k, totals):
        slot, part, sx = pipeline.multiply_fp8(number + k, mine, ring, "dy", tile_n)
        by_row = lax.broadcast_in_dim(sx, shape, [0])
        sums = []
        for i, total in enumerate(totals):  # the scales of all columns do not fit in registers
            sdy = ring.stages["sdy"].at[slot, pl.ds(i * PIECE, PIECE)]
            sdy = plgpu.load(sdy, layout=plgpu.Layout.WGMMA.reduce(0))
            scaled = part[:, i * PIECE : (i + 1) * PIECE] * by_row
            sums.append(total + scaled * lax.broadcast_in_dim(sdy, shape, [1]))
        plgpu.barrier_arrive(ring.empty.at[slot])
        return tuple(sums)

    return lax.fori_loop(0, steps, step, (pipeline.zeros(),) * (tile_n // PIECE))
