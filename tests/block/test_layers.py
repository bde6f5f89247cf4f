"""`moax.nnx.MoE` and `moax.linen.MoEBlock` are `moax.moe` on `moax.init`'s parameters, laid out by `moax.param_specs`.

Covers: both libraries x (configs x ways; options and keywords of a call, with every gradient; dtypes; biases; a step
of training; stacked layers); `buffer_factor` of the layers, of the language model and of the benchmark.
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
from flax import linen, nnx

import moax
from benchmarks.timing import Repeats
from lm import model as lm
from lm.config import ModelConfig, TrainConfig
from moax import lora
from moax.checks import log_once
from moax.linen import MoEBlock
from moax.params import DIMS
from support import make_mesh, make_params, mark_rest, put, rel_error
from support.block import BASE, B, L, make_x
from support.layers import KEY, LAYERS, Stack, params_of, stack

pytestmark = pytest.mark.loose

ROUTER = moax.RouterConfig(
    score="sigmoid",
    bias=True,
    logits_bias=True,
    expert_scale=True,
    aux_loss=1e-2,
)
FULL = moax.MoEConfig(
    32,
    48,
    8,
    2,
    use_bias=True,
    shared_d_ff=16,
    shared_gate=True,
    router=ROUTER,
    d_latent=24,
)
BARE = moax.MoEConfig(32, 48, 8, 2, activation="silu")
PARAMS = make_params(FULL)
WAYS = ("none", "custom_partitioning", "explicit")
X = np.random.default_rng(0).standard_normal((4, 16, 32)).astype(np.float32)
BY_MODEL = moax.Axes(fsdp_dim="model")
BOTH = pytest.mark.parametrize("library", LAYERS)


def mesh_for(way: str):
    return nullcontext() if way == "none" else jax.set_mesh(make_mesh("2x4", way))


def loss_of(y, stats):
    return jnp.mean(y.astype(jnp.float32) * jnp.cos(jnp.arange(y.shape[-1], dtype=jnp.float32))) + stats.aux_loss


@pytest.mark.parametrize(
    ("library", "way", "config"),
    mark_rest(
        [
            ("linen", "custom_partitioning", FULL),
            ("nnx", "none", BARE),
            ("nnx", "explicit", FULL),
            ("linen", "none", BARE),
            ("nnx", "custom_partitioning", FULL),
            ("linen", "explicit", FULL),
            ("nnx", "none", FULL),
            ("linen", "none", FULL),
        ],
        2,
    ),
)
def test_parameters_are_those_of_init(library, way, config):
    """Breaks if a checkpoint of one is none of the other: names, shapes, values of the same key, and which there are;
    or if the selection bias is among the trained parameters, where an optimizer or weight decay sees it."""
    with mesh_for(way):
        layer = LAYERS[library](config)
    want = {name: v for name, v in dataclasses.asdict(moax.init(layer.key, config)).items() if v is not None}
    assert layer.arrays.keys() == want.keys() and layer.trained == want.keys() - {"router_bias"}
    for name, value in layer.arrays.items():
        np.testing.assert_array_equal(value, want[name], err_msg=name)


@pytest.mark.parametrize(
    ("library", "way", "axes"),
    mark_rest(
        [
            ("nnx", "explicit", BY_MODEL),
            ("linen", "custom_partitioning", moax.Axes()),
            ("linen", "explicit", BY_MODEL),
            ("nnx", "custom_partitioning", BY_MODEL),
            ("nnx", "explicit", moax.Axes()),
            ("linen", "custom_partitioning", BY_MODEL),
        ],
        2,
    ),
)
def test_metadata_is_that_of_param_specs(library, way, axes):
    """Breaks if flax is told another layout than the arrays have, or they are not made in it; or if a layer that is
    traced for its shapes does not say where its arrays go, so that no checkpoint can be restored into shards."""
    mesh = make_mesh("2x4", way)
    with jax.set_mesh(mesh):
        specs = moax.param_specs(FULL, axes)
        layer, abstract = (LAYERS[library](FULL, shapes, axes=axes) for shapes in (False, True))
        if library == "nnx":
            abstract.module = nnx.as_abstract(abstract.module)
    for module in (layer, abstract):
        labels = module.labels()
        shardings = module.shardings(mesh)
        for name, value in module.arrays.items():
            want = NamedSharding(mesh, getattr(specs, name))
            assert labels[name] == want.spec and shardings[name] == want, name
            if module is layer:
                assert value.sharding.is_equivalent_to(want, value.ndim), name
            else:
                assert isinstance(value, jax.ShapeDtypeStruct)
                assert library == "linen" or [*value.sharding.spec] == [*want.spec], name
    assert layer.arrays.keys() == abstract.arrays.keys() == set(DIMS)


def test_no_metadata_without_a_mesh():
    """Breaks if a layer of one device asks for a mesh, or makes its user unbox."""
    assert all("out_sharding" not in v.get_metadata() for v in LAYERS["nnx"](FULL).state.values())
    variables = MoEBlock(BARE).init(KEY, jnp.asarray(X))  # not jitted, for once
    assert all(isinstance(v, jax.Array) for v in jax.tree.leaves(variables, is_leaf=linen.meta.is_axis_metadata))


@pytest.mark.more
@pytest.mark.parametrize(
    ("library", "way", "options"),
    [
        ("nnx", "none", dict(recipe="fp8_block")),
        ("nnx", "explicit", {}),
        ("nnx", "shard_map", dict(engine="shard_map", exchange="all_to_all", axes=BY_MODEL)),
        ("linen", "custom_partitioning", {}),
        ("linen", "explicit", dict(recipe="fp8_block")),
    ],
)
def test_computes_what_moe_does(library, way, options):
    """Breaks if the layer passes on an option wrongly, or forgets one: values and gradients are those of `moax.moe`."""
    with mesh_for(way):
        layer = LAYERS[library](FULL, **options)
        params = PARAMS
        x = jnp.asarray(X)
        if way != "none":
            mesh = make_mesh("2x4", way)
            params = put(mesh, moax.param_specs(FULL, options.get("axes", moax.Axes())), params)
            x = jax.device_put(X, NamedSharding(mesh, P("fsdp")))

        def run(call):

            def total(params, x):
                return (lambda out: (loss_of(*out), out))(call(params, x))

            return jax.jit(jax.grad(total, (0, 1), has_aux=True))(params, x)

        got = run(layer)
        want = run(lambda params, x: moax.moe(x, params, FULL, **options))
    y = got[1][0]
    assert y.shape == X.shape and y.dtype == jnp.float32
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert rel_error(one, other) < 1e-6
    for name in layer.trained:
        grad = getattr(got[0][0], name)
        assert np.asarray(grad).any() and grad.sharding.is_equivalent_to(layer.arrays[name].sharding, grad.ndim), name


@BOTH
def test_keywords_of_a_call(library):
    """Breaks if a layer has no way to say which tokens are padding, to replay a routing, to use adapters or weights
    that were quantized before, or if the weights that it quantizes are not those of its call."""
    config = dataclasses.replace(BASE, shared_d_ff=0)
    settings = dict(recipe="fp8_block")
    layer = LAYERS[library](config, dtype=jnp.float32, **settings)
    x = make_x(config)
    real = np.random.default_rng(0).random(x.shape[:-1]) < 0.6
    adapters = lora.adapter_shapes(config, 2)
    adapters = jax.tree.map(
        lambda shape: jnp.full(shape, 0.1),
        adapters,
        is_leaf=lambda v: isinstance(v, tuple),
    )
    arguments = dict(
        segment_ids=jnp.asarray(np.where(real, 1, -1)),
        return_routing=True,
        adapters=adapters,
    )
    params = params_of(layer.arrays)
    got = jax.jit(functools.partial(layer, quantized=layer.quantize(), **arguments))(params, x)
    want = jax.jit(lambda params, x: moax.moe(x, params, config, **settings, **arguments))(params, x)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert (np.asarray(got[1].routing.experts)[~real] == 8).all()


@pytest.mark.parametrize(
    ("library", "dropped"),
    mark_rest(
        [("nnx", ("bi",)), ("linen", ("bo",)), ("nnx", ("bo",)), ("linen", ("bi", "bo")), ("nnx", ("bi", "bo"))], 1
    ),
)
def test_any_subset_of_biases(library, dropped):
    """Breaks if a user cannot take one expert bias out, as published models have one, both or none."""
    layer = LAYERS[library](FULL)
    params = dataclasses.replace(PARAMS, **dict.fromkeys(dropped))
    for name in dropped:
        layer.drop(name)
    want = jax.jit(functools.partial(moax.moe, config=FULL))(X, params)[0]
    assert params_of(layer.arrays).bi is None or "bi" not in dropped
    assert rel_error(jax.jit(layer)(params, X)[0], want) < 1e-6


@pytest.mark.more
@BOTH
@pytest.mark.parametrize(
    "dtype, param_dtype",
    [("float32", "bfloat16"), ("bfloat16", "float32"), (None, "bfloat16")],
)
def test_dtypes(library, dtype, param_dtype):
    """Breaks if `dtype` is not what the block computes in and `param_dtype` what is stored, each by itself."""
    layer = LAYERS[library](FULL, dtype=dtype, param_dtype=param_dtype)
    state = layer.arrays.keys() - layer.trained
    assert {layer.arrays[name].dtype for name in layer.trained} == {jnp.dtype(param_dtype)}
    assert {layer.arrays[name].dtype for name in state} == {jnp.dtype("float32")}
    x = jnp.asarray(X, jnp.bfloat16 if dtype is None else jnp.float32)
    params = params_of(layer.arrays)
    y, stats = jax.jit(layer)(params, x)
    assert y.dtype == (x.dtype if dtype is None else jnp.dtype(dtype))
    assert stats.aux_loss.dtype == jnp.float32
    want, _ = jax.jit(functools.partial(moax.moe, config=FULL))(x.astype(y.dtype), params)
    assert rel_error(y, want) < 1e-6


def by_nnx(layer, tx):
    """A step of an optimizer, as a user of nnx writes it, on the layer itself; returns its stats."""
    optimizer = nnx.Optimizer(layer.module, tx, wrt=nnx.Param)

    @nnx.jit
    def step(module, optimizer, x):
        loss = lambda m: (lambda y, s: (loss_of(y, s), s))(*m(x))  # noqa: E731
        (_, stats), grads = nnx.value_and_grad(loss, has_aux=True)(module)
        optimizer.update(module, grads)
        module.update_router_bias(stats, 0.5)
        return stats

    return step(layer.module, optimizer, jnp.asarray(X))


def by_linen(layer, tx):
    """The same of linen."""

    @jax.jit
    def step(variables, opt, x):

        def loss(p):
            return (lambda y, s: (loss_of(y, s), s))(
                *layer.module.apply({**variables, "params": p}, x),
            )

        grads, stats = jax.grad(loss, has_aux=True)(variables["params"])
        updates, _ = tx.update(grads, opt, variables["params"])
        _, state = layer.module.apply(
            variables,
            stats,
            0.5,
            method="update_router_bias",
            mutable="moax_state",
        )
        return {**state, "params": optax.apply_updates(variables["params"], updates)}, stats

    before = layer.variables
    layer.variables, stats = step(before, tx.init(before["params"]), jnp.asarray(X))
    assert jax.tree.structure(before) == jax.tree.structure(layer.variables)
    return stats


@pytest.mark.more
@pytest.mark.parametrize(
    ("library", "way"),
    [("nnx", "none"), ("nnx", "custom_partitioning"), ("linen", "explicit")],
)
def test_a_training_step(library, way):
    """Breaks if an optimizer does to the layer what it would not do to `MoEParams`, or if the selection bias moves with
    it, or is not updated by the counts of the step."""
    tx = optax.adam(1e-2)
    with mesh_for(way):
        layer = LAYERS[library](FULL)
        before = jax.tree.map(jnp.copy, params_of(layer.arrays))
        stats = (by_nnx if library == "nnx" else by_linen)(layer, tx)

        @jax.jit
        def by_hand(params, x):
            trained = dataclasses.replace(params, router_bias=None)
            whole = lambda p: dataclasses.replace(p, router_bias=params.router_bias)  # noqa: E731
            grads = jax.grad(lambda p: loss_of(*moax.moe(x, whole(p), FULL)))(trained)
            return optax.apply_updates(trained, tx.update(grads, tx.init(trained), trained)[0])

        want = by_hand(before, jnp.asarray(X))
        after = params_of(layer.arrays)
    for name in layer.trained:
        assert rel_error(getattr(after, name), getattr(want, name)) < 1e-5, name
        assert not np.array_equal(getattr(after, name), getattr(before, name)), name
    want_bias = moax.update_router_bias(before.router_bias, stats.tokens_per_expert, 0.5)
    np.testing.assert_array_equal(after.router_bias, want_bias)
    assert not np.array_equal(want_bias, before.router_bias)


def test_no_bias_to_update():
    """Breaks if an update that does nothing goes unnoticed."""
    layer = LAYERS["nnx"](BARE).module
    block = LAYERS["linen"](BARE)
    stats = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype),
        jax.eval_shape(lambda x: layer(x)[1], X),
    )
    apply = functools.partial(block.module.apply, method="update_router_bias", mutable="moax_state")
    for update in (layer.update_router_bias, functools.partial(apply, block.variables)):
        with pytest.raises(
            ValueError,
            match="config.router.bias=False; it must be True for a bias to update",
        ):
            update(stats)


@pytest.mark.parametrize(
    "make",
    (lambda rngs: moax.nnx.MoE(BARE, rngs=rngs), lambda rngs: moax.nnx.Dense(8, 8, rngs=rngs)),
)
@pytest.mark.parametrize("rngs", (None, 0, np.uint32([0, 0])))
def test_rngs_of_another_kind(make, rngs):
    """Breaks if a key in the place of `nnx.Rngs` is an AttributeError about `params`."""
    with pytest.raises(
        ValueError,
        match=r"rngs is .*; it must be a Rngs, as flax.nnx.Rngs\(0\) returns it",
    ):
        make(rngs)


def test_no_key_of_parameters():
    """Breaks if `init` without a key of the parameters is a KeyError."""
    with pytest.raises(
        ValueError,
        match=r"rngs has the keys \['dropout'\]; it must be a PRNG key, or have one of 'par",
    ):
        MoEBlock(BARE).init({"dropout": KEY}, X)


@pytest.mark.parametrize("way", mark_rest(WAYS[1:], 2))
def test_one_warning_of_whole_weights(way, caplog, fresh_compile):
    """Breaks if a layer that was made outside of `jax.set_mesh` runs whole on every device without one clear word."""
    log_once.cache_clear()

    @nnx.jit
    def step(layer, optimizer, x):
        optimizer.update(layer, nnx.grad(lambda layer: loss_of(*layer(x)))(layer))

    outside = moax.nnx.MoE(BARE, rngs=nnx.Rngs(0))
    with mesh_for(way):
        step(outside, nnx.Optimizer(outside, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param), X)
        (record,) = caplog.records
        assert "under `with jax.set_mesh(mesh):`" in record.getMessage()
        log_once.cache_clear()
        caplog.clear()
        inside = moax.nnx.MoE(BARE, rngs=nnx.Rngs(0))
        step(inside, nnx.Optimizer(inside, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param), X)
        assert not caplog.records


def test_missing_variables():
    """Breaks if a block of linen that is given no parameters, or no state, makes its own in silence."""
    block = LAYERS["linen"](FULL)
    for collection, missing in (("params", "router_bias"), ("moax_state", "router")):
        with pytest.raises(ValueError, match=f"params.{missing} is None"):
            block.module.apply({collection: block.variables[collection]}, jnp.asarray(X))


@pytest.mark.parametrize("dtype", (None, jnp.bfloat16))
@pytest.mark.parametrize("name", ("nnx.MoE", "nnx.Dense", "linen.MoEBlock", "linen.Dense"))
def test_lists_are_no_arrays(name, dtype):
    """Breaks if a layer that casts x reads the dtype of a list."""
    library, layer = name.split(".")
    arguments = (BARE,) if layer.startswith("MoE") else (32, 4)[library == "linen" :]
    x = [[1.0] * 32]
    if library == "nnx":
        call = getattr(moax.nnx, layer)(*arguments, dtype=dtype, rngs=nnx.Rngs(0))
    else:
        call = functools.partial(getattr(moax.linen, layer)(*arguments, dtype=dtype).init_with_output, KEY)
    with pytest.raises(ValueError, match="x is a list; it must be an array"):
        call(x)


@BOTH
def test_names_and_stats_of_another_kind(library):
    """Breaks if the names of a dense kernel, or counts alone, are an AttributeError about a part of moax."""
    with pytest.raises(ValueError, match="logical_axes is a tuple; it must be a moax.LogicalAxes"):
        LAYERS[library](BARE, logical_axes=("embed", "mlp"))
    layer = moax.nnx.MoE(FULL, rngs=nnx.Rngs(0))
    if library == "linen":
        block = MoEBlock(FULL)
        layer = block.bind(block.init(KEY, jnp.asarray(X)), mutable=["moax_state"])
    with pytest.raises(ValueError, match="stats is an ArrayImpl; it must be a moax.MoEStats"):
        layer.update_router_bias(jnp.zeros(8, jnp.int32))


def test_scan_that_leaves_out_the_state():
    """Breaks if a user who stacks `params` alone reads Flax's error, which does not say what to add to `nn.scan`."""

    def init(**axes):
        layers = linen.scan(MoEBlock, variable_axes=axes, split_rngs={"params": True}, length=2)(FULL)
        return jax.eval_shape(layers.init, KEY, jnp.asarray(X))

    with pytest.raises(ValueError, match="router_bias has no place.*variable_axes={'params': 0, 'moax_state': 0}"):
        init(params=0)
    assert init(params=0, moax_state=0)["moax_state"]["router_bias"].shape == (2, 8)


@pytest.mark.more
@pytest.mark.parametrize(
    ("library", "way"),
    [("nnx", "explicit"), ("linen", "custom_partitioning")],
)
def test_stacked_layers(library, way):
    """Breaks if layers made by `nnx.vmap` and run by `nnx.scan`, or scanned by `linen.scan`, are not layers one after
    the other with parameters of their own, if their metadata lacks the new dim, or their biases cannot be updated
    together."""
    layers = 3
    x = jnp.asarray(X)
    mesh = make_mesh("2x4", way)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def run(x, layer):
        y, stats = layer(x)
        return x + y, stats

    with mesh_for(way):
        specs = moax.param_specs(FULL)
        if library == "nnx":
            model = stack(FULL, layers)(nnx.Rngs(0))
            y, stats = nnx.jit(run)(x, model)
            grads = nnx.jit(nnx.grad(lambda m, x: run(x, m)[0].sum()))(model, x)
            arrays = {name: v.get_value() for name, v in nnx.state(model).items()}
            results = {name: getattr(model, name).get_metadata("out_sharding") for name in arrays}
            model.update_router_bias(stats, 0.1)
            updated = moax.update_router_bias(jnp.zeros((3, 8)), stats.tokens_per_expert, 0.1)
            np.testing.assert_array_equal(model.router_bias.get_value(), updated)
            assert grads["wi"].get_value().shape == model.wi.shape
        else:
            model = Stack(FULL, layers)
            variables = jax.jit(model.init)(KEY, x)
            y, stats = jax.jit(model.apply)(variables, x)
            grads = jax.jit(jax.grad(lambda v: model.apply(v, x)[0].sum()))(variables)
            assert jax.tree.map(jnp.shape, grads) == jax.tree.map(jnp.shape, variables)
            arrays, results = (
                {n: v for collection in tree.values() for n, v in collection["moe"].items()}
                for tree in (linen.unbox(variables), linen.get_partition_spec(variables))
            )
    want = x
    counts = []
    block = jax.jit(functools.partial(moax.moe, config=FULL))
    for i in range(layers):
        out, one = block(
            want,
            params_of({name: jnp.asarray(np.asarray(v)[i]) for name, v in arrays.items()}),
        )
        want = want + out
        counts = [*counts, one.tokens_per_expert]
    assert rel_error(y, want) < 5e-6 and not np.array_equal(arrays["wi"][0], arrays["wi"][1])
    np.testing.assert_array_equal(stats.tokens_per_expert, counts)
    for name, value in arrays.items():
        stacked = P(None, *getattr(specs, name))
        assert tuple(results[name]) == tuple(stacked), name
        assert value.sharding.is_equivalent_to(NamedSharding(mesh, stacked), value.ndim), name


@BOTH
@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(kernels="hopper"), moax.Unsupported, "kernels='hopper'"),
        (dict(exchange="nccl"), ValueError, "exchange='nccl'"),
        (dict(recipe="fp4"), ValueError, "recipe='fp4'"),
        (dict(engine="fast"), ValueError, "engine='fast'"),
    ],
)
def test_options_reach_the_block(library, options, error, message):
    """Breaks if an option is dropped on the way: the block is the one that refuses it."""
    with pytest.raises(error, match=message):
        layer = LAYERS[library](BARE, **options)
        layer(params_of(layer.arrays), jnp.asarray(X))


def in_a_layer(library):
    return lambda x, buffer_factor: LAYERS[library](BASE, buffer_factor=buffer_factor)(make_params(BASE), x)


def in_the_model(x, buffer_factor):
    sizes = dict(
        d_model=BASE.d_model,
        d_ff=BASE.d_ff,
        num_experts=BASE.num_experts,
        top_k=BASE.top_k,
    )
    run = TrainConfig(
        ModelConfig(**sizes, num_layers=1, num_heads=2, balance="none"),
        buffer_factor=buffer_factor,
    )
    return lm.forward(
        lm.init(jax.random.key(0), run.model),
        None,
        jnp.zeros((B, L), jnp.int32),
        run,
    )


def in_the_benchmark(x, buffer_factor):
    pytest.importorskip("moax.kernels.hopper")  # the benchmarks measure its kernels
    from benchmarks.block import block as block_bench
    from benchmarks.block import block_worker

    settings = block_bench.How(kernels="xla", buffer_factor=buffer_factor)
    options = block_worker.options_of(
        settings.request(
            block_bench.TINY[0],
            "none",
            Repeats(),
            (B * L,),
        )
    )
    return block_worker.layer(x, make_params(BASE), None, config=BASE, options=options)


@pytest.mark.parametrize(
    "way",
    (in_a_layer("nnx"), in_a_layer("linen"), in_the_model, in_the_benchmark),
)
def test_buffer_factor_reaches_the_block(way):
    """Breaks if a layer, the model or the benchmark takes `buffer_factor` and leaves it, so that the program of a small
    factor has no loop of passes, or the program of the worst case has one."""
    programs = {f: str(jax.make_jaxpr(lambda x, f=f: way(x, f))(make_x(BASE))) for f in (0.05, None)}
    assert "while[" in programs[0.05] and "while[" not in programs[None]
