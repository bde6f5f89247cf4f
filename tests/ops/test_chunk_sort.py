"""Sort chunks: rows and gradients exactly those of slices put together in NumPy.

Covers: sizes and orders drawn at random; ways; NaN past the last chunk; every error.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moax.inspect import collectives
from moax.ops import sort_chunks
from support import TOKENS, program, random, size, some, spec

CHUNKS, ROWS = 5, 24


def by_hand(x, sizes, order):
    """The chunks in their order, then zeros."""
    ends = np.cumsum(sizes)
    chunks = [x[ends[i] - sizes[i] : ends[i]] for i in order]
    rest = np.zeros((len(x) - int(ends[-1]), *x.shape[1:]), x.dtype)
    return np.concatenate([*chunks, rest])


def test_example_of_the_docstring():
    """a, b, c, d and a row past the last chunk, by sizes (1, 0, 3) and order (2, 0, 1)."""
    x = jnp.asarray([1.0, 2.0, 3.0, 4.0, jnp.nan])
    got = sort_chunks(x, jnp.asarray([1, 0, 3]), jnp.asarray([2, 0, 1]))
    np.testing.assert_array_equal(got, [2, 3, 4, 1, 0])


@jax.jit
def _both(x, sizes, order, d_rows):
    rows, pull = jax.vjp(lambda x: sort_chunks(x, sizes, order), x)
    return rows, pull(d_rows)[0]


@given(st.lists(st.integers(0, 4), min_size=CHUNKS, max_size=CHUNKS), st.permutations(range(CHUNKS)))
def test_any_chunks(sizes, order):
    """Breaks if a row lands elsewhere, a row past the last chunk is read, or the gradient is no inverse."""
    x, d_rows = random(0, ROWS, 2, 3), random(1, ROWS, 2, 3)
    used = sum(sizes)
    dirty = np.where(np.arange(ROWS)[:, None, None] < used, x, np.nan)
    rows, dx = _both(dirty, jnp.asarray(sizes), jnp.asarray(order), d_rows)
    np.testing.assert_array_equal(rows, by_hand(x, sizes, order))
    want = by_hand(d_rows, np.asarray(sizes)[list(order)], np.argsort(order))
    np.testing.assert_array_equal(dx, want)


@pytest.mark.parametrize("way", some(("custom_partitioning", "explicit", "user_vma", "shard_map"), 1))
def test_each_shard_sorts_its_own(way, fresh_compile):
    """Breaks if chunks of one shard move rows of another, or anything is communicated."""
    mesh = "2x4"
    shards, rng = size(mesh, *TOKENS), np.random.default_rng(2)
    sizes = rng.integers(0, 5, (shards, CHUNKS)).astype(np.int32)
    order = np.stack([rng.permutation(CHUNKS) for _ in range(shards)]).astype(np.int32)
    x, d_rows = random(3, ROWS * shards, 8), random(4, ROWS * shards, 8)
    at = spec(mesh, TOKENS)
    fn = lambda x, sizes, order, engine: (sort_chunks(x, sizes, order, engine=engine), ())  # noqa: E731
    p = program(way, mesh, fn, (x, sizes.reshape(-1), order.reshape(-1)), (at,) * 3, at, cotangents=d_rows)
    rows, _, (dx,) = p()
    for s in range(shards):
        mine = slice(ROWS * s, ROWS * (s + 1))
        np.testing.assert_array_equal(rows[mine], by_hand(x[mine], sizes[s], order[s]))
        np.testing.assert_array_equal(dx[mine], by_hand(d_rows[mine], sizes[s][order[s]], np.argsort(order[s])))
    assert p.under(lambda *args: collectives(p.fn, *args)) == []


def test_errors_and_empty():
    """Breaks if shapes that do not fit are not named; rows of no chunk, and no rows, are legal."""
    with pytest.raises(ValueError, match=r"x, sizes, order have shapes \(4, 2\), \(3,\), \(2,\)"):
        sort_chunks(jnp.zeros((4, 2)), jnp.zeros(3, jnp.int32), jnp.zeros(2, jnp.int32))
    with pytest.raises(ValueError, match="order has dtype float32; it must be an array of integers"):
        sort_chunks(jnp.zeros((4, 2)), jnp.zeros(3, jnp.int32), jnp.zeros(3))
    none = jnp.zeros(0, jnp.int32)
    np.testing.assert_array_equal(sort_chunks(jnp.ones((4, 2)), none, none), np.zeros((4, 2)))
    assert sort_chunks(jnp.ones((0, 2)), jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)).shape == (0, 2)
