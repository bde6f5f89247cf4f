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
`forward_up` ends with h, and `forward_down` begins there. `rounds.py` runs the dispatch and both halves, and again for
tokens that find no room in the buffers. `small_terms.py` has what biases and adapters add to a step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moax.block import small_terms
from moax.block.plan import BlockPlan, Round
from moax.block.small_terms import TermGrads, Weights
from moax.kernels import DEFAULT, Operand, Role, implementation
from moax.kernels.groups import Groups, scale_rows
from moax.ops.activation import activation_of
from moax.ops.dispatch_combine import combine_backward, combine_forward, dispatch_backward
from moax.ops.permutation import permute_forward, plan_rows, unpermute_forward, weights_from_rows
from moax.recipe import FULL
from moax.types import Plan, Received


class Residuals(NamedTuple):
    """The arrays that forward leaves to backward, on one device.

    Attributes:
      rows: the sorted rows, as the implementation's `wgrad` takes them; None where backward sorts them again.
      h: [N, G, F], the input of the activation.
      plan: the permutation of the received rows.
      row_weights: [N] f32, the routing weight of each sorted row, 0 in padding.
      sent: the plan of the transport, `Received.slots`.
      overflow: [3] i32, the rounds that are left, a `Cursor` of `rounds.py`; None where no routing has any.
    """

    rows: Operand | None
    h: Float[Array, "N G F"]
    plan: Plan
    row_weights: Float[Array, " N"]
    sent: Int[Array, " C"] | None
    overflow: Int[Array, " 3"] | None = None


class Halfway(NamedTuple):
    """What the first half of forward gives the second, and gives backward.

    Attributes:
      saved: the residuals.
      groups: the groups of the sorted rows.
      a: [N, F], act(h) where one kernel computes h and a; None where the second half computes a. Backward reads none.
    """

    saved: Residuals
    groups: Groups
    a: Operand | None = None


class HalfwayGrad(NamedTuple):
    """What the first half of backward gives the second.

    Attributes:
      d_h: [N, G F], the gradient of h as an operand of a matmul.
      d_rows_adapter: [N, H], the gradient of the sorted rows that comes from the adapter of wi; None without one.
      d_row_weights: [N] f32, the gradient of each row's routing weight.
    """

    d_h: Operand
    d_rows_adapter: Float[Array, "N H"] | None
    d_row_weights: Float[Array, " N"]


class HiddenGrad(NamedTuple):
    """The gradient of the activation.

    Attributes:
      a: [N, F], act(h) for the gradient of wo.
      d_h: [N, G F] for the gradient of the sorted rows.
      d_h_wgrad: [N, G F] for the gradient of wi.
      d_h_plain: [N, G, F], unquantized; None where nothing reads it.
      d_row_weights: [N] f32, <d_a, a>.
    """

    a: Operand
    d_h: Operand
    d_h_wgrad: Operand
    d_h_plain: Float[Array, "N G F"] | None
    d_row_weights: Float[Array, " N"]


def forward_up(
    p: BlockPlan, buffers: Round, received: Received, w: Weights[Operand], *, keep: bool, start=0
) -> Halfway:
    """Runs the first half of the chain, with wi gathered for fprop.

    The round has the sorted rows from `start` on, and `keep` saves rows for the gradient of wi.
    """
    # Without the barriers XLA runs a kernel twice whose result a scan stores and the second half reads.
    planned = plan_rows(buffers.permute, received.experts, received.weights, start)
    plan, row_weights = lax.optimization_barrier(planned)
    groups = find_groups(p, buffers, plan)
    rows, wgrad_rows = permute_quantize(p, received.rows, plan, groups, "x", wgrad=keep)  # [N, H]
    h, a = expert_up(p, rows, wgrad_rows, w, groups)  # [N, G, F]
    second_half_reads_h = a is None or w.wo_a is not None
    if second_half_reads_h:
        h = lax.optimization_barrier(h)
    saved = Residuals(wgrad_rows if keep else None, h, plan, row_weights, received.slots)
    return Halfway(saved, groups, a)


def forward_down(
    p: BlockPlan, buffers: Round, received: Received, halfway: Halfway, w: Weights[Operand]
) -> tuple[Float[Array, "T H"], Int[Array, " 1"]]:
    """Runs the second half of the chain, with wo gathered for fprop.

    Returns y [T, H], a partial sum where tp splits F; and the assignments that found no room in any round [1].
    """
    saved, groups, a = halfway
    if a is None:
        a = activate(p, saved, groups)  # [N, F]
    o = expert_down(p, a, saved, w, groups)  # [N, H]
    weights = received.weights if p.config.weights_at == "output" else None
    partial = unpermute_forward(buffers.permute, o, saved.plan, weights)  # [R, H]
    y = combine_forward(buffers.exchange, partial, received.slots)  # [T, H]
    # Without the barrier XLA would merge the sum of returned rows with a sum of the caller, in another order.
    y = lax.optimization_barrier(y)
    return y, received.dropped + saved.plan.dropped


def find_groups(p: BlockPlan, buffers: Round, plan: Plan) -> Groups:
    """Returns the groups of the sorted rows of a round."""
    num_rows = plan.gather_idx.shape[0]
    local = implementation(p.kernels)
    return local.find_groups(plan.group_sizes, buffers.permute.align, num_rows, p.expected)


def sort_again(p: BlockPlan, buffers: Round, halfway: Halfway, x: Float[Array, "T H"]) -> Halfway:
    """Dispatches x again for the gradient of wi, where forward has saved no rows."""
    saved, groups, _ = halfway
    if saved.rows is not None:
        return halfway
    received = combine_backward(buffers.exchange, x, saved.sent)  # the rows that dispatch delivered
    _, wgrad_rows = permute_quantize(p, received, saved.plan, groups, "x", fprop_or_dgrad=False)  # [N, H]
    return Halfway(saved._replace(rows=wgrad_rows), groups)


def backward_down(
    p: BlockPlan,
    buffers: Round,
    halfway: Halfway,
    w: Weights[Operand],
    dy: Float[Array, "T H"],
    total: Weights[Array | None],
) -> tuple[HalfwayGrad, Weights[Array | None]]:
    """Runs the second half of the chain reversed, with wo gathered for dgrad.

    d_o is the gradient of each row before the routing weight multiplies it. The gradient of a row's weight is then
    <d_a, a>, which needs a and not o, so forward does not save o.

    Returns what `backward_up` takes, and the gradients of the gathered weights, added to `total`.
    """
    saved, groups, _ = halfway
    d_partial = combine_backward(buffers.exchange, dy, saved.sent)  # [R, H]
    d_o, d_o_wgrad = permute_quantize(p, d_partial, saved.plan, groups, "dy", wgrad=not p.frozen)  # [N, H]
    local = implementation(p.kernels)
    with jax.named_scope("expert_down"):
        d_a = local.matmul(d_o, w.wo, groups, p.dtype, transpose=True)  # [N, F]
    down = TermGrads()
    if w.has_down_terms:
        d_o_plain = permute_forward(p.first.permute, d_partial, saved.plan, groups)
        a_plain = None
        if w.wo_a is not None:
            a_plain = activate(p, saved, groups, plain=True)
            if p.config.weights_at == "output":
                a_plain = scale_rows(a_plain, saved.row_weights, groups)
        down = small_terms.grad_down(p, d_o_plain, a_plain, saved.row_weights, w, groups)
    if down.d_input is not None:
        d_a = d_a + down.d_input.astype(d_a.dtype)
    hidden = activate_grad(p, saved, d_a, w, groups)  # [N, F], [N, G F]
    with jax.named_scope("expert_down"):
        d_wo = weight_grad(p, hidden.a, d_o_wgrad, groups, total.wo, (-1,))  # [N, F]^T [N, H]
    with jax.named_scope("expert_up"):
        columns = (p.config.gates, -1)
        d_wi = weight_grad(p, saved.rows, hidden.d_h_wgrad, groups, total.wi, columns)  # [N, H]^T [N, G F]
    up = TermGrads()
    if w.has_up_terms:
        up = small_terms.grad_up(p, saved.rows, hidden.d_h_plain, w, groups)
    d_row_weights = hidden.d_row_weights
    if down.d_row_weights is not None:
        d_row_weights = d_row_weights + down.d_row_weights
    grads = Weights(
        d_wi,
        d_wo,
        bi=small_terms.add(total.bi, up.d_bias),
        bo=small_terms.add(total.bo, down.d_bias),
        wi_a=small_terms.add(total.wi_a, up.d_low_a),
        wi_b=small_terms.add(total.wi_b, up.d_low_b),
        wo_a=small_terms.add(total.wo_a, down.d_low_a),
        wo_b=small_terms.add(total.wo_b, down.d_low_b),
    )
    return HalfwayGrad(hidden.d_h, up.d_input, d_row_weights), grads


def backward_up(
    p: BlockPlan, buffers: Round, halfway: Halfway, grads: HalfwayGrad, wi: Operand
) -> tuple[Float[Array, "T H"], Float[Array, "T K"]]:
    """Runs the first half of the chain reversed; returns dx [T, H] and the gradient of the routing weights [T, K]."""
    saved, groups, _ = halfway
    local = implementation(p.kernels)
    with jax.named_scope("expert_up"):
        d_rows = local.matmul(grads.d_h, wi, groups, p.dtype, transpose=True)  # [N, H]
    if grads.d_rows_adapter is not None:
        d_rows = d_rows + grads.d_rows_adapter
    d_received = unpermute_forward(buffers.permute, d_rows, saved.plan)  # [R, H]
    d_weights = weights_from_rows(saved.plan, grads.d_row_weights)  # [R, K]
    dx, d_weights = dispatch_backward(buffers.exchange, saved.sent, d_received, d_weights)
    return lax.optimization_barrier(dx), d_weights  # dx is a sum of returned rows, as y is in `forward_down`


def permute_quantize(
    p: BlockPlan,
    received: Float[Array, "R H"],
    plan: Plan,
    groups: Groups,
    role: Role,
    *,
    fprop_or_dgrad=True,
    wgrad=True,
) -> tuple[Operand, Operand]:
    """Returns the sorted rows for fprop (of x) or dgrad (of dy), and for wgrad, each None if it is not asked for."""
    gathers = p.gathers_x if role == "x" else p.gathers_dy
    plain = p.frozen and role == "x"  # adapters multiply these rows, and no gradient of wi does
    operand, wgrad_operand = implementation(p.kernels).quantize_for_matmul(
        received,
        p.recipe,
        role,
        groups,
        gather_idx=plan.gather_idx,
        in_matmul=gathers,
        fprop_or_dgrad=fprop_or_dgrad,
        wgrad=wgrad and not plain,
    )
    if plain:
        wgrad_operand = permute_forward(p.first.permute, received, plan, groups)
    return operand, wgrad_operand


def expert_up(
    p: BlockPlan, rows: Operand, plain_rows: Operand, w: Weights[Operand], groups: Groups
) -> tuple[Float[Array, "N G F"], Operand | None]:
    """Returns h = rows wi + bi [N, G, F], and a = act(h) where the matmul computes it too, else None.

    An adapter multiplies the rows in their own dtype, `plain_rows`.
    """
    local = implementation(p.kernels)
    gates = p.config.gates
    a = None
    with jax.named_scope("expert_up"):
        if p.config.weights_at == "output" and p.recipe.x is None and w.wi_a is None:
            act = find_activation(p)
            h, a = local.matmul_activate(rows, w.wi, groups, p.dtype, act, gates, w.bi)
        else:
            h = local.matmul(rows, w.wi, groups, p.dtype, w.bi)
        if w.wi_a is not None:
            h = h + small_terms.low_rank(p, plain_rows, w.wi_a, w.wi_b, groups)
    return h.reshape(h.shape[0], gates, -1), a


def find_activation(p: BlockPlan) -> Callable:
    """Returns the function of the activation."""
    return activation_of(p.config.activation, p.config.activation_limit)


def activate(p: BlockPlan, saved: Residuals, groups: Groups, *, plain: bool = False) -> Operand:
    """Returns the Operand [N, F] of act(h), `plain` if unquantized, with h scaled as in `activate_grad`."""
    h = saved.h
    if p.config.weights_at == "input":
        h = scale_rows(h, saved.row_weights, groups)
    act = find_activation(p)
    if plain:
        return implementation(DEFAULT).activate(h, act, FULL, groups)
    return implementation(p.kernels).activate(h, act, p.recipe, groups)


def activate_grad(
    p: BlockPlan, saved: Residuals, d_a: Float[Array, "N F"], w: Weights[Operand], groups: Groups
) -> HiddenGrad:
    """Returns the gradient of a = act(h), with h scaled by the routing weights where they come at the input."""
    local = implementation(p.kernels)
    act = find_activation(p)
    h, row_weights = saved.h, saved.row_weights
    at_input = p.config.weights_at == "input"
    if not at_input and not w.has_up_terms:
        grads = local.activate_grad_quantize(h, d_a, act, p.recipe, groups, weights=row_weights)
        return HiddenGrad(grads.a, grads.d_h, grads.d_h_wgrad, None, grads.inner)
    if at_input:
        scaled = scale_rows(h, row_weights, groups)
        grads = local.activate_grad(scaled, d_a, act, groups, jnp.ones_like(row_weights))
        d_row_weights = jnp.sum(grads.d_h.astype(jnp.float32) * h.astype(jnp.float32), axis=(1, 2))
        d_h_plain = scale_rows(grads.d_h, row_weights, groups)
    else:
        grads = local.activate_grad(h, d_a, act, groups, row_weights)
        d_row_weights = grads.inner
        d_h_plain = grads.d_h
    _, a = local.quantize_for_matmul(grads.a, p.recipe, "x", groups, fprop_or_dgrad=False)
    d_h, d_h_wgrad = local.quantize_for_matmul(
        d_h_plain,
        p.recipe,
        "dy",
        groups,
        wgrad=not p.frozen,
    )
    return HiddenGrad(a, d_h, d_h_wgrad, d_h_plain, d_row_weights)


def expert_down(
    p: BlockPlan,
    a: Operand,
    saved: Residuals,
    w: Weights[Operand],
    groups: Groups,
) -> Float[Array, "N H"]:
    """Returns o = a wo + bo [N, H], a partial sum where tp splits F."""
    local = implementation(p.kernels)
    bo = small_terms.find_down_bias(p, w)
    with jax.named_scope("expert_down"):
        o = local.matmul(a, w.wo, groups, p.dtype, bo)
        if w.wo_a is not None:
            a_plain = activate(p, saved, groups, plain=True)
            o = o + small_terms.low_rank(p, a_plain, w.wo_a, w.wo_b, groups)
    return o


def weight_grad(
    p: BlockPlan,
    x: Operand,
    dy: Operand,
    groups: Groups,
    total: Array | None,
    columns: tuple[int, ...],
) -> Array | None:
    """Returns x^T dy [E, K, *columns] for each expert, added to `total`; None where the weight is frozen."""
    if p.frozen:
        return None
    matrices = None if total is None else total.reshape(*total.shape[:2], -1)
    dw = implementation(p.kernels).wgrad(x, dy, groups, p.dtype, p.wi.grad_dtype, matrices)
    return dw.reshape(*dw.shape[:2], *columns)
