"""The experts of a block on one device: `forward` and `backward`, each a chain of steps.

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
`overflow.py` runs further rounds for tokens that find no room in the buffers, `experts.py` runs the chunks of a
device's tokens on a mesh, and `layer.py` has `moax.moe`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from moax.config import Activation, gates_of
from moax.exchange.transport import ExchangeSpec
from moax.groups import Groups, rows_of_groups, zero_rows
from moax.kernels import DEFAULT, Operand, Role, implementation
from moax.mesh.axes import ResolvedAxes
from moax.mesh.collectives import mask_to_first_rank
from moax.ops.activation import activation_of
from moax.ops.dispatch_combine import combine_backward, combine_forward, dispatch_backward, dispatch_forward
from moax.ops.permutation import (
    PermuteSpec,
    permute_forward,
    plan_rows,
    unpermute_forward,
    weights_from_rows,
)
from moax.ops.weights import WeightSpec
from moax.recipe import FULL, Recipes
from moax.types import Plan, Received, SendPlan


class Inputs(NamedTuple):
    """The inputs of the experts: tokens x [T, H], experts [T, K] i32, routing weights [T, K] f32."""

    x: Float[Array, "T H"]
    experts: Int[Array, "T K"]
    weights: Float[Array, "T K"]


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
      overflow: [3] i32, the rounds that are left, see `overflow.py`; None where there are none by any routing.
    """

    rows: Operand | None
    h: Float[Array, "N G F"]
    plan: Plan
    row_weights: Float[Array, " N"]
    sent: Int[Array, " C"] | SendPlan | None
    overflow: Int[Array, " 3"] | None = None


class Round(NamedTuple):
    """The buffers of a round, and the first of its slots and of its sorted rows.

    Attributes:
      exchange, permute: the specs of dispatch and combine, and of permute and unpermute.
      index, start: the round of the exchange, and the first sorted row.
    """

    exchange: ExchangeSpec
    permute: PermuteSpec
    index: int | Int[Array, ""] = 0
    start: int | Int[Array, ""] = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """The static facts of the experts of a block.

    Attributes:
      activation, activation_limit, weights_at: see `MoEConfig`.
      recipe: the formats of the operands of the products with wi and with wo.
      axes, wi, wo: the mesh axes by role, and the static facts of both weights.
      dtype, grad_dtype, kernels: the dtypes of products and of gradients of weights; the implementation's name.
      first, later, overflows: the buffers of the first round, and of all others; whether a routing may need others.
      chunks: the chunks of a device's tokens, see `experts.py`; the buffers and all other sizes are for one chunk.
      balanced: the sorted rows of a rank at a balanced load, without padding.
      save_rows: whether forward leaves rows to backward: the received rows where products gather them, else the sorted
        ones. If the products gather them and ep is 1, the received rows are x, so nothing is saved.
      frozen: whether wi and wo have no gradient. The sorted rows that forward leaves are then not quantized.
      gathers_x, gathers_dy: whether products gather received rows, and gradients of partial sums, by themselves.
      activates: whether the product with wi may activate: neither weights nor a format come between h and a.
    """

    activation: Activation
    activation_limit: float | None
    weights_at: str
    recipe: Recipes
    axes: ResolvedAxes
    wi: WeightSpec
    wo: WeightSpec
    dtype: np.dtype
    grad_dtype: np.dtype
    kernels: str
    first: Round
    later: Round
    overflows: bool
    chunks: int
    balanced: int
    save_rows: bool
    frozen: bool
    gathers_x: bool
    gathers_dy: bool
    activates: bool


class Hooks(NamedTuple):
    """What runs between the steps of a chain. Each hook takes and returns the values that pass by.

    Attributes:
      received: (Received, rounds) after dispatch.
      between: the values between the two products: (residuals, a) in forward, (d_h, gradients of weights) in backward.
      result: what travels back: partial y in forward, the gradients of the received rows and weights in backward.
    """

    received: Callable[[Received, Array], Received] = lambda received, rounds: received
    between: Callable[[Any, Any], tuple[Any, Any]] = lambda first, second: (first, second)
    result: Callable[[Any], Any] = lambda returned: returned


NO_HOOKS, NO_TOTAL = Hooks(), Weights(None, None)


def forward_up(
    p: BlockPlan, at: Round, inputs: Inputs, w: Weights[Array], wi: Operand, hooks: Hooks = NO_HOOKS, *, keep: bool
) -> tuple[Received, Residuals, Operand | None]:
    """Runs `forward` up to h, and to a if one kernel computes both; `keep` saves rows for the gradient of wi."""
    received, rounds = dispatch_forward(at.exchange, *inputs, at.index)  # rows [R, H]
    received = hooks.received(received, rounds)
    # The barriers keep XLA from running a kernel twice whose result a scan stores.
    plan, row_weights = lax.optimization_barrier(plan_rows(at.permute, received.experts, received.weights, at.start))
    groups = find_groups(p, plan)
    rows, columns = permute_quantize(p, received.rows, plan, groups, "x", columns=keep)  # [N, H]
    h, a = expert_up(p, rows, columns, wi, w, groups)  # [N, G, F]
    saved = Residuals(columns if keep else None, lax.optimization_barrier(h), plan, row_weights, received.slots)
    return received, saved, a


def forward(
    p: BlockPlan, at: Round, inputs: Inputs, w: Weights[Array], wi: Operand, wo: Operand, hooks: Hooks = NO_HOOKS
) -> tuple[Float[Array, "T H"], Int[Array, " 1"], Residuals]:
    """Runs one round of forward, with wi and wo gathered for products over rows, and the biases and adapters of `w`.

    Returns y [T, H], a partial sum where tp splits F; the assignments that found no room in any round [1]; the
    residuals.
    """
    received, saved, a = forward_up(p, at, inputs, w, wi, hooks, keep=p.save_rows)
    saved, a = hooks.between(saved, a)
    groups = find_groups(p, saved.plan)
    a = activate(p, saved.h, saved.row_weights, groups) if a is None else a  # [N, F]
    o = expert_down(p, a, saved.h, saved.row_weights, wo, w, groups)  # [N, H]
    weights = received.weights if p.weights_at == "output" else None
    partial = hooks.result(unpermute_forward(at.permute, o, saved.plan, weights))  # [R, H]
    y = combine_forward(at.exchange, partial, received.slots)  # [T, H]
    # XLA would merge the sum of returned rows with a sum of the caller, in another order.
    return lax.optimization_barrier(y), received.dropped + saved.plan.dropped, saved


def backward(
    p: BlockPlan, at: Round, saved: Residuals, x: Array | None, w: Weights[Array], wi: Operand, wo: Operand,
    dy: Float[Array, "T H"], hooks: Hooks = NO_HOOKS, total: Weights[Any] = NO_TOTAL,
) -> tuple[Float[Array, "T H"], Float[Array, "T K"], Weights[Array]]:  # fmt: skip
    """Runs the chain of `forward` reversed, with wi and wo gathered for products over columns.

    d_o is the gradient of each row before the routing weight multiplies it. The gradient of a row's weight is then
    <d_a, a>, which needs a and not o, so forward does not save o. The tokens x are read where no rows were saved.

    Returns dx [T, H]; the gradient of the routing weights [T, K]; and the gradients of the gathered weights, added to
    `total`.
    """
    columns, h, plan, row_weights, sent, _ = saved
    groups = find_groups(p, plan)
    if columns is None and x is not None:
        received = combine_backward(at.exchange, x, sent)  # the rows that dispatch delivered
        columns = permute_quantize(p, received, plan, groups, "x", rows=False)[1]  # [N, H]
    d_partial = combine_backward(at.exchange, dy, sent)  # [R, H]
    d_o, d_o_columns = permute_quantize(p, d_partial, plan, groups, "dy", columns=not p.frozen)  # [N, H]
    d_a, *d_wo_ab = expert_down_grad(p, d_o, d_partial, saved, wo, w, groups)  # [N, F]
    a, d_h, d_h_columns, d_h_plain, inner = activate_grad(p, saved, d_a, w, groups)  # [N, F], [N, G F], [N]
    d_bo, inner = down_bias_grad(p, d_partial, saved, inner, w, groups)
    d_wo = weight_grad(p, "expert_down", a, d_o_columns, groups, total.wo)  # [N, F]^T [N, H]
    d_wi = weight_grad(p, "expert_up", columns, d_h_columns, groups, total.wi)  # [N, H]^T [N, G F]
    d_bi = None if w.bi is None or d_h_plain is None else implementation(p.kernels).bias_grad(d_h_plain, groups)
    d_low, *d_wi_ab = low_rank_grad(p, columns, w.wi_a, w.wi_b, d_h_plain, groups)
    small = map(_add, total[2:], (d_bi, d_bo, *d_wi_ab, *d_wo_ab))
    (d_h, d_low), dw = hooks.between((d_h, d_low), Weights(d_wi, d_wo, *small))
    d_rows = expert_up_grad(p, d_h, d_low, wi, groups)  # [N, H]
    received = unpermute_forward(at.permute, d_rows, plan), weights_from_rows(plan, inner)  # [R, H], [R, K]
    dx, d_weights = dispatch_backward(at.exchange, sent, *hooks.result(received))
    return lax.optimization_barrier(dx), d_weights, dw


def find_groups(p: BlockPlan, plan: Plan) -> Groups:
    """Returns the groups of the sorted rows of a plan."""
    groups = implementation(p.kernels).find_groups(plan.group_sizes, p.first.permute.align, plan.gather_idx.shape[0])
    return dataclasses.replace(groups, expected=p.balanced)


def permute_quantize(
    p: BlockPlan, received: Float[Array, "R H"], plan: Plan, groups: Groups, role: Role, **wanted: bool
) -> tuple[Operand, Operand]:
    """Returns the sorted rows for a product over columns and for wgrad; `wanted` says which the caller takes."""
    recipe, gathers = (p.recipe.wi, p.gathers_x) if role == "x" else (p.recipe.wo, p.gathers_dy)
    plain = p.frozen and role == "x"  # adapters multiply these rows, and no gradient of wi does
    wanted = wanted | {"columns": False} if plain else wanted
    rows, columns = implementation(p.kernels).gather_and_quantize(
        received, plan.gather_idx, recipe, role, groups, p.axes.tokens, in_products=gathers, **wanted
    )
    return rows, permute_forward(p.first.permute, received, plan, groups) if plain else columns


def expert_up(p: BlockPlan, rows: Operand, columns: Operand, wi: Operand, w: Weights[Array], groups: Groups):
    """Returns h = rows wi + bi [N, G, F], and a = act(h) where the product computes it too, else None."""
    local, gates, a = implementation(p.kernels), gates_of(p.activation), None
    with jax.named_scope("expert_up"):
        if p.activates and w.wi_a is None:
            act = activation_of(p.activation, p.activation_limit)
            h, a = local.matmul_activate(rows, wi, groups, p.dtype, act, gates, w.bi)
        else:
            h = local.matmul(rows, wi, groups, p.dtype, w.bi)
            h = h if w.wi_a is None else h + low_rank(p, columns, w.wi_a, w.wi_b, groups)
    return h.reshape(h.shape[0], gates, -1), a


def activate(p: BlockPlan, h: Float[Array, "N G F"], row_weights: Float[Array, " N"], groups: Groups) -> Operand:
    """Returns the Operand [N, F] of act(h), times the weight of each row where weights multiply before the product."""
    h = _weigh(h, row_weights, groups) if p.weights_at == "input" else h
    weights, over = row_weights if p.weights_at == "hidden" else None, p.axes.tokens + p.axes.tp
    act = activation_of(p.activation, p.activation_limit)
    return implementation(p.kernels).activate(h, act, p.recipe.wo, groups, weights=weights, amax_over=over)


def expert_down(p: BlockPlan, a: Operand, h, row_weights, wo: Operand, w: Weights[Array], groups: Groups) -> Array:
    """Returns o = a wo + bo [N, H], a partial sum where tp splits F."""
    early = p.weights_at == "hidden"
    bo = None if w.bo is None else mask_to_first_rank(w.bo, p.axes.tp)
    with jax.named_scope("expert_down"):
        o = implementation(p.kernels).matmul(a, wo, groups, p.dtype, None if early else bo)
        if early and bo is not None:
            o = o + _weigh(rows_of_groups(bo.astype(p.dtype), groups, len(o)), row_weights, groups)
        return o if w.wo_a is None else o + low_rank(p, _plain_a(p, h, row_weights, groups), w.wo_a, w.wo_b, groups)


def expert_down_grad(p: BlockPlan, d_o: Operand, d_partial, saved: Residuals, wo: Operand, w: Weights, groups: Groups):
    """Returns d_a = d_o wo^T [N, F] before the weight of a row multiplies it, and the gradients of wo's adapters."""
    with jax.named_scope("expert_down"):
        d_a = implementation(p.kernels).matmul(d_o, wo, groups, p.dtype, transpose=True)  # [N, H] [E, F, H]^T
        if w.wo_a is None:
            return d_a, None, None
        a = _plain_a(p, saved.h, saved.row_weights, groups, weighted=True)
        plain = permute_forward(p.first.permute, d_partial, saved.plan, groups)
        d_low, *d_ab = low_rank_grad(p, a, w.wo_a, w.wo_b, plain, groups)
        return d_a if d_low is None else d_a + d_low.astype(d_a.dtype), *d_ab


def activate_grad(p: BlockPlan, saved: Residuals, d_a: Float[Array, "N F"], w: Weights[Array], groups: Groups):
    """Returns a for wgrad, d_h for dgrad and for wgrad, d_h unquantized or None, and inner [N] = <d_a, a>."""
    local, over = implementation(p.kernels), p.axes.tokens + p.axes.tp
    act = activation_of(p.activation, p.activation_limit)
    h, row_weights, recipe = saved.h, saved.row_weights, p.recipe
    if p.weights_at != "input" and w.bi is None and w.wi_a is None:
        a, d_rows, d_columns, inner = local.activate_grad_quantize(
            h, d_a, act, recipe, groups, weights=row_weights, amax_over=over
        )
        return a, d_rows, d_columns, None, inner
    if p.weights_at == "input":
        a, d_h, _ = local.activate_grad(_weigh(h, row_weights, groups), d_a, act, groups, jnp.ones_like(row_weights))
        inner = jnp.sum(d_h.astype(jnp.float32) * h.astype(jnp.float32), axis=(1, 2))
        d_h = _weigh(d_h, row_weights, groups)
    else:
        a, d_h, inner = local.activate_grad(h, d_a, act, groups, row_weights)
    _, a = local.quantize_for_matmul(a, recipe.wo, "x", groups, over, rows=False)
    d_rows, d_columns = local.quantize_for_matmul(d_h, recipe.wi, "dy", groups, over, columns=not p.frozen)
    return a, d_rows, d_columns, d_h, inner


def weight_grad(p: BlockPlan, scope: str, x: Operand, dy: Operand, groups: Groups, total: Array | None):
    """Returns x^T dy for each expert, added to `total`; None where the weight is frozen."""
    if p.frozen:
        return None
    with jax.named_scope(scope):
        so_far = None if total is None else total.reshape(*total.shape[:2], -1)
        dw = implementation(p.kernels).wgrad(x, dy, groups, p.dtype, p.grad_dtype, so_far)
        gates = gates_of(p.activation)
        return dw.reshape(*dw.shape[:2], gates, -1) if scope == "expert_up" else dw


def expert_up_grad(p: BlockPlan, d_h: Operand, d_low: Array | None, wi: Operand, groups: Groups) -> Array:
    """Returns the gradient of the sorted rows [N, H] = [N, G F] [E, H, G F]^T."""
    with jax.named_scope("expert_up"):
        d_rows = implementation(p.kernels).matmul(d_h, wi, groups, p.dtype, transpose=True)
        return d_rows if d_low is None else d_rows + d_low


def down_bias_grad(p: BlockPlan, d_partial, saved: Residuals, inner, w: Weights[Array], groups: Groups):
    """Returns the gradient of bo [E, H], and `inner` with the bias's part of the gradient of each row's weight."""
    if w.bo is None:
        return None, inner
    d_o = permute_forward(p.first.permute, d_partial, saved.plan, groups)
    bias = rows_of_groups(mask_to_first_rank(w.bo, p.axes.tp).astype(p.dtype), groups, d_o.shape[0])
    inner = inner + jnp.sum(d_o.astype(jnp.float32) * bias.astype(jnp.float32), axis=-1)
    d_o = mask_to_first_rank(_weigh(d_o, saved.row_weights, groups), p.axes.tp)
    return implementation(p.kernels).bias_grad(d_o, groups), inner


def low_rank(p: BlockPlan, x: Float[Array, "N K"], a: Array, b: Array, groups: Groups) -> Float[Array, "N C"]:
    """Returns (x a) b of an adapter, a partial sum where mesh axes split K; a rank is small, so XLA multiplies."""
    local = implementation(DEFAULT)
    return local.matmul(local.matmul(x, a, groups, p.dtype), b.reshape(*b.shape[:2], -1), groups, p.dtype)


def low_rank_grad(p: BlockPlan, x: Any, a: Array | None, b: Array | None, dy: Any, groups: Groups):
    """Returns dx, d_a and d_b of an adapter: (dy b^T) a^T, x^T (dy b^T) and (x a)^T dy; None without one."""
    if a is None or b is None:
        return None, None, None
    local, flat, dy = implementation(DEFAULT), b.reshape(*b.shape[:2], -1), dy.reshape(len(dy), -1)
    low, d_low = local.matmul(x, a, groups, p.dtype), local.matmul(dy, flat, groups, p.dtype, transpose=True)
    d_b = local.wgrad(low, dy, groups, p.dtype).reshape(b.shape)
    return local.matmul(d_low, a, groups, p.dtype, transpose=True), local.wgrad(x, d_low, groups, p.dtype), d_b


def _plain_a(p: BlockPlan, h, row_weights, groups: Groups, *, weighted: bool = False) -> Float[Array, "N F"]:
    """Returns act(h) unquantized, times the weight of each row where it multiplies before wo, or if `weighted`."""
    at_input = p.weights_at == "input"
    h = _weigh(h, row_weights, groups) if at_input else h
    weights = row_weights if not at_input and (weighted or p.weights_at == "hidden") else None
    act = activation_of(p.activation, p.activation_limit)
    return implementation(DEFAULT).activate(h, act, FULL, groups, weights=weights, amax_over=())


def _add(total: Array | None, more: Array | None) -> Array | None:
    return more if total is None or more is None else total + more.astype(total.dtype)


def _weigh(rows: Array, row_weights: Float[Array, " N"], groups: Groups) -> Array:
    """Returns each real row [N, ...] times its weight, multiplied in float32; padding is 0."""
    weights = jnp.expand_dims(row_weights, tuple(range(1, rows.ndim)))
    return zero_rows(rows.astype(jnp.float32) * weights, groups.real).astype(rows.dtype)
