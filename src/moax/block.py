"""What is static of a block, what its forward leaves to its backward, and how both lie on a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from moax.axes import Names, Roles
from moax.config import Activation
from moax.ops.exchange import ExchangeSpec, slots_per_pair
from moax.ops.grouped_matmul import replicated
from moax.ops.permute import PermuteSpec, capacity_rows
from moax.ops.quantize import gather_quantized, quantize_rows
from moax.partition import Contract
from moax.recipe import Contracted, Recipe
from moax.sharding import Layout, device_spec, spec, weight_layout
from moax.types import Plan, QArray


class Weights(NamedTuple):
    """wi [E, H, G, F], wo [E, F, H], bi [E, G, F] | None, bo [E, H] | None."""

    wi: Array
    wo: Array
    bi: Array | None
    bo: Array | None


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """All that is static of the experts' part of a block."""

    activation: Activation
    weights_at: str
    recipe: Recipe
    exchange: ExchangeSpec
    permute: PermuteSpec
    roles: Roles
    declared: Any
    dtype: np.dtype

    @classmethod
    def make(cls, config, recipe, transport, roles, declared, tokens, dtype):
        """The spec for `tokens` tokens of a shard."""
        ranks, capacity = roles.size(roles.ep), config.capacity_factor
        slots = slots_per_pair(tokens, config.top_k, ranks, capacity)
        rows = capacity_rows(tokens, config.top_k, capacity)
        return cls(
            config.activation,
            config.weights_at,
            recipe,
            ExchangeSpec(transport, config.num_experts, roles, slots, recipe.wire),
            PermuteSpec(config.num_experts // ranks, recipe.row_alignment, rows, roles),
            roles,
            Weights(declared.wi, declared.wo, declared.bi, declared.bo),
            np.dtype(dtype),
        )

    def weight(self, w, at: Layout, contracted: Contracted):
        """A weight as a product over `contracted` takes it: quantized on its shard, then gathered."""
        split = tuple(n for names in at.gather[1:] for n in names) + self.roles.tp
        return gather_quantized(w, self.recipe.w, contracted, at.gather, split, self.dtype)

    def rows(self, x, contracted: Contracted, real, split: Names = ()):
        """Activations as a product over `contracted` takes them; `split`: axes that split their columns."""
        return quantize_rows(x, self.recipe.x, contracted, self.roles.tokens + split, real)

    def grads(self, dy, contracted: Contracted, real, split: Names = ()):
        """Gradients of activations, likewise."""
        return quantize_rows(dy, self.recipe.dy, contracted, self.roles.tokens + split, real)


class Saved(NamedTuple):
    """What forward leaves to backward, of one device: rows as wgrad wants them [N, H], the input of the activation
    [N, G, F], the Plan, weights [R, K] and slots of the exchange."""

    rows: Array | QArray
    hidden: Array
    plan: Plan
    weights: Array
    sent: Array | None


def weight_layouts(static: BlockSpec, found: Any) -> tuple[Layout, Layout]:
    """How wi and wo lie: as found, else as declared."""
    roles, declared = static.roles, static.declared
    wi, wo = (d if f is None else f for f, d in ((found.wi, declared.wi), (found.wo, declared.wo)))
    return (
        weight_layout("params.wi", wi, (roles.ep, (), (), roles.tp), roles),
        weight_layout("params.wo", wo, (roles.ep, roles.tp, ()), roles),
    )


def weight_specs(static: BlockSpec, layouts, w: Weights) -> Any:
    """The spec of each weight and bias that there is."""
    roles = static.roles
    bi = None if w.bi is None else spec(roles.ep, None, roles.tp)
    bo = None if w.bo is None else spec(roles.ep, None)
    specs: Any = (layouts[0].spec, layouts[1].spec, bi, bo)
    return Weights(*specs)


def forward_contract(static: BlockSpec, operands, found):
    roles, layouts = static.roles, weight_layouts(static, found[3])
    rows = spec(roles.tokens, None)
    weights = weight_specs(static, layouts, operands[3])
    return Contract(
        (rows, rows, rows, weights), (rows, spec(None), device_spec(roles)), (roles.tp, roles.tokens, ()), layouts
    )


def backward_contract(static: BlockSpec, operands, found):
    roles, layouts = static.roles, weight_layouts(static, found[1])
    rows = spec(roles.tokens, None)
    weights = weight_specs(static, layouts, operands[1])
    replicas = roles.dp + roles.fsdp
    return Contract(
        (jax.tree.map(lambda _: device_spec(roles), operands[0]), weights, rows),
        (rows, rows, *(spec() if s is None else s for s in weights)),
        (roles.tp, roles.tp, *(replicated(roles, at) for at in layouts), replicas, replicas + roles.tp),
        layouts,
    )


def weight_factors(w: Weights):
    """Dims of wi, wo, bi, bo: what shards a weight says nothing of its bias, which is not gathered."""
    return tuple(f for f, p in zip(("e h g f", "e f h", "be bg bf", "be bh"), w, strict=True) if p is not None)


def backward_factors(static: BlockSpec, operands):
    saved, w, _ = operands
    own = ("",) * len(jax.tree.leaves(saved))
    return (*own, *weight_factors(w), "t m"), ("t m", "t k", *weight_factors(w))


def forward_factors(static: BlockSpec, operands):
    return ("t m", "t k", "t k", *weight_factors(operands[3])), ("t m", "o")
