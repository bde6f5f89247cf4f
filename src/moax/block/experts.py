"""The chain of `moe.py` on a mesh: two partitioned ops, forward and backward, under one `custom_vjp`.

With chunks, a device takes its tokens one part after the other. Backward then computes the forward of each part again,
up to the input of the activation. With 4096 tokens and 4 chunks, part 1 is tokens 1024 to 2047.
"""

from __future__ import annotations

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moax.block.moe import find_gradients, find_hidden, find_output
from moax.block.spec import (
    BlockResiduals,
    BlockSpec,
    Weights,
    backward_contract,
    backward_factors,
    forward_contract,
    forward_factors,
    quantize_and_gather,
    zero_gradients,
)
from moax.mesh.collectives import scatter_gradient
from moax.mesh.partition import MeshView, Partitioned, differentiable

CHECKPOINT_NAMES = ("moax_rows", "moax_hidden", "moax_plan")


def apply_experts(
    view: MeshView,
    static: BlockSpec,
    x: Float[Array, "T H"],
    experts: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    w: Weights[Array],
) -> tuple[Float[Array, "T H"], Int[Array, " 1"]]:
    """Computes the experts' part of the block, which is differentiable in x, weights and w.

    Args:
      view: how ops run on the mesh in force.
      static: the spec of the block.
      x: [T, H], T over (dp, fsdp, ep).
      experts: [T, K] i32, ids of the whole mesh. weights: [T, K] f32.
      w: the weights of the experts.

    Returns:
      y: [T, H], a partial sum over tp inside a `shard_map`. dropped: [1] i32, the dropped assignments.
    """
    return _experts(view, static, *_forward.lay_operands(view, static, x, experts, weights, w))


def _forward_local(static: BlockSpec, layouts, x, experts, weights, w: Weights[Array]):
    """Runs forward on one device.

    Returns y [T, H], the dropped assignments [1], and without chunks the residuals.
    """
    wi, wo = quantize_and_gather(static, w, layouts, "rows")

    def part(operands):
        saved, dropped = find_hidden(static, wi, w.bi, *operands)
        return find_output(static, wo, w.bo, saved, operands[0].shape[0]), dropped, saved

    if static.chunks == 1:
        return part((x, experts, weights))
    y, dropped = lax.map(lambda operands: part(operands)[:2], _split(static.chunks, (x, experts, weights)))
    return _join(y), dropped.sum(0)


def _backward_local(static: BlockSpec, layouts, saved, w: Weights[Array], dy):
    """Computes the transpose of `_forward_local`. `saved` is the residuals, or with chunks (x, experts, weights)."""
    wi, wo = quantize_and_gather(static, w, layouts, "columns")
    if static.chunks == 1:
        dx, d_weights, dw = find_gradients(static, wi, wo, w, saved, dy)
    else:
        (wi_rows, _) = quantize_and_gather(static, w, layouts, "rows")

        def part(total, operands):
            saved, _ = find_hidden(static, wi_rows, w.bi, *operands[:3])
            dx, d_weights, dw = find_gradients(static, wi, wo, w, saved, operands[3])
            return jax.tree.map(lambda t, d: t + d.astype(t.dtype), total, dw), (dx, d_weights)

        parts, zero = _split(static.chunks, (*saved, dy)), zero_gradients(static, w, layouts, (*saved, dy))
        dw, gradients = lax.scan(part, zero, parts)
        dx, d_weights = _join(gradients)
    d_wi, d_wo = (
        scatter_gradient(d.astype(static.dtype), layout.gather) for d, layout in zip(dw[:2], layouts, strict=True)
    )
    return dx, d_weights, d_wi, d_wo, dw.bi, dw.bo


def _split(chunks: int, tree):
    """Reshapes each array [T, ...] of a tree to [chunks, T / chunks, ...]."""
    return jax.tree.map(lambda v: v.reshape(chunks, -1, *v.shape[1:]), tree)


def _join(tree):
    """Reshapes each array [chunks, T / chunks, ...] of a tree to [T, ...]: the inverse of `_split`."""
    return jax.tree.map(lambda v: v.reshape(-1, *v.shape[2:]), tree)


_forward = Partitioned(_forward_local, forward_contract, forward_factors, name="experts")
_backward = Partitioned(_backward_local, backward_contract, backward_factors, name="experts_grad")


def _experts_forward(view: MeshView, static: BlockSpec, x, experts, weights, w: Weights[Array]):
    """Runs the forward of the `custom_vjp` and returns the results, and the residuals with the weights."""
    y, dropped, *saved = _forward(view, static, x, experts, weights, w)
    return (y, dropped), (_name(saved[0]) if saved else (x, experts, weights), w)


def _experts_backward(view: MeshView, static: BlockSpec, residuals, cotangents):
    """Runs the backward of the `custom_vjp` and returns the gradients of x, weights and w."""
    saved, w = residuals
    # Each direction gathers the weights when it needs them, so XLA must not keep the gathered weights of forward.
    w, dy = lax.optimization_barrier((w, cotangents[0]))
    dx, d_weights, *dw = _backward(view, static, saved, w, dy)
    dw = [None if p is None else d.astype(p.dtype) for p, d in zip(w, dw, strict=True)]
    return dx, None, d_weights, w._replace(wi=dw[0], wo=dw[1], bi=dw[2], bo=dw[3])


def _name(saved: BlockResiduals) -> BlockResiduals:
    """Returns the residuals with the names of `CHECKPOINT_NAMES`, for a policy of `jax.checkpoint`."""
    rows, hidden, *rest = saved
    rows = jax.tree.map(lambda v: checkpoint_name(v, "moax_rows"), rows)
    rest = jax.tree.map(lambda v: checkpoint_name(v, "moax_plan"), rest)
    return BlockResiduals(rows, checkpoint_name(hidden, "moax_hidden"), *rest)


_experts = differentiable(_experts_forward, _experts_backward)
