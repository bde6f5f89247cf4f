"""Gathered weights: `quantize_params(gather=True)` gathers wi and wo once, and no call of the block gathers them again.

Covers: kinds of meshes x recipes x layouts, forward and backward, bit by bit as with weights that each call gathers;
where the gathers of a step of microbatches are; overflow rounds; shards of the caller's `shard_map`; wrong arguments.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import moax
from moax import Axes, inspect
from moax.mesh.specs import find_mesh_view
from moax.ops.weights import USES, GatherSpec, WeightSpec, gather_quantized, gather_weight, quantize_weight
from moax.recipe import get_recipe
from support import TOKENS, make_mesh, make_params, mark_rest, put, random, spec

CONFIG = moax.MoEConfig(256, 384, 8, 2, use_bias=True)
WITHOUT_BIAS = dataclasses.replace(CONFIG, use_bias=False)
PARAMS = make_params(CONFIG)
X = random(1, 64, 256)
MICROBATCHES = 3
# The mesh, the way, the recipe, the layout of the weights, and the factor of the buffers.
CASES = [
    ("tp2x2x2", "explicit", "fp8_block", "model", 1.25),
    ("dp2x2x2", "custom_partitioning", None, "model", 1.25),
    ("tp2x2x2", "custom_partitioning", "mxfp8", "experts", 1.25),
    ("8x1", "shard_map", "mxfp8", "model", 1.25),
    ("8x1", "explicit", "fp8_block", "experts", 1.25),
    ("tp2x2x2", "custom_partitioning", "fp8_block", "model", 0.1),
    ("2x4", "explicit", None, "experts", 1.25),
    ("2x4", "custom_partitioning", "fp8_block", "experts", 0.1),
    ("none", "none", "fp8_block", "auto", 1.25),
]


# The recipe, the layout of the weight, and its K: kernels need no GPU to quantize shards of these.
HOPPER = [("fp8_block", "model", 320), ("fp8_block", "experts", 100), ("mxfp8", "experts", 100)]


def run(x, params, quantized=None, **options):
    """y, the gradients of x and of the parameters, and the rounds, of a block that backward runs again."""

    @jax.checkpoint
    def block(x, params):
        y, stats = moax.moe(x, params, CONFIG, quantized=quantized, **options)
        return y, stats.rounds

    def loss(x, params):
        y, rounds = block(x, params)
        return jnp.sum(y**2), (y, rounds)

    (dx, dparams), (y, rounds) = jax.grad(loss, (0, 1), has_aux=True)(x, params)
    return y, dx, dparams, rounds


def place(mesh, axes: Axes, config=CONFIG):
    """The parameters and x on a mesh; a mesh of None has one device."""
    if mesh is None:
        return make_params(config), X
    return put(mesh, (moax.param_specs(config, axes), moax.params.token_spec(axes)), (make_params(config), X))


def find_gathers(program) -> list:
    """The gathers of the weights' values, which a step in microbatches has in its loop or before it."""
    gathers = inspect.weight_gathers(inspect.collectives(program))
    return [c for c in gathers if np.prod(c.shape) >= CONFIG.d_model * CONFIG.d_ff]


@pytest.mark.parametrize(("mesh", "way", "recipe", "dim", "buffer_factor"), mark_rest(CASES, 1))
def test_bits_are_those_of_calls_that_gather(mesh, way, recipe, dim, buffer_factor):
    """Breaks if a device multiplies by another shard's bytes or scales, also in overflow rounds, or if a gradient does
    not lie as its parameter."""
    axes = Axes(fsdp_dim=dim)
    options = dict(recipe=recipe, axes=axes, engine=way if way == "shard_map" else "auto")
    on = None if mesh == "none" else make_mesh(mesh, way)
    with jax.set_mesh(on or jax.make_mesh((1,), ("fsdp",))):
        params, x = place(on, axes)
        quantize = functools.partial(moax.quantize_params, params, CONFIG, dtype=jnp.float32, **options)
        gathered = quantize(gather=True)
        step = jax.jit(functools.partial(run, buffer_factor=buffer_factor, **options))
        want = step(x, params, quantize())
        got = step(x, params, gathered)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert (int(got[3]) > 1) == (buffer_factor < 1)
    for name in ("wi", "wo"):
        w = getattr(params, name)
        data = jax.tree.leaves(getattr(gathered, name)[-1])[0]
        assert data.shape == w.shape
        assert getattr(got[2], name).sharding.is_equivalent_to(w.sharding, w.ndim)
        if on is not None:
            split_axes = {"ep", "tp"}.intersection(on.axis_names)
            assert data.addressable_shards[0].data.size == w.size // np.prod([on.shape[name] for name in split_axes])


@pytest.mark.parametrize(
    ("way", "recipe", "uses"),
    mark_rest([("custom_partitioning", "mxfp8", 2), ("explicit", "fp8_block", 1), ("custom_partitioning", None, 1)], 1),
)
def test_each_weight_is_gathered_once_a_step(way, recipe, uses):
    """Breaks if a microbatch gathers a weight, if XLA moves a gather into the loop, if a gradient is not scattered in
    each microbatch, or if the assertion passes the gather of a weight that no recipe quantizes."""
    mesh = make_mesh("2x4", way)
    options = dict(recipe=recipe, buffer_factor=4.0)

    def step(params, parts, *, gather):
        quantized = moax.quantize_params(params, CONFIG, dtype=jnp.float32, gather=gather, **options)

        def add(total, x):
            return jax.tree.map(jnp.add, total, run(x, params, quantized, **options)[2]), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)[0]

    with jax.set_mesh(mesh):
        params, _ = place(mesh, Axes())
        parts = put(mesh, P(None, *moax.params.token_spec(Axes())), random(2, MICROBATCHES, 64, 256))
        programs = [
            jax.jit(functools.partial(step, gather=gather)).lower(params, parts).compile() for gather in (False, True)
        ]
        each, once = map(find_gathers, programs)
        sharded, gathered = (program(params, parts) for program in programs)
    # XLA may move the gather of wi for forward, which waits for nothing, out of the loop by itself.
    assert sum(c.times == MICROBATCHES for c in each) >= 3
    # The kernels of XLA have equal bytes for both uses where blocks are square, and XLA gathers them once.
    assert [c.times for c in once] == [1] * 2 * uses
    weights = (params.wi, params.wo)
    if recipe is None:
        with pytest.raises(AssertionError, match="^2 collectives of unquantized weights"):
            inspect.assert_no_wide_weight_gather(programs[1], weights=weights)
    else:
        inspect.assert_no_wide_weight_gather(programs[1], weights=weights)
    scatters = [inspect.weight_scatters(inspect.collectives(program)) for program in programs]
    assert sorted((c.shape, c.times) for c in scatters[0]) == sorted((c.shape, c.times) for c in scatters[1])
    assert {c.times for c in scatters[1]} == {MICROBATCHES}
    jax.tree.map(np.testing.assert_array_equal, gathered, sharded)


@pytest.mark.parametrize("absent", mark_rest([(True,), (False,)], 1))
def test_in_a_shard_map_of_the_caller(absent):
    """Breaks if a whole weight does not fit the shard of its parameter, or types lose the axes that operands vary over:
    `check_vma` then refuses the gradient."""
    mesh = make_mesh("tp2x2x2")
    layout = spec("tp2x2x2", TOKENS)

    def gradient(x, params, *, gather):
        quantized = moax.quantize_params(params, WITHOUT_BIAS, recipe="fp8_block", dtype=jnp.float32, gather=gather)

        def loss(x, params):
            if absent:
                params = dataclasses.replace(params, wi=None, wo=None)
            y, _ = moax.moe(x, params, WITHOUT_BIAS, quantized=quantized, recipe="fp8_block")
            return jnp.sum(y**2)

        return jax.grad(loss, (0, 1))(x, params)

    with jax.set_mesh(mesh):
        params, x = place(mesh, Axes(), WITHOUT_BIAS)
        specs = moax.param_specs(WITHOUT_BIAS)
        sharded, gathered = (
            jax.jit(
                jax.shard_map(
                    functools.partial(gradient, gather=gather), in_specs=(layout, specs), out_specs=(layout, specs)
                )
            )(x, params)
            for gather in (False, True)
        )
    jax.tree.map(np.testing.assert_array_equal, gathered, sharded)


@pytest.mark.more
def test_in_a_shard_map_over_another_axis():
    """Breaks if the type of a gathered weight varies over fsdp, which the op's result has no dim for."""
    mesh = jax.make_mesh((2, 2, 2), ("stage", "fsdp", "ep"), (AxisType.Auto,) * 3)

    def gradient(params, x, *, gather):
        quantized = moax.quantize_params(params, CONFIG, recipe="fp8_block", dtype=jnp.float32, gather=gather)
        return jax.tree.map(lambda v: v[None], run(x[0], params, quantized, recipe="fp8_block"))

    with jax.set_mesh(mesh):
        params = put(mesh, moax.param_specs(CONFIG, Axes(other="stage")), PARAMS)
        x = jax.device_put(random(1, 2, 64, 256), NamedSharding(mesh, P("stage", ("fsdp", "ep"))))
        sharded, gathered = (
            jax.jit(
                jax.shard_map(
                    functools.partial(gradient, gather=gather),
                    in_specs=(P(), P("stage")),
                    out_specs=P("stage"),
                    axis_names={"stage"},
                )
            )(params, x)
            for gather in (False, True)
        )
    jax.tree.map(np.testing.assert_array_equal, gathered, sharded)


@pytest.mark.parametrize(("recipe", "fsdp_dim", "rows"), mark_rest(HOPPER, 1))
def test_operands_of_hopper(recipe, fsdp_dim, rows):
    """Breaks if bytes or scales that lie along K, as Hopper's matmuls read them, are gathered over another dim."""
    mesh = make_mesh("tp2x2x2")
    axes = Axes(fsdp_dim=fsdp_dim).resolve(mesh)
    experts = axes.ep + axes.fsdp if fsdp_dim == "experts" else axes.ep
    model = () if fsdp_dim == "experts" else axes.fsdp
    declared = P(experts, model, None, axes.tp)
    split = (axes.ep, (), (), axes.tp)
    weight = WeightSpec("w", declared, axes, get_recipe(recipe), "hopper", np.dtype(jnp.bfloat16), split)
    w = jax.device_put(random(3, 8, rows, 2, 40), NamedSharding(mesh, declared))

    @jax.jit
    def make_operands(w):
        view = find_mesh_view(Axes(fsdp_dim=fsdp_dim), "auto", w)
        quantized = quantize_weight(view, weight, w)
        gathered = gather_quantized(view, weight, quantized)
        whole = dataclasses.replace(weight, gathered=True)
        of_shards = [gather_weight(view, GatherSpec(weight, use), w, quantized).operand for use in USES]
        of_whole = [gather_weight(view, GatherSpec(whole, use), w, gathered).operand for use in USES]
        return jax.tree.map(lambda v: v.astype(jnp.float32), (of_shards, of_whole))

    with jax.set_mesh(mesh):
        want, got = make_operands(w)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert want[0].data.size == 8 * w.size // 4  # ep and tp split the operand of each of 8 devices


def test_wrong_arguments():
    """Breaks if another value than a flag is taken for one."""
    with pytest.raises(ValueError, match="gather='fsdp' must be True or False"):
        moax.quantize_params(PARAMS, CONFIG, gather="fsdp")


def test_a_shard_of_a_gathered_weight():
    """Breaks if fsdp may split a gathered weight again in the caller's `shard_map`: devices would multiply by parts."""
    mesh = make_mesh("2x4")
    layout = spec("2x4", TOKENS)

    def run_block(x, params, quantized):
        return moax.moe(x, params, WITHOUT_BIAS, quantized=quantized, recipe="fp8_block")[0]

    with jax.set_mesh(mesh):
        params, x = place(mesh, Axes(), WITHOUT_BIAS)
        quantized = moax.quantize_params(params, WITHOUT_BIAS, recipe="fp8_block", dtype=jnp.float32, gather=True)
        specs = (layout, moax.param_specs(WITHOUT_BIAS), P(("ep", "fsdp")))
        sharded = jax.shard_map(run_block, in_specs=specs, out_specs=layout)
        message = r"quantized.wi is of a weight \(1, .*, and params.wi, gathered over \('fsdp',\), has shape \(2, "
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(sharded, x, params, quantized)
