"""Activation: all six against the reference, and their derivatives against float64.

Covers: activations, their clamps and derivatives; ways on tp2x2x2; bfloat16; NaN; every error.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moax import reference
from moax.config import GATED, UNGATED
from moax.inspect import collectives
from moax.ops import activate
from support import TOKENS, program, random, rel_error, some, spec
from support.oracle import ops as oracle


def hidden(activation, *rows):
    """Values on both sides of every kink, clamps of 7 and zero included, none on one."""
    return 4.0 * random(0, *rows, 2 if activation in GATED else 1, 48)


@pytest.mark.parametrize("activation", GATED + UNGATED)
def test_values_and_derivatives(activation):
    """To float32's precision, in and out of the clamps; 1 - tanh^2 of gelu's derivative cancels a digit."""
    h, d_a = hidden(activation, 32), random(1, 32, 48)
    a, pull = jax.vjp(lambda h: activate(h, activation), jnp.asarray(h))
    (d_h,) = pull(jnp.asarray(d_a))
    want, d_want = oracle.activate(h, activation), oracle.activate_grad(h, activation, d_a)
    assert rel_error(a, want) < 1e-6
    assert rel_error(d_h, d_want) < 3e-6
    assert rel_error(a, reference.activate(jnp.asarray(h), activation)) < 1e-6


def test_clamped_values_have_no_gradient():
    """Past the clamp the output is constant: a gradient there would push a saturated unit on."""
    h = jnp.asarray([[[9.0, 1.0, 9.0], [1.0, -9.0, 9.0]]])
    d_h = jax.grad(lambda h: activate(h, "swiglu_oai").sum())(h)[0]
    assert d_h[0, 0] == d_h[1, 1] == d_h[0, 2] == d_h[1, 2] == 0
    assert d_h[1, 0] != 0


@pytest.mark.parametrize("activation", GATED + UNGATED)
def test_bfloat16(activation):
    """Computed in float32 and rounded once: no worse than half an ulp of bfloat16."""
    h = jnp.asarray(hidden(activation, 32)).astype(jnp.bfloat16)
    a = activate(h, activation)
    assert a.dtype == jnp.bfloat16
    want = activate(h.astype(jnp.float32), activation)
    np.testing.assert_array_equal(a, want.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    "way", some(("explicit", "custom_partitioning", "user_inside", "shard_map", "user", "user_vma"), 3)
)
def test_on_mesh(way, fresh_compile):
    """Shardings pass through: rows over (fsdp, ep), F over tp, forward and backward, and nothing is communicated."""
    h, d_a = hidden("swiglu", 32), random(1, 32, 48)
    rows = spec("tp2x2x2", TOKENS, None, "tp"), spec("tp2x2x2", TOKENS, "tp")
    fn = lambda h, engine: (activate(h, "swiglu"), ())  # noqa: E731
    run = program(way, "tp2x2x2", fn, (h,), (rows[0],), rows[1], cotangents=d_a)
    assert run.under(lambda *args: collectives(run.fn, *args)) == []
    a, _, (d_h,) = run()
    want, d_want = oracle.activate(h, "swiglu"), oracle.activate_grad(h, "swiglu", d_a)
    assert rel_error(a, want) < 1e-6
    assert rel_error(d_h, d_want) < 1e-6


def test_leading_dims():
    """[B, L, G, F] as well as [N, G, F]."""
    h = jnp.asarray(hidden("geglu", 2, 16))
    np.testing.assert_array_equal(activate(h, "geglu").reshape(32, -1), activate(h.reshape(32, 2, -1), "geglu"))


def test_nan_stays_in_its_unit():
    """A NaN hidden unit is that unit's alone."""
    h = jnp.asarray(hidden("swiglu", 4)).at[1, 0, 2].set(jnp.nan)
    bad = np.isnan(activate(h, "swiglu"))
    assert bad[1, 2] and bad.sum() == 1


@pytest.mark.parametrize(
    "shape, activation, message",
    [
        (
            (4, 2, 8),
            "tanh",
            "activation='tanh' must be one of 'swiglu', 'geglu', 'swiglu_oai', 'silu', 'gelu', 'relu2'",
        ),
        ((4, 1, 8), "swiglu", r"h has shape \(4, 1, 8\); activation='swiglu' needs \[..., 2, F\]"),
        ((4, 2, 8), "silu", r"h has shape \(4, 2, 8\); activation='silu' needs \[..., 1, F\]"),
        ((8,), "silu", r"h has shape \(8,\)"),
    ],
)
def test_errors(shape, activation, message):
    """A gate where there is none, or none where there is one, would broadcast to a silent wrong answer."""
    with pytest.raises(ValueError, match=message):
        activate(jnp.zeros(shape), activation)
