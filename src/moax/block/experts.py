"""The passes of `passes.py` on a mesh: two partitioned ops, forward and backward, under one `custom_vjp`."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moax.block.passes import run_backward, run_forward
from moax.block.spec import (
    BlockResiduals,
    BlockSpec,
    Inputs,
    Weights,
    backward_contract,
    backward_factors,
    forward_contract,
    forward_factors,
)
from moax.mesh.collectives import scatter_gradient
from moax.mesh.partition import MeshView, Partitioned, differentiable
from moax.types import QuantizedParams

CHECKPOINT_NAMES = ("moax_rows", "moax_hidden", "moax_plan")


def apply_experts(
    view: MeshView,
    static: BlockSpec,
    inputs: Inputs,
    w: Weights[Array],
    quantized: QuantizedParams | None = None,
) -> tuple[Float[Array, "T H"], Int[Array, " 1"], Int[Array, " 1"]]:
    """Computes the experts' part of the block, which is differentiable in the tokens, the routing weights and w.

    Args:
      view: how ops run on the mesh in force.
      static: the spec of the block.
      inputs: tokens, experts and routing weights, T over (dp, fsdp, ep, cp).
      w: the weights of the experts.
      quantized: wi and wo as `quantize_params` returns them. The gradients are those of w.

    Returns:
      y: [T, H], a partial sum over tp inside a `shard_map`. dropped: [1] i32, the dropped assignments. passes: [1] i32,
      the most passes of any rank of the mesh.
    """
    return _experts(view, static, *_forward.lay_operands(view, static, inputs, w, quantized))


def _backward_local(static: BlockSpec, layouts, saved, inputs, w: Weights[Array], quantized, dy):
    """Runs backward on one device and returns the gradients of x, the routing weights, and each weight's shard."""
    dx, d_weights, dw = run_backward(static, layouts, saved, inputs, w, quantized, dy)
    d_wi, d_wo = (
        None if d is None else scatter_gradient(d.astype(static.grad_dtype), layout.gather, static.grad_reduce)
        for d, layout in zip(dw[:2], layouts, strict=True)
    )
    return dx, d_weights, d_wi, d_wo, *dw[2:]


_forward = Partitioned(run_forward, forward_contract, forward_factors, name="experts")
_backward = Partitioned(_backward_local, backward_contract, backward_factors, name="experts_grad")


def _experts_forward(view: MeshView, static: BlockSpec, inputs: Inputs, w: Weights[Array], quantized):
    """Runs the forward of the `custom_vjp` and returns the results, and the residuals with the weights."""
    y, dropped, passes, saved = _forward(view, static, inputs, w, quantized)
    return (y, dropped, passes), (_name(saved), inputs if static.needs_inputs else None, w, quantized)


def _experts_plain(view: MeshView, static: BlockSpec, *operands):
    """Returns the results of the forward without a backward: it makes no rows for one."""
    return _experts_forward(view, dataclasses.replace(static, save_rows=False), *operands)[0]


def _experts_backward(view: MeshView, static: BlockSpec, residuals, cotangents):
    """Runs the backward of the `custom_vjp` and returns the gradients of the inputs and of w."""
    saved, inputs, w, quantized = residuals
    # Each direction gathers the weights when it needs them, so XLA must not keep the gathered weights of forward, nor
    # the rows that backward makes again.
    inputs, w, quantized, dy = lax.optimization_barrier((inputs, w, quantized, cotangents[0]))
    dx, d_weights, *dw = _backward(view, static, saved, inputs, w, quantized, dy)
    gradients = Weights(*(None if p is None or d is None else d.astype(p.dtype) for p, d in zip(w, dw, strict=True)))
    return Inputs(dx, cast(Any, None), d_weights), gradients, None


def _name(saved: BlockResiduals) -> BlockResiduals:
    """Returns the residuals with the names of `CHECKPOINT_NAMES`, for a policy of `jax.checkpoint`."""
    rows, hidden, *rest = saved
    rows = jax.tree.map(lambda v: checkpoint_name(v, "moax_rows"), rows)
    rest = jax.tree.map(lambda v: checkpoint_name(v, "moax_plan"), rest)
    return BlockResiduals(rows, checkpoint_name(hidden, "moax_hidden"), *rest)


_experts = differentiable(_experts_forward, _experts_backward, once="moe", plain=_experts_plain)
