"""The gather and gather-sum kernels: in interpret mode against NumPy.

Covers: dtypes x widths x numbers of terms; what is refused.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moax.checks import Unsupported
from moax.kernels.hopper.formats import make_blocks
from moax.kernels.hopper.pallas import permute
from moax.kernels.hopper.pallas.permute import gather_rows, gather_sum
from support import interpret, kernels_of

WIDTHS = (96, 768, 1408, 2048, 2880, 4096, 7168)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.more
@pytest.mark.parametrize(
    ("width", "dtype"),
    [(20, jnp.float32), (160, jnp.float8_e4m3fn), (96, jnp.bfloat16)],
)
def test_gather_rows_copies_each_row_and_zeros_those_without_a_source(width, dtype):
    """A row off by one, a missing source that reads past the end of x, or blocks that are skipped too early."""
    x = jnp.asarray(8 * normal(0, 9, width), dtype)
    source = np.random.default_rng(1).integers(0, 9, 256).astype(np.int32)
    source[[3, 5, 130]] = (9, 1000, 9)
    want = np.append(np.asarray(x), np.zeros((1, width), x.dtype), 0)[np.minimum(source, 9)]
    full = interpret(lambda x, s: gather_rows(x, s, None), x, source)
    np.testing.assert_array_equal(full, want)
    part = interpret(
        lambda x, s, n: gather_rows(x, s, make_blocks(n, 256, 64)),
        x,
        source,
        np.array([5, 70], np.int32),
    )
    np.testing.assert_array_equal(part[:192], want[:192])


def test_gather_rows_one_row_at_a_time(monkeypatch):
    """Rows too wide for two in flight: the buffer's index and the row's must not be confused."""
    monkeypatch.setattr(permute, "IN_FLIGHT", 128)
    x = normal(0, 5, 32)
    source = np.arange(128, dtype=np.int32) % 7
    want = np.append(x, np.zeros((2, 32), np.float32), 0)[source]
    np.testing.assert_array_equal(
        interpret(lambda x, s: gather_rows(x, s, None), jnp.asarray(x), source),
        want,
    )


@pytest.mark.parametrize(
    ("terms", "weighted", "dtype", "in_flight"),
    [
        (1, True, jnp.bfloat16, 32768),
        (3, False, jnp.bfloat16, 32768),
        (8, True, jnp.bfloat16, 1024),
        (3, True, jnp.float32, 512),
        (8, False, jnp.float32, 32768),
    ],
)
def test_gather_sum_adds_the_rows_that_exist(monkeypatch, terms, weighted, dtype, in_flight):
    """NaN in rows that are not referred to, or in the weights of missing ones, in the sum; a wrong weight or term."""
    monkeypatch.setattr(permute, "IN_FLIGHT", in_flight)
    size, width, results = 12, 96, 6
    rows = normal(0, size, width)
    rows[[2, 7]] = np.nan
    position = np.random.default_rng(1).choice(
        [0, 1, 3, 4, 5, 6, 8, 9, 10, 11, size, size + 5],
        (results, terms),
    )
    position = position.astype(np.int32)
    position[4] = size  # a token without any row
    weights = np.where(position < size, normal(2, results, terms), np.nan).astype(np.float32)
    rows = jnp.asarray(rows, dtype)
    got = interpret(
        gather_sum if weighted else lambda r, p, w: gather_sum(r, p, None),
        rows,
        position,
        weights,
    )
    values = np.append(np.asarray(rows, np.float64), np.zeros((1, width)), 0)[np.minimum(position, size)]
    want = (values * (np.where(position < size, weights, 0.0) if weighted else np.ones_like(weights))[..., None]).sum(1)
    assert got.dtype == dtype and not got[4].any()
    np.testing.assert_allclose(
        got.astype(np.float64),
        want,
        rtol=2.0**-8 if dtype == jnp.bfloat16 else 1e-5,
        atol=1e-5,
    )


def test_refuses_rows_of_no_whole_16_bytes():
    """A copy that silently truncates a row."""
    x = jnp.zeros((4, 20), jnp.bfloat16)
    places = jnp.zeros((128, 1), jnp.int32)
    with pytest.raises(Unsupported, match="40 bytes"):
        gather_rows(x, places[:, 0], None)
    with pytest.raises(Unsupported, match="40 bytes"):
        gather_sum(x, places, None)


def test_sums_into_many_rows():
    """Breaks if the blocks for a million tokens lie along a dim of the grid of which CUDA takes 65535 at most: all but
    the last, since Mosaic reverses them."""
    shapes = [(1024, 512), (1 << 20, 8)]
    rows, position = (jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, (jnp.bfloat16, jnp.int32), strict=True))
    jaxpr = jax.make_jaxpr(lambda rows, position: gather_sum(rows, position, None))(rows, position)
    ((mesh,),) = (eqn.params["meshes"] for eqn in kernels_of(jaxpr.jaxpr))
    assert max(mesh.grid) > 65535 >= max(mesh.grid[:-1], default=1)
