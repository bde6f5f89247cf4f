"""`Options`: how a block runs, as one value; what it computes is `MoEConfig`."""

from __future__ import annotations

import dataclasses
from typing import TypedDict

from moax.mesh.axes import Axes
from moax.mesh.partition import ENGINES, Engine
from moax.recipe import Recipe, get_recipe


@dataclasses.dataclass(frozen=True)
class Options:
    """How a block runs. `moax.moe` takes an `Options`, or its fields as keywords.

    Attributes:
      recipe: `fp8_block`, `mxfp8`, `fp8_tensor`, a `Recipe`, or None to quantize nothing.
      axes: the roles of mesh axes.
      exchange: `all_gather`, `all_to_all` or `one_sided` (Hopper GPUs of one process); `auto` is all_gather. Nothing
        moves where ep has size 1.
      kernels: `hopper` (Hopper GPUs, bfloat16, widths that are multiples of 32), `xla`, or `auto`: hopper where it can
        run, else xla, which is logged once on a GPU.
      engine: how the block is put on a mesh of Auto axes: `custom_partitioning` (the default), or `shard_map`, whose
        compilation-cache key is the same in every process. Explicit axes always take `shard_map`.
      chunks: parts in which a device takes its tokens, one after the other; memory is then that of one part. Backward
        computes each part again. Weights are gathered once for all parts, wi twice in backward. `capacity_factor` holds
        in each part, and a scale of a whole tensor is that of a part.

    Raises:
      ValueError: a field whose value cannot be, naming the field.
    """

    recipe: str | Recipe | None = None
    axes: Axes = Axes()
    exchange: str = "auto"
    kernels: str = "auto"
    engine: Engine = "auto"
    chunks: int = 1

    def __post_init__(self):
        get_recipe(self.recipe)
        if not isinstance(self.axes, Axes):
            raise ValueError(f"axes={self.axes!r} must be a moax.Axes")
        if self.engine not in ENGINES:
            raise ValueError(f"engine={self.engine!r} must be one of {', '.join(map(repr, ENGINES))}")
        if not isinstance(self.chunks, int) or isinstance(self.chunks, bool) or self.chunks < 1:
            raise ValueError(f"chunks={self.chunks!r} must be an int of at least 1")


class OptionKeywords(TypedDict, total=False):
    """The fields of `Options` as keywords of a function."""

    recipe: str | Recipe | None
    axes: Axes
    exchange: str
    kernels: str
    engine: Engine
    chunks: int
