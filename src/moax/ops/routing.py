"""Route: logits [T, E] become K experts and K weights for each token, and the balance losses. All is float32.

    score    softmax        exp(l) / sum exp(l)
             sigmoid        1 / (1 + exp(-l))
             sqrt_softplus  sqrt(log(1 + exp(l)))                     DeepSeek-V4

    score_then_topk:  s = score(logits);  experts = top_k(s + bias);  weights = s[experts]
    topk_then_score:  experts = top_k(logits + bias);                 weights = score(logits[experts])
    weights = scale * weights / sum_k weights                         (divided where normalize is set and K > 1)

    aux_loss = c E / (K T^2) sum_e (sum_t p[t, e]) tokens[e]          p: scores of all experts, summing to 1 a token
             + c' mean over sequences of the same, with the T and the tokens of one sequence
    z_loss   = c / T sum_t logsumexp(logits[t])^2                     T: tokens of the whole mesh

With K = 2, score_then_topk and the scores (0.1, 0.4, 0.3, 0.2) of a token, experts = (1, 2) and weights = (4/7, 3/7).
The division is one of exp(log score), so weights whose scores all underflow to 0 still sum to the scale: with two
logits of -100, both sigmoids are 0 in float32, and both weights are 1/2. Selection has no gradient. The sums over
tokens are psums of [E] vectors, so logits never leave their shard.

A caller may choose the experts, and the weights are then those of the router's scores: `experts` (1, 3) in the example
have the weights (4/6, 2/6). A token that `mask` leaves out is not counted; it has the experts (E, E), which are none,
and the weights (0, 0).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer

from moax.checks import check_arrays, check_value
from moax.config import RouterConfig
from moax.kernels import implementation, select_kernels
from moax.mesh.axes import Axes, Names, ResolvedAxes, as_names
from moax.mesh.collectives import gather_rows, mask_to_first_rank, take_shard
from moax.mesh.op import Op, with_gradient
from moax.mesh.specs import Engine, find_mesh_view
from moax.ops.router import BINS, count_needed_bias
from moax.types import Routing

NO_EXPERT = -1e30  # the logit of no expert: its share is 0, and so is every gradient
LOW = -16.0  # below, softplus(l) is exp(l) to the last bit of float32


@dataclasses.dataclass(frozen=True)
class RouteSpec:
    """The static arguments of `route`; `kernels` is the name of the implementation that finds the best experts.

    A weight is a token's share of its K scores, its score among all experts, or the score of one logit.
    """

    config: RouterConfig
    top_k: int
    weight: Literal["share", "of_all", "of_one"]
    axes: ResolvedAxes
    sequence_axes: Names
    kernels: str


class Choice(NamedTuple):
    """What a caller of `route` has decided for its tokens, by the arguments of these names; None where nothing."""

    experts: Int[Array, "T K"] | None = None
    mask: Bool[Array, " T"] | None = None
    sequences: Int[Array, " T"] | None = None


class Sums(NamedTuple):
    """Sums over the real tokens, which are differentiable in the logits; None where no loss needs one."""

    share: Float[Array, " E"] | None  # of the scores of each token, which sum to 1
    z: Float[Array, " 1"] | None  # of logsumexp(logits)^2
    by_sequence: Float[Array, " 1"] | None  # of each token's shares times tokens[e] / T^2 of its sequence


class Counts(NamedTuple):
    """Counts of the real tokens in int32; None where there is nothing to count."""

    tokens: Int[Array, " E"]  # the assignments to each expert
    real: Int[Array, " 1"] | None  # the tokens under a mask
    sequences: Int[Array, " 1"] | None
    histogram: Int[Array, "E 1000"] | None  # see `count_needed_bias`


def route(
    logits: Float[Array, "T E"],
    config: RouterConfig,
    top_k: int,
    bias: Float[Array, " E"] | None = None,
    *,
    experts: Integer[Array, "T K"] | None = None,
    mask: Bool[Array, " T"] | None = None,
    sequences: Integer[Array, " T"] | None = None,
    sequence_axes: Names | None = None,
    axes: Axes = Axes(),
    engine: Engine = "auto",
    kernels: str = "auto",
) -> Routing:
    """Returns the top_k experts of each token, their weights, and the balance losses over the whole mesh.

    Args:
      logits: [T, E], floating point, T over (dp, fsdp, ep, cp). With `config.logits_bias` they include that bias.
      config: see `RouterConfig`.
      top_k: K, the experts per token.
      bias: [E], added to the scores for selection alone, without a gradient; given exactly where `config.bias` is set.
      experts: [T, K], integers in [0, E]: experts to take in place of the best ones; E means no expert. A token with a
        negative id takes its best experts.
      mask: [T] bool, False for padding.
      sequences: [T], integers, for `config.sequence_aux_loss`: tokens with equal numbers are one sequence, and tokens
        with negative numbers are in none.
      sequence_axes: the mesh axes that may split a sequence; experts are gathered along them to be counted. None means
        all axes of tokens, and inside a `shard_map` of yours those of cp.
      axes, engine, kernels: see `moax.Options`.

    Returns:
      Routing: experts [T, K] i32 and weights [T, K] f32, sharded like the logits; losses and counts are replicated.

    Raises:
      ValueError: a shape does not fit, `bias` and `config.bias` disagree, K or the groups do not fit E, sequences are
        missing, or the mesh does not divide T.
      Unsupported: the engine or the kernels that were chosen by name cannot run.

    Group-limited routing, the selection bias and the loss of a sequence follow DeepSeek-V3. The aux loss follows Switch
    Transformer: a balanced router pays the coefficient. The z-loss follows ST-MoE.
    """
    check_value("config", config, RouterConfig)
    if (bias is not None) != config.bias:
        raise ValueError(f"bias is {'given' if bias is not None else 'None'}, but RouterConfig.bias={config.bias}")
    if not config.sequence_aux_loss:
        sequences = None
    elif sequences is None:
        raise ValueError(f"sequences is None; it must be given for sequence_aux_loss={config.sequence_aux_loss}")
    rule = "logits [T, E], bias? [E], experts? int [T, K], mask? bool [T], sequences? int [T]"
    check_arrays(rule, logits, bias, experts, mask, sequences, K=top_k)
    config.check_experts(logits.shape[1], top_k)
    view = find_mesh_view(axes, engine, logits)
    logits = logits.astype(jnp.float32)
    if logits.shape[0] == 0:
        weights, zero, tokens = logits[:, :top_k], jnp.zeros((), jnp.float32), jnp.zeros(logits.shape[1], jnp.int32)
        histogram = jnp.zeros((len(tokens), BINS), jnp.int32) if config.histogram else None
        return Routing(weights.astype(jnp.int32), weights, zero, zero, tokens, histogram)
    if sequence_axes is None:
        sequence_axes = view.axes.sequence if view.manual else view.axes.tokens
    along = tuple(name for name in view.axes.tokens if name in as_names(sequence_axes))
    weight = "of_all" if config.score == "softmax" else "of_one"
    if (config.normalize and top_k > 1) or (config.score == "softmax" and config.order == "topk_then_score"):
        weight = "share"
    static = RouteSpec(config, top_k, weight, view.axes, along, select_kernels(kernels))
    bias = None if bias is None else lax.stop_gradient(bias).astype(jnp.float32)
    experts, sequences = (None if ids is None else ids.astype(jnp.int32) for ids in (experts, sequences))
    chosen, weights, sums, counts = _route(view, static, logits, bias, Choice(experts, mask, sequences))
    sums, counts = jax.tree.map(lambda v: view.psum(v, view.axes.tokens), (sums, counts))
    tokens, real = counts.tokens, logits.shape[0] * (view.axes.size(view.axes.tokens) if view.manual else 1)
    if counts.real is not None:
        real = jnp.maximum(counts.real[0], 1).astype(jnp.float32)
    factor = tokens.shape[0] / top_k
    aux = z = jnp.zeros((), jnp.float32)
    if sums.share is not None:
        aux = config.aux_loss * jnp.sum(sums.share * tokens.astype(jnp.float32)) * (factor / real**2)
    if sums.by_sequence is not None:
        number = jnp.maximum(counts.sequences[0], 1).astype(jnp.float32)
        aux = aux + config.sequence_aux_loss * factor * sums.by_sequence[0] / number
    if sums.z is not None:
        z = config.z_loss * sums.z[0] / real
    return Routing(chosen, weights, aux, z, tokens, counts.histogram)


def route_forward(static: RouteSpec, logits, bias, choice: Choice):
    """Returns experts, weights, Sums and Counts of one device; sums and counts are partial over the axes of tokens."""
    config, num_experts = static.config, logits.shape[1]
    # The barrier keeps XLA from running a kernel twice whose result a scan stores.
    experts, chosen = lax.optimization_barrier(select_experts(static, logits, bias))
    histogram = None
    if config.histogram:
        scores = logits if config.order == "topk_then_score" else score(logits, config)
        histogram = count_needed_bias(scores, bias, experts, choice.mask)
    if choice.experts is not None:
        chosen = None
        own = (choice.experts < 0).any(-1, keepdims=True)
        experts = jnp.where(own, experts, jnp.minimum(choice.experts, num_experts))
    real = None
    if choice.mask is not None:
        experts = jnp.where(choice.mask[:, None], experts, num_experts)
        real = choice.mask.sum(dtype=jnp.int32)[None]
        logits = jnp.where(choice.mask[:, None], logits, 0.0)  # padding may hold NaN
    if static.weight == "of_all":
        weights = _take(score(logits, config), experts)
    else:
        chosen = _take(logits, experts) if chosen is None else chosen
        weights = _share(log_score(chosen, config)) if static.weight == "share" else score(chosen, config)
    weights = jnp.where(experts < num_experts, weights * config.scale, 0.0)
    balance = sequences = None
    if choice.sequences is not None:
        balance, sequences = _balance_sequences(static, experts, choice.sequences, choice.mask, num_experts)
    # Comparisons are one kernel of a GPU; a scatter waits where tokens agree on an expert.
    chose = experts[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, None]
    counts = Counts(chose.sum((0, 1), dtype=jnp.int32), real, sequences, histogram)
    return experts, weights, _sum(logits, choice, config, balance), counts


def route_backward(static: RouteSpec, logits, experts, choice: Choice, weights, d_weights, d_sums: Sums):
    """Returns d_logits [T, E] of one device, from the experts and weights that forward returned."""
    config, num_experts, share = static.config, logits.shape[1], static.weight == "share"
    if choice.mask is not None:
        logits = jnp.where(choice.mask[:, None], logits, 0.0)
    d_weights = jnp.where(experts < num_experts, d_weights, 0.0)
    if share and static.top_k == 1:
        d_logits = jnp.zeros_like(logits)  # the weight is the scale, whatever the logits are
    elif static.weight == "of_all":
        (d_logits,) = jax.vjp(lambda x: _take(score(x, config), experts), logits)[1](d_weights * config.scale)
    else:
        d_scores = d_weights * config.scale
        if share:
            along = jnp.sum(weights * d_weights, axis=1) / config.scale
            d_scores = weights * (d_weights - along[:, None])
        of_logits = log_score if share else score
        (d_chosen,) = jax.vjp(lambda x: of_logits(x, config), _take(logits, experts))[1](d_scores)
        # A sum over K of selected columns is part of the kernel that reads it. A scatter, and its zeros, are kernels.
        ids = jnp.arange(num_experts, dtype=jnp.int32)[None]
        columns = [jnp.where(experts[:, k : k + 1] == ids, d_chosen[:, k : k + 1], 0.0) for k in range(static.top_k)]
        d_logits = functools.reduce(jnp.add, columns)
    if jax.tree.leaves(d_sums):
        balance = None
        if choice.sequences is not None:
            balance, _ = _balance_sequences(static, experts, choice.sequences, choice.mask, num_experts)
        d_logits = d_logits + jax.vjp(lambda x: _sum(x, choice, config, balance), logits)[1](d_sums)[0]
    return d_logits if choice.mask is None else jnp.where(choice.mask[:, None], d_logits, 0.0)


def select_experts(
    static: RouteSpec, logits: Float[Array, "T E"], bias: Float[Array, " E"] | None
) -> tuple[Int[Array, "T K"], Float[Array, "T K"] | None]:
    """Returns the K best experts of each token, and their logits, or None where other scores chose them."""
    config, top_k = static.config, static.top_k
    # Scores grow with logits, so logits choose the same experts, also where scores underflow to 0.
    of_logits = config.order == "topk_then_score" or (bias is None and config.num_groups == 1)
    scores = logits if of_logits else score(logits, config)
    scores = scores if bias is None else scores + bias[None]
    if config.num_groups > 1:
        grouped = scores.reshape(scores.shape[0], config.num_groups, -1)
        count = {"max": 1, "top2": 2, "sum_topk": top_k // config.top_groups}[config.group_score]
        best = lax.top_k(grouped, min(count, grouped.shape[-1]))[0].sum(-1)
        groups = lax.top_k(best, config.top_groups)[1]
        eligible = (groups[:, :, None] == jnp.arange(config.num_groups, dtype=groups.dtype)[None, None]).any(1)
        scores = jnp.where(eligible[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
    values, experts = implementation(static.kernels).top_k(scores, top_k)
    return experts, values if scores is logits else None


def score(logits: Float[Array, "... E"], config: RouterConfig) -> Float[Array, "... E"]:
    """Returns the score of each expert."""
    if config.score == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    return jax.nn.sigmoid(logits) if config.score == "sigmoid" else jnp.exp(log_score(logits, config))


def log_score(logits: Float[Array, "... E"], config: RouterConfig) -> Float[Array, "... E"]:
    """Returns the logarithm of each score; of softmax, but for a constant of each row."""
    if config.score == "softmax":
        return logits
    if config.score == "sigmoid":
        return jax.nn.log_sigmoid(logits)
    softplus = jax.nn.softplus(jnp.maximum(logits, LOW))
    return 0.5 * jnp.where(logits < LOW, logits, jnp.log(softplus))


def _take(values, experts):
    """Returns the values [T, K] of the experts, of values [T, E], and `NO_EXPERT` for none."""
    return jnp.take_along_axis(values, experts, axis=-1, mode="fill", fill_value=NO_EXPERT)


def _share(logs):
    """Returns exp(logs) [T, K], divided by their sum; column by column, so that one kernel of a GPU computes it."""
    columns = [logs[:, k] for k in range(logs.shape[1])]
    most = lax.stop_gradient(functools.reduce(jnp.maximum, columns))
    shares = [jnp.exp(column - most) for column in columns]
    for _ in range(2):  # after the second time their sum is 1 but for rounding, and so is the gradient's
        total = functools.reduce(jnp.add, shares)
        shares = [value / total for value in shares]
    return jnp.stack(shares, axis=1)


def _sum(logits, choice: Choice, config: RouterConfig, balance: Float[Array, "T E"] | None) -> Sums:
    """Returns the Sums of one device, with the `balance` of `_balance_sequences`."""
    total = z = by_sequence = None
    if config.aux_loss or config.sequence_aux_loss:
        shares = jax.nn.softmax(log_score(logits, config), axis=-1)
        shares = shares if choice.mask is None else jnp.where(choice.mask[:, None], shares, 0.0)
        total = shares.sum(0) if config.aux_loss else None
        by_sequence = None if balance is None else (shares * balance).sum()[None]
    if config.z_loss:
        z = jax.nn.logsumexp(logits, axis=-1) ** 2
        z = (z if choice.mask is None else jnp.where(choice.mask, z, 0.0)).sum()[None]
    return Sums(total, z, by_sequence)


def _balance_sequences(static: RouteSpec, experts, sequences, mask, num_experts: int):
    """Returns, for each token and the T tokens of its sequence, tokens[e] / T^2 [T, E]; and the sequences [1]."""
    along = static.sequence_axes
    ids = sequences if mask is None else jnp.where(mask, sequences, -1)
    rows = gather_rows(jnp.concatenate([ids[:, None], experts], axis=1), along)
    # Integers add up to the same sum in any order, and so may scatters of them.
    number = jnp.unique(rows[:, 0], return_inverse=True, size=len(rows))[1]
    zeros = jnp.zeros_like(rows, shape=(len(rows), num_experts))
    tokens = zeros.at[number[:, None], rows[:, 1:]].add(1, mode="drop")
    sizes = zeros[:, 0].at[number].add((rows[:, 0] >= 0).astype(jnp.int32))
    own = take_shard(number, (along,))
    size = jnp.maximum(sizes[own], 1).astype(jnp.float32)
    balance = tokens[own].astype(jnp.float32) / (size**2)[:, None]
    number_of_sequences = mask_to_first_rank((sizes > 0).sum(dtype=jnp.int32)[None], along)
    return jnp.where(ids[:, None] >= 0, balance, 0.0), number_of_sequences


_route = with_gradient(
    Op("route", route_forward, "t e, e, @t -> t k, t k, @, @"),
    Op("route_grad", route_backward, "t e, t k, @t, t k, t k, @ -> t e"),
    save=lambda operands, results: (operands[0], results[0], operands[2]._replace(experts=None), results[1]),
    pull=lambda grad, saved, d: (*grad(*saved, d[1], d[2]), None, None),
)
