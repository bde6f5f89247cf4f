"""Route: every router, its gradients and its losses over the global batch, against NumPy in float64.

Covers: scores x orders x group limits x normalization x bias x scale; ways x meshes x routers by pairs (`COVER`);
shapes of Transformer Engine's tests; ties, NaN, saturated logits; vmap; every error.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import moax
from moax import reference
from moax.config import RouterConfig
from moax.inspect import collectives
from support import TOKENS, WAYS, Table, integers, mark_rest, program, random, rel_error, spec, spread
from support.oracle.ops import choose_experts, route_losses, route_losses_grad

TOKENS_, EXPERTS, TOP_K = 64, 16, 4
GROUPS = {
    "plain": {},
    "top2": dict(num_groups=4, top_groups=2, group_score="top2"),
    "max": dict(num_groups=8, top_groups=3, group_score="max"),
    "sum_topk": dict(num_groups=4, top_groups=2, group_score="sum_topk"),
}
SCORES = ("softmax", "sigmoid", "sqrt_softplus")
ORDERS = ("score_then_topk", "topk_then_score")
SCORED = list(itertools.product(SCORES, ORDERS))
BIAS = (2.0 * random(7, EXPERTS) + np.arange(EXPERTS) / 8).astype(np.float32)


def oracle(logits, experts, config, cotangents):
    """Weights, aux loss and z loss of the experts in float64, and the gradient of the logits."""
    experts = np.asarray(experts)
    return route_losses(logits, experts, config), (
        route_losses_grad(
            logits,
            experts,
            config,
            *cotangents,
        ),
    )


def losses(logits, config, top_k=TOP_K, **options):
    """(weights, aux, z), and what is not differentiated."""
    r = moax.route(logits, config, top_k, **options)
    return (r.weights, r.aux_loss, r.z_loss), (r.experts, r.tokens_per_expert)


def check(config: RouterConfig, logits, top_k, bias):
    got = moax.route(logits, config, top_k, bias)
    experts = choose_experts(logits, config, top_k, bias)
    weights, aux, z = route_losses(logits, experts, config)
    np.testing.assert_array_equal(got.experts, experts)
    np.testing.assert_array_equal(
        got.tokens_per_expert,
        np.bincount(experts.reshape(-1), minlength=logits.shape[1]),
    )
    assert got.experts.dtype == got.tokens_per_expert.dtype == jnp.int32
    assert got.weights.dtype == got.aux_loss.dtype == got.z_loss.dtype == jnp.float32
    assert rel_error(got.weights, weights, per=0) < 1e-6
    assert rel_error(got.aux_loss, aux) < 1e-6
    assert rel_error(got.z_loss, z) < 1e-6


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("score, order", SCORED)
def test_matches_reference(score, order, groups):
    """Each option alone and with every other: experts exact, weights of each token to 1e-6."""
    logits = jnp.asarray(random(0, TOKENS_, EXPERTS))
    for normalize, biased, scale in itertools.product((True, False), (True, False), (1.0, 2.5)):
        losses = dict(aux_loss=0.01, z_loss=1e-3)
        config = RouterConfig(
            score,
            order,
            normalize,
            scale=scale,
            bias=biased,
            **GROUPS[groups],
            **losses,
        )
        check(config, logits, TOP_K, jnp.asarray(BIAS) if biased else None)


@pytest.mark.parametrize(
    "tokens, experts, top_k, score",
    mark_rest(
        [
            (128, 32, 4, "softmax"),
            (2048, 128, 8, "sigmoid"),
            (7168, 32, 8, "softmax"),
            (128, 32, 4, "sigmoid"),
            (2048, 128, 8, "softmax"),
            (7168, 32, 8, "sigmoid"),
        ],
        2,
    ),
)
def test_shapes_of_transformer_engine(tokens, experts, top_k, score):
    """The shapes of Transformer Engine's router tests, with the group limit of DeepSeek."""
    logits = jnp.asarray(random(1, tokens, experts))
    check(RouterConfig(score, aux_loss=0.1, z_loss=0.1), logits, top_k, None)
    limited = RouterConfig(score, num_groups=8, top_groups=4, bias=True, aux_loss=0.1, z_loss=0.1)
    check(limited, logits, top_k, jnp.asarray(random(2, experts)))


@pytest.mark.parametrize("score, order, normalize", spread(4, SCORES, ORDERS, (True, False)))
def test_gradients(score, order, normalize):
    """Of weights, aux loss and z loss, together and the losses alone, against float64 autodiff, token by token."""
    config = RouterConfig(score, order, normalize, scale=2.5, aux_loss=0.3, z_loss=0.2)
    logits = random(3, TOKENS_, EXPERTS)
    (weights, aux, z), pull, (experts, _) = jax.vjp(
        lambda x: losses(x, config),
        jnp.asarray(logits),
        has_aux=True,
    )
    for d_weights in (random(4, TOKENS_, TOP_K), np.zeros((TOKENS_, TOP_K), np.float32)):
        cotangents = (jnp.asarray(d_weights), jnp.float32(7.0), jnp.float32(-0.5))
        want, (d_logits,) = oracle(logits, experts, config, cotangents)
        assert rel_error(weights, want[0], per=0) < 1e-6
        assert rel_error(aux, want[1]) < 1e-6
        assert rel_error(z, want[2]) < 1e-6
        assert rel_error(pull(cotangents)[0], d_logits, per=0) < 2e-6


CONFIGS = {
    "softmax": RouterConfig(aux_loss=0.3, z_loss=0.2),
    "sigmoid": RouterConfig(
        "sigmoid",
        scale=2.5,
        bias=True,
        aux_loss=0.3,
        z_loss=0.2,
        **GROUPS["top2"],
    ),
    "late": RouterConfig("softmax", "topk_then_score", aux_loss=0.3, z_loss=0.2),
}
COVER = Table(
    "route",
    {"way": WAYS, "mesh": ("8x1", "2x4", "tp2x2x2"), "router": tuple(CONFIGS)},
    [("custom_partitioning", "8x1", "softmax")],
)


def test_every_pair_is_covered():
    """Breaks if an engine, a mesh or a router never meets some other one below."""
    assert not COVER.complete().missing()


@pytest.mark.parametrize(tuple(COVER.options), COVER.parameters())
def test_on_mesh(way, mesh, router):
    """Losses, counts and gradients are those of the whole batch, as if one device had it; not a mean of shards'."""
    config = CONFIGS[router]
    logits = random(5, TOKENS_, EXPERTS) + np.linspace(0, 2, EXPERTS, dtype=np.float32)
    args = (logits, BIAS) if config.bias else (logits,)
    rows = spec(mesh, TOKENS, None)
    cotangents = (random(6, TOKENS_, TOP_K), np.float32(7.0), np.float32(-0.5))
    run = program(
        way,
        mesh,
        lambda x, *bias, engine: losses(x, config, bias=bias[0] if bias else None, engine=engine),
        args,
        (rows, P())[: len(args)],
        (rows, P(), P()),
        (rows, P()),
        cotangents=cotangents,
    )
    (weights, aux, z), (experts, counts), (d_logits,) = run()
    chosen = choose_experts(logits, config, TOP_K, BIAS if config.bias else None)
    np.testing.assert_array_equal(experts, chosen)
    np.testing.assert_array_equal(counts, np.bincount(chosen.reshape(-1), minlength=EXPERTS))
    want, (d_want,) = oracle(logits, experts, config, cotangents)
    assert rel_error(weights, want[0], per=0) < 1e-6
    assert rel_error(aux, want[1]) < 1e-6
    assert rel_error(z, want[2]) < 1e-6
    assert rel_error(d_logits, d_want, per=0) < 2e-6


@pytest.mark.parametrize("logits_spec", mark_rest([P("fsdp"), P(), P(None, "ep")], 1), ids=str)
def test_logits_of_another_layout(logits_spec):
    """Explicit axes: logits that lie otherwise are moved, and their gradient comes back as they lay."""
    config = CONFIGS["softmax"]
    logits = random(20, TOKENS_, EXPERTS)
    cotangents = (random(21, TOKENS_, TOP_K), 1.0, 1.0)
    cotangents = tuple(map(np.float32, cotangents))
    fn = lambda x, engine: losses(x, config, engine=engine)  # noqa: E731
    run = program(
        "explicit",
        "2x4",
        fn,
        (logits,),
        (logits_spec,),
        (spec("2x4", TOKENS), P(), P()),
        cotangents=cotangents,
    )
    _, (experts, _), (d_logits,) = run()
    assert rel_error(d_logits, oracle(logits, experts, config, cotangents)[1][0], per=0) < 2e-6
    expected = run.args[0][0].sharding.shard_shape(logits.shape)
    assert run.placed()[2][0].sharding.shard_shape(logits.shape) == expected


@pytest.mark.parametrize("way", ("none", "shard_map"))
def test_balanced_router_pays_the_coefficient(way):
    """An aux loss off by E, K or T would rescale every user's coefficient."""
    cyclic = np.zeros((TOKENS_, EXPERTS), np.float32)
    for t, k in itertools.product(range(TOKENS_), range(TOP_K)):
        cyclic[t, (t * TOP_K + k) % EXPERTS] = 3.0 + k
    config = RouterConfig(aux_loss=0.125)
    rows = spec("2x4", TOKENS, None)
    run = program(
        way,
        "2x4",
        lambda x, engine: losses(x, config, engine=engine),
        (cyclic,),
        (rows,),
        (rows, P(), P()),
        (rows, P()),
    )
    (_, aux, _), (_, counts) = run()
    np.testing.assert_array_equal(counts, TOKENS_ * TOP_K // EXPERTS)
    assert abs(aux - 0.125) < 1e-7


@pytest.mark.parametrize("score", SCORES)
def test_collapsed_router_pays_most(score):
    """All tokens, with all their probability, on one of E experts: E times the coefficient."""
    logits = jnp.full((TOKENS_, EXPERTS), -60.0).at[:, 3].set(60.0)
    r = moax.route(logits, RouterConfig(score, aux_loss=0.5), 1)
    assert abs(r.aux_loss - 0.5 * EXPERTS) < 1e-5
    assert r.tokens_per_expert[3] == TOKENS_


def test_z_loss_by_hand():
    """logsumexp of E equal logits is their value + log E."""
    r = moax.route(jnp.full((8, EXPERTS), 1.5), RouterConfig(z_loss=0.25), 2)
    assert abs(r.z_loss - 0.25 * (1.5 + np.log(EXPERTS)) ** 2) < 1e-5
    assert r.aux_loss == 0


@pytest.mark.parametrize("score, order", SCORED)
def test_ties_go_to_the_lower_expert(score, order):
    """Equal scores are chosen in the reference's order, whatever the sort: runs would not be repeatable otherwise."""
    logits = jnp.asarray(integers(8, TOKENS_, EXPERTS, bound=2))
    for groups in GROUPS.values():
        config = RouterConfig(score, order, **groups)
        np.testing.assert_array_equal(
            moax.route(logits, config, TOP_K).experts,
            reference.route(logits, config, TOP_K).experts,
        )


@pytest.mark.parametrize("way", ("none", "custom_partitioning"))
@pytest.mark.parametrize("score", SCORES)
def test_nan_token_stays_alone(way, score):
    """One token's NaN reaches its own weights and logit gradients; every other token's are what they were, bit by
    bit."""
    config = RouterConfig(score)
    rows = spec("2x4", TOKENS, None)
    clean = random(9, TOKENS_, EXPERTS)
    bad = clean.copy()
    bad[5] = np.nan

    def run(logits):
        cotangents = (random(10, TOKENS_, TOP_K), np.float32(0), np.float32(0))
        out = program(
            way,
            "2x4",
            lambda x, engine: losses(x, config, engine=engine),
            (logits,),
            (rows,),
            (rows, P(), P()),
            (rows, P()),
            cotangents=cotangents,
        )()
        return out[0][0], out[1][0], out[2][0]

    w0, e0, g0 = run(clean)
    w1, e1, g1 = run(bad)
    others = np.arange(TOKENS_) != 5
    for before, after in ((w0, w1), (e0, e1), (g0, g1)):
        np.testing.assert_array_equal(before[others], after[others])
    assert np.isnan(w1[5]).all()
    assert np.isnan(g1[5]).any()
    assert ((e1 >= 0) & (e1 < EXPERTS)).all()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("level", (-1e4, 0.0, 1e4))
def test_saturated_logits_stay_finite(score, level):
    """Scores that all underflow to 0, or round to 1, give finite weights and gradients."""
    config = RouterConfig(score, aux_loss=1.0)
    logits = jnp.asarray(level + random(11, TOKENS_, EXPERTS))
    (weights, aux, z), pull, _ = jax.vjp(lambda x: losses(x, config), logits, has_aux=True)
    (d_logits,) = pull((jnp.ones_like(weights), jnp.ones_like(aux), jnp.zeros_like(z)))
    assert all(bool(jnp.isfinite(v).all()) for v in (weights, aux, z, d_logits))


def test_bias_steers_selection_alone():
    """A large bias picks its experts with unbiased weights, and gets no gradient: it is no trained parameter."""
    config = RouterConfig("sigmoid", normalize=False, bias=True)
    logits = jnp.asarray(random(12, TOKENS_, EXPERTS))
    bias = jnp.zeros(EXPERTS).at[2].set(10.0)
    r = moax.route(logits, config, 1, bias)
    np.testing.assert_array_equal(r.experts, 2)
    assert rel_error(r.weights[:, 0], jax.nn.sigmoid(logits[:, 2])) < 1e-6
    d_bias = jax.grad(lambda b: moax.route(logits, config, 1, b).weights.sum())(bias)
    np.testing.assert_array_equal(d_bias, 0.0)


def test_one_expert_is_not_divided_by_itself():
    """With K = 1 `normalize` would make every weight 1 and starve the router of gradient (Switch does not)."""
    logits = jnp.asarray(random(13, TOKENS_, EXPERTS))
    r = moax.route(logits, RouterConfig(), 1)
    assert rel_error(r.weights[:, 0], jax.nn.softmax(logits).max(1)) < 1e-6


def test_the_only_weight_has_no_gradient():
    """Breaks if a weight that is the scale whatever the logits are gives the router rounding errors for a gradient, of
    which Adam makes full steps."""
    logits = jnp.asarray(random(13, TOKENS_, EXPERTS))
    d = jnp.asarray(random(14, TOKENS_, 1))
    for score, experts in (("softmax", 1), ("sigmoid", EXPERTS)):
        config = RouterConfig(score=score, order="topk_then_score", scale=2.5)
        results = jax.grad(lambda v, config=config: jnp.vdot(d, moax.route(v, config, 1).weights))(logits[:, :experts])
        assert np.any(results) == (score == "sigmoid")


def test_every_expert():
    """K = E: each token takes all of them, its weights sum to the scale."""
    r = moax.route(jnp.asarray(random(14, 8, 4)), RouterConfig(scale=3.0), 4)
    np.testing.assert_array_equal(np.sort(r.experts, axis=1), np.broadcast_to(np.arange(4), (8, 4)))
    assert rel_error(r.weights.sum(1), np.full(8, 3.0)) < 1e-6


def test_bfloat16_logits():
    """Computed in float32: those of the widened logits exactly; the gradient comes back in bfloat16."""
    logits = jnp.asarray(random(15, TOKENS_, EXPERTS)).astype(jnp.bfloat16)
    narrow = moax.route(logits, RouterConfig(), TOP_K)
    wide = moax.route(logits.astype(jnp.float32), RouterConfig(), TOP_K)
    np.testing.assert_array_equal(narrow.weights, wide.weights)
    assert jax.grad(lambda x: moax.route(x, RouterConfig(), TOP_K).weights[0, 0])(logits).dtype == jnp.bfloat16


@pytest.mark.parametrize("way", ("none", "custom_partitioning"))
def test_vmap(way):
    """A batch of routers is each of them: no rule may mix the batch with the tokens."""
    config = RouterConfig(aux_loss=0.3)
    batch = random(16, 3, TOKENS_, EXPERTS)

    def fn(x, engine):
        r = jax.vmap(lambda x: moax.route(x, config, TOP_K, engine=engine))(x)
        return r.weights, (r.experts, r.aux_loss, r.tokens_per_expert)

    layout = P(None, ("fsdp", "ep"), None)
    cotangents = random(17, 3, TOKENS_, TOP_K)
    weights, (experts, aux, counts), (d,) = program(
        way, "2x4", fn, (batch,), (layout,), layout, cotangents=cotangents
    )()
    for i, logits in enumerate(batch):
        want, pull = jax.vjp(lambda x: moax.route(x, config, TOP_K).weights, jnp.asarray(logits))
        one = moax.route(jnp.asarray(logits), config, TOP_K)
        np.testing.assert_array_equal(experts[i], one.experts)
        np.testing.assert_array_equal(counts[i], one.tokens_per_expert)
        assert rel_error(weights[i], want) < 1e-6
        assert rel_error(aux[i], one.aux_loss) < 1e-6
        assert rel_error(d[i], pull(jnp.asarray(cotangents[i]))[0]) < 1e-6


@pytest.mark.parametrize("way", mark_rest(WAYS[:3], 1))
def test_logits_stay_on_their_shard(way):
    """Forward and backward move sums over tokens, [E] vectors, and nothing of a token."""
    rows = spec("2x4", TOKENS, None)
    run = program(
        way,
        "2x4",
        lambda x, engine: losses(x, CONFIGS["softmax"], engine=engine),
        (random(18, TOKENS_, EXPERTS),),
        (rows,),
        (rows, P(), P()),
        (rows, P()),
        cotangents=(random(19, TOKENS_, TOP_K), np.float32(1), np.float32(1)),
    )
    traffic = run.under(lambda *args: collectives(run.fn, *args))
    assert traffic and {c.kind for c in traffic} == {"all-reduce"}
    assert max(c.size for c in traffic) <= EXPERTS
    weights = run.placed()[0][0]
    assert weights.sharding.shard_shape(weights.shape) == (TOKENS_ // 8, TOP_K)


@pytest.mark.parametrize(
    "shape, options, top_k, bias, message",
    [
        ((8, 4), {}, 5, None, "top_k=5 must be at most num_experts=4"),
        ((8, 6), dict(num_groups=4), 2, None, "num_groups=4 must divide num_experts=6"),
        (
            (8, 8),
            dict(num_groups=4),
            3,
            None,
            "top_k=3 must be at most the 2 experts of top_groups=1",
        ),
        (
            (8, 8),
            dict(num_groups=4, top_groups=2, group_score="sum_topk"),
            3,
            None,
            "top_k=3 divisible by top_groups=2",
        ),
        ((8, 4), {}, 0, None, "top_k=0 must be an int of at least 1"),
        (
            (8, 4),
            dict(bias=True),
            2,
            None,
            "bias is None, and RouterConfig.bias=True; pass params.router_bias, or set bias=False",
        ),
        ((8, 4), {}, 2, (4,), "bias is an array, and RouterConfig.bias=False; pass None, or set bias=True"),
        (
            (8, 4),
            dict(bias=True),
            2,
            (5,),
            r"logits, bias have shapes \(8, 4\), \(5,\); they must be \[T, E\], \[E\]",
        ),
        ((8,), {}, 2, None, r"logits has shape \(8,\); it must be \[T, E\]"),
        ((2, 8, 4), {}, 2, None, r"logits has shape \(2, 8, 4\)"),
    ],
)
def test_errors(shape, options, top_k, bias, message):
    """What cannot work is refused by name before anything is compiled."""
    with pytest.raises(ValueError, match=message):
        moax.route(
            jnp.zeros(shape),
            RouterConfig(**options),
            top_k,
            None if bias is None else jnp.zeros(bias),
        )


@pytest.mark.parametrize("way", ("shard_map", "explicit"))
def test_tokens_that_do_not_divide(way):
    """12 tokens on 8 devices: the error names the dim and the mesh axes."""
    run = program(
        way,
        "2x4",
        lambda x, engine: losses(x, RouterConfig(), 2, engine=engine),
        (np.zeros((12, 8)),),
        (P(),),
    )
    with pytest.raises(
        ValueError,
        match=r"dim 0 of size 12 is not divisible by mesh axes \('fsdp', 'ep'\)",
    ):
        run()


def test_engines_are_checked():
    """An unknown engine is a ValueError; one that the mesh cannot run is Unsupported, and says what to use."""
    config = RouterConfig()
    with pytest.raises(
        ValueError,
        match="engine='gspmd' must be one of 'auto', 'custom_partitioning', 'shard_map'",
    ):
        moax.route(jnp.zeros((8, 8)), config, 2, engine="gspmd")
    run = program(
        "explicit",
        "2x4",
        lambda x, engine: losses(x, config, 2),
        (np.zeros((8, 8)),),
        (P(("fsdp", "ep")),),
    )
    forced = dataclasses.replace(
        run,
        fn=lambda x: losses(x, config, 2, engine="custom_partitioning"),
    )
    with pytest.raises(moax.Unsupported, match="axes are Explicit; use 'auto' or 'shard_map'"):
        forced()
