"""Route: logits [T, E] become K experts and K weights for each token, and the balance losses.

    score_then_topk:  s = score(logits);  experts = top_k(s + bias);  weights = s[experts]
    topk_then_score:  experts = top_k(logits + bias);                 weights = score(logits[experts])
    weights = scale * weights / sum_k weights                         (divided where normalize is set and K > 1)

The division is that of exp(log score): weights whose scores all underflow to 0 still sum to the scale.

    aux_loss = c E / (K T^2) sum_e (sum_t p[t, e]) tokens[e]          p: scores of all experts, summing to 1 a token
             + c' mean over sequences of the same, with the T and the tokens of one sequence
    z_loss   = c / T sum_t logsumexp(logits[t])^2                     T: tokens of the whole mesh

With K = 2, score_then_topk and the scores (0.1, 0.4, 0.3, 0.2) of a token, experts = (1, 2) and weights = (4/7, 3/7).
Selection has no gradient, and the argument `bias` changes selection alone. The sums over tokens are psums of [E]
vectors, so logits never leave their shard. Everything is float32.

A caller may choose the experts, and the weights are then those of the router's scores: `experts` (1, 3) in the example
have the weights (4/6, 2/6). A token that `mask` leaves out has the experts (E, E), which stand for no expert, and the
weights (0, 0). T and tokens[e] do not count it.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Integer

from moax.checks import check_count, check_float, check_int, check_kind, check_mask
from moax.config import RouterConfig
from moax.kernels import implementation, select_kernels
from moax.mesh.axes import Axes, Roles
from moax.mesh.partition import Contract, Engine, MeshView, Partitioned, differentiable, find_mesh_view
from moax.mesh.specs import spec
from moax.ops.scores import score, share, weigh, weigh_backward
from moax.types import Routing

HIGHEST = lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class RouteSpec:
    """The static arguments of `route`: the router, K, the number of sequences, the mesh axes by role, and the name of
    the implementation that finds the best experts.
    """

    config: RouterConfig
    top_k: int
    num_sequences: int
    roles: Roles
    kernels: str


class Choice(NamedTuple):
    """What a caller of `route` has decided for its tokens; None where it has decided nothing.

    Attributes:
      experts: [T, K] i32, the experts to take.
      mask: [T] bool, whether each token is real.
      sequences: [T] i32, the sequence of each token.
    """

    experts: Int[Array, "T K"] | None = None
    mask: Bool[Array, " T"] | None = None
    sequences: Int[Array, " T"] | None = None


class Sums(NamedTuple):
    """Sums over the real tokens, which are differentiable in the logits; None where no loss needs one.

    Attributes:
      share: [E], of the scores of each token, which sum to 1.
      z: [1], of logsumexp(logits)^2.
      by_sequence: [S, E], `share` of each sequence; None without sequences.
    """

    share: Float[Array, " E"] | None
    z: Float[Array, " 1"] | None
    by_sequence: Float[Array, "S E"] | None


class Counts(NamedTuple):
    """Counts of the real tokens.

    Attributes:
      tokens: [E] i32, the assignments to each expert.
      real: [1] i32, the tokens; None without a mask.
      by_sequence: [S, E + 1] f32, the assignments to each expert and the tokens, of each sequence; None without any.
    """

    tokens: Int[Array, " E"]
    real: Int[Array, " 1"] | None
    by_sequence: Float[Array, "S E+1"] | None


def route(
    logits: Float[Array, "T E"],
    config: RouterConfig,
    top_k: int,
    bias: Float[Array, " E"] | None = None,
    *,
    experts: Integer[Array, "T K"] | None = None,
    mask: Bool[Array, " T"] | None = None,
    sequences: Integer[Array, " T"] | None = None,
    num_sequences: int = 0,
    axes: Axes = Axes(),
    engine: Engine = "auto",
    kernels: str = "auto",
) -> Routing:
    """Returns the top_k experts of each token, their weights, and the balance losses over the whole mesh.

    Args:
      logits: [T, E], floating point, T over (dp, fsdp, ep, cp). They are cast to float32.
      config: see `RouterConfig`. Where `config.logits_bias` is set, the caller has added that bias to the logits.
      top_k: K, the experts per token.
      bias: [E], added to the scores for selection alone, without a gradient. It is given exactly where `config.bias`
        is set.
      experts: [T, K], integers in [0, E]: experts to take in place of the best ones; E stands for no expert. Their
        weights are those of the scores. A token with a negative id takes its best experts.
      mask: [T] bool, False for padding. Padding has the experts E and the weights 0, and enters no loss and no count.
      sequences: [T], integers in [0, num_sequences): the sequence of each token, for `config.sequence_aux_loss`. Inside
        a `shard_map` they count the sequences of one shard, each of which lies over the axes of cp.
      num_sequences: the number of sequences, over the whole mesh.
      axes, engine, kernels: see `moax.Options`.

    Returns:
      Routing: experts [T, K] i32 and weights [T, K] f32, sharded like the logits; losses and counts are replicated.

    Raises:
      ValueError: a shape does not fit, `bias` and `config.bias` disagree, K or the groups do not fit E, sequences are
        missing, or the mesh does not divide T.
      Unsupported: the engine or the kernels that were chosen by name cannot run.

    Group-limited routing and the selection bias are those of DeepSeek-V3, and so is the loss of a sequence. The aux
    loss is that of Switch Transformer: a balanced router pays the coefficient. The z-loss is that of ST-MoE.
    """
    check_float("logits", logits, "[T, E]")
    check_kind("config", config, RouterConfig)
    if logits.ndim != 2:
        raise ValueError(f"logits has shape {logits.shape}; it must be [T, E]")
    config.check_experts(logits.shape[1], top_k)
    _check_bias(bias, config, logits.shape[1:])
    choice = _check_choice(experts, mask, sequences, num_sequences, config, (logits.shape[0], top_k))
    view = find_mesh_view(axes, engine, logits)
    if logits.shape[0] == 0:
        return _route_nothing(logits, top_k)
    static = RouteSpec(config, top_k, num_sequences, view.roles, select_kernels(kernels))
    bias = None if bias is None else lax.stop_gradient(bias).astype(jnp.float32)
    operands = _forward.lay_operands(view, static, logits.astype(jnp.float32), bias, choice)
    chosen, weights, sums, counts = _route(view, static, *operands)
    shards = view.roles.size(view.roles.tokens) if view.manual else 1
    return Routing(chosen, weights, *_find_losses(view, static, sums, counts, logits.shape[0] * shards))


def _check_bias(bias, config: RouterConfig, shape) -> None:
    """Raises ValueError where `bias` and `config.bias` disagree, or the bias has another shape than [E]."""
    if (bias is not None) != config.bias:
        raise ValueError(f"bias is {'given' if bias is not None else 'None'}, but RouterConfig.bias={config.bias}")
    if bias is not None:
        check_float("bias", bias, "[E]")
        if bias.shape != shape:
            raise ValueError(f"bias has shape {bias.shape}; it must be [E]={shape}")


def _check_choice(experts, mask, sequences, num_sequences: int, config: RouterConfig, shape) -> Choice:
    """Returns the Choice of these arguments. Raises ValueError where one has another kind or shape than it must."""
    if experts is not None:
        check_int("experts", experts, "[T, K]")
        if experts.shape != shape:
            raise ValueError(f"experts has shape {experts.shape}; it must be [T, K]={shape}")
        experts = experts.astype(jnp.int32)
    if mask is not None:
        check_mask("mask", mask, shape[:1])
    if not config.sequence_aux_loss:
        return Choice(experts, mask)
    if sequences is None:
        raise ValueError(
            f"sequences is None; it must be given, with num_sequences, for sequence_aux_loss={config.sequence_aux_loss}"
        )
    check_int("sequences", sequences, "[T]")
    check_count("num_sequences", num_sequences)
    if sequences.shape != shape[:1]:
        raise ValueError(f"sequences has shape {sequences.shape}; it must be [T]={shape[:1]}")
    return Choice(experts, mask, sequences.astype(jnp.int32))


def _find_losses(view: MeshView, static: RouteSpec, sums: Sums, counts: Counts, total: int):
    """Returns the aux loss, the z loss, and the assignments to each expert, of `total` tokens less those masked."""
    config, over = static.config, view.roles.tokens
    tokens, real = view.psum(counts.tokens, over), total
    if counts.real is not None:
        real = jnp.maximum(view.psum(counts.real, over)[0], 1).astype(jnp.float32)
    factor = tokens.shape[0] / static.top_k
    aux = z = jnp.zeros((), jnp.float32)
    if sums.share is not None:
        shares = view.psum(sums.share, over)
        aux = config.aux_loss * jnp.sum(shares * tokens.astype(jnp.float32)) * (factor / real**2)
    if sums.by_sequence is not None and counts.by_sequence is not None:
        along = view.roles.sequence  # a shard has some tokens of each of its sequences
        whole, counted = view.psum(sums.by_sequence, along), view.psum(counts.by_sequence, along)
        counted = lax.stop_gradient(counted)  # JAX cannot batch the derivative of a maximum on Explicit axes
        sizes, across = counted[:, -1], tuple(name for name in over if name not in along)
        by_sequence = jnp.sum(whole * counted[:, :-1], axis=1)
        total_loss = view.psum(jnp.sum(by_sequence * (factor / jnp.maximum(sizes, 1.0) ** 2)), across)
        present = view.psum(jnp.sum((sizes > 0).astype(jnp.float32)), across)
        aux = aux + config.sequence_aux_loss * total_loss / jnp.maximum(present, 1.0)
    if sums.z is not None:
        z = config.z_loss * view.psum(sums.z, over)[0] / real
    return aux, z, tokens


def _route_nothing(logits, top_k: int) -> Routing:
    """Returns the Routing of no tokens: logits [0, E]. Its losses and counts are 0."""
    weights, zero = logits[:, :top_k].astype(jnp.float32), jnp.zeros((), jnp.float32)
    return Routing(weights.astype(jnp.int32), weights, zero, zero, jnp.zeros(logits.shape[1], jnp.int32))


def _route_forward(view: MeshView, static: RouteSpec, logits, bias, choice: Choice):
    """Runs the forward of the `custom_vjp` and returns the results, and the residuals."""
    results = _forward(view, static, logits, bias, choice)
    return results, (logits, bias, choice, *results[:2])


def _route_backward(view: MeshView, static: RouteSpec, saved, cotangents):
    """Runs the backward of the `custom_vjp` and returns the gradient of the logits."""
    logits, bias, choice, experts, weights = saved
    _, d_weights, d_sums, _ = cotangents
    choice = choice._replace(experts=None)
    (d_logits,) = _backward(view, static, logits, experts, choice, weights, d_weights, d_sums)
    return d_logits, None if bias is None else jnp.zeros_like(bias), None


_route = differentiable(_route_forward, _route_backward)


def select_experts(
    logits: Float[Array, "T E"], bias: Float[Array, " E"] | None, config: RouterConfig, top_k: int, kernels: str
) -> tuple[Int[Array, "T K"], Float[Array, "T K"] | None]:
    """Returns the K experts [T, K] i32 of each token, by its logits [T, E]; the best expert is first.

    It also returns the logits of these experts [T, K], or None where it chose them by other scores. `kernels` is the
    name of the implementation.
    """
    # Scores grow with logits, so logits choose the same experts, also where scores underflow to 0.
    of_logits = config.order == "topk_then_score" or (bias is None and config.num_groups == 1)
    scores = logits if of_logits else score(logits, config)
    scores = scores if bias is None else scores + bias[None]
    if config.num_groups > 1:
        grouped = scores.reshape(scores.shape[0], config.num_groups, -1)
        best = lax.top_k(grouped, min(_best_of_group(config, top_k), grouped.shape[-1]))[0].sum(-1)
        groups = lax.top_k(best, config.top_groups)[1]
        eligible = (groups[:, :, None] == jnp.arange(config.num_groups, dtype=groups.dtype)[None, None]).any(1)
        scores = jnp.where(eligible[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
    values, experts = implementation(kernels).top_k(scores, top_k)
    return experts, values if scores is logits else None


def _best_of_group(config, top_k):
    """Returns how many of the best scores of a group make the score of the group."""
    return {"max": 1, "top2": 2, "sum_topk": top_k // config.top_groups}[config.group_score]


def _sum(logits, choice: Choice, static: RouteSpec) -> Sums:
    """Returns the Sums of one device."""
    config, mask = static.config, choice.mask
    total = z = by_sequence = None
    if config.aux_loss or config.sequence_aux_loss:
        shares = share(logits, config)
        shares = shares if mask is None else jnp.where(mask[:, None], shares, 0.0)
        total = shares.sum(0) if config.aux_loss else None
        if choice.sequences is not None:
            by_sequence = _sum_by_sequence(shares, choice.sequences, static.num_sequences)
    if config.z_loss:
        z = jax.nn.logsumexp(logits, axis=-1) ** 2
        z = (z if mask is None else jnp.where(mask, z, 0.0)).sum()[None]
    return Sums(total, z, by_sequence)


def _sum_by_sequence(values: Float[Array, "T C"], sequences: Int[Array, " T"], count: int) -> Float[Array, "S C"]:
    """Returns the sum of the rows of each sequence. A product adds them in one order, and a scatter may not."""
    rows = sequences[:, None] == jnp.arange(count, dtype=jnp.int32)[None]
    return lax.dot_general(rows.astype(jnp.float32), values, (((0,), (0,)), ((), ())), precision=HIGHEST)


def _count(experts, choice: Choice, static: RouteSpec, num_experts: int) -> Counts:
    """Returns the Counts of one device."""
    # Comparisons are one kernel of a GPU; a scatter waits where tokens agree on an expert.
    chose = experts[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, None]
    tokens = chose.sum((0, 1), dtype=jnp.int32)
    real = None if choice.mask is None else choice.mask.sum(dtype=jnp.int32)[None]
    by_sequence = None
    if choice.sequences is not None:
        one = jnp.ones(experts.shape[:1], bool) if choice.mask is None else choice.mask
        columns = jnp.concatenate([chose.sum(1, dtype=jnp.int32), one[:, None].astype(jnp.int32)], axis=1)
        by_sequence = _sum_by_sequence(columns.astype(jnp.float32), choice.sequences, static.num_sequences)
    return Counts(tokens, real, by_sequence)


def route_forward(static: RouteSpec, layout, logits, bias, choice: Choice):
    """Returns experts, weights, Sums and Counts of one device; sums and counts are partial over the axes of tokens."""
    num_experts = logits.shape[1]
    found = select_experts(logits, bias, static.config, static.top_k, static.kernels)
    experts, chosen = lax.optimization_barrier(found)  # XLA would run a kernel twice whose result a scan stores
    if choice.experts is not None:
        chosen = None
        own = (choice.experts < 0).any(-1, keepdims=True)
        experts = jnp.where(own, experts, jnp.minimum(choice.experts, num_experts))
    if choice.mask is not None:
        experts = jnp.where(choice.mask[:, None], experts, num_experts)
    logits = _without_padding(logits, choice)
    weights = weigh(logits, experts, static.config, chosen)
    return experts, weights, _sum(logits, choice, static), _count(experts, choice, static, num_experts)


def route_backward(static: RouteSpec, layout, logits, experts, choice: Choice, weights, d_weights, d_sums: Sums):
    """Returns d_logits [T, E] of one device. `experts` and `weights` are those that forward returned."""
    logits = _without_padding(logits, choice)
    d_logits = weigh_backward(logits, experts, static.config, weights, d_weights)
    if jax.tree.leaves(d_sums):
        d_logits = d_logits + jax.vjp(lambda x: _sum(x, choice, static), logits)[1](d_sums)[0]
    return (d_logits if choice.mask is None else jnp.where(choice.mask[:, None], d_logits, 0.0),)


def _without_padding(logits, choice: Choice):
    """Returns the logits [T, E] with 0 in the rows of padding, which may hold NaN."""
    return logits if choice.mask is None else jnp.where(choice.mask[:, None], logits, 0.0)


def _choice_specs(static: RouteSpec, choice: Choice) -> Choice:
    """Returns the spec of each field of a Choice: tokens are split."""
    rows = spec(static.roles.tokens)
    return jax.tree.map(lambda _: rows, choice)


def _forward_contract(static: RouteSpec, operands, found_specs):
    """Returns the contract of forward: tokens are split, and sums over tokens are reduced over their axes."""
    rows, one, over = spec(static.roles.tokens, None), spec(None), static.roles.tokens
    bias = None if operands[1] is None else one
    return Contract((rows, bias, _choice_specs(static, operands[2])), (rows, rows, one, one), ((), (), over, over))


def _backward_contract(static: RouteSpec, operands, found_specs):
    """Returns the contract of backward: the gradient of the logits has their layout."""
    rows, one = spec(static.roles.tokens, None), spec(None)
    sums = jax.tree.map(lambda _: one, operands[5])
    return Contract((rows, rows, _choice_specs(static, operands[2]), rows, rows, sums), (rows,), ((),))


def _choice_factors(choice: Choice) -> tuple[str, ...]:
    """Returns the dims of the fields of a Choice in a Shardy rule."""
    return tuple(dims for dims, value in zip(("t k", "t", "t"), choice, strict=True) if value is not None)


def _forward_factors(static: RouteSpec, operands):
    """Returns the Shardy rule of forward."""
    bias = () if operands[1] is None else ("e",)
    return ("t e", *bias, *_choice_factors(operands[2])), ("t k", "t k")


def _backward_factors(static: RouteSpec, operands):
    """Returns the Shardy rule of backward. Sums are replicated, and share no dim with the logits."""
    own = [""] * len(jax.tree.leaves(operands[5]))
    return ("t e", "t k", *_choice_factors(operands[2]), "t k", "t k", *own), ("t e",)


_forward = Partitioned(route_forward, _forward_contract, _forward_factors, name="route")
_backward = Partitioned(route_backward, _backward_contract, _backward_factors, name="route_grad")
