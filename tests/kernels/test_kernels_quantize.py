"""The quantization kernels: in interpret mode against XLA's.

Covers: rows, columns and weights x formats x widths x source dtypes; the wire, also on a GPU.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moax.checks import Unsupported
from moax.kernels import implementation
from moax.kernels.groups import zero_rows
from moax.kernels.hopper.formats import KMajorFp8, make_blocks
from moax.kernels.hopper.pallas.quantize import dequantize_rows, quantize_rows, quantize_weight
from moax.kernels.scales import DTYPES
from moax.kernels.scales import dequantize as dequantize_local
from moax.kernels.xla import quantize as quantize_local
from moax.recipe import Format
from support import interpret, some

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
    by_row, by_column = interpret(
        lambda x, s: quantize_rows(x, make_blocks(s, 384), format=format),
        x,
        sizes,
    )
    used = 256
    data, scale = expected(x[:used], format, (1, 128), real[:used])
    assert by_row.data.shape == (384, width) and by_row.scale.shape == (-(-width // 128), 384)
    check(by_row._replace(data=by_row.data[:used]), data, scale.T, format)
    data, scale = expected(x[:used], format, (128, 1), real[:used])
    assert by_column.data.shape == (width, 384)
    assert by_column.scale.shape == (3, -(-width // 128) * 128)
    check(by_column._replace(data=by_column.data[:, :used]), data.T, scale, format)
    assert (by_column.scale[:2, width:] == 1).all() and (by_row.scale[:, 198:used] == 1).all()


@pytest.mark.parametrize(
    ("dtype", "width"),
    some([(jnp.float32, 160), (jnp.bfloat16, 192), (jnp.bfloat16, 96)], 1),
)
def test_gathered(dtype, width):
    """The block trains on the rows of other tokens, or on what lies past the last one, where an expert is not full."""
    sizes = np.array([128, 0, 70], np.int32)
    x = jnp.asarray(values(1, 50, width), dtype)
    used = 256
    source = np.random.default_rng(1).integers(0, 50, 384).astype(np.int32)
    source[198:] = 50
    got = interpret(
        lambda x, at, s: quantize_rows(x, make_blocks(s, 384), gather_idx=at),
        x,
        source,
        sizes,
    )
    rows = jnp.take(x, source, axis=0, mode="fill", fill_value=0)
    want = interpret(lambda x, s: quantize_rows(x, make_blocks(s, 384)), rows, sizes)
    for g, w in zip(got, want, strict=True):
        axis = w.data.shape.index(384)
        for a, b, at in ((g.data, w.data, axis), (g.scale[..., :used], w.scale[..., :used], None)):
            a, b = (a, b) if at is None else (np.take(v, range(used), at).view(np.uint8) for v in (a, b))
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("columns", "gathered"), [(True, False), (False, True), (True, True)])
def test_one_direction(columns, gathered):
    """Outputs that change places where only one of the two is asked for."""
    x = jnp.asarray(values(0, 128, 128), jnp.bfloat16)
    source = np.random.default_rng(0).integers(0, 128, 128).astype(np.int32) if gathered else None
    both = interpret(lambda x: quantize_rows(x, None, gather_idx=source), x)
    one = interpret(
        lambda x: quantize_rows(x, None, gather_idx=source, rows=not columns, columns=columns),
        x,
    )
    assert one[not columns] is None
    for got, want in zip(one[columns], both[columns], strict=True):
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
    with pytest.raises(Unsupported, match="multiples of 16"):
        quantize_rows(jnp.zeros((128, 24), jnp.bfloat16), None)
    with pytest.raises(Unsupported, match="multiples of 16"):
        quantize_weight(jnp.zeros((1, 24, 128), jnp.bfloat16), transposed=True)
    with pytest.raises(Unsupported, match="100 rows"):
        quantize_rows(jnp.zeros((100, 128), jnp.bfloat16), None)
    with pytest.raises(Unsupported, match="float16"):
        quantize_rows(jnp.zeros((128, 128), jnp.float16), None)


@pytest.mark.parametrize(
    "width, format",
    some([(160, E4M3_POW2), (96, E4M3), (256, E4M3_POW2), (256, E4M3)], 1),
)
def test_scales_by_row(width, format):
    """The same values and scales, and these beside their rows."""
    x = jnp.asarray(values(5, 256, width), jnp.bfloat16)
    options = dict(columns=False, format=format)
    got = interpret(lambda x: quantize_rows(x, None, **options, by_row=True)[0], x)
    want = interpret(lambda x: quantize_rows(x, None, **options)[0], x)
    np.testing.assert_array_equal(got.scale, want.scale.T)
    np.testing.assert_array_equal(got.data.view(np.uint8), want.data.view(np.uint8))


@pytest.mark.parametrize(
    "width, format, out, count",
    some(
        [
            (96, E4M3, jnp.bfloat16, 129),
            (160, E5M2, jnp.bfloat16, 1),
            (256, E4M3, jnp.float32, 384),
            (96, E4M3, jnp.bfloat16, 0),
            (160, E5M2, jnp.bfloat16, 128),
        ],
        2,
    ),
)
def test_dequantize_rows(width, format, out, count):
    """To the bit what XLA makes of them, NaN where NaN was; a scale of another row or block, or a last row left out."""
    q = quantize_local(jnp.asarray(values(6, 384, width)), format, (1, 128))
    words = jnp.concatenate(
        [jax.lax.bitcast_convert_type(q.scale, jnp.int32), jnp.full((384, 3), -1)],
        axis=1,
    )
    run = lambda data, words, ends: dequantize_rows(data, words, ends, dtype=out)  # noqa: E731
    got = interpret(
        run,
        jax.lax.bitcast_convert_type(q.data, DTYPES[format.dtype]),
        words,
        np.array([999, count], np.int32),
    )
    want = np.asarray(dequantize_local(q, out), np.float32)
    np.testing.assert_array_equal(np.float32(got)[:count], want[:count])


def test_dequantize_refuses_what_it_cannot_tile():
    """Rows that fill no block, a width that the copy engine does not swizzle, scales that are not there."""
    one = jnp.zeros(1, jnp.int32)
    for shape, words in (((100, 128), 1), ((128, 48), 1), ((128, 256), 1)):
        with pytest.raises(
            Unsupported,
            match="the kernel takes multiples of 128 rows and of 32 columns",
        ):
            dequantize_rows(jnp.zeros(shape, F8), jnp.zeros((shape[0], words), jnp.int32), one)


@pytest.mark.gpu
@pytest.mark.loose
def test_wire_on_a_card():
    """Breaks if the hardware quantizes, copies or dequantizes rows otherwise than XLA, or to other rows."""
    local = implementation("hopper")
    wire = Format(block=128)
    width = 160
    source = np.random.default_rng(0).integers(0, 384, 384).astype(np.int32)
    count = 301

    @jax.jit
    def there(x, source, places, ends):
        q = local.quantize(x, wire, (1, 128))
        words = jnp.pad(jax.lax.bitcast_convert_type(q.scale, jnp.int32), ((0, 0), (0, 2)))
        data, words = local.put_rows((q.data, words), source, places, 0, 384, ())
        ours = KMajorFp8(jax.lax.bitcast_convert_type(q.data, F8), q.scale)
        by_xla = quantize_local(x, wire, (1, 128))
        return (
            ours,
            by_xla,
            dequantize_local(q, x.dtype),
            local.dequantize_wire(
                data,
                words,
                ends,
                wire,
                x.dtype,
            ),
        )

    x = values(6, 384, width).astype(jnp.bfloat16)
    places = np.array([[[5], [count]]], np.int32)
    ours, by_xla, wide, got = jax.tree.map(np.asarray, there(x, source, places, np.int32([384])))
    check(ours, by_xla.data.view(F8).astype(np.float32), by_xla.scale, E4M3)
    np.testing.assert_array_equal(np.float32(got)[5 : 5 + count], np.float32(wide)[source[:count]])
