"""What the compiled block puts on the wire, forward and backward, on 2x4: read from the optimized program.

Covers: engines x recipes x layouts of weights x transports, one program for all tests of a combination.
"""

from __future__ import annotations

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import moax
from moax import inspect
from moax.checks import log_once
from moax.kernels.hopper.pallas.matmul import MERGES_DIMS
from moax.kernels.scales import dequantize as dequantize_local
from moax.kernels.xla.operands import quantize as quantize_local
from moax.recipe import RECIPES
from support import TOKENS, gather_counts, make_mesh, mark_rest, size, spec
from support.gpus import pretend

CONFIG = moax.MoEConfig(d_model=256, d_ff=384, num_experts=8, top_k=2, use_bias=True)
T = 256


def of_one_round(*program, **options) -> list[inspect.Collective]:
    """The collectives of a balanced step, which takes no overflow round."""
    return [c for c in inspect.collectives(*program, **options) if not c.open_loop]


@functools.cache
def find_collectives(way: str, recipe: str | None, fsdp_dim: str = "experts", exchange: str = "all_gather"):
    """The collectives of loss and gradients, and the abstract parameters."""
    mesh = make_mesh("2x4", way)
    axes = moax.Axes(fsdp_dim=fsdp_dim)
    engine = "shard_map" if way == "shard_map" else "auto"

    def place(v, s):
        return jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(mesh, s))

    shapes = jax.eval_shape(lambda: moax.init(jax.random.key(0), CONFIG))
    with jax.set_mesh(mesh):
        params = jax.tree.map(place, shapes, moax.param_specs(CONFIG, axes))
        x = place(jax.ShapeDtypeStruct((T, CONFIG.d_model), jnp.bfloat16), spec("2x4", TOKENS))

        def loss(x, params):
            y, stats = moax.moe(
                x,
                params,
                CONFIG,
                recipe=recipe,
                axes=axes,
                exchange=exchange,
                engine=engine,
            )
            return y.astype(jnp.float32).sum() + stats.aux_loss

        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        return of_one_round(step, x, params, mesh=mesh), params


# (way, recipe, layout of weights, transport) of the programs; all but the first are left to `make test-more`.
PROGRAMS = [
    ("shard_map", "fp8_block", "model", "all_gather"),
    ("custom_partitioning", "fp8_block", "experts", "all_gather"),
    ("explicit", "mxfp8", "experts", "all_to_all"),
]
CASES = pytest.mark.parametrize(("way", "recipe", "fsdp_dim", "exchange"), mark_rest(PROGRAMS, 1))


@CASES
def test_weights_cross_as_bytes(way, recipe, fsdp_dim, exchange):
    """Breaks if a weight is gathered before it is quantized, or a compiler widens the bytes."""
    collectives, params = find_collectives(way, recipe, fsdp_dim, exchange)
    inspect.assert_no_wide_weight_gather(collectives, weights=(params.wi, params.wo))
    gathers = inspect.weight_gathers(collectives, axes="fsdp")
    data = [c for c in gathers if c.dtype == "uint8" and c.bytes >= params.wo.size // 8]
    scales = [c for c in gathers if c not in data]
    times = len(data) // 2
    assert len(data) == 2 * times and times in gather_counts(way), "wi and wo, forward and backward"
    assert len(scales) == 2 * times and 16 * inspect.total_bytes(scales) < inspect.total_bytes(data)
    # All that the gathers move: one byte for each element that a device lacks, twice, and the scales.
    lacks = (params.wi.size + params.wo.size) // 4 // 2
    assert inspect.total_bytes(data) == times * lacks


@pytest.mark.more
def test_gathered_bytes_are_half():
    """Breaks if the scales grow past a sixteenth of the bytes, or something else is gathered beside the weights."""
    plain = inspect.total_bytes(inspect.weight_gathers(find_collectives("explicit", None)[0], axes="fsdp"))
    assert (
        inspect.total_bytes(inspect.weight_gathers(find_collectives("explicit", "fp8_block")[0], axes="fsdp"))
        <= 0.53 * plain
    )


@CASES
def test_weight_gradients_are_reduce_scattered(way, recipe, fsdp_dim, exchange):
    """Breaks if a whole weight's gradient is all-reduced over fsdp, then sliced, or travels wider than x is."""
    collectives, params = find_collectives(way, recipe, fsdp_dim, exchange)
    assert not [c for c in collectives if c.kind == "all-reduce" and "fsdp" in c.axes and c.size >= params.wo.size // 8]
    assert {c.dtype for c in collectives if c.kind == "reduce-scatter" and c.axes == ("fsdp",)} == {"bfloat16"}


@CASES
def test_activations_cross_by_the_exchange_alone(way, recipe, fsdp_dim, exchange):
    """Breaks if the compiler gathers tokens, logits or saved activations over any axis: over ep there are the
    exchange's own transfers of T / 2 tokens, and over fsdp nothing of the size of a row block."""
    collectives, params = find_collectives(way, recipe, fsdp_dim, exchange)
    weights = inspect.weight_gathers(collectives, axes="fsdp")
    others = [c for c in collectives if c not in weights and c.kind != "reduce-scatter"]
    gathers = [c for c in others if c.kind == "all-gather"]
    group = T // 2  # the tokens of one ep group
    if exchange == "all_gather":
        # x, its expert ids and weights in forward; dy in backward. Nothing else, nothing over another axis.
        sizes = sorted(c.shape for c in gathers)
        assert sizes == sorted([(group, 256), (group, 2), (group, 2), (group, 256)])
        assert all(c.axes == ("ep",) for c in gathers)
    else:
        assert gathers == []
        assert {c.kind for c in others} == {"all-to-all", "all-reduce"}
        assert all(c.axes == ("ep",) for c in others if c.kind == "all-to-all")
    # Sums over tokens: [E] vectors, and gradients of what is replicated (router, biases); never rows.
    for c in collectives:
        if c.kind == "all-reduce":
            elements = 1
            for n in c.shape:
                elements *= n
            assert elements <= max(CONFIG.d_model * CONFIG.num_experts, 2 * 384 * 2), c


def test_quantizing_after_the_gather_is_caught():
    """Breaks if `assert_no_wide_weight_gather` lets the mistake through that this library exists to avoid."""
    mesh = make_mesh("2x4", "shard_map")
    form = RECIPES["fp8_block"].w

    def early(w):  # right: the shard's bytes cross
        q = quantize_local(w, form, form.weight_block(3, "fprop"))
        data, scale = (lax.all_gather(v, "fsdp", axis=0, tiled=True) for v in (q.data, q.scale))
        return dequantize_local(dataclasses.replace(q, data=data, scale=scale)).sum(0)

    def late(w):  # wrong: the weight crosses, then every rank quantizes it
        w = lax.all_gather(w, "fsdp", axis=0, tiled=True)
        return dequantize_local(quantize_local(w, form, form.weight_block(3, "fprop"))).sum(0)

    layout = PartitionSpec(("ep", "fsdp"))
    w = jax.ShapeDtypeStruct((8, 256, 256), jnp.bfloat16, sharding=NamedSharding(mesh, layout))
    with jax.set_mesh(mesh):
        programs = [
            jax.jit(jax.shard_map(f, in_specs=layout, out_specs=PartitionSpec(), check_vma=False))
            for f in (early, late)
        ]
        inspect.assert_no_wide_weight_gather(programs[0], w, weights=w, mesh=mesh)
        with pytest.raises(AssertionError, match="bfloat16"):
            inspect.assert_no_wide_weight_gather(programs[1], w, weights=w, mesh=mesh)


def abstract_params(config, *leading):
    """The parameters of a config as ShapeDtypeStructs on the mesh in force, with leading dims that are not sharded."""
    shapes = jax.eval_shape(lambda: moax.init(jax.random.key(0), config))
    mesh = make_mesh("2x4")

    def place(v, s):
        sharding = NamedSharding(mesh, PartitionSpec(*[None] * len(leading), *s))
        return jax.ShapeDtypeStruct((*leading, *v.shape), v.dtype, sharding=sharding)

    return jax.tree.map(place, shapes, moax.param_specs(config, mesh=mesh))


def tokens():
    sharding = NamedSharding(make_mesh("2x4"), spec("2x4", TOKENS))
    return jax.ShapeDtypeStruct((T, CONFIG.d_model), jnp.bfloat16, sharding=sharding)


@pytest.mark.more
def test_layers_of_different_configs_do_not_meet():
    """Breaks if an op keeps state between calls: two layers of two configs compile to the collectives of each."""
    configs = [CONFIG, dataclasses.replace(CONFIG, top_k=3, d_ff=128)]

    def loss(x, params):
        for p, c in zip(params, configs, strict=True):
            x = x + moax.moe(x, p, c, recipe="fp8_block")[0]
        return x.astype(jnp.float32).sum()

    with jax.set_mesh(make_mesh("2x4")):
        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        collectives = of_one_round(step, tokens(), [abstract_params(c) for c in configs])
    gathered = sorted(c.shape for c in collectives if c.dtype == "uint8")
    each = [(2, 256, 2, 384), (2, 384, 256), (2, 256, 2, 128), (2, 128, 256)]
    assert gathered == sorted(2 * each)


@pytest.mark.more
def test_scanned_layers_gather_nothing_else():
    """Breaks if what forward saves for backward is replicated in between (seen once: Shardy had no sharding for it)."""

    def loss(x, params):
        layer = lambda x, p: (x + moax.moe(x, p, CONFIG, recipe="fp8_block")[0], None)  # noqa: E731
        return jax.lax.scan(layer, x, params)[0].astype(jnp.float32).sum()

    with jax.set_mesh(make_mesh("2x4")):
        step = jax.jit(jax.grad(loss, argnums=(0, 1)))
        collectives = of_one_round(step, tokens(), abstract_params(CONFIG, 3))
    over_fsdp = [c for c in collectives if c.kind == "all-gather" and "fsdp" in c.axes]
    assert sum(c.dtype == "uint8" for c in over_fsdp) == 4 and all(c.times == 3 for c in over_fsdp)
    assert all(c.dtype == "uint8" or c.bytes < 100 for c in over_fsdp), "but for scales"


def depends(jaxpr, start) -> set:
    """The variables of a flat jaxpr that depend on the variable `start`."""
    seen = {start}
    for eqn in jaxpr.eqns:
        if any(v in seen for v in eqn.invars if not hasattr(v, "val")):
            seen.update(eqn.outvars)
    return seen


def readers(jaxpr, op) -> list:
    """The equations of a jaxpr that read the results of `op`."""
    return [eqn for eqn in jaxpr.eqns if any(v in op.outvars for v in eqn.invars)]


def barriers(jaxpr) -> list:
    """The barriers of a flat jaxpr, and of the local functions of its ops."""
    locals_ = [eqn.params["jaxpr"] for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map"]
    eqns = [eqn for inner in (jaxpr, *locals_) for eqn in inner.eqns]
    return [eqn for eqn in eqns if eqn.primitive.name == "optimization_barrier"]


def shards_with(jaxpr, collective: str) -> list:
    """The ops of a flat jaxpr whose local function has this collective, in their order."""
    ops = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "shard_map")
    return [op for op in ops if any(eqn.primitive.name == collective for eqn in op.params["jaxpr"].eqns)]


@pytest.mark.parametrize("recipe", mark_rest(["fp8_block", None], 1))
def test_the_weight_that_is_read_first_crosses_first(recipe):
    """Breaks if both gathers of a direction wait for the same data, or none does: collectives run in the order of their
    starts, and the first product would wait for both weights. Breaks too if a scattered gradient leaves its op as it
    is: XLA copies it into the stack of a scan at once, and all work waits for the reduce-scatter."""
    with jax.set_mesh(make_mesh("8x1", "explicit")):
        params = moax.init(jax.random.key(0), CONFIG)
        x = jax.device_put(jnp.ones((64, CONFIG.d_model)), PartitionSpec("fsdp"))

        def both(x, params, dy):
            y, pull = jax.vjp(
                lambda x, p: moax.moe(x, p, CONFIG, recipe=recipe, buffer_factor=None)[0],
                x,
                params,
            )
            return y, pull(dy)

        with jax.disable_jit():  # one flat jaxpr
            jaxpr = jax.make_jaxpr(both)(x, params, x).jaxpr
    of_x = depends(jaxpr, jaxpr.invars[0])
    of_dy = depends(jaxpr, jaxpr.invars[-1])
    gathers = [op for op in shards_with(jaxpr, "all_gather") if op.outvars[0].aval.ndim >= 3]
    waits = [(op.outvars[0] in of_x, op.outvars[0] in of_dy) for op in gathers]
    wi, wo = (False, False), (True, False)  # of forward
    # Forward gathers wi and then wo, and backward wo and then wi.
    assert waits[:2] == [wi, wo] and [of_gradient for _, of_gradient in waits[2:]] == [False, True]
    assert [has_barrier(op) for op in gathers] == [False, True, True, True]
    scatters = shards_with(jaxpr, "reduce_scatter")
    assert len(scatters) == 2
    assert {eqn.primitive.name for op in scatters for eqn in readers(jaxpr, op)} == {"optimization_barrier"}
    behind = [reader for op in scatters for eqn in readers(jaxpr, op) for reader in readers(jaxpr, eqn)]
    assert [eqn.primitive.name for eqn in behind] == ["mul", "mul"]


@pytest.mark.parametrize("recipe", ["fp8_block", None])
def test_a_quantized_weight_crosses_while_a_layer_is_made_again(recipe):
    """Breaks if the gathers of a quantized layer's backward wait for tokens that `jax.checkpoint` makes again: nothing
    then crosses beside that work. Breaks too if wi in bfloat16 does not wait, in front of the small gathers of it."""
    policy = jax.checkpoint_policies.save_only_these_names(*moax.CHECKPOINT_NAMES)
    with jax.set_mesh(make_mesh("8x1", "explicit")):
        params = moax.init(jax.random.key(0), CONFIG)
        x = jax.device_put(jnp.ones((64, CONFIG.d_model)), PartitionSpec("fsdp"))

        def loss(x, params):
            options = moax.Options(recipe=recipe, buffer_factor=None, save_rows=False)
            return moax.moe(jnp.sin(x), params, CONFIG, options)[0].sum()

        with jax.disable_jit():  # flat jaxprs
            jaxpr = jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy), argnums=(0, 1)))(x, params).jaxpr
    (again,) = (eqn.params["jaxpr"] for eqn in jaxpr.eqns if eqn.primitive.name == "remat2")
    (sin,) = (eqn for eqn in again.eqns if eqn.primitive.name == "sin")
    of_tokens = depends(again, sin.outvars[0])
    gathers = [op for op in shards_with(again, "all_gather") if op.outvars[0].aval.ndim >= 3]
    wo, wi = (op.outvars[0] in of_tokens for op in gathers)
    assert (wo, wi) == (False, recipe is None)


@pytest.mark.parametrize("mesh", ["1x8", None])
@pytest.mark.parametrize("dtype, once", [(jnp.bfloat16, False), (jnp.float32, True)])
def test_no_weight_that_stays_is_behind_a_barrier(mesh, dtype, once):
    """Breaks if XLA copies the weights of each layer out of the stack of a scan, or a gradient into its stack, where
    no weight crosses a wire: it reads and writes no slice in place behind a barrier."""
    with jax.set_mesh(make_mesh(mesh, "explicit") if mesh else jax.make_mesh((), ())):
        params = moax.init(jax.random.key(0), CONFIG, dtype=dtype)
        x = jnp.ones((64, CONFIG.d_model), jnp.bfloat16)
        if mesh:
            x = jax.device_put(x, PartitionSpec("ep"))
        ranks = size(mesh, "ep") if mesh else 1

        def both(x, params, quantized, dy):
            y, pull = jax.vjp(lambda x, p: moax.moe(x, p, CONFIG, quantized=quantized)[0], x, params)
            return y, pull(dy)

        quantized = moax.quantize_params(params, CONFIG) if once else None
        with jax.disable_jit():  # one flat jaxpr
            jaxpr = jax.make_jaxpr(both)(x, params, quantized, x).jaxpr
    assert len(barriers(jaxpr)) > 2
    behind = {v.aval.size for eqn in barriers(jaxpr) for v in eqn.invars}
    weights = (params.wi.size, params.wo.size)
    assert not behind & {number // ranks for number in weights}
    assert not behind & set(weights)


@pytest.mark.parametrize(("mesh", "adapters"), [("1x8", False), (None, False), (None, True)])
def test_h_is_behind_a_barrier_where_the_second_half_reads_it(monkeypatch, mesh, adapters):
    """Breaks if XLA copies h into the stack of a scan, where the kernel that makes h and a could store it there. Breaks
    too if nothing keeps XLA from running this kernel twice where an adapter of wo reads h. 1x8 has overflow rounds."""
    pretend(monkeypatch)
    config = dataclasses.replace(CONFIG, use_bias=False)
    with jax.set_mesh(make_mesh(mesh, "explicit") if mesh else jax.make_mesh((), ())):
        params = moax.init(jax.random.key(0), config, dtype=jnp.bfloat16)
        of_wo = dataclasses.replace(moax.lora.init(jax.random.key(1), config, rank=8), wi_a=None, wi_b=None)
        x = jnp.ones((2048, config.d_model), jnp.bfloat16)
        if mesh:
            x = jax.device_put(x, PartitionSpec("ep"))

        def forward(x, params):
            options = moax.Options(kernels="hopper")
            return moax.moe(x, params, config, options, adapters=of_wo if adapters else None)[0]

        with jax.disable_jit():  # one flat jaxpr
            jaxpr = jax.make_jaxpr(lambda x, params: jax.vjp(forward, x, params)[0])(x, params).jaxpr
    behind = {v.aval.shape[1:] for eqn in barriers(jaxpr) for v in eqn.invars}
    # Before jax 0.11.2 another kernel makes a from h.
    assert ((2, config.d_ff) in behind) == (adapters or not MERGES_DIMS)


def has_barrier(op) -> bool:
    """Whether the barrier with the sign of a gather stands in front of the all-gather of an op."""
    inner = op.params["jaxpr"].eqns
    names = [eqn.primitive.name for eqn in inner]
    barriers = [eqn for eqn in inner[: names.index("all_gather")] if eqn.primitive.name == "optimization_barrier"]
    return any(v.aval.shape == (1,) for eqn in barriers for v in eqn.invars)


def test_a_dense_weight_does_not_wait_for_dy():
    """Breaks if backward gathers the weight of `dense` behind dy: collectives run in the order of their starts, so that
    the gather would wait for the scatters of the layers behind this one. Breaks too if the gather reads the w of
    forward itself: XLA would then keep the gathered weight of forward."""
    with jax.set_mesh(make_mesh("8x1", "explicit")):
        w = jax.device_put(jnp.ones((64, 32)), PartitionSpec("fsdp"))
        x = jax.device_put(jnp.ones((64, 64)), PartitionSpec("fsdp"))
        dy = jax.device_put(jnp.ones((64, 32)), PartitionSpec("fsdp"))

        def both(x, w, dy):
            y, pull = jax.vjp(moax.ops.dense, x, w)
            return y, pull(dy)

        with jax.disable_jit():  # one flat jaxpr
            jaxpr = jax.make_jaxpr(both)(x, w, dy).jaxpr
    of_data = depends(jaxpr, jaxpr.invars[0]) | depends(jaxpr, jaxpr.invars[-1])
    gathers = shards_with(jaxpr, "all_gather")
    assert not any(op.outvars[0] in of_data for op in gathers)
    assert [has_barrier(op) for op in gathers] == [False, True]


def test_options_of_the_compiler_are_said_once(monkeypatch, caplog):
    """Breaks if no line tells a user on GPUs with fsdp of the options that hide the wire, or each call has one."""
    pretend(monkeypatch, "gpu")
    log_once.cache_clear()
    with jax.set_mesh(make_mesh("8x1", "explicit")), caplog.at_level(logging.INFO, "moax"):
        params = moax.init(jax.random.key(0), CONFIG)
        x = jax.device_put(jnp.ones((64, CONFIG.d_model)), PartitionSpec("fsdp"))
        for tokens in (x, jnp.concatenate([x, x])):
            jax.eval_shape(lambda x: moax.moe(x, params, CONFIG, kernels="xla")[0], tokens)
    assert len([message for message in caplog.messages if "moax.OVERLAP_OPTIONS" in message]) == 1


def test_options_of_the_compiler():
    """Breaks if this XLA does not know an option of `OVERLAP_OPTIONS`."""
    assert jax.jit(jnp.sin, compiler_options=moax.OVERLAP_OPTIONS)(jnp.zeros(2)).shape == (2,)
