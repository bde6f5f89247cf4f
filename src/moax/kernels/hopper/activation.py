"""The activation between the two products, forward and backward, by kernels that also quantize where they can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moax.backend import log_once
from moax.groups import zero_rows
from moax.kernels.hopper.formats import BLOCK, BlockedGroups, supports_fp8
from moax.kernels.hopper.pallas import activation as kernels
from moax.kernels.hopper.pallas.activation_bf16 import activate_grad_rows, activate_rows
from moax.kernels.hopper.quantization import quantize_for_matmul
from moax.kernels.scales import DTYPES, is_pow2
from moax.kernels.xla import rows as xla
from moax.mesh.axes import Names
from moax.recipe import Format, Recipe, Recipes


def activate(
    h: Float[Array, "N G F"], act: Callable, recipe: Recipe, groups: BlockedGroups, *, weights: Any, amax_over: Names
) -> Any:
    """Returns the Operand of act(h) times the weight of each row; XLA computes what the kernels do not know."""
    flat, gated = h.reshape(h.shape[0], -1), h.shape[1] == 2
    with jax.named_scope("activate"):
        if not supports_activation(act, gated):
            ones = jnp.ones(h.shape[0], jnp.float32) if weights is None else weights
            a = xla.activate_rows(h, act, groups, ones)
        elif _fuses(recipe, recipe, h.shape[2]):
            x, _ = _formats(recipe, recipe)
            how: Any = dict(weights=weights, dtype=DTYPES[x.dtype], pow2=is_pow2(x))
            return kernels.activate_quantize(flat, groups.blocks, act, gated=gated, **how)
        else:
            a = activate_rows(flat, groups.blocks, act, gated=gated, weights=weights)
    return quantize_for_matmul(a, recipe, "x", groups, amax_over, columns=False)[0]


def activate_grad(
    h: Float[Array, "N G F"], d_a: Float[Array, "N F"], act: Callable, groups: BlockedGroups,
    weights: Float[Array, " N"],
) -> tuple[Float[Array, "N F"], Float[Array, "N G F"], Float[Array, " N"]]:  # fmt: skip
    """Returns act(h) times the weights, d_h, and inner [N], which is <d_a, act(h)> of each row."""
    if not supports_activation(act, h.shape[1] == 2):
        a, d_h, inner = xla.activate_grad(h, d_a, act, groups, weights)
        return a, zero_rows(d_h, groups.real), inner  # padding of h may hold NaN, which 0 does not undo
    with jax.named_scope("activate"):
        a, d_h, inner = activate_grad_rows(h.reshape(h.shape[0], -1), d_a, groups.blocks, act, weights=weights)
    return a, d_h.reshape(h.shape), inner.sum(0)


def activate_grad_quantize(
    h: Float[Array, "N G F"], d_a: Float[Array, "N F"], act: Callable, recipes: Recipes, groups: BlockedGroups, *,
    weights: Float[Array, " N"], amax_over: Names,
) -> tuple[Any, Any, Any, Float[Array, " N"]]:  # fmt: skip
    """Computes the backward of `activate`, quantized; see `moax.kernels.Implementation`."""
    if supports_activation(act, h.shape[1] == 2) and _fuses(recipes.wo, recipes.wi, h.shape[2]):
        (x, dy), flat = _formats(recipes.wo, recipes.wi), h.reshape(h.shape[0], -1)
        how: Any = dict(dtype_x=DTYPES[x.dtype], dtype_dy=DTYPES[dy.dtype], pow2=is_pow2(x))
        with jax.named_scope("activate"):
            found = kernels.activate_grad_quantize(flat, d_a, groups.blocks, act, weights=weights, **how)
        return *found[:3], found[3].sum(0)
    a, d_h, inner = activate_grad(h, d_a, act, groups, weights)
    _, a = quantize_for_matmul(a, recipes.wo, "x", groups, amax_over, rows=False)
    return a, *quantize_for_matmul(d_h, recipes.wi, "dy", groups, amax_over), inner


def supports_activation(act: Callable, gated: bool) -> bool:
    """Returns whether the kernels can compute an activation; the log says once why they cannot."""
    why = kernels.why_not_in_kernels(act, gated)
    if why is not None:
        log_once(f"kernels='hopper': the kernels do not know {why} of the activation; XLA computes it, which is slower")
    return why is None


def _fuses(of_a: Recipe, of_h: Recipe, width: int) -> bool:
    """Returns whether one kernel activates and quantizes: a by one recipe, and d_h by another."""
    if not supports_fp8(of_a) or not supports_fp8(of_h) or width % BLOCK:
        return False
    x, dy = _formats(of_a, of_h)  # a kernel takes powers of two, or none, for all scales
    return x.block is not None and dy.block is not None and is_pow2(x) == is_pow2(dy)


def _formats(of_a: Recipe, of_h: Recipe) -> tuple[Format, Format]:
    """Returns the formats of a and of d_h; the recipes have both."""
    return cast(Format, of_a.x), cast(Format, of_h.dy)
