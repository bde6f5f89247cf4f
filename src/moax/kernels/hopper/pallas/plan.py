"""The kernels of the router's choice and of the plan, which is a counting sort of assignments by group.

    top_k_rows          chosen[t], experts[t] = lax.top_k(logits[t], K)
    count_groups        counts[b, g], inside[b, s, g]: how many assignments of group g are in block b, and in the steps
                        of block b before its step s
    build_permutation   scatter_idx[a] = starts[g] + sum of counts[b', g] over b' < b + inside[b, s, g] + earlier[a]
                        gather_idx[scatter_idx[a]] = a // K, row_weights[scatter_idx[a]] = weights[a]

Assignment a is in step s of block b and goes to group g. `earlier[a]` counts the assignments of g before a in the step.
A step has 64 assignments, which a warpgroup compares with 64 groups, or with each other, in one tile of registers.

With 3 assignments a step, 2 steps a block, 2 groups, align 1 and the groups (1, 0, 1, 0, 0, 1; 0), counts are (3, 3)
and (1, 0), and inside[0] is ((0, 0), (1, 2)). Assignment 4 is in step 1 of block 0, whose assignment 3 has its group
too: it becomes row 0 + 0 + 1 + 1 = 2.

With the logits (0.1, 0.4, 0.3, 0.4) and K = 2, the experts are (1, 3): of equal logits the lower expert comes first. A
warpgroup holds 64 rows in registers and takes the largest one K times. Logits compare as unsigned integers in the total
order of XLA: a NaN without a sign is above infinity, and -0.0 is below 0.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from moax.checks import Unsupported
from moax.kernels.groups import align_up
from moax.kernels.hopper.pallas import ptx
from moax.kernels.hopper.pallas.ptx import IN_BOUNDS, THREADS, launch, layout_of, store, trace_once
from moax.kernels.results import Permutation

# A step has so many assignments, and compares so many groups at one time; a top k takes so many rows.
STEP = 64
BLOCKS = 128  # the most blocks, one a multiprocessor: each block adds the counts of all blocks
AHEAD = 32  # so many counts are loaded before the first one is added
MOST_GROUPS = 1024  # a thread holds eight counts
MOST_EXPERTS = 256  # of the top k: a thread holds half as many logits
EXPERTS = 8  # of the top k: a thread holds logits in tiles of so many experts
MOST_BYTES = 200 * 1024  # the most bytes of SMEM
ROW = plgpu.Layout.WGMMA.reduce(1)  # the layout of a value for each row of a tile
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # the layout of a value for each column of a tile


def supports_top_k(shape: tuple[int, ...], top_k: int) -> bool:
    """Returns whether the kernel takes logits [T, E] of this shape."""
    rows, experts = shape
    takes_experts = experts % EXPERTS == 0 and top_k <= experts <= MOST_EXPERTS
    return isinstance(rows, int) and rows >= STEP and takes_experts


@trace_once
def top_k_rows(
    logits: Float[Array, "T E"], top_k: int,
) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:  # fmt: skip
    """chosen[t], experts[t] = lax.top_k(logits[t], K).

    Args:
      logits: [T, E] f32, T at least 64, E a multiple of 8 and at most 256.
      top_k: K, at most E.

    Returns:
      chosen [T, K] f32, the largest first, and experts [T, K] i32, which are below E whatever the logits hold.

    Raises:
      Unsupported: the logits have another shape or another dtype.
    """
    rows, experts = logits.shape
    if not supports_top_k(logits.shape, top_k) or logits.dtype != jnp.float32:
        raise Unsupported(
            f"logits are {logits.dtype} {logits.shape} with K={top_k}; the kernel takes float32, at least "
            f"{STEP} rows, and experts in multiples of {EXPERTS} up to {MOST_EXPERTS}"
        )

    def top_k_rows(logits, chosen, out):
        # Where 64 does not divide T, the last block repeats rows of the block before, and both write the same.
        mine = pl.ds(jnp.minimum(lax.axis_index("block") * STEP, rows - STEP), STEP)
        values = plgpu.load(logits.at[mine], layout=plgpu.Layout.WGMMA, optimized=False)
        bits = lax.bitcast_convert_type(values, jnp.uint32)
        sign = jnp.uint32(1 << 31)
        keys = bits ^ jnp.where(bits >= sign, jnp.uint32(0xFFFFFFFF), sign)
        expert = lax.broadcasted_iota(jnp.uint32, keys.shape, 1)
        expert = plgpu.layout_cast(expert, plgpu.Layout.WGMMA)
        below = jnp.uint32(experts) - expert  # it is largest for the lowest expert, and never 0
        for k in range(top_k):
            largest = jnp.max(keys, axis=1)
            value = largest ^ jnp.where(largest >= sign, sign, jnp.uint32(0xFFFFFFFF))
            value = lax.bitcast_convert_type(value, jnp.float32)
            store(chosen.at[mine, k], value, optimized=False)
            is_largest = keys == lax.broadcast_in_dim(largest, keys.shape, [0])
            best = jnp.max(jnp.where(is_largest, below, jnp.uint32(0)), axis=1)
            index = (jnp.uint32(experts) - best).astype(jnp.int32)
            store(out.at[mine, k], index, optimized=False)
            if k + 1 < top_k:
                is_best = below == lax.broadcast_in_dim(best, keys.shape, [0])
                keys = jnp.where(is_best, jnp.uint32(0), keys)

    out = tuple(jax.ShapeDtypeStruct((rows, top_k), dtype) for dtype in (jnp.float32, jnp.int32))
    return launch(top_k_rows, out, dict(block=-(-rows // STEP)), (), warpgroups=None)(logits)


class Counts(NamedTuple):
    """The counts of B blocks of S steps.

    Attributes:
      ids: [B S 64] i32, the group of each assignment; those past the last one have no group.
      counts: [B, C] i32, the assignments of each group in a block. C is the number of groups, rounded up to 128.
      inside: [B, S C] i32, the assignments of each group in the steps of the block before each step.
    """

    ids: Int[Array, " A"]
    counts: Int[Array, "B C"]
    inside: Int[Array, "B SC"]


def supports(shape: tuple[int, ...], groups: int) -> bool:
    """Returns whether the kernels take so many groups of experts [R, K] of this shape."""
    if not isinstance(shape[0], int) or groups > MOST_GROUPS:
        return False
    _, steps = _split(shape[0] * shape[1])
    held = align_up(groups, THREADS)
    return 4 * (steps * held + 3 * held + 3 * steps * STEP) <= MOST_BYTES


@trace_once
def count_groups(experts: Int[Array, "R K"], groups: int) -> Counts:
    """Returns the Counts of experts [R, K] i32 in [0, groups]; `groups` stands for no group.

    Raises:
      Unsupported: R is symbolic, or there are more groups or assignments than SMEM holds.
    """
    if not supports(experts.shape, groups):
        raise Unsupported(f"experts have shape {experts.shape} and {groups} groups, more than the kernels hold in SMEM")
    blocks, steps = _split(experts.size)
    held = align_up(groups, THREADS)
    size = steps * STEP
    ids = jnp.pad(experts.reshape(-1), (0, blocks * size - experts.size), constant_values=groups)

    def count_groups(ids, counts, inside, *, here, loaded):
        block = lax.axis_index("block")
        plgpu.copy_gmem_to_smem(ids.at[pl.ds(block * size, size)], here, loaded, oob_mode=IN_BOUNDS)
        group = _index(0)
        plgpu.barrier_wait(loaded)

        def step(s, running):
            chosen = _load(here, s * STEP, COLUMN)
            chosen = lax.broadcast_in_dim(jnp.where(chosen < groups, chosen, -1), (STEP, STEP), [1])
            for c, before in enumerate(running):
                _store(inside.at[block], s * held + c * STEP, before)
            return tuple(before + _count(chosen - c * STEP == group) for c, before in enumerate(running))

        nothing = plgpu.layout_cast(jnp.zeros(STEP, jnp.int32), ROW)
        for c, total in enumerate(lax.fori_loop(0, steps, step, (nothing,) * (held // STEP))):
            _store(counts.at[block], c * STEP, total)

    scratch: Any = dict(here=plgpu.SMEM((size,), jnp.int32), loaded=plgpu.Barrier())
    out = [_i32(blocks, held), _i32(blocks, steps * held)]
    run = launch(count_groups, out, dict(block=blocks), scratch, warpgroups=None)
    return Counts(ids, *run(ids))


class Shared(NamedTuple):
    """The shared memory of a block of threads of `build_permutation`, for C groups and the A assignments of the block.

    Attributes:
      starts: [C + 64], the first row of each group; starts[C] is the row after the last group.
      ends: [C], the row after the last assignment of each group.
      first_row: [C], the row of the first assignment of each group in this block.
      within: [S C], `Counts.inside` of this block.
      rows, columns: [A], the group of each assignment, twice: the compiler merges two loads of one array, which then
        has no layout.
      earlier: [A], the assignments of the same group before each assignment in its step.
      loaded: the barrier at which `within`, `rows` and `columns` arrive.
    """

    starts: Any
    ends: Any
    first_row: Any
    within: Any
    rows: Any
    columns: Any
    earlier: Any
    loaded: Any


@trace_once
def build_permutation(
    experts: Int[Array, "R K"], counted: Counts, groups: int, align: int, num_rows: int,
    weights: Float[Array, "R K"] | None = None,
    part: tuple[Int[Array, " G"], Int[Array, " G"]] | None = None,
) -> Permutation:  # fmt: skip
    """Returns the Permutation of the experts; see `moax.kernels.protocol`.

    Args:
      experts, groups, align, num_rows, weights: the arguments of `Kernels.build_permutation`.
      counted: the Counts of the experts.
      part: (begin, sizes) [G] i32: the assignments begin[g] to begin[g] + sizes[g] - 1 of group g become rows; None
        gives each assignment a row.
    """
    received, top_k = experts.shape
    blocks, held = counted.counts.shape
    size = counted.ids.shape[0] // blocks
    steps = size // STEP
    every = plgpu.Layout.WG_STRIDED((held,), held // THREADS)

    def build_permutation(
        ids, counts, inside, begin, part_sizes, weights, gather_idx, scatter_idx, sizes, *row_weights, **scratch
    ):
        shared = Shared(**scratch)
        block = lax.axis_index("block")
        mine = pl.ds(block * size, size)
        _load_assignments(shared, ids.at[mine], inside.at[block])

        total, before = _sum_counts(counts, block, every)
        if part is not None:
            total = plgpu.load(part_sizes, layout=every)
            before = before - plgpu.load(begin, layout=every)
        shared.ends[...] = total
        plgpu.commit_smem()
        is_before = _index(1) < _index(0)
        _find_starts(shared, is_before, align)
        start = plgpu.load(shared.starts.at[pl.ds(0, held)], layout=every)
        shared.ends[...] = start + total
        shared.first_row[...] = start + before

        plgpu.barrier_wait(shared.loaded)
        _count_earlier(shared, is_before)

        each = layout_of(size)
        group = plgpu.load(shared.rows, layout=each)
        index = _iota(size)
        has_row = group < groups
        valid = jnp.clip(group, 0, groups - 1)  # no id makes a thread read past an array
        row = ptx.take(shared.first_row, valid)
        row = row + ptx.take(shared.within, lax.div(index, jnp.int32(STEP)) * held + valid)
        row = row + plgpu.load(shared.earlier, layout=each)
        if part is not None:
            is_in_part = row >= ptx.take(shared.starts, valid)
            has_row = has_row & is_in_part & (row < ptx.take(shared.ends, valid))
        row = jnp.where(has_row, row, num_rows)
        index = index + block * size
        ptx.put(scatter_idx, index, row)
        ptx.put(gather_idx, row, lax.div(index, jnp.int32(top_k)))
        for target in row_weights:
            ptx.put(target, row, plgpu.load(weights.at[mine], layout=each))

        def pad(begin, end):
            _write_padding(begin, end, received, gather_idx, row_weights)

        _pad_groups(shared, pad, block, blocks, groups, num_rows)

        @pl.when(block == 0)
        def _():
            each = layout_of(held)
            end = plgpu.load(shared.ends, layout=each)
            size = end - plgpu.load(shared.starts.at[pl.ds(0, held)], layout=each)
            ptx.put(sizes, _iota(held), size)

    lengths: Any = dict(starts=held + STEP, ends=held, first_row=held, within=steps * held)
    lengths |= dict(rows=size, columns=size, earlier=size)
    scratch: Any = {name: plgpu.SMEM((n,), jnp.int32) for name, n in lengths.items()}
    scratch["loaded"] = plgpu.Barrier(num_arrivals=3)
    out = [_i32(num_rows), _i32(received * top_k), _i32(groups)]
    begin = part_sizes = None
    if part is not None:
        begin, part_sizes = (jnp.pad(v, (0, held - groups)) for v in part)
    if weights is not None:
        out.append(jax.ShapeDtypeStruct((num_rows,), jnp.float32))
        weights = jnp.pad(weights.reshape(-1), (0, blocks * size - experts.size))
    run = launch(build_permutation, out, dict(block=blocks), scratch, warpgroups=None)
    gather_idx, scatter_idx, sizes, *row_weights = run(*counted, begin, part_sizes, weights)
    scatter_idx = scatter_idx.reshape(experts.shape)
    return Permutation(gather_idx, scatter_idx, sizes, row_weights[0] if row_weights else None)


def _load_assignments(shared: Shared, ids, inside) -> None:
    """Starts to load the groups of a block's assignments and the counts before its steps."""
    for target, part in ((shared.rows, ids), (shared.columns, ids), (shared.within, inside)):
        plgpu.copy_gmem_to_smem(part, target, shared.loaded, oob_mode=IN_BOUNDS)


def _sum_counts(counts, block, layout) -> tuple[Int[Array, " C"], Int[Array, " C"]]:
    """Returns the assignments of each group in all blocks, and in the blocks before `block`."""
    blocks, held = counts.shape

    def add(b, sums):
        total, before = sums
        count = plgpu.load(counts.at[b], layout=layout)
        return total + count, before + count * (b < block).astype(jnp.int32)

    def add_some(i, sums):
        for b in range(AHEAD):
            sums = add(i * AHEAD + b, sums)
        return sums

    nothing = plgpu.layout_cast(jnp.zeros(held, jnp.int32), layout)
    sums = lax.fori_loop(0, blocks // AHEAD, add_some, (nothing, nothing))
    for b in range(blocks // AHEAD * AHEAD, blocks):
        sums = add(b, sums)
    return sums


def _find_starts(shared: Shared, is_before: Bool[Array, "64 64"], align: int) -> None:
    """Writes the first row of each group to `starts`, from the sizes in `ends`; is_before[i, j] tells whether j < i."""
    held = shared.ends.shape[0]
    used = plgpu.layout_cast(jnp.zeros(STEP, jnp.int32), ROW)  # each element has the rows of the groups before
    for c in range(0, held, STEP):
        aligned = lax.div(_load(shared.ends, c, COLUMN) + (align - 1), jnp.int32(align)) * align
        aligned = lax.broadcast_in_dim(aligned, (STEP, STEP), [1])
        _store(shared.starts, c, used + jnp.sum(jnp.where(is_before, aligned, 0), axis=1))
        used = used + jnp.sum(aligned, axis=1)
    _store(shared.starts, held, used)
    plgpu.commit_smem()


def _count_earlier(shared: Shared, is_before: Bool[Array, "64 64"]) -> None:
    """Writes to `earlier` how many assignments of a step before each one have its group."""

    def rank(s, _):
        row = lax.broadcast_in_dim(_load(shared.rows, s * STEP, ROW), (STEP, STEP), [0])
        column = lax.broadcast_in_dim(_load(shared.columns, s * STEP, COLUMN), (STEP, STEP), [1])
        _store(shared.earlier, s * STEP, _count((row == column) & is_before))

    lax.fori_loop(0, shared.rows.shape[0] // STEP, rank, None)
    plgpu.commit_smem()


def _pad_groups(shared: Shared, pad: Callable, block, blocks: int, groups: int, num_rows: int) -> None:
    """Calls pad(begin, end) for the padding of some groups, and for the block's share of the rows after the last."""

    def pad_group(i, _):
        g = block + i * blocks
        pad(shared.ends[g], shared.starts[g + 1])

    lax.fori_loop(0, lax.div(groups - block + (blocks - 1), blocks), pad_group, None)
    last = shared.starts[shared.ends.shape[0]]
    share = lax.div(num_rows - last + (blocks - 1), blocks)
    pad(last + block * share, lax.min(last + (block + 1) * share, num_rows))


def _write_padding(begin, end, received: int, gather_idx, row_weights) -> None:
    """Writes the rows begin to end - 1 of `gather_idx`, which gather no row, and their weights of 0."""
    num_rows = gather_idx.shape[0]

    def write(i, _):
        row = _iota(THREADS) + (begin + i * THREADS)
        row = jnp.where(row < end, row, num_rows)
        ptx.put(gather_idx, row, jnp.full_like(row, received))
        for target in row_weights:
            ptx.put(target, row, jnp.zeros(THREADS, jnp.float32))

    lax.fori_loop(0, lax.div(end - begin + (THREADS - 1), THREADS), write, None)


def _split(count: int) -> tuple[int, int]:
    """Returns the number of blocks and of steps a block, which is even, of so many assignments."""
    pairs = -(-count // (2 * STEP * BLOCKS))
    return -(-count // (2 * STEP * pairs)), 2 * pairs


def _i32(*shape: int) -> jax.ShapeDtypeStruct:
    """Returns the type of an i32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _index(dim: int) -> Int[Array, "64 64"]:
    """Returns the index along `dim` of each element of a tile."""
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (STEP, STEP), dim), plgpu.Layout.WGMMA)


def _iota(size: int) -> Int[Array, " I"]:
    """Returns the index of each element, in the layout of `layout_of`."""
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (size,), 0), layout_of(size))


def _count(mask) -> Int[Array, " 64"]:
    """Returns the number of true elements of each row of a tile."""
    return jnp.sum(jnp.where(mask, 1, 0), axis=1)


def _load(ref: Any, start, layout) -> Int[Array, " 64"]:
    """Returns 64 elements of `ref` from `start` on."""
    return plgpu.load(ref.at[pl.ds(start, STEP)], layout=layout, optimized=False)


def _store(ref: Any, start, values: Int[Array, " 64"]) -> None:
    """Writes 64 values to `ref` from `start` on."""
    store(ref.at[pl.ds(start, STEP)], values, optimized=False)
