"""The recipes of the block's benchmarks: those of moax, variants of them that benchmarks alone know, and kept weights.

fp8_block_pow2          `fp8_block` with scales that are rounded up to powers of two
fp8_block+kept          `fp8_block` with weights that are quantized once, before the calls that are measured
"""

from __future__ import annotations

import dataclasses

from moax.recipe import RECIPES, Format, Recipe

KEPT = "+kept"
PLAIN = ("none", "fp8_block")
ONE_DEVICE = (*PLAIN, f"fp8_block{KEPT}")


def with_scale(recipe: Recipe, scale) -> Recipe:
    """Returns the recipe with scales of this kind."""
    formats = {name: getattr(recipe, name) for name in ("x", "w", "dy", "wire")}
    changed = {name: dataclasses.replace(f, scale=scale) for name, f in formats.items() if isinstance(f, Format)}
    return dataclasses.replace(recipe, **changed)


VARIANTS = {"fp8_block_pow2": with_scale(RECIPES["fp8_block"], "pow2")}
ON_MESHES = ("none", *RECIPES)
NAMES = (*ON_MESHES, *VARIANTS, *(f"{name}{KEPT}" for name in ("fp8_block", *VARIANTS)))


def find(name: str) -> tuple[str | Recipe | None, bool]:
    """Returns (the recipe of a name, for `moax.moe`; whether the weights are quantized before the calls)."""
    plain = name.removesuffix(KEPT)
    return None if plain == "none" else VARIANTS.get(plain, plain), plain != name
