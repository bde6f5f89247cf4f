"""The passes of `passes.py` on a mesh, under one `custom_vjp`: each direction gathers the weights, and runs its passes.

    forward    gather wi, wo for products over rows      run the passes
    backward   gather wi, wo for products over columns   run the passes    scatter the gradients of wi, wo

Each of these steps is a partitioned op of its own; `wire.py` has the gather and the scatter.
"""

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
from moax.block.wire import gather_weights, scatter_gradients
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
    inputs, w, quantized, _ = _forward.lay_operands(view, static, inputs, w, quantized, None)
    return _experts(view, static, inputs, w, quantized)


def _backward_local(static: BlockSpec, layouts, saved, inputs, w: Weights[Array], quantized, gathered, dy):
    """Runs backward on one device.

    Returns the gradients of x, of the routing weights, of the biases and the adapters, and of the gathered wi and wo.
    """
    dx, d_weights, dw = run_backward(static, layouts, saved, inputs, w, quantized, gathered, dy)
    terms = (None if d is None else d.astype(static.grad_dtype) for d in dw[:2])
    return dx, d_weights, *dw[2:], *terms


_forward = Partitioned(run_forward, forward_contract, forward_factors, name="experts")
_backward = Partitioned(_backward_local, backward_contract, backward_factors, name="experts_grad")


def _experts_forward(view: MeshView, static: BlockSpec, inputs: Inputs, w: Weights[Array], quantized):
    """Runs the forward of the `custom_vjp` and returns the results, and the residuals with the weights."""
    gathered = gather_weights(view, static, w, quantized, "rows")
    y, dropped, passes, saved = _forward(view, static, inputs, w, quantized, gathered)
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
    gathered = gather_weights(view, static, w, quantized, "columns")
    dx, d_weights, *others, d_wi, d_wo = _backward(view, static, saved, inputs, w, quantized, gathered, dy)
    dw = *scatter_gradients(view, static, (d_wi, d_wo), w), *others
    gradients = Weights(*(None if p is None or d is None else d.astype(p.dtype) for p, d in zip(w, dw, strict=True)))
    return Inputs(dx, cast(Any, None), d_weights), gradients, None


def _name(saved: BlockResiduals) -> BlockResiduals:
    """Returns the residuals with the names of `CHECKPOINT_NAMES`, for a policy of `jax.checkpoint`."""
    rows, hidden, *rest = saved
    rows = jax.tree.map(lambda v: checkpoint_name(v, "moax_rows"), rows)
    rest = jax.tree.map(lambda v: checkpoint_name(v, "moax_plan"), rest)
    return BlockResiduals(rows, checkpoint_name(hidden, "moax_hidden"), *rest)


_experts = differentiable(_experts_forward, _experts_backward, once="moe", plain=_experts_plain)
