"""The experts of a block on a mesh, under one `custom_vjp`: each direction gathers the weights and runs its rounds.

    forward    gather wi, wo for fprop    rounds of forward
    backward   gather wi, wo for dgrad    rounds of backward    scatter the gradients of wi, wo

Each of these steps is an op of its own; `ops/weights.py` has the gather and the scatter, `rounds.py` the rounds.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from moax.block.chain import Residuals
from moax.block.plan import BlockPlan
from moax.block.rounds import BackwardOperands, Inputs, Layouts, Quantized, run_backward, run_forward
from moax.block.small_terms import Weights
from moax.checks import log_once
from moax.kernels.device import needs_overlap_options
from moax.lora import DIMS as ADAPTER_DIMS
from moax.mesh.collectives import vary_like
from moax.mesh.op import Op, OpSharding, differentiable
from moax.mesh.specs import MeshView, Spec
from moax.ops.weights import GatherSpec, WeightSpec, find_layout, gather_weight, quantized_specs, scatter_gradient
from moax.params import DIMS

OVERLAP_HINT = (
    "weights cross fsdp: jax.jit(..., compiler_options=moax.OVERLAP_OPTIONS) lets them cross while a GPU "
    "computes; see docs/how-to/overlap.md"
)
CHECKPOINT_NAMES = ("moax_rows", "moax_hidden", "moax_plan")


class BlockResult(NamedTuple):
    """The results of the experts of a block.

    Attributes:
      y: [T, H], a partial sum over tp inside a `shard_map`.
      dropped: [1] i32, the dropped assignments.
      rounds: [1] i32, the most rounds of any rank of the mesh.
    """

    y: Float[Array, "T H"]
    dropped: Int[Array, " 1"]
    rounds: Int[Array, " 1"]


def apply_experts(
    view: MeshView,
    p: BlockPlan,
    inputs: Inputs,
    w: Weights[Array],
    quantized: Quantized,
) -> BlockResult:
    """Computes the experts of a block; the result is differentiable in the tokens, the routing weights and w.

    The inputs have T over (dp, fsdp, ep, cp). `quantized` has wi and wo as `moax.quantize_params` returns them, or
    None; the gradients flow to w.
    """
    if view.axes.size(view.axes.fsdp) > 1 and needs_overlap_options():
        log_once(OVERLAP_HINT, logging.INFO)
    inputs, w = jax.tree.map(lambda v: vary_like(v, quantized), (inputs, w))
    _, (inputs, w, _) = _forward_op.lay_out(view, p, inputs, w, None)
    return _experts(view, p, inputs, w, quantized)


def _forward(view: MeshView, p: BlockPlan, inputs: Inputs, w: Weights[Array], quantized: Quantized):
    quantized_wi, quantized_wo = quantized
    tokens = Spec(p.axes.tokens, None)
    gathered_wi = gather_weight(view, GatherSpec(p.wi, "fprop"), w.wi, quantized_wi)
    # Collectives run in the order of their starts, and the first matmul reads wi: the gather of wo starts when the
    # routing is known.
    wo_gather = GatherSpec(p.wo, "fprop", after=(tokens,))
    gathered_wo = gather_weight(view, wo_gather, w.wo, quantized_wo, inputs.experts)
    gathered = (gathered_wi.operand, gathered_wo.operand)
    y, dropped, rounds, saved = _forward_op(view, p, inputs, w, gathered)
    # A policy of `jax.checkpoint` knows the residuals by these names.
    rows, h, *planned = saved
    named = zip((rows, h, planned), CHECKPOINT_NAMES, strict=True)
    rows, h, planned = (checkpoint_name(v, name) for v, name in named)
    saved = Residuals(rows, h, *planned)
    saved_inputs = None
    if p.overflows or not p.save_rows:
        saved_inputs = inputs
    return BlockResult(y, dropped, rounds), (saved, saved_inputs, w, quantized)


def _backward(view: MeshView, p: BlockPlan, residuals, cotangents: BlockResult):
    saved, inputs, w, quantized = residuals
    quantized_wi, quantized_wo = quantized
    own = Spec(p.axes.all)
    tokens = Spec(p.axes.tokens, None)
    # Backward makes rows again. Without the barrier XLA would keep those of forward, as common subexpressions
    # (jax-ml/jax#13999).
    inputs, dy = lax.optimization_barrier((inputs, cotangents.y))
    # The first matmul reads wo. The gather of wo needs forward alone, so that XLA may start it before dy is there.
    wo_gather = GatherSpec(p.wo, "dgrad", after=(own,))
    gathered_wo = gather_weight(view, wo_gather, w.wo, quantized_wo, saved.plan.group_sizes)
    # The gather of wi starts behind it, and behind the small gathers of the layer: a quantized wi when the scales of
    # both have arrived, another wi when the inputs are there, which a layer under `jax.checkpoint` makes again.
    known = cotangents.y
    if p.recipe.w is None:
        known = dy
    wi_gather = GatherSpec(p.wi, "dgrad", after=(tokens, own), scales_first=True)
    gathered_wi = gather_weight(view, wi_gather, w.wi, quantized_wi, known, gathered_wo.quantized)
    gathered = (gathered_wi.operand, gathered_wo.operand)
    operands = BackwardOperands(inputs, w, gathered, saved, quantized, dy)
    dx, d_weights, *d_small, (d_wi, d_wo) = _backward_op(view, p, *operands)
    d_wi = _scatter(view, p.wi, d_wi, w.wi)
    d_wo = _scatter(view, p.wo, d_wo, w.wo)
    grads = Weights(d_wi, d_wo, *d_small)
    grads = Weights(*(_cast(d, v) for d, v in zip(grads, w, strict=True)))
    no_gradient: Any = None  # the experts are integers
    return Inputs(dx, no_gradient, d_weights), grads, None


def _scatter(view: MeshView, weight: WeightSpec, d: Array | None, shard: Array) -> Array | None:
    """Returns the gradient of a shard, or None for a frozen weight."""
    return None if d is None else scatter_gradient(view, weight, d, shard)


def _cast(d: Array | None, v: Array | None) -> Array | None:
    """Returns the gradient of an array in its dtype; None where there is no array, or no gradient."""
    return None if d is None or v is None else d.astype(v.dtype)


def _apply_plain(view: MeshView, p: BlockPlan, *operands):
    """Returns the results of `_forward`, which saves no rows where nothing is differentiated."""
    results, _ = _forward(view, dataclasses.replace(p, save_rows=False), *operands)
    return results


_experts = differentiable("moe", _forward, _backward, plain=_apply_plain)


def _backward_shards(p: BlockPlan, layouts: Layouts, *operands):
    """Returns dx and the gradients of all weights, from the fields of `BackwardOperands`."""
    dx, d_weights, grads = run_backward(p, layouts, BackwardOperands(*operands))
    d_wi, d_wo, *d_small = grads
    large = tuple(None if d is None else d.astype(p.wi.grad_dtype) for d in (d_wi, d_wo))
    return dx, d_weights, *d_small, large


def _sharding(p: BlockPlan, operands, operand_specs, *, backward: bool = False) -> OpSharding:
    """Returns the layout of a direction: tokens are split, and a gradient has the layout of its array."""
    inputs, w, gathered, *others = operands
    specs_of_w = operand_specs[1]
    tokens, tp = p.axes.tokens, p.axes.tp
    rows = Spec(tokens, None)
    own = Spec(p.axes.all)  # each device's own array
    layouts = (
        find_layout(p.wi, specs_of_w.wi, w.wi.ndim),
        find_layout(p.wo, specs_of_w.wo, w.wo.ndim),
    )
    wi_layout, wo_layout = layouts
    small = _find_small_specs(p, w)
    input_specs = jax.tree.map(lambda _: rows, inputs)
    weight_specs = Weights(wi_layout.spec, wo_layout.spec, *small)
    specs = (input_specs, weight_specs, jax.tree.map(lambda _: own, gathered))
    if not backward:
        return OpSharding(specs, (rows, Spec(None), Spec(None), own), (tp, tokens, (), ()), layouts)
    saved, quantized, _ = others
    quantized_wi, quantized_wo = quantized
    quantized_specs_of = (
        None if quantized_wi is None else quantized_specs(p.wi, w.wi.shape),
        None if quantized_wo is None else quantized_specs(p.wo, w.wo.shape),
    )
    replicas = p.axes.replica_axes
    # tp splits the columns of bi and of wi_b, and the rows of wo_a: their gradients are whole on each rank of tp.
    # The gradients of wi and wo stay partial sums.
    sums = {
        "bi": replicas,
        "bo": replicas + tp,
        "wi_a": replicas + tp,
        "wi_b": replicas,
        "wo_a": replicas,
        "wo_b": replicas + tp,
    }
    small_results = [Spec() if spec is None else spec for spec in small]
    results = (rows, rows, *small_results, own)
    reduce = (tp, tp, *sums.values(), ())
    specs = (*specs, jax.tree.map(lambda _: own, saved), quantized_specs_of, rows)
    return OpSharding(specs, results, reduce, layouts)


def _find_small_specs(p: BlockPlan, w: Weights[Array]) -> list[Spec | None]:
    """Returns the specs of the biases and of the adapters' matrices, in the order of `Weights`."""
    axes_of = {"E": p.axes.ep, "F": p.axes.tp}
    dims_of = (DIMS["bi"], DIMS["bo"], *ADAPTER_DIMS.values())
    specs: list[Spec | None] = []
    for dims, v in zip(dims_of, w[2:], strict=True):
        specs.append(None if v is None else Spec(*map(axes_of.get, dims)))
    return specs


_forward_op = Op("experts", run_forward, "{t h | t k | t k}, @, @ -> t h, @, @, @", sharding=_sharding)
_backward_op = Op(
    "experts_grad",
    _backward_shards,
    "{t h | t k | t k}, @, @, @, @, t h -> t h, t k, @, @, @, @, @, @, @",
    sharding=functools.partial(_sharding, backward=True),
)
