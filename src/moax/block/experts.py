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
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moax.block.moe import NO_TOTAL, BlockPlan, Inputs, Residuals, Weights
from moax.block.overflow import after, run_backward, run_forward
from moax.lora import DIMS as ADAPTER_DIMS
from moax.mesh.op import Op, OpSharding, differentiable
from moax.mesh.specs import MeshView, Spec
from moax.ops.weights import QuantizedWeight, find_layout, gather_weight, quantized_specs, scatter_gradient
from moax.params import DIMS

CHECKPOINT_NAMES = ("moax_rows", "moax_hidden", "moax_plan")
Quantized = tuple[QuantizedWeight | None, QuantizedWeight | None]  # of wi and wo


def apply_experts(
    view: MeshView, p: BlockPlan, inputs: Inputs, w: Weights[Array], quantized: Quantized
) -> tuple[Float[Array, "T H"], Int[Array, " 1"], Int[Array, " 1"]]:
    """Computes the experts of a block; the result is differentiable in the tokens, the routing weights and w.

    The inputs have T over (dp, fsdp, ep, cp). `quantized` has wi and wo as `moax.quantize_params` returns them, or
    None; the gradients flow to w.

    Returns y [T, H], a partial sum over tp inside a `shard_map`; the dropped assignments [1] i32; and the most rounds
    of any rank of the mesh [1] i32.
    """
    *tokens, w, _ = _forward_op.reshard(view, p, *inputs, w, None if view.explicit else quantized)
    return _experts(view, p, Inputs(*tokens), w, quantized)


def _gather(view: MeshView, p: BlockPlan, w: Weights[Array], quantized: Quantized, contracted):
    pairs = zip((p.wi, p.wo), (w.wi, w.wo), quantized, strict=True)
    return tuple(gather_weight(view, weight, shard, given, contracted) for weight, shard, given in pairs)


def _forward(view: MeshView, p: BlockPlan, inputs: Inputs, w: Weights[Array], quantized: Quantized):
    gathered = _gather(view, p, w, quantized, "rows")
    y, dropped, rounds, saved = _forward_op(view, p, *inputs, w, gathered)
    # The names of `CHECKPOINT_NAMES`, for a policy of `jax.checkpoint`.
    named = lambda tree, name: jax.tree.map(lambda v: checkpoint_name(v, name), tree)  # noqa: E731
    saved = tuple(
        Residuals(named(rows, "moax_rows"), named(h, "moax_hidden"), *named(rest, "moax_plan"))
        for rows, h, *rest in saved
    )
    needs_inputs = p.overflows or not p.save_rows
    return (y, dropped, rounds), (saved, inputs if needs_inputs else None, w, quantized)


def _plain(view: MeshView, p: BlockPlan, *operands):
    """Runs forward without a backward, which leaves no rows for one."""
    return _forward(view, dataclasses.replace(p, save_rows=False), *operands)[0]


def _backward(view: MeshView, p: BlockPlan, residuals, cotangents):
    saved, inputs, w, quantized = residuals
    # Each direction gathers the weights when it needs them, so XLA must not keep the gathered weights of forward, nor
    # the rows that backward makes again.
    inputs, w, quantized, dy = lax.optimization_barrier((inputs, w, quantized, cotangents[0]))
    gathered = _gather(view, p, w, quantized, "columns")
    given = (None, None, None) if inputs is None else inputs
    dx, d_weights, *small, partial = _backward_op(view, p, saved, *given, w, quantized, gathered, dy)
    of_weights = zip((p.wi, p.wo), partial, w, strict=False)
    large = (None if d is None else scatter_gradient(view, weight, d, shard) for weight, d, shard in of_weights)
    gradients = (
        None if v is None or d is None else d.astype(v.dtype) for v, d in zip(w, (*large, *small), strict=True)
    )
    return Inputs(dx, cast(Any, None), d_weights), Weights(*gradients), None


_experts = differentiable(_forward, _backward, once="moe", plain=_plain)


def _forward_shards(p: BlockPlan, layouts, x, experts, weights, w, gathered):
    """Returns y, the dropped assignments, the most rounds, and the residuals by chunk."""
    made, known = [], None
    for chunk in _split(p, Inputs(x, experts, weights)):
        made.append(run_forward(p, layouts, after(known, chunk), w, gathered))
        known = (made[-1][0], made[-1][2]) if p.overflows else None  # loops of chunks wait for one another
    y, dropped, rounds, saved = zip(*made, strict=True)
    return _join(y, x), sum(dropped[1:], dropped[0]), functools.reduce(jnp.maximum, rounds), saved


def _backward_shards(p: BlockPlan, layouts, saved, x, experts, weights, w: Weights[Array], quantized, gathered, dy):
    """Returns dx, the gradients of the routing weights and of the small weights, and those of wi and wo."""
    inputs = None if x is None else Inputs(x, experts, weights)
    made, known = [], [residuals.overflow for residuals in saved[1:]] or None  # forward of all chunks comes first
    dw: Weights[Any] = NO_TOTAL
    for chunk, residuals in zip(_split(p, (inputs, dy)), saved, strict=True):
        own, d_own = after(known if p.overflows else None, chunk)
        *known, dw = run_backward(p, layouts, residuals, own, w, quantized, gathered, d_own, dw)
        made.append(known)
    dx, d_weights = zip(*made, strict=True)
    large = tuple(None if d is None else d.astype(p.grad_dtype) for d in dw[:2])
    return _join(dx, dy), _join(d_weights, dy), *dw[2:], large


def _split[T](p: BlockPlan, values: T) -> list[T]:
    """Returns the chunks of the arrays [T, ...] of a pytree; tokens of 0 and of no expert complete the last chunk."""
    if p.chunks == 1:
        return [values]
    size, num_experts = p.first.exchange.tokens, p.first.exchange.num_experts

    def complete(rows: Array) -> Array:
        none = jnp.asarray(num_experts if jnp.issubdtype(rows.dtype, jnp.integer) else 0, rows.dtype)
        return lax.pad(rows, none, ((0, size * p.chunks - rows.shape[0], 0), (0, 0, 0)))

    values = jax.tree.map(complete, values)
    return [jax.tree.map(lambda rows, i=i: rows[i * size : (i + 1) * size], values) for i in range(p.chunks)]


def _join(chunks: tuple[Array, ...], like: Array) -> Array:
    """Returns the rows of all chunks, as many as `like` has."""
    return jnp.concatenate(chunks)[: like.shape[0]] if len(chunks) > 1 else chunks[0]


def _specs(p: BlockPlan, w: Weights[Array], found: Weights[Any]):
    """Returns the layouts of wi and wo, and the specs of all weights."""
    split = {"E": p.axes.ep, "F": p.axes.tp}
    layouts = find_layout(p.wi, found.wi, w.wi.ndim), find_layout(p.wo, found.wo, w.wo.ndim)
    pairs = zip((DIMS["bi"], DIMS["bo"], *ADAPTER_DIMS.values()), w[2:], strict=True)
    small = (None if v is None else Spec(*(split.get(letter) for letter in dims)) for dims, v in pairs)
    return layouts, Weights(layouts[0].spec, layouts[1].spec, *small)


def _forward_sharding(p: BlockPlan, operands, found) -> OpSharding:
    """Returns the layout of forward: tokens are split, y is summed over tp, and dropped assignments over all tokens."""
    *_, w, gathered = operands
    rows, own, tokens = Spec(p.axes.tokens, None), Spec(p.axes.all), p.axes.tokens
    layouts, weights = _specs(p, w, found[3])
    whole = jax.tree.map(lambda _: own, gathered)
    results = rows, Spec(None), Spec(None), own
    return OpSharding((rows,) * 3 + (weights, whole), results, (p.axes.tp, tokens, (), ()), layouts)


def _backward_sharding(p: BlockPlan, operands, found) -> OpSharding:
    """Returns the layout of backward: each gradient has the layout of its array; those of wi and wo are partial."""
    saved, *inputs, w, quantized, gathered, _ = operands
    rows, own, tp, replicas = Spec(p.axes.tokens, None), Spec(p.axes.all), p.axes.tp, p.axes.replica_axes
    layouts, weights = _specs(p, w, found[4])
    pairs = zip((p.wi, p.wo), (w.wi, w.wo), quantized, strict=True)
    of_quantized = tuple(None if given is None else quantized_specs(weight, v.shape) for weight, v, given in pairs)
    saved, whole = jax.tree.map(lambda _: own, (saved, gathered))
    given = (None if v is None else rows for v in inputs)
    # tp splits the columns of bi and of wi_b, and the rows of wo_a.
    over = (replicas, replicas + tp, replicas + tp, replicas, replicas, replicas + tp)
    return OpSharding(
        (saved, *given, weights, of_quantized, whole, rows),
        (rows, rows, *(Spec() if s is None else s for s in weights[2:]), own),
        (tp, tp, *over, ()),
        layouts,
    )


_forward_op = Op("experts", _forward_shards, "t h, t k, t k, @, @ -> t h, @, @, @", sharding=_forward_sharding)
_backward_op = Op(
    "experts_grad",
    _backward_shards,
    "@, t h, t k, t k, @, @, @, t h -> t h, t k, @, @, @, @, @, @, @",
    sharding=_backward_sharding,
)
