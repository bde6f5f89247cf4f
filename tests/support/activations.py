"""The activations as a kernel takes them: functions of gate and up, or of up alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def swiglu_oai(gate, up):
    gate = jnp.minimum(gate, 7.0)
    up = jnp.clip(up, -7.0, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1.0)


ACTS = {
    "swiglu": lambda gate, up: jax.nn.silu(gate) * up,
    "geglu": lambda gate, up: jax.nn.gelu(gate) * up,
    "swiglu_oai": swiglu_oai,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "relu2": lambda up: jnp.square(jax.nn.relu(up)),
}
GATED = {
    "swiglu": True,
    "geglu": True,
    "swiglu_oai": True,
    "silu": False,
    "gelu": False,
    "relu2": False,
}


def grouped(h, name):
    """Returns h [M, G * F] as [M, G, F]."""
    return h.reshape(h.shape[0], 1 + GATED[name], -1)
