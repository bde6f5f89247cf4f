"""The block: the way of the data on one screen.

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

Two names on one line are one step, which an implementation may make one kernel. `find_hidden` and `find_output` are
this chain on one device; `find_gradients` is the chain reversed. The router stands before them, an op of its own;
`experts.py` puts the chain on a mesh, and `layer.py` has `moax.moe`.
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
    """Tokens [T, H] to the input of the activation [N, G, F], and how many assignments were dropped on the way."""
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
    """The activation's input to this device's part of y [T, H], a partial sum where tp splits F."""
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
    """The chain reversed: dx [T, H], d_weights [T, K], and the gradients of the gathered weights on this device.

    The gradient of a row's weight is <d_a, a>, so that o is not kept; d_o is dy before the weights multiply it.
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
            d_bo, of_bias = _bias_gradients(static, w.bo, d_partial, plan, groups, by_row)
            inner = inner + of_bias
    with jax.named_scope("experts_in"):
        d_rows = local.matmul(d_h, wi, groups, dtype, transpose=True)  # [N, H] = [N, G F] [E, H, G F]^T
        d_wi = local.wgrad(rows, d_h_columns, groups, dtype)  # [E, H, G F] = [N, H]^T [N, G F]
        d_bi = None if w.bi is None else local.bias_grad(d_h_plain, groups)
    d_received = permute_backward(static.permute, plan, d_rows)  # [R, H]
    dx, d_weights = dispatch_backward(static.exchange, sent, d_received, weights_from_rows(plan, inner), dy.shape[0])
    return dx, d_weights, Weights(d_wi.reshape(*d_wi.shape[:2], static.gates, -1), d_wo, d_bi, d_bo)


def _bias_rows(static: BlockSpec, bo, groups: Groups, by_row) -> Array:
    """The bias of each row's expert times the row's weight, [N, H]; 0 in padding."""
    return _weigh(rows_of_groups(bo.astype(static.dtype), groups, by_row.shape[0]), by_row, groups)


def _bias_gradients(static: BlockSpec, bo, d_partial, plan: Plan, groups: Groups, by_row) -> tuple[Array, Array]:
    """The gradient of bo [E, H], and what the bias adds to the gradient of each row's weight [N]."""
    first = static.roles.tp
    d_o = permute_forward(static.permute, d_partial, plan, groups)
    bias = rows_of_groups(keep_on_first(bo, first).astype(static.dtype), groups, d_o.shape[0])
    inner = jnp.sum(d_o.astype(jnp.float32) * bias.astype(jnp.float32), axis=-1)
    return static.local.bias_grad(keep_on_first(_weigh(d_o, by_row, groups), first), groups), inner


def _weigh(rows, by_row, groups: Groups) -> Array:
    """Each real row times its weight in float32, in the dtype of the rows; the others are 0."""
    return zero_rows(rows.astype(jnp.float32) * by_row[:, None], groups.real).astype(rows.dtype)
