"""Route: logits [T, E] become K experts and K weights for each token, and the balance losses.

    score_then_topk:  s = score(logits);  experts = top_k(s + bias);  weights = s[experts]
    topk_then_score:  experts = top_k(logits + bias);                 weights = score(logits[experts])
    weights = scale * weights / sum_k weights                         (divided where normalize is set and K > 1)

    aux_loss = c E / (K T^2) sum_e (sum_t p[t, e]) tokens[e]          p: scores of all experts, summing to 1 a token
    z_loss   = c / T sum_t logsumexp(logits[t])^2                     T: tokens of the whole mesh

With K = 2, score_then_topk and the scores (0.1, 0.4, 0.3, 0.2) of a token, experts = (1, 2) and weights = (4/7, 3/7).
Selection has no gradient, and the argument `bias` changes selection alone. The sums over tokens are psums of [E]
vectors, so logits never leave their shard. Everything is float32.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moax.config import RouterConfig
from moax.mesh.axes import Axes, Roles
from moax.mesh.partition import Contract, Engine, MeshView, Partitioned, differentiable, find_mesh_view
from moax.mesh.specs import spec
from moax.types import Routing

# A sum of scores may underflow to 0, so this is added before a division. Gradients divide by its square, 1e-36, which
# is still a normal float32.
TINY = 1e-18


@dataclasses.dataclass(frozen=True)
class RouteSpec:
    """The static arguments of `route`: the router, K, and the mesh axes by role."""

    config: RouterConfig
    top_k: int
    roles: Roles


def route(
    logits: Float[Array, "T E"],
    config: RouterConfig,
    top_k: int,
    bias: Float[Array, " E"] | None = None,
    *,
    axes: Axes = Axes(),
    engine: Engine = "auto",
) -> Routing:
    """Returns the top_k experts of each token, their weights, and the balance losses over the whole mesh.

    Args:
      logits: [T, E], floating point, T over (dp, fsdp, ep). They are cast to float32.
      config: see `RouterConfig`. Where `config.logits_bias` is set, the caller has added that bias to the logits.
      top_k: K, the experts per token.
      bias: [E], added to the scores for selection alone, without a gradient. It is given exactly where `config.bias`
        is set.
      axes, engine: see `moax.Options`.

    Returns:
      Routing: experts [T, K] i32 and weights [T, K] f32, sharded like the logits; losses and counts are replicated.

    Raises:
      ValueError: a shape does not fit, `bias` and `config.bias` disagree, K or the groups do not fit E, or the mesh
        does not divide T.

    Group-limited routing and the selection bias are those of DeepSeek-V3. The aux loss is that of Switch Transformer: a
    balanced router pays the coefficient. The z-loss is that of ST-MoE.
    """
    if logits.ndim != 2:
        raise ValueError(f"logits has shape {logits.shape}; it must be [T, E]")
    config.check_experts(logits.shape[1], top_k)
    if (bias is not None) != config.bias:
        raise ValueError(f"bias is {'given' if bias is not None else 'None'}, but RouterConfig.bias={config.bias}")
    if bias is not None and bias.shape != logits.shape[1:]:
        raise ValueError(f"bias has shape {bias.shape}; it must be [E]={logits.shape[1:]}")
    view = find_mesh_view(axes, engine, logits)
    static = RouteSpec(config, top_k, view.roles)
    bias = None if bias is None else lax.stop_gradient(bias).astype(jnp.float32)
    logits, bias = _forward.lay_operands(view, static, logits.astype(jnp.float32), bias)
    experts, weights, score_sum, z_sum, tokens = _route(view, static, logits, bias)
    score_sum, z_sum, tokens = (view.psum(v, view.roles.tokens) for v in (score_sum, z_sum, tokens))
    total = logits.shape[0] * (view.roles.size(view.roles.tokens) if view.manual else 1)
    balance = jnp.sum(score_sum * tokens.astype(jnp.float32)) * (logits.shape[1] / (top_k * total**2))
    return Routing(experts, weights, config.aux_loss * balance, config.z_loss * z_sum[0] / total, tokens)


def _route_forward(view: MeshView, static: RouteSpec, logits, bias):
    """Runs the forward of the `custom_vjp` and returns the results, and the residuals."""
    results = _forward(view, static, logits, bias)
    return results, (logits, bias, results[0])


def _route_backward(view: MeshView, static: RouteSpec, saved, cotangents):
    """Runs the backward of the `custom_vjp` and returns the gradient of the logits."""
    logits, bias, experts = saved
    _, d_weights, d_score_sum, d_z_sum, _ = cotangents
    (d_logits,) = _backward(view, static, logits, experts, d_weights, d_score_sum, d_z_sum)
    return d_logits, None if bias is None else jnp.zeros_like(bias)


_route = differentiable(_route_forward, _route_backward)


def select_experts(
    logits: Float[Array, "T E"], bias: Float[Array, " E"] | None, config: RouterConfig, top_k: int
) -> Int[Array, "T K"]:
    """Returns the K experts [T, K] i32 of each token, by its logits [T, E]; the best expert is first."""
    scores = _score(logits, config) if config.order == "score_then_topk" else logits
    scores = scores if bias is None else scores + bias[None]
    if config.num_groups > 1:
        grouped = scores.reshape(scores.shape[0], config.num_groups, -1)
        best = lax.top_k(grouped, min(_best_of_group(config, top_k), grouped.shape[-1]))[0].sum(-1)
        groups = lax.top_k(best, config.top_groups)[1]
        eligible = (groups[:, :, None] == jnp.arange(config.num_groups, dtype=groups.dtype)[None, None]).any(1)
        scores = jnp.where(eligible[:, :, None], grouped, -jnp.inf).reshape(scores.shape)
    return lax.top_k(scores, top_k)[1].astype(jnp.int32)


def _best_of_group(config, top_k):
    """Returns how many of the best scores of a group make the score of the group."""
    return {"max": 1, "top2": 2, "sum_topk": top_k // config.top_groups}[config.group_score]


def _score(logits, config):
    """Returns softmax(logits) or sigmoid(logits)."""
    return jax.nn.softmax(logits, axis=-1) if config.score == "softmax" else jax.nn.sigmoid(logits)


def _weigh(logits, experts, config: RouterConfig):
    """Computes the differentiable half of the router.

    Returns weights [T, K], the sums of the scores over tokens [E], and the sum of squared logsumexp [1].
    """
    probabilities = _score(logits, config)
    if config.order == "score_then_topk":
        weights = jnp.take_along_axis(probabilities, experts, axis=-1)
    else:
        weights = _score(jnp.take_along_axis(logits, experts, axis=-1), config)
    if config.normalize and experts.shape[-1] > 1:
        weights = weights / (weights.sum(-1, keepdims=True) + TINY)
    if config.score == "sigmoid":
        probabilities = probabilities / (probabilities.sum(-1, keepdims=True) + TINY)
    z_sum = jnp.sum(jax.nn.logsumexp(logits, axis=-1) ** 2)[None]
    return weights * config.scale, probabilities.sum(0), z_sum


def route_forward(static: RouteSpec, layout, logits, bias):
    """Returns experts, weights, score sums, the z sum and counts of one device.

    The last three are partial sums over the axes of tokens.
    """
    experts = select_experts(logits, bias, static.config, static.top_k)
    weights, score_sum, z_sum = _weigh(logits, experts, static.config)
    tokens = jnp.zeros(logits.shape[1], jnp.int32).at[experts.reshape(-1)].add(1)
    return experts, weights, score_sum, z_sum, tokens


def route_backward(static: RouteSpec, layout, logits, experts, d_weights, d_score_sum, d_z_sum):
    """Returns d_logits [T, E] of one device."""
    _, pull = jax.vjp(lambda x: _weigh(x, experts, static.config), logits)
    return pull((d_weights, d_score_sum, d_z_sum))


def _forward_contract(static: RouteSpec, operands, found_specs):
    """Returns the contract of forward: tokens are split, and sums over tokens are reduced over their axes."""
    rows, one, over = spec(static.roles.tokens, None), spec(None), static.roles.tokens
    bias = None if operands[1] is None else one
    return Contract((rows, bias), (rows, rows, one, one, one), ((), (), over, over, over))


def _backward_contract(static: RouteSpec, operands, found_specs):
    """Returns the contract of backward: the gradient of the logits has their layout."""
    rows, one = spec(static.roles.tokens, None), spec(None)
    return Contract((rows, rows, rows, one, one), (rows,), ((),))


_forward = Partitioned(
    route_forward,
    _forward_contract,
    lambda static, operands: (("t e", "e")[: 1 + (operands[1] is not None)], ("t k", "t k", "e", "o", "e")),
    name="route",
)
_backward = Partitioned(
    route_backward,
    _backward_contract,
    lambda static, operands: (("t e", "t k", "t k", "e", "o"), ("t e",)),
    name="route_grad",
)
