"""What the weight of a grouped matmul puts on the wire: the gather before a product, and the scatter of its gradient.

Both are partitioned ops of their own. What they make, and what they take, each device has for itself: the leading dim
lies over every axis. Nothing of the rows enters the gather, so that `moax.scan` runs it a layer ahead.

On Auto axes with tp the compiler alone knows which dims of w lie over tp, and so the shape of what a device gathers.
There both stay inside the ops of the products.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array

from moax.kernels import Operand, implementation
from moax.mesh.collectives import apart, scatter_gradient, take_shard
from moax.mesh.marks import mark_gathered, mark_terms
from moax.mesh.partition import Contract, MeshView, Partitioned
from moax.mesh.specs import device_spec, pad
from moax.ops.grouped import GroupedSpec, axes_of_matrix, entries_of, factors, find_layout, replicated, weight
from moax.ops.operands import gather_quantized, operand_spec
from moax.recipe import Contracted
from moax.types import QArray


def set_apart(view: MeshView, static: GroupedSpec) -> GroupedSpec:
    """Returns the static arguments, which say whether the two ops are apart from the products on a mesh."""
    return dataclasses.replace(static, apart=view.engine != "custom_partitioning" or not view.roles.tp)


def gather_matrix(
    view: MeshView, static: GroupedSpec, w: Array | None, quantized: QArray | None, contracted: Contracted
) -> Operand | None:
    """Returns the whole weight as an operand of a product over `contracted`, from w or from `quantized`.

    It is None where the op of the product gathers.
    """
    if not static.apart:
        return None
    (whole,) = _gather(view, (static, contracted), w, quantized)
    return mark_gathered(whole, view.roles)


def scatter_matrix(view: MeshView, static: GroupedSpec, term: Array, w: Array) -> Array:
    """Returns the gradient of w, summed and laid out as w is, from each device's term of it.

    Where the op of the product scatters, `term` is the gradient.
    """
    if not static.apart:
        return term
    (dw,) = _scatter(view, static, mark_terms(term, view.roles), w)
    return dw


def weight_operands(static: GroupedSpec, w: Any, quantized: Any, found_spec: Any):
    """Returns the Layout of a weight, the axes that its dims keep, and the specs of w and of `quantized`."""
    layout, kept = find_layout(static, found_spec, weight(w, quantized).ndim)
    own = None
    if quantized is not None:
        own = operand_spec("quantized", quantized, entries_of(static, pad(layout.spec, quantized.ndim)), static.roles)
    return layout, kept, (None if w is None else layout.spec, own)


def gather_local(static: tuple[GroupedSpec, Contracted], layout, w, quantized) -> tuple[Operand]:
    """Returns the gathered weight of one device."""
    (own, contracted), (layout, kept) = static, layout
    if quantized is not None:
        entries = entries_of(own, pad(layout.spec, quantized.ndim))
        return (apart(gather_quantized(quantized, entries, layout.gather, own.roles, own.dtype)),)
    over, kernels = axes_of_matrix(layout, kept), implementation(own.kernels)
    return (apart(kernels.quantize_and_gather(w, own.recipe, contracted, layout.gather, over, own.dtype)),)


def _gather_contract(static: tuple[GroupedSpec, Contracted], operands, found_specs) -> Contract:
    """Returns the contract of the gather, whose result each device has for itself."""
    (own, _), (w, quantized) = static, operands
    layout, kept, specs = weight_operands(own, w, quantized, found_specs[1].data if w is None else found_specs[0])
    return Contract(specs, (device_spec(own.roles),), ((),), (layout, kept))


def _gather_factors(static, operands):
    """Returns the Shardy rule of the gather."""
    return factors(operands, ("e h *", "e h *"), (), weight(*operands).ndim)


def scatter_local(static: GroupedSpec, layout, term, w) -> tuple[Array]:
    """Returns the shard of the gradient. Where all devices have the same rows, each takes its own."""
    alone, reduce = static.rows != static.roles.tokens, static.grad_reduce
    dw = take_shard(term, layout.gather) if alone else scatter_gradient(term, layout.gather, reduce)
    return (apart(dw.astype(w.dtype) if reduce is None else dw),)  # the others are cast after the sum over dp


def _scatter_contract(static: GroupedSpec, operands, found_specs) -> Contract:
    """Returns the contract of the scatter: the gradient has the layout of its weight."""
    _, w = operands
    layout, _ = find_layout(static, found_specs[1], w.ndim)
    reduce = () if static.rows != static.roles.tokens else replicated(static.roles, layout)
    return Contract((device_spec(static.roles), layout.spec), (layout.spec,), (reduce,), layout)


def _scatter_factors(static: GroupedSpec, operands):
    """Returns the Shardy rule of the scatter."""
    return factors(operands, ("", "e h *"), ("e h *",), operands[1].ndim)


_gather = Partitioned(gather_local, _gather_contract, _gather_factors, name="grouped_matmul_gather")
_scatter = Partitioned(scatter_local, _scatter_contract, _scatter_factors, name="grouped_matmul_scatter")
