"""Scores: what a router makes of logits [..., E], in float32.

    softmax        exp(l) / sum exp(l)
    sigmoid        1 / (1 + exp(-l))
    sqrt_softplus  sqrt(log(1 + exp(l)))                                DeepSeek-V4

`share` divides the scores by their sum. It computes with logarithms: with two logits of -100, both sigmoids are 0 in
float32, and both shares are 1/2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moax.config import RouterConfig

LOW = -16.0  # below, softplus(l) is exp(l) to the last bit of float32


def score(logits: Float[Array, "... E"], config: RouterConfig) -> Float[Array, "... E"]:
    """Returns the score of each expert."""
    match config.score:
        case "softmax":
            return jax.nn.softmax(logits, axis=-1)
        case "sigmoid":
            return jax.nn.sigmoid(logits)
        case _:
            return jnp.exp(log_score(logits, config))


def share(logits: Float[Array, "... E"], config: RouterConfig) -> Float[Array, "... E"]:
    """Returns score / sum of scores, over the last dim; it is right where all scores underflow to 0."""
    return jax.nn.softmax(log_score(logits, config), axis=-1)


def log_score(logits: Float[Array, "... E"], config: RouterConfig) -> Float[Array, "... E"]:
    """Returns the logarithm of each score; of softmax, but for a constant of each row."""
    match config.score:
        case "softmax":
            return logits
        case "sigmoid":
            return jax.nn.log_sigmoid(logits)
        case _:
            softplus = jax.nn.softplus(jnp.maximum(logits, LOW))
            return 0.5 * jnp.where(logits < LOW, logits, jnp.log(softplus))
