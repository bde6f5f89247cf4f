"""Overflow rounds: a block whose buffers are too small for a routing runs `forward` and `backward` once more.

The buffers hold `buffer_factor` times the balanced load. A routing that needs more takes further rounds, so that
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
of the first round, between its two products: a GPU waits for its host where a loop may begin, and the host then
launches the rest of the step while the second product runs. Each round holds collectives: the ranks of ep make equally
many rounds, as many as the busiest of them needs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from moax.backend import platform
from moax.block.moe import BlockPlan, Hooks, Inputs, Residuals, Round, Weights, backward, forward, forward_up
from moax.kernels import Operand
from moax.mesh.axes import Names
from moax.mesh.collectives import reduce_max, vary_like
from moax.ops.dispatch_combine import combine_forward
from moax.ops.permutation import count_rows
from moax.ops.weights import QuantizedWeight, WeightLayout, find_layout, gather_shard


def run_forward(
    p: BlockPlan, layouts: tuple[WeightLayout, WeightLayout], inputs: Inputs, w: Weights[Array],
    gathered: tuple[Operand, Operand],
) -> tuple[Float[Array, "T H"], Int[Array, " 1"], Int[Array, " 1"], Residuals]:  # fmt: skip
    """Runs all rounds of forward, with wi and wo `gathered` for products over rows.

    Returns y [T, H], a partial sum where tp splits F; the dropped assignments [1]; the most rounds of any rank [1]; and
    the residuals of the first round.
    """
    if not p.overflows:
        y, dropped, saved = forward(p, p.first, inputs, w, *gathered)
        return y, dropped, jnp.ones(1, jnp.int32), saved
    seen: dict[str, Any] = {}

    def agree(received, rounds):
        # The exchange has just brought the ranks together, so here they agree without a wait.
        seen["received"], seen["left"] = lax.optimization_barrier((received, _agree(p, layouts, received, rounds)))
        return seen["received"]

    def loop(saved, a):
        later = dataclasses.replace(p, save_rows=False)

        def one_round(at, total):
            at, again, w_, (wi, wo) = lax.optimization_barrier((at, inputs, _small(w), gathered))
            arrived: list[Any] = []
            at, left = _left(p, at, again, saved)
            more, _, _ = forward(later, at, left, w_, wi, wo, _seeing(arrived))
            y, made = total
            return *arrived[0], (y + more, made + 1)

        zeros = jnp.zeros(inputs.x.shape, p.dtype), jnp.ones((), jnp.int32)
        left = after((saved.h, seen["received"]), seen["left"])
        (h, a), zeros, left = lax.optimization_barrier(((saved.h, a), zeros, left))
        seen["more"], seen["made"] = _repeat(p, layouts, left, one_round, zeros, inputs, w)
        h, a, seen["more"] = lax.optimization_barrier((h, a, seen["more"]))
        return saved._replace(h=h), a

    hooks = Hooks(agree, loop, lambda partial: after(seen["more"], partial))
    y, dropped, saved = forward(p, p.first, inputs, w, *gathered, hooks)
    y = y + seen["more"]
    saved = saved._replace(overflow=after(y, seen["left"]))
    return y, dropped, reduce_max(seen["made"], p.axes.tokens)[None], saved


def run_backward(
    p: BlockPlan, layouts: tuple[WeightLayout, WeightLayout], saved: Residuals, inputs: Inputs | None,
    w: Weights[Array], quantized: tuple[QuantizedWeight | None, ...], gathered: tuple[Operand, Operand],
    dy: Float[Array, "T H"], total: Weights[Any],
) -> tuple[Float[Array, "T H"], Float[Array, "T K"], Weights[Array]]:  # fmt: skip
    """Runs all rounds of backward, with wi and wo `gathered` for products over columns.

    Later rounds also gather wi for products over rows, from `quantized` where the caller keeps it. The inputs are None
    where backward reads none of them.

    Returns dx [T, H]; d_weights [T, K]; and the gradients of the gathered weights, added to `total`.
    """
    x = None if inputs is None else inputs.x
    if saved.overflow is None or inputs is None:
        return backward(p, p.first, saved, x, w, *gathered, dy, total=total)
    left, seen = saved.overflow, {}
    dy = after(left, dy)
    # Products over rows take a quantized wi in another form than those over columns.
    source = None if p.recipe.wi.w is None else (w.wi if quantized[0] is None else None, quantized[0])

    def loop(d_h, dw):
        def one_round(at, total):
            operands = at, inputs, _small(w), gathered, source, dy
            at, again, w_, (wi, wo), source_, dy_ = lax.optimization_barrier(operands)
            arrived: list[Any] = []
            at, sent = _left(p, at, again, saved)
            of_rows = wi if source_ is None else gather_shard(p.wi, layouts[0], source_[0], source_[1], "rows")
            _, found, _ = forward_up(p, at, sent, w_, of_rows, _seeing(arrived), keep=True)
            h, dy_ = lax.optimization_barrier((found.h, dy_))  # one exchange's buffers at a time
            # wgrad's operands have gone before dx comes.
            hooks = Hooks(between=lambda d_h, dw: lax.optimization_barrier((d_h, dw)))
            *sums, dw = total
            *made, dw = backward(p, at, found._replace(h=h), None, w_, wi, wo, dy_, hooks, dw)
            return *arrived[0], (*(a + b.astype(a.dtype) for a, b in zip(sums, made, strict=True)), dw)

        zeros = jnp.zeros_like(dy), jnp.zeros(inputs.weights.shape, jnp.float32)
        d_h, total = lax.optimization_barrier((d_h, (*zeros, dw)))
        *more, dw = _repeat(p, layouts, left, one_round, total, inputs, w)
        d_h, seen["more"] = lax.optimization_barrier((d_h, more))
        return d_h, dw

    hooks = Hooks(between=loop, result=lambda rows: after(seen["more"], rows))
    dx, d_weights, dw = backward(p, p.first, saved, x, w, *gathered, dy, hooks, total)
    return dx + seen["more"][0], d_weights + seen["more"][1], dw


def find_together(p: BlockPlan, layouts: tuple[WeightLayout, WeightLayout]) -> Names:
    """Returns the axes of tokens whose devices make equally many rounds, because a round has collectives over them.

    These are ep; the axes over which a quantized wi is gathered, since backward gathers it again for its rows; and all
    axes of tokens if one scale holds for a whole tensor.
    """
    formats = [format for recipe in p.recipe.both for format in (recipe.x, recipe.dy)]
    if any(format is not None and format.shared for format in formats):
        return p.axes.tokens
    # A wi that the caller keeps quantized has the declared layout, whatever the layout of the parameter is.
    both = (*layouts[0].gather, *find_layout(p.wi).gather) if p.recipe.wi.w is not None else ()
    gathered = {name for names in both for name in names}
    return tuple(name for name in p.axes.tokens if name in gathered.union(p.axes.ep))


def after[T](first: PyTree, then: T) -> T:
    """Returns the array or None `then`, on a CPU not before all arrays of `first` are known."""
    # XLA for CPUs runs collectives at once where no data goes from one to the other, and pairs one device's first with
    # another device's second. So the collectives of the loop and of the first round, and of forward and of backward,
    # need such data where dy is a constant or rows are dropped.
    if platform() != "cpu" or first is None:
        return then
    some = [jnp.clip(leaf.ravel()[:1].astype(jnp.float32), -1, 1).sum() for leaf in jax.tree.leaves(first)]
    never = sum(some) < -2 * len(some)  # always False, which XLA does not know
    return jax.tree.map(lambda v: jnp.where(never, jnp.zeros_like(v), v), then)


def _agree(p: BlockPlan, layouts, received, rounds: Int[Array, ""]) -> Int[Array, " 3"]:
    """Returns the round (p, n) with which the loop begins, and the first p that no rank is known to need."""
    max_rows, more = p.first.permute.max_rows, rounds > 1
    if max_rows is not None:
        more |= count_rows(p.first.permute, received.experts) > max_rows
    # With a capacity all rounds have the slots of the first one, whose rows come first.
    first = 0 if p.first.permute.capacity is None else max_rows or 0
    start = jnp.stack([jnp.int32(0), jnp.int32(first), more.astype(jnp.int32)])
    return reduce_max(start, find_together(p, layouts))


def _small(w: Weights[Any]) -> Weights[Any]:
    """Returns the biases and the adapters: a loop holds everything that it is given."""
    return w._replace(wi=None, wo=None)


def _left(p: BlockPlan, at: tuple, inputs: Inputs, saved: Residuals) -> tuple[Round, Inputs]:
    """Returns a later round, and its inputs: an assignment that the first round computed becomes one of no expert."""
    index, start = at
    if p.first.permute.capacity is None:
        # XLA would move loop invariants out of the loop, and then every step would pay for them.
        start, scatter_idx, sent = lax.optimization_barrier((start, saved.plan.scatter_idx, saved.sent))
        # The rank of an assignment sends 1 back, on the way of its row.
        done = (scatter_idx < saved.plan.gather_idx.shape[0]).astype(jnp.float32)
        done = combine_forward(p.first.exchange, done, sent)
        inputs = inputs._replace(experts=jnp.where(done > 0, p.first.exchange.num_experts, inputs.experts))
    return p.later._replace(index=index, start=start), inputs


def _seeing(arrived: list[Any]) -> Hooks:
    """Returns hooks that append what arrived, and the first round that this rank knows not to be needed."""
    return Hooks(lambda received, rounds: arrived.append((received, rounds)) or received)


def _repeat[State](
    p: BlockPlan, layouts, left: Int[Array, " 3"], one_round: Callable[[Any, State], tuple[Any, Array, State]],
    total: State, *operands: PyTree,
) -> State:  # fmt: skip
    """Runs received, end, total = one_round((p, n), total) for each round of the loop, and returns the last total."""
    together, max_rows = find_together(p, layouts), p.later.permute.max_rows

    def again(state):
        (index, start, _), total = state
        received, end, total = one_round((index, start), total)
        most = reduce_max(jnp.stack([count_rows(p.first.permute, received.experts), end]), together)
        rows, end = vary_like(most, *operands)
        last = start + max_rows >= rows
        return jnp.stack([jnp.where(last, index + 1, index), jnp.where(last, 0, start + max_rows), end]), total

    # Inside a `shard_map` the types of the sums vary over the same axes as `operands`.
    state = jax.tree.map(lambda v: vary_like(v, *operands), (left, total))
    return lax.while_loop(lambda state: state[0][0] < state[0][2], again, state)[-1]
