"""Activation: each of them against the reference, and their derivatives against float64.

Covers: activations, by name, as pairs and as functions, their clamps and derivatives; ways on tp2x2x2; bfloat16; NaN;
every error.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moax import reference
from moax.activations import GATED, NOT_ZERO, UNGATED, gates_of
from moax.inspect import collectives
from moax.ops import activate
from moax.ops.activation import activation_of
from support import TOKENS, mark_rest, program, random, rel_error, spec
from support.oracle import ops as oracle


def hidden(activation, *rows):
    """Values on both sides of every kink, clamps of 7 and zero included, none on one."""
    return 4.0 * random(0, *rows, gates_of(activation), 48)


SIX = ("swiglu", "geglu", "swiglu_oai", "silu", "gelu", "relu2")


@pytest.mark.parametrize("activation", SIX)
def test_values_and_derivatives(activation):
    """To float32's precision, in and out of the clamps; 1 - tanh^2 of gelu's derivative cancels digits."""
    h = hidden(activation, 32)
    d_a = random(1, 32, 48)
    a, pull = jax.vjp(lambda h: activate(h, activation), jnp.asarray(h))
    (d_h,) = pull(jnp.asarray(d_a))
    want = oracle.activate(h, activation)
    d_want = oracle.activate_grad(h, activation, d_a)
    assert rel_error(a, want) < 1e-6
    assert rel_error(d_h, d_want) < (1e-5 if activation in ("gelu", "geglu") else 3e-6)
    assert rel_error(a, reference.activate(jnp.asarray(h), activation)) < 1e-6


@pytest.mark.parametrize("activation", mark_rest(SIX, 2))
def test_keeps_h_alone(activation):
    """Breaks if forward leaves the float32 arrays of the function to backward, or if a or its gradient has other bits
    than the function without `jax.checkpoint`."""
    h = jnp.asarray(hidden(activation, 32), jnp.bfloat16)
    d_a = jnp.asarray(random(1, 32, 48), jnp.bfloat16)

    def plain(h):
        halves = [h[..., g, :].astype(jnp.float32) for g in range(gates_of(activation))]
        return activation_of(activation)(*halves).astype(h.dtype)

    def run(fn, h, d_a):
        a, pull = jax.vjp(fn, h)
        return a, *pull(d_a)

    residuals = jax.eval_shape(lambda h: jax.vjp(lambda h: activate(h, activation), h)[1], h)
    assert [(v.shape, v.dtype) for v in jax.tree.leaves(residuals)] == [(h.shape, h.dtype)]
    fns = (lambda h: activate(h, activation)), plain
    results = [jax.jit(functools.partial(run, fn))(h, d_a) for fn in fns]
    for got, want in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_clamped_values_have_no_gradient():
    """Past the clamp the output is constant: a gradient there would push a saturated unit on."""
    h = jnp.asarray([[[9.0, 1.0, 9.0], [1.0, -9.0, 9.0]]])
    d_h = jax.grad(lambda h: activate(h, "swiglu_oai").sum())(h)[0]
    assert d_h[0, 0] == d_h[1, 1] == d_h[0, 2] == d_h[1, 2] == 0
    assert d_h[1, 0] != 0


def steep(gate, up):
    """An activation of the caller's own."""
    return jnp.tanh(gate) * jnp.sin(3.0 * up)


leaky = functools.partial(jax.nn.leaky_relu, negative_slope=0.2)
exact = functools.partial(jax.nn.gelu, approximate=False)
OWN = {
    "reglu": lambda gate, up: jnp.maximum(gate, 0.0) * up,
    "glu": lambda gate, up: up / (1.0 + jnp.exp(-gate)),
    "quick_gelu": lambda up: up / (1.0 + jnp.exp(-1.702 * up)),
    "squared_relu": lambda up: jnp.where(up > 0, up * up, 0.0),
    "linear": lambda up: up,
    **{name: getattr(jax.nn, name) for name in UNGATED if name not in SIX and hasattr(jax.nn, name)},
    ("relu", "linear"): lambda gate, up: jnp.maximum(gate, 0.0) * up,
    ("softplus", jnp.tanh): lambda gate, up: jnp.logaddexp(gate, 0.0) * jnp.tanh(up),
    leaky: lambda up: jnp.where(up > 0, up, 0.2 * up),
    exact: lambda up: 0.5 * up * (1.0 + jax.scipy.special.erf(up / np.sqrt(2.0))),
    steep: lambda gate, up: jnp.tanh(gate) * jnp.sin(3.0 * up),
}


@pytest.mark.loose
@pytest.mark.parametrize(
    "activation",
    mark_rest([(name,) for name in list(OWN)[::-1]], 3),
    ids=lambda v: re.sub(r" at 0x\w+", "", str(v)),
)
def test_further_activations(activation):
    """Breaks if a name, a pair or a function is not the function that it says, or gate and up change places."""
    h = hidden(activation, 32)
    d_a = random(1, 32, 48)
    a, pull = jax.vjp(lambda h: activate(h, activation), jnp.asarray(h))
    (d_h,) = pull(jnp.asarray(d_a))
    with jax.enable_x64(True):
        wide = jnp.asarray(h, jnp.float64)
        parts = [wide[:, g] for g in range(gates_of(activation))]
        want, back = jax.vjp(OWN[activation], *parts)
        d_want = np.stack([np.asarray(d) for d in back(jnp.asarray(d_a, jnp.float64))], axis=1)
    assert rel_error(a, want) < 1e-6 and rel_error(d_h, d_want) < 3e-6
    assert rel_error(reference.activate(jnp.asarray(h), activation), want) < 1e-6


def test_every_name_is_tested():
    """Breaks if a name has no case, or if one is of no use alone."""
    assert set(GATED | UNGATED) == set(SIX) | {name for name in OWN if isinstance(name, str)}
    assert not set(NOT_ZERO) & set(OWN)


def test_one_function_object():
    """Breaks if the cache of compiled programs or kernels misses: an activation must be the same object each time."""
    for activation in (*SIX, ("gelu", "linear"), leaky, steep):
        assert activation_of(activation) is activation_of(activation)


@pytest.mark.parametrize("transform", (jax.jit, jax.grad, lambda f: lambda slope: jax.vmap(f)(slope[None])))
def test_no_activation_reads_a_traced_value(transform):
    """Breaks if a slope that is learned fails in the guts, without the name of the argument."""

    def total(slope):
        return activate(jnp.ones((4, 1, 8)), lambda up: up * slope).sum()

    with pytest.raises(ValueError, match=r"reads a traced value float32\[\], .* must read only its operands"):
        transform(total)(jnp.float32(2))
    assert total(jnp.float32(2)) == 64


@pytest.mark.parametrize(
    ("activation", "says"),
    [
        (jax.nn.softmax, "calls reduce_max, which mixes elements"),
        (lambda up: up - up.mean(), "calls reduce_sum, which mixes elements"),
        (lambda up: jnp.sort(up), "calls sort, which mixes elements"),
        (lambda up: up[:1], "makes arrays"),
        (lambda up: up.astype(jnp.bfloat16), "makes arrays"),
        (lambda up: up @ up, r"fails on float32 arrays .* must be an elementwise function"),
        (jax.nn.sigmoid, "must be 0 at 0, where padding is; it is 0.5"),
        (("sigmoid", "sigmoid"), "must be 0 at 0, where padding is; it is 0.25"),
        (lambda a, b, c: a, r"must be a function of \(up\) or of \(gate, up\); it takes 3"),
    ],
)
def test_what_no_activation_may_be(activation, says):
    """Breaks if a function that mixes rows or units, or that makes something of padding, is taken."""
    with pytest.raises(ValueError, match=says):
        activation_of(activation)


@pytest.mark.parametrize("activation", SIX)
def test_bfloat16(activation):
    """Computed in float32 and rounded once: no worse than half an ulp of bfloat16."""
    h = jnp.asarray(hidden(activation, 32)).astype(jnp.bfloat16)
    a = activate(h, activation)
    assert a.dtype == jnp.bfloat16
    want = activate(h.astype(jnp.float32), activation)
    np.testing.assert_array_equal(a, want.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    "way",
    mark_rest(("explicit", "custom_partitioning", "user_inside", "shard_map", "user", "user_vma"), 1),
)
def test_on_mesh(way):
    """Shardings pass through: rows over (fsdp, ep), F over tp, forward and backward, and nothing is communicated."""
    h = hidden("swiglu", 32)
    d_a = random(1, 32, 48)
    rows = spec("tp2x2x2", TOKENS, None, "tp"), spec("tp2x2x2", TOKENS, "tp")
    fn = lambda h, engine: (activate(h, "swiglu"), ())  # noqa: E731
    run = program(way, "tp2x2x2", fn, (h,), (rows[0],), rows[1], cotangents=d_a)
    assert run.under(lambda *args: collectives(run.fn, *args)) == []
    a, _, (d_h,) = run()
    want = oracle.activate(h, "swiglu")
    d_want = oracle.activate_grad(h, "swiglu", d_a)
    assert rel_error(a, want) < 1e-6
    assert rel_error(d_h, d_want) < 1e-6


def test_leading_dims():
    """[B, L, G, F] as well as [N, G, F]."""
    h = jnp.asarray(hidden("geglu", 2, 16))
    np.testing.assert_array_equal(
        activate(h, "geglu").reshape(32, -1),
        activate(h.reshape(32, 2, -1), "geglu"),
    )


def test_nan_stays_in_its_unit():
    """A NaN hidden unit is that unit's alone."""
    h = jnp.asarray(hidden("swiglu", 4)).at[1, 0, 2].set(jnp.nan)
    bad = np.isnan(activate(h, "swiglu"))
    assert bad[1, 2] and bad.sum() == 1


@pytest.mark.parametrize(
    "shape, activation, message",
    [
        ((4, 2, 8), "tan", "activation='tan' must be one of 'swiglu', 'geglu', 'swiglu_oai', 'reglu', 'glu', 'silu'"),
        ((4, 2, 8), ("relu", "reluu"), "activation='reluu' must be one of 'silu', 'gelu', 'relu2'"),
        ((4, 1, 8), "swiglu", r"h has shape \(4, 1, 8\); it must be \[..., G=2, F\]"),
        ((4, 2, 8), "silu", r"h has shape \(4, 2, 8\); it must be \[..., G=1, F\]"),
        ((8,), "silu", r"h has shape \(8,\)"),
    ],
)
def test_errors(shape, activation, message):
    """A gate where there is none, or none where there is one, would broadcast to a silent wrong answer."""
    with pytest.raises(ValueError, match=message):
        activate(jnp.zeros(shape), activation)
