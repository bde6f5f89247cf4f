"""Chunks: a block that runs the tokens of a device in parts has the numbers of one that runs them together.

Covers: meshes x ways x transports against NumPy; recipes against two calls on the halves; tokens that do not divide,
masks, routings of the caller, kept weights, adapters, remat and scan against one chunk; what crosses the mesh; which
collectives wait for which products; refused options. Overflow rounds are in tests/block/test_passes.py.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import moax
from moax import lora
from moax.block import experts
from moax.estimate.tracing import KINDS, Trace
from moax.ops.dispatch_combine import STEPS
from support import TOKENS, make_mesh, make_params, put, rel_norm, some, spec
from support.block import BASE, MESH, ONE_DEVICE, block, check, cotangent, expected, make_x
from support.exchange import EmulatedOneSided, registered

PLAIN = dataclasses.replace(BASE, shared_d_ff=0, router=moax.RouterConfig())  # no loss joins the tokens of a step
LATENT = dataclasses.replace(PLAIN, d_latent=16)
ADAPTERS = jax.tree.map(lambda v: v + 0.1, lora.init(jax.random.key(1), PLAIN, 4))


@pytest.mark.parametrize(
    ("mesh", "way", "exchange", "options"),
    some(
        [
            ("2x4", "custom_partitioning", "all_to_all", {}),
            ("", "none", "all_gather", {}),
            ("tp2x2x2", "user", "all_gather", dict(buffer_factor=None)),
            ("1x8", "shard_map", "one_sided", {}),
            ("2x4", "user_vma", "all_to_all", dict(save_rows=False)),
            ("2x4", "shard_map", "all_to_all", dict(buffer_factor=0.1, chunks=3)),
            ("dp2x2x2", "explicit", "all_to_all", dict(grad_reduce_dtype="float32", chunks=5)),
        ],
        1,
    ),
)
def test_chunks_have_the_numbers_of_the_block(mesh, way, exchange, options):
    """Breaks if a chunk's tokens, gradients or counts are lost, counted twice, or put in another's place."""
    with registered("one_sided", EmulatedOneSided()):
        got = block(way, mesh, exchange=exchange, **dict(chunks=2) | options)()
    check(got, expected(BASE), MESH if mesh else ONE_DEVICE)


def step(x, params, weights, config=PLAIN, **options):
    """y, and the gradients of x and of the parameters for a cotangent of y."""

    def loss(x, params):
        y, _ = moax.moe(x, params, config, **options)
        return jnp.vdot(y, weights), y

    (dx, dparams), y = jax.grad(loss, argnums=(0, 1), has_aux=True)(x, params)
    return y, dx, dparams


def both(x, params, weights, halves: bool, **options):
    """`step` in two chunks, or of the two halves of the tokens of one device apart."""
    if not halves:
        return step(x, params, weights, chunks=2, **options)
    parts = zip(jnp.split(x, 2), jnp.split(weights, 2), strict=True)
    (y, dx, dparams), (y_, dx_, dparams_) = (step(part, params, weight, **options) for part, weight in parts)
    return jnp.concatenate([y, y_]), jnp.concatenate([dx, dx_]), jax.tree.map(jnp.add, dparams, dparams_)


@pytest.mark.parametrize("recipe", some(["fp8_block", "mxfp8", "fp8_tensor", "wi=fp8_block,wo=none"], 1))
def test_each_chunk_is_quantized_by_itself(recipe):
    """Breaks if rows of two chunks share a block or a scale, or the gradient of a weight is rounded between them."""
    x, params = make_x(PLAIN, 96, rows_differ=True), make_params(PLAIN)
    weights = jnp.asarray(cotangent(x.shape))
    run = jax.jit(both, static_argnames=("halves", "recipe"))
    got, want = (run(x, params, weights, halves=halves, recipe=recipe) for halves in (False, True))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert rel_norm(a, b) < ONE_DEVICE


def one_and_two(**given):
    """The block on one device with tokens that do not divide, in one chunk and in two."""
    x, params = make_x(PLAIN, 1, 37), given.pop("params", make_params(PLAIN))
    weights = jnp.asarray(cotangent(x.shape))
    return [jax.jit(lambda x, p, n=n: step(x, p, weights, chunks=n, **given))(x, params) for n in (1, 2)]


@pytest.mark.parametrize(
    "given",
    some(
        [
            dict(mask=jnp.arange(37)[None] % 5 != 0, routing=jnp.tile(jnp.arange(-1, 1, dtype=jnp.int32), (1, 37, 1))),
            dict(),
            dict(mask=jnp.arange(37)[None] < 9),  # the second chunk is padding
            dict(routing=(jnp.full((1, 37, 2), 3, jnp.int32), jnp.full((1, 37, 2), 0.5))),
            dict(
                adapters=jax.tree.map(
                    lambda n: jnp.full(n, 0.1), lora.adapter_shapes(PLAIN, 4), is_leaf=lambda v: isinstance(v, tuple)
                )
            ),
            dict(config=dataclasses.replace(PLAIN, weights_at="hidden"), save_rows=False),
            dict(
                config=dataclasses.replace(PLAIN, d_latent=16),
                params=make_params(dataclasses.replace(PLAIN, d_latent=16)),
            ),
        ],
        1,
    ),
)
def test_what_a_call_gives_goes_with_its_tokens(given):
    """Breaks if a mask, a routing or the rows that complete the last chunk reach tokens of another chunk."""
    want, got = one_and_two(**given)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert rel_norm(a, b) < ONE_DEVICE


@pytest.mark.more
def test_kept_weights():
    """Breaks if a chunk reads other weights than `quantize_params` made."""
    kept = moax.quantize_params(make_params(PLAIN), PLAIN, recipe="fp8_block", dtype=jnp.float32)
    own, given = one_and_two(recipe="fp8_block")[1], one_and_two(recipe="fp8_block", quantized=kept)[1]
    jax.tree.map(np.testing.assert_array_equal, own, given)


@pytest.mark.more
def test_in_a_scan_of_layers():
    """Breaks if the residuals of chunks have no names, or are those of another chunk."""
    mesh, stack = make_mesh("2x4"), jax.tree.map(lambda v: jnp.stack([v, 0.5 * v]), make_params(PLAIN))
    specs = jax.tree.map(lambda s: jax.sharding.PartitionSpec(None, *s), moax.param_specs(PLAIN, mesh=mesh))
    stack, x = put(mesh, specs, stack), put(mesh, spec("2x4", TOKENS), make_x(PLAIN))
    policy = jax.checkpoint_policies.save_only_these_names(*moax.CHECKPOINT_NAMES)

    def loss(stack, x, chunks):
        layer = lambda x, p: (x + moax.moe(x, p, PLAIN, exchange="all_to_all", chunks=chunks)[0], None)  # noqa: E731
        return jnp.sum(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, stack)[0] ** 2)

    with jax.set_mesh(mesh):
        want, got = (jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)(stack, x, n) for n in (1, 2))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert rel_norm(a, b) < 2 * MESH


def shapes_on(mesh, x, params):
    """The shapes of x and of the parameters, placed on the mesh."""
    place = lambda v, s: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(mesh, s))  # noqa: E731
    return place(x, spec("2x4", TOKENS)), jax.tree.map(place, params, moax.param_specs(PLAIN, mesh=mesh))


@functools.cache
def traced(exchange: str, factor: float | None, chunks: int) -> Trace:
    """The collectives and products of forward and backward, as a GPU has them: a CPU's loops wait for one another."""
    options = dict(exchange=exchange, engine="shard_map", buffer_factor=factor, chunks=chunks)
    args = *shapes_on(make_mesh("2x4"), make_x(PLAIN), make_params(PLAIN)), jnp.asarray(cotangent(make_x(PLAIN).shape))
    with pytest.MonkeyPatch.context() as patch, jax.set_mesh(make_mesh("2x4")):
        patch.setattr(experts, "collectives_may_race", lambda: False)
        return Trace(jax.make_jaxpr(lambda *given: step(*given, **options))(*args).jaxpr)


@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_the_wire(exchange):
    """Breaks if the weights or their gradients cross for each chunk, or tokens other than as the halves."""
    sent = {}
    for chunks in (1, 2):
        found = traced(exchange, None, chunks).transfers(moax.Axes().resolve(make_mesh("2x4")))
        rows = [c.bytes for name in STEPS for c in found.pop(name)]
        sent[chunks] = sorted(rows), {name: sorted((c.kind, c.axes, c.bytes) for c in of) for name, of in found.items()}
    assert len(sent[1][0]) >= 6
    assert sent[2][0] == sorted(2 * [n // 2 for n in sent[1][0]])
    assert sent[2][1] == sent[1][1]
    assert len(sent[1][1]["gather_weight"]) >= 4 and len(sent[1][1]["scatter_gradient"]) >= 2


@pytest.mark.parametrize("factor", [None, 0.1])
@pytest.mark.parametrize("exchange", ["all_to_all", "all_gather"])
def test_no_chunk_waits_for_another(exchange, factor):
    """Breaks if a collective of one chunk reads what a product of another chunk computed. With overflow rounds the
    gradients that leave the last chunk alone may wait for the weights' gradients of the others."""
    one, two = (products_before(traced(exchange, factor, chunks)) for chunks in (1, 2))
    assert one["dispatch"] == one["combine_grad"] == {0} and one["combine"] == {2}
    last = set() if factor is None else {"dispatch_grad"}
    assert {name: two[name] for name in two.keys() - last} == {name: one[name] for name in one.keys() - last}


def test_backward_waits_for_forward_of_every_chunk():
    """Breaks if on a CPU a loop of backward may run beside the loop of a later chunk's forward, where dy is a constant:
    XLA pairs one device's collective in the first with another's in the second."""
    mesh = make_mesh("2x4")
    options = dict(exchange="all_to_all", engine="shard_map", buffer_factor=0.1, chunks=3)

    def loss(x, params):
        y = moax.moe(x, params, PLAIN, **options)[0]
        return jnp.vdot(y, jnp.asarray(cotangent(y.shape)))

    with jax.set_mesh(mesh):
        args = shapes_on(mesh, make_x(PLAIN), make_params(PLAIN))
        steps = Trace(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*args).jaxpr).steps
    needs, loops = dict[int, frozenset[int]](), dict[int, tuple[str, frozenset[int]]]()
    for i, one in enumerate(steps):
        before = frozenset[int]().union(*(needs.get(array, ()) for array in one.read))
        if one.eqn.primitive.name == "while":
            loops[i], before = (one.scope, before), before | {i}
        needs |= dict.fromkeys(one.results, before)
    forward = {i for i, (scope, _) in loops.items() if scope == "experts"}
    assert len(forward) == 3 and len(loops) == 6
    assert all(forward <= before for scope, before in loops.values() if scope == "experts_grad")


def products_before(trace: Trace) -> dict[str, set[int]]:
    """How many products each collective of dispatch and combine needs, by scope."""
    needs, found = dict[int, frozenset[int]](), dict[str, set[int]]()
    for i, one in enumerate(trace.steps):
        name = one.eqn.primitive.name
        before = frozenset().union(*(needs.get(array, ()) for array in one.read))
        if one.scope in STEPS and name in KINDS:
            found.setdefault(one.scope, set()).add(len(before))
        own = {i} if one.scope in ("expert_up", "expert_down") and name == "scan" else ()  # a loop of tiles
        needs |= dict.fromkeys(one.results, before.union(own))
    return found


def test_a_capacity_has_one_chunk():
    """Breaks if each chunk drops assignments by itself, so that `chunks` changes which of them are computed."""
    config = dataclasses.replace(PLAIN, capacity_factor=1.0)
    with pytest.raises(moax.Unsupported, match=r"chunks=2 with capacity_factor=1\.0; .* Use chunks=1"):
        moax.moe(make_x(config), make_params(config), config, chunks=2)
