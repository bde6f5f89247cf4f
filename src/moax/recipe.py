"""A recipe has the formats in which x, w and dy enter a matmul."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

from moax.checks import check_fields, suggest_fields

Use = Literal["fprop", "dgrad", "wgrad"]  # the matmul that reads an operand


@suggest_fields
@dataclasses.dataclass(frozen=True)
class Format:
    """A format of one-byte values: x ~ data * scale, with one scale for each block.

    Attributes:
      dtype: `e4m3`, whose maximum is 448, or `e5m2`, whose maximum is 57344.
      block: the length of a block along the contracted dim, in elements.
      tile: the length of a block of a weight along the dim that is not contracted, in elements. With block 128, a tile
        of 128 gives square blocks, which have the same scales for fprop and dgrad.
      scale: `float32` is amax / max. `pow2` rounds it up to a power of two and stores a float32. `e8m0` rounds it up
        too and stores the exponent in one byte.

    Raises:
      ValueError: a field has a value that it cannot have. The message names the field.
    """

    dtype: Literal["e4m3", "e5m2"] = "e4m3"
    block: int = 128
    tile: int = 1
    scale: Literal["float32", "pow2", "e8m0"] = "float32"

    def __post_init__(self):
        check_fields(self, "Format: ")

    def row_block(self, ndim: int, use: Use) -> tuple[int, ...]:
        """Returns the block lengths of rows [M, ..., C] in a matmul.

        `fprop` and `dgrad` sum over columns, and `wgrad` over rows: blocks of 128 of rows [M, C] are (1, 128) for
        `fprop` and `dgrad`, and (128, 1) for `wgrad`.
        """
        ones = (1,) * (ndim - 1)
        if use == "wgrad":
            return (self.block, *ones)
        return (*ones, self.block)

    def weight_block(self, ndim: int, use: Use) -> tuple[int, ...]:
        """Returns the block lengths of weights [E, K, ..., N] in a matmul: `fprop` sums over K, `dgrad` over (..., N).

        With block 128 and tile 1, weights [E, K, N] have blocks (1, 128, 1) for `fprop`.
        """
        ones = (1,) * (ndim - 3)
        if use == "fprop":
            return (1, self.block, *ones, self.tile)
        return (1, self.tile, *ones, self.block)


@suggest_fields
@dataclasses.dataclass(frozen=True)
class Recipe:
    """The formats of the operands of matmuls. None leaves an operand in the compute dtype.

    Attributes:
      x: the format of activations, in forward and wgrad.
      w: the format of weights, in forward and dgrad. A weight is quantized on its shard and gathered as bytes.
      dy: the format of gradients of activations, in dgrad and wgrad.

    Raises:
      ValueError: a field is neither a Format nor None.
    """

    x: Format | None
    w: Format | None
    dy: Format | None

    def __post_init__(self):
        check_fields(self, "Recipe: ")

    @functools.cached_property
    def row_alignment(self) -> int:
        """The multiple at which each expert begins, so that no block of rows holds rows of two experts."""
        return max((format.block for format in (self.x, self.dy) if format is not None), default=1)


FULL = Recipe(None, None, None)
RECIPES: dict[str, Recipe] = {
    "fp8_block": Recipe(Format(block=128), Format(block=128, tile=128), Format(block=128)),
    "mxfp8": Recipe(*[Format(block=32, scale="e8m0")] * 3),
}


def get_recipe(recipe: str | Recipe | None) -> Recipe:
    """Returns the recipe of a name. A `Recipe` is returned as it is, and None gives the recipe that quantizes nothing.

    Raises:
      ValueError: no recipe has this name.
    """
    if isinstance(recipe, Recipe | None):
        return recipe or FULL
    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r} must be None, a Recipe, or one of {', '.join(map(repr, RECIPES))}")
    return RECIPES[recipe]


def describe_recipe(recipe: Recipe) -> str:
    """Returns the name of a recipe in quotes, or None; a recipe of the caller's own is "(a Recipe)"."""
    if recipe == FULL:
        return "None"
    names = {own: name for name, own in RECIPES.items()}
    return repr(names[recipe]) if recipe in names else "(a Recipe)"
