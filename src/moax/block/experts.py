"""The experts of a block on a mesh, under one `custom_vjp`: each direction gathers the weights and runs its chunks.

    forward    gather wi, wo for products over rows       chunks of forward
    backward   gather wi, wo for products over columns    chunks of backward    scatter the gradients of wi, wo

Each of these steps is an op of its own; `ops/weights.py` has the gather and the scatter.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moax.block.chunks import backward_chunks, forward_chunks
from moax.block.moe import BlockPlan, Inputs, Residuals, Weights
from moax.lora import NAMES, specs_on
from moax.mesh.op import Op, OpSharding, differentiable
from moax.mesh.specs import Spec, device_spec
from moax.mesh.view import MeshView
from moax.ops.weights import QuantizedWeight, find_layout, gather_weight, quantized_specs, scatter_gradient

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
    needs_inputs = p.overflows or not p.save_rows
    return (y, dropped, rounds), (tuple(map(_name, saved)), inputs if needs_inputs else None, w, quantized)


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
    dw = (
        *(
            None if d is None else scatter_gradient(view, weight, d, shard)
            for weight, d, shard in zip((p.wi, p.wo), partial, w, strict=False)
        ),
        *small,
    )
    gradients = (None if v is None or d is None else d.astype(v.dtype) for v, d in zip(w, dw, strict=True))
    return Inputs(dx, cast(Any, None), d_weights), Weights(*gradients), None


_experts = differentiable(_forward, _backward, once="moe", plain=_plain)


def _name(saved: Residuals) -> Residuals:
    """Returns a chunk's residuals with the names of `CHECKPOINT_NAMES`, for a policy of `jax.checkpoint`."""
    rows, h, *rest = saved
    rows = jax.tree.map(lambda v: checkpoint_name(v, "moax_rows"), rows)
    rest = jax.tree.map(lambda v: checkpoint_name(v, "moax_plan"), rest)
    return Residuals(rows, checkpoint_name(h, "moax_hidden"), *rest)


def _forward_shards(p: BlockPlan, layouts, x, experts, weights, w, gathered):
    return forward_chunks(p, layouts, Inputs(x, experts, weights), w, gathered)


def _backward_shards(p: BlockPlan, layouts, saved, x, experts, weights, w: Weights[Array], quantized, gathered, dy):
    inputs = None if x is None else Inputs(x, experts, weights)
    dx, d_weights, dw = backward_chunks(p, layouts, saved, inputs, w, quantized, gathered, dy)
    return dx, d_weights, *dw[2:], tuple(None if d is None else d.astype(p.grad_dtype) for d in dw[:2])


def _specs(p: BlockPlan, w: Weights[Array], found: Weights[Any]):
    """Returns the layouts of wi and wo, and the specs of all weights."""
    ep, tp = p.axes.ep, p.axes.tp
    layouts = find_layout(p.wi, found.wi, w.wi.ndim), find_layout(p.wo, found.wo, w.wo.ndim)
    small = Spec(ep, None, tp), Spec(ep, None), *(getattr(specs_on(p.axes), name) for name in NAMES)
    small = (None if v is None else of for of, v in zip(small, w[2:], strict=True))
    return layouts, Weights(layouts[0].spec, layouts[1].spec, *small)


def _forward_sharding(p: BlockPlan, operands, found) -> OpSharding:
    """Returns the layout of forward: tokens are split, y is summed over tp, and dropped assignments over all tokens."""
    *_, w, gathered = operands
    rows, own, tokens = Spec(p.axes.tokens, None), device_spec(p.axes), p.axes.tokens
    layouts, weights = _specs(p, w, found[3])
    whole = jax.tree.map(lambda _: own, gathered)
    results = rows, Spec(None), Spec(None), own
    return OpSharding((rows,) * 3 + (weights, whole), results, (p.axes.tp, tokens, (), ()), layouts)


def _backward_sharding(p: BlockPlan, operands, found) -> OpSharding:
    """Returns the layout of backward: each gradient has the layout of its array; those of wi and wo are partial."""
    saved, *inputs, w, quantized, gathered, _ = operands
    rows, own, tp, replicas = Spec(p.axes.tokens, None), device_spec(p.axes), p.axes.tp, p.axes.replica_axes
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


_forward_op = Op("experts", _forward_shards, "t h, t k, t k, @, @ -> t h, =, =, @", sharding=_forward_sharding)
_backward_op = Op(
    "experts_grad",
    _backward_shards,
    "@, t h, t k, t k, @, @, @, t h -> t h, t k, @, @, @, @, @, @, @",
    sharding=_backward_sharding,
)
