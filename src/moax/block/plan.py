"""`make_plan` decides how the experts of a block run: transport, implementation and the sizes of all buffers."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np
from jax.typing import DTypeLike

from moax.checks import Unsupported
from moax.config import MoEConfig, Options
from moax.exchange import AUTO, TRANSPORTS
from moax.exchange.transport import ExchangeSpec, allot_slots
from moax.kernels import implementation, select_kernels
from moax.kernels.groups import allot_rows
from moax.mesh.axes import ResolvedAxes
from moax.mesh.specs import Spec
from moax.ops.permutation import PermuteSpec, sorted_rows
from moax.ops.weights import WeightSpec
from moax.params import MoEParams
from moax.recipe import Recipes, get_recipes


class Round(NamedTuple):
    """The buffers of a round: the specs of dispatch and combine, and those of permute and unpermute."""

    exchange: ExchangeSpec
    permute: PermuteSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """The static facts of the experts of a block.

    Attributes:
      config, recipe: the equations, and the formats of the operands of the products with wi and with wo.
      axes, wi, wo: the mesh axes by role, and the static facts of both weights.
      dtype, kernels: the dtype of products, and the implementation's name.
      first, later, overflows: the buffers of the first round, and of all others; whether a routing may need others.
      chunks: the chunks of a device's tokens, see `experts.py`; the buffers and all other sizes are for one chunk.
      save_rows: whether forward leaves rows to backward: the received rows where products gather them, else the sorted
        ones. If the products gather them and ep is 1, the received rows are x, so nothing is saved.
      frozen: whether wi and wo have no gradient. The sorted rows that forward leaves are then not quantized.
      gathers_x, gathers_dy: whether products gather received rows, and gradients of partial sums, by themselves.
    """

    config: MoEConfig
    recipe: Recipes
    axes: ResolvedAxes
    wi: WeightSpec
    wo: WeightSpec
    dtype: np.dtype
    kernels: str
    first: Round
    later: Round
    overflows: bool
    chunks: int
    save_rows: bool
    frozen: bool
    gathers_x: bool
    gathers_dy: bool


def make_plan(
    config: MoEConfig, options: Options, transport: str | None, *, axes: ResolvedAxes, declared: MoEParams[Spec],
    tokens: int, dtype: DTypeLike, frozen: bool = False,
) -> BlockPlan:  # fmt: skip
    """Returns the plan of a block whose shards have `tokens` tokens each.

    Args:
      config, options: the block, and how it runs.
      transport: the name of the transport. None chooses the portable one whose balanced step sends the fewest bytes,
        and of equal ones the first. With a capacity factor the transports drop other tokens, so that it is all_gather
        then, which drops none on the way.
      declared: the spec of each parameter.
      axes, dtype, frozen: see `BlockPlan`.

    Raises:
      Unsupported: the block has a capacity factor and several chunks, or kernels chosen by name cannot run.
    """
    recipe, chunks, factor = get_recipes(options.recipe), options.chunks, options.buffer_factor
    if chunks > 1 and config.capacity_factor is not None:
        raise Unsupported(
            f"chunks={chunks} with capacity_factor={config.capacity_factor}; the tokens of a device lose assignments "
            "together. Use chunks=1 or capacity_factor=None"
        )
    tokens, top_k, ep, tp = -(-tokens // chunks), config.top_k, axes.ep, axes.tp
    widths = {"d_model": config.d_rows, "d_ff": config.d_ff // axes.size(tp)}  # of rows and hidden rows on one device
    kernels = select_kernels(options.kernels, dtype, **widths)
    local, ranks, balanced = implementation(kernels), axes.size(ep), tokens * top_k
    align = math.lcm(local.align_rows(recipe.wi), local.align_rows(recipe.wo))
    experts = config.num_experts // ranks
    capacity = None if config.capacity_factor is None else math.ceil(config.capacity_factor * tokens * top_k)
    some, most = allot_slots(tokens, top_k, ranks, config.num_experts, config.capacity_factor, factor)

    portable = [name for name, of in TRANSPORTS.items() if of.portable] if ep and capacity is None else [AUTO]
    names = portable if transport is None else [transport]
    # A row has the same bytes in every portable transport, so the fewest rows are the fewest bytes.
    rows = {name: (some if TRANSPORTS[name].has_slots else tokens) * ranks for name in names}
    name = min(names, key=lambda name: rows[name])
    slots = some if TRANSPORTS[name].has_slots else most
    exchange = ExchangeSpec(name, axes, ranks, tokens, slots, recipe.wi.wire, kernels, config.num_experts, most)
    kept = sorted_rows(rows[name], top_k, experts, 1, capacity)
    max_rows = allot_rows(balanced, factor, kept)
    fewer = max_rows is not kept and max_rows < kept  # a symbolic size has the worst case itself
    first = PermuteSpec(experts, align, capacity, kernels, axes, max_rows if fewer else None)
    # A later round has half of the slots and 45 % of the rows, because it recomputes what the first round saved. With a
    # capacity factor it has all slots, because drops are decided over all of them.
    half = -(-slots // 2) if capacity is None else slots
    later = PermuteSpec(experts, align, capacity, kernels, axes, -(-max_rows * 9 // 20))
    gathers_x = local.matmul_gathers_rows(recipe.wi.x, *widths.values())
    how: dict = dict(axes=axes, kernels=kernels, dtype=np.dtype(dtype), grad_reduce=options.grad_reduce_dtype)
    return BlockPlan(
        config=config,
        recipe=recipe,
        axes=axes,
        wi=WeightSpec("params.wi", declared.wi, recipe=recipe.wi, kept=(ep, (), (), tp), **how),
        wo=WeightSpec("params.wo", declared.wo, recipe=recipe.wo, kept=(ep, tp, ()), **how),
        dtype=np.dtype(dtype),
        kernels=kernels,
        first=Round(exchange, first),
        later=Round(dataclasses.replace(exchange, slots=half), later),
        overflows=fewer or (slots is not most and slots < most),
        chunks=chunks,
        save_rows=options.save_rows and (bool(ep) or frozen or not gathers_x),
        frozen=frozen,
        gathers_x=gathers_x,
        gathers_dy=local.matmul_gathers_rows(recipe.wo.dy, *widths.values()),
    )
