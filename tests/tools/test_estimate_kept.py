"""moax.estimate with microbatches: the bytes of quantized weights, and the wire, of the three ways to hold weights.

Covers: weights that each call quantizes, `kept` and `gathered` ones x recipes x meshes, against the arrays of
`moax.quantize_params` and the collectives of compiled steps; text, and wrong arguments.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import moax
from moax import inspect
from moax.estimate import Once, estimate
from moax.params import operand_shapes
from moax.types import KEPT
from support import make_params, mark_rest, put, random

CONFIG = moax.MoEConfig(256, 384, 8, 2)
SHARED = dataclasses.replace(CONFIG, shared_d_ff=128)
TOKENS = 32  # of a GPU in a microbatch
MICROBATCHES = 3
FSDP = {"fsdp": 8}
EP = {"fsdp": 2, "ep": 4}
TP = {"fsdp": 2, "ep": 2, "tp": 2}
SIZES = [
    (EP, "mxfp8", "model"),
    (TP, "fp8_block", "auto"),
    (FSDP, None, "auto"),
    (FSDP, "fp8_block", "model"),
    (TP, None, "auto"),
    (TP, "mxfp8", "model"),
    (EP, "fp8_block", "auto"),
    (EP, "mxfp8", "auto"),
]
WIRES = [
    (SHARED, EP, "mxfp8", "gathered"),
    (CONFIG, EP, "mxfp8", "kept"),
    (CONFIG, EP, None, "kept"),
    (CONFIG, TP, None, "gathered"),
    (CONFIG, FSDP, "mxfp8", "gathered"),
    (SHARED, TP, "mxfp8", None),
]
# XLA may move what no microbatch changes out of the loop. The weight that forward reads first is such a value.
AS_WRITTEN = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}


@pytest.mark.parametrize(("sizes", "recipe", "fsdp_dim"), mark_rest(SIZES, 3))
def test_bytes_are_those_of_the_arrays(sizes, recipe, fsdp_dim):
    """Breaks if an array of quantized weights is forgotten, or counted whole where a device has a shard of it, or the
    reverse."""
    options = moax.Options(recipe=recipe, axes=moax.Axes(fsdp_dim=fsdp_dim), kernels="xla")
    mesh = moax.make_mesh(sizes)
    for preparation in KEPT:
        with jax.set_mesh(mesh):
            params = put(mesh, moax.param_specs(CONFIG, options.axes), make_params(CONFIG))
            quantized = moax.quantize_params(params, CONFIG, options, gather=preparation == "gathered")
        arrays = jax.tree.leaves(quantized)
        nbytes = sum(array.addressable_shards[0].data.nbytes for array in arrays)
        foretold = estimate(CONFIG, sizes, TOKENS, options, layers=5, kept=preparation)
        assert foretold.memory.quantized == 5 * nbytes > 0


def test_bytes_of_hopper():
    """Breaks if FP8 on Hopper counts other arrays than two of one byte an element, and their float32 scales."""
    elements = 48 * 128 * 3 * 2048 * 768
    scales = 4 * elements // 128**2
    sizes = {"fsdp": 4, "ep": 2}
    prepared, gathered = (
        estimate("qwen3-30b", sizes, TOKENS, recipe="fp8_block", kept=preparation).memory.quantized
        for preparation in KEPT
    )
    assert (prepared, gathered) == (2 * (elements + scales) // 8, 2 * (elements + scales) // 2)


def test_parameters_of_the_dtype_are_not_copied():
    """Breaks if weights that need no rounding count twice where no device gathers them."""
    options = dict(param_dtype="bfloat16", layers=1)
    plain, prepared, gathered = (
        estimate("qwen3-30b", FSDP, TOKENS, kept=preparation, **options) for preparation in (None, *KEPT)
    )
    assert prepared.memory == plain.memory and prepared.once == Once()
    assert gathered.memory.quantized == 2 * 128 * 3 * 2048 * 768


@pytest.mark.parametrize(("config", "sizes", "recipe", "preparation"), mark_rest(WIRES, 1))
def test_wire_is_that_of_the_program(config, sizes, recipe, preparation):
    """Breaks if weights that are gathered once count in each microbatch, or gradients and other weights count once."""
    options = moax.Options(recipe=recipe, kernels="xla", buffer_factor=4.0)
    mesh = moax.make_mesh(sizes)

    def step(params, parts):
        quantized = None
        if preparation is not None:
            quantized = moax.quantize_params(
                params, config, options, dtype=jnp.float32, gather=preparation == "gathered"
            )

        def loss(params, x):
            return jnp.sum(moax.moe(x, params, config, options, quantized=quantized)[0] ** 2)

        def add(total, x):
            gradients, dx = jax.grad(loss, (0, 1))(params, x)
            return jax.tree.map(jnp.add, total, gradients), dx

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)

    rows = 8 * TOKENS
    params, x = operand_shapes(config, rows, options.axes, mesh, jnp.float32, jnp.float32)
    layouts = jax.tree.map(lambda array: array.sharding, params)
    with jax.set_mesh(mesh):
        parts = put(mesh, P(None, *x.sharding.spec), random(2, MICROBATCHES, rows, config.d_model))
        program = (
            jax.jit(step, out_shardings=(layouts, parts.sharding))
            .lower(params, parts)
            .compile(compiler_options=AS_WRITTEN)
        )
    traffic = inspect.collectives(program, mesh=mesh)
    foretold = estimate(
        config,
        sizes,
        MICROBATCHES * TOKENS,
        options,
        dtype="float32",
        layers=2,
        microbatches=MICROBATCHES,
        kept=preparation,
    )
    gathers = inspect.total_bytes(inspect.weight_gathers(traffic))
    scatters = inspect.total_bytes(inspect.weight_scatters(traffic))
    assert foretold.wire_bytes("gather_weight") == 2 * gathers > 0
    assert foretold.wire_bytes("scatter_gradient") == 2 * scatters > 0


def test_the_three_ways():
    """Breaks if a microbatch costs another wire or memory than a step of its tokens, if kept weights change the wire,
    or if their quantization is counted in each microbatch."""
    options = dict(recipe="fp8_block", layers=2)
    one = estimate("qwen3-30b", FSDP, 4096, **options)
    each, prepared, gathered = (
        estimate("qwen3-30b", FSDP, 4 * 4096, microbatches=4, kept=preparation, **options)
        for preparation in (None, *KEPT)
    )
    assert each.seconds == pytest.approx(4 * one.seconds)
    assert each.memory == one.memory._replace(gradient_sum=one.memory.weights)
    assert one.memory.gradient_sum == one.memory.quantized == 0
    gathers = one.wire_bytes("gather_weight")
    assert [e.wire_bytes("gather_weight") for e in (each, prepared, gathered)] == [4 * gathers, 4 * gathers, gathers]
    assert {e.wire_bytes("scatter_gradient") for e in (each, prepared, gathered)} == {
        4 * one.wire_bytes("scatter_gradient")
    }
    # Each call reads float32 weights, or the bytes that one reading of them made.
    written = 2 * 128 * 3 * 2048 * 768 // 8
    assert each.traffic - prepared.traffic > 2 * 4 * written // 2
    assert prepared.once.traffic == pytest.approx(2 * 4 * written // 2 + written, rel=0.01)
    assert each.times["device memory"] > prepared.times["device memory"]
    assert prepared.times["gather_weight"] == pytest.approx(4 * gathered.times["gather_weight"])


def test_text():
    """Breaks if the text does not say how weights are held, or has rows of what a step does not have."""
    plain = str(estimate(CONFIG, FSDP, 64))
    assert "quantized" not in plain and "gradient_sum" not in plain and "microbatch" not in plain
    said = str(estimate(CONFIG, FSDP, 64, microbatches=2, kept="gathered"))
    assert "64 tokens a GPU in 2 microbatches, exchange" in said
    assert ", weights gathered for the step\n" in said
    assert "\nquantized " in said and "\ngradient_sum " in said


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"kept": "all"}, "kept='all' must be one of 'kept', 'gathered'"),
        ({"microbatches": 0}, "microbatches=0 must be"),
        ({"microbatches": 3}, "tokens=64 must be a multiple of microbatches=3, such as 66"),
    ],
)
def test_errors(kwargs, message):
    """Breaks if a wrong argument is not named in an error."""
    with pytest.raises(ValueError, match=message):
        estimate(CONFIG, FSDP, 64, **kwargs)
