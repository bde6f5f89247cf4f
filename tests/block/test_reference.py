"""The oracle itself, against a loop over tokens in NumPy float64 that knows neither arrays of tokens nor autodiff.

Covers: every router, activation, bias and shared expert; drops; gradients by finite differences.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moax
from moax import MoEConfig, RouterConfig, reference
from moax.params import param_shapes
from support import some

H, F, E, T = 12, 10, 8, 24
TANH_GELU = math.sqrt(2 / math.pi)


def make(config: MoEConfig, seed: int = 0):
    """x [T, H] and parameters, biases and all, as float64 NumPy."""
    rng = np.random.default_rng(seed)
    scale = dict(router=2.0, router_bias=0.4, logits_bias=0.5, bi=0.3, bo=0.3)
    values = {
        name: None
        if shape is None
        else scale.get(name, 1.0) * rng.standard_normal(shape) * (1.0 if len(shape) == 1 else shape[-2] ** -0.5)
        for name, shape in dataclasses.asdict(param_shapes(config)).items()
    }
    return rng.standard_normal((T, config.d_model)), moax.MoEParams(**values)


# The naive block: one token, one expert, one number at a time.


def sigmoid(v):
    return 1 / (1 + math.exp(-v))


def activate(gate, up, name):
    gelu = lambda v: 0.5 * v * (1 + math.tanh(TANH_GELU * (v + 0.044715 * v**3)))  # noqa: E731
    return {
        "swiglu": lambda: gate * sigmoid(gate) * up,
        "geglu": lambda: gelu(gate) * up,
        "swiglu_oai": lambda: min(gate, 7) * sigmoid(1.702 * min(gate, 7)) * (max(-7, min(up, 7)) + 1),
        "silu": lambda: up * sigmoid(up),
        "gelu": lambda: gelu(up),
        "relu2": lambda: max(up, 0) ** 2,
    }[name]()


def expert(x, wi, wo, bi, bo, name):
    bi = np.zeros(wi.shape[1:]) if bi is None else bi
    h = [
        [sum(x[i] * wi[i, g, f] for i in range(len(x))) + bi[g, f] for f in range(wi.shape[2])] for g in range(len(bi))
    ]
    a = [activate(h[0][f], h[-1][f], name) for f in range(wi.shape[2])]
    return np.array([sum(a[f] * wo[f, i] for f in range(len(a))) for i in range(wo.shape[1])]) + (
        0 if bo is None else bo
    )


def scores_of(logits, config):
    if config.score == "sigmoid":
        return [sigmoid(v) for v in logits]
    e = [math.exp(v - max(logits)) for v in logits]
    return [v / sum(e) for v in e]


def best(values, count):
    """The indices of the greatest, greatest first, the lower index first among equals."""
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def choose(logits, config: RouterConfig, top_k, bias):
    """(experts, weights) of one token."""
    first = config.order == "score_then_topk"
    rank = [
        v + (0 if bias is None else b)
        for v, b in zip(scores_of(logits, config) if first else logits, bias_of(bias, logits), strict=True)
    ]
    if config.num_groups > 1:
        size = len(rank) // config.num_groups
        groups = [rank[i * size : (i + 1) * size] for i in range(config.num_groups)]
        count = {"max": 1, "top2": 2, "sum_topk": top_k // config.top_groups}[config.group_score]
        kept = best([sum(sorted(g)[::-1][:count]) for g in groups], config.top_groups)
        rank = [v if i // size in kept else -math.inf for i, v in enumerate(rank)]
    experts = best(rank, top_k)
    if first:
        weights = [scores_of(logits, config)[e] for e in experts]
    else:
        weights = scores_of([logits[e] for e in experts], config)
    if config.normalize and top_k > 1:
        weights = [w / sum(weights) for w in weights]
    return experts, [config.scale * w for w in weights]


def bias_of(bias, logits):
    return [0.0] * len(logits) if bias is None else bias


def block(x, p: moax.MoEParams, config: MoEConfig, kept=None):
    """(y, aux, z, tokens per expert)."""
    y, counts, shares, z = np.zeros_like(x), np.zeros(config.num_experts, int), np.zeros(config.num_experts), 0.0
    for t, token in enumerate(x):
        logits = [float(token @ p.router[:, e]) for e in range(config.num_experts)]
        logits = [v + b for v, b in zip(logits, bias_of(p.logits_bias, logits), strict=True)]
        experts, weights = choose(logits, config.router, config.top_k, p.router_bias)
        for k, (e, w) in enumerate(zip(experts, weights, strict=True)):
            counts[e] += 1
            if kept is None or kept[t, k]:
                bi, bo = None if p.bi is None else p.bi[e], None if p.bo is None else p.bo[e]
                y[t] += w * expert(token, p.wi[e], p.wo[e], bi, bo, config.activation)
        if p.shared_wi is not None:
            y[t] += expert(token, p.shared_wi, p.shared_wo, None, None, config.activation)
        all_scores = scores_of(logits, config.router)
        shares += np.array(all_scores) / sum(all_scores)
        z += math.log(sum(math.exp(v) for v in logits)) ** 2 / len(x)
    aux = config.num_experts / (config.top_k * len(x) ** 2) * float(shares @ counts)
    return y, config.router.aux_loss * aux, config.router.z_loss * z, counts


def config_of(router=None, **options):
    return MoEConfig(
        **{**dict(d_model=H, d_ff=F, num_experts=E, top_k=2), **options}, router=RouterConfig(**(router or {}))
    )


LOSSES = dict(aux_loss=0.02, z_loss=0.003)
CASES = {
    "softmax": config_of(LOSSES),
    "not normalized": config_of(dict(normalize=False, scale=1.5)),
    "top-k first": config_of(dict(order="topk_then_score", **LOSSES)),
    "sigmoid": config_of(dict(score="sigmoid", scale=2.5, **LOSSES)),
    "sigmoid, top-k first": config_of(dict(score="sigmoid", order="topk_then_score")),
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
    "deepseek": config_of(
        dict(score="sigmoid", num_groups=4, top_groups=2, scale=2.5, bias=True, **LOSSES), top_k=4, shared_d_ff=7
    ),
    "gpt-oss": config_of(
        dict(order="topk_then_score", logits_bias=True), top_k=4, activation="swiglu_oai", use_bias=True
    ),
    **{name: config_of(activation=name, use_bias=True) for name in ("swiglu", "geglu", "silu", "gelu", "relu2")},
    "shared": config_of(shared_d_ff=9, use_bias=True, activation="relu2"),
}  # fmt: skip


@pytest.mark.parametrize("name", some([*CASES][::2] + [*CASES][1::2], 12))
def test_every_option(name):
    """Breaks if the oracle is wrong: every other test of values believes it."""
    config = CASES[name]
    x, params = make(config)
    y, aux, z, counts = block(x, params, config)
    got, stats = jax.jit(reference.moe, static_argnums=2)(*single(x, params), config)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, y, rtol=0, atol=3e-6 * np.abs(y).max())
    np.testing.assert_array_equal(stats.tokens_per_expert, counts)
    np.testing.assert_allclose([stats.aux_loss, stats.z_loss], [aux, z], rtol=2e-6, atol=0)
    assert stats.dropped == 0


@pytest.mark.parametrize("name", CASES)
def test_routing(name):
    """Breaks if experts are not in order of preference, best first, or weights not those of their experts."""
    config = CASES[name]
    x, params = make(config)
    logits = x @ params.router + (0 if params.logits_bias is None else params.logits_bias)
    want = [choose(list(row), config.router, config.top_k, params.router_bias) for row in logits]
    bias = None if params.router_bias is None else jnp.asarray(params.router_bias, jnp.float32)
    got = reference.route(jnp.asarray(logits, jnp.float32), config.router, config.top_k, bias)
    np.testing.assert_array_equal(got.experts, [experts for experts, _ in want])
    np.testing.assert_allclose(got.weights, [weights for _, weights in want], rtol=2e-6)


def single(x, params):
    return jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), (x, params))


def test_activations_reach_their_clamps():
    """Breaks if `swiglu_oai` clamps the wrong side, or not at all: random numbers rarely reach 7."""
    gate, up = np.meshgrid([-20.0, -7.0, 0.5, 7.0, 20.0], [-20.0, -7.5, -6.5, 0.0, 6.5, 7.5, 20.0])
    h = jnp.stack([jnp.asarray(gate.ravel(), jnp.float32), jnp.asarray(up.ravel(), jnp.float32)])
    for name in ("swiglu", "geglu", "swiglu_oai"):
        want = [activate(g, u, name) for g, u in zip(gate.ravel(), up.ravel(), strict=True)]
        np.testing.assert_allclose(reference.activate(h, name), want, rtol=2e-6, atol=1e-6)


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


def test_assignments_that_found_no_room():
    """Breaks if a dropped assignment adds to the sum, or weights are divided by the sum of those that stayed."""
    config = config_of(dict(aux_loss=0.1), use_bias=True, shared_d_ff=5)
    x, params = make(config)
    kept = np.random.default_rng(1).random((T, 2)) < 0.6
    y, aux, _, counts = block(x, params, config, kept)
    got, stats = reference.moe(*single(x, params), config, jnp.asarray(kept))
    np.testing.assert_allclose(got, y, rtol=0, atol=3e-6 * np.abs(y).max())
    assert stats.dropped == (~kept).sum()
    np.testing.assert_array_equal(stats.tokens_per_expert, counts)
    np.testing.assert_allclose(stats.aux_loss, aux, rtol=2e-6)


def test_any_leading_dims():
    """Breaks if tokens are mixed by their leading dims, or losses are means over anything but all of them."""
    config = config_of(LOSSES)
    x, params = single(*make(config))
    y, stats = reference.moe(x, params, config)
    cut, cut_stats = reference.moe(x.reshape(2, 3, 4, H), params, config)
    np.testing.assert_array_equal(cut.reshape(T, H), y)
    np.testing.assert_array_equal(cut_stats.aux_loss, stats.aux_loss)


DIFFERENTIATED = {
    "softmax": ("x", "router", "wi", "wo"),
    "deepseek": ("x", "router", "wi", "wo", "shared_wi", "shared_wo"),
    "gpt-oss": ("x", "router", "logits_bias", "wi", "wo", "bi", "bo"),
    "not normalized": ("router", "x"),
    "relu2": ("wi", "bi"),
    "geglu": ("wi", "x"),
}


@pytest.mark.parametrize("name", some([*DIFFERENTIATED][2:] + [*DIFFERENTIATED][:2], 1))
def test_gradients(name):
    """Breaks if autodiff of the oracle is not its derivative, which finite differences of the loop are, along a random
    direction of each operand where no token changes its experts; to 2e-5 of the sum of what float32 adds up."""
    config = CASES[name]
    x, params = make(config)
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((T, H))

    def naive(x, params):
        y, aux, z, counts = block(x, params, config)
        return float(np.vdot(y, weight)) + aux + z, counts

    def total(x, params):
        y, stats = reference.moe(x, params, config)
        return jnp.vdot(y, jnp.asarray(weight, jnp.float32)) + stats.aux_loss + stats.z_loss

    dx, dparams = jax.jit(jax.grad(total, (0, 1)))(*single(x, params))
    for operand in DIFFERENTIATED[name]:
        value, grad = (x, dx) if operand == "x" else (getattr(params, operand), getattr(dparams, operand))
        along, step = rng.standard_normal(value.shape), 1e-6

        def moved(by, operand=operand, value=value, along=along):
            new = value + by * along
            return naive(new, params) if operand == "x" else naive(x, dataclasses.replace(params, **{operand: new}))

        (above, counts), (below, same) = moved(step), moved(-step)
        np.testing.assert_array_equal(counts, same)
        want = (above - below) / (2 * step)
        products = np.asarray(grad, np.float64) * along
        assert abs(products.sum() - want) <= 2e-5 * np.abs(products).sum(), operand


def test_the_selection_bias_gets_no_gradient():
    """Breaks if the bias, which steers selection alone, is trained by the loss as well."""
    config = CASES["deepseek"]
    x, params = single(*make(config))

    def total(params):
        y, stats = reference.moe(x, params, config)
        return y.sum() + stats.aux_loss

    grad = jax.jit(jax.grad(total))(params)
    assert not np.asarray(grad.router_bias).any() and np.asarray(grad.router).any()
