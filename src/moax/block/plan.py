"""`make_plan` decides how the experts of a block run: transport, implementation and the sizes of all buffers."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jax.typing import DTypeLike

from moax.block.moe import BlockPlan, Round
from moax.checks import Unsupported
from moax.config import MoEConfig, Options
from moax.exchange import AUTO, TRANSPORTS
from moax.exchange.transport import ExchangeSpec, allot_slots
from moax.groups import allot_rows
from moax.kernels import implementation, select_kernels
from moax.mesh.axes import ResolvedAxes
from moax.mesh.collectives import GradReduce, get_grad_reduce, sum_dtype
from moax.mesh.specs import Spec
from moax.ops.permutation import PermuteSpec, capacity_rows, kept_rows
from moax.ops.weights import WeightSpec
from moax.params import MoEParams
from moax.recipe import Recipes, get_recipes


def weight_specs(
    declared: MoEParams[Spec], axes: ResolvedAxes, recipe: Recipes, kernels: str, dtype: DTypeLike,
    grad_reduce: GradReduce | None = None,
) -> tuple[WeightSpec, WeightSpec]:  # fmt: skip
    """Returns the static facts of wi and wo; `declared` has the spec of each parameter."""
    how = dict(axes=axes, kernels=kernels, dtype=np.dtype(dtype), grad_reduce=grad_reduce)
    ep, tp = axes.ep, axes.tp
    return (
        WeightSpec("params.wi", declared.wi, recipe=recipe.wi, kept=(ep, (), (), tp), **how),
        WeightSpec("params.wo", declared.wo, recipe=recipe.wo, kept=(ep, tp, ()), **how),
    )


def shard_widths(config: MoEConfig, axes: ResolvedAxes) -> dict[str, int]:
    """Returns the widths of rows and of hidden rows on one device, by the names that errors give them."""
    return {"d_model": config.d_rows, "d_ff": config.d_ff // axes.size(axes.tp)}


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
    grad_reduce = get_grad_reduce(options.grad_reduce_dtype)
    if chunks > 1 and config.capacity_factor is not None:
        raise Unsupported(
            f"chunks={chunks} with capacity_factor={config.capacity_factor}; the tokens of a device lose assignments "
            "together. Use chunks=1 or capacity_factor=None"
        )
    tokens = -(-tokens // chunks)
    widths, weights_at = shard_widths(config, axes), config.weights_at
    kernels = select_kernels(options.kernels, dtype, **widths)
    local, ranks, load = implementation(kernels), axes.size(axes.ep), tokens * config.top_k
    experts, capacity = config.num_experts // ranks, capacity_rows(tokens, config.top_k, config.capacity_factor)
    align = math.lcm(*map(local.align_rows, recipe.both))
    counts = tokens, config.top_k, ranks, config.num_experts
    some, most = allot_slots(*counts, config.capacity_factor, factor)

    names = [name for name, of in TRANSPORTS.items() if of.portable] if transport is None else [transport]
    if transport is None and (config.capacity_factor is not None or not axes.ep):
        names = [AUTO]
    # A row has the same bytes in every portable transport, so the fewest rows are the fewest bytes.
    rows = {name: (some if TRANSPORTS[name].has_slots else tokens) * ranks for name in names}
    name = min(names, key=lambda name: rows[name])
    slots, received = some if TRANSPORTS[name].has_slots else most, rows[name]
    exchange = ExchangeSpec(name, axes, tokens, slots, recipe.wire, kernels, config.num_experts, most)
    kept = kept_rows(received, config.top_k, experts, capacity)
    max_rows = allot_rows(load, factor, kept)
    fewer = max_rows is not kept and max_rows < kept  # a symbolic size has the worst case itself
    first = PermuteSpec(experts, align, capacity, kernels, axes, max_rows if fewer else None)
    # A later round has half of the slots and 45 % of the rows, because it recomputes what the first round saved. With a
    # capacity factor it has all slots, because drops are decided over all of them.
    slots = exchange.slots if config.capacity_factor is not None else -(-exchange.slots // 2)
    later = PermuteSpec(experts, align, capacity, kernels, axes, -(-max_rows * 9 // 20))
    gathers_x = local.matmul_gathers_rows(recipe.wi.x, *widths.values())
    wi, wo = weight_specs(declared, axes, recipe, kernels, dtype, grad_reduce)
    return BlockPlan(
        activation=config.activation,
        activation_limit=config.activation_limit,
        weights_at=weights_at,
        recipe=recipe,
        axes=axes,
        wi=wi,
        wo=wo,
        dtype=np.dtype(dtype),
        grad_dtype=sum_dtype(grad_reduce, dtype),
        kernels=kernels,
        first=Round(exchange, first),
        later=Round(dataclasses.replace(exchange, slots=slots), later),
        overflows=fewer or (exchange.slots is not most and exchange.slots < most),
        chunks=chunks,
        balanced=load,
        save_rows=options.save_rows and (bool(axes.ep) or frozen or not gathers_x),
        frozen=frozen,
        gathers_x=gathers_x,
        gathers_dy=local.matmul_gathers_rows(recipe.wo.dy, *widths.values()),
        activates=weights_at == "output" and recipe.wo.x is None,
    )
