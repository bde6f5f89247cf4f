"""Quantize with group sizes: each group has the bits and scales that it has by itself, padding is 0.

Covers: blocks along rows, columns, both and none x scales; ways x blocks; every error.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moax.ops import dequantize, grouped_wgrad, quantize
from moax.recipe import Format, Recipe
from support import TOKENS, program, random, size, some, spec
from support.oracle.formats import BITS
from support.oracle.formats import quantize as quantize_by_numpy

SIZES, ALIGN, ROWS, WIDTH = (7, 0, 9, 4), 8, 48, 24
STARTS = (0, 8, 8, 24)
FORMATS = {"float32": Format(block=8), "e8m0": Format(block=8, scale="e8m0"), "e5m2": Format(dtype="e5m2", block=8)}


def dirty(seed, sizes=SIZES, starts=STARTS, rows=ROWS):
    """Rows with NaN in padding, and which of them are real."""
    x, real = random(seed, rows, WIDTH), np.zeros(rows, bool)
    for n, first in zip(sizes, starts, strict=True):
        real[first : first + n] = True
    return np.where(real[:, None], x, np.nan).astype(np.float32), real


def check(q, x, real, format, block, sizes=SIZES, starts=STARTS):
    """Values and scales of each group against NumPy's, of the group alone."""
    data = np.asarray(q.data).view(BITS[format.dtype][2]).astype(np.float64)
    scale = np.asarray(q.scale)
    scale = 2.0 ** (scale.astype(np.float64) - 127) if scale.dtype == np.uint8 else scale
    np.testing.assert_array_equal(data[~real], 0.0)
    for n, first in zip(sizes, starts, strict=True):
        if n:
            values, want = quantize_by_numpy(x[first : first + n], format, block)
            np.testing.assert_array_equal(data[first : first + n], values)
            begin = first // block[0]
            np.testing.assert_array_equal(scale[begin : begin + len(want)], want)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("block", [(8, 1), (4, 1), (1, 8), (8, 8)], ids=str)
def test_each_group_is_quantized_by_itself(block, name):
    """Breaks if a block has rows of two groups, padding enters a scale, or rows past the last group are read."""
    x, real = dirty(0)
    quantize_groups = jax.jit(lambda x, s: quantize(x, FORMATS[name], block=block, group_sizes=s, align=ALIGN))
    q = quantize_groups(x, np.asarray(SIZES))
    check(q, x, real, FORMATS[name], block)
    assert np.isfinite(dequantize(q)).all()


def test_one_scale():
    """Breaks if padding enters the one scale of all rows."""
    x, real = dirty(1)
    q = quantize(jnp.asarray(x), Format(block=None), block=(None, None), group_sizes=jnp.asarray(SIZES), align=ALIGN)
    want = quantize_by_numpy(np.where(real[:, None], x, 0), Format(block=None), (None, None))
    np.testing.assert_array_equal(q.scale, want[1])


def test_is_what_a_product_multiplies():
    """Breaks if rows quantized here and multiplied differ from a product that quantizes: the same dw."""
    x, _ = dirty(2)
    sizes, format = jnp.asarray(SIZES), Format(block=8)
    q = dequantize(quantize(jnp.asarray(x), format, block=(8, 1), group_sizes=sizes))
    dy = jnp.asarray(random(3, ROWS, 6))
    want = grouped_wgrad(jnp.asarray(x), dy, sizes, recipe=Recipe(format, None, None))
    got = grouped_wgrad(q, dy, sizes, align=8)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "way, block",
    some([("custom_partitioning", (8, 1)), ("explicit", (1, 8)), ("user", (8, 8)), ("shard_map", (8, 1)),
          ("explicit", (8, 1)), ("custom_partitioning", (1, 8))], 3),
)  # fmt: skip
def test_on_mesh(way, block):
    """Breaks if a shard reads the groups of another, or its rows are not those that its sizes are of."""
    mesh, format = "2x4", FORMATS["float32"]
    shards = size(mesh, *TOKENS)
    rng, xs, reals, sizes, starts = np.random.default_rng(4), [], [], [], []
    for s in range(shards):
        mine = rng.integers(0, 12, 3)
        first = np.cumsum([0, *(-(-mine // ALIGN) * ALIGN)])[:-1]
        x, real = dirty(s, mine, first)
        xs, reals, sizes, starts = [*xs, x], [*reals, real], [*sizes, mine], [*starts, first]
    at = spec(mesh, TOKENS)

    def forward(x, s, engine):
        q = quantize(x, format, block=block, group_sizes=s, align=ALIGN, x_spec=at, engine=engine)
        return (), (q.data, q.scale)

    args = np.concatenate(xs), np.concatenate(sizes).astype(np.int32)
    _, (data, scale) = program(way, mesh, forward, args, (at, at), (), at)()
    for s in range(shards):
        parts = (np.split(v, shards)[s] for v in (data, scale))
        q = quantize(jnp.zeros((1, 1)))
        local = type(q)(*parts, format.dtype, block)
        check(local, xs[s], reals[s], format, block, sizes[s], starts[s])


def test_errors():
    """Breaks if blocks would go over two groups without a word."""
    x, sizes = jnp.zeros((8, 4)), jnp.asarray([3, 5])
    with pytest.raises(ValueError, match=r"align=2 must be a multiple of 4, the rows of a block of block=\(4, 1\)"):
        quantize(x, block=(4, 1), group_sizes=sizes, align=2)
    with pytest.raises(ValueError, match="align=4 must be None without group_sizes; pass group_sizes too"):
        quantize(x, align=4)
    with pytest.raises(ValueError, match="group_sizes has dtype float32; it must be an array of integers"):
        quantize(x, group_sizes=jnp.zeros(2))
