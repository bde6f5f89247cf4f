"""The block on one device with its exchange, in as many passes as the routing needs.

The buffers hold `buffer_factor` times the balanced load. A routing that needs more takes further passes, so that
nothing is dropped. Pass (p, n) has

    the slots [p S, (p + 1) S) of each pair of ranks, which travel             S slots a pair
    of what they bring, the rows from n on, sorted by expert                   M rows in pass (0, 0), M / 2 in others

With S = 4, M = 6, and 5 tokens for a rank that want 10 assignments there, pass (0, 0) has the first 6 assignments of
tokens 0 to 3, pass (0, 6) has their others, and pass (1, 0) has those of token 4.

Pass (0, 0) stands outside of the loop. It leaves the residuals, and a step that needs no more runs nothing else. What
later passes need is exchanged and computed again in backward, and nothing lasts from one pass to the next but the sums.
Each pass holds collectives: the ranks of ep make equally many passes, as many as the busiest of them needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from moax.backend import platform
from moax.block.moe import find_gradients, find_hidden, find_partial, find_rows
from moax.block.spec import BlockResiduals, BlockSpec, Inputs, Weights, quantize_and_gather
from moax.block.weights import Layouts, find_layouts
from moax.kernels import Operand
from moax.mesh.axes import Names
from moax.mesh.collectives import reduce_max, vary_like
from moax.ops.exchange import combine_backward, combine_forward, dispatch_backward, dispatch_forward
from moax.ops.permutation import count_rows, plan_rows
from moax.types import QuantizedParams, Received


def run_forward(
    static: BlockSpec,
    layouts: Layouts,
    inputs: Inputs,
    w: Weights[Array],
    quantized: QuantizedParams[Array] | None,
    gathered: tuple[Operand, Operand],
) -> tuple[Float[Array, "T H"], Int[Array, " 1"], Int[Array, " 1"], BlockResiduals]:
    """Runs all passes of forward, with wi and wo `gathered` for products over rows.

    Returns:
      y [T, H], a partial sum where tp splits F; the dropped assignments [1]; the most passes of any rank [1]; and the
      residuals of the first pass.
    """
    del quantized
    wi, wo = gathered
    received, needed = dispatch_forward(static.exchange, *inputs)
    saved = find_hidden(static, wi, w, received, plan_rows(static.permute, received.experts))
    dropped = received.dropped + saved.plan.dropped
    span = _agree(static, layouts, received, needed) if static.repeats else None
    y = combine_forward(static.exchange, find_partial(static, wo, w, saved), received.slots, inputs.x.shape[0])
    # XLA would merge the sum of returned rows with a sum of the caller, in another order, where no loop follows.
    y = lax.optimization_barrier(y)
    saved = saved._replace(rows=saved.rows if static.save_rows else None, span=span)
    if span is None:
        return y, dropped, jnp.ones(1, jnp.int32), saved

    def one_pass(p, first, total):
        y, made = total
        p, again, wi_, wo_, w_ = lax.optimization_barrier((p, inputs, wi, wo, w))
        received, _ = dispatch_forward(static.exchange, again.x, again.experts, again.weights, p)
        plan = plan_rows(static.permute_more, received.experts, first)
        partial = find_partial(static, wo_, w_, find_hidden(static, wi_, w_, received, plan))
        y = y + combine_forward(static.exchange, partial, received.slots, y.shape[0])
        return received, (y, made + 1)

    y, made = _repeat(static, layouts, span, one_pass, (y, jnp.ones((), jnp.int32)), inputs, w)
    saved = saved._replace(span=_after(made, span))
    return y, dropped, reduce_max(made, static.roles.tokens)[None], saved


def run_backward(
    static: BlockSpec,
    layouts: Layouts,
    saved: BlockResiduals,
    inputs: Inputs | None,
    w: Weights[Array],
    quantized: QuantizedParams | None,
    gathered: tuple[Operand, Operand],
    dy: Float[Array, "T H"],
) -> tuple[Float[Array, "T H"], Float[Array, "T K"], Weights[Array]]:
    """Runs all passes of backward.

    Args:
      static, layouts, w: as in forward.
      saved: the residuals.
      inputs: the inputs of forward; None where `static.needs_inputs` is False.
      quantized: wi and wo as the caller keeps them, or None; later passes gather wi for products over rows.
      gathered: wi and wo for products over columns.
      dy: [T, H], the gradient of y.

    Returns:
      dx [T, H], d_weights [T, K], and Weights of the gradients of the gathered weights.
    """
    if saved.span is not None:
        dy = _after(saved.span[1], dy)
    wi, wo = gathered
    if saved.rows is None and inputs is not None:
        received = combine_backward(static.exchange, inputs.x, saved.sent)  # the rows that dispatch delivered
        saved = saved._replace(rows=find_rows(static, received, saved.plan)[1])
    d_partial = combine_backward(static.exchange, dy, saved.sent)  # [R, H]
    d_received, d_weights, dw = find_gradients(static, wi, wo, w, saved, d_partial)
    dx, d_weights = dispatch_backward(static.exchange, saved.sent, d_received, d_weights, dy.shape[0])
    dx = lax.optimization_barrier(dx)  # as y in forward
    if saved.span is None:
        return dx, d_weights, dw

    def one_pass(p, first, total):
        p, again, wi_, wo_, w_, kept, dy_ = lax.optimization_barrier((p, inputs, wi, wo, w, quantized, dy))
        received, _ = dispatch_forward(static.exchange, again.x, again.experts, again.weights, p)
        plan = plan_rows(static.permute_more, received.experts, first)
        saved = find_hidden(static, _weight_of_rows(static, layouts, w_, wi_, kept), w_, received, plan)
        d_partial = combine_backward(static.exchange, dy_, saved.sent)
        d_received, d_rows, dw = find_gradients(static, wi_, wo_, w_, saved, d_partial)
        gradients = dispatch_backward(static.exchange, saved.sent, d_received, d_rows, dy.shape[0])
        return received, jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, (*gradients, dw))

    return _repeat(static, layouts, saved.span, one_pass, (dx, d_weights, dw), inputs, w)


def _after(count: Int[Array, ""], x: Array) -> Array:
    """Returns x, on a CPU not before `count`, which is never negative, is known.

    XLA for CPUs runs a collective of the loop of forward and one of backward at once where no data goes from one to the
    other, and pairs one device's first with another device's second. A gradient that depends on y keeps them apart; a
    constant dy does not.
    """
    return jnp.where(count >= 0, x, 0) if platform() == "cpu" else x


def _agree(static: BlockSpec, layouts: Layouts, received: Received, needed: Int[Array, ""]) -> Int[Array, " 2"]:
    """Returns whether pass 0 of the exchange brought more rows than fit, 0 or 1, and the first p that is not needed.

    Both are the same on all ranks that hold a collective of a pass together. (0, 1) needs no pass of the loop.
    """
    room = static.permute.room
    more = needed * 0 if room is None else (count_rows(static.permute, received.experts) > room).astype(jnp.int32)
    return reduce_max(jnp.stack([more, needed]), find_together(static, layouts))


def find_together(static: BlockSpec, layouts: Layouts) -> Names:
    """Returns the axes of tokens whose devices make equally many passes, because a pass has collectives over them.

    These are ep; the axes over which a quantized wi is gathered, since backward gathers it again for its rows; and all
    axes of tokens if one scale holds for a whole tensor. A wi that the caller keeps quantized has the declared layout,
    whatever the layout of the parameter is.
    """
    roles = static.roles
    if static.whole_tensor:
        return roles.tokens
    declared = find_layouts(roles, static.declared.wi, static.declared.wo)
    both = (*layouts[0].gather, *declared[0].gather) if static.recipe.wi.w is not None else ()
    gathered = {name for names in both for name in names}
    return tuple(name for name in roles.tokens if name in gathered.union(roles.ep))


def _weight_of_rows(static: BlockSpec, layouts: Layouts, w: Weights[Array], wi: Operand, quantized) -> Operand:
    """Returns wi for products over rows in backward, which has it for products over columns."""
    return wi if static.recipe.wi.w is None else quantize_and_gather(static, w, layouts, "rows", quantized)[0]


def _repeat[State](
    static: BlockSpec,
    layouts: Layouts,
    span: Int[Array, " 2"],
    one_pass: Callable[[Array, Array, State], tuple[Received, State]],
    total: State,
    *operands: PyTree,
) -> State:
    """Runs received, total = one_pass(p, first, total) for each pass after (0, 0), and returns the last total.

    Args:
      static, layouts: as in forward.
      span: the result of `_agree`.
      one_pass: computes one pass and adds it to the total. `received` is what pass p of the exchange brought.
      total: the sums of pass (0, 0).
      *operands: inside a `shard_map` the types of the sums vary over the same axes as these arrays.
    """

    room: Any = static.permute_more.room

    def again(state):
        p, first, end, total = state
        received, total = one_pass(p, first, total)
        rows = reduce_max(count_rows(static.permute, received.experts), find_together(static, layouts))
        last = first + room >= rows
        return jnp.where(last, p + 1, p), jnp.where(last, 0, first + room), end, total

    state = (1 - span[0], span[0] * (static.permute.room or 0), span[1], total)
    state = jax.tree.map(lambda v: vary_like(v, *operands), state)
    return lax.while_loop(lambda state: state[0] < state[2], again, state)[-1]
