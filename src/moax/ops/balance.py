"""Balance: loss-free load balancing, by a bias on the router's selection.

    bias[e] += rate * sign(mean(tokens) - tokens[e])

The bias is state, not a trained parameter: update it once a step, after the optimizer, with the counts of the whole
global batch (`MoEStats.tokens_per_expert`), in training only. Source: Wang et al. 2024, used in DeepSeek-V3.
"""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def update_router_bias(
    bias: Float[Array, "*layers E"],
    tokens_per_expert: Int[Array, "*layers E"],
    rate: float = 1e-3,
    rule: Literal["sign"] = "sign",
) -> Float[Array, "*layers E"]:
    """bias + rate * sign(mean(tokens) - tokens): experts with too few tokens are chosen more often.

    Args:
      bias: [..., E], added to the scores for selection only.
      tokens_per_expert: [..., E] i32, over the whole mesh.
      rate: step of the bias, in units of the score; DeepSeek-V3 uses 1e-3.
      rule: `sign`.

    Raises:
      ValueError: an unknown rule, or shapes that differ.
    """
    if rule != "sign":
        raise ValueError(f"rule={rule!r} must be 'sign'")
    if bias.shape != tokens_per_expert.shape:
        raise ValueError(
            f"tokens_per_expert has shape {tokens_per_expert.shape}; it must be that of bias, {bias.shape}"
        )
    # tokens compared with total / E in integers: exact, and no product that could overflow.
    quotient, rest = jnp.divmod(tokens_per_expert.sum(-1, keepdims=True), bias.shape[-1])
    excess = jnp.sign(tokens_per_expert - quotient)
    excess = jnp.where(excess == 0, -jnp.sign(rest), excess)
    return bias - jnp.asarray(rate, bias.dtype) * excess.astype(bias.dtype)
