"""The block on one device: the picture of its chain, and the chain forward and reversed.

    x [T, H] --route--> experts [T, K], weights [T, K]
       |                        |
       +------ dispatch --------+        received rows [R, H], local experts [R, K], weights [R, K]
                  |
          permute, quantize              rows sorted by expert [N, H]
                  |
              matmul(wi)                 h [N, G, F]
                  |
          activate, quantize             a [N, F]
                  |
              matmul(wo)                 o [N, H]
                  |
              unpermute                  partial y [R, H], weighted
                  |
               combine                   y [T, H]

Two names on one line are one step, which an implementation may compute in one kernel. `find_hidden` and `find_partial`
are this chain on one device between dispatch and combine. `find_weight_gradients` and `find_input_gradient` are the
chain reversed. Adapters, where a caller has them, add a low-rank product beside each matmul (`adapters.py`). The router
is an op of its own and runs before the chain. `passes.py` puts the exchange around the chain and repeats both where a
routing needs it. `experts.py` runs this on a mesh, and `layer.py` has `moax.moe`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moax.block.adapters import low_rank, low_rank_gradients, plain_hidden
from moax.block.spec import BlockResiduals, BlockSpec, Weights
from moax.groups import Groups, rows_of_groups, zero_rows
from moax.kernels import Operand
from moax.mesh.collectives import keep_on_first
from moax.ops.permutation import (
    permute_backward,
    permute_forward,
    unpermute_forward,
    weights_from_rows,
)
from moax.types import Plan, Received

NOTHING: Weights[Any] = Weights(None, None, None, None)


class HiddenGradient(NamedTuple):
    """The gradient of the input of the activation, on its way to the gradient of the sorted rows.

    Attributes:
      quantized: [N, G F], the Operand for the product with wi.
      of_adapters: [N, H], the part of the gradient of the sorted rows that the adapters of wi give; None without them.
    """

    quantized: Operand
    of_adapters: Float[Array, "N H"] | None


def find_hidden(
    static: BlockSpec,
    wi: Operand,
    w: Weights[Array],
    received: Received,
    plan: Plan,
    by_row: Float[Array, " N"],
    *,
    keep: bool = True,
    activate: bool = False,
) -> tuple[BlockResiduals, Operand | None]:
    """Runs the chain from received rows [R, H] to the input of the activation [N, G, F].

    Args:
      static: the spec of the block.
      wi: the gathered weight, as `quantize_and_gather` returns it.
      w: the weights of this device's shard, of which the bias and the adapters of wi are used.
      received: the rows of a pass of the exchange, with their experts and weights.
      plan: the plan of a pass over the sorted rows of `received`.
      by_row: [N] f32, the routing weight of each sorted row.
      keep: whether the residuals have the sorted rows for the gradient of wi; otherwise their `rows` may be None.
      activate: whether `find_partial` follows, so that the product may activate.

    Returns:
      The residuals, whose field `hidden` is the input of the activation; and the activation [N, F] where the product
      computed it too, else None.
    """
    rows, kept_rows = find_rows(static, received.rows, plan, keep=keep)  # [N, H]
    groups, a = static.groups(plan), None
    with jax.named_scope("experts_in"):
        if activate and static.activates_h and w.wi_a is None:
            h, a = static.local.matmul_activate(rows, wi, groups, static.dtype, static.act, static.gates, w.bi)
        else:
            h = static.local.matmul(rows, wi, groups, static.dtype, w.bi)  # [N, G F]
            h = h if w.wi_a is None else h + low_rank(static, kept_rows, w.wi_a, w.wi_b, groups)
    h = h.reshape(h.shape[0], static.gates, -1)  # [N, G, F]
    return BlockResiduals(kept_rows, h, plan, by_row, received.slots, None), a


def find_rows(
    static: BlockSpec, received: Float[Array, "R H"], plan: Plan, *, multiply: bool = True, keep: bool = True
) -> tuple[Operand, Operand]:
    """Returns the sorted rows [N, H] of received rows [R, H], for the product with wi and for the gradient of wi.

    Where wi is frozen, the latter are not quantized: adapters multiply them.

    Args:
      static: the spec of the block.
      received: the rows of a pass of the exchange.
      plan: the plan of a pass over the sorted rows of `received`.
      multiply, keep: whether the caller takes the rows for the product and the rows for the gradient. Rows that it does
        not take may be None.
    """
    groups = static.groups(plan)
    rows, columns = static.local.gather_and_quantize(
        received, plan.source, static.recipe.wi, "x", groups, static.amax_over,
        rows=multiply, columns=keep and not static.frozen, in_products=static.gathers_rows(static.recipe.wi.x),
    )  # fmt: skip
    return rows, permute_forward(static.permute, received, plan, groups) if static.frozen else columns


def find_partial(
    static: BlockSpec,
    wo: Operand,
    w: Weights[Array],
    saved: BlockResiduals,
    a: Operand | None,
    weights: Float[Array, "R K"],
) -> Float[Array, "R H"]:
    """Runs the chain from the input of the activation to the weighted sums [R, H] over the experts of this rank.

    They are partial sums also where tp splits F.

    Args:
      static: the spec of the block.
      wo: the gathered weight, as `quantize_and_gather` returns it.
      w: the weights of this device's shard, of which the bias and the adapters of wo are used.
      saved, a: the results of `find_hidden`.
      weights: [R, K] f32, the routing weights of the received rows.
    """
    local, recipe, over = static.local, static.recipe.wo, static.amax_over + static.roles.tp
    plan, at = saved.plan, static.weights_at
    groups, by_row = static.groups(plan), saved.by_row
    early, h = at == "hidden", _weigh(saved.hidden, by_row, groups) if at == "input" else saved.hidden
    bo = None if w.bo is None else keep_on_first(w.bo, static.roles.tp)
    if a is None:
        a = local.activate(h, static.act, recipe, groups, weights=by_row if early else None, amax_over=over)  # [N, F]
    with jax.named_scope("experts_out"):
        o = local.matmul(a, wo, groups, static.dtype, None if early else bo)  # [N, H]
        o = o + _bias_rows(static, bo, groups, by_row) if early and bo is not None else o
        if w.wo_a is not None:
            o = o + low_rank(static, plain_hidden(static, h, groups, by_row if early else None), w.wo_a, w.wo_b, groups)
    return unpermute_forward(static.permute, o, plan, weights if at == "output" else None)  # [R, H]


def find_weight_gradients(
    static: BlockSpec,
    wo: Operand,
    w: Weights[Array],
    saved: BlockResiduals,
    d_partial: Float[Array, "R H"],
    total: Weights[Any] = NOTHING,
) -> tuple[HiddenGradient, Float[Array, "R K"], Weights[Array]]:
    """Runs the chain reversed to the gradient of the input of the activation, with the gradients of all weights.

    d_o is the gradient of each row before the routing weight multiplies it. The gradient of a row's weight is then
    <d_a, a>, which needs a and not o, so forward does not keep o.

    Args:
      static: the spec of the block.
      wo: the gathered weight for products over columns.
      w: the weights of this device's shard, of which the biases and the adapters are used.
      saved: the residuals of `find_hidden`.
      d_partial: [R, H], the gradient of the result of `find_partial`.
      total: gradients of the weights to which those of these rows are added; `NOTHING` returns the latter alone.

    Returns:
      What `find_input_gradient` takes, the gradients of the routing weights of the received rows [R, K], and Weights of
      the gradients of the gathered weights, or of `total` with them.
    """
    local, recipe, dtype, over = static.local, static.recipe, static.dtype, static.amax_over
    rows: Any = saved.rows
    h, plan, by_row = saved.hidden, saved.plan, saved.by_row
    groups, at_input = static.groups(plan), static.weights_at == "input"

    d_o, d_o_columns = local.gather_and_quantize(  # [N, H]
        d_partial, plan.source, recipe.wo, "dy", groups, over, columns=not static.frozen,
        in_products=static.gathers_rows(recipe.wo.dy),
    )  # fmt: skip
    with jax.named_scope("experts_out"):
        d_a = local.matmul(d_o, wo, groups, dtype, transpose=True)  # [N, F] = [N, H] [E, F, H]^T
        d_wo_a = d_wo_b = d_wi_a = d_wi_b = None
        if w.wo_a is not None:
            plain = permute_forward(static.permute, d_partial, plan, groups)
            weighted = plain_hidden(
                static, _weigh(h, by_row, groups) if at_input else h, groups, None if at_input else by_row
            )
            d_low, d_wo_a, d_wo_b = low_rank_gradients(static, weighted, w.wo_a, w.wo_b, plain, groups)
            d_a = d_a + d_low
    a, d_h, d_h_columns, d_h_plain, inner = local.activate_grad(  # [N, F], [N, G F], [N]
        _weigh(h, by_row, groups) if at_input else h, d_a, static.act, recipe, groups,
        weights=jnp.ones_like(by_row) if at_input else by_row, amax_over=over + static.roles.tp,
        keep=at_input or w.bi is not None or w.wi_a is not None,
    )  # fmt: skip
    if at_input:  # d_h_plain is the gradient of the weighted h
        inner = jnp.sum(d_h_plain.astype(jnp.float32) * h.astype(jnp.float32), axis=(1, 2))
        d_h_plain = _weigh(d_h_plain, by_row, groups)
        d_h, d_h_columns = local.quantize_for_matmul(
            d_h_plain, recipe.wi, "dy", groups, over + static.roles.tp, columns=not static.frozen
        )
    with jax.named_scope("experts_out"):
        d_wo = d_bo = None
        if not static.frozen:
            d_wo = local.wgrad(a, d_o_columns, groups, dtype, static.grad_dtype, total.wo)  # [N, F]^T [N, H]
        if w.bo is not None:
            d_bo, bias_inner = _bias_gradients(static, w.bo, d_partial, plan, groups, by_row)
            inner = inner + bias_inner
    with jax.named_scope("experts_in"):
        d_wi = d_low = None
        if not static.frozen:
            so_far = None if total.wi is None else total.wi.reshape(*total.wi.shape[:2], -1)
            d_wi = local.wgrad(rows, d_h_columns, groups, dtype, static.grad_dtype, so_far)  # [N, H]^T [N, G F]
            d_wi = d_wi.reshape(*d_wi.shape[:2], static.gates, -1)  # [E, H, G, F]
        if w.wi_a is not None:
            d_h_rows = d_h_plain.reshape(len(d_h_plain), -1)
            d_low, d_wi_a, d_wi_b = low_rank_gradients(static, rows, w.wi_a, w.wi_b, d_h_rows, groups)
        d_bi = None if w.bi is None else local.bias_grad(d_h_plain, groups)
    small = map(_add, total[2:], (d_bi, d_bo, d_wi_a, d_wi_b, d_wo_a, d_wo_b))
    gradients = Weights(cast(Array, d_wi), cast(Array, d_wo), *small)
    return HiddenGradient(d_h, d_low), weights_from_rows(plan, inner), gradients


def find_input_gradient(static: BlockSpec, wi: Operand, d_hidden: HiddenGradient, plan: Plan) -> Float[Array, "R H"]:
    """Runs the end of the chain reversed, and returns the gradient of the received rows [R, H].

    `wi` is the gathered weight for products over columns.
    """
    groups = static.groups(plan)
    with jax.named_scope("experts_in"):
        d_rows = static.local.matmul(d_hidden.quantized, wi, groups, static.dtype, transpose=True)
        d_rows = d_rows if d_hidden.of_adapters is None else d_rows + d_hidden.of_adapters  # [N, H]
    return permute_backward(static.permute, plan, d_rows)  # [R, H]


def _add(total: Array | None, more: Array | None) -> Array | None:
    """Returns the sum in the dtype of `total`, or `more` where there is no total."""
    return more if total is None or more is None else total + more.astype(total.dtype)


def _bias_rows(static: BlockSpec, bo, groups: Groups, by_row) -> Array:
    """Returns the bias of each row's expert, times the weight of the row: [N, H], 0 in padding.

    `by_row` has the weights [N].
    """
    return _weigh(rows_of_groups(bo.astype(static.dtype), groups, by_row.shape[0]), by_row, groups)


def _bias_gradients(static: BlockSpec, bo, d_partial, plan: Plan, groups: Groups, by_row) -> tuple[Array, Array]:
    """Returns the gradient of bo [E, H], and the bias's part of the gradient of each row's weight [N]."""
    d_o = permute_forward(static.permute, d_partial, plan, groups)
    bias = rows_of_groups(keep_on_first(bo, static.roles.tp).astype(static.dtype), groups, d_o.shape[0])
    inner = jnp.sum(d_o.astype(jnp.float32) * bias.astype(jnp.float32), axis=-1)
    d_o = keep_on_first(_weigh(d_o, by_row, groups), static.roles.tp)
    return static.local.bias_grad(d_o, groups), inner


def _weigh(rows, by_row, groups: Groups) -> Array:
    """Returns each real row [N, ...] times its weight, multiplied in float32 and returned in the dtype of the rows.

    Padding is 0.
    """
    weights = jnp.expand_dims(by_row, tuple(range(1, rows.ndim)))
    return zero_rows(rows.astype(jnp.float32) * weights, groups.real).astype(rows.dtype)
