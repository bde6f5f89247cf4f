"""What the block promises beside its values: counted drops, NaN that stays where it is, transformations, errors.

Covers: drops x meshes x engines x transports, with their gradients; NaN x recipes x meshes; scan, remat and
saved names; donation; the configs of Transformer Engine's tests; every error of `moax.moe`.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import moax
from moax.estimate import estimate
from support import TOKENS, make_mesh, make_params, mark_rest, put, random, rel_norm, size, spec
from support.block import BASE, MESH, check, cotangent, make_x
from support.oracle.block import block as block_by_numpy
from support.oracle.ops import choose_experts

CONFIG = moax.MoEConfig(d_model=32, d_ff=48, num_experts=8, top_k=2)
T = 128


def skewed(config=CONFIG, power: float = 1.5):
    """Parameters and tokens of a router that prefers low experts, Zipf-like."""
    params = make_params(config)
    x = jnp.asarray(random(1, T, config.d_model)).at[:, 0].set(1.0)
    preference = -power * jnp.log(jnp.arange(1.0, config.num_experts + 1.0))
    return x, dataclasses.replace(params, router=params.router.at[0].set(4 * preference))


def kept_by_numpy(experts: np.ndarray, config, mesh: str, exchange: str) -> np.ndarray:
    """Which assignments [T, K] fit, rank by rank, straight from the rules of the capacity."""
    data = size(mesh, "dp", "fsdp")
    ep = size(mesh, "ep")
    per_shard = T // (data * ep)
    of_rank = config.num_experts // ep
    mask = np.ones(experts.shape, bool)
    if exchange == "all_to_all" and ep > 1:
        slots = min(per_shard, int(np.ceil(config.capacity_factor * per_shard * config.top_k / ep)))
        for start in range(0, T, per_shard):
            used = np.zeros(ep, int)
            for t in range(start, start + per_shard):
                for rank in sorted(set(experts[t] // of_rank)):
                    mask[t] &= (experts[t] // of_rank != rank) | (used[rank] < slots)
                    used[rank] += 1
    capacity = int(np.ceil(config.capacity_factor * per_shard * config.top_k))
    group = per_shard * ep
    for start in range(0, T, group):
        for rank in range(ep):
            here = mask[start : start + group] & (experts[start : start + group] // of_rank == rank)
            lists = [
                np.argwhere(here & (experts[start : start + group] == e))
                for e in range(rank * of_rank, (rank + 1) * of_rank)
            ]
            sizes = np.array([len(v) for v in lists])
            while sizes.sum() > capacity:  # take one from the busiest; of equals, from the last
                sizes[len(sizes) - 1 - np.argmax(sizes[::-1])] -= 1
            for assignments, n in zip(lists, sizes, strict=True):
                for t, k in assignments[n:]:
                    mask[start + t, k] = False
    return mask


# (mesh, way, exchange, capacity factor): each mesh, way and transport once, each factor by which something drops.
DROPS = [
    ("2x4", "custom_partitioning", "all_to_all", 1.0),
    ("4x2", "explicit", "all_to_all", 0.6),
    ("8x1", "custom_partitioning", "all_gather", 0.6),
    ("1x8", "custom_partitioning", "all_to_all", 0.3),
    ("dp2x2x2", "shard_map", "all_gather", 0.6),
    ("2x4", "custom_partitioning", "all_gather", 0.6),
    ("4x2", "explicit", "all_gather", 1.0),
]


@pytest.mark.parametrize(("mesh", "way", "exchange", "factor"), mark_rest(DROPS, 2))
def test_drops_equal_a_numpy_count(mesh, way, exchange, factor):
    """Breaks if an assignment is dropped and not counted, or counted twice, or the wrong one is dropped; or if a
    dropped assignment still trains its router weight or its expert."""
    config = dataclasses.replace(CONFIG, capacity_factor=factor)
    x, params = skewed(config)
    experts = choose_experts(np.asarray(x) @ np.asarray(params.router), config.router, config.top_k)
    mask = kept_by_numpy(experts, config, mesh, exchange)
    dy = cotangent(x.shape)
    want = block_by_numpy(x, params, config, dy, has_room=mask)
    engine = way if way == "shard_map" else "auto"
    on = make_mesh(mesh, way)

    def both(x, p, dy):
        y, pull, stats = jax.vjp(
            lambda x, p: moax.moe(x, p, config, exchange=exchange, engine=engine),
            x,
            p,
            has_aux=True,
        )
        return (y, stats), pull(dy)

    with jax.set_mesh(on):
        layout = spec(mesh, TOKENS)
        outputs, grads = jax.jit(both)(
            *put(on, (layout, moax.param_specs(config), layout), (x, params, jnp.asarray(dy)))
        )
    assert want.stats["dropped"] > 0
    check((outputs, grads), want, MESH)


@pytest.mark.parametrize("factor, rows", [(None, None), (1.0, 30), (1.01, 31)])
def test_capacity_rounds_up(factor, rows):
    """A factor of 1 holds the balanced load exactly; a fraction of a row is a row."""
    config = moax.MoEConfig(d_model=32, d_ff=48, num_experts=6, top_k=3, capacity_factor=factor)
    assert estimate(config, {"fsdp": 1}, 10).plan.first.permute.capacity == rows


@pytest.mark.parametrize("exchange", mark_rest(["all_to_all", "all_gather"], 1))
def test_everything_on_one_expert_drops_nothing(exchange):
    """Breaks if a buffer is sized for anything but the worst case where capacity_factor is None."""
    config = dataclasses.replace(CONFIG, top_k=1, router=moax.RouterConfig())
    x, params = skewed(config, power=50.0)
    want = block_by_numpy(x, params, config, np.zeros(x.shape))
    on = make_mesh("2x4")
    with jax.set_mesh(on):
        args = put(on, (spec("2x4", TOKENS), moax.param_specs(config)), (x, params))
        y, stats = jax.jit(lambda x, p: moax.moe(x, p, config, exchange=exchange))(*args)
    assert int(stats.dropped) == 0 and stats.tokens_per_expert.tolist() == [T] + [0] * 7
    assert rel_norm(y, want.y) < MESH


# Each recipe, one device and the mesh, both transports.
NAN = [
    ("mxfp8", None, "all_gather"),
    (None, "2x4", "all_to_all"),
    ("fp8_block", "2x4", "all_gather"),
    ("mxfp8", "2x4", "all_to_all"),
]


@pytest.mark.parametrize(("recipe", "mesh", "exchange"), mark_rest(NAN, 1))
def test_nan_stays_with_its_token(recipe, mesh, exchange):
    """Breaks if a NaN reaches another token by a shared scale, a slot, a mask by value or a sum; or is swallowed."""
    params = make_params(CONFIG)
    x = jnp.asarray(random(1, T, CONFIG.d_model)).at[5].set(jnp.nan).at[77, 3].set(jnp.inf)

    @jax.jit
    def f(x, p):
        y, pull = jax.vjp(lambda x: moax.moe(x, p, CONFIG, recipe=recipe, exchange=exchange)[0], x)
        return y, pull(jnp.zeros_like(y).at[6:70].set(1.0))[0]

    if mesh is None:
        y, dx = f(x, params)
    else:
        on = make_mesh(mesh)
        with jax.set_mesh(on):
            y, dx = f(*put(on, (spec(mesh, TOKENS), moax.param_specs(CONFIG)), (x, params)))
    bad = ~np.isfinite(np.asarray(y)).all(-1)
    assert set(np.nonzero(bad)[0]) == {5, 77}
    assert np.isnan(np.asarray(y)[[5, 77]]).any(-1).all()
    assert np.isfinite(np.delete(np.asarray(dx), [5, 77], axis=0)).all()


def stacked(config, layers):
    """The parameters of `layers` blocks, stacked along a leading dim."""
    return jax.tree.map(
        lambda *v: jnp.stack(v),
        *(make_params(config, seed) for seed in range(layers)),
    )


POLICIES = {
    "saved": lambda f: f,
    "remat": jax.checkpoint,
    "names": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names(*moax.CHECKPOINT_NAMES)),
}


def layers_by_numpy(x, params, layers):
    """The gradients of x and of each layer's parameters, of sum(x^2) / size after layers x + moe(x)."""
    each = [jax.tree.map(lambda v, i=i: v[i], params) for i in range(layers)]
    inputs = [np.asarray(x, np.float64)]
    for p in each:
        inputs.append(inputs[-1] + block_by_numpy(inputs[-1], p, CONFIG, np.zeros(x.shape)).y)
    dx = 2 * inputs[-1] / x.size
    grads = []
    for p, into in zip(each[::-1], inputs[-2::-1], strict=True):
        result = block_by_numpy(into, p, CONFIG, dx)
        dx = dx + result.dx
        grads.append(result.dparams)
    return dx, grads[::-1]


@pytest.mark.parametrize(
    ("way", "policy"),
    mark_rest([("explicit", "remat"), ("custom_partitioning", "names"), ("custom_partitioning", "saved"),
          ("custom_partitioning", "remat"), ("explicit", "saved"), ("explicit", "names")], 1),
)  # fmt: skip
def test_scan_remat_and_names(way, policy):
    """Breaks if what backward needs is not a value: recomputed, or saved by name, it must give the same gradients."""
    params = stacked(CONFIG, 3)
    x = jnp.asarray(random(1, T, CONFIG.d_model))

    def loss(x, params):
        layer = lambda x, p: (x + moax.moe(x, p, CONFIG)[0], None)  # noqa: E731
        return jnp.sum(jax.lax.scan(POLICIES[policy](layer), x, params)[0] ** 2) / x.size

    on = make_mesh("2x4", way)
    with jax.set_mesh(on):
        specs = jax.tree.map(lambda s: PartitionSpec(None, *s), moax.param_specs(CONFIG))
        dx, got = jax.jit(jax.grad(loss, (0, 1)))(*put(on, (spec("2x4", TOKENS), specs), (x, params)))
    want_dx, want = layers_by_numpy(x, params, 3)
    assert rel_norm(dx, want_dx) < 2e-5  # three layers deep
    for i, of_layer in enumerate(want):
        for name, value in of_layer.items():
            assert rel_norm(getattr(got, name)[i], value) < 2e-5, (i, name)


def test_names_spare_the_matmuls():
    """Breaks if the exported names do not cover what backward needs, so that saving them still recomputes forward."""
    x = jnp.asarray(random(1, T, CONFIG.d_model))
    params = make_params(CONFIG)

    def matmuls(policy):
        f = jax.checkpoint(lambda x, p: moax.moe(x, p, CONFIG)[0], policy=policy)
        step = jax.value_and_grad(lambda x, p: f(x, p).sum(), (0, 1))
        return jax.jit(step).lower(x, params).as_text().count("stablehlo.dot_general")

    policies = jax.checkpoint_policies
    saved = matmuls(policies.save_only_these_names(*moax.CHECKPOINT_NAMES))
    assert saved <= matmuls(policies.everything_saveable) + 1  # the router's logits
    # x wi is saved; nothing in backward needs a wo.
    assert saved <= matmuls(policies.nothing_saveable) - 1


@pytest.mark.more
def test_training_step_with_donation():
    """Breaks if buffers alias what backward still reads."""
    x = jnp.asarray(random(1, T, CONFIG.d_model))
    optimizer = optax.sgd(0.1)

    def step(params, state, x):
        grads = jax.grad(lambda p: jnp.mean((moax.moe(x, p, CONFIG, recipe="fp8_block")[0] - x) ** 2))(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    on = make_mesh("2x4")
    with jax.set_mesh(on):
        params = make_params(CONFIG)
        placed = put(on, spec("2x4", TOKENS), x)
        results = []
        for donate in ((), (0, 1)):
            run = jax.jit(step, donate_argnums=donate)
            p = jax.tree.map(jnp.copy, params)
            s = optimizer.init(params)
            for _ in range(3):
                p, s = run(p, s, placed)
            results.append(jax.tree.map(np.asarray, p))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_array_equal(a, b)


UPSTREAM = {
    "softmax": {},
    "sigmoid": dict(router=moax.RouterConfig(score="sigmoid", aux_loss=1e-2)),
    "sigmoid, strong bias": dict(router=moax.RouterConfig(score="sigmoid", bias=True)),
}


@pytest.mark.more
@pytest.mark.parametrize("name", UPSTREAM)
def test_upstream_configurations(name):
    """Transformer Engine's MoE tests (fsdp 4, ep 2; bf16; B 16, S 32, H 64, F 128, E 8, K 2; loss = mean(out^2)) with
    its tolerances divided by ten or more: outputs 5e-2, gradients of weights and tokens 1e-1, of the router 5e-1,
    losses 1e-3. Gradients of this loss are far below its absolute tolerance, so ours are relative alone."""
    config = moax.MoEConfig(64, 128, 8, 2, **UPSTREAM[name])
    params = make_params(config)
    # As there, parameters of experts are bf16: the reference computes with the same, in float32.
    params = dataclasses.replace(
        params,
        wi=params.wi.astype(jnp.bfloat16),
        wo=params.wo.astype(jnp.bfloat16),
    )
    if config.router.bias:
        params = dataclasses.replace(params, router_bias=jnp.array([5.0, -5.0] * 4))
    x = jnp.asarray(random(1, 16, 32, 64)).astype(jnp.bfloat16)

    def loss(x, p):
        y, stats = moax.moe(x, p, config)
        return jnp.mean(y.astype(jnp.float32) ** 2) + stats.aux_loss, (y, stats.aux_loss)

    on = make_mesh("4x2")
    with jax.set_mesh(on):
        args = put(on, (spec("4x2", TOKENS), moax.param_specs(config)), (x, params))
        (dx, grads), (y, aux) = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(*args)
    flat = np.asarray(x, np.float32).reshape(-1, config.d_model)
    params = jax.tree.map(lambda p: np.asarray(p, np.float32), params)
    got_y = np.asarray(y, np.float32).reshape(flat.shape)
    want = block_by_numpy(flat, params, config, 2 * got_y / got_y.size, d_losses=(1, 0))
    assert dx.dtype == x.dtype and y.dtype == x.dtype
    assert rel_norm(got_y, want.y) < 5e-3
    assert rel_norm(np.asarray(dx, np.float32).reshape(flat.shape), want.dx) < 1e-2
    for n in ("wi", "wo"):
        assert getattr(grads, n).dtype == jnp.bfloat16
        assert rel_norm(np.asarray(getattr(grads, n), np.float32), want.dparams[n]) < 1e-2
        assert np.abs(want.dparams[n]).max() > 0
    assert rel_norm(grads.router, want.dparams["router"]) < 2e-2
    np.testing.assert_allclose(aux, want.stats["aux_loss"], rtol=1e-4)


def test_aux_loss_alone_reaches_the_router():
    """Breaks if the aux loss is a constant to autodiff, or is a loss of each shard rather than of the global batch."""
    config = dataclasses.replace(CONFIG, router=moax.RouterConfig(aux_loss=1e-2))
    x, params = skewed(config, power=0.5)
    on = make_mesh("2x4")
    with jax.set_mesh(on):
        args = put(on, (spec("2x4", TOKENS), moax.param_specs(config)), (x, params))
        loss, got = jax.jit(jax.value_and_grad(lambda p: moax.moe(args[0], p, config)[1].aux_loss))(args[1])
    want = block_by_numpy(x, params, config, np.zeros(x.shape), d_losses=(1, 0))
    assert rel_norm(got.router, want.dparams["router"]) < 5e-6
    assert np.abs(np.asarray(got.router)).max() > 0
    np.testing.assert_allclose(loss, want.stats["aux_loss"], rtol=2e-6)
    assert not np.asarray(got.wi).any()


def error_of(**changes):
    arguments = dict(x=jnp.zeros((T, 32)), params=make_params(CONFIG), config=CONFIG) | changes
    return moax.moe(
        arguments.pop("x"),
        arguments.pop("params"),
        arguments.pop("config"),
        **arguments,
    )


@pytest.mark.parametrize(
    ("changes", "kind", "says"),
    [
        (dict(x=jnp.zeros((T, 31))), ValueError, r"x has shape \(128, 31\).*d_model=32"),
        *[
            (
                dict(x=jnp.zeros(shape)),
                ValueError,
                re.escape(f"x has shape {shape}; it must be [*batch, S, d_model=32]"),
            )
            for shape in ((32,), (32, 4), ())
        ],
        (
            dict(x=jnp.zeros((T, 32), jnp.int32)),
            ValueError,
            "x has dtype int32; it must be floating point",
        ),
        (dict(params={}), ValueError, "params is a dict; it must be a moax.MoEParams"),
        (
            dict(params=dataclasses.replace(make_params(CONFIG), wo=None)),
            ValueError,
            "params.wo is None",
        ),
        (dict(recipe="fp4"), ValueError, "recipe='fp4'.*'fp8_block'"),
        (dict(exchange="carrier_pigeon"), ValueError, "exchange='carrier_pigeon'.*'all_gather'"),
        (dict(engine="gspmd"), ValueError, "engine='gspmd'.*'shard_map'"),
        (dict(kernels="cuda"), ValueError, "kernels='cuda'.*'xla'"),
        (dict(kernels="hopper"), moax.Unsupported, "kernels='hopper'.*use 'auto' or 'xla'"),
    ],
)
def test_errors(changes, kind, says):
    """Breaks if a mistake goes unnoticed, or a message does not name the argument, its value and what would do."""
    with pytest.raises(kind, match=says):
        error_of(**changes)


def test_errors_on_a_mesh():
    """Breaks if sizes, layouts or choices that the mesh cannot run surface as something else than their names."""
    x = jnp.zeros((T, 32))
    params = make_params(CONFIG)
    with jax.set_mesh(make_mesh("2x4")):
        with pytest.raises(
            ValueError,
            match=r"x: its 100 rows are not divisible by mesh axes \('fsdp', 'ep'\) of 8",
        ):
            moax.moe(x[:100], params, CONFIG)
        six = dataclasses.replace(CONFIG, num_experts=6)
        with pytest.raises(
            ValueError,
            match=r"params.wi: dim 0 of size 6 is not divisible by mesh axes \('ep',\) of 4",
        ):
            moax.moe(x, moax.MoEParams(jnp.zeros((32, 6)), jnp.zeros((6, 32, 2, 48)), jnp.zeros((6, 48, 32))), six)
        with pytest.raises(
            ValueError,
            match="params.wi: dim 0 of size 8.*16 devices|mesh axis 'ep' is named by both",
        ):
            moax.moe(x, params, CONFIG, axes=moax.Axes(fsdp="ep"))
    explicit = make_mesh("2x4", "explicit")
    with jax.set_mesh(explicit):
        with pytest.raises(
            ValueError,
            match=r"x: its 12 rows are not divisible by mesh axes \('fsdp', 'ep'\) of 8",
        ):
            moax.moe(jnp.zeros((3, 4, 32)), params, CONFIG)
        with pytest.raises(
            moax.Unsupported,
            match="engine='custom_partitioning'.*Explicit.*'shard_map'",
        ):
            moax.moe(x, params, CONFIG, engine="custom_partitioning")
        wrong = NamedSharding(explicit, PartitionSpec(("fsdp", "ep")))
        bad = dataclasses.replace(params, wi=jax.device_put(params.wi, wrong))
        with pytest.raises(
            ValueError,
            match="params.wi: dim 0 is sharded over mesh axes 'fsdp', 'ep'; .*'ep' first",
        ):
            moax.moe(x, bad, CONFIG)
    on = make_mesh("2x4")
    specs = (PartitionSpec(("fsdp", "ep")), PartitionSpec())
    with jax.set_mesh(on):
        inside = jax.shard_map(
            lambda x, p: moax.moe(x, p, CONFIG)[0],
            in_specs=specs,
            out_specs=specs[0],
            check_vma=False,
        )
        with pytest.raises(
            ValueError,
            match=r"params.wi has shape \(8, 32, 2, 48\) inside the shard_map; a shard has",
        ):
            inside(x, params)
        mixed = jax.shard_map(
            lambda x, p: moax.moe(x, p, CONFIG)[0],
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names={"fsdp"},
            check_vma=False,
        )
        with pytest.raises(ValueError, match=r"\['fsdp'\] are Manual .* but \['ep'\] are not"):
            jax.jit(mixed)(x, params)


@pytest.mark.parametrize("vma", (False, True))
def test_gradient_of_a_shard_map_over_tp_alone(vma):
    """Breaks if JAX derives a count of the stats, as of drops, whose maximum over tp has no rule."""
    router = moax.RouterConfig(bias=True, histogram=True, aux_loss=0.1, z_loss=0.1)
    config = moax.MoEConfig(8, 16, 4, 2, router=router, capacity_factor=1.0)
    params = make_params(config)
    x = random(1, 6, 8)
    whole = PartitionSpec()

    def loss(block, x, params):
        y, stats = block(x, params)
        return (y**2).sum() + stats.aux_loss + stats.z_loss

    def block(x, params):
        return moax.moe(x, params, config, return_routing=True)

    want = jax.grad(functools.partial(loss, block), (0, 1))(x, params)
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        specs = whole, moax.param_specs(config)
        mapped = jax.shard_map(block, in_specs=specs, out_specs=whole, check_vma=vma)
        got = jax.jit(jax.grad(functools.partial(loss, mapped), (0, 1)))(x, params)
    for name, a, b in zip(("x", *vars(params)), *map(jax.tree.leaves, (got, want)), strict=False):
        assert rel_norm(a, b) < 1e-5, name


def test_unknown_axis_of_explicit_tokens():
    """Breaks if tokens sharded over an axis without a role are silently gathered."""
    mesh = jax.make_mesh((4, 2), ("data", "ep"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.zeros((T, 32)), NamedSharding(mesh, PartitionSpec(("data", "ep"))))
        with pytest.raises(ValueError, match="mesh axis 'data' of 4 devices has no role in Axes"):
            moax.moe(x, make_params(CONFIG), CONFIG)
        with pytest.raises(ValueError, match="x: dim 0 is sharded over mesh axis 'data'.*Axes"):
            moax.moe(x, make_params(CONFIG), CONFIG, axes=moax.Axes(other="data"))
        y, _ = moax.moe(x, make_params(CONFIG), CONFIG, axes=moax.Axes(dp="data"))
    assert y.shape == x.shape


@pytest.mark.parametrize("recipe", (None, "fp8_block"))
def test_backward_reads_the_parameters_themselves(recipe):
    """Breaks if forward leaves a copy of the weights to backward, of which a scan of layers would hold one a layer."""
    config = dataclasses.replace(BASE, shared_d_ff=0)
    args = make_x(config), make_params(config)
    layer = lambda x, params: moax.moe(x, params, config, recipe=recipe)[0]  # noqa: E731
    jaxpr = jax.make_jaxpr(lambda *args: jax.tree.leaves(jax.vjp(layer, *args)[1]))(*args).jaxpr
    inputs = set(jaxpr.invars)
    weights = {args[1].wi.shape, args[1].wo.shape}
    assert not [v.aval for v in jaxpr.outvars if v not in inputs and v.aval.shape in weights]
