"""Balance: a bias on the router's selection balances the load without a loss.

    bias[e] += rate * sign(mean(tokens) - tokens[e])

The bias is state and no trained parameter. A training loop updates it once a step, after the optimizer, with the counts
of the whole global batch (`MoEStats.tokens_per_expert`). With mean 4 and tokens (6, 2, 4, 4), the bias of expert 0
falls by `rate`, that of expert 1 rises by `rate`, and the others stay. Source: Wang et al. 2024, used in DeepSeek-V3.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moax.checks import check_float, check_int, is_number


def update_router_bias(
    bias: Float[Array, "*layers E"],
    tokens_per_expert: Int[Array, "*layers E"],
    rate: float = 1e-3,
    rule: Literal["sign"] = "sign",
) -> Float[Array, "*layers E"]:
    """bias + rate * sign(mean(tokens) - tokens). The router then chooses experts with too few tokens more often.

    Args:
      bias: [..., E], floating point. The router adds it to the scores for selection alone.
      tokens_per_expert: [..., E] i32, counted over the whole mesh.
      rate: the step of the bias, in units of the score; DeepSeek-V3 uses 1e-3.
      rule: `sign`, the one rule that there is.

    Returns:
      The new bias, [..., E] in the dtype of bias.

    Raises:
      ValueError: the rule is unknown, or the shapes differ.
    """
    if rule != "sign":
        raise ValueError(f"rule={rule!r} must be 'sign'")
    check_float("bias", bias, "[..., E]")
    check_int("tokens_per_expert", tokens_per_expert, "[..., E]")
    if not is_number(rate) and not isinstance(rate, jax.Array):
        raise ValueError(f"rate={rate!r} must be a number")
    if bias.shape != tokens_per_expert.shape:
        raise ValueError(
            f"tokens_per_expert has shape {tokens_per_expert.shape}; it must be that of bias, {bias.shape}"
        )
    tokens_per_expert = tokens_per_expert.astype(jnp.int32)
    # Integers compare tokens with total / E exactly, without a product that could overflow.
    quotient, rest = jnp.divmod(tokens_per_expert.sum(-1, keepdims=True), bias.shape[-1])
    excess = jnp.sign(tokens_per_expert - quotient)
    excess = jnp.where(excess == 0, -jnp.sign(rest), excess)
    return bias - jnp.asarray(rate, bias.dtype) * excess.astype(bias.dtype)
