"""The kernel of the transport `one_sided`: it writes rows into the memory of peers, over NVLink.

    out[p][i + shift[p]] = x[source[i]]        end[p - 1] <= i < end[p]; other rows of out may hold anything

With ends (2, 4) and shifts (0, -2), rows 0 and 1 go to rank 0 as rows 0 and 1, and rows 2 and 3 go to rank 1 as rows 0
and 1. One bulk copy reads a row from this rank's memory into SMEM, and another writes it to the peer. There is no send
buffer, no thread reads a row, and the wire carries rows alone. Rows of several arrays travel in one pass.

XLA makes the devices of the mesh wait for one another before the kernel begins. Each rank signals every peer of its
group when its rows have arrived. It then waits for the signals of all peers, because no rank may return while rows are
still on their way to its memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from moax.checks import Unsupported
from moax.kernels.hopper.pallas.ptx import IN_BOUNDS
from moax.mesh.collectives import with_vma_of_inputs

SMS = 32  # the multiprocessors that exchange; matmuls of other streams have the others
WARPGROUPS = 4  # the warpgroups of a block of threads, each with rows of its own
MOST_BYTES = 192 * 1024  # the most bytes of SMEM
MOST_COPIES = 8  # the most rows that a warpgroup has in flight, in an unrolled loop


@with_vma_of_inputs
def put_rows(
    arrays: Sequence[Array], source: Int[Array, " C"] | None, places: Int[Array, "ways 2 ranks"],
    way: int, out_rows: int, axes: tuple[tuple[str, int], ...], *, sms: int = SMS,
) -> tuple[Array, ...]:  # fmt: skip
    """out[i + shift[p]] of rank p = x[source[i]], for end[p - 1] <= i < end[p] and each array x.

    Args:
      arrays: each [T, W] of any dtype, with rows of a multiple of 16 bytes.
      source: [C] i32, the row of x that is sent as row i; None sends row i itself.
      places: [ways, 2, ranks] i32, (shift, end) of each rank for each way; see `SendPlan`. Ranks count row-major over
        `axes`. Ends ascend, to C at most.
      way: the index of the way in `places`.
      out_rows: the rows of each result.
      axes: (name, size) of the mesh axes of the group that exchanges; without any, rows stay on this device.
      sms: the multiprocessors that copy.

    Returns:
      [out_rows, W] for each array: the rows that the ranks of the group, this one included, wrote here. Other rows may
      hold anything. No two ranks may write the same row.

    Raises:
      ValueError: places does not fit the axes.
      Unsupported: the rows have another size.
    """
    sizes = [x.shape[1] * x.dtype.itemsize for x in arrays]
    for x, size in zip(arrays, sizes, strict=True):
        if size % 16:
            raise Unsupported(f"rows of shape {x.shape} {x.dtype} have {size} bytes, no multiple of 16")
    copies = min(MOST_COPIES, MOST_BYTES // (WARPGROUPS * sum(sizes)))
    if not copies:
        largest = MOST_BYTES // WARPGROUPS
        raise Unsupported(f"rows of {sum(sizes)} bytes; the kernel takes at most {largest}")
    ranks = math.prod(size for _, size in axes)
    workers = sms * WARPGROUPS
    if places.shape[1:] != (2, ranks):
        raise ValueError(f"places has shape {places.shape}; for {axes} it must be (ways, 2, {ranks})")

    def put_rows(arrays, source, places, outs, *, buffers, arrived, done):
        warpgroup = lax.axis_index("warpgroup")
        worker = lax.axis_index("sm") * WARPGROUPS + warpgroup
        shifts, ends = ([places[way, n, p] for p in range(ranks)] for n in range(2))
        # Neighbouring rows go to one peer. Each worker takes neighbouring rows, so that all peers receive at any time.
        share = lax.div(ends[-1] + workers - 1, jnp.int32(workers))
        start = worker * share
        end = jnp.minimum(start + share, ends[-1])

        def batch(n, _):
            rows = [start + n * copies + k for k in range(copies)]
            sources = rows
            if source is not None:
                sources = [source[jnp.minimum(i, source.shape[0] - 1)] for i in rows]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for k in range(copies):
                # This is a branch and no predicate, because the kernel must not address a row that does not exist.
                @pl.when(rows[k] < end)
                def _(k=k):
                    for x, buffer in zip(arrays, buffers, strict=True):
                        target = buffer.at[warpgroup, k]
                        landed = arrived.at[warpgroup * copies + k]
                        plgpu.copy_gmem_to_smem(x.at[sources[k]], target, landed, oob_mode=IN_BOUNDS)

            for k in range(copies):

                @pl.when(rows[k] < end)
                def _(k=k):
                    plgpu.barrier_wait(arrived.at[warpgroup * copies + k])
                    peer, row = place(rows[k], ends, shifts)
                    for out, buffer in zip(outs, buffers, strict=True):
                        peer_out = plgpu.remote_ref(out, coordinates(peer, axes)) if axes else out
                        plgpu.copy_smem_to_gmem(buffer.at[warpgroup, k], peer_out.at[row])

        batches = lax.div(jnp.maximum(end - start, 0) + copies - 1, jnp.int32(copies))
        lax.fori_loop(0, batches, batch, None)
        plgpu.wait_smem_to_gmem(0)
        if axes:
            # The signals go one by one: of parallel signals, jax 0.11.2 puts the fence after the first signal.
            for rank in range(ranks):
                pl.semaphore_signal(done, device_id=coordinates(jnp.int32(rank), axes))
            pl.semaphore_wait(done, ranks * WARPGROUPS, decrement=False)

    scratch: dict[str, Any] = dict(
        buffers=[plgpu.SMEM((WARPGROUPS, copies, x.shape[1]), x.dtype) for x in arrays],
        arrived=plgpu.Barrier(num_arrivals=len(arrays), num_barriers=WARPGROUPS * copies),
        done=plgpu.SemaphoreType.REGULAR if axes else None,
    )

    # Blocks of threads wait for the blocks of peers, so all of them must run at one time.
    @sequential_vmap
    def launch(arrays, source, places):
        (outs,) = plgpu.kernel(
            put_rows,
            out_type=([jax.ShapeDtypeStruct((out_rows, x.shape[1]), x.dtype) for x in arrays],),
            grid=(sms,),
            grid_names=("sm",),
            num_threads=WARPGROUPS,
            thread_name="warpgroup",
            scratch_types=scratch,
        )(arrays, source, places)
        return outs

    return tuple(launch(list(arrays), source, places))


def place(i, ends: Sequence, shifts: Sequence) -> tuple[Any, Any]:
    """Returns the rank that row i goes to, and its row on that rank."""
    peer = jnp.int32(0)
    shift = shifts[0]
    for p in range(1, len(ends)):
        peer = jnp.where(i < ends[p - 1], peer, p)
        shift = jnp.where(i < ends[p - 1], shift, shifts[p])
    return peer, i + shift


def coordinates(rank, axes: tuple[tuple[str, int], ...]) -> Any:
    """Returns the index of a rank along each axis: rank 5 of the axes (("a", 2), ("b", 4)) has {b: 1, a: 1}."""
    indices = {}
    for name, size in reversed(axes):
        indices[name] = lax.rem(rank, jnp.int32(size))
        rank = lax.div(rank, jnp.int32(size))
    return indices
