"""The static arguments of a block, the residuals of its forward, and the layout of both directions on a mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from moax.block.weights import Layouts, find_layouts, kept_specs, split_axes
from moax.config import Activation, MoEConfig, gates_of
from moax.groups import Groups, allot_rows
from moax.kernels import Implementation, Operand, implementation
from moax.lora import NAMES, specs_on
from moax.mesh.axes import Names, Roles
from moax.mesh.collectives import GradReduce, sum_dtype
from moax.mesh.partition import Contract
from moax.mesh.specs import Spec, device_spec, spec
from moax.ops.activation import activation_of
from moax.ops.exchange import AUTO, TRANSPORTS, ExchangeSpec, allot_slots, exchange_bytes
from moax.ops.grouped import own_dims
from moax.ops.permutation import PermuteSpec, capacity_rows, kept_rows
from moax.params import MoEParams
from moax.recipe import Contracted, Format, Recipes
from moax.types import Plan, QShard, QuantizedParams, SendPlan


class Weights[Leaf](NamedTuple):
    """The weights of the experts: wi [E, H, G, F], wo [E, F, H], and the biases bi [E, G, F] and bo [E, H] or None.

    The adapters are those of `moax.lora.Adapters`, or None. Of gradients, wi and wo are None where they are frozen.
    """

    wi: Leaf
    wo: Leaf
    bi: Leaf | None
    bo: Leaf | None
    wi_a: Any = None
    wi_b: Any = None
    wo_a: Any = None
    wo_b: Any = None


class Inputs(NamedTuple):
    """The inputs of the experts' part: tokens x [T, H], experts [T, K] i32, routing weights [T, K] f32."""

    x: Float[Array, "T H"]
    experts: Int[Array, "T K"]
    weights: Float[Array, "T K"]


class BlockResiduals(NamedTuple):
    """The arrays that the first pass of forward leaves to backward, on one device.

    Attributes:
      rows: the expert-sorted rows, as the implementation's `wgrad` takes them; None where backward makes them again.
      hidden: [N, G, F], the input of the activation.
      plan: where the received rows lie after the permutation.
      by_row: [N] f32, the routing weight of each sorted row, 0 in padding.
      sent: the plan of the transport, `Received.slots`: where the tokens went.
      span: [3] i32, the pass (p, n) with which the loop begins, and a p with which it ends if p is not below; None
        without a loop.
    """

    rows: Operand | None
    hidden: Float[Array, "N G F"]
    plan: Plan
    by_row: Float[Array, " N"]
    sent: Int[Array, " C"] | SendPlan | None
    span: Int[Array, " 3"] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """The static arguments of the experts' part of a block.

    Attributes:
      activation, activation_limit: the activation, as `MoEConfig` has it, and its limit or None.
      weights_at: `output`, `hidden` or `input`: where the routing weights multiply.
      recipe: the formats of the operands of the products with wi and with wo.
      exchange: the spec of dispatch and combine.
      permute: the spec of permute and unpermute.
      exchange_more, permute_more: the same of all passes but the first one. They have half the slots and 0.45 of the
        room, for a pass of the loop also computes what the first pass keeps, and a token has fewer rows left than it
        had. A capacity decides over all slots at once; with one the slots are those of the first pass.
      roles: the mesh axes by role.
      widths: H, and F on one device.
      declared: Weights of specs, used where neither the type nor the sharding of a weight says one.
      dtype: the dtype of the products.
      kernels: the name of the implementation.
      balanced: the sorted rows of a rank at a balanced load, without padding.
      repeats: whether a routing may need a second pass.
      save_rows: whether forward may leave the sorted rows to backward; see `keeps_rows`.
      grad_reduce: how the gradients of weights are summed; see `moax.Options.grad_reduce_dtype`.
      frozen: whether wi and wo have no gradient. The sorted rows that forward leaves are then not quantized.
    """

    activation: Activation
    activation_limit: float | None
    weights_at: str
    recipe: Recipes
    exchange: ExchangeSpec
    permute: PermuteSpec
    exchange_more: ExchangeSpec
    permute_more: PermuteSpec
    roles: Roles
    widths: tuple[int, int]
    declared: Weights[Spec]
    dtype: np.dtype
    kernels: str
    balanced: int
    repeats: bool
    save_rows: bool
    grad_reduce: GradReduce | None = None
    frozen: bool = False

    @classmethod
    def make(
        cls,
        config: MoEConfig,
        *,
        recipe: Recipes,
        transport: str,
        roles: Roles,
        declared: MoEParams[Spec],
        tokens: int,
        dtype: jax.typing.DTypeLike,
        kernels: str,
        buffer_factor: float | None,
        save_rows: bool,
        grad_reduce: GradReduce | None = None,
    ) -> BlockSpec:
        """Returns the spec of a block whose shards have `tokens` tokens each.

        Args:
          config: the sizes of the block and its equations.
          transport: the name of the transport.
          declared: the spec of each parameter, a MoEParams.
          buffer_factor, save_rows, grad_reduce: see `moax.Options`.
          recipe, roles, dtype, kernels: see the attributes of this class.
        """
        ranks, load = roles.size(roles.ep), tokens * config.top_k
        local, capacity = config.num_experts // ranks, capacity_rows(tokens, config.top_k, config.capacity_factor)
        counts = tokens, config.top_k, ranks, config.num_experts
        slots, most = allot_slots(*counts, config.capacity_factor, buffer_factor)
        slots = slots if TRANSPORTS[transport].has_slots else most
        received = TRANSPORTS[transport].received_rows(tokens, ranks, slots)
        kept = kept_rows(received, config.top_k, local, capacity)
        room = allot_rows(load, buffer_factor, kept)
        align = math.lcm(*map(implementation(kernels).align_rows, recipe.both))
        fewer = room is not kept and room < kept
        exchange = ExchangeSpec(
            transport, roles, slots, recipe.wire, kernels, num_experts=config.num_experts, capacity=most
        )
        more = slots if config.capacity_factor is not None else -(-slots // 2)
        return cls(
            activation=config.activation,
            activation_limit=config.activation_limit,
            weights_at=config.weights_at,
            recipe=recipe,
            exchange=exchange,
            permute=PermuteSpec(local, align, capacity, kernels, roles, room if fewer else None),
            exchange_more=dataclasses.replace(exchange, slots=more),
            permute_more=PermuteSpec(local, align, capacity, kernels, roles, -(-room * 9 // 20)),
            roles=roles,
            widths=(config.d_model, config.d_ff // roles.size(roles.tp)),
            declared=Weights(declared.wi, declared.wo, declared.bi, declared.bo),
            dtype=np.dtype(dtype),
            kernels=kernels,
            balanced=load,
            repeats=fewer or (slots is not most and slots < most),
            save_rows=save_rows,
            grad_reduce=grad_reduce,
        )

    @classmethod
    def choose(cls, config: MoEConfig, possible: Iterable[str], *, tokens: int, **arguments: Any) -> BlockSpec:
        """Returns the spec with the transport that `exchange="auto"` means, of the `possible` ones.

        It is the portable transport whose balanced step sends the fewest bytes, and of equal ones the first of
        `TRANSPORTS`.
        With a capacity factor the transports drop other tokens, so that it is all_gather, which drops none on the way.

        Args:
          config, tokens, arguments: those of `make`.
          possible: the names of the transports that can run.
        """
        portable = [name for name in possible if TRANSPORTS[name].portable]
        specs = [cls.make(config, transport=name, tokens=tokens, **arguments) for name in portable]
        if config.capacity_factor is not None or not specs[0].roles.ep:
            return next(spec for spec in specs if spec.exchange.transport == AUTO)
        width, dtype = config.d_model, specs[0].dtype.name
        return min(specs, key=lambda spec: exchange_bytes(spec.exchange, tokens, config.top_k, width, dtype))

    @property
    def needs_inputs(self) -> bool:
        """Whether backward needs the inputs of forward."""
        return self.repeats or not self.keeps_rows

    @property
    def keeps_rows(self) -> bool:
        """Whether forward leaves rows to backward: those that arrived where products gather them, else the sorted ones.

        Where products gather them and no rows travel, the rows that arrived are x, which the caller keeps.
        """
        return self.save_rows and (bool(self.roles.ep) or self.frozen or not self.gathers_rows(self.recipe.wi.x))

    def gathers_rows(self, format: Format | None) -> bool:
        """Returns whether products gather rows of this format from those that arrived."""
        return self.local.gathers_rows(format, *self.widths)

    @property
    def activates_h(self) -> bool:
        """Whether the product with wo takes act(h) as it is: neither weights nor a format come between.

        The product with wi may then activate.
        """
        return self.weights_at == "output" and self.recipe.wo.x is None

    @property
    def whole_tensor(self) -> bool:
        """Whether one scale holds for a whole tensor of rows, so that every pass has a collective of all tokens."""
        formats = [format for recipe in self.recipe.both for format in (recipe.x, recipe.dy)]
        return any(format is not None and format.shared for format in formats)

    @property
    def grad_dtype(self) -> np.dtype:
        """The dtype in which the gradients of weights are computed and summed."""
        return sum_dtype(self.grad_reduce, self.dtype)

    @property
    def act(self) -> Callable:
        """The activation, a function of gate and up, or of up alone."""
        return activation_of(self.activation, self.activation_limit)

    @property
    def gates(self) -> int:
        """G: the number of projections that the activation takes, 2 with a gate and 1 without."""
        return gates_of(self.activation)

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
        groups = self.local.find_groups(plan.group_sizes, self.permute.align, plan.source.shape[0])
        return dataclasses.replace(groups, expected=self.balanced)


def quantize_and_gather(
    static: BlockSpec,
    w: Weights[Array],
    layouts: Layouts,
    contracted: Contracted,
    quantized: QuantizedParams | None = None,
) -> list[Operand]:
    """Returns wi and wo for products over `contracted`: each weight is quantized on its shard, then gathered as bytes.

    The products over rows are those of forward, and the products over columns those of backward. Weights that are
    given `quantized` are gathered alone.
    """
    kept = (None, None) if quantized is None else (quantized.wi, quantized.wo)
    given = (shard if q is None else q for shard, q in zip((w.wi, w.wo), kept, strict=True))
    return [gather_one(static, i, shard, layouts, contracted) for i, shard in enumerate(given)]


def gather_one(
    static: BlockSpec, i: int, shard: Array | tuple[QShard[Array], ...], layouts: Layouts, contracted: Contracted
) -> Operand:
    """Returns wi (i = 0) or wo (i = 1) for products over `contracted`, from its shard.

    A shard that is kept quantized is a tuple: one for products over rows, then one for products over columns.
    """
    local, recipe = static.local, static.recipe.both[i]
    with jax.named_scope(("experts_in", "experts_out")[i]):
        if isinstance(shard, tuple):
            declared = find_layouts(static.roles, static.declared.wi, static.declared.wo)[i]
            return local.gather_shard(shard[contracted == "columns"], recipe, contracted, declared.gather)
        over = split_axes(layouts[i], static.roles)
        return local.quantize_and_gather(shard, recipe, contracted, layouts[i].gather, over, static.dtype)


def found_layouts(static: BlockSpec, found_specs: Weights[Spec | None]) -> Layouts:
    """Returns the layouts of wi and wo, by the specs that were found (a Weights), else by the declared specs."""
    declared = static.declared
    wi, wo = (d if f is None else f for f, d in ((found_specs.wi, declared.wi), (found_specs.wo, declared.wo)))
    return find_layouts(static.roles, wi, wo)


def weight_specs(static: BlockSpec, layouts: Layouts, w: Weights[Array]) -> Weights[Spec]:
    """Returns the spec of each weight and bias; None for a bias that is None."""
    roles = static.roles
    bi = None if w.bi is None else spec(roles.ep, None, roles.tp)
    bo = None if w.bo is None else spec(roles.ep, None)
    adapters = (getattr(specs_on(roles), name) for name in NAMES)
    low_rank = (None if value is None else own for value, own in zip(w[4:], adapters, strict=True))
    return Weights(layouts[0].spec, layouts[1].spec, bi, bo, *low_rank)


def quantized_specs(
    static: BlockSpec, w: Weights[Array], quantized: QuantizedParams[Array] | None
) -> QuantizedParams[Spec] | None:
    """Returns the specs of kept weights, which have the declared layouts of the weights w; None without them."""
    if quantized is None:
        return None
    layouts = find_layouts(static.roles, static.declared.wi, static.declared.wo)
    return kept_specs(static.recipe, static.kernels, static.roles, layouts, (w.wi.shape, w.wo.shape))


def forward_contract(static: BlockSpec, operands, found_specs) -> Contract:
    """Returns the contract of forward: tokens lie over (dp, fsdp, ep, cp).

    y is summed over tp, and the dropped assignments over all axes of tokens.
    """
    inputs, w, _, gathered = operands
    roles, layouts = static.roles, found_layouts(static, found_specs[1])
    rows, own = spec(roles.tokens, None), device_spec(roles)
    results, reduce = (rows, spec(None), spec(None), own), (roles.tp, roles.tokens, (), ())
    weights, kept = weight_specs(static, layouts, w), quantized_specs(static, *operands[1:3])
    whole = jax.tree.map(lambda _: own, gathered)
    return Contract((jax.tree.map(lambda _: rows, inputs), weights, kept, whole), results, reduce, layouts)


def backward_contract(static: BlockSpec, operands, found_specs) -> Contract:
    """Returns the contract of backward: each gradient has the layout of its array.

    The gradients of wi and wo are the terms of each device, which `wire.py` scatters.
    """
    saved, inputs, w, quantized, gathered, _ = operands
    roles, layouts = static.roles, found_layouts(static, found_specs[2])
    rows = spec(roles.tokens, None)
    weights = weight_specs(static, layouts, w)
    replicas = roles.same_experts
    own, kept = device_spec(roles), quantized_specs(static, w, quantized)
    saved, whole = jax.tree.map(lambda _: own, (saved, gathered))
    return Contract(
        (saved, jax.tree.map(lambda _: rows, inputs), weights, kept, whole, rows),
        (rows, rows, *(spec() if s is None else s for s in weights[2:]), own, own),
        (roles.tp, roles.tp, replicas, replicas + roles.tp)
        + (replicas + roles.tp, replicas, replicas, replicas + roles.tp, (), ()),
        layouts,
    )


def forward_factors(static: BlockSpec, operands):
    """Returns the Shardy rule of forward: its operands and results share the dim of tokens."""
    _, w, *own = operands
    return ("t m", "t k", "t k", *weight_factors(w), *own_dims(own)), ("t m", "o")


def backward_factors(static: BlockSpec, operands):
    """Returns the Shardy rule of backward. The dims of residuals appear in no other operand."""
    saved, inputs, w, *own, _ = operands
    given = ("t m", "t k", "t k") if inputs is not None else ()
    rule = (*own_dims(saved), *given, *weight_factors(w), *own_dims(own), "t m")
    return rule, ("t m", "t k", *weight_factors(Weights(None, None, *w[2:])))


def weight_factors(w: Weights):
    """Returns the dims of the weights that are not None in a Shardy rule.

    A bias and an adapter have dims of their own: fsdp may split a weight, which is gathered, but not these.
    """
    low_rank = "ie ih ir", "je jr jg jf", "ke kf kr", "le lr lh"
    dims = ("e h g f", "e f h", "be bg bf", "be bh", *low_rank)
    return tuple(f for f, p in zip(dims, w, strict=True) if p is not None)
