"""Activation: h [..., G, F] -> a [..., F], elementwise, in float32, returned in the dtype of h.

    swiglu      silu(gate) * up
    geglu       gelu(gate) * up                                        gelu: the tanh form, as in jax.nn.gelu
    swiglu_oai  min(gate, 7) sigmoid(1.702 min(gate, 7)) (clip(up, -7, 7) + 1)         GPT-OSS
    silu, gelu, relu2                                                  of up alone; relu2 = max(up, 0)^2

`gate` is h[..., 0, :] and `up` is h[..., 1, :]; without a gate G is 1 and `up` is h[..., 0, :]. Plain jnp: it is
differentiated by JAX, and shardings pass through it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moax.config import GATED, UNGATED, Activation
from moax.groups import BLOCK, Groups, zero_rows
from moax.kernels import mosaic
from moax.mesh.axes import Names
from moax.ops.quantization import DTYPES, enter_rows

OAI_LIMIT, OAI_ALPHA = 7.0, 1.702


@dataclasses.dataclass(frozen=True)
class ActivateSpec:
    """activation; x, dy: Formats of what it makes for the next products, None for h's own dtype; amax_over: axes that
    split a tensor of one block; plain_grad: whether the gradient of h is wanted as it is too."""

    activation: Activation
    x: Any
    dy: Any
    amax_over: Names = ()
    plain_grad: bool = False

    @property
    def act(self):
        """The activation of float32 gate and up, or of up alone."""
        return _act_of(self.activation)

    @property
    def pow2(self) -> bool:
        """Whether scales are powers of two."""
        return self.x is not None and self.x.scale != "float32"

    def fuses(self, width: int) -> bool:
        """Whether the kernels quantize what they activate: blocks of 128 columns, which divide an F of this size, and
        scales of one kind for a and for d_h."""
        formats = [f for f in (self.x, self.dy) if f is not None]
        alike = len({(f.block, f.scale == "float32") for f in formats}) == 1
        return len(formats) == 2 and alike and formats[0].block == BLOCK and width % BLOCK == 0


def activate(h: Float[Array, "*rows G F"], activation: Activation) -> Float[Array, "*rows F"]:
    """a = act(gate) * up, or act(up).

    Raises:
      ValueError: an unknown activation, or a G that is not its number of projections.
    """
    if activation not in GATED + UNGATED:
        raise ValueError(f"activation={activation!r} must be one of {', '.join(map(repr, GATED + UNGATED))}")
    if h.ndim < 2 or h.shape[-2] != (2 if activation in GATED else 1):
        raise ValueError(
            f"h has shape {h.shape}; activation={activation!r} needs [..., {2 if activation in GATED else 1}, F]"
        )
    gate, up = h[..., 0, :].astype(jnp.float32), h[..., -1, :].astype(jnp.float32)
    return _act(gate, up, activation).astype(h.dtype)


def activate_rows(h, spec: ActivateSpec, by_row, groups: Groups, *, fp8: bool):
    """act(h) as the next product's forward takes it, h [N, G, F]; `by_row`: a factor [N] of each row, or None.

    With `fp8` fused with the quantization where `spec` says so.
    """
    if fp8 and spec.fuses(h.shape[-1]):
        with jax.named_scope("activate"):
            return mosaic.activate_quantize(
                h.reshape(h.shape[0], -1),
                groups.blocks,
                spec.act,
                DTYPES[spec.x.dtype],
                gated=spec.activation in GATED,
                weights=by_row,
                pow2=spec.pow2,
            )
    with jax.named_scope("activate"):
        if groups.blocks is not None:
            flat, gated = h.reshape(h.shape[0], -1), spec.activation in GATED
            a = mosaic.activate_rows(flat, groups.blocks, spec.act, gated=gated, weights=by_row)
        else:
            a = activate(h, spec.activation)
            a = a if by_row is None else scale_rows(a, by_row, groups.real)
    return enter_rows(a, spec.x, groups, spec.amax_over, fp8=fp8)[0]


def activate_grad_rows(h, d_a, spec: ActivateSpec, by_row, groups: Groups, *, fp8: bool):
    """Backward of `activate_rows`, for d_a [N, F] that is not yet times `by_row`.

    Returns (act(h) by_row as wgrad takes it; d_h as dgrad does, as wgrad does, and as it is [N, G, F] or None;
    <d_a, act(h)> of each row [N] f32).
    """
    if fp8 and spec.fuses(h.shape[-1]) and not spec.plain_grad:
        with jax.named_scope("activate"):
            flat, dtypes = h.reshape(h.shape[0], -1), (DTYPES[spec.x.dtype], DTYPES[spec.dy.dtype])
            a, rows, columns, inner = mosaic.activate_grad_quantize(
                flat, d_a, groups.blocks, spec.act, *dtypes, weights=by_row, pow2=spec.pow2
            )
        return a, rows, columns, None, inner
    with jax.named_scope("activate"):
        if groups.blocks is not None:
            flat = h.reshape(h.shape[0], -1)
            a, d_h, inner = mosaic.activate_grad_rows(flat, d_a, groups.blocks, spec.act, weights=by_row)
            d_h = d_h.reshape(h.shape)
        else:
            a, pull = jax.vjp(lambda h: activate(h, spec.activation), h)
            inner = jnp.sum(d_a.astype(jnp.float32) * a.astype(jnp.float32), axis=-1)
            a = scale_rows(a, by_row, groups.real)
            (d_h,) = pull(scale_rows(d_a, by_row, groups.real))
    _, a = enter_rows(a, spec.x, groups, spec.amax_over, fp8=fp8)
    return a, *enter_rows(d_h, spec.dy, groups, spec.amax_over, fp8=fp8), d_h, inner


def scale_rows(x, by_row, real):
    """Real rows times a number each, in float32, back in the dtype of x; the others are 0."""
    return zero_rows(x.astype(jnp.float32) * by_row[:, None], real).astype(x.dtype)


@functools.cache
def _act_of(activation: Activation):
    """The activation of (gate, up), or of up alone; one function a name, as kernels are cached by it."""
    if activation in GATED:
        return lambda gate, up: _act(gate, up, activation)
    return lambda up: _act(up, up, activation)


def _act(gate, up, activation: Activation):
    match activation:
        case "swiglu":
            return jax.nn.silu(gate) * up
        case "geglu":
            return jax.nn.gelu(gate) * up
        case "swiglu_oai":
            gate, up = jnp.minimum(gate, OAI_LIMIT), jnp.clip(up, -OAI_LIMIT, OAI_LIMIT)
            return gate * jax.nn.sigmoid(OAI_ALPHA * gate) * (up + 1.0)
        case "silu":
            return jax.nn.silu(up)
        case "gelu":
            return jax.nn.gelu(up)
        case "relu2":
            return jnp.square(jax.nn.relu(up))
