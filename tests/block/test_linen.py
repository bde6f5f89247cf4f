"""`moax.linen.MoEBlock` is `moax.moe` on `moax.init`'s parameters, boxed by `moax.param_specs`.

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
from flax import linen as nn

import moax
from moax.linen import MoEBlock
from moax.mesh.specs import named
from support import make_mesh, rel_error, some

pytestmark = pytest.mark.loose

ROUTER = moax.RouterConfig(score="sigmoid", bias=True, logits_bias=True, expert_scale=True, aux_loss=1e-2)
FULL = moax.MoEConfig(32, 48, 8, 2, use_bias=True, shared_d_ff=16, shared_gate=True, router=ROUTER, d_latent=24)
BARE = moax.MoEConfig(32, 48, 8, 2, activation="silu")
NAMES = [f.name for f in dataclasses.fields(moax.MoEParams)]
WAYS = ("none", "custom_partitioning", "explicit")
X = np.random.default_rng(0).standard_normal((4, 16, 32)).astype(np.float32)
KEY = jax.random.key(3)


def mesh_for(way: str):
    return nullcontext() if way == "none" else jax.set_mesh(make_mesh("2x4", way))


def init(block: nn.Module) -> dict:
    """Jitted, so that the forward pass of `init`, which nobody asks for, is not run."""
    return jax.jit(block.init)(KEY, jnp.asarray(X))


def make(block: MoEBlock) -> dict:
    """The block's variables, with biases that are not 0."""

    def noisy(path, value):
        name = path[-1].key
        i = ("router_bias", "logits_bias", "bi", "bo").index(name) if "bias" in name or name in ("bi", "bo") else None
        return value if i is None else value + 0.1 * jax.random.normal(jax.random.key(i), value.shape, value.dtype)

    variables = init(block)
    leaves, tree = jax.tree.flatten(nn.unbox(variables))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(nn.unbox(variables))]
    values = tree.unflatten([noisy(path, leaf) for path, leaf in zip(paths, leaves, strict=True)])
    return nn.meta.replace_boxed(variables, values)


def params_of(variables) -> moax.MoEParams:
    """Variables as `moax.moe` takes them."""
    flat = {**nn.unbox(variables["params"]), **nn.unbox(variables.get("moax_state", {}))}
    return moax.MoEParams(**{name: flat.get(name) for name in NAMES})


def loss_of(y, stats):
    return jnp.mean(y.astype(jnp.float32) * jnp.cos(jnp.arange(y.shape[-1], dtype=jnp.float32))) + stats.aux_loss


@pytest.mark.parametrize(
    "way, config", some([("custom_partitioning", FULL), ("none", BARE), ("explicit", FULL), ("none", FULL)], 1)
)
def test_parameters_are_those_of_init(config, way):
    """Breaks if a checkpoint of one is none of the other: names, shapes, values of the same key, and which there are;
    or if the selection bias is among the trained parameters."""
    want = moax.init(KEY, config)
    with mesh_for(way):
        variables = init(MoEBlock(config))
    present = {n for n in NAMES if getattr(want, n) is not None}
    assert set(variables["params"]) == present - {"router_bias"}
    assert set(variables.get("moax_state", {})) == present & {"router_bias"}
    got = params_of(variables)
    for name in present:
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)


@pytest.mark.parametrize(
    "way, axes",
    some([("explicit", moax.Axes(fsdp_dim="model")), ("custom_partitioning", moax.Axes()),
          ("custom_partitioning", moax.Axes(fsdp_dim="model")), ("explicit", moax.Axes())], 2),
)  # fmt: skip
def test_metadata_is_that_of_param_specs(axes, way):
    """Breaks if flax is told another layout than the arrays have, or they are not made in it; by shapes alone, too."""
    block = MoEBlock(FULL, axes=axes)
    with mesh_for(way):
        variables, specs = init(block), moax.param_specs(FULL, axes)
        abstract = jax.eval_shape(block.init, KEY, jnp.asarray(X))
    mesh = make_mesh("2x4", way)
    for tree in (variables, abstract):
        labels, shardings = nn.get_partition_spec(tree), nn.get_sharding(tree, mesh)
        for collection, name in [("moax_state", "router_bias")] + [("params", n) for n in NAMES if n != "router_bias"]:
            assert isinstance(tree[collection][name], nn.Partitioned)
            assert labels[collection][name] == getattr(specs, name), name
            assert shardings[collection][name] == NamedSharding(mesh, getattr(specs, name)), name
    for name in NAMES:
        value = getattr(params_of(variables), name)
        assert value.sharding.is_equivalent_to(NamedSharding(mesh, getattr(specs, name)), value.ndim), name


def test_no_boxes_without_a_mesh():
    """Breaks if a block of one device makes its user unbox."""
    variables = MoEBlock(BARE).init(KEY, jnp.asarray(X))  # not jitted, for once
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(variables, is_leaf=nn.meta.is_axis_metadata))


OPTIONS = {
    "plain": {},
    "fp8_block": dict(recipe="fp8_block"),
    "all_to_all": dict(exchange="all_to_all", axes=moax.Axes(fsdp_dim="model")),
}


@pytest.mark.more
@pytest.mark.parametrize(
    "way, options", [("custom_partitioning", "plain"), ("explicit", "fp8_block"), ("shard_map", "all_to_all")]
)
def test_computes_what_moe_does(way, options):
    """Breaks if the block passes on an option wrongly, or forgets one: values and gradients are those of `moax.moe`."""
    given = OPTIONS[options] | (dict(engine=way) if way == "shard_map" else {})
    block = MoEBlock(FULL, **given)

    with mesh_for(way):
        variables = make(block)
        x = jnp.asarray(X) if way == "none" else jax.device_put(X, named(make_mesh("2x4", way), P("fsdp")))

        def of_block(params, x):
            y, stats = block.apply({**variables, "params": params}, x)
            return loss_of(y, stats), (y, stats)

        def of_moe(params, x):
            y, stats = moax.moe(x, params, FULL, **given)
            return loss_of(y, stats), (y, stats)

        (_, out), (d_block, dx) = jax.jit(jax.value_and_grad(of_block, (0, 1), has_aux=True))(variables["params"], x)
        run = jax.jit(jax.value_and_grad(of_moe, (0, 1), has_aux=True))
        (_, want), (d_params, want_dx) = run(params_of(variables), x)

    assert out[0].shape == X.shape and out[0].dtype == jnp.float32
    for one, other in zip(jax.tree.leaves((out, dx)), jax.tree.leaves((want, want_dx)), strict=True):
        assert rel_error(one, other) < 1e-6
    assert set(d_block) == set(NAMES) - {"router_bias"}
    for name, grad in nn.unbox(d_block).items():
        assert rel_error(grad, getattr(d_params, name)) < 1e-6 and np.asarray(grad).any(), name
        assert grad.sharding.is_equivalent_to(getattr(params_of(variables), name).sharding, grad.ndim), name


@pytest.mark.parametrize("present", some([(("bi",),), (("bo",),), ((),)], 1))
@pytest.mark.more
def test_any_subset_of_biases(present):
    """Breaks if a user cannot take one expert bias out, as published models have one, both or none."""
    block = MoEBlock(FULL)
    variables = make(block)
    kept = {n: v for n, v in variables["params"].items() if n not in {"bi", "bo"} - set(present)}
    variables = {**variables, "params": kept}
    want = jax.jit(functools.partial(moax.moe, config=FULL))(X, params_of(variables))[0]
    assert rel_error(jax.jit(block.apply)(variables, X)[0], want) < 1e-6


@pytest.mark.more
@pytest.mark.parametrize("dtype, param_dtype", [("bfloat16", "float32"), (None, "bfloat16"), ("float32", "bfloat16")])
def test_dtypes(dtype, param_dtype):
    """Breaks if `dtype` is not what the block computes in and `param_dtype` what is stored, each by itself."""
    block = MoEBlock(FULL, dtype=dtype, param_dtype=param_dtype)
    variables = make(block)
    assert {v.dtype for v in jax.tree.leaves(variables)} == {jnp.dtype(param_dtype)}
    x = jnp.asarray(X, jnp.bfloat16 if dtype is None else jnp.float32)
    y, _ = jax.jit(block.apply)(variables, x)
    assert y.dtype == (x.dtype if dtype is None else jnp.dtype(dtype))
    want, _ = jax.jit(functools.partial(moax.moe, config=FULL))(x.astype(y.dtype), params_of(variables))
    assert rel_error(y, want) < 1e-6


@pytest.mark.parametrize("way", some(WAYS[1:], 1))
@pytest.mark.more
def test_a_training_step(way):
    """Breaks if an optimizer does to the variables what it would not do to `MoEParams`, or if the bias is not updated,
    in its box, by the counts of the step."""
    tx, block = optax.adam(1e-2), MoEBlock(FULL)
    with mesh_for(way):
        variables = make(block)
        before = params_of(variables)

        @jax.jit
        def step(variables, opt, x):
            loss = lambda p: (lambda y, s: (loss_of(y, s), s))(*block.apply({**variables, "params": p}, x))  # noqa: E731
            grads, stats = jax.grad(loss, has_aux=True)(variables["params"])
            updates, opt = tx.update(grads, opt, variables["params"])
            _, state = block.apply(variables, stats, 0.5, method="update_router_bias", mutable="moax_state")
            return {**state, "params": optax.apply_updates(variables["params"], updates)}, opt, stats

        @jax.jit
        def by_hand(params, x):
            trained = dataclasses.replace(params, router_bias=None)
            whole = lambda p: dataclasses.replace(p, router_bias=params.router_bias)  # noqa: E731
            grads = jax.grad(lambda p: loss_of(*moax.moe(x, whole(p), FULL)))(trained)
            return optax.apply_updates(trained, tx.update(grads, tx.init(trained), trained)[0])

        after, _, stats = step(variables, tx.init(variables["params"]), jnp.asarray(X))
        want = by_hand(before, jnp.asarray(X))
    assert jax.tree.structure(after) == jax.tree.structure(variables)
    for name in set(NAMES) - {"router_bias"}:
        got = getattr(params_of(after), name)
        assert rel_error(got, getattr(want, name)) < 1e-5 and not np.array_equal(got, getattr(before, name)), name
    want_bias = moax.update_router_bias(before.router_bias, stats.tokens_per_expert, 0.5)
    np.testing.assert_array_equal(params_of(after).router_bias, want_bias)


def test_no_bias_to_update():
    """Breaks if an update that does nothing goes unnoticed."""
    block = MoEBlock(BARE)
    variables = init(block)
    _, stats = jax.jit(block.apply)(variables, jnp.asarray(X))
    with pytest.raises(ValueError, match="config.router.bias=False; it must be True for a bias to update"):
        block.apply(variables, stats, method="update_router_bias", mutable="moax_state")


def test_missing_variables():
    """Breaks if a block that is given no parameters, or no state, makes its own in silence."""
    block = MoEBlock(FULL)
    variables = init(block)
    with pytest.raises(ValueError, match="params.router_bias is None"):
        block.apply({"params": variables["params"]}, jnp.asarray(X))
    with pytest.raises(ValueError, match="params.router is None"):
        block.apply({"moax_state": variables["moax_state"]}, jnp.asarray(X))


class Stack(nn.Module):
    """x + block(x), `length` times, by `nn.scan`, each time with remat."""

    length: int

    @nn.compact
    def __call__(self, x):
        def body(block, x, _):
            y, stats = block(x)
            return x + y, stats

        scan = nn.scan(
            nn.remat(body),
            variable_axes={"params": 0, "moax_state": 0},
            split_rngs={"params": True},
            length=self.length,
            metadata_params={nn.PARTITION_NAME: None},
        )
        return scan(MoEBlock(FULL, name="moe"), x, None)


@pytest.mark.parametrize("way", WAYS[1:])
@pytest.mark.more
def test_stacked_layers(way):
    """Breaks if blocks scanned over are not blocks one after the other with parameters of their own, or their boxes
    lack the new dim."""
    x, stack = jnp.asarray(X), Stack(3)
    with mesh_for(way):
        variables = init(stack)
        specs = None if way == "none" else moax.param_specs(FULL)
        y, stats = jax.jit(stack.apply)(variables, x)
        grads = jax.jit(jax.grad(lambda v: stack.apply(v, x)[0].sum()))(variables)
    params = params_of({c: v["moe"] for c, v in variables.items()})
    assert not np.array_equal(params.wi[0], params.wi[1])
    want, counts = x, []
    block = jax.jit(functools.partial(moax.moe, config=FULL))
    for i in range(3):
        out, moe_stats = block(want, jax.tree.map(lambda p, i=i: jnp.asarray(np.asarray(p)[i]), params))
        want, counts = want + out, [*counts, moe_stats.tokens_per_expert]
    assert rel_error(y, want) < 5e-6
    np.testing.assert_array_equal(stats.tokens_per_expert, counts)
    assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, variables)
    if specs is not None:
        labels = nn.get_partition_spec(variables)["params"]["moe"]
        for name, label in labels.items():
            stacked = P(None, *getattr(specs, name))
            assert label == stacked, name
            at = NamedSharding(make_mesh("2x4", way), stacked)
            assert getattr(params, name).sharding.is_equivalent_to(at, len(stacked)), name


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
        MoEBlock(BARE, **options).init(KEY, jnp.asarray(X))
