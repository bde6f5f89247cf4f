"""Activations [B, S, H] whose S lies over a mesh axis: context parallel, sequence parallel, and S over an axis of ep.

Covers: values, every gradient and the stats against `moax.reference`; the collectives of the compiled step, on Auto,
Explicit and Manual axes; `moe` and `dense`; a mask and a given routing; packed rows; rows of any shape; the log.
"""

import dataclasses
import functools
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import moax
from moax import Axes, inspect, ops, reference
from moax.checks import log_once
from moax.mesh.specs import find_mesh_view, find_token_dims, flatten_tokens, named, unflatten_tokens
from support import make_params, mark_rest, put, random, rel_norm
from support.oracle.ops import sequence_loss

ROUTER = moax.RouterConfig(aux_loss=1e-2, z_loss=1e-3, sequence_aux_loss=1e-1)
CONFIG = moax.MoEConfig(32, 48, 8, 2, use_bias=True, router=ROUTER)
PARAMS = make_params(CONFIG)
B, S = 8, 20
X = random(1, B, S, CONFIG.d_model)
WEIGHT = np.cos(np.arange(X.size, dtype=np.float32)).reshape(X.shape)
KINDS = {
    "auto": AxisType.Auto,
    "explicit": AxisType.Explicit,
    "manual": AxisType.Auto,
    "manual_vma": AxisType.Auto,
}

# The mesh, how x lies on it, and the axes that say so where no type does.
EP_FIRST = Axes(tokens=(("ep", "fsdp"), "cp"))
CASES = {
    "cp x ep": ({"cp": 2, "ep": 4}, P("ep", "cp"), Axes()),
    "cp x fsdp": ({"cp": 2, "fsdp": 4}, P("fsdp", "cp"), Axes()),
    "dp x cp": ({"dp": 2, "cp": 4}, P("dp", "cp"), Axes()),
    "fsdp, ep": ({"fsdp": 2, "ep": 4}, P(("fsdp", "ep")), Axes()),
    "ep, fsdp": ({"fsdp": 2, "ep": 4}, P(("ep", "fsdp")), EP_FIRST),
    "ep, fsdp x cp": ({"fsdp": 2, "ep": 2, "cp": 2}, P(("ep", "fsdp"), "cp"), EP_FIRST),
    "S over ep": ({"fsdp": 4, "ep": 2}, P("fsdp", "ep"), Axes(tokens=("fsdp", "ep"))),
    "cp x tp": ({"dp": 2, "cp": 2, "tp": 2}, P("dp", "cp"), Axes()),
}


def loss_of(y, stats):
    return jnp.vdot(y, jnp.asarray(WEIGHT)) + stats.aux_loss + stats.z_loss


@functools.cache
def expected():
    """The outputs and gradients of the oracle."""
    sequences = jnp.repeat(jnp.arange(B), S)

    def total(x, params):
        out = reference.moe(x, params, CONFIG, sequences=sequences)
        return loss_of(*out), out

    return jax.jit(jax.grad(total, (0, 1), has_aux=True))(X, PARAMS)


def step_of(run, x_spec, weights, mesh, kind, constant):
    """grad of a loss of run(x, weights) and its outputs, jitted for x and weights on a mesh of this kind of axes."""
    if kind.startswith("manual"):
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=(x_spec, weights),
            out_specs=(x_spec, P()),
            check_vma=kind == "manual_vma",
        )

    def total(x, weights):
        y, stats = run(x, weights)
        weight = jnp.asarray(constant) if kind != "explicit" else jax.sharding.reshard(constant, jax.typeof(y).sharding)
        losses = 0.0 if stats is None else stats.aux_loss + stats.z_loss
        return jnp.sum(y * weight) + losses, (y, stats)

    sharding = named(mesh, (x_spec, weights))
    return jax.jit(
        jax.grad(total, (0, 1), has_aux=True),
        in_shardings=sharding,
        out_shardings=(sharding, None),
    )


def moved(compiled, mesh, *columns):
    """The (kind, axes) of each collective of a balanced step that moves tokens of these numbers of columns."""
    sizes = {B * S * n // devices for n in columns for devices in (1, 2, 4, 8)}
    traffic = [c for c in inspect.collectives(compiled, mesh=mesh) if not c.open_loop]
    kinds = (
        "all-gather",
        "all-to-all",
        "collective-permute",
        "ragged-all-to-all",
        "collective-broadcast",
    )
    return sorted((c.kind, c.axes) for c in traffic if c.kind in kinds and math.prod(c.shape) in sizes)


def case_of(name, kind):
    """A case, with axes that say nothing of x where its type says it."""
    sizes, x_spec, axes = CASES[name]
    return sizes, x_spec, Axes() if kind == "explicit" else axes


def mesh_of(sizes, kind):
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(KINDS[kind],) * len(sizes),
    )


def check(got, want, stats, want_stats, limit=5e-6):
    """Arrays by their relative error; counts exactly and losses closely."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert rel_norm(one, other) <= limit
    for name in ("aux_loss", "z_loss"):
        np.testing.assert_allclose(
            getattr(stats, name),
            getattr(want_stats, name),
            rtol=5e-6,
            err_msg=name,
        )
    np.testing.assert_array_equal(stats.tokens_per_expert, want_stats.tokens_per_expert)
    assert (int(stats.dropped), int(stats.rounds)) == (0, 1)


OF_MOE = [
    ("ep, fsdp x cp", "explicit"),
    ("ep, fsdp x cp", "auto"),
    ("cp x ep", "manual"),
    ("dp x cp", "manual"),
    ("S over ep", "auto"),
    ("ep, fsdp x cp", "manual_vma"),
    ("cp x tp", "explicit"),
]


@pytest.mark.parametrize("name, kind", mark_rest(OF_MOE, 1))
def test_moe(name, kind):
    """Breaks if a mesh axis over S changes a number or a loss, is left out of a sum, or if tokens leave their device
    for more than the exchange: a flattening [B, S, H] -> [B S, H] that gathers or permutes the batch."""
    sizes, x_spec, axes = case_of(name, kind)
    mesh = mesh_of(sizes, kind)
    weights = moax.param_specs(CONFIG, axes, mesh=mesh)
    step = step_of(
        lambda x, p: moax.moe(x, p, CONFIG, axes=axes),
        x_spec,
        weights,
        mesh,
        kind,
        WEIGHT,
    )
    with jax.set_mesh(mesh):
        operands = put(mesh, (x_spec, weights), (X, PARAMS))
        compiled = step.lower(*operands).compile()
        gradients, (y, stats) = compiled(*operands)
    want, (want_y, want_stats) = expected()
    check((gradients, y), (want, want_y), stats, want_stats)
    tokens = [("all-gather", ("ep",))] * 4 if "ep" in sizes else []  # x, experts and weights; dy
    assert moved(compiled, mesh, CONFIG.d_model, CONFIG.top_k) == tokens


DENSE = [
    ("ep, fsdp x cp", "auto"),
    ("ep, fsdp x cp", "explicit"),
    ("S over ep", "explicit"),
    ("cp x tp", "manual"),
]


@pytest.mark.parametrize("name, kind", mark_rest(DENSE, 1))
def test_dense(name, kind):
    """Breaks if a dense layer moves rows whose S lies over a mesh axis, or sums a gradient over too few axes."""
    sizes, x_spec, axes = case_of(name, kind)
    mesh = mesh_of(sizes, kind)
    w = random(2, CONFIG.d_model, 24)
    whole = moax.params.dense_spec(axes, w.shape, mesh)
    weight = np.cos(np.arange(B * S * 24, dtype=np.float32)).reshape(B, S, 24)

    def layer(x, w):
        return ops.dense(x, w, axes=axes, w_spec=whole), None

    step = step_of(layer, x_spec, whole, mesh, kind, weight)
    with jax.set_mesh(mesh):
        operands = put(mesh, (x_spec, whole), (X, w))
        compiled = step.lower(*operands).compile()
        (dx, dw), (y, _) = compiled(*operands)
    rows = X.reshape(-1, 32).astype(np.float64)
    d = weight.reshape(-1, 24)
    assert rel_norm(np.reshape(y, d.shape), rows @ w) <= 5e-6
    assert rel_norm(np.reshape(dx, rows.shape), d @ w.T) <= 5e-6
    assert rel_norm(dw, rows.T @ d) <= 5e-6
    assert moved(compiled, mesh, 32, 24) == []


@pytest.mark.more
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_sequence_parallel_of_tp(kind):
    """Breaks if S over tp, as Megatron has it between blocks, is wrong, or x and dy cross more than tp and ep."""
    sizes = {"fsdp": 2, "ep": 2, "tp": 2}
    x_spec = P(("fsdp", "ep"), "tp")
    mesh = mesh_of(sizes, kind)
    weights = moax.param_specs(CONFIG, mesh=mesh)
    step = step_of(lambda x, p: moax.moe(x, p, CONFIG), x_spec, weights, mesh, kind, WEIGHT)
    with jax.set_mesh(mesh):
        operands = put(mesh, (x_spec, weights), (X, PARAMS))
        compiled = step.lower(*operands).compile()
        gradients, (y, stats) = compiled(*operands)
    want, (want_y, want_stats) = expected()
    check((gradients, y), (want, want_y), stats, want_stats)
    crossed = moved(compiled, mesh, CONFIG.d_model)
    assert set(crossed) == {("all-gather", ("tp",)), ("all-gather", ("ep",))}
    assert crossed.count(("all-gather", ("ep",))) == 2
    assert crossed.count(("all-gather", ("tp",))) <= 2


@pytest.mark.parametrize("kind", mark_rest(["auto", "explicit"], 1))
def test_each_token_keeps_its_own(kind):
    """Breaks if a mask, ids of experts, weights, or the routing that is returned go to another token than theirs."""
    sizes, x_spec, axes = case_of("ep, fsdp x cp", kind)
    mesh = mesh_of(sizes, kind)
    mask = random(3, B, S) > -0.5
    ids = np.argsort(random(4, B, S, 8), axis=-1)[..., :2].astype(np.int32)
    by = np.abs(random(5, B, S, 2))

    def run(x, params, ids, by, mask):
        return moax.moe(
            x,
            params,
            CONFIG,
            axes=axes,
            routing=(ids, by),
            mask=mask,
            return_routing=True,
        )

    specs = (x_spec, moax.param_specs(CONFIG, axes, mesh=mesh), x_spec, x_spec, x_spec)
    with jax.set_mesh(mesh):
        y, stats = jax.jit(run)(*put(mesh, specs, (X, PARAMS, ids, by, mask)))
    flat = ids.reshape(-1, 2), by.reshape(-1, 2)
    want, _ = jax.jit(lambda x, p: reference.moe(x, p, CONFIG, experts=flat[0], weights=flat[1]))(X, PARAMS)
    assert rel_norm(y, np.where(mask[..., None], want, 0)) <= 5e-6
    np.testing.assert_array_equal(stats.routing.experts, np.where(mask[..., None], ids, 8))
    np.testing.assert_array_equal(stats.routing.weights, np.where(mask[..., None], by, 0))
    np.testing.assert_array_equal(
        stats.tokens_per_expert,
        np.bincount(ids[mask].ravel(), minlength=8),
    )


def test_another_order_is_said_once(caplog, fresh_compile):
    """Breaks if a batch over (ep, fsdp) on Auto axes is moved into the order (fsdp, ep), and nothing says so."""
    mesh = mesh_of({"fsdp": 2, "ep": 4}, "auto")
    x_spec = P(("ep", "fsdp"))
    operands = put(mesh, (x_spec, P()), (X, random(2, CONFIG.d_model, 24)))
    log_once.cache_clear()
    with jax.set_mesh(mesh), caplog.at_level(logging.WARNING):
        jax.jit(ops.dense).lower(*operands).compile()
        assert len(caplog.messages) == 1 and "over mesh axes ('ep', 'fsdp')" in caplog.messages[0]
        log_once.cache_clear()
        jax.jit(lambda x, w: ops.dense(x, w, axes=EP_FIRST)).lower(*operands).compile()
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("shape", [(8, 5), (3, 16), (3, 5), (2, 4, 4)])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_rows_of_any_shape(shape, kind):
    """Breaks if flattening and its inverse disagree where S lies over an axis, an axis does not divide a dim, or x has
    more dims than [B, S, H]."""
    mesh = mesh_of({"fsdp": 2, "ep": 2, "cp": 2}, kind)
    x = random(6, *shape, 4)
    with jax.set_mesh(mesh):
        axes = Axes(tokens=(("ep", "fsdp"), "cp"))
        x = put(mesh, P(), x)
        _, view = find_token_dims(x, axes, find_mesh_view(axes, "auto", x))
        there = jax.jit(lambda x: flatten_tokens(x, view))(x)
        back = jax.jit(lambda r, x: unflatten_tokens(r[:, :3], x, view))(there, x)
    np.testing.assert_array_equal(np.sort(there, axis=0), np.sort(np.reshape(x, (-1, 4)), axis=0))
    np.testing.assert_array_equal(back, x[..., :3])


PACKED = np.sort(np.random.default_rng(7).integers(-1, 4, (B, S)), axis=1).astype(np.int32)
PACKED = np.where(PACKED < 0, -1, PACKED * 6 - 2 * (PACKED > 0))  # ids 0, 4, 10, 16 and padding
# These are the same sequences, by larger names.
NAMES = np.where(PACKED < 0, -1, PACKED * 10**8 + 7).astype(np.int32)


def packed_loss(x, params, ids):
    """The sequence loss of packed rows in float64."""
    logits = x[ids >= 0].astype(np.float64) @ np.asarray(params.router, np.float64)
    rows = 100 * np.arange(len(x))
    return sequence_loss(logits, CONFIG.router, CONFIG.top_k, (rows[:, None] + ids)[ids >= 0])


ONLY = dataclasses.replace(
    CONFIG,
    router=moax.RouterConfig(sequence_aux_loss=CONFIG.router.sequence_aux_loss),
)


def test_packed_rows_are_their_sequences():
    """Breaks if a packed row has another loss, gradient or count than its sequences, each a row of its own."""
    rows = [(b, PACKED[b] == one) for b in range(B) for one in np.unique(PACKED[b]) if one >= 0]
    length = max(of_sequence.sum() for _, of_sequence in rows)
    x = np.zeros((len(rows), length, CONFIG.d_model), np.float32)
    mask = np.zeros((len(rows), length), bool)
    for i, (b, of_sequence) in enumerate(rows):
        x[i, : of_sequence.sum()] = X[b, of_sequence]
        mask[i, : of_sequence.sum()] = True

    def total(params, x, **options):
        stats = moax.moe(x, params, ONLY, **options)[1]
        return stats.aux_loss, stats

    run = jax.value_and_grad(total, has_aux=True)
    (got, stats), grads = jax.jit(lambda p: run(p, X, segment_ids=jnp.asarray(PACKED)))(PARAMS)
    (apart, stats_apart), grads_apart = jax.jit(lambda p: run(p, x, mask=jnp.asarray(mask)))(PARAMS)
    (masked, _), _ = jax.jit(lambda p: run(p, X, segment_ids=jnp.asarray(abs(PACKED)), mask=PACKED >= 0))(PARAMS)
    np.testing.assert_allclose(got, packed_loss(X, PARAMS, PACKED), rtol=2e-6)
    np.testing.assert_allclose([apart, masked], got, rtol=1e-6)
    np.testing.assert_array_equal(stats.tokens_per_expert, stats_apart.tokens_per_expert)
    assert stats.tokens_per_expert.sum() == CONFIG.top_k * (PACKED >= 0).sum()
    assert np.abs(grads.router).max() > 0 and rel_norm(grads.router, grads_apart.router) < 5e-6


@pytest.mark.parametrize(
    "dtype, factor, first",
    [
        ("int32", 1, 100),
        ("uint32", 10**8, 2**31),
        ("int64", 2**33, 2**40),
        ("uint64", 2**33, 2**63),
        ("uint8", 1, 100),
    ],
)
def test_ids_are_names(dtype, factor, first):
    """Breaks if ids of any size and dtype are other sequences, or padding: clipped, cut off, or of another sign."""
    ids = (np.where(PACKED < 0, 0, PACKED).astype(dtype) * np.asarray(factor, dtype)) + np.asarray(first, dtype)
    stats = moax.moe(X, PARAMS, ONLY, segment_ids=ids, mask=PACKED >= 0)[1]
    np.testing.assert_allclose(stats.aux_loss, packed_loss(X, PARAMS, PACKED), rtol=2e-6)
    assert stats.tokens_per_expert.sum() == CONFIG.top_k * (PACKED >= 0).sum()
    logits = (X @ np.asarray(PARAMS.router)).reshape(B * S, -1)
    unlike = np.where(PACKED < 0, 0, PACKED + 18 * np.arange(B)[:, None]).reshape(-1)
    sequences = unlike.astype(dtype) * np.asarray(factor, dtype) + np.asarray(first, dtype)
    routed = [moax.route(logits, ROUTER, 2, sequences=names).aux_loss for names in (unlike, sequences)]
    np.testing.assert_array_equal(*routed)


@pytest.mark.parametrize(
    "name, kind",
    mark_rest(
        [("ep, fsdp x cp", "auto"), ("dp x cp", "manual"), ("cp x tp", "explicit"), ("fsdp, ep", "manual_vma")], 2
    ),
)
def test_packed_rows_on_a_mesh(name, kind):
    """Breaks if a mesh that splits packed rows gives another loss or gradient, or counts a sequence once a device."""
    sizes, x_spec, axes = case_of(name, kind)
    mesh = mesh_of(sizes, kind)
    weights = moax.param_specs(ONLY, axes, mesh=mesh)

    def run(x, params, ids):
        return moax.moe(x, params, ONLY, axes=axes, segment_ids=ids)[1].aux_loss

    if kind.startswith("manual"):
        specs = (x_spec, weights, x_spec)
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=specs,
            out_specs=P(),
            check_vma=kind == "manual_vma",
        )
    with jax.set_mesh(mesh):
        operands = put(mesh, (x_spec, weights, x_spec), (X, PARAMS, NAMES))
        got, grads = jax.jit(jax.value_and_grad(run, 1))(*operands)
    alone = jax.jit(jax.grad(lambda p: moax.moe(X, p, ONLY, segment_ids=jnp.asarray(PACKED))[1].aux_loss))(PARAMS)
    np.testing.assert_allclose(got, packed_loss(X, PARAMS, PACKED), rtol=2e-6)
    assert rel_norm(grads.router, alone.router) < 5e-6


def test_rows_that_a_mesh_does_not_divide():
    """Breaks if sequences that the mesh cuts elsewhere than between rows lose their parts on other devices."""
    mesh = mesh_of({"fsdp": 2, "ep": 4}, "auto")
    x = X[:6, :4]
    ids = np.arange(24, dtype=np.int32).reshape(6, 4) % 7 // 2 - 1
    with jax.set_mesh(mesh):
        operands = put(mesh, (P(), moax.param_specs(ONLY, mesh=mesh), P()), (x, PARAMS, ids))
        got = jax.jit(lambda x, p, i: moax.moe(x, p, ONLY, segment_ids=i)[1].aux_loss)(*operands)
    np.testing.assert_allclose(got, packed_loss(x, PARAMS, ids), rtol=2e-6)
