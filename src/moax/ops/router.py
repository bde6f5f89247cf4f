"""Router: logits = x w in float32, by tensor cores where x is bfloat16; and a bias that balances its load.

    forward  logits = x w                 x [T, H], w [H, E]
    dgrad    dx = dlogits w^T             wgrad  dw = x^T dlogits

Where x is bfloat16, a float32 weight is the sum of three bfloat16 parts, w = w0 + w1 + w2, each of which is the rest
rounded to bfloat16. The product of two bfloat16 numbers is exact in float32, so three products of bfloat16 make the
float32 product. Two parts of each operand suffice for a gradient that is rounded to bfloat16. A bfloat16 weight is its
own only part. An x of another dtype is multiplied in float32.

A bias on the router's selection balances the load without a loss:

    sign      bias[e] += rate * sign(mean(tokens) - tokens[e])
    quantile  bias[e] = quantile of needed[:, e] at K / E, minus the mean over experts
              needed[t, e] = cutoff[t] - score[t, e],  cutoff[t]: the best biased score that token t did not choose

The bias is state and no trained parameter. A training loop updates it once a step, after the optimizer, with the counts
of the whole global batch. With tokens (6, 2, 4, 4), the rule `sign` lowers the bias of expert 0 by `rate`, raises the
bias of expert 1 by `rate`, and leaves the others. A token chooses an expert whose bias exceeds `needed`, so with the
quantile as its bias an expert gets T K / E of T tokens, if the cutoffs stay what they are; a few updates suffice.

The stats hold `needed` as a histogram: for each expert 1000 equal bins over [min(bias) - 1, max(bias) + 1]. Scores in
[0, 1] lie in it. The end bins count larger and smaller values too, which other scores may have.

Sources: `sign`, Wang et al. 2024, used in DeepSeek-V3; `quantile`, the Kimi K3 report, Section 2.3.3 and Appendix D,
as in Megatron-LM #6637 and torchtitan #4577.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moax.checks import check_arrays, check_value
from moax.mesh.axes import Axes, ResolvedAxes
from moax.mesh.op import Op, with_gradient
from moax.mesh.specs import Engine, find_mesh_view

Rule = Literal["sign", "quantile"]
BINS = 1000


@dataclasses.dataclass(frozen=True)
class RouterSpec:
    """The static arguments: the mesh axes by role, and whether the float32 weight holds values of bfloat16."""

    axes: ResolvedAxes
    narrow: bool


class LoadMetrics(NamedTuple):
    """How even a load is.

    Attributes:
      max_violation: [...] f32, (max - mean) / mean of the tokens, 0 for an even load (MaxVio, Wang et al. 2024).
      entropy: [...] f32, -sum_e p[e] log p[e] with p = tokens / sum(tokens), log E for an even load.
    """

    max_violation: Float[Array, "*layers"]
    entropy: Float[Array, "*layers"]


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
    check_arrays("x [T, H], w [H, E]", x, w)
    view = find_mesh_view(axes, engine, x, w)
    # The gradient of w is a float32 array until all devices have been summed; the transpose of this cast rounds it.
    static, w = RouterSpec(view.axes, w.dtype == jnp.bfloat16), w.astype(jnp.float32)
    if x.shape[0] == 0:  # XLA compiles no product of a shard without rows
        return jnp.dot(x.astype(jnp.float32), w)
    return _router(view, static, x, w)[0]


def load_metrics(tokens_per_expert: Int[Array, "*layers E"]) -> LoadMetrics:
    """max_violation = (max - mean) / mean, and the entropy of the load.

    Args:
      tokens_per_expert: [..., E] i32, such as `MoEStats.tokens_per_expert`, or its sum over microbatches.

    Returns:
      The metrics, [...] f32 each; 0 where there is no token.

    Raises:
      ValueError: tokens_per_expert is no array of integers.
    """
    check_arrays("tokens_per_expert int [..., E]", tokens_per_expert)
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
      bias: [..., E], floating point. The router adds it to the scores for selection alone.
      tokens_per_expert: [..., E] i32, counted over the whole mesh, and summed over the microbatches of the step.
      rate: for `sign` the step of the bias, in units of the score; None is 1e-3. For `quantile` the part of the way to
        the quantile, where 0.1 smooths over some 10 updates; None is 1.
      rule: see the equations of this module.
      histogram: [..., E, 1000] i32, `MoEStats.histogram` summed as the tokens are, for `quantile`. The router must have
        had this `bias` in all of them.

    Returns:
      The new bias, [..., E] in the dtype of bias. The rule `quantile` leaves it as it is where there is no token.

    Raises:
      ValueError: the rule is unknown, the shapes differ, or `quantile` has no histogram.
    """
    check_value("rule", rule, ("sign", "quantile"))
    if rate is not None and not isinstance(rate, jax.Array):
        check_value("rate", rate, float, least=-math.inf)
    if rule == "sign":
        histogram = None
    elif histogram is None:
        raise ValueError("histogram is None; rule='quantile' needs stats.histogram, of RouterConfig(histogram=True)")
    arrays = bias, tokens_per_expert, histogram
    check_arrays("bias [..., E], tokens_per_expert int [..., E], histogram? int [..., E, bins]", *arrays, bins=BINS)
    tokens_per_expert = tokens_per_expert.astype(jnp.int32)
    # Integers compare tokens with total / E exactly, without a product that could overflow.
    quotient, rest = jnp.divmod(tokens_per_expert.sum(-1, keepdims=True), bias.shape[-1])
    if histogram is not None:  # the biases below which as many values lie as a balanced load has tokens
        wide, target = bias.astype(jnp.float32), quotient + jnp.sign(rest)
        until = jnp.cumsum(histogram.astype(jnp.int32), axis=-1)
        place = jnp.argmax(until >= target[..., None], axis=-1, keepdims=True)
        inside, end = (jnp.take_along_axis(v, place, axis=-1)[..., 0].astype(jnp.int32) for v in (histogram, until))
        # The values of a bin are taken for evenly spread.
        part = (target - end + inside).astype(jnp.float32) / jnp.maximum(inside, 1).astype(jnp.float32)
        low, width = _find_bins(wide)
        found = low + width * (place[..., 0].astype(jnp.float32) + part)
        step = jnp.where(target > 0, found - found.mean(-1, keepdims=True), wide) - wide
        return (wide + jnp.asarray(1.0 if rate is None else rate, jnp.float32) * step).astype(bias.dtype)
    excess = jnp.sign(tokens_per_expert - quotient)
    excess = jnp.where(excess == 0, -jnp.sign(rest), excess)
    return bias - jnp.asarray(1e-3 if rate is None else rate, bias.dtype) * excess.astype(bias.dtype)


def logits_forward(static: RouterSpec, x, w):
    """Returns logits [T, E] f32 of one device. w: [H, E] f32."""
    if x.dtype != jnp.bfloat16:
        return _dot(x.astype(jnp.float32), w, ((1,), (0,)), precision=lax.Precision.HIGHEST)
    if static.narrow:
        return _dot(x, w.astype(jnp.bfloat16), ((1,), (0,)))
    return _dot(x, _lay_parts(w, (0, 1, 2)), ((1,), (0,)), parts=3)


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


def count_needed_bias(
    scores: Float[Array, "T E"], bias: Float[Array, " E"], best: Int[Array, "T K"], mask: Bool[Array, " T"] | None
) -> Int[Array, "E 1000"]:
    """Returns for each expert the histogram of `needed` over the real tokens, whose K best experts are `best`."""
    chose = (best[:, :, None] == jnp.arange(scores.shape[1], dtype=jnp.int32)[None, None]).any(1)
    cutoff = jnp.where(chose, -jnp.inf, scores + bias[None]).max(1, keepdims=True)
    low, width = _find_bins(bias)
    bins = jnp.clip((cutoff - scores - low[None]) / width[None], 0, BINS - 1).astype(jnp.int32)
    one = jnp.ones_like(bins) if mask is None else jnp.broadcast_to(mask[:, None].astype(jnp.int32), bins.shape)
    experts = jnp.arange(bins.shape[1], dtype=jnp.int32)[None]
    return jnp.zeros_like(bins, shape=(bins.shape[1], BINS)).at[experts, bins].add(one, mode="drop")


def _find_bins(bias: Float[Array, "*layers E"]) -> tuple[Float[Array, "*layers 1"], Float[Array, "*layers 1"]]:
    """Returns the lower end of the bins and the width of a bin."""
    low, high = bias.min(-1, keepdims=True) - 1.0, bias.max(-1, keepdims=True) + 1.0
    return low, (high - low) / BINS
