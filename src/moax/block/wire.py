"""What the weights of a block put on the wire: the gather before the chain, and the scatter of gradients behind it.

Both are partitioned ops of their own. What they make, and what they take, each device has for itself: the leading dim
lies over every axis. Nothing of the tokens enters the gather, so that `moax.scan` runs it a layer ahead.
"""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array

from moax.block.spec import (
    BlockSpec,
    Weights,
    found_layouts,
    quantize_and_gather,
    quantized_specs,
    weight_factors,
    weight_specs,
)
from moax.kernels import Operand
from moax.mesh.collectives import apart, scatter_gradient
from moax.mesh.marks import mark_gathered, mark_terms
from moax.mesh.partition import Contract, MeshView, Partitioned
from moax.mesh.specs import device_spec
from moax.ops.grouped import own_dims, replicated
from moax.recipe import Contracted
from moax.types import QuantizedParams

Gathered = tuple[Operand, Operand]  # wi and wo
Terms = tuple[Any, Any]  # the gradients of the gathered wi and wo on one device; None where they are frozen


def gather_weights(
    view: MeshView,
    static: BlockSpec,
    w: Weights[Array],
    quantized: QuantizedParams[Array] | None,
    contracted: Contracted,
) -> Gathered:
    """Returns the gathered wi and wo for products over `contracted`; see `quantize_and_gather`."""
    gathered = _gather(view, (static, contracted), Weights(w.wi, w.wo, None, None), quantized)
    return mark_gathered(gathered, view.roles)


def scatter_gradients(view: MeshView, static: BlockSpec, terms: Terms, w: Weights[Array]) -> Terms:
    """Returns the gradients of wi and wo, summed and laid out as these weights are; None where they are frozen."""
    if terms[0] is None:
        return terms
    return _scatter(view, static, mark_terms(terms, view.roles), Weights(w.wi, w.wo, None, None))


def _gather_local(static: tuple[BlockSpec, Contracted], layouts, w: Weights[Array], quantized) -> Gathered:
    wi, wo = apart(quantize_and_gather(static[0], w, layouts, static[1], quantized))
    return wi, wo


def _gather_contract(static: tuple[BlockSpec, Contracted], operands, found_specs) -> Contract:
    """Returns the contract of the gather, whose results each device has for itself."""
    (spec, _), (w, quantized) = static, operands
    layouts, own = found_layouts(spec, found_specs[0]), device_spec(spec.roles)
    specs = weight_specs(spec, layouts, w), quantized_specs(spec, w, quantized)
    return Contract(specs, (own, own), ((), ()), layouts)


def _gather_factors(static, operands):
    """Returns the Shardy rule of the gather."""
    w, quantized = operands
    return (*weight_factors(w), *own_dims(quantized)), ()


def _scatter_local(static: BlockSpec, layouts, terms: Terms, w: Weights[Array]) -> Terms:
    """Returns the shards of the gradients; w says the layouts alone."""
    del w
    d_wi, d_wo = (
        scatter_gradient(term, layout.gather, static.grad_reduce) for term, layout in zip(terms, layouts, strict=True)
    )
    return apart((d_wi, d_wo))


def _scatter_contract(static: BlockSpec, operands, found_specs) -> Contract:
    """Returns the contract of the scatter: a gradient is scattered over the axes that its weight was gathered over, and
    summed over the other axes of tokens."""
    terms, w = operands
    layouts, own = found_layouts(static, found_specs[1]), device_spec(static.roles)
    return Contract(
        (jax.tree.map(lambda _: own, terms), weight_specs(static, layouts, w)),
        tuple(layout.spec for layout in layouts),
        tuple(replicated(static.roles, layout) for layout in layouts),
        layouts,
    )


def _scatter_factors(static, operands):
    """Returns the Shardy rule of the scatter: a gradient has the dims of its weight."""
    terms, w = operands
    return (*own_dims(terms), *weight_factors(w)), weight_factors(w)


_gather = Partitioned(_gather_local, _gather_contract, _gather_factors, name="experts_gather")
_scatter = Partitioned(_scatter_local, _scatter_contract, _scatter_factors, name="experts_scatter")
