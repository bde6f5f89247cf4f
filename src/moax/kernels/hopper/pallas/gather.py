"""Copies of gathered rows into a stage of a matmul, so that rows sorted by expert are never in memory.

The copy engine of Hopper gathers no rows. The four warps of the producer do, in copies of 16 bytes (`cp.async`), for
which no thread waits: eight lanes copy a line of 128 bytes, and a warp copies four lines at one time. The lines lie
where the copy engine would have put them for the swizzle of 128 bytes. Each warp copies a quarter of the rows of a
stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import vector

from moax.checks import Unsupported
from moax.kernels.hopper.pallas.ptx import i32, run_ptx, to_fragments

LINE = 128  # the bytes of a line, and of the swizzle
WARPS = 4  # the warps of a warpgroup
LANES = 32  # the lanes of a warp
CHUNK = 16  # the bytes of a lane's copy
BOX = 8  # so many lanes copy a line, and so many rows repeat the swizzle
EACH = plgpu.Layout.WG_STRIDED((WARPS * LANES,), 1)  # a thread holds one value
ONE = plgpu.Layout.WG_SPLAT(())
# The producer begins so many further stages before it waits for a stage; with 2, matmuls take as long.
BEHIND = 1


def check_gather(swizzle: int, tile: Any) -> None:
    """Raises Unsupported unless stages with this swizzle, of this TileConfig, can hold gathered rows."""
    if swizzle != LINE or tile.stages < BEHIND + 2:
        raise Unsupported(
            f"a gather has swizzle={swizzle} and stages={tile.stages}; it needs contiguous dims of multiples of "
            f"{LINE} bytes, and at least {BEHIND + 2} stages"
        )


def gather_stages(
    mine, place_of: Callable, steps: Callable, fill: Callable, sources: Callable, full,
):  # fmt: skip
    """Fills the stages of a producer's tiles with gathered rows, and returns their number.

    Args:
      mine, place_of, steps, full: the number of tiles, at least 1; the place of tile i; the stages of a tile; and the
        barriers of the stages.
      fill: fill(place, step, number, sources=...) starts to copy the rows that `sources` names into a stage. `number`
        counts the stages of earlier tiles.
      sources: sources(place, step) -> the result of `load_sources` for a step.
    """

    def arrive(number) -> None:
        pl.when(number >= 0)(lambda: plgpu.barrier_arrive(full.at[lax.rem(number, full.shape[0])]))

    def per_tile(i, carry):  # the sources of a step are loaded during the step before
        number, place, rows = carry
        next_place = place_of(lax.min(i + 1, mine - 1))

        def per_step(step, carry):
            number, rows = carry
            fill(place, step, number, sources=rows)
            rows = sources(place, step + 1)
            _wait_rows(BEHIND)
            arrive(number - BEHIND)
            return number + 1, rows

        number, _ = lax.fori_loop(0, steps(place), per_step, (number, rows))
        return number, next_place, sources(next_place, 0)

    place = place_of(0)
    end, _, _ = lax.fori_loop(0, mine, per_tile, (jnp.int32(0), place, sources(place, 0)))
    _wait_rows(0)
    for late in reversed(range(BEHIND)):
        arrive(end - 1 - late)
    return end


def load_sources(gather_idx, start, rows: int, real=None):
    """Returns the rows of x that `copy_rows` copies to a stage of `rows` rows: gather_idx[start : start + rows].

    Lane l of warp w holds gather_idx[start + w q + l % q], where q = rows / 4. From the row number `real` of the stage
    on, and past the end of `gather_idx`, no row of x is copied: `copy_rows` writes 0. `real` None is `rows`.
    """
    code = _SOURCE.format(each=rows // WARPS, end=gather_idx.shape[0])
    real = jnp.int32(rows if real is None else real)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), ONE, ONE),
        return_type=plgpu.ShapeDtypeStruct((WARPS * LANES,), jnp.int32, layout=EACH),
    )
    def load(ctx, gather_idx, start, real):
        del ctx
        operands = utils.memref_ptr(gather_idx), start.registers.item(), real.registers.item()
        return to_fragments([run_ptx(code, *operands, result=i32())], EACH)

    return load(gather_idx, jnp.int32(start), real)


def copy_rows(x, column, sources, stage, transforms) -> None:
    """Starts to copy x[sources[i], column : column + C] to row i of a stage, and 0 where sources[i] >= R or x ends.

    Args:
      x: [R, W] in GMEM, 16-bit, with W a multiple of 64.
      column: the first column, a multiple of 64.
      sources: the result of `load_sources` for the rows of the stage.
      stage: [64 or 128, C] in SMEM, with C a multiple of 64.
      transforms: those of the stage: tiles of 8 rows by 128 bytes, in the swizzle of 128 bytes.
    """
    rows, width = stage.shape
    code = _copies(rows // WARPS, width * x.dtype.itemsize // LINE, x.shape, x.dtype.itemsize)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), ONE, EACH, plgpu.RefType(transforms)))
    def copy(ctx, x, column, sources, stage):
        del ctx
        source = vector.extract(sources.registers.item(), dynamic_position=[], static_position=[0])
        run_ptx(code, utils.memref_ptr(x), source, utils.memref_ptr(stage), column.registers.item())

    copy(x, jnp.int32(column), sources, stage)


def _wait_rows(later: int) -> None:
    """Waits until wgmma may read the rows of all calls of `copy_rows`, but of the last `later`."""

    @plgpu.inline_mgpu()
    def wait(ctx):
        del ctx
        run_ptx(f"cp.async.commit_group;\ncp.async.wait_group {later};\nfence.proxy.async.shared::cta;")

    wait()


# The PTX of `load_sources`. The operands are the result, `gather_idx`, the first row and the number of real rows.
_SOURCE = """{{
.reg .b32 lane, warp, place;
.reg .b64 at;
.reg .pred inside;
mov.u32 lane, %tid.x;
shr.u32 warp, lane, 5;
and.b32 warp, warp, 3;
and.b32 lane, lane, {each} - 1;
mad.lo.u32 place, warp, {each}, lane;
setp.lt.s32 inside, place, $3;
add.u32 place, place, $2;
setp.lt.and.s32 inside, place, {end}, inside;
mad.wide.u32 at, place, 4, $1;
mov.b32 $0, -1;
@inside ld.global.b32 $0, [at];
}}"""


def _copies(each: int, lines: int, shape: tuple[int, int], size: int) -> str:
    """Returns the PTX of `copy_rows`, where a warp copies `each` rows of `lines` lines; an element has `size` bytes."""
    # The operands of the PTX are x, the source of this thread, the stage and the column.
    limit, width = shape
    code = f"""{{
.reg .b32 lane, warp, sub, chunk, place, row, bytes, left, to0, to1;
.reg .b64 from, at;
.reg .pred real, inside<{lines}>;
mov.u32 lane, %tid.x;
shr.u32 warp, lane, 5;
and.b32 warp, warp, {WARPS - 1};
and.b32 lane, lane, {LANES - 1};
shr.u32 sub, lane, 3;
and.b32 chunk, lane, {BOX - 1};
mad.wide.u32 from, chunk, {CHUNK}, $0;
mad.wide.u32 from, $3, {size}, from;
xor.b32 place, chunk, sub;
mul.lo.u32 place, place, {CHUNK};
mad.lo.u32 place, sub, {LINE}, place;
mad.lo.u32 warp, warp, {each * lines * LINE}, $2;
add.u32 to0, place, warp;
xor.b32 place, place, {LINE // 2};
add.u32 to1, place, warp;
add.u32 to1, to1, {BOX // 2 * LINE};
sub.u32 left, {width}, $3;
"""
    edge = width * size % (lines * LINE) != 0
    if edge:
        for line in range(lines):
            code += f"setp.gt.s32 inside{line}, left, {line * LINE // size};\n"
    for step in range(each // 4):  # rows 4 * step + sub of the warp
        code += f"""add.u32 place, sub, {4 * step};
shfl.sync.idx.b32 row, $1, place, {LANES - 1}, 0xffffffff;
setp.lt.u32 real, row, {limit};
selp.b32 row, row, 0, real;
mad.wide.u32 at, row, {width * size}, from;
selp.b32 bytes, {CHUNK}, 0, real;
"""
        for line in range(lines):
            size_of_copy = "bytes"
            if edge:
                code += f"selp.b32 left, bytes, 0, inside{line};\n"
                size_of_copy = "left"
            target = f"to{step % 2} + {(step // 2 * lines + line) * BOX * LINE}"
            source = f"at + {line * LINE}"
            code += f"cp.async.cg.shared.global.L2::128B [{target}], [{source}], {CHUNK}, {size_of_copy};\n"
    return code + "}"
