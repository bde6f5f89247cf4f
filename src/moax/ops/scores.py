"""Scores: what a router makes of logits [..., E], in float32.

    softmax        exp(l) / sum exp(l)
    sigmoid        1 / (1 + exp(-l))
    sqrt_softplus  sqrt(log(1 + exp(l)))                                DeepSeek-V4

`share` divides the scores by their sum. It computes with logarithms: with two logits of -100, both sigmoids are 0 in
float32, and both shares are 1/2.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moax.config import RouterConfig

NO_EXPERT = -1e30  # the logit of no expert: its share is 0, and so is every gradient
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


def share_few(logits: Float[Array, "T K"], config: RouterConfig) -> Float[Array, "T K"]:
    """Returns `share` of few logits a row, column by column, so that one kernel of a GPU computes it."""
    logs = log_score(logits, config)
    logs = [logs[:, k] for k in range(logs.shape[1])]
    most = lax.stop_gradient(functools.reduce(jnp.maximum, logs))
    shares = [jnp.exp(log - most) for log in logs]
    for _ in range(2):  # after the second time their sum is 1 but for rounding, and so is the gradient's
        total = functools.reduce(jnp.add, shares)
        shares = [value / total for value in shares]
    return jnp.stack(shares, axis=1)


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


def weigh(
    logits: Float[Array, "T E"],
    experts: Int[Array, "T K"],
    config: RouterConfig,
    chosen: Float[Array, "T K"] | None = None,
) -> Float[Array, "T K"]:
    """Returns the weights [T, K] of experts, 0 for the expert E; `chosen` [T, K] are their logits, where known."""
    if _scores_all(config, experts.shape[1]):
        weights = _take(score(logits, config), experts)
    else:
        weights = _score_few(_choose(logits, experts, chosen), config)
    return jnp.where(experts < logits.shape[1], weights * config.scale, 0.0)


def weigh_backward(
    logits: Float[Array, "T E"],
    experts: Int[Array, "T K"],
    config: RouterConfig,
    weights: Float[Array, "T K"],
    d_weights: Float[Array, "T K"],
) -> Float[Array, "T E"]:
    """Returns the gradient of the logits from the weights and their gradient."""
    num_experts, top_k = logits.shape[1], experts.shape[1]
    if top_k == 1 and _sums_to_one(config, top_k):  # the weight is the scale, whatever the logits are
        return jnp.zeros_like(logits)
    d_weights = jnp.where(experts < num_experts, d_weights, 0.0)
    if _scores_all(config, top_k):
        return jax.vjp(lambda x: _take(score(x, config), experts), logits)[1](d_weights * config.scale)[0]
    if _sums_to_one(config, top_k):
        along = jnp.sum(weights * d_weights, axis=1) / config.scale
        d_logs = weights * (d_weights - along[:, None])
        (d_chosen,) = jax.vjp(lambda x: log_score(x, config), _choose(logits, experts))[1](d_logs)
    else:
        d_scores = d_weights * config.scale
        (d_chosen,) = jax.vjp(lambda x: score(x, config), _choose(logits, experts))[1](d_scores)
    # A sum over K of selected columns is part of the kernel that reads it; a scatter is a kernel, and zeros another.
    ids = jnp.arange(num_experts, dtype=jnp.int32)[None]
    columns = [jnp.where(experts[:, k : k + 1] == ids, d_chosen[:, k : k + 1], 0.0) for k in range(top_k)]
    return functools.reduce(jnp.add, columns)


def _scores_all(config: RouterConfig, top_k: int) -> bool:
    """Returns whether a weight depends on the logits of all experts."""
    return config.score == "softmax" and config.order == "score_then_topk" and not _normalizes(config, top_k)


def _sums_to_one(config: RouterConfig, top_k: int) -> bool:
    """Returns whether the weights of a token, before the scale, sum to 1."""
    return _normalizes(config, top_k) or (config.score == "softmax" and config.order == "topk_then_score")


def _normalizes(config: RouterConfig, top_k: int) -> bool:
    """Returns whether the scores of a token's experts are divided by their sum."""
    return config.normalize and top_k > 1


def _choose(logits, experts, chosen=None):
    return jnp.where(experts < logits.shape[1], _take(logits, experts) if chosen is None else chosen, NO_EXPERT)


def _take(values, experts):
    """Returns the values [T, K] of the experts, of values [T, E]; that of any expert for none."""
    return jnp.take_along_axis(values, jnp.minimum(experts, values.shape[1] - 1), axis=-1)


def _score_few(chosen, config: RouterConfig):
    """Returns the scores [T, K] of the chosen logits [T, K], divided by their sum where they sum to 1."""
    return share_few(chosen, config) if _sums_to_one(config, chosen.shape[1]) else score(chosen, config)
