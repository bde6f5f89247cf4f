"""The rounds of a block on one device: the first round, and overflow rounds for what found no room in its buffers.

The buffers hold `buffer_factor` times the balanced load. A routing that needs more takes overflow rounds, so that
nothing is dropped. The first round has

    slots 0 to S - 1 of each pair of ranks                S slots a pair
    the first M received rows in expert order             M rows

Each rank then tells the others which assignments it has computed, and the tokens that are left for a rank have slots
anew. Round (p, n) of the loop has

    slots p S / 2 to (p + 1) S / 2 - 1 of each pair       S / 2 slots a pair
    the received rows from n on, in expert order          0.45 M rows, because a token has fewer rows left

With S = 4 and M = 6, let 5 tokens want experts 0 and 1 of a rank. The first round has expert 0 of tokens 0 to 3 and
expert 1 of tokens 0 and 1. Round (0, 0) has expert 1 of tokens 2 and 3, and round (1, 0) has both of token 4.

The first round is outside of the loop. It leaves the residuals, and a step that needs no more runs nothing else. Later
rounds exchange and compute again in backward, and only sums last from one round to the next. The loop is in the middle
of the first round, between its two matmuls: a GPU waits for its host where a loop may begin, and the host then launches
the rest of the step while the second matmul runs. Each round holds collectives over ep, and in backward over the axes
that gather a quantized wi. The devices along these axes make equally many rounds, as many as the busiest of them needs.

`finish` is a barrier that keeps the steps on both sides of the loop apart, and bounds what is in memory. `keep_in_loop`
keeps loop invariants in the loop, and `after` orders collectives that may race.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from moax.block.chain import (
    Halfway,
    Residuals,
    backward_down,
    backward_up,
    find_groups,
    forward_down,
    forward_up,
    sort_again,
)
from moax.block.plan import BlockPlan
from moax.block.small_terms import Weights
from moax.kernels import Operand
from moax.kernels.device import collectives_may_race
from moax.mesh.axes import Names
from moax.mesh.collectives import reduce_max, vary_like
from moax.ops.dispatch_combine import combine_forward, dispatch_forward
from moax.ops.permutation import count_rows
from moax.ops.weights import GatherSpec, QuantizedWeight, WeightLayout, find_layout, gather_shard
from moax.types import Received

Quantized = tuple[QuantizedWeight | None, QuantizedWeight | None]  # of wi and wo
Layouts = tuple[WeightLayout, WeightLayout]  # of wi and wo
Gathered = tuple[Operand, Operand]  # wi and wo

# Both are (values) -> values.
finish = lax.optimization_barrier  # XLA computes all values before anything that reads one
keep_in_loop = lax.optimization_barrier  # XLA moves nothing that reads the values out of a loop


class Inputs(NamedTuple):
    """The tokens, and where they go.

    Attributes:
      x: [T, H], the tokens.
      experts: [T, K] i32, the experts of each token.
      weights: [T, K] f32, the routing weights.
    """

    x: Float[Array, "T H"]
    experts: Int[Array, "T K"]
    weights: Float[Array, "T K"]


class BackwardOperands(NamedTuple):
    """What all rounds of backward read.

    Attributes:
      inputs: the tokens; None where backward reads nothing of them.
      w: the shards of the weights.
      gathered: wi and wo, gathered for dgrad.
      saved: the residuals of the first round.
      quantized: wi and wo as the caller keeps them, or None. Later rounds gather such a wi for fprop.
      dy: the gradient of y.
    """

    inputs: Inputs | None
    w: Weights[Array]
    gathered: Gathered
    saved: Residuals
    quantized: Quantized
    dy: Float[Array, "T H"]


class Cursor(NamedTuple):
    """Where the loop of overflow rounds stands. A [3] i32 array holds it between forward and backward.

    Attributes:
      exchange: p of the next round (p, n), its round of the exchange.
      start: n of the next round, its first received row in expert order.
      end: the first round of the exchange that no rank needs.
    """

    exchange: Int[Array, ""]
    start: Int[Array, ""]
    end: Int[Array, ""]


class Context(NamedTuple):
    """What every overflow round reads: the plan, the layouts of the weights, the residuals, and the operands."""

    p: BlockPlan
    layouts: Layouts
    saved: Residuals
    inputs: Inputs
    w: Weights[Array]


class ForwardResult(NamedTuple):
    """The results of all rounds of forward.

    Attributes:
      y: [T, H], a partial sum where tp splits F.
      dropped: [1] i32, the dropped assignments.
      rounds: [1] i32, the most rounds of any rank.
      saved: the residuals of the first round.
    """

    y: Float[Array, "T H"]
    dropped: Int[Array, " 1"]
    rounds: Int[Array, " 1"]
    saved: Residuals


class Gradients(NamedTuple):
    """The results of backward of some rounds, and the sums that the loop carries.

    Attributes:
      dx: [T, H], the gradient of the tokens.
      d_weights: [T, K] f32, the gradient of the routing weights.
      dw: the gradients of the gathered weights.
    """

    dx: Float[Array, "T H"]
    d_weights: Float[Array, "T K"]
    dw: Weights[Array | None]


def run_forward(
    p: BlockPlan,
    layouts: Layouts,
    inputs: Inputs,
    w: Weights[Array],
    gathered: Gathered,
) -> ForwardResult:
    """Runs all rounds of forward, with wi and wo `gathered` for fprop."""
    w_gathered = use_gathered(w, gathered)
    received, exchange_rounds = dispatch_forward(p.first.exchange, *inputs)  # rows [R, H]
    if not p.overflows:
        halfway = forward_up(p, p.first, received, w_gathered, keep=p.save_rows)
        y, dropped = forward_down(p, p.first, received, halfway, w_gathered)
        return ForwardResult(y, dropped, jnp.ones(1, jnp.int32), halfway.saved)
    cursor = find_overflow(p, received, exchange_rounds)
    # The exchange has just brought the ranks together, so here they agree without a wait.
    received, cursor = finish((received, reduce_max(cursor, find_together(p, layouts))))
    halfway = forward_up(p, p.first, received, w_gathered, keep=p.save_rows)
    saved = halfway.saved

    def run_round(received, start, w, gathered, total):
        w = use_gathered(w, gathered)
        y_sum, num_rounds = total
        halfway = forward_up(p, p.later, received, w, keep=False, start=start)
        y, _ = forward_down(p, p.later, received, halfway, w)
        return y_sum + y, num_rounds + 1

    no_rounds = (jnp.zeros(inputs.x.shape, p.dtype), jnp.ones((), jnp.int32))
    # The second half reads a, or else h. An h that it does not read has no barrier, so that a scan stores h in place.
    read_later = saved.h if halfway.a is None else halfway.a
    begin = after((read_later, received), cursor)
    read_later, no_rounds, begin = finish((read_later, no_rounds, begin))
    context = Context(p, layouts, saved, inputs, w)
    y_overflow, num_rounds = _repeat(context, begin, gathered, run_round, no_rounds)
    read_later, y_overflow = finish((read_later, y_overflow))
    read_later = after(y_overflow, read_later)
    if halfway.a is None:
        saved = saved._replace(h=read_later)
        halfway = halfway._replace(saved=saved)
    else:
        halfway = halfway._replace(a=read_later)
    y, dropped = forward_down(p, p.first, received, halfway, w_gathered)
    y = y + y_overflow
    saved = saved._replace(overflow=after(y, cursor))
    return ForwardResult(y, dropped, reduce_max(num_rounds, p.axes.tokens)[None], saved)


def run_backward(p: BlockPlan, layouts: Layouts, operands: BackwardOperands) -> Gradients:
    """Runs all rounds of backward; later rounds also gather wi for fprop."""
    inputs, w, gathered, saved, quantized, dy = operands
    w_gathered = use_gathered(w, gathered)
    cursor = saved.overflow
    if cursor is not None:
        dy = after(cursor, dy)
    halfway = Halfway(saved, find_groups(p, p.first, saved.plan))
    if inputs is not None:
        halfway = sort_again(p, p.first, halfway, inputs.x)
    grads, dw = backward_down(p, p.first, halfway, w_gathered, dy, Weights(None, None))
    if cursor is None or inputs is None:
        dx, d_weights = backward_up(p, p.first, halfway, grads, w_gathered.wi)
        return Gradients(dx, d_weights, dw)
    wi_source = None
    if p.recipe.w is not None:  # fprop takes a quantized wi in another form than dgrad
        wi_source = (w.wi if quantized[0] is None else None, quantized[0])

    def run_round(received, start, w, operands, total):
        gathered, wi_source, dy = operands
        w = use_gathered(w, gathered)
        dx_sum, d_weights_sum, dw = total
        w_fprop = w
        if wi_source is not None:
            w_fprop = w._replace(wi=gather_shard(GatherSpec(p.wi, "fprop"), layouts[0], *wi_source).operand)
        halfway = forward_up(p, p.later, received, w_fprop, keep=True, start=start)
        h, dy = finish((halfway.saved.h, dy))  # the buffers of two exchanges are never in memory together
        halfway = Halfway(halfway.saved._replace(h=h), halfway.groups)
        grads, dw = backward_down(p, p.later, halfway, w, dy, dw)
        grads, dw = finish((grads, dw))  # the operands of wgrad leave the memory before dx comes
        dx, d_weights = backward_up(p, p.later, halfway, grads, w.wi)
        return Gradients(
            dx_sum + dx.astype(dx_sum.dtype),
            d_weights_sum + d_weights.astype(d_weights_sum.dtype),
            dw,
        )

    no_rounds = Gradients(jnp.zeros_like(dy), jnp.zeros(inputs.weights.shape, jnp.float32), dw)
    grads, no_rounds = finish((grads, no_rounds))
    context = Context(p, layouts, saved, inputs, w)
    read_by_round = (gathered, wi_source, dy)
    dx_later, d_weights_later, dw = _repeat(context, cursor, read_by_round, run_round, no_rounds)
    grads, dx_later, d_weights_later = finish((grads, dx_later, d_weights_later))
    grads = after((dx_later, d_weights_later), grads)
    dx, d_weights = backward_up(p, p.first, halfway, grads, w_gathered.wi)
    return Gradients(dx + dx_later, d_weights + d_weights_later, dw)


def use_gathered(w: Weights[Any], gathered: Gathered) -> Weights[Operand]:
    """Returns the weights as a round reads them: wi and wo gathered, and the small ones."""
    wi, wo = gathered
    return w._replace(wi=wi, wo=wo)


def find_overflow(p: BlockPlan, received: Received, exchange_rounds: Int[Array, ""]) -> Int[Array, " 3"]:
    """Returns where the loop of overflow rounds begins and ends on this rank, as a `Cursor` in an array."""
    needs_rounds = exchange_rounds > 1
    max_rows = p.first.permute.max_rows
    if max_rows is not None:
        needs_rounds |= count_rows(p.first.permute, received.experts) > max_rows
    start = 0
    # With a capacity every round dispatches the same rows, and the first round has computed `max_rows` of them.
    if p.first.permute.capacity is not None:
        start = max_rows or 0
    return jnp.stack(Cursor(jnp.int32(0), jnp.int32(start), needs_rounds.astype(jnp.int32)))


def _repeat[State](
    context: Context,
    cursor: Int[Array, " 3"],
    operands: PyTree,
    run_round: Callable[..., State],
    total: State,
) -> State:
    """Runs total = run_round(received, start, small weights, operands, total) for each overflow round."""
    p, layouts, saved, inputs, w = context
    together = find_together(p, layouts)
    max_rows = p.later.permute.max_rows
    # Without a capacity the first round's assignments leave, and the others have slots anew.
    computed = None
    if p.first.permute.capacity is None:
        computed = (saved.plan.scatter_idx, saved.sent)
    invariants = (inputs, Weights(None, None, *w[2:]), operands, computed)

    def is_needed(state):
        cursor, _ = state
        position = Cursor(*cursor)
        return position.exchange < position.end

    def advance(state):
        cursor, total = state
        position = Cursor(*cursor)
        # Every step would pay for loop invariants that XLA moves out of the loop.
        exchange, start, in_loop = keep_in_loop((position.exchange, position.start, invariants))
        (x, experts, weights), small, operands, computed = in_loop
        if computed is not None:
            experts = leave_out(p, experts, saved.plan.gather_idx.shape[0], *computed)
        received, end = dispatch_forward(p.later.exchange, x, experts, weights, exchange)
        total = run_round(received, start, small, operands, total)
        # `end` is the first round that this rank knows not to be needed.
        num_rows = count_rows(p.first.permute, received.experts)
        counts = reduce_max(jnp.stack([num_rows, end]), together)
        num_rows, end = vary_like(counts, inputs, w)
        next_start = start + max_rows
        is_last = next_start >= num_rows  # of this round of the exchange
        exchange = jnp.where(is_last, exchange + 1, exchange)
        start = jnp.where(is_last, 0, next_start)
        return jnp.stack(Cursor(exchange, start, end)), total

    # Inside a `shard_map` the types of the sums vary over the same axes as the operands.
    state = jax.tree.map(lambda v: vary_like(v, inputs, w), (cursor, total))
    _, total = lax.while_loop(is_needed, advance, state)
    return total


def leave_out(
    p: BlockPlan,
    experts: Int[Array, "T K"],
    num_rows: int,
    scatter_idx: Int[Array, "R K"],
    sent: PyTree,
) -> Int[Array, "T K"]:
    """Returns the experts, E in place of each assignment that the first round, of `num_rows` rows, computed."""
    is_computed = (scatter_idx < num_rows).astype(jnp.float32)
    # The rank of an assignment sends 1 back, on the way of its row.
    is_computed = combine_forward(p.first.exchange, is_computed, sent)
    return jnp.where(is_computed > 0, p.config.num_experts, experts)


def find_together(p: BlockPlan, layouts: Layouts) -> Names:
    """Returns the axes of tokens whose devices make equally many rounds, because a round has collectives over them.

    These are ep, and the axes over which a quantized wi is gathered, since backward gathers it again for its rows.
    """
    gathered = set[str]()
    if p.recipe.w is not None and not p.wi.gathered:
        # A wi that the caller keeps quantized has the declared layout, whatever the layout of the parameter is.
        for names in (*layouts[0].gather, *find_layout(p.wi).gather):
            gathered.update(names)
    return tuple(name for name in p.axes.tokens if name in gathered.union(p.axes.ep))


def after[T](first: PyTree, then: T) -> T:
    """Returns the arrays of `then`, not before all arrays of `first` are known where collectives may race.

    Let two CPUs run two all-gathers that no data joins. XLA may run both at once, and pair the first of one device with
    the second of the other, so that each gets bytes of the wrong array. So the collectives of the loop and of the first
    round, and of forward and of backward, need such data where dy is a constant or rows are dropped.
    """
    if not collectives_may_race():
        return then

    def bound(leaf: Array) -> Float[Array, ""]:
        element = leaf.ravel()[:1].astype(jnp.float32)
        return jnp.clip(element, -1, 1).sum()

    bounded = [bound(leaf) for leaf in jax.tree.leaves(first)]
    never = sum(bounded) < -2 * len(bounded)  # always False, which XLA does not know
    return jax.tree.map(lambda v: jnp.where(never, jnp.zeros_like(v), v), then)
