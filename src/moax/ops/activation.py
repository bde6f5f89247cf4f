"""Activation: h [..., G, F] -> a [..., F], elementwise, in float32, returned in the dtype of h.

    swiglu      silu(gate) * up
    geglu       gelu(gate) * up                                        gelu: the tanh form, as in jax.nn.gelu
    swiglu_oai  min(gate, 7) sigmoid(1.702 min(gate, 7)) (clip(up, -7, 7) + 1)         GPT-OSS
    silu, gelu, relu2                                                  of up alone; relu2 = max(up, 0)^2

`gate` is h[..., 0, :] and `up` is h[..., 1, :]; without a gate G is 1 and `up` is h[..., 0, :]. The op is
plain jnp, so that JAX differentiates it and shardings pass through it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moax.config import GATED, SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT, UNGATED, Activation


def activate(h: Float[Array, "*rows G F"], activation: Activation) -> Float[Array, "*rows F"]:
    """a = act(gate) * up, or act(up).

    Args:
      h: [..., G, F], floating point. Its dim G holds gate and up, or up alone.
      activation: the name of the function; see the equations of this module.

    Returns:
      a: [..., F] in h.dtype, with the leading dims and the sharding of h. It is differentiable in h.

    Raises:
      ValueError: the activation is unknown, or h has fewer than two dims or another G than the activation takes.
    """
    if activation not in GATED + UNGATED:
        raise ValueError(f"activation={activation!r} must be one of {', '.join(map(repr, GATED + UNGATED))}")
    if h.ndim < 2 or h.shape[-2] != (2 if activation in GATED else 1):
        raise ValueError(
            f"h has shape {h.shape}; activation={activation!r} needs [..., {2 if activation in GATED else 1}, F]"
        )
    gate, up = h[..., 0, :].astype(jnp.float32), h[..., -1, :].astype(jnp.float32)
    return _apply(gate, up, activation).astype(h.dtype)


@functools.cache
def activation_of(activation: Activation) -> Callable:
    """Returns the function act(gate, up), or act(up), of float32 arrays.

    A name always gives the same function object, because the cache of compiled kernels compares functions by identity.
    """
    if activation in GATED:
        return lambda gate, up: _apply(gate, up, activation)
    return lambda up: _apply(up, up, activation)


def _apply(gate, up, activation: Activation):
    """Computes the equation of one activation, in float32."""
    match activation:
        case "swiglu":
            return jax.nn.silu(gate) * up
        case "geglu":
            return jax.nn.gelu(gate) * up
        case "swiglu_oai":
            gate, up = jnp.minimum(gate, SWIGLU_OAI_LIMIT), jnp.clip(up, -SWIGLU_OAI_LIMIT, SWIGLU_OAI_LIMIT)
            return gate * jax.nn.sigmoid(SWIGLU_OAI_ALPHA * gate) * (up + 1.0)
        case "silu":
            return jax.nn.silu(up)
        case "gelu":
            return jax.nn.gelu(up)
        case "relu2":
            return jnp.square(jax.nn.relu(up))
