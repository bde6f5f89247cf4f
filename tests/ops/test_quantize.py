"""Quantize and dequantize: bits and scales against NumPy's own rounding, block by block.

Covers: formats x shapes x blocks; values that are tiny, huge or not finite; rows in groups.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moax import recipe
from moax.kernels.groups import find_groups
from moax.kernels.scales import dequantize
from moax.kernels.xla import quantize_for_matmul
from moax.kernels.xla.operands import quantize as quantize_by_xla
from moax.ops import grouped_matmul
from moax.recipe import Format, Recipe
from moax.types import QArray
from support import random
from support.oracle.formats import BITS, by_blocks, expand
from support.oracle.formats import quantize as quantize_by_numpy

FORMATS = {
    "fp8_block": recipe.RECIPES["fp8_block"].w,
    "mxfp8": recipe.RECIPES["mxfp8"].w,
    "pow2": Format(block=128, tile=128, scale="pow2"),
    "e5m2": Format(dtype="e5m2", block=64),
}


def quantize(x, format=Format(), block=None) -> QArray:
    """The values and scales of x by XLA, in blocks along the last dim unless `block` says others."""
    return quantize_by_xla(x, format, block or format.row_block(x.ndim, "fprop"))


def values_of(q: QArray):
    """The values that the bits say, float64."""
    return np.asarray(q.data).view(BITS[q.dtype][2]).astype(np.float64)


def scales_of(q: QArray):
    """The scales as float64, exponents as powers of two."""
    scale = np.asarray(q.scale)
    return 2.0 ** (scale.astype(np.float64) - 127) if scale.dtype == np.uint8 else scale.astype(np.float64)


def check(q: QArray, want):
    np.testing.assert_array_equal(values_of(q), want[0])
    np.testing.assert_array_equal(scales_of(q), want[1])


def wide_range(seed, *shape):
    """Normals times powers of two from 2^-20 to 2^20, a zero here and there."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 20, shape)
    return np.where(rng.random(shape) < 0.05, 0.0, x).astype(np.float32)


ROWS = [
    ((5, 2880), "fprop"),
    ((7, 200), "fprop"),
    ((4, 1), "fprop"),
    ((200, 3), "wgrad"),
    ((1, 9), "wgrad"),
]
ROWS += [((6, 2, 96), "fprop"), ((96, 2, 5), "wgrad")]
WEIGHTS = [
    ((2, 200, 96), "fprop"),
    ((2, 200, 96), "dgrad"),
    ((3, 1, 130), "fprop"),
    ((2, 96, 2, 200), "fprop"),
]
WEIGHTS += [((2, 96, 2, 200), "dgrad")]


@pytest.mark.parametrize("name", FORMATS)
def test_matches_numpy(name):
    """Every bit and every scale, rows and weights, blocks along either dim, edge blocks of 2880, 200, 96, 1
    included."""
    format = FORMATS[name]
    for kind, (shape, use) in [
        *(("row", r) for r in ROWS),
        *(("weight", w) for w in WEIGHTS),
    ]:
        block = getattr(format, f"{kind}_block")(len(shape), use)
        x = wide_range(0, *shape)
        q, narrow = jax.jit(lambda x, b=block: (q := quantize(x, format, block=b), dequantize(q)))(x)
        want = quantize_by_numpy(x, format, block)
        check(q, want)
        assert q.data.dtype == jnp.uint8
        assert q.scale.dtype == (jnp.uint8 if format.scale == "e8m0" else jnp.float32)
        back = values_of(q) * expand(want[1], shape, block)
        np.testing.assert_array_equal(narrow, back.astype(np.float32))


@pytest.mark.parametrize("name", FORMATS)
def test_error_bound(name):
    """|x - back| <= half an ulp of the format: 2^-4 |x| (e5m2: 2^-3) or half its least step times the block's scale, so
    at most 2^-4 (2^-3) of the block's amax. A rounding to zero, or a scale too small, breaks it."""
    format = FORMATS[name]
    mantissa, least, _ = BITS[format.dtype]
    for shape in ((5, 2880), (200, 96), (3, 1)):
        x = wide_range(1, *shape)
        q, back = jax.jit(lambda x: (q := quantize(x, format), dequantize(q)))(x)
        off = np.abs(np.asarray(back, np.float64) - x)
        scale = expand(scales_of(q), shape, q.block)
        half = 2.0 ** -(mantissa + 1)
        bound = np.maximum(half * np.abs(x), 2.0 ** (least - mantissa - 1) * scale)
        assert (off <= bound * (1 + 1e-6)).all()
        amax = expand(by_blocks(x, q.block), shape, q.block)
        assert (off <= half * amax * (1 + 1e-6)).all()


@given(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=40, max_size=40))
def test_error_bound_of_any_floats(values):
    """From subnormals to 2^126, in one block: the same bound, but that a block below 448 * 2^-126 becomes zero."""
    x = np.asarray(values, np.float32).reshape(2, 20)
    q = _quantize_blocks_of_8(jnp.asarray(x))
    scale = expand(scales_of(q), x.shape, q.block)
    off = np.abs(np.asarray(dequantize(q), np.float64) - x)
    assert np.isfinite(scale).all() and (scale > 0).all()
    assert (off <= 2.0**-4 * np.abs(x) * (1 + 1e-6) + 2.0**-10 * scale + 2.0**-126).all()


@jax.jit
def _quantize_blocks_of_8(x):
    return quantize(x, Format(block=8))


@pytest.mark.parametrize("name", FORMATS)
def test_values_of_the_format_are_exact(name):
    """Powers of two times the format's own values come back to the bit, as scales are exact there."""
    format = FORMATS[name]
    every = np.arange(256, dtype=np.uint8).view(BITS[format.dtype][2]).astype(np.float32)
    every = every[np.isfinite(every)]
    x = np.stack([every * np.float32(2.0**e) for e in (-40, -1, 0, 30)])
    format = dataclasses.replace(format, block=len(every))
    np.testing.assert_array_equal(
        dequantize(quantize(jnp.asarray(x), format, block=(1, len(every)))),
        x,
    )


def test_mxfp8_is_exact_in_bfloat16():
    """3 bits of mantissa times a power of two: what dequantizes to bfloat16 loses nothing; DESIGN.md relies on it."""
    q = quantize(jnp.asarray(wide_range(2, 32, 200)), FORMATS["mxfp8"])
    narrow = dequantize(q, jnp.bfloat16)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow.astype(jnp.float32), dequantize(q))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tiny", (0.0, 1e-38, 1e-45, -1e-40))
def test_zero_and_tiny_blocks(name, tiny):
    """They quantize to zero with a finite scale; a scale of 0 would make NaN of 0 / 0."""
    q = quantize(jnp.full((3, 200), tiny, jnp.float32), FORMATS[name])
    np.testing.assert_array_equal(scales_of(q), 1.0)
    np.testing.assert_array_equal(dequantize(q), 0.0)


def test_small_but_normal_blocks():
    """1e-30 is not tiny: it keeps its precision."""
    x = 1e-30 * random(3, 4, 128)
    back = dequantize(quantize(jnp.asarray(x), FORMATS["fp8_block"]))
    assert (np.abs(back - x) <= np.maximum(2.0**-4 * np.abs(x), 2.0**-10 * np.abs(x).max() / 448) * 1.001).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf))
def test_not_finite_stays_where_it_is(name, value):
    """NaN in its own element; every other element, and every scale, as if it had been 0. An Inf that set the scale
    would turn its block to zeros, and the loss would look fine."""
    x = wide_range(4, 6, 200)
    holes = np.zeros(x.shape, bool)
    holes[1, 3] = holes[1, 150] = holes[4] = True
    q0 = quantize(jnp.asarray(np.where(holes, 0.0, x).astype(np.float32)), FORMATS[name])
    q1 = quantize(jnp.asarray(np.where(holes, value, x).astype(np.float32)), FORMATS[name])
    np.testing.assert_array_equal(q0.scale, q1.scale)
    np.testing.assert_array_equal(np.isnan(dequantize(q1)), holes)
    np.testing.assert_array_equal(np.asarray(q0.data)[~holes], np.asarray(q1.data)[~holes])


def test_bfloat16_operand():
    """Quantized from its float32 value, as the matmuls of a bfloat16 model need."""
    x = jnp.asarray(wide_range(5, 8, 200)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(quantize(x).data, quantize(x.astype(jnp.float32)).data)


def test_rounding_is_not_undone():
    """Breaks if a compiler may take the cast to fewer bits and back for no cast: XLA does on GPUs, and a recipe would
    quantize nothing wherever no collective lies between."""

    def round_trip(x):
        return dequantize(quantize(x, Format(block=128)))

    text = jax.jit(round_trip).lower(jax.ShapeDtypeStruct((4, 256), jnp.float32)).as_text()
    assert "stablehlo.optimization_barrier" in text


GROUPS, ALIGN, PADDED, WIDTH = (7, 0, 9, 4), 8, 48, 24
STARTS = (0, 8, 8, 24)
BY_EIGHT = {
    "float32": Format(block=8),
    "e8m0": Format(block=8, scale="e8m0"),
    "e5m2": Format(dtype="e5m2", block=8),
}


def dirty(seed):
    """Rows with NaN in padding, and which of them are real."""
    x = random(seed, PADDED, WIDTH)
    real = np.zeros(PADDED, bool)
    for n, start in zip(GROUPS, STARTS, strict=True):
        real[start : start + n] = True
    return np.where(real[:, None], x, np.nan).astype(np.float32), real


def check_groups(q, x, real, format):
    """Values and scales, in blocks of 8 rows, of each group against NumPy's, of the group alone."""
    data, scale = values_of(q), scales_of(q)
    np.testing.assert_array_equal(data[~real], 0.0)
    for n, start in zip(GROUPS, STARTS, strict=True):
        if n:
            values, want = quantize_by_numpy(x[start : start + n], format, (8, 1))
            np.testing.assert_array_equal(data[start : start + n], values)
            begin = start // 8
            np.testing.assert_array_equal(scale[begin : begin + len(want)], want)


@pytest.mark.parametrize("name", BY_EIGHT)
def test_each_group_is_quantized_by_itself(name):
    """Breaks if a block has rows of two groups, padding enters a scale, or rows past the last group are read."""
    x, real = dirty(0)
    recipe = Recipe(BY_EIGHT[name], None, None)

    @jax.jit
    def quantize_groups(x, sizes):
        return quantize_for_matmul(x, recipe, "x", find_groups(sizes, ALIGN, PADDED))[1]

    q = quantize_groups(x, np.asarray(GROUPS))
    check_groups(q, x, real, BY_EIGHT[name])
    assert np.isfinite(dequantize(q)).all()


def test_is_what_a_matmul_multiplies():
    """Breaks if rows quantized here and multiplied differ from a matmul that quantizes: the same dw."""
    x, _ = dirty(2)
    sizes = jnp.asarray(GROUPS)
    recipe = Recipe(Format(block=8), None, None)
    _, q = quantize_for_matmul(jnp.asarray(x), recipe, "x", find_groups(sizes, ALIGN, PADDED))
    dy = jnp.asarray(random(3, PADDED, 6))
    w = jnp.zeros((len(GROUPS), x.shape[1], 6))

    def wgrad(x, **options):
        _, pull = jax.vjp(lambda w: grouped_matmul(x, w, sizes, align=ALIGN, **options), w)
        return pull(dy)[0]

    want = wgrad(jnp.asarray(x), recipe=recipe)
    got = wgrad(dequantize(q))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
