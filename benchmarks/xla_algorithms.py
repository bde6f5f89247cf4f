"""Algorithms of a grouped product in plain JAX, for `xla_products.py` to compare.

x [M, K] in bf16 is sorted by group and packed, w is [G, K, N], dy is [M, N]. The algorithms:

    moax            `moax.ops.grouped_matmul(kernels="xla")`
    ragged_dot      `lax.ragged_dot_general` as installed; `ragged_dot_fusion` with XLA's flag for a fusion of cuDNN
    loop S          one product a step of a loop over tiles of S rows; the number of steps is known on the device alone
    static S        the same loop with as many steps as S, M and G can need; XLA knows the number when it compiles
    nested S        a scan over groups around a loop over the group's tiles: a matrix is sliced once a group
    switch          a scan over groups; each group takes the smallest of a few capacities that holds its rows
    batched S       all tiles of S rows and a copy of each tile's matrix as one batched product
    batched S xB    the same, B tiles a step of a scan
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import moax

F32 = jnp.float32
TRANSPOSED = (((0,), (0,)), ((), ()))


class Tiles(NamedTuple):
    """Tiles of `size` rows, none of which holds rows of two groups: sizes (3, 5), size 4: groups (0, 1, 1), starts
    (0, 3, 4), where the last tile would begin at row 7 and begins at 4, as it may not hang over the end of 8 rows.

    group, start: [T] i32. real: [T, size] bool, the rows that the tile computes. count: how many of the T hold rows.
    before: [G] i32, the tiles before each group's first.
    """

    group: jax.Array
    start: jax.Array
    real: jax.Array
    count: jax.Array
    before: jax.Array


def make_tiles(sizes, rows: int, size: int, multiple: int = 1) -> Tiles:
    """As many tiles as any `sizes` may need, rounded up to a multiple; those past `count` have no real rows."""
    groups = sizes.shape[0]
    most = -(-((rows + groups * (size - 1)) // size) // multiple) * multiple
    per_group = -(-sizes // size)
    last = jnp.cumsum(per_group)
    index = jnp.arange(most, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(last, index, side="right", method="compare_all"), groups - 1)
    end = jnp.cumsum(sizes)[group]
    first = end - sizes[group] + (index - (last - per_group)[group]) * size
    start = jnp.clip(first, 0, rows - size)
    row = start[:, None] + jnp.arange(size, dtype=jnp.int32)
    real = (row >= first[:, None]) & (row < end[:, None]) & (index < last[-1])[:, None]
    return Tiles(group.astype(jnp.int32), start, real, last[-1], last - per_group)


def dot(a, b, contract, dtype):
    return lax.dot_general(a, b, contract, preferred_element_type=dtype)


def weight_contract(transpose: bool):
    return (((1,), (1 if transpose else 0,)), ((), ()))


def rows_at(x, start, size: int):
    return lax.dynamic_slice_in_dim(x, start, size)


def put_rows(y, part, start, real):
    old = rows_at(y, start, part.shape[0])
    return lax.dynamic_update_slice_in_dim(y, jnp.where(real[:, None], part, old), start, 0)


def empty(x, w, transpose: bool):
    return jnp.zeros((x.shape[0], w.shape[1 if transpose else 2]), x.dtype)


def masked(v, real):
    return jnp.where(real[..., None], v, jnp.zeros((), v.dtype))


def loop(x, w, sizes, *, transpose: bool, size: int, static: bool):
    """A tile a step."""
    tiles = make_tiles(sizes, x.shape[0], size)

    def body(i, y):
        matrix = lax.dynamic_index_in_dim(w, tiles.group[i], keepdims=False)
        part = dot(rows_at(x, tiles.start[i], size), matrix, weight_contract(transpose), x.dtype)
        return put_rows(y, part, tiles.start[i], tiles.real[i])

    steps = tiles.group.shape[0] if static else tiles.count
    return lax.fori_loop(0, steps, body, empty(x, w, transpose))


def loop_wgrad(x, dy, sizes, *, size: int, static: bool):
    """A tile a step, added to its group's gradient."""
    tiles = make_tiles(sizes, x.shape[0], size)

    def body(i, dw):
        rows, d_rows = (masked(rows_at(v, tiles.start[i], size), tiles.real[i]) for v in (x, dy))
        old = lax.dynamic_index_in_dim(dw, tiles.group[i], keepdims=False)
        return lax.dynamic_update_index_in_dim(dw, old + dot(rows, d_rows, TRANSPOSED, F32), tiles.group[i], 0)

    steps = tiles.group.shape[0] if static else tiles.count
    dw = jnp.zeros((sizes.shape[0], x.shape[1], dy.shape[1]), F32)
    return lax.fori_loop(0, steps, body, dw).astype(x.dtype)


def nested(x, w, sizes, *, transpose: bool, size: int):
    """A scan over groups around a loop over the group's tiles."""
    tiles = make_tiles(sizes, x.shape[0], size)

    def group(y, step):
        matrix, first, count = step

        def body(i, y):
            part = dot(rows_at(x, tiles.start[i], size), matrix, weight_contract(transpose), x.dtype)
            return put_rows(y, part, tiles.start[i], tiles.real[i])

        return lax.fori_loop(first, first + count, body, y), None

    return lax.scan(group, empty(x, w, transpose), (w, tiles.before, -(-sizes // size)))[0]


def nested_wgrad(x, dy, sizes, *, size: int):
    """A scan over groups around a loop that sums the group's tiles."""
    tiles = make_tiles(sizes, x.shape[0], size)

    def group(_, step):
        first, count = step

        def body(i, dw):
            rows, d_rows = (masked(rows_at(v, tiles.start[i], size), tiles.real[i]) for v in (x, dy))
            return dw + dot(rows, d_rows, TRANSPOSED, F32)

        zeros = jnp.zeros((x.shape[1], dy.shape[1]), F32)
        return None, lax.fori_loop(first, first + count, body, zeros).astype(x.dtype)

    return lax.scan(group, None, (tiles.before, -(-sizes // size)))[1]


def capacities(rows: int, groups: int) -> list[int]:
    """Quarters of the mean group up to twice the mean, then powers of two, then all rows."""
    mean = max(4, rows // groups)
    quarters = [mean * i // 4 for i in range(1, 9)]
    doubles = [mean << i for i in range(2, max(2, math.ceil(math.log2(groups))))]
    return sorted({min(rows, c) for c in (*quarters, *doubles, rows)})


def switch(x, w, sizes, *, transpose: bool):
    """One product a group, over the smallest capacity that holds it."""
    rows = x.shape[0]
    ladder = capacities(rows, sizes.shape[0])

    def branch(capacity, y, matrix, first, count):
        start = jnp.minimum(first, rows - capacity)
        row = start + jnp.arange(capacity, dtype=jnp.int32)
        part = dot(rows_at(x, start, capacity), matrix, weight_contract(transpose), x.dtype)
        return put_rows(y, part, start, (row >= first) & (row < first + count))

    def group(y, step):
        matrix, first, count = step
        index = jnp.searchsorted(jnp.asarray(ladder), count)
        return lax.switch(index, [functools.partial(branch, c) for c in ladder], y, matrix, first, count), None

    first = jnp.cumsum(sizes) - sizes
    return lax.scan(group, empty(x, w, transpose), (w, first, sizes))[0]


def switch_wgrad(x, dy, sizes):
    """One product a group, over the smallest capacity that holds it."""
    rows = x.shape[0]
    ladder = capacities(rows, sizes.shape[0])

    def branch(capacity, first, count):
        start = jnp.minimum(first, rows - capacity)
        row = start + jnp.arange(capacity, dtype=jnp.int32)
        real = (row >= first) & (row < first + count)
        a, b = (masked(rows_at(v, start, capacity), real) for v in (x, dy))
        return dot(a, b, TRANSPOSED, x.dtype)

    def group(_, step):
        index = jnp.searchsorted(jnp.asarray(ladder), step[1])
        return None, lax.switch(index, [functools.partial(branch, c) for c in ladder], *step)

    return lax.scan(group, None, (jnp.cumsum(sizes) - sizes, sizes))[1]


def batched(x, w, sizes, *, transpose: bool, size: int, chunk: int = 0):
    """Tiles and their matrices side by side, all at once or `chunk` of them a step."""
    rows = x.shape[0]
    tiles = make_tiles(sizes, rows, size, chunk or 1)

    def product(group, start):
        part = jax.vmap(lambda at: rows_at(x, at, size))(start)
        return dot(part, w[group], (((2,), (2 if transpose else 1,)), ((0,), (0,))), x.dtype)

    if chunk:
        steps = (tiles.group.reshape(-1, chunk), tiles.start.reshape(-1, chunk))
        parts = lax.scan(lambda _, step: (None, product(*step)), None, steps)[1]
    else:
        parts = product(tiles.group, tiles.start)
    ends = jnp.cumsum(sizes)
    row = jnp.arange(rows, dtype=jnp.int32)
    group = jnp.searchsorted(ends, row, side="right", method="compare_all")
    tile = tiles.before[group] + (row - (ends - sizes)[group]) // size
    return parts.reshape(-1, parts.shape[-1])[tile * size + row - tiles.start[tile]]


def batched_wgrad(x, dy, sizes, *, size: int, chunk: int):
    """`chunk` tiles' gradients side by side, a step of a scan, added to their groups'."""
    tiles = make_tiles(sizes, x.shape[0], size, chunk)

    def step(dw, step):
        group, start, real = step
        a, b = (masked(jax.vmap(lambda at, v=v: rows_at(v, at, size))(start), real) for v in (x, dy))
        part = dot(a, b, (((1,), (1,)), ((0,), (0,))), F32)
        return dw.at[group].add(part, indices_are_sorted=True), None

    steps = tuple(v.reshape(-1, chunk, *v.shape[1:]) for v in tiles[:3])
    dw = jnp.zeros((sizes.shape[0], x.shape[1], dy.shape[1]), F32)
    return lax.scan(step, dw, steps)[0].astype(x.dtype)


def own(x, b, sizes, *, direction: str):
    """What moax computes today; a gradient alone, as XLA drops the other."""
    product = functools.partial(moax.ops.grouped_matmul, kernels="xla")
    if direction == "fwd":
        return product(x, b, sizes)
    if direction == "dgrad":
        like = jax.ShapeDtypeStruct((x.shape[0], b.shape[1]), x.dtype)
        return jax.vjp(lambda v: product(v, b, sizes), jnp.zeros(like.shape, like.dtype))[1](x)[0]
    zeros = jnp.zeros((sizes.shape[0], x.shape[1], b.shape[1]), x.dtype)
    return jax.vjp(lambda v: product(x, v, sizes), zeros)[1](b)[0]


def ragged_dot(x, b, sizes, *, direction: str):
    contract = {"fwd": ((1,), (1,)), "dgrad": ((1,), (2,)), "wgrad": ((0,), (0,))}[direction]
    numbers = lax.RaggedDotDimensionNumbers((contract, ((), ())), [0], [] if direction == "wgrad" else [0])
    return lax.ragged_dot_general(x, b, sizes, numbers, preferred_element_type=x.dtype)
