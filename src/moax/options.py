"""`Options` says how a block runs; `MoEConfig` says what the block computes."""

from __future__ import annotations

import dataclasses
import difflib
import math
from typing import TypedDict

from jax.typing import DTypeLike

from moax.checks import check_choice, check_count, check_flag, is_number
from moax.config import as_python
from moax.mesh.axes import Axes
from moax.mesh.collectives import get_grad_reduce
from moax.mesh.specs import ENGINES, Engine
from moax.recipe import Recipe, Recipes, get_recipes


@dataclasses.dataclass(frozen=True)
class Options:
    """How a block runs. `moax.moe` takes an `Options`, or its fields as keywords.

    Attributes:
      recipe: `fp8_block`, `mxfp8`, `fp8_tensor`, a `Recipe`, or None to quantize nothing; or a `Recipes`, which has one
        of these for wi and one for wo.
      axes: the role of each mesh axis; see `moax.Axes`.
      exchange: the transport of tokens: `all_gather`, `all_to_all`, `one_sided` (Hopper GPUs of one process), or
        `auto`: all_gather or all_to_all, whichever sends fewer bytes in a balanced step on the mesh at hand. With a
        capacity factor `auto` is all_gather, which drops nothing on the way. No token travels where ep has size 1.
      kernels: the implementation: `hopper` (Hopper GPUs, bfloat16, widths that are multiples of 32), `xla`, or `auto`.
        `auto` takes hopper where it can run, and xla elsewhere. On a GPU, the log says once why hopper cannot run.
      engine: the way from global arrays to shards on a mesh of Auto axes. `custom_partitioning`, which is `auto`, takes
        weights in the layout that they have. `shard_map` takes them in the layout of `param_specs`, and is for
        `jax.export`. Explicit axes always use `shard_map`.
      buffer_factor: the size of every buffer whose load depends on the routing, as a multiple of the balanced load. A
        step whose routing needs more runs further overflow rounds in the same buffers: no token is dropped, and
        `stats.rounds` counts the rounds. Below 1, every step takes several rounds, in less memory. Buffers never exceed
        the worst case, and None allocates it. With `fp8_tensor` each round computes its own scale. `capacity_factor`
        bounds the rows that the exchange moves already, in one round.
      save_rows: whether forward keeps the sorted rows for backward. Otherwise backward gathers them again, and where ep
        has more than one rank receives them again: less memory, and a few percent more time. Where products gather
        rows of x themselves, and no rows travel, forward keeps none in any case.
      grad_reduce_dtype: how the gradients of weights are summed over fsdp and dp, before they are cast to the dtype of
        their parameters. None sums them in the dtype of x. `float32` and `bfloat16` compute, send and sum them in this
        dtype. `bfloat16_sum_float32` sends each term in bfloat16 by an all-to-all over fsdp, so that it is rounded
        once, and sums in float32; over dp it is `float32`. Where the caller's own `shard_map` sums over dp, that sum
        has the dtype of the parameter.
      chunks: the number of parts of a device's tokens. Each part has its own dispatch, products and combine, which no
        data joins, so that XLA may run the dispatch and the combine of one part beside the products of another. Weights
        are quantized and gathered, and their gradients scattered, once for all parts. Each part has its own buffers,
        overflow rounds and scales of `fp8_tensor`; `stats.rounds` has the most rounds of any part. With
        `capacity_factor` more than one part raises `moax.Unsupported`.

    Raises:
      ValueError: a field has a value that it cannot have. The message names the field.
    """

    recipe: str | Recipe | Recipes | None = None
    axes: Axes = Axes()
    exchange: str = "auto"
    kernels: str = "auto"
    engine: Engine = "auto"
    buffer_factor: float | None = 1.25
    save_rows: bool = True
    grad_reduce_dtype: DTypeLike | None = None
    chunks: int = 1

    def __post_init__(self):
        get_recipes(self.recipe)
        if not isinstance(self.axes, Axes):
            raise ValueError(f"axes={self.axes!r} must be a moax.Axes")
        check_choice("engine", self.engine, ENGINES)
        for name in ("exchange", "kernels"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a name, such as 'auto'")
        factor = self.buffer_factor
        if factor is not None and not (is_number(factor) and 0 < factor < math.inf):
            raise ValueError(f"buffer_factor={factor!r} must be a number above 0, or None for the worst case")
        check_flag("save_rows", self.save_rows)
        check_count("chunks", self.chunks)
        object.__setattr__(self, "grad_reduce_dtype", get_grad_reduce(self.grad_reduce_dtype))
        as_python(self)


def replace_options(caller: str, options: Options, keywords: OptionKeywords) -> Options:
    """Returns the options with these fields; TypeError, which names the caller, where `Options` lacks a keyword's."""
    fields = [field.name for field in dataclasses.fields(Options)]
    for name in keywords:
        if name not in fields:
            near = difflib.get_close_matches(name, fields, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; the fields of moax.Options are {', '.join(fields)}"
            raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}{hint}")
    return dataclasses.replace(options, **keywords) if keywords else options


class OptionKeywords(TypedDict, total=False):
    """The fields of `Options` as keywords of a function."""

    recipe: str | Recipe | Recipes | None
    axes: Axes
    exchange: str
    kernels: str
    engine: Engine
    buffer_factor: float | None
    save_rows: bool
    grad_reduce_dtype: DTypeLike | None
    chunks: int
