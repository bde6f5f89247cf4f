"""The experts of a block on a mesh, under one `custom_vjp`: each direction gathers the weights and runs its chunks.

    forward    gather wi, wo for products over rows       chunks of forward
    backward   gather wi, wo for products over columns    chunks of backward    scatter the gradients of wi, wo

Each of these steps is an op of its own; `ops/weights.py` has the gather and the scatter. Chunks are the tokens of a
device in equal parts, which no data joins until their results are put together:

    tokens 0 to n - 1     dispatch   products   combine
    tokens n to T - 1                dispatch   products   combine        n = ceil(T / chunks)

XLA may then run the dispatch and the combine of one chunk beside the products of another. In backward the gradient of a
weight goes from chunk to chunk and each one adds to it, so that it is scattered once. Every chunk has buffers of its
own, and overflow rounds of its own where its tokens need them.

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
of the first round, between its two products: a GPU waits for its host where a loop may begin, and the host then
launches the rest of the step while the second product runs. Each round holds collectives: the ranks of ep make equally
many rounds, as many as the busiest of them needs.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PyTree

from moax.block.moe import BlockPlan, Residuals, Weights, backward_down, backward_up, forward_down, forward_up
from moax.checks import log_once
from moax.kernels import Operand, implementation
from moax.kernels.device import collectives_may_race, needs_overlap_options
from moax.lora import DIMS as ADAPTER_DIMS
from moax.mesh.axes import Names
from moax.mesh.collectives import reduce_max, vary_like
from moax.mesh.op import Op, OpSharding, differentiable
from moax.mesh.specs import MeshView, Spec
from moax.ops.dispatch_combine import combine_forward, dispatch_forward
from moax.ops.permutation import count_rows
from moax.ops.weights import (
    QuantizedWeight,
    WeightLayout,
    find_layout,
    gather_shard,
    gather_weight,
    quantized_specs,
    scatter_gradient,
)
from moax.params import DIMS

OVERLAP_HINT = (
    "weights cross fsdp: jax.jit(..., compiler_options=moax.OVERLAP_OPTIONS) lets them cross while a GPU computes; "
    "see docs/how-to/overlap.md"
)
CHECKPOINT_NAMES = ("moax_rows", "moax_hidden", "moax_plan")
# The tokens x [T, H], experts [T, K] i32 and routing weights [T, K] f32.
Inputs = tuple[Float[Array, "T H"], Int[Array, "T K"], Float[Array, "T K"]]
Quantized = tuple[QuantizedWeight | None, QuantizedWeight | None]  # of wi and wo
Layouts = tuple[WeightLayout, WeightLayout]  # of wi and wo
Gathered = tuple[Operand, Operand]  # wi and wo


def apply_experts(
    view: MeshView, p: BlockPlan, inputs: Inputs, w: Weights[Array], quantized: Quantized
) -> tuple[Float[Array, "T H"], Int[Array, " 1"], Int[Array, " 1"]]:
    """Computes the experts of a block; the result is differentiable in the tokens, the routing weights and w.

    The inputs have T over (dp, fsdp, ep, cp). `quantized` has wi and wo as `moax.quantize_params` returns them, or
    None; the gradients flow to w.

    Returns y [T, H], a partial sum over tp inside a `shard_map`; the dropped assignments [1] i32; and the most rounds
    of any rank of the mesh [1] i32.
    """
    if view.axes.size(view.axes.fsdp) > 1 and needs_overlap_options():
        log_once(OVERLAP_HINT, logging.INFO)
    inputs, w = jax.tree.map(lambda v: vary_like(v, quantized), (inputs, w))
    _, (*tokens, w, _) = _forward_op.lay_out(view, p, *inputs, w, None)
    return _experts(view, p, tuple(tokens), w, quantized)


def _forward(view: MeshView, p: BlockPlan, inputs: Inputs, w: Weights[Array], quantized: Quantized):
    x, experts, weights = inputs
    gathered_wi = gather_weight(view, p.wi, w.wi, quantized[0], "rows")
    # Collectives run in the order of their starts, and the first product reads wi: the gather of wo starts when the
    # routing is known.
    wo, quantized_wo, experts = lax.optimization_barrier((w.wo, quantized[1], experts))
    gathered_wo = gather_weight(view, p.wo, wo, quantized_wo, "rows")
    y, dropped, rounds, saved = _forward_op(view, p, x, experts, weights, w, (gathered_wi, gathered_wo))
    # A policy of `jax.checkpoint` knows the residuals by these names.
    named = ([*map(checkpoint_name, (rows, h, plan), CHECKPOINT_NAMES)] for rows, h, *plan in saved)
    saved = tuple(Residuals(rows, h, *plan) for rows, h, plan in named)
    needs_inputs = p.overflows or not p.save_rows
    return (y, dropped, rounds), (saved, inputs if needs_inputs else None, w, quantized)


def _backward(view: MeshView, p: BlockPlan, residuals, cotangents):
    saved, inputs, w, quantized = residuals
    # Each direction gathers the weights when it needs them, so XLA must not keep the gathered weights of forward, nor
    # the rows that backward makes again. The first product reads wo. The gather of wo needs forward alone, so that XLA
    # may start it before dy is there; the gather of wi starts behind it.
    first, *others = saved
    wo, quantized_wo, sizes = lax.optimization_barrier((w.wo, quantized[1], first.plan.group_sizes))
    saved = (first._replace(plan=dataclasses.replace(first.plan, group_sizes=sizes)), *others)
    inputs, w, quantized_wi, dy = lax.optimization_barrier((inputs, w._replace(wo=None), quantized[0], cotangents[0]))
    w = w._replace(wo=wo)
    quantized = (quantized_wi, quantized_wo)
    gathered_wi = gather_weight(view, p.wi, w.wi, quantized_wi, "columns")
    gathered_wo = gather_weight(view, p.wo, w.wo, quantized_wo, "columns")
    gathered = (gathered_wi, gathered_wo)
    given = (None, None, None) if inputs is None else inputs
    dx, d_weights, *small, partial = _backward_op(view, p, *given, w, gathered, saved, quantized, dy)
    of_weights = zip((p.wi, p.wo), partial, w, strict=False)
    large = (None if d is None else scatter_gradient(view, weight, d, shard) for weight, d, shard in of_weights)
    gradients = (
        None if v is None or d is None else d.astype(v.dtype) for v, d in zip(w, (*large, *small), strict=True)
    )
    return (dx, None, d_weights), Weights(*gradients), None


_experts = differentiable(
    "moe", _forward, _backward,
    plain=lambda view, p, *operands: _forward(view, dataclasses.replace(p, save_rows=False), *operands)[0],
)  # fmt: skip


def _forward_shards(p: BlockPlan, layouts: Layouts, x, experts, weights, w: Weights[Array], gathered: Gathered):
    """Returns y, the dropped assignments, the most rounds, and the residuals by chunk."""
    made, known = [], None
    for chunk in _split(p, (x, experts, weights)):
        made.append(run_forward(p, layouts, after(known, chunk) if known else chunk, w, gathered))
        known = (made[-1][0], made[-1][2]) if p.overflows else None  # loops of chunks wait for one another
    y, dropped, rounds, saved = zip(*made, strict=True)
    y = jnp.concatenate(y)[: x.shape[0]]
    return y, sum(dropped[1:], dropped[0]), functools.reduce(jnp.maximum, rounds), saved


def _backward_shards(p: BlockPlan, layouts: Layouts, x, experts, weights, w, gathered, saved, quantized, dy):
    """Returns dx, the gradients of the routing weights and of the small weights, and those of wi and wo."""
    made, known = [], [residuals.overflow for residuals in saved[1:]]  # forward of all chunks comes first
    inputs, dw = None if x is None else (x, experts, weights), Weights[Any](None, None)
    for chunk, residuals in zip(_split(p, (inputs, dy)), saved, strict=True):
        own, d_own = after(known, chunk) if p.overflows and known else chunk
        *known, dw = run_backward(p, layouts, residuals, own, w, quantized, gathered, d_own, dw)
        made.append(known)
    dx, d_weights = (jnp.concatenate(of_chunks)[: dy.shape[0]] for of_chunks in zip(*made, strict=True))
    large = tuple(None if d is None else d.astype(p.wi.grad_dtype) for d in dw[:2])
    return dx, d_weights, *dw[2:], large


def _split[T](p: BlockPlan, values: T) -> list[T]:
    """Returns the chunks of the arrays [T, ...] of a pytree; tokens of 0 and of no expert complete the last chunk."""
    if p.chunks == 1:
        return [values]
    size, num_experts = p.first.exchange.tokens, p.config.num_experts

    def complete(rows: Array) -> Array:
        none = jnp.asarray(num_experts if jnp.issubdtype(rows.dtype, jnp.integer) else 0, rows.dtype)
        return lax.pad(rows, none, ((0, size * p.chunks - rows.shape[0], 0), (0, 0, 0)))

    values = jax.tree.map(complete, values)
    return [jax.tree.map(lambda rows, i=i: rows[i * size : (i + 1) * size], values) for i in range(p.chunks)]


def run_forward(
    p: BlockPlan, layouts: Layouts, inputs: Inputs, w: Weights[Array], gathered: Gathered
) -> tuple[Float[Array, "T H"], Int[Array, " 1"], Int[Array, " 1"], Residuals]:
    """Runs all rounds of forward, with wi and wo `gathered` for products over rows.

    Returns y [T, H], a partial sum where tp splits F; the dropped assignments [1]; the most rounds of any rank [1]; and
    the residuals of the first round.
    """
    wi, wo = gathered
    received, rounds = dispatch_forward(p.first.exchange, *inputs)  # rows [R, H]
    if not p.overflows:
        saved, groups, a = forward_up(p, p.first, received, w, wi, keep=p.save_rows)
        return *forward_down(p, p.first, received, saved, groups, a, w, wo), jnp.ones(1, jnp.int32), saved
    more, max_rows = rounds > 1, p.first.permute.max_rows
    if max_rows is not None:
        more |= count_rows(p.first.permute, received.experts) > max_rows
    # With a capacity all rounds have the slots of the first one, whose rows come first.
    first = 0 if p.first.permute.capacity is None else max_rows or 0
    left = jnp.stack([jnp.int32(0), jnp.int32(first), more.astype(jnp.int32)])
    # The exchange has just brought the ranks together, so here they agree without a wait.
    received, left = lax.optimization_barrier((received, reduce_max(left, find_together(p, layouts))))
    saved, groups, a = forward_up(p, p.first, received, w, wi, keep=p.save_rows)

    def one_round(received, start, w, gathered, total):
        wi, wo = gathered
        found, groups, a = forward_up(p, p.later, received, w, wi, keep=False, start=start)
        (y, made), (more, _) = total, forward_down(p, p.later, received, found, groups, a, w, wo)
        return y + more, made + 1

    zeros = jnp.zeros(inputs[0].shape, p.dtype), jnp.ones((), jnp.int32)
    (h, a), zeros, begin = lax.optimization_barrier(((saved.h, a), zeros, after((saved.h, received), left)))
    more, made = _repeat(p, layouts, begin, saved, inputs, w, gathered, one_round, zeros)
    h, a, more = lax.optimization_barrier((h, a, more))
    h, a = after(more, (h, a))
    y, dropped = forward_down(p, p.first, received, saved._replace(h=h), groups, a, w, wo)
    y = y + more
    saved = saved._replace(h=h, overflow=after(y, left))
    return y, dropped, reduce_max(made, p.axes.tokens)[None], saved


def run_backward(
    p: BlockPlan, layouts: Layouts, saved: Residuals, inputs: Inputs | None, w: Weights[Array], quantized: Quantized,
    gathered: Gathered, dy: Float[Array, "T H"], total: Weights[Any],
) -> tuple[Float[Array, "T H"], Float[Array, "T K"], Weights[Array]]:  # fmt: skip
    """Runs all rounds of backward, with wi and wo `gathered` for products over columns.

    Later rounds also gather wi for products over rows, from `quantized` where the caller keeps it. The inputs are None
    where backward reads none of them.

    Returns dx [T, H]; d_weights [T, K]; and the gradients of the gathered weights, added to `total`.
    """
    (wi, wo), x, left = gathered, None if inputs is None else inputs[0], saved.overflow
    dy = dy if left is None else after(left, dy)
    sizes, num_rows = saved.plan.group_sizes, saved.plan.gather_idx.shape[0]
    groups = implementation(p.kernels).find_groups(sizes, p.first.permute.align, num_rows, p.expected)
    grads, dw = backward_down(p, p.first, saved, groups, x, w, wo, dy, total)
    if left is None or inputs is None:
        return *backward_up(p, p.first, saved, groups, grads, wi), dw
    # Products over rows take a quantized wi in another form than those over columns.
    source = None if p.recipe.wi.w is None else (w.wi if quantized[0] is None else None, quantized[0])

    def one_round(received, start, w, held, total):
        (wi, wo), source, dy = held
        (of_rows,) = (wi,) if source is None else gather_shard((p.wi, "rows"), layouts[0], *source)
        found, groups, _ = forward_up(p, p.later, received, w, of_rows, keep=True, start=start)
        h, dy = lax.optimization_barrier((found.h, dy))  # one exchange's buffers at a time
        found, (*sums, dw) = found._replace(h=h), total
        # wgrad's operands have gone before dx comes.
        grads, dw = lax.optimization_barrier(backward_down(p, p.later, found, groups, None, w, wo, dy, dw))
        made = backward_up(p, p.later, found, groups, grads, wi)
        return (*(a + b.astype(a.dtype) for a, b in zip(sums, made, strict=True)), dw)

    zeros = jnp.zeros_like(dy), jnp.zeros(inputs[2].shape, jnp.float32)
    grads, total = lax.optimization_barrier((grads, (*zeros, dw)))
    *more, dw = _repeat(p, layouts, left, saved, inputs, w, (gathered, source, dy), one_round, total)
    grads, more = lax.optimization_barrier((grads, more))
    dx, d_weights = backward_up(p, p.first, saved, groups, after(more, grads), wi)
    return dx + more[0], d_weights + more[1], dw


def _repeat[State](
    p: BlockPlan, layouts: Layouts, left: Int[Array, " 3"], saved: Residuals, inputs: Inputs, w: Weights[Any],
    held: PyTree, one_round: Callable[..., State], total: State,
) -> State:  # fmt: skip
    """Runs total = one_round(received, start, small weights, held, total) for each round of the loop; returns total."""
    together, max_rows, some = find_together(p, layouts), p.later.permute.max_rows, p.first.permute.capacity is not None

    def again(state):
        (index, start, _), total = state
        # XLA would move loop invariants out of the loop, and then every step would pay for them.
        operands = inputs, w._replace(wi=None, wo=None), held, None if some else (saved.plan.scatter_idx, saved.sent)
        index, start, ((x, experts, weights), small, held_, done) = lax.optimization_barrier((index, start, operands))
        if done is not None:  # an assignment that the first round computed becomes one of no expert
            scatter_idx, sent = done
            # The rank of an assignment sends 1 back, on the way of its row.
            done = (scatter_idx < saved.plan.gather_idx.shape[0]).astype(jnp.float32)
            done = combine_forward(p.first.exchange, done, sent)
            experts = jnp.where(done > 0, p.config.num_experts, experts)
        received, end = dispatch_forward(p.later.exchange, x, experts, weights, index)
        total = one_round(received, start, small, held_, total)
        # `end` is the first round that this rank knows not to be needed.
        most = reduce_max(jnp.stack([count_rows(p.first.permute, received.experts), end]), together)
        rows, end = vary_like(most, inputs, w)
        last = start + max_rows >= rows
        return jnp.stack([jnp.where(last, index + 1, index), jnp.where(last, 0, start + max_rows), end]), total

    # Inside a `shard_map` the types of the sums vary over the same axes as the operands.
    state = jax.tree.map(lambda v: vary_like(v, inputs, w), (left, total))
    return lax.while_loop(lambda state: state[0][0] < state[0][2], again, state)[-1]


def find_together(p: BlockPlan, layouts: Layouts) -> Names:
    """Returns the axes of tokens whose devices make equally many rounds, because a round has collectives over them.

    These are ep; the axes over which a quantized wi is gathered, since backward gathers it again for its rows; and all
    axes of tokens if one scale holds for a whole tensor.
    """
    formats = [format for recipe in (p.recipe.wi, p.recipe.wo) for format in (recipe.x, recipe.dy)]
    if any(format is not None and format.shared for format in formats):
        return p.axes.tokens
    # A wi that the caller keeps quantized has the declared layout, whatever the layout of the parameter is.
    both = (*layouts[0].gather, *find_layout(p.wi).gather) if p.recipe.wi.w is not None else ()
    gathered = {name for names in both for name in names}
    return tuple(name for name in p.axes.tokens if name in gathered.union(p.axes.ep))


def after[T](first: PyTree, then: T) -> T:
    """Returns the arrays of `then`, on a CPU not before all arrays of `first` are known."""
    # XLA for CPUs runs collectives at once where no data goes from one to the other, and pairs one device's first with
    # another device's second. So the collectives of the loop and of the first round, and of forward and of backward,
    # need such data where dy is a constant or rows are dropped.
    if not collectives_may_race():
        return then
    some = [jnp.clip(leaf.ravel()[:1].astype(jnp.float32), -1, 1).sum() for leaf in jax.tree.leaves(first)]
    never = sum(some) < -2 * len(some)  # always False, which XLA does not know
    return jax.tree.map(lambda v: jnp.where(never, jnp.zeros_like(v), v), then)


def _sharding(p: BlockPlan, operands, found, *, backward: bool = False) -> OpSharding:
    """Returns the layout of a direction: tokens are split, and a gradient has the layout of its array."""
    *inputs, w, gathered = operands[:5]
    tokens, tp, replicas = p.axes.tokens, p.axes.tp, p.axes.replica_axes
    rows, own = Spec(tokens, None), Spec(p.axes.all)
    layouts = find_layout(p.wi, found[3].wi, w.wi.ndim), find_layout(p.wo, found[3].wo, w.wo.ndim)
    split = {"E": p.axes.ep, "F": tp}
    pairs = zip((DIMS["bi"], DIMS["bo"], *ADAPTER_DIMS.values()), w[2:], strict=True)
    small = [None if v is None else Spec(*map(split.get, dims)) for dims, v in pairs]
    weights, whole = Weights(layouts[0].spec, layouts[1].spec, *small), jax.tree.map(lambda _: own, gathered)
    specs = *(None if v is None else rows for v in inputs), weights, whole
    if not backward:
        return OpSharding(specs, (rows, Spec(None), Spec(None), own), (tp, tokens, (), ()), layouts)
    saved, quantized, _ = operands[5:]
    pairs = zip((p.wi, p.wo), w[:2], quantized, strict=True)
    kept = tuple(None if given is None else quantized_specs(weight, v.shape) for weight, v, given in pairs)
    # tp splits the columns of bi and of wi_b, and the rows of wo_a. The gradients of wi and wo stay partial sums.
    over = (replicas, replicas + tp, replicas + tp, replicas, replicas, replicas + tp)
    results = rows, rows, *(Spec() if s is None else s for s in small), own
    return OpSharding((*specs, jax.tree.map(lambda _: own, saved), kept, rows), results, (tp, tp, *over, ()), layouts)


_forward_op = Op("experts", _forward_shards, "t h, t k, t k, @, @ -> t h, @, @, @", sharding=_sharding)
_backward_op = Op(
    "experts_grad",
    _backward_shards,
    "t h, t k, t k, @, @, @, @, t h -> t h, t k, @, @, @, @, @, @, @",
    sharding=functools.partial(_sharding, backward=True),
)
