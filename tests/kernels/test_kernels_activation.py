"""The fused activation kernels: in interpret mode against what `moax.moe` computes step by step, lowered for CUDA.

Covers: activations x widths x formats; the widths of models for CUDA; what is refused.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moax.checks import Unsupported
from moax.kernels.groups import zero_rows
from moax.kernels.hopper.formats import make_blocks
from moax.kernels.hopper.pallas.activation import activate_grad_quantize, activate_quantize
from moax.kernels.quantization import DTYPES
from moax.kernels.quantization import quantize as quantize_local
from moax.ops.activation import activate
from moax.recipe import Format
from support import interpret, lower, some
from support.activations import ACTS, GATED, grouped

E4M3, E5M2 = Format(), Format("e5m2")
SIZES, ROWS, USED, REAL = np.array([70, 0, 128], np.int32), 384, 256, np.r_[0:70, 128:256]


def inputs(name, width):
    """h, d_a with NaN in padding, weights with 0 there; rows of many magnitudes, one of zeros, a NaN and an Inf."""
    rng = np.random.default_rng(0)
    weights = np.zeros(ROWS, np.float32)
    weights[REAL] = rng.uniform(0.1, 1, REAL.size)
    arrays = []
    for columns in (width * (1 + GATED[name]), width):
        x = np.full((ROWS, columns), np.nan, np.float32)
        x[REAL] = rng.normal(size=(REAL.size, columns)) * np.exp2(rng.integers(-6, 2, (REAL.size, 1)))
        x[5] = 0
        arrays.append(jnp.asarray(x, jnp.bfloat16))
    h, d_a = arrays
    return h.at[3, 4].set(jnp.nan).at[140, 7].set(jnp.inf), d_a, weights


def check(got, x, format, contracted):
    """What the XLA path makes of x: scales to bf16's rounding of amax, most values the same, the others a step off."""
    dtype = DTYPES[format.dtype]
    real = jnp.zeros(USED, bool).at[REAL].set(True)
    q = quantize_local(zero_rows(x[:USED], real), format, format.row_block(2, contracted))
    data = np.asarray(jax.lax.bitcast_convert_type(q.data, dtype), np.float32)
    scale = np.asarray(q.scale)
    data, scale = (data, scale.T) if contracted == "columns" else (data.T, scale)
    ours = got.data.astype(np.float32)
    ours, ours_scale = (
        (ours[:USED], got.scale[:, :USED]) if contracted == "columns" else (ours[:, :USED], got.scale[:2])
    )
    assert got.data.dtype == dtype
    np.testing.assert_allclose(ours_scale, scale, rtol=2.0**-7)
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(data))
    step = 2.0**-3 if format.dtype == "e4m3" else 2.0**-2
    # 1 + tanh of gelu cancels to what float32 has of the largest value, 57344 in e5m2.
    np.testing.assert_allclose(ours, data, rtol=step, atol=2.0**-9 if format.dtype == "e4m3" else 2.0**-6)
    assert (ours == data)[~np.isnan(data)].mean() > 0.99


def scaled(x, weights):
    """`_scale` of `moax.moe`."""
    real = np.isin(np.arange(x.shape[0]), REAL)[:, None]
    return jnp.where(real, x.astype(jnp.float32) * weights[:, None], 0.0).astype(x.dtype)


@pytest.mark.parametrize(
    ("name", "width", "weighted", "format"),
    some(
        [
            ("swiglu", 256, True, E4M3),
            ("geglu", 128, False, E5M2),
            ("swiglu_oai", 128, True, Format(scale="pow2")),
            ("relu2", 128, False, E4M3),
        ],
        2,
    ),
)
def test_activate_quantize(name, width, weighted, format):
    """Gate and up that change places, a weight of another row, padding (NaN) that is not zeroed."""
    h, _, weights = inputs(name, width)

    def run(h, sizes, weights):
        weights = weights if weighted else None
        blocks = make_blocks(sizes, ROWS)
        return activate_quantize(h, blocks, ACTS[name], gated=GATED[name], weights=weights, format=format)

    got = interpret(run, h, SIZES, weights)
    a = activate(grouped(h, name), name)
    a = scaled(a, weights) if weighted else jnp.where(np.isin(np.arange(ROWS), REAL)[:, None], a, 0)
    check(got, a, format, "columns")
    assert got.scale.shape == (width // 128, ROWS)


@pytest.mark.parametrize(
    ("name", "width", "of_h"), some([("swiglu_oai", 128, E4M3), ("swiglu", 256, E5M2), ("silu", 128, E4M3)], 1)
)
def test_activate_grad_quantize(name, width, of_h):
    """A derivative, a rounding or a weight that differs from the unfused path; a buffer used again too early."""
    h, d_a, weights = inputs(name, width)

    def run(h, d_a, sizes, weights):
        blocks = make_blocks(sizes, ROWS)
        return activate_grad_quantize(h, d_a, blocks, ACTS[name], weights=weights, of_h=of_h)

    a_columns, by_row, by_column, inner = interpret(run, h, d_a, SIZES, weights)
    a, pull = jax.vjp(lambda h: activate(grouped(h, name), name), h)
    (d_h,) = pull(scaled(d_a, weights))
    real = np.isin(np.arange(ROWS), REAL)[:, None]
    check(a_columns, scaled(a, weights), E4M3, "rows")
    check(by_row, jnp.where(real, d_h, 0), of_h, "columns")
    check(by_column, jnp.where(real, d_h, 0), of_h, "rows")
    products = np.where(real, np.asarray(d_a, np.float64) * np.asarray(a, np.float64), 0)
    want = products.reshape(ROWS, -1, 128).sum(-1).T[:, :USED]
    magnitude = np.abs(products).reshape(ROWS, -1, 128).sum(-1).T[:, :USED]
    inner, finite = inner[:, :USED], np.isfinite(want)
    assert inner.shape == (width // 128, USED) and np.array_equal(np.isfinite(inner), finite)
    assert (np.abs(inner[finite] - want[finite]) <= 2.0**-9 * magnitude[finite] + 1e-30).all()


@pytest.mark.parametrize("width", some([1408, 7168, 768, 2048, 4096], 1))
def test_lowers_for_cuda(width):
    """A formula or a width of a model that Mosaic refuses, or that does not fit in SMEM."""
    sizes, weights = jax.ShapeDtypeStruct((3,), jnp.int32), jax.ShapeDtypeStruct((512,), jnp.float32)
    for name in ACTS if width == 768 else ("swiglu",):
        h = jax.ShapeDtypeStruct((512, width * (1 + GATED[name])), jnp.bfloat16)
        d_a = jax.ShapeDtypeStruct((512, width), jnp.bfloat16)

        def forward(h, s, w, name=name):
            return activate_quantize(h, make_blocks(s, 512), ACTS[name], gated=GATED[name], weights=w)

        def backward(h, d_a, s, w, name=name):
            return activate_grad_quantize(
                h,
                d_a,
                make_blocks(s, 512),
                ACTS[name],
                weights=w,
                of_a=Format(scale="pow2"),
                of_h=Format("e5m2", scale="pow2"),
            )

        lower(forward, h, sizes, weights)
        lower(functools.partial(forward, w=None), h, sizes)
        lower(backward, h, d_a, sizes, weights)


def test_refuses_what_the_kernel_cannot_take():
    """Blocks that straddle gate and up."""
    blocks = make_blocks(jnp.array([128]), 128)
    with pytest.raises(Unsupported, match="F is 96"):
        activate_quantize(jnp.zeros((128, 192), jnp.bfloat16), blocks, ACTS["swiglu"], gated=True)
    with pytest.raises(Unsupported, match="float32"):
        activate_quantize(jnp.zeros((128, 256), jnp.float32), blocks, ACTS["swiglu"], gated=True)
    with pytest.raises(ValueError, match="d_a"):
        h, d_a, weights = jnp.zeros((128, 256), jnp.bfloat16), jnp.zeros((128, 128), jnp.float32), jnp.zeros(128)
        activate_grad_quantize(h, d_a, blocks, ACTS["swiglu"], weights=weights)
