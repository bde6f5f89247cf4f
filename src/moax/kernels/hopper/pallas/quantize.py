"""Quantize to FP8 in one read of the source, for products over its columns, over its rows, or both; and back.

    scale[b] = max |x| over block b / max of the format         (rounded up to a power of two with `pow2`)
    data     = round_to_format(x * (1 / scale))

FP8 products take K-major operands only, so what is contracted over its rows is quantized and transposed here. A tile
of 128 x 128 elements is loaded into SMEM once and read from there in both directions: as it lies for 1 x 128 blocks,
transposed for 128 x 1. With `source` its rows are gathered as they are loaded, so that rows sorted by expert never lie
in memory unquantized. As in `moax.ops.quantize`, a NaN or Inf is NaN in its own element and no part of a scale, and an
all-zero block has scale 1.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moax.errors import Unsupported
from moax.groups import align_up
from moax.kernels.hopper.formats import BLOCK, Blocks, KMajorFp8

HALF = BLOCK // 2  # rows, or columns, that a warpgroup holds at a time: 64 x 128 values in registers
TINY = 2.0**-126  # the least normal float32
AT_ONCE = 32  # rows that are gathered between two waits for their numbers


def quantize_rows(
    x: Float[Array, "rows C"],
    blocks: Blocks | None,
    *,
    source: Int[Array, " M"] | None = None,
    dtype=jnp.float8_e4m3fn,
    rows: bool = True,
    columns: bool = True,
    pow2: bool = False,
    scale: Float[Array, " 1"] | None = None,
    by_row: bool = False,
) -> tuple[KMajorFp8 | None, KMajorFp8 | None]:
    """Rows for products over their columns (1 x 128 blocks), and over themselves (128 x 1 blocks, transposed).

    Args:
      x: [M, C] bf16 or f32, M a multiple of 128, C of 16; with `source` [R, C], any R.
      blocks: which rows are real; the others quantize to zero and set no scale. Blocks past the used ones are not
        written. None: all rows are real.
      source: [M] i32, not negative: row m is x[source[m]], 0 where source[m] >= R, as in rows that are not real.
      dtype: float8_e4m3fn or float8_e5m2.
      rows, columns: which of the two to make.
      pow2: scales are rounded up to powers of two.
      scale: [1] f32, one for the whole tensor in the place of each block's own.
      by_row: the scales of rows lie row by row, [M, ceil(C / 128)].

    Returns:
      rows: data [M, C], scale [ceil(C / 128), M]. columns: data [C, M], scale [M / 128, C rounded up to 128]. None for
      what was not asked for.
    """
    check_source("x", x, 1, dtype)
    width, x = x.shape[1], _pad(x, 1)
    size = x.shape[0] if source is None else source.shape[0]
    if size % BLOCK:
        raise Unsupported(f"x has {size} rows; the kernel takes multiples of {BLOCK}")
    padded = align_up(width, BLOCK)
    shapes = {
        "rows": ((size, x.shape[1]), (size, padded // BLOCK) if by_row else (padded // BLOCK, size)),
        "columns": ((x.shape[1], size), (size // BLOCK, padded)),
    }
    wanted = [name for name, on in (("rows", rows), ("columns", columns)) if on]
    data = {name: jax.ShapeDtypeStruct(shapes[name][0], dtype) for name in wanted}
    scales = {name: jax.ShapeDtypeStruct(shapes[name][1], jnp.float32) for name in wanted if scale is None}

    def quantize_rows(x, source, counts, given, data, scales, *, tile, buffers, loaded, met):
        i, j = lax.axis_index("i"), lax.axis_index("j")

        @pl.when(counts is None or counts[i] > 0)
        def _():
            if source is None:
                load_tiles([(x.at[pl.ds(i * BLOCK, BLOCK), pl.ds(j * BLOCK, BLOCK)], tile)], loaded)
            else:
                gather_tile(x, source, i * BLOCK, j * BLOCK, tile, loaded)
            if counts is not None and source is None:
                zero_tail([tile], counts[i], (0, 1), met)
            one = None if given is None else given[0]
            # Gathered rows lie one after the other: two wavefronts a load, and no slice of columns.
            of_rows = functools.partial(rows_of, optimized=source is None)
            of_columns = functools.partial(columns_of, sliced=source is None)
            puts = [("rows", of_rows, i, j, half) for half in (0, 1)] * rows
            puts += [("columns", of_columns, j, i, half) for half in (0, 1)] * columns
            for n, (name, of, row, column, half) in enumerate(puts):
                to = data[name], scales.get(name), buffers[wanted.index(name)]
                turned = by_row and name == "rows"
                put(of(tile, half), to, row * BLOCK + half * HALF, column, 0, pow2, one, wait=n > 0, by_row=turned)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    grid, scratch = dict(i=size // BLOCK, j=padded // BLOCK), _scratch(x, data.values(), source is not None)
    run = launch(quantize_rows, (data, scales), grid, scratch)
    data, scales = run(x, source, None if blocks is None else blocks.rows, scale)
    if scale is not None:
        scales = {name: jnp.broadcast_to(scale, shapes[name][1]) for name in wanted}
    return (
        KMajorFp8(data["rows"][:, :width], scales["rows"]) if rows else None,
        KMajorFp8(data["columns"][:width], scales["columns"]) if columns else None,
    )


def quantize_weight(
    w: Float[Array, "E R C"],
    *,
    dtype=jnp.float8_e4m3fn,
    native: bool,
    transposed: bool,
    pow2: bool = False,
    scale: Float[Array, " E"] | None = None,
) -> tuple[KMajorFp8 | None, KMajorFp8 | None]:
    """Weights in 128 x 128 blocks, as they lie and transposed.

    Args:
      w: [E, R, C] bf16 or f32, R and C multiples of 16.
      dtype, pow2: as in `quantize_rows`.
      native, transposed: which of the two to make.
      scale: [E] f32, one a matrix in the place of each block's own.

    Returns:
      native: data [E, R, C], scale [E, ceil(R / 128), ceil(C / 128)]. transposed: data [E, C, R], scale
      [E, ceil(C / 128), ceil(R / 128)]. None for what was not asked for.
    """
    check_source("w", w, 2, dtype)
    (experts, rows, width), source = w.shape, _pad(_pad(w, 1), 2)
    grid = dict(e=experts, i=-(-rows // BLOCK), j=-(-width // BLOCK))
    shapes = {"native": source.shape, "transposed": (experts, *source.shape[:0:-1])}
    wanted = [name for name, on in (("native", native), ("transposed", transposed)) if on]
    data = {name: jax.ShapeDtypeStruct(shapes[name], dtype) for name in wanted}

    def quantize_weight(w, given, data, scales, *, tile, buffers, loaded, met, peaks):
        e, i, j = (lax.axis_index(name) for name in "eij")
        load_tiles([(w.at[e, pl.ds(i * BLOCK, BLOCK), pl.ds(j * BLOCK, BLOCK)], tile)], loaded)
        if given is None:
            for half in (0, 1):
                peaks[pl.ds(half * HALF, HALF)] = to_scale(amax(rows_of(tile, half)), dtype, pow2, 0.0)
            meet(met)
            # In this layout each warp holds all of it, so that each takes the maximum by itself.
            peak = jnp.max(plgpu.load(peaks, layout=plgpu.Layout.WGMMA.reduce(0)))
            fixed = jnp.where(peak > 0.0, peak, 1.0)
            scales[e, i, j] = fixed
        else:
            fixed = given[e]
        puts = [("native", rows_of, i, j, half) for half in (0, 1)] * native
        puts += [("transposed", columns_of, j, i, half) for half in (0, 1)] * transposed
        for n, (name, of, row, column, half) in enumerate(puts):
            to = data[name].at[e], None, buffers[wanted.index(name)]
            put(of(tile, half), to, row * BLOCK + half * HALF, column, 0, pow2, fixed, wait=n > 0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    scratch = _scratch(source, data.values()) | {"peaks": plgpu.SMEM((BLOCK,), jnp.float32)}
    out = (data, jax.ShapeDtypeStruct(tuple(grid.values()), jnp.float32) if scale is None else None)
    run = launch(quantize_weight, out, grid, scratch)
    data, scales = run(source, scale)
    scales = scales if scale is None else jnp.broadcast_to(scale[:, None, None], tuple(grid.values()))
    return (
        KMajorFp8(data["native"][:, :rows, :width], scales) if native else None,
        KMajorFp8(data["transposed"][:, :width, :rows], jnp.swapaxes(scales, 1, 2)) if transposed else None,
    )


def dequantize_rows(
    data: Float[Array, "R C"], words: Int[Array, "R W"], ends: Int[Array, " N"], *, dtype=jnp.bfloat16
) -> Float[Array, "R C"]:
    """data[r, c] * scale[r, c / 128], rounded once; rows from ends[-1] on may hold anything, and most are not written.

    Args:
      data: [R, C] float8_e4m3fn or float8_e5m2, R a multiple of 128, C of 32.
      words: [R, W] i32: in their first ceil(C / 128) columns the bits of the scales, f32; other columns are not read.
      ends: i32, the last of which is how many rows to read.
      dtype: of the result, bfloat16 or float32.
    """
    size, width = data.shape
    blocks = -(-width // BLOCK)
    if size % BLOCK or width % 32 or words.shape[0] != size or words.shape[1] < blocks:
        raise Unsupported(
            f"data and words have shapes {data.shape}, {words.shape}; the kernel takes multiples of {BLOCK} rows and "
            "of 32 columns, with a word for each 128 of these"
        )

    def dequantize_rows(data, words, ends, out, *, tile, wide, loaded):
        i, j = lax.axis_index("i"), lax.axis_index("j")

        @pl.when(i * BLOCK < ends[ends.shape[0] - 1])
        def _():
            load_tiles([(data.at[pl.ds(i * BLOCK, BLOCK), pl.ds(j * BLOCK, BLOCK)], tile)], loaded)
            for half in (0, 1):
                scale = words.at[pl.ds(i * BLOCK + half * HALF, HALF), j]
                scale = plgpu.load(scale, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
                scale = lax.bitcast_convert_type(scale, jnp.float32)
                value = rows_of(tile, half, optimized=False)
                value = value * lax.broadcast_in_dim(scale, value.shape, [0])
                wide[pl.ds(half * HALF, HALF)] = value.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(wide, out.at[pl.ds(i * BLOCK, BLOCK), pl.ds(j * BLOCK, BLOCK)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    scratch = dict(tile=tile_buffer(data.dtype, width), wide=tile_buffer(dtype, width), loaded=plgpu.Barrier())
    out = jax.ShapeDtypeStruct((size, width), dtype)
    return launch(dequantize_rows, out, dict(i=size // BLOCK, j=blocks), scratch)(data, words, ends)


def check_source(name: str, x, dims: int, dtype) -> None:
    """Raises Unsupported where x, its last `dims` dims, or the FP8 dtype are not what the kernels take."""
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise Unsupported(f"{name} is {x.dtype}; the kernel quantizes bfloat16 and float32")
    if dtype not in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        raise Unsupported(f"dtype={jnp.dtype(dtype).name}; the kernel quantizes to float8_e4m3fn and float8_e5m2")
    if any(width % 16 for width in x.shape[-dims:]):  # bytes of FP8, the least that TMA strides over
        raise Unsupported(f"{name} has shape {x.shape}; its last {dims} dims must be multiples of 16")


def launch(kernel, out, grid: dict[str, int], scratch: dict, warpgroups: int = 1, **params):
    """A kernel of warpgroups that share a tile. No SMEM for reductions over warps: warpgroups would share that too."""
    return plgpu.kernel(
        kernel,
        out_type=out,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=warpgroups,
        thread_name="wg",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0, **params),
    )


def tile_buffer(dtype, width: int, rows: int = BLOCK, together: int = 8):
    """SMEM for a tile of an array of this width, laid out so that TMA's boxes of columns divide the width.
    `together`: rows that one copy brings at least."""
    size = jnp.dtype(dtype).itemsize
    box = next(n for n in (128, 64, 32) if width * size % n == 0)
    transforms = (plgpu.TilingTransform((together, box // size)), plgpu.SwizzleTransform(box))
    return plgpu.SMEM((rows, BLOCK), dtype, transforms=transforms)


def load_tiles(copies, loaded) -> None:
    """Copies each (source, tile), and waits for all. What is past the edge of the source is 0."""

    @pl.when(lax.axis_index("wg") == 0)
    def _():
        for source, tile in copies:
            plgpu.copy_gmem_to_smem(source, tile, loaded)

    plgpu.barrier_wait(loaded)


def gather_tile(x, source, first, column, tile, loaded) -> None:
    """Copies the rows x[source[first:][:128]], 0 past the end of x, and waits for all."""

    def some(n, _):
        at = [source[first + n * AT_ONCE + k] for k in range(AT_ONCE)]
        for k in range(AT_ONCE):
            row = tile.at[pl.ds(n * AT_ONCE + k, 1)]
            plgpu.copy_gmem_to_smem(x.at[pl.ds(at[k], 1), pl.ds(column, BLOCK)], row, loaded)

    lax.fori_loop(0, BLOCK // AT_ONCE, some, None)
    plgpu.barrier_wait(loaded)


def meet(barrier) -> None:
    """Waits for the other warpgroup."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def zero_tail(tiles, count, halves, barrier) -> None:
    """Zeros the rows of the tiles from `count` on; this warpgroup those of its halves."""

    @pl.when(count < BLOCK)
    def _():
        for tile in tiles:
            for half in halves:
                rows = tile.at[pl.ds(half * HALF, HALF)]
                value = plgpu.load(rows, layout=plgpu.Layout.WGMMA)
                index = lax.broadcasted_iota(jnp.int32, value.shape, 0) + half * HALF
                rows[...] = jnp.where(index < count, value, jnp.zeros_like(value))
        meet(barrier)


def rows_of(tile, half, optimized: bool = True):
    """Half of the rows of a tile, f32 [64, 128]."""
    rows = tile.at[pl.ds(half * HALF, HALF)]
    return plgpu.load(rows, layout=plgpu.Layout.WGMMA, optimized=optimized).astype(jnp.float32)


def columns_of(tile, half, sliced: bool = True):
    """Half of the columns of a tile, transposed, f32 [64, 128].

    sliced: loads a slice of the tile. Its swizzle is reckoned from where the slice begins, so that must be a multiple
    of 1024 bytes; otherwise all columns are named, and the compiler drops the loads of the other half.
    """
    columns = (tile.at[:, pl.ds(half * HALF, HALF)] if sliced else tile).T
    value = plgpu.load(columns, layout=plgpu.Layout.WGMMA, optimized=False)
    return (value if sliced else value[half * HALF : (half + 1) * HALF]).astype(jnp.float32)


def amax(value):
    """Of each row of [64, 128], without what is not finite."""
    # Without the sign, and with what is not finite wrapped around to the least: two integer instructions an element.
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    most = jnp.max(bits * jnp.uint32(2) + jnp.uint32(1 << 24), axis=1)
    return lax.bitcast_convert_type((jnp.maximum(most, jnp.uint32(1 << 24)) - jnp.uint32(1 << 24)) >> 1, jnp.float32)


def to_scale(amax, dtype, pow2: bool, of_zero: float = 1.0):
    """The scales of blocks with these amax; `of_zero` where that is zero, or too small to divide by."""
    scale = amax * (1.0 / float(jnp.finfo(dtype).max))
    scale = jnp.where(scale < TINY, of_zero, scale)
    if not pow2:
        return scale
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    return lax.bitcast_convert_type((bits + 0x7FFFFF) & ~0x7FFFFF, jnp.float32)


def put(value, to, first, column_block, slot, pow2: bool, given=None, wait: bool = False, by_row: bool = False) -> None:
    """Quantizes half a block [64, 128] by its rows, and starts its copy to GMEM; past the end of data none is made.

    first: its first row in data. slot: which 64 rows of the buffer.
    to: data [R, C] and scale [C / 128, R] in GMEM, the buffer in SMEM. given: the scale, which is then not written.
    wait: whether copies that were started before may still read the buffer. by_row: the scales are [R, C / 128].
    """
    data, scales, buffer = to
    dtype = data.dtype
    scale = to_scale(amax(value), dtype, pow2) if given is None else given
    inverse = 1.0 / scale
    if given is None:
        at = (column_block, pl.ds(first, HALF))
        scales[at[::-1] if by_row else at] = scale
        inverse = lax.broadcast_in_dim(inverse, value.shape, [0])
    # The conversion would make a number of an Inf; a product with 0 makes it NaN, in one multiply-add.
    value = (value * inverse + value * 0.0).astype(dtype)
    if wait:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    rows = buffer.at[pl.ds(slot * HALF, HALF)]
    rows[...] = value
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(rows, data.at[pl.ds(first, HALF), pl.ds(column_block * BLOCK, BLOCK)])


def _scratch(x, data, gathered: bool = False) -> dict:
    """A tile, and half of one that the results leave through, one after the other: four blocks of threads an SM."""
    buffers = [tile_buffer(of.dtype, of.shape[-1], HALF) for of in data]
    return dict(
        tile=tile_buffer(x.dtype, x.shape[-1], together=1 if gathered else 8),
        buffers=plgpu.RefUnion(*buffers) if len(buffers) > 1 else buffers,
        loaded=plgpu.Barrier(num_arrivals=BLOCK if gathered else 1),
        met=plgpu.Barrier(),
    )


def _pad(x, dim: int):
    """Columns of zeros up to a multiple of 32: a row of 16 bytes has no swizzle."""
    return x if x.shape[dim] % 32 == 0 else jnp.pad(x, [(0, 16 if d == dim else 0) for d in range(x.ndim)])
