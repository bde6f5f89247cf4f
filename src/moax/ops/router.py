"""Router: logits = x w [T, E], which become K experts and K weights for each token. All is float32.

    forward  logits = x w                 x [T, H], w [H, E]
    dgrad    dx = dlogits w^T             wgrad  dw = x^T dlogits

Where x is bfloat16, a float32 weight is the sum of three bfloat16 parts, w = w0 + w1 + w2, each of which is the rest
rounded to bfloat16. The product of two bfloat16 numbers is exact in float32, so three products of bfloat16 make the
float32 product. Two parts of each operand suffice for a gradient that is rounded to bfloat16. A bfloat16 weight is its
own only part. An x of another dtype is multiplied in float32.

    score    softmax        exp(l) / sum exp(l)
             sigmoid        1 / (1 + exp(-l))
             sqrt_softplus  sqrt(log(1 + exp(l)))                     DeepSeek-V4

    score_then_topk:  s = score(logits);  experts = top_k(s + bias);  weights = s[experts]
    topk_then_score:  experts = top_k(logits + bias);                 weights = score(logits[experts])
    weights = scale * weights / sum_k weights                         (divided where normalize is set and K > 1)

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
from moax.mesh.op import Op, with_gradient
from moax.mesh.specs import Engine, find_mesh_view
from moax.ops.balance import BINS, Sums, balance_sequences, count_needed_bias, keep_ids, split_ids, sum_losses
from moax.types import Routing

NO_EXPERT = -1e30  # the logit of no expert: its share is 0, and so is every gradient
LOW = -16.0  # below, softplus(l) is exp(l) to the last bit of float32


@dataclasses.dataclass(frozen=True)
class RouterSpec:
    """The static arguments: the mesh axes by role, and whether the float32 weight holds values of bfloat16."""

    axes: ResolvedAxes
    narrow: bool


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
    sequences: Int[Array, "T C"] | None = None


class Counts(NamedTuple):
    """Counts of the real tokens in int32; None where there is nothing to count."""

    tokens: Int[Array, " E"]  # the assignments to each expert
    real: Int[Array, " 1"] | None  # the tokens under a mask
    sequences: Int[Array, " 1"] | None
    histogram: Int[Array, "E 1000"] | None  # see `count_needed_bias`


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


def route(
    logits: Float[Array, "T E"],
    config: RouterConfig,
    top_k: int,
    bias: Float[Array, " E"] | None = None,
    *,
    experts: Integer[Array, "T K"] | None = None,
    mask: Bool[Array, " T"] | None = None,
    sequences: Integer[Array, "T *C"] | None = None,
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
      sequences: [T] or [T, C], integers, for `config.sequence_aux_loss`: tokens with equal numbers, in all C columns,
        are one sequence, and a token with a negative number is in none.
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
    rule = "logits [T, E], bias? [E], experts? int [T, K], mask? bool [T], sequences? int [T, *C]"
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
    experts = None if experts is None else experts.astype(jnp.int32)
    if sequences is not None:
        sequences = split_ids(jnp.asarray(keep_ids(sequences)).reshape(logits.shape[0], -1))
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
        d = _lay_parts(d, (0, 1))
        dx = _dot(d, jnp.tile(w.astype(jnp.bfloat16), 2), ((1,), (1,)))
        dw = _dot(x, d, ((0,), (0,)), parts=2)
    else:
        dx = _dot(_lay_parts(d, (0, 0, 1)), _lay_parts(w, (0, 1, 0)), ((1,), (1,)))
        dw = _dot(x, _lay_parts(d, (0, 1, 2)), ((0,), (0,)), parts=3)
    return dx.astype(x.dtype), dw


def _lay_parts(x: Float[Array, "A E"], order: tuple[int, ...]) -> Float[Array, "A C"]:
    """Returns bfloat16 parts of x, in this order, side by side: (x0, x0, x1) for the order (0, 0, 1)."""
    # The parts sum to x, the largest first; each one is the rest rounded to bfloat16.
    parts, rest = [], x.astype(jnp.float32)
    for _ in range(max(order) + 1):  # XLA may remove a cast to bfloat16 and back
        part = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16)[:, None, :])
        rest = rest - part
    if order == (0, 1):  # a stack of two parts is one kernel less
        return jnp.concatenate(parts, axis=1).reshape(x.shape[0], -1)
    # XLA writes the operands of a concatenation to memory first, and fuses a selection.
    which = lax.broadcasted_iota(jnp.int32, (x.shape[0], len(order), x.shape[1]), 1)
    laid = jnp.broadcast_to(parts[order[0]], which.shape)
    for place, part in enumerate(order[1:], 1):
        laid = jnp.where(which == place, parts[part], laid)
    return laid.reshape(x.shape[0], -1)


def _dot(a, b, contract, *, parts: int = 1, precision=None):
    """Returns a product in float32: the sum of the products with `parts` that are side by side in b."""
    product = lax.dot_general(a, b, (contract, ((), ())), precision=precision, preferred_element_type=jnp.float32)
    return functools.reduce(jnp.add, jnp.split(product, parts, axis=1)[::-1])  # the smallest part is added first


def route_forward(static: RouteSpec, logits, bias, choice: Choice):
    """Returns experts, weights, Sums and Counts of one device; sums and counts are partial over the axes of tokens."""
    config, along, num_experts = static.config, static.sequence_axes, logits.shape[1]
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
        weights = log_score(chosen, config) if static.weight == "share" else score(chosen, config)
    if static.weight == "share":  # exp / sum of exp, column by column, so that one kernel of a GPU computes it
        logs = [weights[:, k] for k in range(static.top_k)]
        most = lax.stop_gradient(functools.reduce(jnp.maximum, logs))
        shares = [jnp.exp(log - most) for log in logs]
        for _ in range(2):  # after the second time their sum is 1 but for rounding, and so is the gradient's
            total = functools.reduce(jnp.add, shares)
            shares = [value / total for value in shares]
        weights = jnp.stack(shares, axis=1)
    weights = jnp.where(experts < num_experts, weights * config.scale, 0.0)
    balance = sequences = None
    if choice.sequences is not None:
        balance, sequences = balance_sequences(experts, choice.sequences, choice.mask, num_experts, along)
    sums = Sums()
    if config.aux_loss or config.sequence_aux_loss or config.z_loss:
        sums = sum_losses(config, logits, log_score(logits, config), choice.mask, balance)
    # Comparisons are one kernel of a GPU; a scatter waits where tokens agree on an expert.
    chose = experts[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, None]
    counts = Counts(chose.sum((0, 1), dtype=jnp.int32), real, sequences, histogram)
    return experts, weights, sums, counts


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
            balance, _ = balance_sequences(experts, choice.sequences, choice.mask, num_experts, static.sequence_axes)
        pull = jax.vjp(lambda x: sum_losses(config, x, log_score(x, config), choice.mask, balance), logits)[1]
        d_logits = d_logits + pull(d_sums)[0]
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


_router = with_gradient(
    "router_logits",
    Op("router", logits_forward, "t h, h e -> t e"),
    Op("router_grad", logits_backward, "t h, h e, t e -> t h, h e"),
    save=lambda operands, results: operands,
    pull=lambda grad, saved, d: grad(*saved, *d),
    once=False,
)
_route = with_gradient(
    "route",
    Op("route", route_forward, "t e, e, @t -> t k, t k, @, @"),
    Op("route_grad", route_backward, "t e, t k, @t, t k, t k, @ -> t e"),
    save=lambda operands, results: (operands[0], results[0], operands[2]._replace(experts=None), results[1]),
    pull=lambda grad, saved, d: (*grad(*saved, d[1], d[2]), None, None),
    once=False,
)
