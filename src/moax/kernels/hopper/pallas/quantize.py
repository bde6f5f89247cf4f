"""Kernels that quantize to FP8: rows for fprop or dgrad, for wgrad, or both, and weights.

    scale[b] = to_scale(max |x| over block b)
    data     = x * (1 / scale), rounded,      x[r, c] ~ data[r, c] * scale[r, c / 128]

FP8 matmuls take K-major operands alone, so these kernels also transpose an operand whose rows a matmul contracts. A
kernel loads a tile of 128 x 128 elements into SMEM once and reads halves of it in both directions: as it lies for
1 x 128 blocks, and transposed for 128 x 1 blocks. With `gather_idx` a kernel gathers the rows as it loads them. As in
`moax.kernels.scales`, a NaN or Inf becomes NaN in its own element and does not enter a scale, and a block of zeros has
scale 1.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moax.checks import Unsupported
from moax.kernels.groups import align_up
from moax.kernels.hopper.formats import BLOCK, HALF, Blocks, KMajorFp8
from moax.kernels.hopper.pallas.ptx import launch, trace_once
from moax.kernels.scales import DTYPES, to_scale
from moax.mesh.collectives import varying
from moax.recipe import Format


@trace_once
def quantize_rows(
    x: Float[Array, "rows C"], blocks: Blocks, *, gather_idx: Int[Array, " M"] | None = None,
    format: Format = Format(), fprop_or_dgrad: bool = True, wgrad: bool = True,
) -> tuple[KMajorFp8 | None, KMajorFp8 | None]:  # fmt: skip
    """Quantizes rows for fprop or dgrad (1 x 128 blocks) and for wgrad (128 x 1 blocks, transposed).

    Args:
      x: [M, C] bf16 or f32, M a multiple of 128 and C of 16. With `gather_idx` it is [R, C], with any R.
      blocks: the blocks of the rows. Rows of padding become 0 and do not enter a scale; blocks without rows are not
        written.
      gather_idx: [M] i32, not negative: row m is x[gather_idx[m]], and 0 where gather_idx[m] >= R, as it must be in
        padding.
      format: the dtype, and whether scales are powers of two; all scales are f32.
      fprop_or_dgrad: whether to make the operand for matmuls over C, fprop of x or dgrad of dy.
      wgrad: whether to make the operand for matmuls over M.

    Returns:
      for fprop or dgrad: data [M, C], scale [ceil(C / 128), M]; None if `fprop_or_dgrad` is False.
      for wgrad: data [C, M], scale [M / 128, C rounded up to 128]; None if `wgrad` is False.

    Raises:
      Unsupported: the kernel does not take the shape or the dtype of x.
    """
    check_source("x", x, 1)
    width = x.shape[1]
    x = _pad(x, 1)
    alike = not varying(x)
    size = x.shape[0] if gather_idx is None else gather_idx.shape[0]
    # Mosaic drops a dim of one row, and a row past its end would be row 0.
    if gather_idx is not None and x.shape[0] == 1:
        x = jnp.pad(x, ((0, 1), (0, 0)))
    if size % BLOCK:
        raise Unsupported(f"x has {size} rows; the kernel takes multiples of {BLOCK}")
    padded = align_up(width, BLOCK)
    data = {}
    scales = {}
    if fprop_or_dgrad:
        scales["fprop_or_dgrad"] = jax.ShapeDtypeStruct((padded // BLOCK, size), jnp.float32)
        data["fprop_or_dgrad"] = jax.ShapeDtypeStruct((size, x.shape[1]), DTYPES[format.dtype])
    if wgrad:
        scales["wgrad"] = jax.ShapeDtypeStruct((size // BLOCK, padded), jnp.float32)
        data["wgrad"] = jax.ShapeDtypeStruct((x.shape[1], size), DTYPES[format.dtype])
    uses = tuple(data)

    def quantize_rows(x, gather_idx, starts, counts, data, scales, *, tile, buffers, loaded, met):
        block = lax.axis_index("i")
        j = lax.axis_index("j")

        @pl.when(counts[block] > 0)
        def _():
            i = lax.div(starts[block], BLOCK // HALF)
            if gather_idx is None:
                load_tiles([(x.at[pl.ds(i * BLOCK, BLOCK), pl.ds(j * BLOCK, BLOCK)], tile)], loaded)
                zero_tail([tile], counts[block], (0, 1), met)
            else:
                gather_tile(x, gather_idx, i * BLOCK, j * BLOCK, tile, loaded, alike)
            # Gathered rows lie one after the other in SMEM. A load takes two wavefronts, and columns cannot be sliced.
            sliced = gather_idx is None
            for n, (use, half) in enumerate(itertools.product(uses, (0, 1))):
                if use == "fprop_or_dgrad":
                    value = rows_of(tile, half, optimized=sliced)
                    row, column = i, j
                else:
                    value = columns_of(tile, half, sliced)
                    row, column = j, i
                target = Target(data[use], scales[use], buffers[n // 2])
                row = row * BLOCK + half * HALF
                put(value, target, row, column, 0, format, wait=n > 0)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    grid = dict(i=size // BLOCK, j=padded // BLOCK)
    scratch = _scratch(x, data.values(), gather_idx is not None)
    run = launch(quantize_rows, (data, scales), grid, scratch)
    data, scales = run(x, gather_idx, blocks.start, blocks.rows)
    operand = wgrad_operand = None
    if fprop_or_dgrad:
        operand = KMajorFp8(data["fprop_or_dgrad"][:, :width], scales["fprop_or_dgrad"])
    if wgrad:
        wgrad_operand = KMajorFp8(data["wgrad"][:width], scales["wgrad"])
    return operand, wgrad_operand


@trace_once
def quantize_weight(w: Float[Array, "E R C"], *, format: Format = Format(), transposed: bool) -> KMajorFp8:
    """Quantizes weights in 128 x 128 blocks, as they lie or transposed.

    Args:
      w: [E, R, C] bf16 or f32, R and C multiples of 16.
      format: see `quantize_rows`.
      transposed: whether the result is transposed.

    Returns:
      data [E, R, C], scale [E, ceil(R / 128), ceil(C / 128)]; transposed, data [E, C, R] and scales like it.

    Raises:
      Unsupported: the kernel does not take the shape or the dtype of w.
    """
    check_source("w", w, 2)
    experts, rows, width = w.shape
    source = _pad(_pad(w, 1), 2)
    grid = dict(e=experts, i=-(-rows // BLOCK), j=-(-width // BLOCK))

    def quantize_weight(w, data, scales, *, tile, buffers, loaded, met, peaks):
        e, i, j = (lax.axis_index(name) for name in "eij")
        load_tiles([(w.at[e, pl.ds(i * BLOCK, BLOCK), pl.ds(j * BLOCK, BLOCK)], tile)], loaded)
        row, column = i, j
        read = rows_of
        if transposed:
            row, column = j, i
            read = columns_of
        for half in (0, 1):
            peak = to_scale(amax(rows_of(tile, half)), format, of_zero=0.0)
            peaks[pl.ds(half * HALF, HALF)] = peak
        meet(met)
        # In this layout each warp holds all peaks, so that each warp takes the maximum by itself.
        peak = jnp.max(plgpu.load(peaks, layout=plgpu.Layout.WGMMA.reduce(0)))
        scale = jnp.where(peak > 0.0, peak, 1.0)
        scales[e, row, column] = scale
        for half in (0, 1):
            value = read(tile, half)
            target = Target(data.at[e], None, buffers[0])
            put(value, target, row * BLOCK + half * HALF, column, 0, format, scale, wait=half > 0)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    order = -1 if transposed else 1
    _, *dims = source.shape
    blocks = [grid["i"], grid["j"]]
    rows, width = [rows, width][::order]
    data = jax.ShapeDtypeStruct((experts, *dims[::order]), DTYPES[format.dtype])
    scales = jax.ShapeDtypeStruct((experts, *blocks[::order]), jnp.float32)
    scratch = _scratch(source, [data]) | {"peaks": plgpu.SMEM((BLOCK,), jnp.float32)}
    data, scales = launch(quantize_weight, (data, scales), grid, scratch)(source)
    return KMajorFp8(data[:, :rows, :width], scales)


def check_source(name: str, x, dims: int) -> None:
    """Raises Unsupported unless x is bf16 or f32 with its last `dims` dims multiples of 16."""
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        raise Unsupported(f"{name} is {x.dtype}; the kernel quantizes bfloat16 and float32")
    if any(width % 16 for width in x.shape[-dims:]):  # TMA strides over multiples of 16 bytes
        raise Unsupported(f"{name} has shape {x.shape}; its last {dims} dims must be multiples of 16")


def tile_buffer(dtype, width: int, rows: int = BLOCK, columns: int = BLOCK, together: int = 8):
    """Returns SMEM for a tile of an array of this width; one copy brings `together` rows at least."""
    size = jnp.dtype(dtype).itemsize
    # TMA needs boxes that divide the width.
    box = next(n for n in (128, 64, 32) if width * size % n == 0)
    transforms = (plgpu.TilingTransform((together, box // size)), plgpu.SwizzleTransform(box))
    return plgpu.SMEM((rows, columns), dtype, transforms=transforms)


def load_tiles(copies, loaded) -> None:
    """Copies each source to its tile and waits for all copies. Elements past the edge of a source are 0."""

    @pl.when(lax.axis_index("wg") == 0)
    def _():
        for source, tile in copies:
            plgpu.copy_gmem_to_smem(source, tile, loaded)

    plgpu.barrier_wait(loaded)


def gather_tile(x, gather_idx, start, column, tile, loaded, alike: bool) -> None:
    """Copies 128 rows x[gather_idx[start]], x[gather_idx[start + 1]], ... to the tile; a row past the end of x is 0."""

    def copy(warp):
        # All four warps of a warpgroup issue the instructions of a copy, so each copies a fourth of the rows.
        sources = [gather_idx[start + warp * (BLOCK // 4) + k] for k in range(BLOCK // 4)]
        for k, n in enumerate(sources):
            row = tile.at[pl.ds(warp * (BLOCK // 4) + k, 1)]
            plgpu.copy_gmem_to_smem(x.at[pl.ds(n, 1), pl.ds(column, BLOCK)], row, loaded)

    # JAX admits no map over warps where a user's `shard_map` types x as varying.
    if alike:
        plgpu.warp_map(copy)
    else:
        lax.fori_loop(0, 4, lambda warp, _: copy(warp), None)
    plgpu.barrier_wait(loaded)


def meet(barrier) -> None:
    """Waits until all warpgroups have arrived at the barrier."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def zero_tail(tiles, count, halves, barrier) -> None:
    """Writes 0 into the rows of the tiles from `count` on, in the `halves` of this warpgroup."""

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
    """Returns half of the rows of a tile as f32 [64, 128]: rows 0 to 63, or 64 to 127."""
    rows = tile.at[pl.ds(half * HALF, HALF)]
    return plgpu.load(rows, layout=plgpu.Layout.WGMMA, optimized=optimized).astype(jnp.float32)


def columns_of(tile, half, sliced: bool = True):
    """Returns half of the columns of a tile, transposed, f32 [64, 128].

    `sliced` loads a slice of the tile. The swizzle counts from the beginning of the slice, which must then be a
    multiple of 1024 bytes. Otherwise the kernel loads all columns, and the compiler drops the loads of the other half.
    """
    if sliced:
        columns = tile.at[:, pl.ds(half * HALF, HALF)].T
        value = plgpu.load(columns, layout=plgpu.Layout.WGMMA, optimized=False)
    else:
        value = plgpu.load(tile.T, layout=plgpu.Layout.WGMMA, optimized=False)
        value = value[half * HALF : (half + 1) * HALF]
    return value.astype(jnp.float32)


def amax(value):
    """Returns the maximum of |value| in each row of [64, 128], over the finite elements."""
    # The product drops the sign, and the sum wraps NaN and Inf around to the smallest numbers. These are two integer
    # instructions for each element.
    bits = lax.bitcast_convert_type(value, jnp.uint32)
    wrap = jnp.uint32(1 << 24)
    largest = jnp.max(bits * jnp.uint32(2) + wrap, axis=1)
    largest = jnp.maximum(largest, wrap) - wrap
    return lax.bitcast_convert_type(largest >> 1, jnp.float32)


class Target(NamedTuple):
    """Where `put` writes: data [R, C] and scales [C / 128, R] in GMEM, and the buffer in SMEM that data pass."""

    data: Any
    scales: Any
    buffer: Any


def put(
    value, target: Target, row, column_block, slot, format: Format, fixed=None, wait=False,
) -> None:  # fmt: skip
    """Quantizes half a block [64, 128] f32 by its rows and starts its copy to GMEM, up to the end of data.

    Args:
      value: [64, 128] f32.
      target: see `Target`.
      row, column_block: the first of the 64 rows, and the block of 128 columns, in data.
      slot: the half of the buffer that takes the values.
      format: see `quantize_rows`.
      fixed: the scale, which is then not written; None computes one for each row.
      wait: whether earlier copies may still read the buffer.
    """
    data, scales, buffer = target
    rows = pl.ds(row, HALF)
    if fixed is None:
        scale = to_scale(amax(value), format)
        inverse = 1.0 / scale
        scales[column_block, rows] = scale
        inverse = lax.broadcast_in_dim(inverse, value.shape, [0])
    else:
        inverse = 1.0 / fixed
    # The conversion would turn an Inf into a number. The product with 0 turns it into NaN, in one multiply-add.
    value = (value * inverse + value * 0.0).astype(data.dtype)
    if wait:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    half = buffer.at[pl.ds(slot * HALF, HALF)]
    half[...] = value
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(half, data.at[rows, pl.ds(column_block * BLOCK, BLOCK)])


def _scratch(x, data, gathered: bool = False) -> dict:
    """Returns the shared memory of a kernel that quantizes tiles of x to these results."""
    # A buffer of half a tile serves all results in turn, so that an SM holds four blocks of threads.
    buffers: Any = [tile_buffer(result.dtype, result.shape[-1], HALF) for result in data]
    if len(buffers) > 1:
        buffers = plgpu.RefUnion(*buffers)
    if gathered:
        tile = tile_buffer(x.dtype, x.shape[-1], together=1)
        loaded = plgpu.Barrier(num_arrivals=BLOCK)
    else:
        tile = tile_buffer(x.dtype, x.shape[-1])
        loaded = plgpu.Barrier()
    return dict(tile=tile, buffers=buffers, loaded=loaded, met=plgpu.Barrier())


def _pad(x, dim: int):
    """Returns x with zeros along `dim`, up to a multiple of 32, because a row of 16 bytes has no swizzle."""
    if x.shape[dim] % 32 == 0:
        return x
    padding = [(0, 0)] * x.ndim
    padding[dim] = (0, 16)
    return jnp.pad(x, padding)
