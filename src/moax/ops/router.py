"""Router: logits = x w [T, E], which become K experts and K weights for each token. All is float32.

    forward  logits = x w                 x [T, H], w [H, E]
    dgrad    dx = dlogits w^T             wgrad  dw = x^T dlogits

Where x is bfloat16, a float32 weight is the sum of three bfloat16 parts, w = w0 + w1 + w2, each of which is the rest
rounded to bfloat16. The product of two bfloat16 numbers is exact in float32, so three matmuls of bfloat16 make the
float32 matmul. Two parts of each operand suffice for a gradient that is rounded to bfloat16. A bfloat16 weight is its
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

A caller may choose the experts. Their weights then follow from the router's scores: `experts` (1, 3) in the example
have the weights (4/6, 2/6). A token that `mask` leaves out is not counted. It has the experts (E, E), which means no
expert, and the weights (0, 0).
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
from moax.kernels.groups import narrow_ids
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

    `weight` says what a weight is: a token's `share` of its K scores, its score `of_all` experts, or the score of one
    logit alone, `of_one`.
    """

    config: RouterConfig
    top_k: int
    weight: Literal["share", "of_all", "of_one"]
    axes: ResolvedAxes
    sequence_axes: Names
    kernels: str


class Choice(NamedTuple):
    """The decisions of a caller of `route` for its tokens, by the arguments of these names; None leaves one open."""

    experts: Int[Array, "T K"] | None = None
    mask: Bool[Array, " T"] | None = None
    sequences: Int[Array, "T C"] | None = None


class Counts(NamedTuple):
    """Counts of the real tokens in int32; None where the router needs no count."""

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
    static = RouterSpec(view.axes, narrow=w.dtype == jnp.bfloat16)
    w = w.astype(jnp.float32)
    if x.shape[0] == 0:  # XLA compiles no matmul of a shard without rows
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
    if bias is None and config.bias:
        raise ValueError("bias is None, and RouterConfig.bias=True; pass params.router_bias, or set bias=False")
    if bias is not None and not config.bias:
        raise ValueError("bias is an array, and RouterConfig.bias=False; pass None, or set bias=True")
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
        return _route_no_tokens(logits, config, top_k)
    if sequence_axes is None:
        sequence_axes = view.axes.sequence if view.manual else view.axes.tokens
    sequence_axes = as_names(sequence_axes)
    along = tuple(name for name in view.axes.tokens if name in sequence_axes)
    weight = _kind_of_weight(config, top_k)
    static = RouteSpec(config, top_k, weight, view.axes, along, select_kernels(kernels))
    if bias is not None:
        bias = lax.stop_gradient(bias).astype(jnp.float32)
    if experts is not None:
        experts = narrow_ids(experts, logits.shape[1])
    if sequences is not None:
        sequences = split_ids(jnp.asarray(keep_ids(sequences)).reshape(logits.shape[0], -1))
    choice = Choice(experts, mask, sequences)
    chosen, weights, sums, counts = _route(view, static, logits, bias, choice)
    sums, counts = jax.tree.map(lambda v: view.psum(v, view.axes.tokens), (sums, counts))
    num_tokens = logits.shape[0]
    if view.manual:
        num_tokens *= view.axes.size(view.axes.tokens)
    aux_loss, z_loss = _compute_losses(config, top_k, num_tokens, sums, counts)
    return Routing(chosen, weights, aux_loss, z_loss, counts.tokens, counts.histogram)


def _kind_of_weight(config: RouterConfig, top_k: int) -> Literal["share", "of_all", "of_one"]:
    """Returns how a weight follows from the scores; see `RouteSpec`."""
    if config.normalize and top_k > 1:
        return "share"
    if config.score != "softmax":
        return "of_one"
    return "share" if config.order == "topk_then_score" else "of_all"


def _route_no_tokens(logits: Float[Array, "0 E"], config: RouterConfig, top_k: int) -> Routing:
    """Returns the routing of an array without tokens."""
    num_experts = logits.shape[1]
    weights = logits[:, :top_k]
    zero = jnp.zeros((), jnp.float32)
    tokens = jnp.zeros(num_experts, jnp.int32)
    histogram = jnp.zeros((num_experts, BINS), jnp.int32) if config.histogram else None
    return Routing(weights.astype(jnp.int32), weights, zero, zero, tokens, histogram)


def _compute_losses(config: RouterConfig, top_k: int, num_tokens: int, sums: Sums, counts: Counts):
    """Returns the aux loss and the z-loss, from sums and counts of the whole mesh."""
    real = num_tokens
    if counts.real is not None:
        real = jnp.maximum(counts.real[0], 1).astype(jnp.float32)
    factor = counts.tokens.shape[0] / top_k
    zero = jnp.zeros((), jnp.float32)
    aux_loss = zero
    z_loss = zero
    if sums.share is not None:
        products = sums.share * counts.tokens.astype(jnp.float32)
        aux_loss = config.aux_loss * jnp.sum(products) * (factor / real**2)
    if sums.by_sequence is not None and counts.sequences is not None:
        sequences = jnp.maximum(counts.sequences[0], 1).astype(jnp.float32)
        aux_loss = aux_loss + config.sequence_aux_loss * factor * sums.by_sequence[0] / sequences
    if sums.z is not None:
        z_loss = config.z_loss * sums.z[0] / real
    return aux_loss, z_loss


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
    parts = []
    rest = x.astype(jnp.float32)
    for _ in range(max(order) + 1):  # XLA may remove a cast to bfloat16 and back: openxla/xla#41605
        part = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        parts.append(part.astype(jnp.bfloat16)[:, None, :])
        rest = rest - part
    if order == (0, 1):  # a stack of two parts is one kernel less
        return jnp.concatenate(parts, axis=1).reshape(x.shape[0], -1)
    # XLA writes the operands of a concatenation to memory first, and fuses a selection.
    position = lax.broadcasted_iota(jnp.int32, (x.shape[0], len(order), x.shape[1]), 1)
    row_of_parts = jnp.broadcast_to(parts[order[0]], position.shape)
    for i, part in enumerate(order[1:], 1):
        row_of_parts = jnp.where(position == i, parts[part], row_of_parts)
    return row_of_parts.reshape(x.shape[0], -1)


def _dot(a, b, contract, *, parts: int = 1, precision=None):
    """Returns the float32 matmul of a and b, which holds `parts` matrices side by side: the sum of their matmuls."""
    dims = (contract, ((), ()))
    product = lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
    smallest_part_first = jnp.split(product, parts, axis=1)[::-1]
    return functools.reduce(jnp.add, smallest_part_first)


def route_forward(static: RouteSpec, logits, bias, choice: Choice):
    """Returns experts, weights, Sums and Counts of one device; sums and counts are partial over the axes of tokens."""
    config = static.config
    num_experts = logits.shape[1]
    # Without the barrier XLA runs a kernel twice whose result a scan stores.
    experts, chosen_logits = lax.optimization_barrier(select_experts(static, logits, bias))
    histogram = None
    if config.histogram:
        scores = logits if config.order == "topk_then_score" else score(logits, config)
        histogram = count_needed_bias(scores, bias, experts, choice.mask)
    if choice.experts is not None:
        chosen_logits = None
        takes_best = (choice.experts < 0).any(-1, keepdims=True)
        experts = jnp.where(takes_best, experts, jnp.minimum(choice.experts, num_experts))
    num_real = None
    if choice.mask is not None:
        experts = jnp.where(choice.mask[:, None], experts, num_experts)
        num_real = choice.mask.sum(dtype=jnp.int32)[None]
        logits = jnp.where(choice.mask[:, None], logits, 0.0)  # padding may hold NaN
    weights = _weigh(static, logits, experts, chosen_logits)
    weights = jnp.where(experts < num_experts, weights * config.scale, 0.0)
    balance, num_sequences = _balance(static, experts, choice, num_experts)
    sums = Sums()
    if config.aux_loss or config.sequence_aux_loss or config.z_loss:
        sums = sum_losses(config, logits, log_score(logits, config), choice.mask, balance)
    # Comparisons are one kernel of a GPU; a scatter waits where tokens agree on an expert.
    chose = experts[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, None]
    tokens = chose.sum((0, 1), dtype=jnp.int32)
    return experts, weights, sums, Counts(tokens, num_real, num_sequences, histogram)


def _balance(static: RouteSpec, experts, choice: Choice, num_experts: int):
    """Returns the results of `balance_sequences`; (None, None) where the caller names no sequences."""
    if choice.sequences is None:
        return None, None
    return balance_sequences(experts, choice.sequences, choice.mask, num_experts, along=static.sequence_axes)


def _weigh(static: RouteSpec, logits, experts, chosen_logits):
    """Returns the weights [T, K] of the experts before the scale; `chosen_logits` are theirs, None where unknown."""
    if static.weight == "of_all":
        return _take(score(logits, static.config), experts)
    if chosen_logits is None:
        chosen_logits = _take(logits, experts)
    if static.weight == "of_one":
        return score(chosen_logits, static.config)
    return _share(log_score(chosen_logits, static.config))


def _share(log_scores: Float[Array, "T K"]) -> Float[Array, "T K"]:
    """Returns exp(log_scores), divided by its sum over K."""
    # Columns are arrays of their own, so that one kernel of a GPU computes them.
    columns = [log_scores[:, k] for k in range(log_scores.shape[1])]
    largest = lax.stop_gradient(functools.reduce(jnp.maximum, columns))
    shares = _divide_by_sum([jnp.exp(column - largest) for column in columns])
    # Backward assumes that the shares sum to 1. After a second division their sum is 1 but for rounding.
    return jnp.stack(_divide_by_sum(shares), axis=1)


def _divide_by_sum(columns: list[Array]) -> list[Array]:
    """Returns the columns, each divided by their sum."""
    total = functools.reduce(jnp.add, columns)
    return [column / total for column in columns]


def route_backward(
    static: RouteSpec,
    logits,
    experts,
    choice: Choice,
    weights,
    d_weights,
    d_sums: Sums,
):
    """Returns d_logits [T, E] of one device, from the experts and weights that forward returned."""
    config = static.config
    num_experts = logits.shape[1]
    if choice.mask is not None:
        logits = jnp.where(choice.mask[:, None], logits, 0.0)
    d_weights = jnp.where(experts < num_experts, d_weights, 0.0)
    d_logits = _weigh_backward(static, logits, experts, weights, d_weights)
    if jax.tree.leaves(d_sums):
        balance, _ = _balance(static, experts, choice, num_experts)

        def losses_of(logits):
            return sum_losses(config, logits, log_score(logits, config), choice.mask, balance)

        _, pull_losses = jax.vjp(losses_of, logits)
        d_logits = d_logits + pull_losses(d_sums)[0]
    if choice.mask is not None:
        d_logits = jnp.where(choice.mask[:, None], d_logits, 0.0)
    return d_logits


def _weigh_backward(static: RouteSpec, logits, experts, weights, d_weights):
    """Returns the gradient [T, E] of the logits from that of the weights [T, K], which are scaled."""
    config = static.config
    if static.weight == "share" and static.top_k == 1:
        return jnp.zeros_like(logits)  # the weight is the scale, whatever the logits are
    if static.weight == "of_all":
        _, pull = jax.vjp(lambda logits: _take(score(logits, config), experts), logits)
        return pull(d_weights * config.scale)[0]
    if static.weight == "share":
        projection = jnp.sum(weights * d_weights, axis=1) / config.scale
        d_scores = weights * (d_weights - projection[:, None])
        score_of = log_score
    else:
        d_scores = d_weights * config.scale
        score_of = score
    _, pull = jax.vjp(lambda logits: score_of(logits, config), _take(logits, experts))
    (d_chosen,) = pull(d_scores)
    # A sum over K of selected columns is part of the kernel that reads it. A scatter, and its zeros, are kernels.
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
    columns = []
    for k in range(static.top_k):
        is_chosen = experts[:, k : k + 1] == ids
        columns.append(jnp.where(is_chosen, d_chosen[:, k : k + 1], 0.0))
    return functools.reduce(jnp.add, columns)


def select_experts(
    static: RouteSpec, logits: Float[Array, "T E"], bias: Float[Array, " E"] | None
) -> tuple[Int[Array, "T K"], Float[Array, "T K"] | None]:
    """Returns the K best experts of each token, and their logits, or None where other scores chose them."""
    config = static.config
    scores = logits
    # Scores grow with logits, so logits choose the same experts, also where scores underflow to 0.
    logits_choose = config.order == "topk_then_score" or (bias is None and config.num_groups == 1)
    if not logits_choose:
        scores = score(logits, config)
    if bias is not None:
        scores = scores + bias[None]
    if config.num_groups > 1:
        grouped = scores.reshape(scores.shape[0], config.num_groups, -1)
        sum_topk = static.top_k // config.top_groups
        count = {"max": 1, "top2": 2, "sum_topk": sum_topk}[config.group_score]
        best_scores, _ = lax.top_k(grouped, min(count, grouped.shape[-1]))
        _, groups = lax.top_k(best_scores.sum(-1), config.top_groups)
        ids = jnp.arange(config.num_groups, dtype=groups.dtype)
        eligible = (groups[:, :, None] == ids[None, None]).any(1)
        scores = jnp.where(eligible[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
    values, experts = implementation(static.kernels).top_k(scores, static.top_k)
    if scores is logits:
        return experts, values
    return experts, None


def score(logits: Float[Array, "... E"], config: RouterConfig) -> Float[Array, "... E"]:
    """Returns the score of each expert."""
    if config.score == "softmax":
        return jax.nn.softmax(logits, axis=-1)
    if config.score == "sigmoid":
        return jax.nn.sigmoid(logits)
    return jnp.exp(log_score(logits, config))


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


def _save_route(operands, results):
    logits, _, choice = operands
    experts, weights, _, _ = results
    return logits, experts, choice._replace(experts=None), weights


def _pull_route(run_grad, saved, cotangents):
    _, d_weights, d_sums, _ = cotangents
    (d_logits,) = run_grad(*saved, d_weights, d_sums)
    return d_logits, None, None


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
    save=_save_route,
    pull=_pull_route,
    once=False,
)
