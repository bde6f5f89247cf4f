"""The bf16 activation kernels: in interpret mode against what `moax.moe` computes step by step, lowered for CUDA.

Covers: activations x widths, weighted or not; the widths of models for CUDA; what is refused.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moax.checks import Unsupported
from moax.kernels.groups import find_groups, zero_rows
from moax.kernels.hopper.formats import make_blocks
from moax.kernels.hopper.pallas.activation import activate_grad_rows, activate_rows
from moax.kernels.xla import scale_rows
from moax.ops.activation import activate
from support import interpret, lower, some
from support.activations import ACTS, GATED, grouped

# Blocks of 70, 128 and 20 rows, at rows 0, 128 and 256: padding in its second half, none, no second half. The last half
# of the rows is not used.
SIZES, ROWS, USED = np.array([70, 0, 128, 20], np.int32), 384, 320
GROUPS = find_groups(jnp.asarray(SIZES), 64, ROWS)
REAL = np.asarray(GROUPS.real)


def inputs(name, width):
    """h, d_a and weights, NaN and 0 in padding; rows of many magnitudes, one of zeros, a NaN and an Inf."""
    rng = np.random.default_rng(0)
    arrays = []
    for columns in (width * (1 + GATED[name]), width):
        x = rng.normal(size=(ROWS, columns)) * np.exp2(rng.integers(-6, 2, (ROWS, 1)))
        x[5] = 0
        arrays.append(jnp.asarray(np.where(REAL[:, None], x, np.nan), jnp.bfloat16))
    weights = np.where(REAL, rng.uniform(0.1, 1, ROWS), 0).astype(np.float32)
    return arrays[0].at[3, 4].set(jnp.nan).at[140, 7].set(jnp.inf), arrays[1], weights


def check(got, want):
    """In used blocks most values are the same, the others a step of bf16 off; padding is 0."""
    assert got.dtype == want.dtype == jnp.bfloat16 and got.shape == want.shape
    got, want = (np.asarray(x, np.float32)[:USED] for x in (got, want))
    assert not got[~REAL[:USED]].any()
    np.testing.assert_allclose(got, want, rtol=2.0**-7, atol=2.0**-20)  # 1 + tanh of gelu cancels
    assert (got == want)[~np.isnan(want)].mean() > 0.99


@pytest.mark.parametrize(
    ("name", "width", "weighted"),
    some([("swiglu_oai", 96, False), ("gelu", 192, True), ("swiglu", 128, True)], 1),
)
def test_activate_rows(name, width, weighted):
    """Gate and up that change places, a tile that straddles them, a weight of another row, padding not zeroed."""
    h, _, weights = inputs(name, width)

    def run(h, sizes, weights):
        weights = weights if weighted else None
        return activate_rows(h, make_blocks(sizes, ROWS, 64), ACTS[name], gated=GATED[name], weights=weights)

    a = activate(grouped(h, name), name)
    check(interpret(run, h, SIZES, weights), scale_rows(a, weights, GROUPS) if weighted else zero_rows(a, REAL))


@pytest.mark.parametrize(
    ("name", "width", "tiles"), some([("swiglu_oai", 96, 3), ("swiglu", 256, 2), ("silu", 128, 1)], 1)
)
def test_activate_grad_rows(name, width, tiles):
    """A derivative, a rounding or a weight that differs from the unfused path; a tile or a sum in another's place."""
    h, d_a, weights = inputs(name, width)

    def run(h, d_a, sizes, weights):
        return activate_grad_rows(h, d_a, make_blocks(sizes, ROWS, 64), ACTS[name], weights=weights)

    got_a, got_d_h, inner = interpret(run, h, d_a, SIZES, weights)
    a, pull = jax.vjp(lambda h: activate(grouped(h, name), name), h)
    (d_h,) = pull(scale_rows(d_a, weights, GROUPS))
    check(got_a, scale_rows(a, weights, GROUPS))
    check(got_d_h, zero_rows(d_h, REAL))
    products = np.where(REAL[:, None], np.asarray(d_a, np.float64) * np.asarray(a, np.float64), 0)
    products = products.reshape(ROWS, tiles, -1)[:USED]
    want, magnitude = products.sum(-1).T, np.abs(products).sum(-1).T
    assert inner.shape == (tiles, ROWS) and inner.dtype == np.float32
    inner, finite = inner[:, :USED], np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(inner), finite)
    assert (np.abs(inner[finite] - want[finite]) <= 2.0**-9 * magnitude[finite]).all()


@pytest.mark.parametrize("width", some([2880, 96, 128], 1))
def test_lowers_for_cuda(width):
    """A formula, or a width of tiles of 32, 64 or 128 columns, that Mosaic refuses."""
    sizes, weights = jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((512,), jnp.float32)
    for name in ACTS if width == 96 else ("swiglu",):
        h = jax.ShapeDtypeStruct((512, width * (1 + GATED[name])), jnp.bfloat16)
        d_a = jax.ShapeDtypeStruct((512, width), jnp.bfloat16)

        def forward(h, s, w, name=name):
            return activate_rows(h, make_blocks(s, 512), ACTS[name], gated=GATED[name], weights=w)

        def backward(h, d_a, s, w, name=name):
            return activate_grad_rows(h, d_a, make_blocks(s, 512), ACTS[name], weights=w)

        lower(forward, h, sizes, weights)
        lower(functools.partial(forward, w=None), h, sizes)
        lower(backward, h, d_a, sizes, weights)


def test_refuses_what_the_kernels_cannot_take():
    """Boxes that straddle gate and up; a d_a of another dtype, read as if it were bf16."""
    blocks, weights = make_blocks(jnp.array([128]), 128), jnp.zeros(128)
    with pytest.raises(Unsupported, match="F is 48"):
        activate_rows(jnp.zeros((128, 96), jnp.bfloat16), blocks, ACTS["swiglu"], gated=True)
    with pytest.raises(Unsupported, match="float32"):
        activate_rows(jnp.zeros((128, 64)), blocks, ACTS["swiglu"], gated=True)
    with pytest.raises(ValueError, match="d_a"):
        h, d_a = jnp.zeros((128, 256), jnp.bfloat16), jnp.zeros((128, 128))
        activate_grad_rows(h, d_a, blocks, ACTS["swiglu"], weights=weights)
