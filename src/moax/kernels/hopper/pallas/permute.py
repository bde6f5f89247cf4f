"""The kernels of permute and unpermute: gathers of rows, and weighted sums of gathered rows.

    gather_rows   out[n] = x[gather_idx[n]]                                    0 where gather_idx[n] >= R
    gather_sum    y[r]   = sum_k weights[r, k] rows[scatter_idx[r, k]]         over the indices below N

With gather_idx (2, 0) and R = 3, out[0] is x[2] and out[1] is x[0]. A row is contiguous, so one bulk copy moves it
through SMEM, whatever its width, and no thread reads it. A block of threads has several rows in flight, and an SM has
several blocks of threads.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Shaped

from moax.checks import Unsupported
from moax.kernels.groups import align_up
from moax.kernels.hopper.formats import HALF, Blocks
from moax.kernels.hopper.pallas.ptx import IN_BOUNDS, THREADS, launch, trace_once

# A block of threads has so many bytes in flight; five or six blocks fill an SM.
IN_FLIGHT = 32 * 1024
MOST_COPIES = 16  # the most copies of a block of threads, whose loop is unrolled
MOST_BYTES = 200 * 1024  # the most bytes of SMEM


@trace_once
def gather_rows(
    x: Shaped[Array, "R H"], gather_idx: Int[Array, " N"], blocks: Blocks | None,
) -> Shaped[Array, "N H"]:  # fmt: skip
    """out[n] = x[gather_idx[n]], 0 where gather_idx[n] >= R.

    Args:
      x: [R, H] of any dtype, with rows of a multiple of 16 bytes.
      gather_idx: [N] i32, not negative; N is a multiple of 64.
      blocks: the blocks of the result. Rows past the last group are not written. None writes all rows.

    Raises:
      Unsupported: the rows have another size, or N is no multiple of 64.
    """
    received, width = x.shape
    row = _row_bytes("x", x)
    if gather_idx.shape[0] % HALF:
        size = gather_idx.shape[0]
        raise Unsupported(f"gather_idx has {size} rows; the kernel takes multiples of {HALF}")
    if row > MOST_BYTES:
        raise Unsupported(f"x has rows of {row} bytes; the kernel takes at most {MOST_BYTES}")
    count = _rows_at_once(HALF, 1, row)
    vector = _vector(width, x.dtype.itemsize)
    held = align_up(width, vector * THREADS)

    def gather_rows(x, gather_idx, starts, out, *, buffer, zero, arrived):
        start = lax.axis_index("i") * count

        def body():
            sources = [gather_idx[start + k] for k in range(count)]
            for k in range(count):
                # This is a branch and no predicate, because the kernel must not address a row that does not exist.
                @pl.when(sources[k] < received)
                def _(k=k):
                    row = x.at[sources[k]]
                    plgpu.copy_gmem_to_smem(row, buffer.at[k], arrived.at[k], oob_mode=IN_BOUNDS)

            @pl.when(functools.reduce(jnp.maximum, sources) >= received)
            def _():
                layout = plgpu.Layout.WG_STRIDED((held,), vector)
                zero[...] = plgpu.layout_cast(jnp.zeros((held,), x.dtype), layout)
                plgpu.commit_smem()

            for k in range(count):

                @pl.when(sources[k] < received)
                def _(k=k):
                    plgpu.barrier_wait(arrived.at[k])
                    plgpu.copy_smem_to_gmem(buffer.at[k], out.at[start + k])

                @pl.when(sources[k] >= received)
                def _(k=k):
                    plgpu.copy_smem_to_gmem(zero.at[pl.ds(0, width)], out.at[start + k])

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        if starts is None:
            return body()
        pl.when(start < starts[starts.shape[0] - 1] * HALF)(body)

    scratch: dict[str, Any] = dict(
        buffer=plgpu.SMEM((count, width), x.dtype),
        zero=plgpu.SMEM((held,), x.dtype),
        arrived=plgpu.Barrier(num_barriers=count),
    )
    out = jax.ShapeDtypeStruct((gather_idx.shape[0], width), x.dtype)
    run = launch(gather_rows, out, dict(i=gather_idx.shape[0] // count), scratch, warpgroups=None)
    return run(x, gather_idx, None if blocks is None else blocks.first_half)


@trace_once
def gather_sum(
    rows: Float[Array, "N H"], scatter_idx: Int[Array, "R K"],
    weights: Float[Array, "R K"] | None = None,
) -> Float[Array, "R H"]:  # fmt: skip
    """y[r] = sum_k weights[r, k] rows[scatter_idx[r, k]], summed in f32, in the dtype of rows.

    Args:
      rows: [N, H] bf16 or f32, with rows of a multiple of 16 bytes. A row without an index is not read.
      scatter_idx: [R, K] i32, not negative. An index from N on adds nothing.
      weights: [R, K] f32; None means 1.

    Raises:
      Unsupported: the rows have another dtype or another size.
    """
    size, width = rows.shape
    results, terms = scatter_idx.shape
    _row_bytes("rows", rows)
    if rows.dtype not in (jnp.bfloat16, jnp.float32):
        raise Unsupported(f"rows are {rows.dtype}; the kernel sums bfloat16 and float32")
    part = _part(width, rows.dtype.itemsize, terms)
    parts = width // part
    count = _rows_at_once(results, terms, part * rows.dtype.itemsize)
    vector = _vector(part, rows.dtype.itemsize)
    # Columns past `part` may hold anything and are not copied back.
    held = align_up(part, vector * THREADS)
    layout = plgpu.Layout.WG_STRIDED((held,), vector)

    def gather_sum(rows, scatter_idx, weights, out, *, buffer, arrived):
        block = lax.axis_index("block")
        start = lax.div(block, parts) * count
        columns = pl.ds(lax.rem(block, parts) * part, part)
        indices = [[scatter_idx[start + r, k] for k in range(terms)] for r in range(count)]
        for r in range(count):
            for k in range(terms):

                @pl.when(indices[r][k] < size)
                def _(r=r, k=k):
                    row = rows.at[indices[r][k], columns]
                    target = buffer.at[r, k, pl.ds(0, part)]
                    plgpu.copy_gmem_to_smem(row, target, arrived.at[r], oob_mode=IN_BOUNDS)

                @pl.when(indices[r][k] >= size)
                def _(r=r):
                    plgpu.barrier_arrive(arrived.at[r])

        for r in range(count):
            factors = [1.0] * terms
            if weights is not None:
                factors = [weights[start + r, k] for k in range(terms)]
            plgpu.barrier_wait(arrived.at[r])
            total = plgpu.layout_cast(jnp.zeros((held,), jnp.float32), layout)
            for k in range(terms):

                def add(total, r=r, k=k, factors=factors):
                    row = plgpu.load(buffer.at[r, k], layout=layout).astype(jnp.float32)
                    return total + row * factors[k]

                total = lax.cond(indices[r][k] < size, add, lambda total: total, total)
            buffer[r, 0] = total.astype(rows.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer.at[r, 0, pl.ds(0, part)], out.at[start + r, columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    scratch = dict(
        buffer=plgpu.SMEM((count, terms, held), rows.dtype),
        arrived=plgpu.Barrier(num_arrivals=terms, num_barriers=count),
    )
    # CUDA takes 65535 blocks at most along a second dim.
    grid = dict(block=results // count * parts)
    out = jax.ShapeDtypeStruct((results, width), rows.dtype)
    run = launch(gather_sum, out, grid, scratch, warpgroups=None)
    return run(rows, scatter_idx, weights)


def _row_bytes(name: str, x) -> int:
    """Returns the bytes of a row of x. Raises Unsupported unless they are a multiple of 16."""
    row = x.shape[1] * x.dtype.itemsize
    if row % 16:
        raise Unsupported(f"{name} has shape {x.shape} {x.dtype}: rows of {row} bytes, no multiple of 16")
    return row


def _rows_at_once(total: int, terms: int, copy: int) -> int:
    """Returns the rows, of `terms` copies of `copy` bytes, of a block of threads: a power of 2 dividing `total`."""
    limit = max(1, min(MOST_COPIES, IN_FLIGHT // copy) // terms)
    return next(n for n in (16, 8, 4, 2, 1) if total % n == 0 and n <= limit)


def _part(width: int, size: int, terms: int) -> int:
    """Returns the columns of a block of threads: the most that divide the width and fit `IN_FLIGHT`."""
    parts = [width // n for n in range(1, width + 1) if width % n == 0]
    parts = [part for part in parts if part * size % 16 == 0]
    return next((part for part in parts if terms * part * size <= IN_FLIGHT), parts[-1])


def _vector(part: int, size: int) -> int:
    """Returns the elements of a vector of 16 bytes, or fewer where over a quarter of the threads would be idle."""
    whole = 16 // size
    for vector in (whole, whole // 2):
        if align_up(part, vector * THREADS) <= 1.25 * part:
            return vector
    return max(whole // 4, 1)
