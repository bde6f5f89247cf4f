"""The quantization kernels: in interpret mode against XLA's.

Covers: rows, columns and weights x formats x widths x source dtypes.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moax.checks import Unsupported
from moax.kernels.groups import zero_rows
from moax.kernels.hopper.formats import make_blocks
from moax.kernels.hopper.pallas.quantize import quantize_rows, quantize_weight
from moax.kernels.scales import DTYPES
from moax.kernels.xla.operands import quantize as quantize_local
from moax.recipe import Format
from support import interpret, mark_rest

E4M3, E4M3_POW2, E5M2, E5M2_POW2 = (Format(dtype, scale=s) for dtype in ("e4m3", "e5m2") for s in ("float32", "pow2"))
F8 = jnp.float8_e4m3fn
WIDTHS = (96, 768, 1408, 2048, 2880, 4096, 7168)


def values(seed, *shape):
    """Normal values of many magnitudes, and what has a rule of its own: NaN, Inf, rows of zeros and of tiny values."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-20, 20, shape[:-1] + (1,)))
    x = x.astype(np.float32)
    x[..., 3, 5] = np.nan
    x[..., 7, 9] = np.inf
    x[..., 8, 9] = -np.inf
    x[..., 11, :] = 0
    x[..., :, 13] = 0
    x[..., 16, :] = 1e-38 * x[..., 16, :]
    return x


def expected(x, format, block, real=None):
    """data and scale of the XLA path, the data as float32."""
    x = jnp.asarray(x) if real is None else zero_rows(jnp.asarray(x), jnp.asarray(real))
    q = quantize_local(x, format, block)
    return np.asarray(jax.lax.bitcast_convert_type(q.data, DTYPES[format.dtype]), np.float32), np.asarray(q.scale)


def check(got, data, scale, format):
    """The same but for a value that x * (1 / scale) rounds to the other side; scales to an ulp."""
    assert got.data.dtype == DTYPES[format.dtype]
    np.testing.assert_allclose(got.scale[tuple(map(slice, scale.shape))], scale, rtol=2e-7)
    ours = got.data.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(ours), np.isnan(data))
    rtol, atol = (2.0**-3, 2.0**-9) if format.dtype == "e4m3" else (2.0**-2, 2.0**-16)
    np.testing.assert_allclose(ours, data, rtol=rtol, atol=atol)
    assert (ours == data)[~np.isnan(data)].mean() > 0.999


@pytest.mark.parametrize(
    ("source", "width", "format"),
    [
        (jnp.bfloat16, 128, E4M3),
        (jnp.bfloat16, 96, E5M2_POW2),
        (jnp.float32, 160, E4M3),
        (jnp.float32, 48, E5M2),
    ],
)
def test_rows_and_columns(source, width, format):
    """A wrong scale, a transposed tile, padding (NaN) or a neighbour's column in a scale, an Inf that became 448."""
    sizes = np.array([128, 0, 70], np.int32)
    x = values(0, 384, width)
    real = np.arange(384) < 198
    x[198:] = np.nan
    x = jnp.asarray(x, source)
    operand, wgrad_operand = interpret(
        lambda x, s: quantize_rows(x, make_blocks(s, 384), format=format),
        x,
        sizes,
    )
    used = 256
    data, scale = expected(x[:used], format, (1, 128), real[:used])
    assert operand.data.shape == (384, width) and operand.scale.shape == (-(-width // 128), 384)
    check(operand._replace(data=operand.data[:used]), data, scale.T, format)
    data, scale = expected(x[:used], format, (128, 1), real[:used])
    assert wgrad_operand.data.shape == (width, 384)
    assert wgrad_operand.scale.shape == (3, -(-width // 128) * 128)
    check(wgrad_operand._replace(data=wgrad_operand.data[:, :used]), data.T, scale, format)
    assert (wgrad_operand.scale[:2, width:] == 1).all() and (operand.scale[:, 198:used] == 1).all()


@pytest.mark.parametrize(
    ("dtype", "width"),
    mark_rest([(jnp.float32, 160), (jnp.bfloat16, 192), (jnp.bfloat16, 96)], 1),
)
def test_gathered(dtype, width):
    """The block trains on the rows of other tokens, or on what lies past the last one, where an expert is not full."""
    sizes = np.array([128, 0, 70], np.int32)
    x = jnp.asarray(values(1, 50, width), dtype)
    used = 256
    source = np.random.default_rng(1).integers(0, 50, 384).astype(np.int32)
    source[198:] = 50
    got = interpret(
        lambda x, index, s: quantize_rows(x, make_blocks(s, 384), gather_idx=index),
        x,
        source,
        sizes,
    )
    rows = jnp.take(x, source, axis=0, mode="fill", fill_value=0)
    want = interpret(lambda x, s: quantize_rows(x, make_blocks(s, 384)), rows, sizes)
    for g, w in zip(got, want, strict=True):
        axis = w.data.shape.index(384)
        for a, b, dim in ((g.data, w.data, axis), (g.scale[..., :used], w.scale[..., :used], None)):
            a, b = (a, b) if dim is None else (np.take(v, range(used), dim).view(np.uint8) for v in (a, b))
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("wgrad", "gathered"), [(True, False), (False, True), (True, True)])
def test_one_direction(wgrad, gathered):
    """Outputs that change places where only one of the two is asked for."""
    x = jnp.asarray(values(0, 128, 128), jnp.bfloat16)
    source = np.random.default_rng(0).integers(0, 128, 128).astype(np.int32) if gathered else None
    sizes = np.array([128], np.int32)

    def quantize(x, sizes, **uses):
        return quantize_rows(x, make_blocks(sizes, 128), gather_idx=source, **uses)

    both = interpret(quantize, x, sizes)
    one = interpret(functools.partial(quantize, fprop_or_dgrad=not wgrad, wgrad=wgrad), x, sizes)
    assert one[not wgrad] is None
    for got, want in zip(one[wgrad], both[wgrad], strict=True):
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize(
    ("source", "format", "transposed"),
    [(jnp.bfloat16, E4M3, False), (jnp.float32, E4M3_POW2, True), (jnp.bfloat16, E5M2_POW2, False),
     (jnp.bfloat16, E4M3, True)],
)  # fmt: skip
def test_weight(source, format, transposed):
    """A scale of half a block, of the wrong block or matrix; a transposed matrix with scales that are not."""
    w = values(0, 2, 160, 272)
    w[1, :128, :128] = 0
    w = jnp.asarray(w, source)
    got = interpret(functools.partial(quantize_weight, format=format, transposed=transposed), w)
    data, scale = (v.swapaxes(1, 2) if transposed else v for v in expected(w, format, (1, 128, 128)))
    check(got, data, scale, format)
    assert got.data.shape == data.shape
    assert got.scale.shape == scale.shape
    assert got.scale[1, 0, 0] == 1


def test_refuses_what_the_kernel_cannot_take():
    """A copy past the end of a row, or a silent cast."""
    blocks = make_blocks(jnp.array([128], jnp.int32), 128)
    with pytest.raises(Unsupported, match="multiples of 16"):
        quantize_rows(jnp.zeros((128, 24), jnp.bfloat16), blocks)
    with pytest.raises(Unsupported, match="multiples of 16"):
        quantize_weight(jnp.zeros((1, 24, 128), jnp.bfloat16), transposed=True)
    with pytest.raises(Unsupported, match="100 rows"):
        quantize_rows(jnp.zeros((100, 128), jnp.bfloat16), blocks)
    with pytest.raises(Unsupported, match="float16"):
        quantize_rows(jnp.zeros((128, 128), jnp.float16), blocks)
