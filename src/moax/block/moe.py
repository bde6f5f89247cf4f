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

Two names on one line are one step, which an implementation may compute in one kernel. `find_hidden` and `find_output`
are this chain on one device, and `find_gradients` is the chain reversed. The router is an op of its own and runs before
the chain. `experts.py` runs the chain on a mesh, and `layer.py` has `moax.moe`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moax.block.spec import BlockResiduals, BlockSpec, Weights
from moax.groups import Groups, rows_of_groups, zero_rows
from moax.kernels import Operand
from moax.mesh.collectives import keep_on_first
from moax.ops.activation import activation_of
from moax.ops.exchange import combine_backward, combine_forward, dispatch_backward, dispatch_forward
from moax.ops.permutation import (
    permute_backward,
    permute_forward,
    plan_rows,
    unpermute_forward,
    weights_from_rows,
    weights_of_rows,
)
from moax.types import Plan


def find_hidden(
    static: BlockSpec,
    wi: Operand,
    bi: Float[Array, "E G F"] | None,
    x: Float[Array, "T H"],
    experts: Int[Array, "T K"],
    weights: Float[Array, "T K"],
) -> tuple[BlockResiduals, Int[Array, " 1"]]:
    """Runs the chain from tokens x [T, H] to the input of the activation [N, G, F].

    Args:
      static: the spec of the block.
      wi: the gathered weight, as `quantize_and_gather` returns it. bi: [E_local, G, F] or None.
      x: [T, H]. experts: [T, K] i32, ids of the whole mesh. weights: [T, K] f32.

    Returns:
      The residuals, whose field `hidden` is the input of the activation; and the dropped assignments, [1] i32.
    """
    local, recipe, over = static.local, static.recipe, static.amax_over
    received = dispatch_forward(static.exchange, x, experts, weights)  # [R, H]
    plan = plan_rows(static.permute, received.experts)
    groups = static.groups(plan)
    rows, kept_rows = local.gather_and_quantize(received.rows, plan.source, recipe, "x", groups, over)  # [N, H]
    with jax.named_scope("experts_in"):
        h = local.matmul(rows, wi, groups, static.dtype, bi)  # [N, G F]
    h = h.reshape(h.shape[0], static.gates, -1)  # [N, G, F]
    return BlockResiduals(kept_rows, h, plan, received.weights, received.slots), received.dropped + plan.dropped


def find_output(
    static: BlockSpec, wo: Operand, bo: Float[Array, "E H"] | None, saved: BlockResiduals, tokens: int
) -> Float[Array, "T H"]:
    """Runs the chain from the input of the activation to y [T, H] of this device, a partial sum where tp splits F.

    Args:
      static: the spec of the block.
      wo: the gathered weight, as `quantize_and_gather` returns it. bo: [E_local, H] or None.
      saved: the residuals of `find_hidden`.
      tokens: T.
    """
    local, recipe, over = static.local, static.recipe, static.amax_over + static.roles.tp
    plan, act, early = saved.plan, activation_of(static.activation), static.weights_at == "hidden"
    groups, by_row = static.groups(plan), weights_of_rows(plan, saved.weights)
    bo = None if bo is None else keep_on_first(bo, static.roles.tp)
    a = local.activate(saved.hidden, act, recipe, groups, weights=by_row if early else None, amax_over=over)  # [N, F]
    with jax.named_scope("experts_out"):
        o = local.matmul(a, wo, groups, static.dtype, None if early else bo)  # [N, H]
        o = o + _bias_rows(static, bo, groups, by_row) if early and bo is not None else o
    partial = unpermute_forward(static.permute, o, plan, None if early else saved.weights)  # [R, H]
    return combine_forward(static.exchange, partial, saved.sent, tokens)  # [T, H]


def find_gradients(
    static: BlockSpec,
    wi: Operand,
    wo: Operand,
    w: Weights[Array],
    saved: BlockResiduals,
    dy: Float[Array, "T H"],
) -> tuple[Float[Array, "T H"], Float[Array, "T K"], Weights[Array]]:
    """Runs the chain reversed, for the gradients of one device.

    d_o is the gradient dy of each row before the routing weight multiplies it. The gradient of a row's weight is then
    <d_a, a>, which needs a and not o, so forward does not keep o.

    Args:
      static: the spec of the block.
      wi, wo: the gathered weights for products over columns.
      w: the weights of this device's shard, of which the biases are used.
      saved: the residuals of `find_hidden`.
      dy: [T, H], the gradient of y.

    Returns:
      dx [T, H], d_weights [T, K], and Weights of the gradients of the gathered weights.
    """
    local, recipe, dtype, over = static.local, static.recipe, static.dtype, static.amax_over
    rows, h, plan, weights, sent = saved
    groups, by_row = static.groups(plan), weights_of_rows(plan, weights)

    d_partial = combine_backward(static.exchange, dy, sent)  # [R, H]
    d_o, d_o_columns = local.gather_and_quantize(d_partial, plan.source, recipe, "dy", groups, over)  # [N, H]
    with jax.named_scope("experts_out"):
        d_a = local.matmul(d_o, wo, groups, dtype, transpose=True)  # [N, F] = [N, H] [E, F, H]^T
    a, d_h, d_h_columns, d_h_plain, inner = local.activate_grad(  # [N, F], [N, G F], [N]
        h, d_a, activation_of(static.activation), recipe, groups,
        weights=by_row, amax_over=over + static.roles.tp, keep=w.bi is not None,
    )  # fmt: skip
    with jax.named_scope("experts_out"):
        d_wo, d_bo = local.wgrad(a, d_o_columns, groups, dtype), None  # [E, F, H] = [N, F]^T [N, H]
        if w.bo is not None:
            d_bo, bias_inner = _bias_gradients(static, w.bo, d_partial, plan, groups, by_row)
            inner = inner + bias_inner
    with jax.named_scope("experts_in"):
        d_rows = local.matmul(d_h, wi, groups, dtype, transpose=True)  # [N, H] = [N, G F] [E, H, G F]^T
        d_wi = local.wgrad(rows, d_h_columns, groups, dtype)  # [E, H, G F] = [N, H]^T [N, G F]
        d_bi = None if w.bi is None else local.bias_grad(d_h_plain, groups)
    d_received = permute_backward(static.permute, plan, d_rows)  # [R, H]
    dx, d_weights = dispatch_backward(static.exchange, sent, d_received, weights_from_rows(plan, inner), dy.shape[0])
    return dx, d_weights, Weights(d_wi.reshape(*d_wi.shape[:2], static.gates, -1), d_wo, d_bi, d_bo)


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
    """Returns each real row times its weight, multiplied in float32 and returned in the dtype of the rows.

    Padding is 0.
    """
    return zero_rows(rows.astype(jnp.float32) * by_row[:, None], groups.real).astype(rows.dtype)
