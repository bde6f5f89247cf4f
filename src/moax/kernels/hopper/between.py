"""The activation between the two products, forward and backward, by kernels that quantize too where they can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moax.backend import log_once
from moax.groups import zero_rows
from moax.kernels.hopper.formats import (
    BLOCK,
    BlockedGroups,
    Blocks,
    KMajorFp8,
    takes_fp8,
)
from moax.kernels.hopper.quantization import quantize_for_matmul
from moax.kernels.scales import DTYPES, is_pow2
from moax.kernels.xla import rows as by_xla
from moax.mesh.axes import Names
from moax.mesh.collectives import typed
from moax.recipe import Format, Recipe, Recipes


def activate(
    h: Float[Array, "N G F"], act: Callable, recipe: Recipe, groups: BlockedGroups, *, weights: Any, amax_over: Names
) -> Any:
    """Returns the Operand of act(h), times the weight of each row.

    One kernel also quantizes it where `_fuses` allows that. XLA computes an activation that the kernels cannot.
    """
    flat, gated = h.reshape(h.shape[0], -1), h.shape[1] == 2
    with jax.named_scope("activate"):
        if not takes_activation(act, gated):
            ones = jnp.ones(h.shape[0], jnp.float32) if weights is None else weights
            a = by_xla.activate_rows(h, act, groups, ones)
            return quantize_for_matmul(a, recipe, "x", groups, amax_over, columns=False)[0]
        if _fuses(recipe, recipe, h.shape[2]):
            return _activate_quantize(flat, groups.blocks, act, recipe, gated=gated, weights=weights)
        a = activate_rows(flat, groups.blocks, act, h.shape[1], weights)
    return quantize_for_matmul(a, recipe, "x", groups, amax_over, columns=False)[0]


def activate_grad(
    h: Float[Array, "N G F"], d_a: Float[Array, "N F"], act: Callable, recipes: Recipes, groups: BlockedGroups, *,
    weights: Float[Array, " N"], amax_over: Names, keep: bool,
) -> tuple[Any, Any, Any, Any, Float[Array, " N"]]:  # fmt: skip
    """Computes the backward of `activate`; see `moax.kernels.Implementation`."""
    flat, takes = h.reshape(h.shape[0], -1), takes_activation(act, h.shape[1] == 2)
    with jax.named_scope("activate"):
        if takes and _fuses(recipes.wo, recipes.wi, h.shape[2]) and not keep:
            a, d_h_rows, d_h_columns, inner = _activate_grad_quantize(flat, d_a, groups.blocks, act, recipes, weights)
            return a, d_h_rows, d_h_columns, None, inner
        if takes:
            a, d_h, inner = _activate_grad(flat, d_a, groups.blocks, act, weights)
        else:
            a, d_h, inner = by_xla.activate_grad_rows(h, d_a, act, groups, weights)
            d_h = zero_rows(d_h.reshape(flat.shape), groups.real)  # padding of h may hold NaN, which 0 does not undo
    _, a = quantize_for_matmul(a, recipes.wo, "x", groups, amax_over, rows=False)
    d_h_rows, d_h_columns = quantize_for_matmul(d_h, recipes.wi, "dy", groups, amax_over)
    return a, d_h_rows, d_h_columns, d_h.reshape(h.shape) if keep else None, inner


def takes_activation(act: Callable, gated: bool) -> bool:
    """Returns whether the kernels can compute an activation; where they cannot, the log says once why."""
    from moax.kernels.hopper.pallas.activation import why_not_in_kernels

    why = why_not_in_kernels(act, gated)
    if why is not None:
        log_once(f"kernels='hopper': the kernels do not know {why} of the activation; XLA computes it, which is slower")
    return why is None


def _fuses(of_a: Recipe, of_h: Recipe, width: int) -> bool:
    """Returns whether one kernel activates and quantizes: a by one recipe, and d_h by another.

    It does where 128 divides F, and all scales are powers of two or none is.
    """
    if not takes_fp8(of_a) or not takes_fp8(of_h) or width % BLOCK:
        return False
    x, dy = _formats(of_a, of_h)
    return x.block is not None and dy.block is not None and is_pow2(x) == is_pow2(dy)


def _formats(of_a: Recipe, of_h: Recipe) -> tuple[Format, Format]:
    """Returns the formats of a and of d_h; the recipes have both."""
    return cast(Format, of_a.x), cast(Format, of_h.dy)


@typed
def activate_rows(h: Float[Array, "N GF"], blocks: Blocks, act: Callable, gates: int, weights: Any = None):
    """Returns act(h), times the weight of each row, in bfloat16, by a kernel."""
    from moax.kernels.hopper.pallas.activation_bf16 import activate_rows

    return activate_rows(h, blocks, act, gated=gates == 2, weights=weights)


@typed
def _activate_quantize(h, blocks: Blocks, act, recipe: Recipe, *, gated: bool, weights) -> KMajorFp8:
    """Computes a, quantized by rows, by one kernel."""
    from moax.kernels.hopper.pallas.activation import activate_quantize

    x, _ = _formats(recipe, recipe)
    options: Any = dict(dtype=DTYPES[x.dtype], pow2=is_pow2(x))
    return activate_quantize(h, blocks, act, gated=gated, weights=weights, **options)


@typed
def _activate_grad(h, d_a, blocks: Blocks, act, weights):
    """Computes a, d_h and inner in bfloat16, by a kernel; inner is summed over the tiles of columns."""
    from moax.kernels.hopper.pallas.activation_bf16 import activate_grad_rows

    a, d_h, inner = activate_grad_rows(h, d_a, blocks, act, weights=weights)
    return a, d_h, inner.sum(0)


@typed
def _activate_grad_quantize(h, d_a, blocks: Blocks, act, recipes: Recipes, weights):
    """Computes a by columns, d_h by rows and by columns, and inner, by one kernel.

    `inner` is summed over the tiles of columns.
    """
    from moax.kernels.hopper.pallas.activation import activate_grad_quantize

    x, dy = _formats(recipes.wo, recipes.wi)
    options: Any = dict(dtype_x=DTYPES[x.dtype], dtype_dy=DTYPES[dy.dtype], pow2=is_pow2(x))
    a, d_h_rows, d_h_columns, inner = activate_grad_quantize(h, d_a, blocks, act, weights=weights, **options)
    return a, d_h_rows, d_h_columns, inner.sum(0)
