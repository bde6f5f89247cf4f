"""Recipes: in which format x, w and dy enter a product."""

from __future__ import annotations

import dataclasses
from typing import Literal

Contracted = Literal["rows", "columns"]
E4M3_MAX, E5M2_MAX = 448.0, 57344.0


@dataclasses.dataclass(frozen=True)
class Format:
    """One-byte values `data` with `data * scale ~ x`, a scale a block.

    Attributes:
      dtype: `e4m3` (max 448) or `e5m2` (max 57344).
      block: length of a block along the contracted dim; None: one block holds the whole tensor (of weights: of each
        expert).
      tile: length of a block of a weight along its other matrix dim: 1, or 128 for blocks that read the same by rows
        and by columns.
      scale: `float32` (amax / max), `pow2` (that, rounded up to a power of two, as float32), `e8m0` (the same in one
        byte).
    """

    dtype: Literal["e4m3", "e5m2"] = "e4m3"
    block: int | None = 128
    tile: int = 1
    scale: Literal["float32", "pow2", "e8m0"] = "float32"

    def __post_init__(self):
        if self.dtype not in ("e4m3", "e5m2"):
            raise ValueError(f"Format: dtype={self.dtype!r} must be 'e4m3' or 'e5m2'")
        if self.scale not in ("float32", "pow2", "e8m0"):
            raise ValueError(f"Format: scale={self.scale!r} must be 'float32', 'pow2' or 'e8m0'")
        if self.block is not None and (not isinstance(self.block, int) or self.block < 1):
            raise ValueError(f"Format: block={self.block!r} must be a positive int, or None for one block a tensor")
        if not isinstance(self.tile, int) or self.tile < 1:
            raise ValueError(f"Format: tile={self.tile!r} must be a positive int")

    @property
    def max(self) -> float:
        """The largest finite value of `dtype`."""
        return E4M3_MAX if self.dtype == "e4m3" else E5M2_MAX

    def row_block(self, ndim: int, contracted: Contracted) -> tuple[int | None, ...]:
        """Block shape of rows [M, ..., C] that enter a product over `columns` (forward, dgrad) or `rows` (wgrad)."""
        if self.block is None:
            return (None,) * ndim
        ones = (1,) * (ndim - 1)
        return ones + (self.block,) if contracted == "columns" else (self.block,) + ones

    def weight_block(self, ndim: int, contracted: Contracted) -> tuple[int | None, ...]:
        """Block shape of weights [E, K, ..., N] that enter a product over K (`rows`) or over the dims after it."""
        if self.block is None:
            return (1,) + (None,) * (ndim - 1)
        first, last = (self.block, self.tile) if contracted == "rows" else (self.tile, self.block)
        return (1, first) + (1,) * (ndim - 3) + (last,)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The formats of one block's products; None leaves an operand in the compute dtype.

    Attributes:
      x: activations (forward and wgrad).
      w: weights (forward and dgrad); quantized on their shard, gathered as bytes.
      dy: gradients of activations (dgrad and wgrad).
      wire: tokens and their gradients on their way to the ranks of their experts; must block along columns.
    """

    x: Format | None
    w: Format | None
    dy: Format | None
    wire: Format | None = None

    def __post_init__(self):
        for name in ("x", "w", "dy", "wire"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, Format):
                raise ValueError(f"Recipe: {name}={value!r} must be a Format or None")
        if self.wire is not None and self.wire.block is None:
            raise ValueError("Recipe: wire must have a block: a scale for the whole tensor would tie tokens together")

    @property
    def row_alignment(self) -> int:
        """Rows to which an expert's first row is aligned, so that no block of rows holds two experts."""
        return max((f.block for f in (self.x, self.dy) if f is not None and f.block is not None), default=1)


FULL = Recipe(None, None, None)
RECIPES: dict[str, Recipe] = {
    "fp8_block": Recipe(Format(block=128), Format(block=128, tile=128), Format(block=128)),
    "mxfp8": Recipe(*[Format(block=32, scale="e8m0")] * 3),
    "fp8_tensor": Recipe(Format(block=None), Format(block=None), Format(dtype="e5m2", block=None)),
}


def get_recipe(recipe: str | Recipe | None) -> Recipe:
    """The recipe of a name; a `Recipe` as it is; None quantizes nothing."""
    if recipe is None:
        return FULL
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str) or recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r} must be None, a Recipe, or one of {', '.join(map(repr, RECIPES))}")
    return RECIPES[recipe]
