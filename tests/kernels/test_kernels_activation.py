"""The kernels of the activation: in interpret mode against what `moax.moe` computes step by step, and lowered for CUDA.

Covers: activations x widths, in bf16 and formats, weighted or not; every name, and the widths of models, for CUDA; one
activation whose operations Mosaic does not know, which XLA computes, and what the log says; what is refused.
"""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moax.activations import GATED, UNGATED, gates_of
from moax.checks import Unsupported, log_once
from moax.kernels import hopper
from moax.kernels.groups import scale_rows, zero_rows
from moax.kernels.hopper.formats import find_groups, make_blocks
from moax.kernels.hopper.pallas import activation as kernels
from moax.kernels.scales import DTYPES
from moax.kernels.xla.operands import quantize as quantize_local
from moax.ops.activation import activate, activation_of
from moax.recipe import FULL, Format
from support import interpret, lower, mark_rest
from support.activations import ACTS, grouped
from support.activations import GATED as TAKES_GATE

E4M3 = Format()
E5M2 = Format("e5m2")
POW2 = Format(scale="pow2")
FALLS_BACK = {"elu", "selu", "celu", "mish"}
NAMES = [name for name in GATED | UNGATED if name not in FALLS_BACK]
# Blocks of 70, 128 and 20 rows, at rows 0, 128 and 256: padding in its second half, none, no second half. The last rows
# are of no block.
SIZES = np.array([70, 0, 128, 20], np.int32)
ROWS = 512
HALVES = 320
BLOCKS = 384
GROUPS = find_groups(jnp.asarray(SIZES), 64, ROWS)
REAL = np.asarray(GROUPS.real)


def inputs(name, width):
    """h, d_a and weights, NaN and 0 in padding; rows of many magnitudes, one of zeros, a NaN and an Inf."""
    rng = np.random.default_rng(0)
    arrays = []
    for columns in (width * (1 + TAKES_GATE[name]), width):
        x = rng.normal(size=(ROWS, columns)) * np.exp2(rng.integers(-6, 2, (ROWS, 1)))
        x[5] = 0
        arrays.append(jnp.asarray(np.where(REAL[:, None], x, np.nan), jnp.bfloat16))
    weights = np.where(REAL, rng.uniform(0.1, 1, ROWS), 0).astype(np.float32)
    return arrays[0].at[3, 4].set(jnp.nan).at[140, 7].set(jnp.inf), arrays[1], weights


def check(got, want, format=None, use="dgrad", used=HALVES):
    """In `used` rows most values are what XLA makes of `want`, the others a step off; scales to bf16's rounding."""
    got = got if format else (got[:used], None)
    real = jnp.asarray(REAL[:used])
    rtol = 2.0**-7
    atol = 2.0**-20
    data = got[0]
    want = np.asarray(zero_rows(want[:used], real), np.float32)
    if format is not None:
        q = quantize_local(
            zero_rows(jnp.asarray(want), real),
            format,
            format.row_block(2, use),
        )
        want = np.asarray(jax.lax.bitcast_convert_type(q.data, DTYPES[format.dtype]), np.float32)
        scale = q.scale
        by_columns = use != "wgrad"
        want, scale = (want, scale.T) if by_columns else (want.T, scale)
        data = data[:used] if by_columns else data[:, :used]
        np.testing.assert_allclose(
            got[1][:, :used] if by_columns else got[1][: used // 128],
            scale,
            rtol=2.0**-7,
        )
        # 1 + tanh of gelu cancels to what float32 has of the largest value, 57344 in e5m2.
        rtol, atol = (2.0**-3, 2.0**-9) if format.dtype == "e4m3" else (2.0**-2, 2.0**-5)
    assert data.dtype == (DTYPES[format.dtype] if format else jnp.bfloat16)
    assert data.shape == want.shape
    data = data.astype(np.float32)
    # A NaN stays where it is, and padding is 0.
    np.testing.assert_allclose(data, want, rtol=rtol, atol=atol)
    assert (data == want)[~np.isnan(want)].mean() > 0.99


@pytest.mark.parametrize(
    ("name", "width", "format"),
    mark_rest([("swiglu_oai", 96, None), ("swiglu", 256, E4M3), ("geglu", 128, E5M2), ("gelu", 192, None),
          ("swiglu", 128, None), ("swiglu_oai", 128, POW2), ("relu2", 128, E4M3)], 3),
)  # fmt: skip
def test_activate(name, width, format):
    """Gate and up that change places, a tile that straddles them, padding not zeroed."""
    h, _, _ = inputs(name, width)

    def run(h, sizes):
        gated = TAKES_GATE[name]
        if format is None:
            return kernels.activate_rows(h, make_blocks(sizes, ROWS, 64), ACTS[name], gated=gated)
        return kernels.activate_quantize(h, make_blocks(sizes, ROWS), ACTS[name], gated=gated, format=format)

    got = interpret(run, h, SIZES)
    check(got, activate(grouped(h, name), name), format)
    assert format is None or got.scale.shape == (width // 128, ROWS)


@pytest.mark.parametrize(
    ("name", "width", "tiles", "of_h"),
    mark_rest([("swiglu_oai", 96, 3, None), ("swiglu_oai", 128, 1, E4M3), ("swiglu", 256, 2, None),
          ("swiglu", 256, 2, E5M2), ("silu", 128, 1, None), ("silu", 128, 1, E4M3)], 2),
)  # fmt: skip
def test_gradient(name, width, tiles, of_h):
    """A derivative, a rounding or a weight that differs from the unfused path; a tile or a sum in another's place; a
    buffer used again too early."""
    h, d_a, weights = inputs(name, width)
    used = HALVES if of_h is None else BLOCKS

    def run(h, d_a, sizes, weights):
        if of_h is None:
            return kernels.activate_grad_rows(
                h,
                d_a,
                make_blocks(sizes, ROWS, 64),
                ACTS[name],
                weights=weights,
            )
        blocks = make_blocks(sizes, ROWS)
        return kernels.activate_grad_quantize(
            h,
            d_a,
            blocks,
            ACTS[name],
            weights=weights,
            of_h=of_h,
        )

    got_a, *got_d_h, inner = interpret(run, h, d_a, SIZES, weights)
    a, pull = jax.vjp(lambda h: activate(grouped(h, name), name), h)
    (d_h,) = pull(scale_rows(d_a, weights, GROUPS))
    check(got_a, scale_rows(a, weights, GROUPS), of_h and E4M3, "wgrad", used)
    for got, use in zip(got_d_h, ("dgrad", "wgrad"), strict=False):
        check(got, d_h, of_h, use, used)
    products = np.where(REAL[:, None], np.asarray(d_a, np.float64) * np.asarray(a, np.float64), 0)
    products = products.reshape(ROWS, tiles, -1)[:used]
    want = products.sum(-1).T
    magnitude = np.abs(products).sum(-1).T
    assert inner.shape == (tiles, ROWS) and inner.dtype == np.float32
    inner = inner[:, :used]
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.isfinite(inner), finite)
    assert (np.abs(inner[finite] - want[finite]) <= 2.0**-9 * magnitude[finite] + 1e-30).all()


def test_which_fall_back():
    """Breaks if an activation leaves the kernels, or if one that they cannot compute is taken for one that they can."""
    why_not = kernels.why_not_in_kernels
    assert {n for n in GATED | UNGATED if why_not(activation_of(n), gates_of(n) == 2) is not None} == FALLS_BACK


@pytest.mark.parametrize(
    ("name", "width"),
    mark_rest(
        [
            ("swiglu", 1408),
            ("swiglu", 2880),
            (NAMES[-1], 128),
            *((name, 128) for name in NAMES[:-1]),
            *(("swiglu", width) for width in (96, 768, 7168)),
        ],
        3,
    ),
)
def test_lowers_for_cuda(name, width):
    """Breaks if Mosaic does not lower an operation that `KNOWN` says it knows, a width of a model, or one of tiles of
    32, 64 or 128 columns; or if a width does not fit in SMEM. All kernels are lowered for one activation with a gate
    and one without; the others are lowered in the kernel of the gradient, which computes the activation too."""
    act = activation_of(name)
    gated = gates_of(name) == 2
    pow2 = Format("e5m2", scale="pow2")
    h, d_a = (jax.ShapeDtypeStruct((512, width * n), jnp.bfloat16) for n in (1 + gated, 1))
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    weights = jax.ShapeDtypeStruct((512,), jnp.float32)
    in_all_kernels = name in ("swiglu", "relu2")
    forward = [kernels.activate_rows] if in_all_kernels else []
    backward = [(kernels.activate_grad_rows, {})]
    if width % 128 == 0 and in_all_kernels:
        forward.append(kernels.activate_quantize)
        backward.append((kernels.activate_grad_quantize, dict(of_a=pow2, of_h=pow2)))
    for fn in forward:

        def run(h, s, fn=fn):
            return fn(h, make_blocks(s, 512), act, gated=gated)

        lower(run, h, sizes)
    for fn, options in backward:

        def run(h, d, s, w, fn=fn, options=options):
            return fn(h, d, make_blocks(s, 512), act, weights=w, **options)

        lower(run, h, d_a, sizes, weights)


def test_fall_back_to_xla(caplog):
    """Breaks if an activation that the kernels do not know fails, is silently slow, or lets NaN of padding through."""
    act = activation_of("mish")
    groups = find_groups(jnp.array([70, 128], jnp.int32), 128, 256)
    real = np.asarray(groups.real)
    rng = np.random.default_rng(0)
    h = np.where(real[:, None, None], rng.normal(size=(256, 1, 64)), np.nan)
    d_a = np.where(real[:, None], rng.normal(size=(256, 64)), np.nan)
    h = jnp.asarray(h, jnp.bfloat16)
    d_a = jnp.asarray(d_a, jnp.bfloat16)
    weights = jnp.asarray(real, jnp.float32) / 2
    log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        a = hopper.activate(h, act, FULL, groups)
        back, d_h, _, inner = hopper.activate_grad_quantize(
            h,
            d_a,
            act,
            FULL,
            groups,
            weights=weights,
        )
    wide, d_wide = (zero_rows(v, groups.real).astype(jnp.float32) for v in (h[:, 0], d_a))
    want, pull = jax.vjp(jax.nn.mish, wide)
    for got, wanted in (
        (a, want),
        (back, want / 2),
        (d_h.reshape(256, -1), pull(d_wide / 2)[0]),
    ):
        np.testing.assert_allclose(np.asarray(got, np.float32), wanted, rtol=2e-2, atol=1e-3)
    np.testing.assert_allclose(inner[real], (want * d_wide).sum(1)[real], rtol=2e-2, atol=2e-2)
    assert any("do not know" in r.getMessage() and "XLA computes it" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize(
    ("forward", "backward", "width"),
    [(kernels.activate_rows, kernels.activate_grad_rows, 48),
     (kernels.activate_quantize, kernels.activate_grad_quantize, 96)],
)  # fmt: skip
def test_refuses(forward, backward, width):
    """Boxes or blocks that straddle gate and up; an h or d_a of another dtype, read as if it were bf16."""
    blocks = make_blocks(jnp.array([128]), 128)
    act = ACTS["swiglu"]
    h = jnp.zeros((128, 256), jnp.bfloat16)
    with pytest.raises(Unsupported, match=f"F is {width}"):
        forward(h[:, : 2 * width], blocks, act, gated=True)
    with pytest.raises(Unsupported, match="float32"):
        forward(h.astype(jnp.float32), blocks, act, gated=True)
    with pytest.raises(ValueError, match="d_a"):
        backward(h, jnp.zeros((128, 128)), blocks, act, weights=jnp.zeros(128))
