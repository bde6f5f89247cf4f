"""The block on one device with its exchange, in as many passes as the routing needs.

The buffers hold `buffer_factor` times the balanced load. A routing that needs more takes further passes, so that
nothing is dropped. The first pass has

    the slots below S of each pair of ranks, which travel            S slots a pair
    of what they bring, the first rows in the order of experts       M rows

Each rank then tells the others which assignments it has computed, and the tokens that are left for a rank have slots
anew. Pass (p, n) of the loop has

    the slots [p S / 2, (p + 1) S / 2) of each pair                  S / 2 slots a pair
    of what they bring, the rows from n on                           0.45 M rows, for tokens have fewer rows left

With S = 4 and M = 6, let 5 tokens want experts 0 and 1 of a rank. The first pass has expert 0 of tokens 0 to 3 and
expert 1 of tokens 0 and 1. Pass (0, 0) has expert 1 of tokens 2 and 3, and pass (1, 0) has both of token 4.

The first pass stands outside of the loop. It leaves the residuals, and a step that needs no more runs nothing else.
What later passes need is exchanged and computed again in backward, and nothing lasts from one pass to the next but the
sums. The loop stands in the middle of the first pass, before its last product: a GPU waits for its host where a loop
may begin, and the host then launches what follows while that product runs. Each pass holds collectives: the ranks of ep
make equally many passes, as many as the busiest of them needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from moax.backend import platform
from moax.block.moe import find_hidden, find_input_gradient, find_partial, find_rows, find_weight_gradients
from moax.block.spec import BlockResiduals, BlockSpec, Inputs, Weights, gather_one
from moax.block.weights import Layouts, find_layouts
from moax.kernels import Operand
from moax.mesh.axes import Names
from moax.mesh.collectives import reduce_max, vary_like
from moax.ops.exchange import combine_backward, combine_forward, dispatch_backward, dispatch_forward
from moax.ops.permutation import count_rows, plan_rows
from moax.types import Plan, QuantizedParams, Received


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
    more, made, span = None, jnp.ones((), jnp.int32), None
    if static.repeats:  # The exchange has just brought the ranks together, so here they agree without a wait.
        received, span = lax.optimization_barrier((received, _agree(static, layouts, received, needed)))
    # XLA would run a kernel twice whose result a scan stores.
    planned = lax.optimization_barrier(plan_rows(static.permute, received.experts, received.weights))
    saved, a = find_hidden(static, wi, w, received, *planned, keep=static.keeps_rows, activate=True)
    hidden = lax.optimization_barrier(saved.hidden)

    def one_pass(p, first, total):
        y, made = total
        p, again, wi_, wo_, w_ = lax.optimization_barrier((p, inputs, wi, wo, _without_matrices(w)))
        received, planned, end = _send_left(static, again, saved, p, first)
        found = find_hidden(static, wi_, w_, received, *planned, keep=False, activate=True)
        partial = find_partial(static, wo_, w_, *found, received.weights)
        y = y + combine_forward(static.exchange_more, partial, received.slots, y.shape[0])
        return received, end, (y, made + 1)

    if span is not None:
        nothing = jnp.zeros(inputs.x.shape, static.dtype)
        at = _after((hidden, received), span)
        (hidden, a), nothing, at = lax.optimization_barrier(((hidden, a), nothing, at))
        more, made = _repeat(static, layouts, at, one_pass, (nothing, made), inputs, w)
        hidden, a, more = lax.optimization_barrier((hidden, a, more))
    saved = saved._replace(hidden=hidden)
    partial = _after(more, find_partial(static, wo, w, saved, a, received.weights))
    # XLA would merge the sum of returned rows with a sum of the caller, in another order.
    y = lax.optimization_barrier(combine_forward(static.exchange, partial, received.slots, inputs.x.shape[0]))
    y = y if more is None else y + more
    span = None if span is None else _after(y, span)
    saved = saved._replace(rows=saved.rows if static.keeps_rows else None, span=span)
    dropped = received.dropped + saved.plan.dropped
    return y, dropped, reduce_max(made, () if span is None else static.roles.tokens)[None], saved


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
        dy = _after(saved.span, dy)
    wi, wo = gathered
    if saved.rows is None and inputs is not None:
        received = combine_backward(static.exchange, inputs.x, saved.sent)  # the rows that dispatch delivered
        saved = saved._replace(rows=find_rows(static, received, saved.plan, multiply=False)[1])
    d_partial = combine_backward(static.exchange, dy, saved.sent)  # [R, H]
    d_hidden, d_weights, dw = find_weight_gradients(static, wo, w, saved, d_partial)
    more, shard = None, w.wi if quantized is None else quantized.wi
    shard = None if static.recipe.wi.w is None else shard  # products over rows take wi quantized in another way

    def one_pass(p, first, total):
        others = _without_matrices(w)
        p, again, wi_, wo_, w_, given, dy_ = lax.optimization_barrier((p, inputs, wi, wo, others, shard, dy))
        received, planned, end = _send_left(static, again, saved, p, first)
        of_rows = wi_ if given is None else gather_one(static, 0, given, layouts, "rows")
        found, _ = find_hidden(static, of_rows, w_, received, *planned)
        hidden, dy_ = lax.optimization_barrier((found.hidden, dy_))  # one exchange's buffers at a time
        d_partial = combine_backward(static.exchange_more, dy_, received.slots)
        *sums, dw = total
        found = found._replace(hidden=hidden)
        d_hidden, d_weights, dw = find_weight_gradients(static, wo_, w_, found, d_partial, dw)
        d_hidden, dw = lax.optimization_barrier((d_hidden, dw))  # wgrad's operands have gone before dx comes
        d_received = find_input_gradient(static, wi_, d_hidden, planned[0])
        gradients = dispatch_backward(static.exchange_more, received.slots, d_received, d_weights, dy.shape[0])
        return received, end, (*(a + b.astype(a.dtype) for a, b in zip(sums, gradients, strict=True)), dw)

    if saved.span is not None:
        nothing = jnp.zeros_like(dy), jnp.zeros(cast(Inputs, inputs).weights.shape, d_weights.dtype)
        d_hidden, total = lax.optimization_barrier((d_hidden, (*nothing, dw)))
        *more, dw = _repeat(static, layouts, saved.span, one_pass, total, inputs, w)
        d_hidden, more = lax.optimization_barrier((d_hidden, more))
    d_received = _after(more, find_input_gradient(static, wi, d_hidden, saved.plan))
    gradients = dispatch_backward(static.exchange, saved.sent, d_received, d_weights, dy.shape[0])
    dx, d_weights = lax.optimization_barrier(gradients[0]), gradients[1]  # as y in forward
    return (dx, d_weights, dw) if more is None else (dx + more[0], d_weights + more[1], dw)


def _after[T](first: PyTree, then: T) -> T:
    """Returns the array or None `then`, on a CPU not before all arrays of `first` are known.

    XLA for CPUs runs collectives at once where no data goes from one to the other, and pairs one device's first with
    another device's second. So the collectives of the loop and of the first pass, and of forward and of backward, need
    such data where dy is a constant or rows are dropped.
    """
    if platform() != "cpu" or first is None:
        return then
    some = [jnp.clip(leaf.ravel()[:1].astype(jnp.float32), -1, 1).sum() for leaf in jax.tree.leaves(first)]
    never = sum(some) < -2 * len(some)  # which XLA does not know
    return jax.tree.map(lambda v: jnp.where(never, jnp.zeros_like(v), v), then)


def _agree(static: BlockSpec, layouts: Layouts, received: Received, needed: Int[Array, ""]) -> Int[Array, " 3"]:
    """Returns the pass (p, n) with which the loop begins, and the first p that is not needed as far as is known here.

    The latter is 1 where a rank needs a further pass, else 0, which is p. All three are the same on all ranks that hold
    a collective of a pass together. With a capacity the slots are those of the first pass, whose rows come first.
    """
    room, more = static.permute.room, needed > 1
    if room is not None:
        more |= count_rows(static.permute, received.experts) > room
    first = 0 if static.permute.capacity is None else room or 0
    start = jnp.stack([jnp.int32(0), jnp.int32(first), more.astype(jnp.int32)])
    return reduce_max(start, find_together(static, layouts))


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


def _without_matrices(w: Weights[Any]) -> Weights[Any]:
    """Returns the biases and the adapters: a loop holds all that it is given."""
    return w._replace(wi=None, wo=None)


def _send_left(
    static: BlockSpec, inputs: Inputs, saved: BlockResiduals, p: Int[Array, ""], first: Int[Array, ""]
) -> tuple[Received, tuple[Plan, Any], Int[Array, ""]]:
    """Sends what the first pass left, and returns what pass (p, first) of the loop received, its plan, and an end.

    The plan is the result of `plan_rows`. The end is the first p that this rank knows not to be needed. An assignment
    that the first pass computed becomes one of no expert: its rank sends 1 back, on the way of the row.
    """
    experts, num_rows = inputs.experts, saved.plan.source.shape[0]
    if static.permute.capacity is None:
        # XLA would move what is the same in all passes out of the loop, and then every step would pay for it.
        first, position, sent = lax.optimization_barrier((first, saved.plan.position, saved.sent))
        done = combine_forward(static.exchange, (position < num_rows).astype(jnp.float32), sent, inputs.x.shape[0])
        experts = jnp.where(done > 0, static.exchange.num_experts, experts)
    received, end = dispatch_forward(static.exchange_more, inputs.x, experts, inputs.weights, p)
    return received, plan_rows(static.permute_more, received.experts, received.weights, first), end


def _repeat[State](
    static: BlockSpec,
    layouts: Layouts,
    span: Int[Array, " 3"],
    one_pass: Callable[[Array, Array, State], tuple[Received, Array, State]],
    total: State,
    *operands: PyTree,
) -> State:
    """Runs received, end, total = one_pass(p, first, total) for each pass of the loop, and returns the last total.

    Args:
      static, layouts: as in forward.
      span: the result of `_agree`.
      one_pass: computes one pass and adds it to the total. `received` is what pass p of the exchange brought, and `end`
        the first p that this rank knows not to be needed.
      total: the sums before the loop.
      *operands: inside a `shard_map` the types of the sums vary over the same axes as these arrays.
    """
    permute, together = static.permute, find_together(static, layouts)
    room: Any = static.permute_more.room

    def again(state):
        (p, first, _), total = state
        received, end, total = one_pass(p, first, total)
        most = reduce_max(jnp.stack([count_rows(permute, received.experts), end]), together)
        rows, end = vary_like(most, *operands)
        last = first + room >= rows
        return jnp.stack([jnp.where(last, p + 1, p), jnp.where(last, 0, first + room), end]), total

    state = jax.tree.map(lambda v: vary_like(v, *operands), (span, total))
    return lax.while_loop(lambda state: state[0][0] < state[0][2], again, state)[-1]
