"""The frame of all matmul kernels: one warpgroup, the producer, loads operands, and consumers multiply them.

An operand is loaded in stages, which are parts of the contracted dim. Each SM has one block of threads, which walks
over tiles of the output. The producer runs ahead into the next tile, so that it loads while the consumers store. Copies
of a stage arrive at its `full` barrier, and the consumers at its `empty` barrier.

With one wave, the blocks whose SMs a collective holds begin when the others end, and the matmul takes twice as long.
With several waves, whose shares of the tiles decrease, the other SMs take over what the held ones cannot do, and a
collective that comes late gets SMs between two waves. A wave costs each SM some microseconds, since a block loads its
first tile while nothing multiplies.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from moax.kernels.device import count_sms
from moax.kernels.hopper.pallas.gather import gather_stages
from moax.kernels.hopper.pallas.stages import ROWS, TileConfig, swizzle_of, swizzled
from moax.mesh.collectives import varying

PIECE = 64  # the columns whose scales, bias or activation are in registers at one time
OUT_SLOTS = 2  # the buffers through which a consumer stores
# by the number of consumers: registers of a producer's and a consumer's thread
REGISTERS = {2: (40, 232), 3: (32, 160)}


def sweep(tile, rows, columns, width: int):
    """Returns the (row, column) of tile number `tile` of `rows` x `columns` tiles; `rows` may be traced.

    `width` rows sweep all columns together: with 3 columns and width 2, tiles 0, 1, 2 are (0, 0), (1, 0), (0, 1).
    """
    panel = lax.div(tile, width * columns)
    inside = lax.rem(tile, width * columns)
    height = jnp.minimum(width, rows - panel * width)
    return panel * width + lax.rem(inside, height), lax.div(inside, height)


def first_round(wave, waves: int, rounds):
    """Returns the first round of a wave, where a round is one tile for each block that runs at one time.

    Before wave w of W, rounds * ((W - w) / W)^2 rounds remain. With 32 rounds, 4 waves begin at 0, 14, 24 and 30: the
    last one has 2 rounds, so that SMs end at nearly the same time, however late some of them came free.
    """
    left = waves - wave
    return rounds - lax.div(rounds * left * left, waves * waves)


def add_bias(total, bias, group, column):
    """Returns total [64, c] + bias[group, column : column + c], in float32."""
    part = bias.at[group, pl.ds(column, total.shape[1])]
    part = plgpu.load(part, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
    return total + lax.broadcast_in_dim(part, total.shape, [1])


class Work(NamedTuple):
    """What a kernel does with its tiles, as functions that `run` calls in the kernel.

    Attributes:
      count: count(*operands) -> the number of tiles.
      locate: locate(i, *operands) -> the place of tile i.
      steps: steps(place, *operands) -> the number of stages that the tile contracts.
      load: load(place, step, slot, ring, *operands) copies one stage into `slot`. Its copies arrive `len(ring.stages)`
        times at the slot's `full` barrier; gathered rows arrive by `gather_stages`.
      multiply: multiply(place, steps, number, warpgroup, ring, *operands) -> a consumer's part of a tile as pieces
        [64, c] f32: neighbouring columns of its first 64 rows, then of its next ones. `number` counts the stages of
        earlier tiles.
      target: target(place, warpgroup, column, width, *results) -> the part of a result that takes `width` columns of
        the pieces from `column` on.
      has_rows: None, or has_rows(place, warpgroup) -> whether a consumer has rows of the tile. A consumer without rows
        multiplies and does not store.
      sources: None, or sources(place, step, *operands) -> the rows of one operand that a step gathers, or any rows
        after the last step of a tile. `load` then takes them as its keyword `sources`.
    """

    count: Callable
    locate: Callable
    steps: Callable
    load: Callable
    multiply: Callable
    target: Callable
    has_rows: Callable | None = None
    sources: Callable | None = None


class Ring(NamedTuple):
    """The stages in shared memory, which the producer fills and the consumers free in turn.

    Attributes:
      stages: the memory of each operand, by name; its first dim is the slot.
      full: the barrier of each slot at which its copies arrive.
      empty: the barrier of each slot at which the consumers arrive that have read it.
    """

    stages: dict[str, Any]
    full: Any
    empty: Any

    def copy(self, part, name: str, slot) -> None:
        """Starts to copy a part of operand `name` to a slot."""
        plgpu.copy_gmem_to_smem(part, self.stages[name].at[slot], self.full.at[slot])


class Turn(NamedTuple):
    """The tiles of one block of threads: their number, and place_of(i) -> the place of tile i."""

    tiles: Int[Array, ""]
    place_of: Callable


class Output(NamedTuple):
    """How consumers store their tiles.

    Attributes:
      memory: [consumers, slots, 64, columns of a store] in shared memory.
      before: the barrier of each consumer at which its part of `total` arrives in all slots, or None.
      results: the results in device memory.
      target: see `Work`.
    """

    memory: Any
    before: Any
    results: tuple
    target: Callable


def run(
    operands: tuple, out_type: Any, tile: TileConfig, stages: dict[str, Any], work: Work, *, name: str, total=None,
):  # fmt: skip
    """Runs a kernel over the tiles of its result.

    Args:
      operands: the arrays that the kernel reads, or trees of arrays.
      out_type: the shape and dtype of the result, or a tuple of those of several results of one dtype.
      tile: see `stages.TileConfig`.
      stages: the shared memory of each operand, by name; its first dim is the stage.
      work: see `Work`.
      name: the name of the kernel in profiles.
      total: None, or an array like the result, to which the kernel adds in f32. The sum takes its memory where nothing
        else needs it, but for a `shard_map` with `check_vma`.
    """
    types = out_type if isinstance(out_type, tuple) else (out_type,)
    dtype = types[0].dtype
    # A tile may end past the last column, where a store must write nothing. Mosaic drops a dim of one box together with
    # its index (`LaunchContext._prepare_tma`), so that such a store would overwrite the only box of the dim.
    swizzle = swizzle_of(*(each.shape[-1] * dtype.itemsize for each in types), boxes=2)
    chunk = swizzle // dtype.itemsize  # the columns of one store
    producer_registers, consumer_registers = REGISTERS[tile.consumers]
    # All slots of a tile hold its part of `total` before they hold the sum.
    slots = OUT_SLOTS
    scratch: dict[str, Any] = {}
    if total is not None:
        slots = pl.cdiv(tile.products * tile.tile_n, chunk)
        scratch["before"] = plgpu.Barrier(num_arrivals=slots, num_barriers=tile.consumers)
    out_shape = (tile.consumers, slots, ROWS, chunk)
    scratch |= dict(
        stages=stages,
        out_memory=plgpu.SMEM(out_shape, dtype, transforms=swizzled(dtype, swizzle)),
        full=plgpu.Barrier(num_arrivals=len(stages), num_barriers=tile.stages),
        empty=plgpu.Barrier(num_arrivals=tile.consumers, num_barriers=tile.stages),
    )
    blocks = count_sms()
    # A result of few tiles has fewer waves, since a wave without tiles would cost its start.
    elements = blocks * tile.rows * tile.tile_n  # of a round
    waves = min(tile.waves, max(1, -(-math.prod(types[0].shape) // elements)))

    def body(*refs, stages, out_memory, full, empty, before=None):
        inputs = refs[: -len(types)]
        results = refs[-len(types) :]
        ring = Ring(stages, full, empty)
        output = Output(out_memory, before, results, work.target)
        index = lax.axis_index("block")
        warpgroup = lax.axis_index("warpgroup")
        turn = _take_turn(work, inputs, index, blocks, waves)

        @pl.when(warpgroup == tile.consumers)
        def _():
            plgpu.set_max_registers(producer_registers, action="decrease")
            pl.when(turn.tiles > 0)(lambda: _produce(work, inputs, turn, ring))

        @pl.when(warpgroup < tile.consumers)
        def _():
            plgpu.set_max_registers(consumer_registers, action="increase")
            _consume(work, inputs, turn, ring, warpgroup, output)

    body.__name__ = name  # profilers show this name
    mesh: Any = dict(
        grid=(blocks * waves,),
        grid_names=("block",),
        num_threads=tile.consumers + 1,
        thread_name="warpgroup",
    )
    params = plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True)
    if total is not None:

        def add_apart(total, *operands):
            wide = jax.ShapeDtypeStruct(total.shape, jnp.float32)
            added = run(operands, wide, tile, stages, work, name=name)
            return (total.astype(jnp.float32) + added).astype(dtype)

        # JAX has no reference to an array whose type varies.
        if any(map(varying, jax.tree.leaves((total, operands)))):
            return add_apart(total, *operands)
        return _add_in_place(body, total, operands, plgpu.Mesh(**mesh), scratch, params, add_apart)
    kernel = plgpu.kernel(body, out_type=out_type, scratch_types=scratch, compiler_params=params, **mesh)
    return kernel(*operands)


def _take_turn(work: Work, inputs: tuple, index, blocks: int, waves: int) -> Turn:
    """Returns the tiles of the block number `index`, of `blocks` blocks in each wave."""
    wave = lax.div(index, blocks)
    block = lax.rem(index, blocks)
    tiles = work.count(*inputs)
    rounds = lax.div(tiles + blocks - 1, blocks)
    start = first_round(wave, waves, rounds)
    next_start = first_round(wave + 1, waves, rounds)
    stop = jnp.minimum(next_start, lax.div(tiles - block + blocks - 1, blocks))

    def place_of(i):
        return work.locate((start + i) * blocks + block, *inputs)

    return Turn(stop - start, place_of)


def _produce(work: Work, inputs: tuple, turn: Turn, ring: Ring) -> None:
    """Loads the stages of all tiles of a turn, and waits until they are read."""
    slots = ring.full.shape[0]

    def fill(place, step, number, **rows):
        slot = lax.rem(number, slots)
        pl.when(number >= slots)(lambda: plgpu.barrier_wait(ring.empty.at[slot]))
        work.load(place, step, slot, ring, *inputs, **rows)

    def steps_of(place):
        return work.steps(place, *inputs)

    def per_tile(i, number):
        place = turn.place_of(i)

        def per_step(step, number):
            fill(place, step, number)
            return number + 1

        return lax.fori_loop(0, steps_of(place), per_step, number)

    if work.sources is None:
        end = lax.fori_loop(0, turn.tiles, per_tile, jnp.int32(0))
    else:
        find_sources = work.sources

        def sources_of(place, step):
            return find_sources(place, step, *inputs)

        end = gather_stages(turn.tiles, turn.place_of, steps_of, fill, sources_of, ring.full)

    def drain(number, _):
        plgpu.barrier_wait(ring.empty.at[lax.rem(number, slots)])

    lax.fori_loop(jnp.maximum(end - slots, 0), end, drain, None)


def _consume(work: Work, inputs: tuple, turn: Turn, ring: Ring, warpgroup, output: Output) -> None:
    """Multiplies and stores a consumer's part of all tiles of a turn."""

    def per_tile(i, number):
        place = turn.place_of(i)
        steps = work.steps(place, *inputs)
        if output.before is not None:
            _load_total(output, place, warpgroup)
        pieces = work.multiply(place, steps, number, warpgroup, ring, *inputs)
        if output.before is not None:
            plgpu.barrier_wait(output.before.at[warpgroup])
        has_rows = work.has_rows is None or work.has_rows(place, warpgroup)
        _store(output, pieces, place, warpgroup, has_rows)
        return number + steps

    lax.fori_loop(0, turn.tiles, per_tile, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _load_total(output: Output, place, warpgroup) -> None:
    """Starts to load a consumer's part of `total` into all slots."""
    _, slots, _, chunk = output.memory.shape
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the stores of the tile before read the slots
    for slot in range(slots):
        part = output.target(place, warpgroup, slot * chunk, chunk, *output.results)
        plgpu.copy_gmem_to_smem(part, output.memory.at[warpgroup, slot], output.before.at[warpgroup])


def _store(output: Output, pieces, place, warpgroup, has_rows) -> None:
    """Stores the pieces of a tile that has rows, each added to its part of `total` if there is one."""
    _, slots, _, chunk = output.memory.shape
    column = 0
    for piece in pieces:
        for start in range(0, piece.shape[1], chunk):
            slot = column // chunk % slots
            part = piece[:, start : start + chunk]
            if output.before is not None:
                earlier = plgpu.load(output.memory.at[warpgroup, slot], layout=plgpu.Layout.WGMMA)
                part = part + earlier.astype(jnp.float32)
            elif column == 0:  # the tile before may have ended with this slot
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            else:
                plgpu.wait_smem_to_gmem(OUT_SLOTS - 1, wait_read_only=True)
            output.memory[warpgroup, slot] = part.astype(output.memory.dtype)
            plgpu.commit_smem()
            result = output.target(place, warpgroup, column, chunk, *output.results)
            stored = output.memory.at[warpgroup, slot]
            pl.when(has_rows)(functools.partial(plgpu.copy_smem_to_gmem, stored, result))
            column += chunk


def contract(steps, number, ring: Ring, multiply: Callable, tile_n: int, count: int = 1) -> list:
    """Returns `count` products [64, tile_n] f32 of a consumer, over `steps` stages of 16-bit operands.

    multiply(slot, accs) begins the matmuls of a stage, which add to accumulators; see `Work` for the other arguments.
    """
    slots = ring.full.shape[0]

    def accumulate(*accs):
        def free(slot):
            plgpu.barrier_arrive(ring.empty.at[slot])

        def step(k, number):
            slot = lax.rem(number, slots)
            plgpu.barrier_wait(ring.full.at[slot])
            multiply(slot, accs)
            plgpu.wgmma_wait(count)  # the matmuls of the stage before have read it
            pl.when(k > 0)(lambda: free(lax.rem(number + slots - 1, slots)))
            return number + 1

        end = lax.fori_loop(0, steps, step, number)
        totals = [acc[...] for acc in accs]
        last = lax.rem(end + slots - 1, slots)
        pl.when(steps > 0)(lambda: free(last))
        return totals

    return pl.run_scoped(accumulate, *[plgpu.ACC((ROWS, tile_n), jnp.float32)] * count)


def multiply_fp8(number, rows, ring: Ring, right: str, tile_n: int):
    """Returns the slot of stage `number`, the matmul [64, tile_n] f32 of `rows` of "x" and of `right`, and "sx"."""
    slot = lax.rem(number, ring.full.shape[0])
    plgpu.barrier_wait(ring.full.at[slot])

    def product(acc):
        plgpu.wgmma(acc, ring.stages["x"].at[slot, rows], ring.stages[right].at[slot].T)
        scale = plgpu.load(ring.stages["sx"].at[slot, rows], layout=plgpu.Layout.WGMMA.reduce(1))
        return acc[...], scale

    return slot, *pl.run_scoped(product, plgpu.ACC((ROWS, tile_n), jnp.float32))


def zeros():
    """Returns a piece [64, 64] f32 of 0 of a product."""
    return plgpu.layout_cast(jnp.zeros((ROWS, PIECE), jnp.float32), plgpu.Layout.WGMMA)


def _add_in_place(
    body: Callable, total, operands: tuple, mesh, scratch: dict[str, Any], params,
    add_apart: Callable,
):  # fmt: skip
    """Returns `total`, changed by body(*operands, total); under `vmap` a sum in new memory with the same bits."""

    def scoped(*refs):
        pl.run_scoped(functools.partial(body, *refs), collective_axes=mesh.thread_name, **scratch)

    @jax.custom_batching.custom_vmap
    def add(total, *operands):
        settings: Any = dict(mesh=mesh, compiler_params=params, name=body.__name__)
        run_kernel: Callable = pl.kernel(scoped, **settings)
        return pl.run_state(lambda ref: run_kernel(*operands, ref))(total)

    @add.def_vmap
    def add_each(size, batched, *arrays):
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, batched)
        return jax.vmap(add_apart, axes, axis_size=size)(*arrays), True

    # XLA gives a kernel beside a dynamic slice the slice's place in the whole array, but then two places for a total.
    return lax.optimization_barrier(add(lax.optimization_barrier(total), *operands))
