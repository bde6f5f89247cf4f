"""A recipe for wi and another for wo: the block against products of operands that are rounded each by its own recipe.

Covers: pairs of recipes x meshes, with kept weights, in passes, through the layers, the command line and the estimate.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moax
from moax import Recipes, estimate, inspect
from moax.recipe import FULL, RECIPES, Format, Recipe, get_recipes
from support import make_mesh, some
from support.block import QUANTIZED, block, check, expected, make_params, make_x

CONFIG = moax.MoEConfig(d_model=160, d_ff=192, num_experts=4, top_k=2, use_bias=True, shared_d_ff=64)
HALF = Recipes(wi="fp8_block")
PAIRS = {
    "wi": HALF,
    "wo": Recipes(wo="fp8_block"),
    "two": Recipes("mxfp8", "fp8_block"),
    "tensor": Recipes("fp8_block", "fp8_tensor"),
}


@pytest.mark.parametrize(("pair", "way", "mesh"), some([("two", "none", ""), ("wi", "custom_partitioning", "2x4"),
    ("wo", "explicit", "tp2x2x2"), ("tensor", "custom_partitioning", "dp2x2x2"), ("wi", "none", "")], 1))  # fmt: skip
def test_each_product_has_its_own_recipe(pair, way, mesh):
    """Breaks if an operand of one product is quantized by the recipe of the other one."""
    check(block(way, mesh, CONFIG, recipe=PAIRS[pair])(), expected(CONFIG, PAIRS[pair], mesh), QUANTIZED)


@functools.cache
def run(recipe, kept=False, **options):
    """y and the gradient of the parameters, on one device."""
    params, x = make_params(CONFIG), make_x(CONFIG)
    quantized = moax.quantize_params(params, CONFIG, recipe=recipe, dtype=x.dtype) if kept else None

    def loss(params):
        y, _ = moax.moe(x, params, CONFIG, recipe=recipe, quantized=quantized, **options)
        return jnp.sum(y**2), y

    return jax.jit(jax.grad(loss, has_aux=True))(params)


def test_kept_weights():
    """Breaks if a weight that its recipe does not quantize is kept, or another recipe's weights are taken."""
    kept = moax.quantize_params(make_params(CONFIG), CONFIG, recipe=HALF, dtype=jnp.float32)
    assert kept.wo is None and kept.wi is not None and kept.recipe == HALF
    with pytest.raises(ValueError, match="quantized has recipe="):
        moax.moe(make_x(CONFIG), make_params(CONFIG), CONFIG, recipe="fp8_block", quantized=kept)
    with pytest.raises(ValueError, match="quantizes no weight"):
        moax.quantize_params(make_params(CONFIG), CONFIG, recipe=Recipes())


@pytest.mark.more
def test_kept_weights_have_the_bits_of_the_block():
    """Breaks if the block takes a weight that is not kept by the recipe of the one that is."""
    jax.tree.map(np.testing.assert_array_equal, run(HALF, kept=True), run(HALF))


@pytest.mark.more
def test_in_passes():
    """Breaks if a pass of the loop computes the input of the activation by the recipe of wo."""
    (y, stats), _ = block("custom_partitioning", "2x4", CONFIG, recipe=HALF, buffer_factor=0.1, exchange="all_to_all")()
    want = expected(CONFIG, HALF, "2x4")
    assert int(stats.rounds) > 2
    np.testing.assert_allclose(y.reshape(want.y.shape), want.y, atol=QUANTIZED * float(np.abs(want.y).max()))


def test_one_recipe_stands_for_both():
    """Breaks if a block of one recipe is another program than the block that names it twice."""
    assert get_recipes("fp8_block") == Recipes("fp8_block", "fp8_block") == Recipes(RECIPES["fp8_block"], "fp8_block")
    assert get_recipes(None) == Recipes() == Recipes(FULL, FULL)
    assert get_recipes("wo=none,wi=fp8_block") == get_recipes("wi=fp8_block") == HALF
    assert get_recipes(HALF) is HALF and hash(HALF) == hash(Recipes("fp8_block", None))


def test_what_crosses(fresh_compile):
    """Breaks if the weight without a recipe travels as bytes, if the other one does not, or if the estimate of the
    bytes does not know which is which."""
    config = moax.MoEConfig(256, 384, 8, 2)
    mesh = make_mesh("2x4")
    found = inspect.weight_gathers(inspect.inspect_block(config, tokens=64, recipe=HALF, mesh=mesh, backward=False))
    assert {(c.dtype, c.size) for c in found if c.size > 10_000} == {
        ("uint8", 2 * 256 * 768),
        ("bfloat16", 2 * 384 * 256),
    }
    made = estimate.estimate(config, {"fsdp": 2, "ep": 4}, 8, recipe=HALF, kernels="xla")
    assert made.wire_bytes("gather_weight") == 2 * inspect.total_bytes(found)  # backward gathers again
    both = (None, Recipes(wo="fp8_block"), "fp8_block")
    slow, half, fast = (estimate.estimate(config, {"fsdp": 8}, 512, recipe=r).times["products"] for r in both)
    assert fast < half < slow


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("wi=fp4", "recipe='fp4' must be None"),
        ("w1=fp8_block", "must name wi and wo once each"),
        ("wi=fp8_block,wi=none", "must name wi and wo once each"),
        (("fp8_block", None), "must be None, a Recipe, or one of"),
    ],
)
def test_wrong_recipes(recipe, message):
    """Breaks if a misspelt projection trains unquantized."""
    with pytest.raises(ValueError, match=message):
        moax.Options(recipe=recipe)


def test_one_wire():
    """Breaks if a format of tokens that the block does not use is taken without a word."""
    wired = Recipe(None, None, None, wire=Format(block=32))
    assert Recipes(wired, "fp8_block").wire == wired.wire == Recipes(wired, wired).wire
    with pytest.raises(ValueError, match="tokens travel by the wire of wi"):
        Recipes("fp8_block", wired)
