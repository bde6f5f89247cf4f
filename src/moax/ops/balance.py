"""Balance: the losses of a router, and a bias on its selection that needs no loss.

    aux_loss = c E / (K T^2) sum_e (sum_t p[t, e]) tokens[e]          p: scores of all experts, summing to 1 a token
             + c' mean over sequences of the same, with the T and the tokens of one sequence
    z_loss   = c / T sum_t logsumexp(logits[t])^2                     T: tokens of the whole mesh

A bias on the router's selection balances the load without a loss:

    sign      bias[e] += rate * sign(mean(tokens) - tokens[e])
    quantile  bias[e] = quantile of needed[:, e] at K / E, minus the mean over experts
              needed[t, e] = cutoff[t] - score[t, e],  cutoff[t]: the best biased score that token t did not choose

The bias is state and no trained parameter. A training loop updates it once a step, after the optimizer, with the counts
of the whole global batch. With tokens (6, 2, 4, 4), the rule `sign` lowers the bias of expert 0 by `rate`, raises the
bias of expert 1 by `rate`, and leaves the others. A token chooses an expert whose bias exceeds `needed`, so with the
quantile as its bias an expert gets T K / E of T tokens, if the cutoffs do not change; a few updates suffice.

A bias that is not finite does not change: -inf switches an expert off. Both rules then balance the other experts among
themselves: E, the means and the quantiles are taken over the other experts. With the biases (-inf, 0, 0) and tokens
(0, 6, 4), the mean is 5.

The stats hold `needed` as a histogram: for each expert 1000 equal bins over [min(bias) - 1, max(bias) + 1]. Scores in
[0, 1] are inside of these bounds. The end bins also count values outside of them, which other scores may have.

Sources: `sign`, Wang et al. 2024, used in DeepSeek-V3; `quantile`, the Kimi K3 report, Section 2.3.3 and Appendix D,
as in NVIDIA/Megatron-LM#6637 and pytorch/torchtitan#4577.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer

from moax.checks import check_arrays, check_value
from moax.config import RouterConfig
from moax.mesh.axes import Names
from moax.mesh.collectives import all_gather_rows, mask_to_first_rank, take_own_rows, vary_like
from moax.mesh.specs import reshard_like

Rule = Literal["sign", "quantile"]
BINS = 1000


class Sums(NamedTuple):
    """Sums over the real tokens, which are differentiable in the logits; None where no loss needs one."""

    share: Float[Array, " E"] | None = None  # of the scores of each token, which sum to 1
    z: Float[Array, " 1"] | None = None  # of logsumexp(logits)^2
    # of each token's shares times tokens[e] / T^2 of its sequence
    by_sequence: Float[Array, " 1"] | None = None


class LoadMetrics(NamedTuple):
    """How even a load is.

    Attributes:
      max_violation: [...] f32, (max - mean) / mean of the tokens, 0 for an even load (MaxVio, Wang et al. 2024).
      entropy: [...] f32, -sum_e p[e] log p[e] with p = tokens / sum(tokens), log E for an even load.
    """

    max_violation: Float[Array, "*layers"]
    entropy: Float[Array, "*layers"]


def load_metrics(tokens_per_expert: Int[Array, "*layers E"]) -> LoadMetrics:
    """max_violation = (max - mean) / mean, and the entropy of the load.

    Args:
      tokens_per_expert: [..., E] i32, such as `MoEStats.tokens_per_expert`, or its sum over microbatches.

    Returns:
      The metrics, [...] f32 each; 0 without tokens.

    Raises:
      ValueError: tokens_per_expert is no array of integers, or E is 0.
    """
    check_arrays("tokens_per_expert int [..., E]", tokens_per_expert)
    check_value("tokens_per_expert: E", tokens_per_expert.shape[-1], int)
    tokens = tokens_per_expert.astype(jnp.float32)
    share = tokens / jnp.maximum(tokens.sum(-1, keepdims=True), 1.0)
    entropy = -jnp.sum(share * jnp.log(jnp.where(share > 0, share, 1.0)), -1)
    return LoadMetrics(jnp.maximum(share.max(-1) * tokens.shape[-1] - 1.0, 0.0), entropy)


def update_router_bias(
    bias: Float[Array, "*layers E"],
    tokens_per_expert: Int[Array, "*layers E"],
    rate: float | None = None,
    rule: Rule = "sign",
    *,
    histogram: Int[Array, "*layers E 1000"] | None = None,
) -> Float[Array, "*layers E"]:
    """The new bias, with which the router chooses experts with too few tokens more often.

    Args:
      bias: [..., E] f32. The router adds it to the scores for selection alone.
      tokens_per_expert: [..., E] i32, counted over the whole mesh, and summed over the microbatches of the step.
      rate: for `sign` the step of the bias, in units of the score; None is 1e-3. For `quantile` the part of the way to
        the quantile, where 0.1 smooths over some 10 updates; None is 1.
      rule: see the equations of this module.
      histogram: [..., E, 1000] i32, `MoEStats.histogram` summed as the tokens are, for `quantile`. The router must have
        had this `bias` in all of them.

    Returns:
      The new bias, [..., E] f32. The rule `quantile` does not change it where no expert has tokens.

    Raises:
      ValueError: the rule is unknown, the shapes differ, bias is less than float32, or `quantile` has no histogram.
    """
    check_value("rule", rule, ("sign", "quantile"))
    if rate is not None and not isinstance(rate, jax.Array):
        check_value("rate", rate, float, least=-math.inf)
    if rule == "sign":
        histogram = None
    elif histogram is None:
        raise ValueError("histogram is None; rule='quantile' needs stats.histogram, of RouterConfig(histogram=True)")
    shapes = "bias [..., E], tokens_per_expert int [..., E], histogram? int [..., E, bins]"
    check_arrays(shapes, bias, tokens_per_expert, histogram, bins=BINS)
    if bias.dtype in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"bias has dtype {bias.dtype}; it must be float32, because a narrower dtype rounds small steps away"
        )
    layers = "abcdefgh"[: bias.ndim]
    tokens_per_expert = reshard_like(tokens_per_expert.astype(jnp.int32), layers, bias, layers)
    if histogram is not None:
        histogram = reshard_like(histogram, layers + "z", bias, layers)
    bias = bias.astype(jnp.float32)
    finite = jnp.isfinite(bias)
    number = jnp.maximum(finite.sum(-1, keepdims=True, dtype=jnp.int32), 1)
    # Integers compare tokens with their mean exactly. Quotients and rests add up without the sum of all tokens, which
    # may exceed int32: the tokens of a large step times K.
    quotients, rests = jnp.divmod(jnp.where(finite, tokens_per_expert, 0), number)
    carry, rest = jnp.divmod(rests.sum(-1, keepdims=True, dtype=jnp.int32), number)
    quotient = quotients.sum(-1, keepdims=True, dtype=jnp.int32) + carry
    if histogram is not None:
        # A quantile is the bias below which as many values lie as a balanced load has tokens.
        target = quotient + jnp.sign(rest)
        quantiles = _find_quantiles(histogram, target, bias)
        mean = jnp.where(finite, quantiles, 0.0).sum(-1, keepdims=True) / number.astype(jnp.float32)
        step = jnp.where(target > 0, quantiles - mean, bias) - bias
        new = bias + jnp.asarray(1.0 if rate is None else rate, jnp.float32) * step
        return jnp.where(finite, new, bias)
    excess = jnp.sign(tokens_per_expert - quotient)
    excess = jnp.where(excess == 0, -jnp.sign(rest), excess)
    step_size = jnp.asarray(1e-3 if rate is None else rate, jnp.float32)
    new = bias - step_size * excess.astype(jnp.float32)
    return jnp.where(finite, new, bias)


def _find_quantiles(
    histogram: Int[Array, "*layers E 1000"], target: Int[Array, "*layers 1"], bias: Float[Array, "*layers E"]
) -> Float[Array, "*layers E"]:
    """Returns for each expert the value below which `target` values of its histogram lie."""
    count_until = jnp.cumsum(histogram.astype(jnp.int32), axis=-1)
    bin_of_target = jnp.argmax(count_until >= target[..., None], axis=-1, keepdims=True)
    count = jnp.take_along_axis(histogram, bin_of_target, axis=-1)[..., 0].astype(jnp.int32)
    end = jnp.take_along_axis(count_until, bin_of_target, axis=-1)[..., 0].astype(jnp.int32)
    # The values of a bin are taken for evenly spread.
    values_below = (target - end + count).astype(jnp.float32)
    part = values_below / jnp.maximum(count, 1).astype(jnp.float32)
    low, width = _find_bins(bias)
    return low + width * (bin_of_target[..., 0].astype(jnp.float32) + part)


def sum_losses(config: RouterConfig, logits: Float[Array, "T E"], log_scores, mask, balance) -> Sums:
    """Returns the Sums of one device, with the `balance` [T, E] of `balance_sequences`."""
    sum_of_shares = None
    sum_of_z = None
    by_sequence = None
    if config.aux_loss or config.sequence_aux_loss:
        shares = jax.nn.softmax(log_scores, axis=-1)
        if mask is not None:
            shares = jnp.where(mask[:, None], shares, 0.0)
        if config.aux_loss:
            sum_of_shares = shares.sum(0)
        if balance is not None:
            by_sequence = (shares * balance).sum()[None]
    if config.z_loss:
        z = jax.nn.logsumexp(logits, axis=-1) ** 2
        if mask is not None:
            z = jnp.where(mask, z, 0.0)
        sum_of_z = z.sum()[None]
    return Sums(sum_of_shares, sum_of_z, by_sequence)


def keep_ids(ids: Integer[Array, "*batch"]) -> Integer[Array, "*batch"]:
    """Returns ids as JAX keeps them: NumPy's 64 bits, of which JAX would keep 32, are ranked first."""
    if not isinstance(ids, np.ndarray) or jax.dtypes.canonicalize_dtype(ids.dtype) == ids.dtype:
        return ids
    ranks = np.unique(ids, return_inverse=True)[1].reshape(ids.shape)
    return cast(Any, np.where(ids < 0, -1, ranks).astype(np.int32))


def split_ids(ids: Integer[Array, "*batch C"]) -> Int[Array, "*batch D"]:
    """Returns columns of i32 that are equal where all columns of ids are, and -1 where one is negative."""
    signed = jnp.issubdtype(ids.dtype, jnp.signedinteger)
    bits = 8 * ids.dtype.itemsize - signed
    pieces = []
    if bits <= 31:
        pieces.append(ids)
    else:
        for shift in range(0, bits, 31):
            pieces.append(lax.shift_right_logical(ids, jnp.full_like(ids, shift)) & (2**31 - 1))
    columns = jnp.concatenate([piece.astype(jnp.int32) for piece in pieces], axis=-1)
    return jnp.where((ids < 0).any(-1, keepdims=True), -1, columns)


def _rank_rows(columns: Int[Array, "T C"]) -> Int[Array, " T"]:
    """Returns a number below T for each row, the same one where rows are equal."""
    places = vary_like(jnp.arange(columns.shape[0], dtype=jnp.int32), columns)  # T may be symbolic
    *keys, order = lax.sort((*columns.T, places), num_keys=columns.shape[1])
    before = jnp.maximum(places - 1, 0)
    is_new = jnp.stack([key != key[before] for key in keys]).any(0)
    ranks = jnp.cumsum(is_new, dtype=jnp.int32)
    return jnp.zeros_like(places).at[order].set(ranks)


def balance_sequences(
    experts: Int[Array, "T K"],
    sequences: Int[Array, "T C"],
    mask,
    num_experts: int,
    along: Names,
):
    """Returns, for each token and the T tokens of its sequence, tokens[e] / T^2 [T, E]; and the sequences [1]."""
    columns = sequences.shape[1]
    if mask is not None:
        sequences = jnp.where(mask[:, None], sequences, -1)
    rows = all_gather_rows(jnp.concatenate([sequences, experts], axis=1), along)
    # Integers add up to the same sum in any order, and so may scatters of them.
    number = _rank_rows(rows[:, :columns])
    zeros = jnp.zeros_like(rows, shape=(rows.shape[0], num_experts))
    tokens = zeros.at[number[:, None], rows[:, columns:]].add(1, mode="drop")
    sizes = zeros[:, 0].at[number].add((rows[:, 0] >= 0).astype(jnp.int32))
    local_number = take_own_rows(number, along)
    size = jnp.maximum(sizes[local_number], 1).astype(jnp.float32)
    balance = tokens[local_number].astype(jnp.float32) / (size**2)[:, None]
    number_of_sequences = mask_to_first_rank((sizes > 0).sum(dtype=jnp.int32)[None], along)
    return jnp.where(sequences[:, :1] >= 0, balance, 0.0), number_of_sequences


def count_needed_bias(
    scores: Float[Array, "T E"],
    bias: Float[Array, " E"],
    best: Int[Array, "T K"],
    mask: Bool[Array, " T"] | None,
) -> Int[Array, "E 1000"]:
    """Returns for each expert the histogram of `needed` over the real tokens, whose K best experts are `best`."""
    chose = (best[:, :, None] == jnp.arange(scores.shape[1], dtype=jnp.int32)[None, None]).any(1)
    cutoff = jnp.where(chose, -jnp.inf, scores + bias[None]).max(1, keepdims=True)
    low, width = _find_bins(bias)
    bins = jnp.clip((cutoff - scores - low[None]) / width[None], 0, BINS - 1).astype(jnp.int32)
    if mask is None:
        counted = jnp.ones_like(bins)
    else:
        counted = jnp.broadcast_to(mask[:, None].astype(jnp.int32), bins.shape)
    experts = jnp.arange(bins.shape[1], dtype=jnp.int32)[None]
    zeros = jnp.zeros_like(bins, shape=(bins.shape[1], BINS))
    return zeros.at[experts, bins].add(counted, mode="drop")


def _find_bins(
    bias: Float[Array, "*layers E"],
) -> tuple[Float[Array, "*layers 1"], Float[Array, "*layers 1"]]:
    """Returns the lower end of the bins and the width of a bin, from the finite biases."""
    finite = jnp.isfinite(bias)
    low = jnp.where(finite, bias, jnp.inf).min(-1, keepdims=True) - 1.0
    high = jnp.where(finite, bias, -jnp.inf).max(-1, keepdims=True) + 1.0
    return low, (high - low) / BINS
