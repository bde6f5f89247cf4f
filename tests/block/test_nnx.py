"""`moax.nnx.MoE` is `moax.moe` on `moax.init`'s parameters, laid out and labelled by `moax.param_specs`.

Covers: configs x ways; options x ways, with every gradient; dtypes; biases; a training step; stacked layers.
"""

import dataclasses
import functools
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("flax")
pytest.importorskip("optax")

import optax
from flax import nnx

import moax
from moax.mesh.specs import named
from moax.nnx import MoE, RouterBias
from support import make_mesh, rel_error, some

pytestmark = pytest.mark.loose

ROUTER = moax.RouterConfig(score="sigmoid", bias=True, logits_bias=True, expert_scale=True, aux_loss=1e-2)
FULL = moax.MoEConfig(32, 48, 8, 2, use_bias=True, shared_d_ff=16, shared_gate=True, router=ROUTER, d_latent=24)
BARE = moax.MoEConfig(32, 48, 8, 2, activation="silu")
NAMES = [f.name for f in dataclasses.fields(moax.MoEParams)]
WAYS = ("none", "custom_partitioning", "explicit")
X = np.random.default_rng(0).standard_normal((4, 16, 32)).astype(np.float32)


def mesh_for(way: str):
    return nullcontext() if way == "none" else jax.set_mesh(make_mesh("2x4", way))


def make(config=FULL, **options) -> MoE:
    """A layer whose biases are not 0."""
    layer = MoE(config, rngs=nnx.Rngs(0), **options)
    for i, name in enumerate(("router_bias", "logits_bias", "bi", "bo")):
        if (variable := getattr(layer, name)) is not None:
            noise = 0.1 * jax.random.normal(jax.random.key(i), variable.shape, variable.dtype)
            variable.set_value(variable.get_value() + noise)
    return layer


def loss_of(y, stats):
    return jnp.mean(y.astype(jnp.float32) * jnp.cos(jnp.arange(y.shape[-1], dtype=jnp.float32))) + stats.aux_loss


def arrays(state) -> dict:
    """Of a state of one layer: each variable's value by name."""
    return {name: variable.get_value() for name, variable in state.items()}


@pytest.mark.parametrize(
    "way, config", some([("none", BARE), ("explicit", FULL), ("custom_partitioning", FULL), ("none", FULL)], 1)
)
def test_parameters_are_those_of_init(config, way):
    """Breaks if a checkpoint of one is none of the other: names, shapes, values, and which there are."""
    want = moax.init(nnx.Rngs(0).params(), config)
    with mesh_for(way):
        layer = MoE(config, rngs=nnx.Rngs(0))
    present = {n for n in NAMES if getattr(want, n) is not None}
    assert set(nnx.state(layer).keys()) == present
    for name in NAMES:
        if name in present:
            np.testing.assert_array_equal(getattr(layer, name).get_value(), getattr(want, name), err_msg=name)
        else:
            assert getattr(layer, name) is None
    assert jax.tree.structure(layer.params) == jax.tree.structure(want)


@pytest.mark.parametrize(
    "way, axes",
    some([("custom_partitioning", moax.Axes(fsdp_dim="model")), ("explicit", moax.Axes()),
          ("explicit", moax.Axes(fsdp_dim="model")), ("custom_partitioning", moax.Axes())], 2),
)  # fmt: skip
def test_metadata_is_that_of_param_specs(axes, way):
    """Breaks if flax is told another layout than the arrays have, or they are not made in it."""
    with mesh_for(way):
        layer, specs = MoE(FULL, axes=axes, rngs=nnx.Rngs(0)), moax.param_specs(FULL, axes)
    state, mesh = nnx.state(layer), make_mesh("2x4", way)
    labels, shardings = nnx.get_partition_spec(state), nnx.get_named_sharding(state, mesh)
    for name, value in arrays(state).items():
        want = getattr(specs, name)
        assert labels[name].get_value() == want and layer_metadata(layer, name) == want
        assert shardings[name].get_value() == NamedSharding(mesh, want)
        assert value.sharding.is_equivalent_to(NamedSharding(mesh, want), value.ndim), name


def layer_metadata(layer, name):
    return getattr(layer, name).get_metadata("out_sharding")


def test_no_metadata_without_a_mesh():
    """Breaks if a layer of one device asks for a mesh."""
    layer = MoE(FULL, rngs=nnx.Rngs(0))
    assert all("out_sharding" not in getattr(layer, name).get_metadata() for name in NAMES)


@pytest.mark.parametrize("way", WAYS[1:])
def test_made_from_shapes_alone(way):
    """Breaks if a checkpoint cannot be restored into shards: the abstract layer must say where its arrays go."""
    with mesh_for(way):
        abstract = nnx.as_abstract(nnx.eval_shape(lambda: MoE(FULL, rngs=nnx.Rngs(0))))
        specs = moax.param_specs(FULL)
    for name, value in arrays(nnx.state(abstract)).items():
        assert isinstance(value, jax.ShapeDtypeStruct)
        assert [*value.sharding.spec] == [*getattr(specs, name)], name


def test_the_bias_is_no_parameter():
    """Breaks if an optimizer, weight decay or a norm of gradients sees the selection bias."""
    layer = make()
    params, rest = nnx.state(layer, nnx.Param), nnx.state(layer, nnx.Not(nnx.Param))
    assert "router_bias" not in params and set(rest.keys()) == {"router_bias"}
    assert isinstance(layer.router_bias, RouterBias) and not isinstance(layer.router_bias, nnx.Param)


OPTIONS = {
    "plain": {},
    "fp8_block": dict(recipe="fp8_block"),
    "all_to_all": dict(exchange="all_to_all", axes=moax.Axes(fsdp_dim="model")),
}


@pytest.mark.more
@pytest.mark.parametrize("way, options", [("none", "fp8_block"), ("explicit", "plain"), ("shard_map", "all_to_all")])
def test_computes_what_moe_does(way, options):
    """Breaks if the layer passes on an option wrongly, or forgets one: values and gradients are those of `moax.moe`."""
    given = OPTIONS[options] | (dict(engine=way) if way == "shard_map" else {})

    with mesh_for(way):
        layer = make(**given)
        x = jnp.asarray(X) if way == "none" else jax.device_put(X, named(make_mesh("2x4", way), P("fsdp")))

        def of_layer(layer, x):
            y, stats = layer(x)
            return loss_of(y, stats), (y, stats)

        def of_moe(params, x):
            y, stats = moax.moe(x, params, FULL, **given)
            return loss_of(y, stats), (y, stats)

        (_, out), (d_layer, dx) = nnx.jit(
            nnx.value_and_grad(of_layer, argnums=(nnx.DiffState(0, nnx.Param), 1), has_aux=True)
        )(layer, x)
        (_, want), (d_params, want_dx) = jax.jit(jax.value_and_grad(of_moe, argnums=(0, 1), has_aux=True))(
            layer.params, x
        )

    got = arrays(d_layer)
    assert set(got) == set(NAMES) - {"router_bias"}
    assert out[0].shape == X.shape and out[0].dtype == jnp.float32
    for one, other in zip(jax.tree.leaves((out, dx)), jax.tree.leaves((want, want_dx)), strict=True):
        assert rel_error(one, other) < 1e-6
    for name, grad in got.items():
        other = getattr(d_params, name)
        assert rel_error(grad, other) < 1e-6 and np.asarray(grad).any(), name
        assert grad.sharding.is_equivalent_to(getattr(layer, name).get_value().sharding, grad.ndim), name


@pytest.mark.parametrize("present", some([(("bo",),), (("bi",),), ((),)], 1))
def test_any_subset_of_biases(present):
    """Breaks if a user cannot take one expert bias out, as published models have one, both or none."""
    layer = make()
    for name in {"bi", "bo"} - set(present):
        setattr(layer, name, None)
    want = jax.jit(functools.partial(moax.moe, config=FULL))(X, layer.params)[0]
    assert [n for n in ("bi", "bo") if getattr(layer.params, n) is not None] == list(present)
    assert rel_error(nnx.jit(lambda m, x: m(x)[0])(layer, X), want) < 1e-6


@pytest.mark.parametrize(
    "dtype, param_dtype", some([("float32", "bfloat16"), ("bfloat16", "float32"), (None, "bfloat16")], 1)
)
@pytest.mark.more
def test_dtypes(dtype, param_dtype):
    """Breaks if `dtype` is not what the block computes in and `param_dtype` what is stored, each by itself."""
    layer = make(dtype=dtype, param_dtype=param_dtype)
    assert {v.dtype for v in arrays(nnx.state(layer)).values()} == {jnp.dtype(param_dtype)}
    x = jnp.asarray(X, jnp.bfloat16 if dtype is None else jnp.float32)
    y, stats = nnx.jit(lambda m, x: m(x))(layer, x)
    assert y.dtype == (x.dtype if dtype is None else jnp.dtype(dtype)) and stats.aux_loss.dtype == jnp.float32
    want, _ = jax.jit(functools.partial(moax.moe, config=FULL))(x.astype(y.dtype), layer.params)
    assert rel_error(y, want) < 1e-6


@pytest.mark.parametrize("way", some(WAYS[:2], 1))
@pytest.mark.more
def test_a_training_step(way):
    """Breaks if an optimizer does to the layer what it would not do to `MoEParams`, or the bias moves with it."""
    tx = optax.adam(1e-2)
    with mesh_for(way):
        layer = make()
        before = jax.tree.map(jnp.copy, layer.params)
        optimizer = nnx.Optimizer(layer, tx, wrt=nnx.Param)

        @nnx.jit
        def step(layer, optimizer, x):
            loss = lambda m: (lambda y, s: (loss_of(y, s), s))(*m(x))  # noqa: E731
            (_, stats), grads = nnx.value_and_grad(loss, has_aux=True)(layer)
            optimizer.update(layer, grads)
            layer.update_router_bias(stats, 0.5)
            return stats

        stats = step(layer, optimizer, jnp.asarray(X))

        @jax.jit
        def by_hand(params, x):
            trained = dataclasses.replace(params, router_bias=None)
            whole = lambda p: dataclasses.replace(p, router_bias=params.router_bias)  # noqa: E731
            grads = jax.grad(lambda p: loss_of(*moax.moe(x, whole(p), FULL)))(trained)
            return optax.apply_updates(trained, tx.update(grads, tx.init(trained), trained)[0])

        want = by_hand(before, jnp.asarray(X))
    for name in set(NAMES) - {"router_bias"}:
        assert rel_error(getattr(layer.params, name), getattr(want, name)) < 1e-5, name
        assert not np.array_equal(getattr(layer.params, name), getattr(before, name)), name
    want_bias = moax.update_router_bias(before.router_bias, stats.tokens_per_expert, 0.5)
    np.testing.assert_array_equal(layer.router_bias.get_value(), want_bias)
    assert not np.array_equal(want_bias, before.router_bias)


def test_no_bias_to_update():
    """Breaks if an update that does nothing goes unnoticed."""
    layer = make(BARE)
    stats = jax.eval_shape(lambda x: layer(x)[1], X)
    with pytest.raises(ValueError, match="config.router.bias=False; it must be True for a bias to update"):
        layer.update_router_bias(stats)


@pytest.mark.more
@pytest.mark.parametrize("way", WAYS[1:])
def test_stacked_layers(way):
    """Breaks if layers made by `nnx.vmap` and run by `nnx.scan` are not layers one after the other, if their metadata
    lacks the new dim, or their biases cannot be updated together."""
    layers = 3

    @nnx.split_rngs(splits=layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def stack(rngs):
        return MoE(FULL, rngs=rngs)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def run(x, layer):
        y, stats = layer(x)
        return x + y, stats

    x = jnp.asarray(X)
    with mesh_for(way):
        model = stack(nnx.Rngs(0))
        specs = None if way == "none" else moax.param_specs(FULL)
        y, stats = nnx.jit(run)(x, model)
        grads = nnx.jit(nnx.grad(lambda m, x: run(x, m)[0].sum()))(model, x)
        model.update_router_bias(stats, 0.1)
    want, counts, block = x, [], jax.jit(functools.partial(moax.moe, config=FULL))
    for i in range(layers):
        params = jax.tree.map(lambda p, i=i: jnp.asarray(np.asarray(p)[i]), model.params)
        params = dataclasses.replace(params, router_bias=jnp.zeros(8))
        out, one = block(want, params)
        want, counts = want + out, [*counts, one.tokens_per_expert]
    assert rel_error(y, want) < 5e-6
    np.testing.assert_array_equal(stats.tokens_per_expert, counts)
    np.testing.assert_array_equal(
        model.router_bias.get_value(), moax.update_router_bias(jnp.zeros((3, 8)), jnp.stack(counts), 0.1)
    )
    assert model.wi.shape == grads["wi"].get_value().shape == (layers, 8, FULL.d_rows, 2, 48)
    if specs is not None:
        for name, value in arrays(nnx.state(model)).items():
            stacked = P(None, *getattr(specs, name))
            assert tuple(layer_metadata(model, name)) == tuple(stacked), name
            at = NamedSharding(make_mesh("2x4", way), stacked)
            assert value.sharding.is_equivalent_to(at, value.ndim), name


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(kernels="hopper"), moax.Unsupported, "kernels='hopper'"),
        (dict(exchange="one_sided"), moax.Unsupported, "exchange='one_sided'"),
        (dict(recipe="fp4"), ValueError, "recipe='fp4'"),
        (dict(engine="fast"), ValueError, "engine='fast'"),
    ],
)
def test_options_reach_the_block(options, error, message):
    """Breaks if an option is dropped on the way: the block is the one that refuses it."""
    with pytest.raises(error, match=message):
        make(BARE, **options)(jnp.asarray(X))
