"""Padding: a block with a mask is the block of the real tokens alone; and the balance of sequences.

Covers: ways x transports x recipes with NaN in padding; capacity; the loss of a sequence, with and without padding, on
meshes that cut sequences; every error.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import moax
from moax import reference
from support import TOKENS, make_mesh, make_params, mark_rest, program, put, random, rel_error, rel_norm, spec
from support.block import BASE, MESH, ONE_DEVICE, cotangent, make_x
from support.oracle.ops import sequence_loss

SEQUENCES = moax.RouterConfig(aux_loss=1e-2, z_loss=1e-3, sequence_aux_loss=0.5)
CONFIG = dataclasses.replace(BASE, router=SEQUENCES)
PARAMS = make_params(CONFIG)
LEADING = (16, 6)
WIDTH = CONFIG.d_model
# The rows have holes, as packed sequences have them.
REAL = np.random.default_rng(0).random(LEADING) < 0.6
REAL[3] = False  # a row of padding alone
CLEAN = np.asarray(make_x(CONFIG))
X = np.where(REAL[..., None], CLEAN, np.nan).astype(np.float32)
ROWS = np.broadcast_to(np.arange(16)[:, None], LEADING)


def expected(config):
    """y, stats and the gradients of the reference, of the real tokens alone."""
    weight = jnp.asarray(cotangent(X.shape)[REAL])

    def total(x, params):
        y, stats = reference.moe(x, params, config, sequences=jnp.asarray(ROWS[REAL]))
        return jnp.sum(y * weight) + stats.aux_loss + stats.z_loss, (y, stats)

    grads, out = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(jnp.asarray(CLEAN[REAL]), PARAMS)
    return out, grads


def run_block(way, config, **options):
    """The same of `moax.moe` on all tokens with the mask; the cotangent of padding's y is not 0."""
    layout = spec("2x4", TOKENS)
    whole = moax.param_specs(config, mesh=make_mesh("2x4"))

    def call(x, params, mask, engine):
        y, stats = moax.moe(x, params, config, mask=mask, engine=engine, **options)
        return (y, stats.aux_loss, stats.z_loss), stats

    cotangents = cotangent(X.shape), np.float32(1), np.float32(1)
    run = program(
        way,
        "2x4",
        call,
        (X, PARAMS, REAL),
        (layout, whole, layout),
        (layout, P(), P()),
        P(),
        cotangents=cotangents,
        wrt=(0, 1),
    )
    (y, *_), stats, grads = run()
    return (y, stats), grads


WAYS = [
    ("none", {}),
    ("explicit", dict(exchange="all_to_all")),
    ("custom_partitioning", dict(exchange="all_to_all")),
    ("user_vma", dict(exchange="all_to_all", buffer_factor=0.3)),
    ("shard_map", dict(buffer_factor=0.3)),
    ("user", {}),
]


@pytest.mark.parametrize(("way", "options"), mark_rest(WAYS, 1))
def test_padding_is_not_there(way, options):
    """Breaks if padding is routed, counted or summed anywhere, if its NaN reaches a real token or a parameter, if its y
    or its gradient is not 0, or if the loss of a sequence counts padding or sees another sequence."""
    (y, stats), (dx, dparams) = run_block(way, CONFIG, **options)
    (y_want, want), (dx_want, dparams_want) = expected(CONFIG)
    limit = ONE_DEVICE if way == "none" else MESH
    assert rel_norm(np.asarray(y)[REAL], y_want) <= limit and not np.asarray(y)[~REAL].any()
    assert rel_norm(np.asarray(dx)[REAL], dx_want) <= limit and not np.asarray(dx)[~REAL].any()
    for d, d_want in zip(jax.tree.leaves(dparams), jax.tree.leaves(dparams_want), strict=True):
        assert rel_norm(d, d_want) <= limit
    np.testing.assert_array_equal(stats.tokens_per_expert, want.tokens_per_expert)
    assert stats.tokens_per_expert.sum() == 2 * REAL.sum() and stats.dropped == 0
    for name in ("aux_loss", "z_loss"):
        np.testing.assert_allclose(getattr(stats, name), getattr(want, name), rtol=5e-6)


@pytest.mark.parametrize("exchange", ("all_gather", "all_to_all"))
def test_padding_takes_no_capacity(exchange):
    """Breaks if padding takes rows or slots: 128 equal tokens want one rank, which has room for the real half."""
    config = dataclasses.replace(BASE, capacity_factor=1.0, router=moax.RouterConfig())
    x = np.tile(random(1, 1, WIDTH), (128, 1))
    params = make_params(config)
    mesh = make_mesh("1x8")
    mask = np.arange(128) % 16 < 4
    with jax.set_mesh(mesh):
        layout = spec("1x8", TOKENS)
        args = put(
            mesh,
            (layout, moax.param_specs(config), layout),
            (jnp.asarray(x), params, jnp.asarray(mask)),
        )
        run = jax.jit(lambda x, p, m: moax.moe(x, p, config, mask=m, exchange=exchange))
        stats = run(*args)[1]
        full = run(*args[:2], jnp.ones_like(args[2]))[1]
    assert stats.dropped == 0 < full.dropped and stats.tokens_per_expert.sum() == 2 * mask.sum()


@pytest.mark.parametrize("recipe", mark_rest(("fp8_block", "mxfp8"), 1))
def test_one_program_of_any_mask(recipe):
    """Breaks if quantized real tokens depend on what padding holds, a batch of padding alone divides by the number of
    its tokens, or a mask that leaves nothing out changes a bit."""

    def total(x, params, mask):
        y, stats = moax.moe(x, params, CONFIG, mask=mask, recipe=recipe)
        return jnp.sum(y * jnp.asarray(cotangent(y.shape))) + stats.aux_loss + stats.z_loss, (
            y,
            stats,
        )

    run = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))
    np.testing.assert_array_equal(run(X, PARAMS, REAL)[0][1][0], run(CLEAN, PARAMS, REAL)[0][1][0])
    (loss, _), grads = run(X, PARAMS, np.zeros(LEADING, bool))
    assert loss == 0 and not any(np.asarray(g).any() for g in jax.tree.leaves(grads))
    (_, (masked, same)), _ = run(CLEAN, PARAMS, np.ones(LEADING, bool))
    y, stats = jax.jit(lambda x: moax.moe(x, PARAMS, CONFIG, recipe=recipe))(CLEAN)
    np.testing.assert_array_equal(masked, y)
    np.testing.assert_array_equal(same.tokens_per_expert, stats.tokens_per_expert)


@pytest.mark.parametrize("way", ("none", "custom_partitioning", "explicit"))
def test_loss_of_sequences(way):
    """Breaks if the loss is not DeepSeek-V3's, of sequences of any lengths in any order, or if a mesh that cuts a
    sequence gives another loss."""
    config = moax.RouterConfig(sequence_aux_loss=0.25)
    logits = random(2, 64, 8)
    rows = np.random.default_rng(3).integers(0, 5, 64).astype(np.int32)

    layout = spec("2x4", TOKENS)
    got, _, (d,) = program(
        way,
        "2x4",
        lambda v, rows, engine: (moax.route(v, config, 2, sequences=rows, engine=engine).aux_loss, ()),
        (logits, rows),
        (layout, layout),
        P(),
        cotangents=np.float32(1),
    )()
    np.testing.assert_allclose(
        got,
        sequence_loss(logits.astype(np.float64), config, 2, rows),
        rtol=2e-6,
    )
    want = jax.jit(jax.grad(lambda v: reference.route(v, config, 2, sequences=jnp.asarray(rows)).aux_loss))(logits)
    assert rel_error(d, want) < 2e-6


def test_balanced_sequences_pay_the_coefficient():
    """Breaks if the coefficient of sequences has another scale than that of the batch, or adds to the wrong loss."""
    logits = 20 * np.tile(2 * np.eye(8) + np.roll(np.eye(8), 1, 1), (4, 1)).astype(np.float32)
    rows = np.repeat(np.arange(4), 8).astype(np.int32)
    r = moax.route(logits, moax.RouterConfig(sequence_aux_loss=0.125), 1, sequences=rows)
    np.testing.assert_allclose(r.aux_loss, 0.125, rtol=1e-6)
    assert r.z_loss == 0


@pytest.mark.loose
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            dict(mask=np.ones(LEADING, np.int32)),
            "mask has dtype int32; it must be bool, such as segment_ids > 0",
        ),
        (
            dict(mask=np.ones((16,), bool)),
            r"mask has shape \(16,\); it must be \[\*batch=\(16,\), S=6\]",
        ),
        (dict(mask=[[True]]), "mask is a list; it must be an array"),
        (
            dict(x=CLEAN[0]),
            r"x has shape \(6, 32\); it must be \[..., S, H\] for RouterConfig.sequence_aux_loss",
        ),
    ],
)
def test_errors(changes, says):
    """Breaks if a mask of another shape is broadcast, or segment ids are taken for a mask."""
    arguments = dict(x=CLEAN) | changes
    with pytest.raises(ValueError, match=says):
        moax.moe(arguments.pop("x"), PARAMS, CONFIG, **arguments)
    with pytest.raises(
        ValueError,
        match="sequences is None; it must be given for sequence_aux_loss",
    ):
        moax.route(np.ones((4, 8), np.float32), SEQUENCES, 2)


def root(gate, up):
    return jnp.sqrt(jnp.abs(gate)) * up


@pytest.mark.parametrize("way", mark_rest(("explicit", "custom_partitioning", "shard_map"), 1))
def test_an_infinite_slope_at_zero_meets_no_padding(way):
    """Breaks if backward multiplies the slope of a user's activation at h of padding, in the shared expert too."""
    config = moax.MoEConfig(32, 64, 8, 2, activation=root, shared_d_ff=16)
    params = make_params(config)
    x = random(0, 32, 32)
    real = np.arange(32) % 3 > 0
    cotangents = random(1, 32, 32)

    def call(x, params, engine):
        return moax.moe(x, params, config, mask=jnp.asarray(real), engine=engine)[0], ()

    def total(params):
        return jnp.sum(reference.moe(jnp.asarray(x[real]), params, config)[0] * cotangents[real])

    layout = spec("tp2x2x2", TOKENS)
    specs = moax.param_specs(config, mesh=make_mesh("tp2x2x2"))
    run = program(way, "tp2x2x2", call, (x, params), (layout, specs), layout, cotangents=cotangents, wrt=(1,))
    *_, (grads,) = run()
    for have, want in zip(jax.tree.leaves(grads), jax.tree.leaves(jax.grad(total)(params)), strict=True):
        assert rel_norm(have, want) < 1e-5
