"""What is static of a block, what its forward leaves to its backward, and how both lie on a mesh."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from moax.config import GATED, Activation, MoEConfig
from moax.groups import Groups
from moax.kernels import Implementation, Operand, implementation
from moax.mesh.axes import Names, Roles
from moax.mesh.collectives import vary_like
from moax.mesh.partition import Contract
from moax.mesh.specs import Layout, Spec, device_spec, spec, weight_layout
from moax.ops.exchange import ExchangeSpec, slots_per_pair
from moax.ops.permutation import PermuteSpec, capacity_rows
from moax.ops.products import replicated
from moax.params import MoEParams
from moax.recipe import Contracted, Recipe
from moax.types import Plan, SendPlan

Layouts = tuple[Layout, Layout]  # of wi and wo


class Weights[Leaf](NamedTuple):
    """One value for each weight of the experts: arrays wi [E, H, G, F], wo [E, F, H], bi [E, G, F] or None, bo [E, H]
    or None; or their specs."""

    wi: Leaf
    wo: Leaf
    bi: Leaf | None
    bo: Leaf | None


class BlockResiduals(NamedTuple):
    """What forward leaves to backward, of one device.

    rows: expert-sorted rows as the wgrad of the implementation takes them. hidden: the input of the activation. plan,
    sent: where rows lie after the permutation, and where tokens went. weights: the routing weights of received rows.
    """

    rows: Operand
    hidden: Float[Array, "N G F"]
    plan: Plan
    weights: Float[Array, "R K"]
    sent: Int[Array, " C"] | SendPlan | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """All that is static of the experts' part of a block.

    declared: how weights lie where their types do not say. kernels: the name of the implementation.
    """

    activation: Activation
    weights_at: str
    recipe: Recipe
    exchange: ExchangeSpec
    permute: PermuteSpec
    roles: Roles
    declared: Weights[Spec]
    dtype: np.dtype
    kernels: str
    chunks: int

    @classmethod
    def make(
        cls,
        config: MoEConfig,
        *,
        recipe: Recipe,
        transport: str,
        roles: Roles,
        declared: MoEParams[Spec],
        tokens: int,
        dtype: jax.typing.DTypeLike,
        kernels: str,
        chunks: int = 1,
    ) -> BlockSpec:
        """The spec for `tokens` tokens of a shard, in so many chunks."""
        ranks, capacity, tokens = roles.size(roles.ep), config.capacity_factor, tokens // chunks
        slots = slots_per_pair(tokens, config.top_k, ranks, capacity)
        rows, align = capacity_rows(tokens, config.top_k, capacity), implementation(kernels).align_rows(recipe)
        return cls(
            activation=config.activation,
            weights_at=config.weights_at,
            recipe=recipe,
            exchange=ExchangeSpec(transport, roles, slots, recipe.wire, kernels, num_experts=config.num_experts),
            permute=PermuteSpec(config.num_experts // ranks, align, rows, kernels, roles),
            roles=roles,
            declared=Weights(declared.wi, declared.wo, declared.bi, declared.bo),
            dtype=np.dtype(dtype),
            kernels=kernels,
            chunks=chunks,
        )

    @property
    def gates(self) -> int:
        """G: projections that the activation takes."""
        return 2 if self.activation in GATED else 1

    @property
    def local(self) -> Implementation:
        """The implementation that computes."""
        return implementation(self.kernels)

    @property
    def amax_over(self) -> Names:
        """The axes that split rows, over which the maximum of a tensor of one block is agreed on."""
        return self.roles.tokens

    def groups(self, plan: Plan) -> Groups:
        """How the sorted rows lie."""
        return self.local.find_groups(plan.group_sizes, self.permute.align, plan.source.shape[0])


def quantize_and_gather(
    static: BlockSpec, w: Weights[Array], layouts: Layouts, contracted: Contracted
) -> list[Operand]:
    """wi and wo as products over `contracted` take them: each quantized on its shard, then gathered as bytes."""
    gathered = []
    for scope, shard, layout in zip(("experts_in", "experts_out"), w[:2], layouts, strict=True):
        split = tuple(name for names in layout.gather[1:] for name in names) + static.roles.tp
        with jax.named_scope(scope):
            whole = static.local.quantize_and_gather(
                shard, static.recipe, contracted, layout.gather, split, static.dtype
            )
        gathered.append(whole)
    return gathered


def zero_gradients(static: BlockSpec, w: Weights[Array], layouts: Layouts, operands: PyTree[Array]) -> Weights[Array]:
    """Zeros in float32 to which the gradients of gathered weights are added; operands: those of backward."""

    def zeros(p, gather):
        shape = [n * static.roles.size(names) for n, names in zip(p.shape, gather, strict=True)]
        return vary_like(jnp.zeros(shape, jnp.float32), operands, w)

    wi, wo = (zeros(p, layout.gather) for p, layout in zip((w.wi, w.wo), layouts, strict=True))
    bi, bo = (None if p is None else zeros(p, ((),) * p.ndim) for p in (w.bi, w.bo))
    return Weights(wi, wo, bi, bo)


def find_layouts(static: BlockSpec, found: Weights[Spec | None]) -> Layouts:
    """How wi and wo lie: as found, else as declared."""
    roles, declared = static.roles, static.declared
    wi, wo = (d if f is None else f for f, d in ((found.wi, declared.wi), (found.wo, declared.wo)))
    return (
        weight_layout("params.wi", wi, (roles.ep, (), (), roles.tp), roles),
        weight_layout("params.wo", wo, (roles.ep, roles.tp, ()), roles),
    )


def weight_specs(static: BlockSpec, layouts: Layouts, w: Weights[Array]) -> Weights[Spec]:
    """The spec of each weight and bias that there is."""
    roles = static.roles
    bi = None if w.bi is None else spec(roles.ep, None, roles.tp)
    bo = None if w.bo is None else spec(roles.ep, None)
    return Weights(layouts[0].spec, layouts[1].spec, bi, bo)


def forward_contract(static: BlockSpec, operands, found) -> Contract:
    """Tokens over (dp, fsdp, ep); the output is a partial sum over tp, and drops are counted over all tokens."""
    roles, layouts = static.roles, find_layouts(static, found[3])
    rows = spec(roles.tokens, None)
    weights = weight_specs(static, layouts, operands[3])
    results, reduce = (rows, spec(None), device_spec(roles)), (roles.tp, roles.tokens, ())
    count = 3 if static.chunks == 1 else 2
    return Contract((rows, rows, rows, weights), results[:count], reduce[:count], layouts)


def backward_contract(static: BlockSpec, operands, found) -> Contract:
    """Gradients lie as their primals. A weight's is scattered over the axes that were gathered, and summed over the
    other axes of tokens."""
    roles, layouts = static.roles, find_layouts(static, found[1])
    rows = spec(roles.tokens, None)
    weights = weight_specs(static, layouts, operands[1])
    replicas = roles.dp + roles.fsdp
    kept = device_spec(roles) if static.chunks == 1 else rows
    return Contract(
        (jax.tree.map(lambda _: kept, operands[0]), weights, rows),
        (rows, rows, *(spec() if s is None else s for s in weights)),
        (roles.tp, roles.tp, *(replicated(roles, layout) for layout in layouts), replicas, replicas + roles.tp),
        layouts,
    )


def forward_factors(static: BlockSpec, operands):
    """The Shardy rule of forward."""
    return ("t m", "t k", "t k", *_weight_factors(operands[3])), ("t m", "o")


def backward_factors(static: BlockSpec, operands):
    """The Shardy rule of backward; residuals have dims of their own."""
    saved, w, _ = operands
    own = ("",) * len(jax.tree.leaves(saved)) if static.chunks == 1 else ("t m", "t k", "t k")
    return (*own, *_weight_factors(w), "t m"), ("t m", "t k", *_weight_factors(w))


def _weight_factors(w: Weights[Array]):
    """Dims of wi, wo, bi, bo: what shards a weight says nothing of its bias, which is not gathered."""
    return tuple(f for f, p in zip(("e h g f", "e f h", "be bg bf", "be bh"), w, strict=True) if p is not None)
