"""`Options` says how a block runs; `MoEConfig` says what the block computes."""

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
      axes: the role of each mesh axis; see `moax.Axes`.
      exchange: the transport of tokens: `all_gather`, `all_to_all`, `one_sided` (Hopper GPUs of one process), or
        `auto`, which is all_gather. No token travels where ep has size 1.
      kernels: the implementation: `hopper` (Hopper GPUs, bfloat16, widths that are multiples of 32), `xla`, or `auto`.
        `auto` takes hopper where it can run, and xla elsewhere. On a GPU, the log says once why hopper cannot run.
        `blackwell` runs JAX's own kernel for forward and dgrad on GPUs of compute capability 10.0; no card has run it.
      engine: the way from global arrays to shards on a mesh of Auto axes: `custom_partitioning`, which is `auto`, or
        `shard_map`, whose key in the compilation cache is the same in every process. Explicit axes always use
        `shard_map`.
      chunks: the number of parts in which a device takes its tokens, one part after the other. The memory of
        activations is then that of one part, and backward computes each part again. Weights are gathered once for all
        parts, but wi twice in backward. `capacity_factor` limits each part, and a scale of a whole tensor is that of
        one part.

    Raises:
      ValueError: a field has a value that it cannot have. The message names the field.
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
