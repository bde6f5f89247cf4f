"""The routing of a block as an input: replay, hash routing, a router of one's own; and what comes back.

Covers: experts alone and with weights, against the reference; ways x transports; negative ids, twins, E for none; the
weights of hash routing; the router's own input; every error.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import moax
from moax import reference
from support import TOKENS, make_mesh, make_params, mark_rest, program, put, random, rel_norm, spec
from support.block import BASE, MESH, ONE_DEVICE, cotangent, loss_of, make_x

V4 = moax.RouterConfig("sqrt_softplus", scale=1.5, bias=True, aux_loss=1e-2, z_loss=1e-3)
CONFIG = dataclasses.replace(BASE, router=V4)
X = make_x(CONFIG)
PARAMS = make_params(CONFIG)
LEADING = X.shape[:-1]
TOKENS_ = X[..., 0].size
IDS = np.stack([np.random.default_rng(t).permutation(8)[:2] for t in range(TOKENS_)]).astype(
    np.int32,
)
WEIGHTS = np.abs(random(3, TOKENS_, 2)) + 0.1


def wanted(experts, weights=None):
    """Outputs and gradients (x, params, weights) of the reference."""

    def total(x, params, weights):
        out = reference.moe(x, params, CONFIG, experts=experts, weights=weights)
        return sum(loss_of(*out)), out

    over = (0, 1) if weights is None else (0, 1, 2)
    grads, out = jax.jit(jax.grad(total, argnums=over, has_aux=True))(X, PARAMS, weights)
    return out, grads


def run_block(way, ids, weights=None, **options):
    """The same of `moax.moe`, of arrays [tokens, K] that lie as tokens do."""
    layout = spec("2x4", TOKENS)
    whole = moax.param_specs(CONFIG, mesh=make_mesh("2x4"))
    routing_arrays = [v.reshape(*LEADING, 2) for v in (ids, weights) if v is not None]

    def call(x, params, *chosen, engine):
        routing = chosen[0] if weights is None else chosen
        y, stats = moax.moe(
            x,
            params,
            CONFIG,
            routing=routing,
            engine=engine,
            return_routing=True,
            **options,
        )
        return (y, *((stats.aux_loss, stats.z_loss) if weights is None else ())), stats

    ones = (np.float32(1),) * 2 * (weights is None)
    stats = moax.MoEStats(P(), P(), P(), P(), P(), moax.Routing(layout, layout, P(), P(), P()))
    run = program(
        way,
        "2x4",
        call,
        (X, PARAMS, *routing_arrays),
        (layout, whole, *[layout] * len(routing_arrays)),
        (layout, *[P()] * len(ones)),
        stats,
        cotangents=(cotangent(X.shape), *ones),
        wrt=(0, 1) + (3,) * (weights is not None),
    )
    (y, *_), stats, grads = run()
    return (y, stats), grads


def check(got, want, limit):
    (y, stats), grads = got
    (y_want, stats_want), grads_want = want
    assert rel_norm(y, y_want) <= limit
    np.testing.assert_array_equal(stats.tokens_per_expert, stats_want.tokens_per_expert)
    for name in ("aux_loss", "z_loss"):
        np.testing.assert_allclose(getattr(stats, name), getattr(stats_want, name), rtol=5e-6)
    got_leaves = jax.tree.leaves(grads)
    want_leaves = jax.tree.leaves(grads_want)
    assert len(got_leaves) == len(want_leaves)
    for d, d_want in zip(got_leaves, want_leaves, strict=True):
        assert rel_norm(np.asarray(d).reshape(d_want.shape), d_want) <= limit


WAYS = [
    ("custom_partitioning", dict(exchange="all_to_all")), ("none", {}), ("shard_map", {}),
    ("explicit", dict(exchange="all_to_all", buffer_factor=0.3)), ("user_vma", {}),
]  # fmt: skip


@pytest.mark.parametrize(("way", "options"), mark_rest(WAYS, 1))
def test_experts_alone(way, options):
    """Breaks if experts that the caller gave do not have the weights, the losses and the gradients of the router's live
    scores: replay would train another policy than the one that acted."""
    got = run_block(way, IDS, **options)
    check(got, wanted(IDS), ONE_DEVICE if way == "none" else MESH)
    routing = got[0][1].routing
    np.testing.assert_array_equal(routing.experts, IDS.reshape(*LEADING, 2))
    np.testing.assert_allclose(np.asarray(routing.weights).sum(-1), 1.5, rtol=1e-6)


@pytest.mark.parametrize(("way", "options"), mark_rest(WAYS[::-1], 1))
def test_experts_and_weights(way, options):
    """Breaks if a router of the caller's own is not used as it is, gets no gradient, or the router runs besides."""
    got = run_block(way, IDS, WEIGHTS, **options)
    (y, stats), (dx, dparams, dw) = got
    out, (dx_want, dparams_want, dw_want) = wanted(IDS, WEIGHTS)
    limit = ONE_DEVICE if way == "none" else MESH
    assert rel_norm(y, out[0]) <= limit
    assert rel_norm(np.asarray(dw).reshape(dw_want.shape), dw_want) <= limit
    for name in ("wi", "wo", "shared_wi"):
        assert rel_norm(getattr(dparams, name), getattr(dparams_want, name)) <= limit
    assert stats.aux_loss == stats.z_loss == 0 and not np.asarray(dparams.router).any()
    np.testing.assert_array_equal(
        stats.tokens_per_expert,
        np.bincount(IDS.reshape(-1), minlength=8),
    )


@pytest.mark.more
def test_replay_gives_the_same_bits():
    """Breaks if what `return_routing` returns is not what the block used, or does not serve as `routing`."""
    run = jax.jit(lambda x, p, r: moax.moe(x, p, CONFIG, routing=r, return_routing=True))
    y, stats = run(X, PARAMS, None)
    for routing in (
        stats.routing,
        stats.routing.experts,
        (stats.routing.experts, stats.routing.weights),
    ):
        again, same = run(X, PARAMS, routing)
        np.testing.assert_array_equal(again, y)
        np.testing.assert_array_equal(same.tokens_per_expert, stats.tokens_per_expert)
    assert run(X, PARAMS, stats.routing)[1].aux_loss == stats.aux_loss > 0
    assert moax.moe(X, PARAMS, CONFIG)[1].routing is None


def test_negative_ids_choose():
    """Breaks if a token without a recorded choice does not take its best experts: a prompt in a replayed batch."""
    own = moax.route(jnp.asarray(random(5, 16, 8)), moax.RouterConfig(), 2)
    ids = np.where(np.arange(16)[:, None] % 2, -1, IDS[:16])
    got = moax.route(jnp.asarray(random(5, 16, 8)), moax.RouterConfig(), 2, experts=ids)
    np.testing.assert_array_equal(got.experts, np.where(ids < 0, own.experts, ids))
    np.testing.assert_array_equal(got.weights[1::2], own.weights[1::2])


def test_twins_and_no_expert():
    """Breaks if an expert that a token names twice takes two rows, of which one is lost without a word, or if E is
    taken for an expert."""
    config = dataclasses.replace(BASE, num_experts=2, router=moax.RouterConfig())
    params = make_params(config)
    x = make_x(config).reshape(TOKENS_, -1)
    ids = np.tile(np.int32([[1, 1], [0, 2], [2, 2], [0, 1]]), (TOKENS_ // 4, 1))
    weights = np.tile(
        np.float32([[0.25, 0.5], [0.5, 9.0], [9.0, 9.0], [0.1, 0.2]]),
        (TOKENS_ // 4, 1),
    )
    each = [np.float32([0, 0.75]), np.float32([0.5, 0]), np.float32([0, 0]), np.float32([0.1, 0.2])]
    plain = np.tile(np.int32([[0, 1]]), (TOKENS_, 1))
    by = np.tile(np.stack(each), (TOKENS_ // 4, 1))
    want, _ = reference.moe(x, params, config, experts=jnp.asarray(plain), weights=jnp.asarray(by))
    y, stats = moax.moe(x, params, config, routing=(ids, weights))
    assert rel_norm(y, want) <= ONE_DEVICE
    np.testing.assert_array_equal(stats.tokens_per_expert, np.array([2, 3]) * (TOKENS_ // 4))
    live, _ = moax.moe(x, params, config, routing=np.tile(np.int32([[1, 1]]), (TOKENS_, 1)))
    one = np.tile(np.float32([[0, 1]]), (TOKENS_, 1))
    assert rel_norm(live, reference.moe(x, params, config, experts=jnp.asarray(plain), weights=one)[0]) <= ONE_DEVICE


def test_hash_routing():
    """Breaks if the weights of given experts are not the live scores: DeepSeek-V4's, square roots of softplus,
    normalized."""
    experts = lax.top_k(jax.random.uniform(jax.random.key(0), (64, 8)), 2)[1][np.arange(TOKENS_).reshape(LEADING) % 64]
    _, stats = moax.moe(X, PARAMS, CONFIG, routing=experts, return_routing=True)
    logits = np.asarray(X, np.float64).reshape(TOKENS_, -1) @ np.asarray(PARAMS.router, np.float64)
    scores = np.take_along_axis(
        np.sqrt(np.log1p(np.exp(logits))),
        np.asarray(experts).reshape(TOKENS_, 2),
        1,
    )
    want = 1.5 * scores / scores.sum(1, keepdims=True)
    np.testing.assert_allclose(
        np.asarray(stats.routing.weights).reshape(TOKENS_, 2),
        want,
        rtol=2e-6,
    )


@pytest.mark.loose
@pytest.mark.parametrize(
    ("routing", "says"),
    [
        ([[0, 1]], "routing is a list; it must be an array"),
        ("hash", "routing is a str"),
        (np.zeros((*LEADING, 2)), "routing has dtype float32; it must be an array of integers"),
        (
            np.zeros((*LEADING, 3), np.int32),
            r"routing has shape \(16, 6, 3\); it must be \[\*batch=\(16,\), S=6, K=2\]",
        ),
        (IDS, r"routing has shape \(96, 2\); it must be \[\*batch=\(16,\), S=6, K=2\]"),
        ((IDS.reshape(*LEADING, 2), WEIGHTS), r"routing.weights has shape \(96, 2\)"),
        ((IDS.reshape(*LEADING, 2), [[1.0]]), "routing.weights is a list"),
        ((1, 2, 3), "routing is a tuple"),
    ],
)
def test_errors(routing, says):
    """Breaks if a routing of another shape or kind is broadcast, or fails in the guts."""
    with pytest.raises(ValueError, match=says):
        moax.moe(X, PARAMS, CONFIG, routing=routing)


@pytest.mark.more
def test_router_input():
    """Breaks if the router reads x where it has an input of its own (Gemma 4), or either gradient goes astray."""
    config = dataclasses.replace(BASE, use_bias=False)
    x = make_x(config)
    params = make_params(config)
    other = jnp.asarray(random(3, *x.shape))

    def graded(layer, *operands):

        def loss(x, other, params):
            return sum(loss_of(*layer(x, params, config, router_input=other)))

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*operands)

    want = graded(reference.moe, x, other, params)
    mesh = make_mesh("2x4")
    tokens = spec("2x4", TOKENS)
    with jax.set_mesh(mesh):
        got = graded(
            moax.moe,
            *put(mesh, (tokens, tokens, moax.param_specs(config)), (x, other, params)),
        )
    for have, need in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert rel_norm(have, need) < 5e-6
    with pytest.raises(ValueError, match=r"router_input has shape \(16, 6, 31\)"):
        moax.moe(x, params, config, router_input=x[..., :-1])
