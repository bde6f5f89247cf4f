"""The static arguments of a block, the residuals of its forward, and the layout of both directions on a mesh."""

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
    """The weights of the experts: wi [E, H, G, F], wo [E, F, H], and the biases bi [E, G, F] and bo [E, H] or None."""

    wi: Leaf
    wo: Leaf
    bi: Leaf | None
    bo: Leaf | None


class BlockResiduals(NamedTuple):
    """The arrays that forward leaves to backward, on one device.

    Attributes:
      rows: the expert-sorted rows, as the implementation's `wgrad` takes them.
      hidden: [N, G, F], the input of the activation.
      plan: where the received rows lie after the permutation.
      weights: [R, K] f32, the routing weights of the received rows.
      sent: the plan of the transport, `Received.slots`: where the tokens went.
    """

    rows: Operand
    hidden: Float[Array, "N G F"]
    plan: Plan
    weights: Float[Array, "R K"]
    sent: Int[Array, " C"] | SendPlan | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """The static arguments of the experts' part of a block.

    Attributes:
      activation: the name of the activation.
      weights_at: `output` or `hidden`: where the routing weights multiply.
      recipe: the formats of the operands of products.
      exchange: the spec of dispatch and combine.
      permute: the spec of permute and unpermute.
      roles: the mesh axes by role.
      declared: Weights of specs, used where neither the type nor the sharding of a weight says one.
      dtype: the dtype of the products.
      kernels: the name of the implementation.
      chunks: the number of parts in which a device takes its tokens.
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
        """Returns the spec of a block whose shards have `tokens` tokens each.

        Args:
          config: the sizes of the block and its equations.
          transport: the name of the transport.
          declared: the spec of each parameter, a MoEParams.
          recipe, roles, dtype, kernels, chunks: see the attributes of this class.
        """
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
        """G: the number of projections that the activation takes, 2 with a gate and 1 without."""
        return 2 if self.activation in GATED else 1

    @property
    def local(self) -> Implementation:
        """The functions of the implementation named by `kernels`."""
        return implementation(self.kernels)

    @property
    def amax_over(self) -> Names:
        """The axes that split rows. A scale of the whole tensor needs the maximum over these axes."""
        return self.roles.tokens

    def groups(self, plan: Plan) -> Groups:
        """Returns the groups of the sorted rows of a plan."""
        return self.local.find_groups(plan.group_sizes, self.permute.align, plan.source.shape[0])


def quantize_and_gather(
    static: BlockSpec, w: Weights[Array], layouts: Layouts, contracted: Contracted
) -> list[Operand]:
    """Returns wi and wo for products over `contracted`: each weight is quantized on its shard, then gathered as bytes.

    The products over rows are those of forward, and the products over columns those of backward.
    """
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
    """Returns float32 zeros in the shapes of the gathered weights, to which the gradients of all chunks are added.

    Inside a `shard_map` the types of the zeros vary over the same axes as `operands`, the operands of backward.
    """

    def zeros(p, gather):
        shape = [n * static.roles.size(names) for n, names in zip(p.shape, gather, strict=True)]
        return vary_like(jnp.zeros(shape, jnp.float32), operands, w)

    wi, wo = (zeros(p, layout.gather) for p, layout in zip((w.wi, w.wo), layouts, strict=True))
    bi, bo = (None if p is None else zeros(p, ((),) * p.ndim) for p in (w.bi, w.bo))
    return Weights(wi, wo, bi, bo)


def find_layouts(static: BlockSpec, found_specs: Weights[Spec | None]) -> Layouts:
    """Returns the layouts of wi and wo, by the specs that were found (a Weights), else by the declared specs."""
    roles, declared = static.roles, static.declared
    wi, wo = (d if f is None else f for f, d in ((found_specs.wi, declared.wi), (found_specs.wo, declared.wo)))
    return (
        weight_layout("params.wi", wi, (roles.ep, (), (), roles.tp), roles),
        weight_layout("params.wo", wo, (roles.ep, roles.tp, ()), roles),
    )


def weight_specs(static: BlockSpec, layouts: Layouts, w: Weights[Array]) -> Weights[Spec]:
    """Returns the spec of each weight and bias; None for a bias that is None."""
    roles = static.roles
    bi = None if w.bi is None else spec(roles.ep, None, roles.tp)
    bo = None if w.bo is None else spec(roles.ep, None)
    return Weights(layouts[0].spec, layouts[1].spec, bi, bo)


def forward_contract(static: BlockSpec, operands, found_specs) -> Contract:
    """Returns the contract of forward: tokens lie over (dp, fsdp, ep).

    y is summed over tp, and the dropped assignments over all axes of tokens.
    """
    roles, layouts = static.roles, find_layouts(static, found_specs[3])
    rows = spec(roles.tokens, None)
    weights = weight_specs(static, layouts, operands[3])
    results, reduce = (rows, spec(None), device_spec(roles)), (roles.tp, roles.tokens, ())
    count = 3 if static.chunks == 1 else 2
    return Contract((rows, rows, rows, weights), results[:count], reduce[:count], layouts)


def backward_contract(static: BlockSpec, operands, found_specs) -> Contract:
    """Returns the contract of backward: each gradient has the layout of its array.

    The gradient of a weight is scattered over the axes that the weight was gathered over, and summed over the other
    axes of tokens.
    """
    roles, layouts = static.roles, find_layouts(static, found_specs[1])
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
    """Returns the Shardy rule of forward: its operands and results share the dim of tokens."""
    return ("t m", "t k", "t k", *_weight_factors(operands[3])), ("t m", "o")


def backward_factors(static: BlockSpec, operands):
    """Returns the Shardy rule of backward. The dims of residuals appear in no other operand."""
    saved, w, _ = operands
    own = ("",) * len(jax.tree.leaves(saved)) if static.chunks == 1 else ("t m", "t k", "t k")
    return (*own, *_weight_factors(w), "t m"), ("t m", "t k", *_weight_factors(w))


def _weight_factors(w: Weights[Array]):
    """Returns the dims of wi, wo, bi and bo in a Shardy rule.

    A bias has dims of its own: fsdp may split its weight, which is gathered, but not the bias.
    """
    return tuple(f for f, p in zip(("e h g f", "e f h", "be bg bf", "be bh"), w, strict=True) if p is not None)
