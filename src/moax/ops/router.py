"""Router: logits = x w in float32. Tensor cores compute the product where x is bfloat16.

    forward  logits = x w                 x [T, H], w [H, E]
    dgrad    dx = dlogits w^T             wgrad  dw = x^T dlogits

Where x is bfloat16, a float32 weight is the sum of three bfloat16 parts, w = w0 + w1 + w2, each of which is the rest
rounded to bfloat16. The product of two bfloat16 numbers is exact in float32, so three products of bfloat16 make the
float32 product. Two parts of each operand suffice for a gradient that is rounded to bfloat16. A bfloat16 weight is its
own only part. An x of another dtype is multiplied in float32.
"""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from moax.checks import check_float
from moax.mesh.axes import Axes, ResolvedAxes
from moax.mesh.op import Op, with_gradient
from moax.mesh.specs import Engine, find_mesh_view


@dataclasses.dataclass(frozen=True)
class RouterSpec:
    """The static arguments: the mesh axes by role, and whether the float32 weight holds values of bfloat16."""

    axes: ResolvedAxes
    narrow: bool


def router_logits(
    x: Float[Array, "T H"], w: Float[Array, "H E"], *, axes: Axes = Axes(), engine: Engine = "auto"
) -> Float[Array, "T E"]:
    """logits = x w, in float32.

    Args:
      x: [T, H], floating point, T over (dp, fsdp, ep, cp).
      w: [H, E], floating point, replicated.
      axes, engine: see `moax.Options`.

    Returns:
      logits: [T, E] f32, T over (dp, fsdp, ep, cp). They are differentiable in x and w; each gradient has the dtype of
        its array.

    Raises:
      ValueError: the shapes do not fit each other, or the mesh does not divide T.
    """
    check_float("x", x, "[T, H]")
    check_float("w", w, "[H, E]")
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise ValueError(f"x and w have shapes {x.shape}, {w.shape}; they must be [T, H] and [H, E]")
    view = find_mesh_view(axes, engine, x, w)
    # The gradient of w is a float32 array until all devices have been summed; the transpose of this cast rounds it.
    static, w = RouterSpec(view.axes, w.dtype == jnp.bfloat16), w.astype(jnp.float32)
    if x.shape[0] == 0:  # XLA compiles no product of a shard without rows
        return jnp.dot(x.astype(jnp.float32), w)
    return _router(view, static, x, w)[0]


def logits_forward(static: RouterSpec, x, w):
    """Returns logits [T, E] f32 of one device. w: [H, E] f32."""
    if x.dtype != jnp.bfloat16:
        return (_dot(x.astype(jnp.float32), w, ((1,), (0,)), precision=lax.Precision.HIGHEST),)
    if static.narrow:
        return (_dot(x, w.astype(jnp.bfloat16), ((1,), (0,))),)
    return (_dot(x, _lay_parts(w, (0, 1, 2)), ((1,), (0,)), parts=3),)


def logits_backward(static: RouterSpec, x, w, d):
    """Returns dx [T, H] and dw [H, E] f32 of one device; dw is a partial sum over the axes of tokens. d: [T, E] f32."""
    if x.dtype != jnp.bfloat16:
        dx = _dot(d, w, ((1,), (1,)), precision=lax.Precision.HIGHEST)
        dw = _dot(x.astype(jnp.float32), d, ((0,), (0,)), precision=lax.Precision.HIGHEST)
    elif static.narrow:
        d = jnp.stack(_parts(d, 2), axis=1).reshape(len(d), -1)  # XLA stacks one array where it computes the parts
        dx = _dot(d, jnp.tile(w.astype(jnp.bfloat16), 2), ((1,), (1,)))
        dw = _dot(x, d, ((0,), (0,)), parts=2)
    else:
        dx = _dot(_lay_parts(d, (0, 0, 1)), _lay_parts(w, (0, 1, 0)), ((1,), (1,)))
        dw = _dot(x, _lay_parts(d, (0, 1, 2)), ((0,), (0,)), parts=3)
    return dx.astype(x.dtype), dw


_router = with_gradient(
    Op("router", logits_forward, "t h, h e -> t e"),
    Op("router_grad", logits_backward, "t h, h e, t e -> t h, h e"),
    save=lambda operands, results: operands,
    pull=lambda grad, saved, d: grad(*saved, *d),
)


def _parts(x: Array, count: int) -> list[Array]:
    """Returns `count` bfloat16 arrays that sum to x, the largest first; each one is the rest rounded to bfloat16."""
    parts, rest = [], x.astype(jnp.float32)
    for _ in range(count):  # XLA may remove a cast to bfloat16 and back
        part = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16))
        rest = rest - part
    return parts


def _lay_parts(x: Float[Array, "A E"], order: tuple[int, ...]) -> Float[Array, "A C"]:
    """Returns the parts of x, in this order, side by side: (x0, x0, x1) for the order (0, 0, 1)."""
    # XLA writes the operands of a concatenation to memory first, and fuses a selection.
    parts = [part[:, None, :] for part in _parts(x, max(order) + 1)]
    which = lax.broadcasted_iota(jnp.int32, (x.shape[0], len(order), x.shape[1]), 1)
    laid = jnp.broadcast_to(parts[order[0]], which.shape)
    for place, part in enumerate(order[1:], 1):
        laid = jnp.where(which == place, parts[part], laid)
    return laid.reshape(x.shape[0], -1)


def _dot(a, b, contract, *, parts: int = 1, precision=None):
    """Returns a product in float32: the sum of the products with `parts` that are side by side in b."""
    product = lax.dot_general(a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32)
    return functools.reduce(jnp.add, jnp.split(product, parts, axis=1)[::-1])  # the smallest part is added first
