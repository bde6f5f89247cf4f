"""What is static of a block, what its forward leaves to its backward, and how both lie on a mesh."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from moax.config import GATED, Activation
from moax.groups import BLOCK, Groups, find_groups
from moax.mesh.axes import Roles
from moax.mesh.collectives import vary_like
from moax.mesh.partition import Contract
from moax.mesh.specs import Layout, device_spec, spec, weight_layout
from moax.ops.activation import ActivateSpec
from moax.ops.exchange import ExchangeSpec, slots_per_pair
from moax.ops.permutation import PermuteSpec, capacity_rows, permute_local
from moax.ops.products import replicated
from moax.ops.quantization import enter_gathered, enter_rows, fits_operand, gather_operand, gather_quantized
from moax.recipe import Contracted, Format, Recipe
from moax.types import Operand, Plan, QArray, SendPlan


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
    kernels: Literal["xla", "mosaic"]
    chunks: int = 1
    fp8: bool = False

    @classmethod
    def make(cls, config, recipe, transport, roles, declared, tokens, dtype, kernels, chunks=1):
        """The spec for `tokens` tokens of a shard, in so many chunks."""
        ranks, capacity, tokens = roles.size(roles.ep), config.capacity_factor, tokens // chunks
        slots = slots_per_pair(tokens, config.top_k, ranks, capacity)
        rows = capacity_rows(tokens, config.top_k, capacity)
        align = math.lcm(recipe.row_alignment, BLOCK) if kernels == "mosaic" else recipe.row_alignment
        return cls(
            config.activation,
            config.weights_at,
            recipe,
            ExchangeSpec(transport, roles, slots, recipe.wire, kernels, num_experts=config.num_experts),
            PermuteSpec(config.num_experts // ranks, align, rows, roles),
            roles,
            Weights(declared.wi, declared.wo, declared.bi, declared.bo),
            np.dtype(dtype),
            kernels,
            chunks,
        )

    @property
    def gates(self) -> int:
        """G: projections that the activation takes."""
        return 2 if self.activation in GATED else 1

    def on(self, layouts, w: Weights) -> BlockSpec:
        """The spec for weights that lie so: `fp8`, where the FP8 kernels multiply."""
        fits = all(fits_operand(p, at.gather) for p, at in zip((w.wi, w.wo), layouts, strict=True))
        return dataclasses.replace(self, fp8=self.kernels == "mosaic" and self.recipe.hopper_fp8 and fits)

    def groups(self, plan: Plan) -> Groups:
        """How the sorted rows lie."""
        return find_groups(plan.group_sizes, self.permute.align, plan.source.shape[0], blocks=self.kernels == "mosaic")

    def weight(self, w, at: Layout, contracted: Contracted):
        """A weight as a product over `contracted` takes it: quantized on its shard, then gathered."""
        split = tuple(n for names in at.gather[1:] for n in names) + self.roles.tp
        if self.fp8 and self.recipe.w is not None:
            return gather_operand(w, self.recipe.w, contracted, at.gather, split)
        return gather_quantized(w, self.recipe.w, contracted, at.gather, split, self.dtype)

    def gathered(self, w: Weights, layouts, contracted: Contracted):
        """wi and wo, each by `weight`."""
        made = []
        for scope, p, at in zip(("experts_in", "experts_out"), (w.wi, w.wo), layouts, strict=True):
            with jax.named_scope(scope):
                made.append(self.weight(p, at, contracted))
        return made

    def zero_gradients(self, w: Weights, layouts, operands) -> Weights:
        """Zeros in float32 to sum the gradients of gathered weights to; operands: those of backward."""

        def zeros(p, gather):
            shape = [n * self.roles.size(names) for n, names in zip(p.shape, gather, strict=True)]
            return vary_like(jnp.zeros(shape, jnp.float32), operands, w)

        wi, wo = (zeros(p, at.gather) for p, at in zip((w.wi, w.wo), layouts, strict=True))
        bi, bo = (None if p is None else zeros(p, ((),) * p.ndim) for p in (w.bi, w.bo))
        return Weights(wi, wo, bi, bo)

    def rows(self, x, plan: Plan, groups: Groups):
        """Activations sorted by expert, as forward and as wgrad takes them."""
        return self._enter(x, self.recipe.x, plan, groups)

    def grads(self, dy, plan: Plan, groups: Groups):
        """Gradients sorted by expert, as dgrad and as wgrad takes them."""
        return self._enter(dy, self.recipe.dy, plan, groups)

    def _enter(self, x, format: Format | None, plan: Plan, groups: Groups):
        if self.fp8 and format is not None and format.block is not None:  # one kernel gathers and quantizes
            return enter_gathered(x, plan.source, format, groups)
        return enter_rows(permute_local(x, plan, groups), format, groups, self.roles.tokens, fp8=self.fp8)

    def activate(self, biased: bool) -> ActivateSpec:
        """The spec of the activation between the products; `biased`: the gradient of h is a bias's too."""
        over = self.roles.tokens + self.roles.tp
        return ActivateSpec(self.activation, self.recipe.x, self.recipe.dy, over, biased)


class Saved(NamedTuple):
    """What forward leaves to backward, of one device: rows as wgrad wants them [N, H], the input of the activation
    [N, G, F], the Plan, weights [R, K] and slots of the exchange, or its SendPlan."""

    rows: Array | QArray | Operand
    hidden: Array
    plan: Plan
    weights: Array
    sent: Array | SendPlan | None


def split_chunks(chunks: int, tree):
    """Arrays [T, ...] in so many parts [chunks, T / chunks, ...]."""
    return jax.tree.map(lambda v: v.reshape(chunks, -1, *v.shape[1:]), tree)


def join_chunks(tree):
    """The inverse of `split_chunks`."""
    return jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), tree)


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
    results, reduce = (rows, spec(None), device_spec(roles)), (roles.tp, roles.tokens, ())
    count = 3 if static.chunks == 1 else 2
    return Contract((rows, rows, rows, weights), results[:count], reduce[:count], layouts)


def backward_contract(static: BlockSpec, operands, found):
    roles, layouts = static.roles, weight_layouts(static, found[1])
    rows = spec(roles.tokens, None)
    weights = weight_specs(static, layouts, operands[1])
    replicas = roles.dp + roles.fsdp
    kept = device_spec(roles) if static.chunks == 1 else rows
    return Contract(
        (jax.tree.map(lambda _: kept, operands[0]), weights, rows),
        (rows, rows, *(spec() if s is None else s for s in weights)),
        (roles.tp, roles.tp, *(replicated(roles, at) for at in layouts), replicas, replicas + roles.tp),
        layouts,
    )


def weight_factors(w: Weights):
    """Dims of wi, wo, bi, bo: what shards a weight says nothing of its bias, which is not gathered."""
    return tuple(f for f, p in zip(("e h g f", "e f h", "be bg bf", "be bh"), w, strict=True) if p is not None)


def backward_factors(static: BlockSpec, operands):
    saved, w, _ = operands
    own = ("",) * len(jax.tree.leaves(saved)) if static.chunks == 1 else ("t m", "t k", "t k")
    return (*own, *weight_factors(w), "t m"), ("t m", "t k", *weight_factors(w))


def forward_factors(static: BlockSpec, operands):
    return ("t m", "t k", "t k", *weight_factors(operands[3])), ("t m", "o")
