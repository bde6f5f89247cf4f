"""Recipes: the formats behind the names, the shapes of their blocks, and what is refused.

Covers: each recipe, the shape of its blocks for rows and for weights, and every error of Format and Recipe.
"""

import dataclasses

import jax.numpy as jnp
import pytest

import moax
from moax import Format, Recipe
from moax.kernels.xla.operands import quantize
from moax.recipe import FULL, RECIPES, get_recipe

BLOCK = Format(block=128)
MX = Format(block=32, scale="e8m0")


@pytest.mark.parametrize(
    "name, x, w, dy, alignment",
    [
        ("fp8_block", BLOCK, Format(block=128, tile=128), BLOCK, 128),
        ("mxfp8", MX, MX, MX, 32),
        (None, None, None, None, 1),
    ],
)
def test_names(name, x, w, dy, alignment):
    """Breaks if a recipe is not what DESIGN.md section 5 says, or lets a block of rows hold two experts."""
    recipe = get_recipe(name)
    assert recipe == Recipe(x, w, dy)
    assert recipe.row_alignment == alignment


def test_a_recipe_is_taken_as_it_is():
    """Breaks if a user's own recipe is replaced, or if None quantizes."""
    mine = Recipe(None, BLOCK, None)
    assert get_recipe(mine) is mine and mine.row_alignment == 1
    assert get_recipe(None) is FULL


@pytest.mark.parametrize("recipe", ["fp8", "", 8, [], Format(), "wi=fp8_block", ("fp8_block", None)], ids=repr)
def test_unknown_recipes(recipe):
    """Breaks if a misspelt recipe trains unquantized, or if the message does not list the names."""
    with pytest.raises(
        ValueError,
        match="recipe=.* must be None, a Recipe, or one of 'fp8_block', 'mxfp8'$",
    ):
        moax.Options(recipe=recipe)


@pytest.mark.parametrize(
    "field, value, remedy",
    [
        ("dtype", "e4m3fn", "one of 'e4m3', 'e5m2'"),
        ("scale", "bf16", "one of 'float32', 'pow2', 'e8m0'"),
        ("block", 0, "an int of at least 1"),
        ("block", None, "an int of at least 1"),
        ("block", 1.5, "an int of at least 1"),
        ("tile", 0, "an int of at least 1"),
        ("tile", None, "an int of at least 1"),
    ],
)
def test_formats_that_cannot_be(field, value, remedy):
    """Breaks if a format fails only inside a jitted quantize."""
    with pytest.raises(ValueError, match=f"Format: {field}={value!r} must be {remedy}"):
        Format(**{field: value})


@pytest.mark.parametrize("field", ["x", "w", "dy"])
def test_recipes_hold_formats(field):
    """Breaks if a format given by name is found out when it is first used."""
    with pytest.raises(ValueError, match=f"Recipe: {field} is a str; it must be a moax.Format"):
        Recipe(**{**dict(x=None, w=None, dy=None), field: "e4m3"})


@pytest.mark.parametrize("dtype", ["e4m3", "e5m2"])
def test_the_largest_value(dtype):
    """Breaks if scales map amax to anything but the largest finite value of the type."""
    largest = jnp.finfo({"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}[dtype]).max
    q = quantize(jnp.asarray([1.0, -3.0]), Format(dtype=dtype), (128,))
    assert float(q.scale[0]) == jnp.float32(3.0) * jnp.float32(1 / float(largest))


@pytest.mark.parametrize(
    "format, rows_of, columns_of",
    [
        (BLOCK, (128, 1, 1), (1, 1, 128)),
        (MX, (32, 1, 1), (1, 1, 32)),
    ],
)
def test_blocks_of_rows(format, rows_of, columns_of):
    """Breaks if a block of rows [M, G, F] does not run along the dim that the product contracts."""
    assert format.row_block(3, "wgrad") == rows_of
    assert format.row_block(3, "fprop") == columns_of
    assert format.row_block(2, "dgrad") == (columns_of[0], columns_of[2])


@pytest.mark.parametrize(
    "name, forward, dgrad",
    [
        ("fp8_block", (1, 128, 1, 128), (1, 128, 1, 128)),
        ("mxfp8", (1, 32, 1, 1), (1, 1, 1, 32)),
    ],
)
def test_blocks_of_weights(name, forward, dgrad):
    """Breaks if a weight [E, H, G, F] shares a scale between experts or gates, or if 128 x 128 blocks read otherwise by
    columns than by rows."""
    w = RECIPES[name].w
    assert w.weight_block(4, "fprop") == forward
    assert w.weight_block(4, "dgrad") == dgrad
    assert w.weight_block(3, "fprop") == (forward[0], forward[1], forward[3])


def test_frozen_and_hashable():
    """Breaks if a recipe cannot be a static argument of jit."""
    assert hash(Recipe(*[Format()] * 3)) == hash(Recipe(*[Format()] * 3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        BLOCK.block = 1
