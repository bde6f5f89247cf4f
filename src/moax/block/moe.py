"""The experts of a block on one device: forward and backward, each a chain of steps in two halves.

    x [T, H] --route--> experts [T, K], weights [T, K]
       |                        |
       +------ dispatch --------+        received rows [R, H], local experts [R, K], weights [R, K]
                  |
          permute, quantize              rows sorted by expert [N, H]
                  |
              expert_up                  h [N, G, F] = rows wi
                  |
          activate, quantize             a [N, F]
                  |
             expert_down                 o [N, H] = a wo
                  |
              unpermute                  partial y [R, H], weighted
                  |
               combine                   y [T, H]

Two names on one line are one step, which an implementation may compute in one kernel. The router runs before the chain.
`forward_up` ends with h, and `forward_down` begins there. `experts.py` runs the dispatch and both halves for the chunks
of a device's tokens on a mesh, and again for tokens that find no room in the buffers. `layer.py` has `moax.moe`.

`make_plan`, below the chain, decides all that is static: transport, implementation and the sizes of all buffers.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moax.checks import Unsupported
from moax.config import MoEConfig, Options
from moax.exchange import AUTO, TRANSPORTS
from moax.exchange.transport import ExchangeSpec, allot_slots
from moax.kernels import DEFAULT, Operand, Role, implementation, select_kernels
from moax.kernels.groups import Groups, allot_rows, scale_rows
from moax.mesh.axes import ResolvedAxes
from moax.mesh.collectives import mask_to_first_rank
from moax.mesh.specs import Spec
from moax.ops.activation import activation_of
from moax.ops.dispatch_combine import combine_backward, combine_forward, dispatch_backward
from moax.ops.permutation import (
    PermuteSpec,
    permute_forward,
    plan_rows,
    sorted_rows,
    unpermute_forward,
    weights_from_rows,
)
from moax.ops.weights import WeightSpec
from moax.params import MoEParams
from moax.recipe import FULL, Recipes, get_recipes
from moax.types import Plan, Received, SendPlan


class Weights[Leaf](NamedTuple):
    """The weights of the experts: wi [E, H, G, F], wo [E, F, H], and the biases bi [E, G, F] and bo [E, H] or None.

    The other fields come from `moax.lora.Adapters`, or are None. Gradients of frozen wi and wo are None.
    """

    wi: Leaf
    wo: Leaf
    bi: Leaf | None = None
    bo: Leaf | None = None
    wi_a: Any = None
    wi_b: Any = None
    wo_a: Any = None
    wo_b: Any = None


class Residuals(NamedTuple):
    """The arrays that forward leaves to backward, on one device.

    Attributes:
      rows: the sorted rows, as the implementation's `wgrad` takes them; None where backward sorts them again.
      h: [N, G, F], the input of the activation.
      plan: the permutation of the received rows.
      row_weights: [N] f32, the routing weight of each sorted row, 0 in padding.
      sent: the plan of the transport, `Received.slots`.
      overflow: [3] i32, the rounds that are left, see `experts.py`; None where there are none by any routing.
    """

    rows: Operand | None
    h: Float[Array, "N G F"]
    plan: Plan
    row_weights: Float[Array, " N"]
    sent: Int[Array, " C"] | SendPlan | None
    overflow: Int[Array, " 3"] | None = None


def forward_up(
    p: BlockPlan, at: Round, received: Received, w: Weights[Array], wi: Operand, *, keep: bool, start=0
) -> tuple[Residuals, Groups, Operand | None]:
    """Runs the first half of the chain, with wi gathered for products over rows, and the biases and adapters of `w`.

    The round has the sorted rows from `start` on, and `keep` saves rows for the gradient of wi. Returns the residuals,
    the groups of the sorted rows, and a if one kernel computes h and a.
    """
    # The barriers keep XLA from running a kernel twice whose result a scan stores.
    plan, row_weights = lax.optimization_barrier(plan_rows(at.permute, received.experts, received.weights, start))
    sizes, num_rows = plan.group_sizes, plan.gather_idx.shape[0]
    groups = implementation(p.kernels).find_groups(sizes, at.permute.align, num_rows, p.expected)
    rows, columns = permute_quantize(p, received.rows, plan, groups, "x", columns=keep)  # [N, H]
    h, a = expert_up(p, rows, columns, wi, w, groups)  # [N, G, F]
    saved = Residuals(columns if keep else None, lax.optimization_barrier(h), plan, row_weights, received.slots)
    return saved, groups, a


def forward_down(
    p: BlockPlan, at: Round, received: Received, saved: Residuals, groups: Groups, a: Operand | None,
    w: Weights[Array], wo: Operand,
) -> tuple[Float[Array, "T H"], Int[Array, " 1"]]:  # fmt: skip
    """Runs the second half of the chain.

    Returns y [T, H], a partial sum where tp splits F; and the assignments that found no room in any round [1].
    """
    a = activate(p, saved, groups) if a is None else a  # [N, F]
    o = expert_down(p, a, saved, wo, w, groups)  # [N, H]
    weights = received.weights if p.config.weights_at == "output" else None
    partial = unpermute_forward(at.permute, o, saved.plan, weights)  # [R, H]
    y = combine_forward(at.exchange, partial, received.slots)  # [T, H]
    # XLA would merge the sum of returned rows with a sum of the caller, in another order.
    return lax.optimization_barrier(y), received.dropped + saved.plan.dropped


def backward_down(
    p: BlockPlan, at: Round, saved: Residuals, groups: Groups, x: Array | None, w: Weights[Array], wo: Operand,
    dy: Float[Array, "T H"], total: Weights[Any],
) -> tuple[tuple[Operand, Array | None, Array], Weights[Any]]:  # fmt: skip
    """Runs the second half of the chain reversed, with wo gathered for products over columns.

    d_o is the gradient of each row before the routing weight multiplies it. The gradient of a row's weight is then
    <d_a, a>, which needs a and not o, so forward does not save o. The tokens x are read where no rows were saved.

    Returns what `backward_up` takes, and the gradients of the gathered weights, added to `total`.
    """
    columns, plan, sent = saved.rows, saved.plan, saved.sent
    if columns is None and x is not None:
        received = combine_backward(at.exchange, x, sent)  # the rows that dispatch delivered
        columns = permute_quantize(p, received, plan, groups, "x", rows=False)[1]  # [N, H]
    d_partial = combine_backward(at.exchange, dy, sent)  # [R, H]
    d_o, d_o_columns = permute_quantize(p, d_partial, plan, groups, "dy", columns=not p.frozen)  # [N, H]
    d_a, of_bo, d_bo, *d_wo_ab = expert_down_grad(p, d_o, d_partial, saved, wo, w, groups)  # [N, F]
    a, d_h, d_h_columns, d_h_plain, inner = activate_grad(p, saved, d_a, w, groups)  # [N, F], [N, G F], [N]
    d_wo = weight_grad(p, "expert_down", a, d_o_columns, groups, total.wo)  # [N, F]^T [N, H]
    d_wi = weight_grad(p, "expert_up", columns, d_h_columns, groups, total.wi)  # [N, H]^T [N, G F]
    d_bi = None if w.bi is None or d_h_plain is None else implementation(p.kernels).bias_grad(d_h_plain, groups)
    d_low, *d_wi_ab = low_rank_grad(p, columns, w.wi_a, w.wi_b, d_h_plain, groups)
    small = map(_add, total[2:], (d_bi, d_bo, *d_wi_ab, *d_wo_ab))
    return (d_h, d_low, inner if of_bo is None else inner + of_bo), Weights(d_wi, d_wo, *small)


def backward_up(
    p: BlockPlan, at: Round, saved: Residuals, groups: Groups, grads: tuple[Operand, Array | None, Array], wi: Operand
) -> tuple[Float[Array, "T H"], Float[Array, "T K"]]:
    """Runs the first half of the chain reversed; returns dx [T, H] and the gradient of the routing weights [T, K]."""
    d_h, d_low, inner = grads
    with jax.named_scope("expert_up"):  # [N, G F] [E, H, G F]^T
        d_rows = implementation(p.kernels).matmul(d_h, wi, groups, p.dtype, transpose=True)
        d_rows = d_rows if d_low is None else d_rows + d_low  # [N, H]
    received = unpermute_forward(at.permute, d_rows, saved.plan), weights_from_rows(saved.plan, inner)  # [R, H], [R, K]
    dx, d_weights = dispatch_backward(at.exchange, saved.sent, *received)
    return lax.optimization_barrier(dx), d_weights


def permute_quantize(
    p: BlockPlan, received: Float[Array, "R H"], plan: Plan, groups: Groups, role: Role, **wanted: bool
) -> tuple[Operand, Operand]:
    """Returns the sorted rows for a product over columns and for wgrad; `wanted` says which the caller takes."""
    recipe, gathers = (p.recipe.wi, p.gathers_x) if role == "x" else (p.recipe.wo, p.gathers_dy)
    plain = p.frozen and role == "x"  # adapters multiply these rows, and no gradient of wi does
    wanted = wanted | {"columns": False} if plain else wanted
    rows, columns = implementation(p.kernels).quantize_for_matmul(
        received, recipe, role, groups, p.axes.tokens, gather_idx=plan.gather_idx, in_products=gathers, **wanted
    )
    return rows, permute_forward(p.first.permute, received, plan, groups) if plain else columns


def expert_up(p: BlockPlan, rows: Operand, columns: Operand, wi: Operand, w: Weights[Array], groups: Groups):
    """Returns h = rows wi + bi [N, G, F], and a = act(h) where the product computes it too, else None."""
    local, gates, a = implementation(p.kernels), p.config.gates, None
    with jax.named_scope("expert_up"):
        if p.config.weights_at == "output" and p.recipe.wo.x is None and w.wi_a is None:
            act = activation_of(p.config.activation, p.config.activation_limit)
            h, a = local.matmul_activate(rows, wi, groups, p.dtype, act, gates, w.bi)
        else:
            h = local.matmul(rows, wi, groups, p.dtype, w.bi)
            h = h if w.wi_a is None else h + low_rank(p, columns, w.wi_a, w.wi_b, groups)
    return h.reshape(h.shape[0], gates, -1), a


def activate(p: BlockPlan, saved: Residuals, groups: Groups, *, plain: bool = False, weigh: bool = False) -> Operand:
    """Returns the Operand [N, F] of act(h), `plain` if unquantized, times the weight of each row before the product.

    Weights at the output multiply act(h) only if the caller says `weigh`.
    """
    at = p.config.weights_at
    h = scale_rows(saved.h, saved.row_weights, groups) if at == "input" else saved.h
    weights = saved.row_weights if at == "hidden" or (weigh and at == "output") else None
    kernels, recipe, over = (DEFAULT, FULL, ()) if plain else (p.kernels, p.recipe.wo, p.axes.tokens + p.axes.tp)
    act = activation_of(p.config.activation, p.config.activation_limit)
    return implementation(kernels).activate(h, act, recipe, groups, weights=weights, amax_over=over)


def expert_down(p: BlockPlan, a: Operand, saved: Residuals, wo: Operand, w: Weights[Array], groups: Groups) -> Array:
    """Returns o = a wo + bo [N, H], a partial sum where tp splits F."""
    early = p.config.weights_at == "hidden"
    bo = None if w.bo is None else mask_to_first_rank(w.bo, p.axes.tp)
    with jax.named_scope("expert_down"):
        o = implementation(p.kernels).matmul(a, wo, groups, p.dtype, None if early else bo)
        if early and bo is not None:
            o = o + scale_rows(bo.astype(p.dtype)[groups.index], saved.row_weights, groups)
        return o if w.wo_a is None else o + low_rank(p, activate(p, saved, groups, plain=True), w.wo_a, w.wo_b, groups)


def expert_down_grad(p: BlockPlan, d_o: Operand, d_partial, saved: Residuals, wo: Operand, w: Weights, groups: Groups):
    """Returns d_a = d_o wo^T [N, F], <d_o, bo> [N], and the gradients of bo and of wo's adapters."""
    local, of_bo, d_bo = implementation(p.kernels), None, None
    with jax.named_scope("expert_down"):
        d_a = local.matmul(d_o, wo, groups, p.dtype, transpose=True)  # [N, H] [E, F, H]^T
        if w.bo is None and w.wo_a is None:
            return d_a, None, None, None, None
        d_o = permute_forward(p.first.permute, d_partial, saved.plan, groups)
        a = None if w.wo_a is None else activate(p, saved, groups, plain=True, weigh=True)
        d_low, *d_ab = low_rank_grad(p, a, w.wo_a, w.wo_b, d_o, groups)
        if w.bo is not None:
            bo = mask_to_first_rank(w.bo, p.axes.tp).astype(p.dtype)[groups.index]
            of_bo = jnp.sum(d_o.astype(jnp.float32) * bo.astype(jnp.float32), axis=-1)
            d_o = mask_to_first_rank(scale_rows(d_o, saved.row_weights, groups), p.axes.tp)
            d_bo = local.bias_grad(d_o, groups)
        return d_a if d_low is None else d_a + d_low.astype(d_a.dtype), of_bo, d_bo, *d_ab


def activate_grad(p: BlockPlan, saved: Residuals, d_a: Float[Array, "N F"], w: Weights[Array], groups: Groups):
    """Returns a for wgrad, d_h for dgrad and for wgrad, d_h unquantized or None, and inner [N] = <d_a, a>."""
    local, over, at_input = implementation(p.kernels), p.axes.tokens + p.axes.tp, p.config.weights_at == "input"
    h, row_weights, recipe = saved.h, saved.row_weights, p.recipe
    act = activation_of(p.config.activation, p.config.activation_limit)
    if not at_input and w.bi is None and w.wi_a is None:
        made = local.activate_grad_quantize(h, d_a, act, recipe, groups, weights=row_weights, amax_over=over)
        return *made[:3], None, made[3]
    given = (scale_rows(h, row_weights, groups), jnp.ones_like(row_weights)) if at_input else (h, row_weights)
    a, d_h, inner = local.activate_grad(given[0], d_a, act, groups, given[1])
    if at_input:
        inner = jnp.sum(d_h.astype(jnp.float32) * h.astype(jnp.float32), axis=(1, 2))
        d_h = scale_rows(d_h, row_weights, groups)
    _, a = local.quantize_for_matmul(a, recipe.wo, "x", groups, over, rows=False)
    d_rows, d_columns = local.quantize_for_matmul(d_h, recipe.wi, "dy", groups, over, columns=not p.frozen)
    return a, d_rows, d_columns, d_h, inner


def weight_grad(p: BlockPlan, scope: str, x: Operand, dy: Operand, groups: Groups, total: Array | None):
    """Returns x^T dy for each expert, added to `total`; None where the weight is frozen."""
    if p.frozen:
        return None
    with jax.named_scope(scope):
        so_far = None if total is None else total.reshape(*total.shape[:2], -1)
        dw = implementation(p.kernels).wgrad(x, dy, groups, p.dtype, p.wi.grad_dtype, so_far)
        return dw.reshape(*dw.shape[:2], p.config.gates, -1) if scope == "expert_up" else dw


def low_rank(p: BlockPlan, x: Float[Array, "N K"], a: Array, b: Array, groups: Groups) -> Float[Array, "N C"]:
    """Returns (x a) b of an adapter, a partial sum where mesh axes split K; a rank is small, so XLA multiplies."""
    local = implementation(DEFAULT)
    return local.matmul(local.matmul(x, a, groups, p.dtype), b.reshape(*b.shape[:2], -1), groups, p.dtype)


def low_rank_grad(p: BlockPlan, x: Any, a: Array | None, b: Array | None, dy: Any, groups: Groups):
    """Returns dx, d_a and d_b of an adapter: (dy b^T) a^T, x^T (dy b^T) and (x a)^T dy; None without one."""
    if a is None or b is None:
        return None, None, None
    local, flat, dy = implementation(DEFAULT), b.reshape(*b.shape[:2], -1), dy.reshape(dy.shape[0], -1)
    low, d_low = local.matmul(x, a, groups, p.dtype), local.matmul(dy, flat, groups, p.dtype, transpose=True)
    d_b = local.wgrad(low, dy, groups, p.dtype).reshape(b.shape)
    return local.matmul(d_low, a, groups, p.dtype, transpose=True), local.wgrad(x, d_low, groups, p.dtype), d_b


def _add(total: Array | None, more: Array | None) -> Array | None:
    return more if total is None or more is None else total + more.astype(total.dtype)


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
      expected: the sorted rows of a device at a balanced load, without padding.
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
    expected: int
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
    align_wi, gathers_x = local.choose_rows(recipe.wi, "x", *widths.values())
    align_wo, gathers_dy = local.choose_rows(recipe.wo, "dy", *widths.values())
    align = math.lcm(align_wi, align_wo)
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
        expected=balanced,
        chunks=chunks,
        save_rows=options.save_rows and (bool(ep) or frozen or not gathers_x),
        frozen=frozen,
        gathers_x=gathers_x,
        gathers_dy=gathers_dy,
    )
