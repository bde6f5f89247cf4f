"""The frame of a product's kernel: one warpgroup loads stages of operands, others multiply them, tile after tile.

The grid is persistent: a cluster of `TileConfig.cluster` thread blocks on each of the SMs walks over tiles of the
output, 64 rows by `tile_n` columns a consumer warpgroup. The producer runs ahead over the tiles' ends, so the next tile
is loaded while this one is stored. Stages are guarded by a `full` barrier (the copies arrive) and an `empty` one (the
consumers do, of every block of the cluster where a copy is shared by it).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from moax.backend import count_sms
from moax.errors import Unsupported

ROWS = 64  # of a consumer
OUT_SLOTS = 2
REGISTERS = {2: (40, 232), 3: (32, 160)}  # of a producer's and of a consumer's thread, by number of consumers


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """tile_n: columns of a tile; stages: of operands in shared memory; width: row tiles that sweep the columns
    together, so that they find the operands in L2; cluster: thread blocks, of neighbouring columns, that share rows;
    consumers: warpgroups that multiply, 64 rows each (3 in wgrad alone: elsewhere a tile is a block of 128 rows)."""

    tile_n: int
    stages: int
    width: int = 8
    cluster: int = 1
    consumers: int = 2


def swizzle_of(*rows: int) -> int:
    """The swizzle, in bytes, of operands whose contiguous dims have these sizes in bytes: the copy engine's boxes must
    divide them, and wgmma takes both operands in one swizzle."""
    found = [n for n in (128, 64, 32) if all(size % n == 0 for size in rows)]
    if not found:
        raise Unsupported(f"contiguous dims of {', '.join(map(str, rows))} bytes: each must be a multiple of 32")
    return found[0]


def swizzled(dtype, swizzle: int) -> tuple:
    """Shared memory as wgmma and the copy engine want it: tiles of 8 rows by `swizzle` bytes."""
    return plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle)


def stage(tile: TileConfig, rows: int, columns: int, dtype, swizzle: int):
    """Shared memory for every stage of an operand."""
    return plgpu.SMEM((tile.stages, rows, columns), dtype, transforms=swizzled(dtype, swizzle))


def sweep(tile, rows, columns, width: int):
    """The place of tile `tile` of `rows` (may be traced) x `columns`: `width` rows sweep all columns, then the next."""
    panel, inside = lax.div(tile, width * columns), lax.rem(tile, width * columns)
    height = jnp.minimum(width, rows - panel * width)
    return panel * width + lax.rem(inside, height), lax.div(inside, height)


def add_bias(total, bias, group, column):
    """total [64, c] + bias[group, column : column + c]."""
    some = bias.at[group, pl.ds(column, total.shape[1])]
    return total + lax.broadcast_in_dim(
        plgpu.load(some, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False), total.shape, [1]
    )


def pad_bias(bias, span: int):
    """A bias [E, N] in float32, N a multiple of the columns of all tiles together: edge tiles read past N."""
    return jnp.pad(bias.astype(jnp.float32), ((0, 0), (0, -bias.shape[1] % span)))


def run(
    operands: tuple,
    out_type: Any,
    tile: TileConfig,
    stages: dict[str, Any],
    *,
    count: Callable,
    locate: Callable,
    steps: Callable,
    load: Callable,
    multiply: Callable,
    target: Callable,
    name: str,
):
    """A kernel over tiles of `out_type`.

    stages: shared memory of each operand by name, the stage its first dim.
    count(*operands) -> how many clusters' tiles there are; locate(i, block, *operands) -> the place of block `block` of
      the cluster in tile i; steps(place, *operands) -> how many stages it contracts.
    load(place, step, slot, barrier, stages, *operands): copies one stage, arriving `len(stages)` times.
    multiply(place, steps, at, warpgroup, stages, full, empty, *operands) -> the rows of a consumer as float32 pieces
      [64, c] of neighbouring columns; `at` is the stage to begin with.
    target(place, warpgroup, column, width, out) -> where a piece of an output tile goes.
    """
    dtype = out_type.dtype
    swizzle = swizzle_of(out_type.shape[-1] * dtype.itemsize)
    chunk = swizzle // dtype.itemsize  # columns that are stored at a time
    shared = tile.cluster > 1
    fewer, more = REGISTERS[tile.consumers]
    empty = dict(num_arrivals=tile.consumers, num_barriers=tile.stages)
    scratch = dict(
        stages=stages,
        out_s=plgpu.SMEM((tile.consumers, OUT_SLOTS, ROWS, chunk), dtype, transforms=swizzled(dtype, swizzle)),
        full=plgpu.Barrier(num_arrivals=len(stages), num_barriers=tile.stages),
        empty=plgpu.ClusterBarrier(collective_axes=("block",), **empty) if shared else plgpu.Barrier(**empty),
    )
    clusters = count_sms() // tile.cluster

    def body(*refs, stages, out_s, full, empty):
        *inputs, out = refs
        block = lax.axis_index("block") if shared else 0
        first, warpgroup = lax.axis_index("cluster"), lax.axis_index("warpgroup")
        mine = lax.div(count(*inputs) - first + clusters - 1, clusters)

        def place_of(i):
            return locate(first + i * clusters, block, *inputs)

        @pl.when(warpgroup == tile.consumers)
        def _():
            plgpu.set_max_registers(fewer, action="decrease")

            def per_tile(i, at):
                place = place_of(i)

                def per_step(step, at):
                    slot = lax.rem(at, tile.stages)
                    pl.when(at >= tile.stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                    load(place, step, slot, full.at[slot], stages, *inputs)
                    return at + 1

                return lax.fori_loop(0, steps(place, *inputs), per_step, at)

            end = lax.fori_loop(0, mine, per_tile, jnp.int32(0))

            def drain(at, _):
                plgpu.barrier_wait(empty.at[lax.rem(at, tile.stages)])

            lax.fori_loop(jnp.maximum(end - tile.stages, 0), end, drain, None)

        @pl.when(warpgroup < tile.consumers)
        def _():
            plgpu.set_max_registers(more, action="increase")

            def per_tile(i, at):
                place = place_of(i)
                n = steps(place, *inputs)
                pieces = multiply(place, n, at, warpgroup, stages, full, empty, *inputs)
                column = 0
                for piece in pieces:
                    for start in range(0, piece.shape[1], chunk):
                        slot = column // chunk % OUT_SLOTS
                        # The tile before may have ended with this slot.
                        plgpu.wait_smem_to_gmem(OUT_SLOTS - 1 if column else 0, wait_read_only=True)
                        out_s[warpgroup, slot] = piece[:, start : start + chunk].astype(dtype)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(out_s.at[warpgroup, slot], target(place, warpgroup, column, chunk, out))
                        column += chunk
                return at + n

            lax.fori_loop(0, mine, per_tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    body.__name__ = name  # what profilers show
    cluster: Any = dict(cluster=(tile.cluster,), cluster_names=("block",)) if shared else {}
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        grid=(clusters,),
        grid_names=("cluster",),
        **cluster,
        num_threads=tile.consumers + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True),
    )
    return kernel(*operands)
