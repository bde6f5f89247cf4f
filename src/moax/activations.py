"""The activations by name, and what is asked of an activation that a user writes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from moax.checks import check_value

Activation = str | Callable | tuple[str | Callable, str | Callable]
SWIGLU_OAI_LIMIT = 7.0  # the default limit of gate and up
SWIGLU_OAI_ALPHA = 1.702  # the factor in the sigmoid
# The functions of (gate, up).
GATED: dict[str, Callable] = {
    "swiglu": lambda gate, up: jax.nn.silu(gate) * up,
    "geglu": lambda gate, up: jax.nn.gelu(gate) * up,
    "swiglu_oai": lambda gate, up: gate * jax.nn.sigmoid(SWIGLU_OAI_ALPHA * gate) * (up + 1.0),
    "reglu": lambda gate, up: jax.nn.relu(gate) * up,
    "glu": lambda gate, up: jax.nn.sigmoid(gate) * up,
}
# The functions of up alone.
UNGATED: dict[str, Callable] = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "relu2": lambda up: jnp.square(jax.nn.relu(up)),
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "swish": jax.nn.swish,
    "tanh": jax.nn.tanh,
    "elu": jax.nn.elu,
    "selu": jax.nn.selu,
    "celu": jax.nn.celu,
    "leaky_relu": jax.nn.leaky_relu,
    "soft_sign": jax.nn.soft_sign,
    "hard_tanh": jax.nn.hard_tanh,
    "hard_silu": jax.nn.hard_silu,
    "hard_swish": jax.nn.hard_swish,
    "mish": jax.nn.mish,
    "quick_gelu": lambda up: up * jax.nn.sigmoid(1.702 * up),
    "squared_relu": lambda up: jnp.square(jax.nn.relu(up)),
    "identity": lambda up: up,
    "linear": lambda up: up,
}
# A pair alone may have these functions, which are not 0 at 0.
NOT_ZERO: dict[str, Callable] = {
    "sigmoid": jax.nn.sigmoid,
    "log_sigmoid": jax.nn.log_sigmoid,
    "hard_sigmoid": jax.nn.hard_sigmoid,
    "softplus": jax.nn.softplus,
    "squareplus": jax.nn.squareplus,
    "sparse_plus": jax.nn.sparse_plus,
}


def check_activation(name: str, value) -> None:
    """Raises ValueError unless value is an activation: a name, a pair, or a function of one or two arrays."""
    if callable(value):
        gates_of(value)
    elif isinstance(value, tuple) and len(value) == 2:
        for part in value:
            if not callable(part):
                check_value(name, part, (*UNGATED, *NOT_ZERO))
    else:
        check_value(name, value, (*GATED, *UNGATED))


def gates_of(activation: Activation) -> int:
    """Returns G: 2 for an activation of (gate, up), 1 for an activation of up alone.

    Raises:
      ValueError: a function takes neither one nor two arrays.
    """
    if isinstance(activation, tuple):
        return 2
    if not callable(activation):
        return 1 + (activation in GATED)
    parameters = inspect.signature(activation).parameters.values()
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    count = sum(p.default is p.empty for p in by_position)
    if count not in (1, 2):
        raise ValueError(f"activation={activation!r} must be a function of (up) or of (gate, up); it takes {count}")
    return count


def called(eqn: core.JaxprEqn) -> Any:
    """Returns the closed jaxpr of a call, such as that of jit or of a custom derivative; None for an operation."""
    return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))


def operations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Yields the operations of a user's activation; in the place of a call, those of its body."""
    for eqn in jaxpr.eqns:
        inner = called(eqn)
        if inner is None:
            yield eqn
        else:
            yield from operations(getattr(inner, "jaxpr", inner))
