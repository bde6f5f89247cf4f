"""The two oracles of the tests against each other: `moax.reference` in float32, whose gradients are those of autodiff,
and tests/support/oracle in float64 NumPy, whose gradients are written by hand.

Covers: every router, activation, bias and shared expert, with every gradient; dropped assignments.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moax import MoEConfig, RouterConfig, reference
from support import make_params, mark_rest, random, rel_norm
from support.block import BY_EXPERT, cotangent, loss_of
from support.oracle import ops
from support.oracle.block import block

H, F, E, T = 12, 10, 8, 96


def config_of(router=None, **options):
    return MoEConfig(
        **{**dict(d_model=H, d_ff=F, num_experts=E, top_k=2), **options},
        router=RouterConfig(**(router or {})),
    )


LOSSES = dict(aux_loss=0.02, z_loss=0.003)
CASES = {
    "deepseek": config_of(
        dict(score="sigmoid", num_groups=4, top_groups=2, scale=2.5, bias=True, **LOSSES), top_k=4, shared_d_ff=7
    ),
    "gpt-oss, dropped": config_of(
        dict(order="topk_then_score", logits_bias=True, **LOSSES), top_k=4, activation="swiglu_oai", use_bias=True
    ),
    "sigmoid, top-k first": config_of(
        dict(score="sigmoid", order="topk_then_score", **LOSSES), activation="geglu", use_bias=True
    ),
    "not normalized, shared": config_of(
        dict(normalize=False, scale=1.5, **LOSSES), activation="relu2", use_bias=True, shared_d_ff=9
    ),
    "softmax": config_of(LOSSES),
    "top-k first": config_of(dict(order="topk_then_score", **LOSSES)),
    "sigmoid": config_of(dict(score="sigmoid", scale=2.5, **LOSSES)),
    "selection bias": config_of(dict(score="sigmoid", bias=True)),
    "selection bias, top-k first": config_of(dict(order="topk_then_score", bias=True)),
    "logits bias": config_of(dict(logits_bias=True, **LOSSES)),
    "top1": config_of(top_k=1),
    "top1 not normalized by itself": config_of(dict(score="sigmoid"), top_k=1),
    "all experts": config_of(top_k=E),
    "one expert": config_of(top_k=1, num_experts=1),
    "groups, top2": config_of(dict(num_groups=4, top_groups=2, score="sigmoid", bias=True), top_k=3),
    "groups, max": config_of(dict(num_groups=2, top_groups=1, group_score="max")),
    "groups, sum_topk": config_of(dict(num_groups=2, top_groups=2, group_score="sum_topk"), top_k=4),
    "groups of one": config_of(dict(num_groups=E, top_groups=3, group_score="top2"), top_k=3),
    **{name: config_of(activation=name, use_bias=True) for name in ("swiglu", "silu", "gelu")},
}  # fmt: skip


@pytest.mark.parametrize("name", mark_rest(CASES, 4))
def test_every_option(name):
    """Breaks if an oracle is wrong: every other test of values, of gradients and of drops believes one of them."""
    config = CASES[name]
    x = jnp.asarray(random(7, T, H))
    params = make_params(config)
    mask = np.random.default_rng(1).random((T, config.top_k)) < 0.6 if "dropped" in name else None

    def total(x, params):
        y, stats = reference.moe(x, params, config, mask)
        return sum(loss_of(y, stats)), (y, stats)

    (dx, dparams), (y, stats) = jax.jit(jax.grad(total, (0, 1), has_aux=True))(x, params)
    want = block(x, params, config, cotangent(x.shape), d_losses=(1, 1), has_room=mask)
    assert y.dtype == jnp.float32 and rel_norm(y, want.y) < 1e-6 and rel_norm(dx, want.dx) < 2e-6
    expected = {f.name for f in dataclasses.fields(params) if getattr(params, f.name) is not None}
    assert set(want.dparams) == expected
    for field, value in want.dparams.items():
        assert rel_norm(getattr(dparams, field), value, per=0 if field in BY_EXPERT else None) < 2e-6, field
    losses = [want.stats[n] for n in ("aux_loss", "z_loss")]
    np.testing.assert_allclose([stats.aux_loss, stats.z_loss], losses, rtol=2e-6)
    np.testing.assert_array_equal(stats.tokens_per_expert, want.stats["tokens_per_expert"])
    assert int(stats.dropped) == want.stats["dropped"] and (mask is None or stats.dropped > 0)


@pytest.mark.parametrize("name", CASES)
def test_routing(name):
    """Breaks if experts are not in order of preference, best first, or weights not those of their experts."""
    config = CASES[name]
    router = CASES[name].router
    logits = 2.0 * random(3, T, config.num_experts)
    bias = random(4, config.num_experts) if router.bias else None
    experts = ops.choose_experts(logits, router, config.top_k, bias)
    weights, aux, z = ops.route_losses(logits, experts, router)
    got = reference.route(
        jnp.asarray(logits),
        router,
        config.top_k,
        None if bias is None else jnp.asarray(bias),
    )
    np.testing.assert_array_equal(got.experts, experts)
    np.testing.assert_allclose(got.weights, weights, rtol=2e-6)
    np.testing.assert_allclose([got.aux_loss, got.z_loss], [aux, z], rtol=2e-6)


def test_activations_reach_their_clamps():
    """Breaks if `swiglu_oai` clamps the wrong side, or not at all: random numbers rarely reach 7."""
    gate, up = np.meshgrid([-20.0, -7.0, 0.5, 7.0, 20.0], [-20.0, -7.5, -6.5, 0.0, 6.5, 7.5, 20.0])
    h = np.stack([gate.ravel(), up.ravel()])
    # 200 (1 + tanh) is off by 1.3e-5 at gate = up = -20 where XLA's tanh is -1 + 6e-8.
    for name, atol in (("swiglu", 1e-6), ("geglu", 2e-5), ("swiglu_oai", 1e-6)):
        np.testing.assert_allclose(
            reference.activate(jnp.asarray(h, jnp.float32), name),
            ops.activate(h, name),
            rtol=2e-6,
            atol=atol,
        )
    clamped = reference.activate(jnp.asarray([[20.0, -20.0], [20.0, -20.0]]), "swiglu_oai")
    np.testing.assert_allclose(
        clamped,
        [7.0 * 8.0 / (1.0 + np.exp(-1.702 * 7.0)), 0.0],
        rtol=2e-6,
        atol=1e-6,
    )


def test_balanced_aux_loss_is_the_coefficient():
    """Breaks if the loss is not scaled so that a balanced router pays the coefficient, whatever E, K and T."""
    # Each token prefers another expert, by next to nothing.
    logits = 1e-6 * jnp.asarray([np.roll(np.arange(E), t) for t in range(2 * E)], jnp.float32)
    for top_k in (1, 2, 4):
        routing = reference.route(logits, RouterConfig(aux_loss=0.25, normalize=False), top_k)
        np.testing.assert_array_equal(routing.tokens_per_expert, np.full(E, 2 * top_k))
        np.testing.assert_allclose(routing.aux_loss, 0.25, rtol=1e-5)


def test_ties_go_to_the_lower_expert():
    """Breaks if equal scores are broken otherwise than by index, as `lax.top_k` does."""
    routing = reference.route(jnp.zeros((2, E)), RouterConfig(), 3)
    np.testing.assert_array_equal(routing.experts, [[0, 1, 2]] * 2)


def test_any_leading_dims():
    """Breaks if tokens are mixed by their leading dims, or losses are means over anything but all of them."""
    config = config_of(LOSSES)
    x = jnp.asarray(random(7, T, H))
    params = make_params(config)
    run = jax.jit(reference.moe, static_argnums=2)
    y, stats = run(x, params, config)
    cut, cut_stats = run(x.reshape(2, 3, T // 6, H), params, config)
    np.testing.assert_array_equal(cut.reshape(T, H), y)
    np.testing.assert_array_equal(cut_stats.aux_loss, stats.aux_loss)


def test_a_comparison_passes_no_nan():
    """Breaks if a NaN, or a result of another shape, is near to anything."""
    assert not rel_norm(np.array([np.nan]), np.ones(1)) < 1
    with pytest.raises(AssertionError, match="shape"):
        rel_norm(jnp.ones(2), np.ones(3))
