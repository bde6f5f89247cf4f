"""The whole block in plain float32 jnp, with one function for each op. The tests compare every other file with it.

A reader of moax starts here: this is the block without meshes, buffers, formats or speed. Every expert runs on every
token, and the weight of an expert that a token did not choose is 0. Its values are right by definition, so it stays
simple.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moax.config import MoEConfig, RouterConfig
from moax.params import MoEParams
from moax.types import MoEStats, Routing

HIGHEST = jax.lax.Precision.HIGHEST


def score(logits: Float[Array, "... E"], config: RouterConfig) -> Float[Array, "... E"]:
    """Returns softmax(logits) or sigmoid(logits)."""
    if config.score == "softmax":
        e = jnp.exp(logits - logits.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
    return 1.0 / (1.0 + jnp.exp(-logits))


def eligible_experts(scores: Float[Array, "T E"], config: RouterConfig, top_k: int) -> Bool[Array, "T E"]:
    """Returns whether group-limited routing may choose each expert, [T, E] bool.

    It may choose the experts of the groups with the best group score.
    """
    tokens, experts = scores.shape
    by_group = jnp.sort(scores.reshape(tokens, config.num_groups, -1), axis=-1)[..., ::-1]
    best = {"max": 1, "top2": 2, "sum_topk": top_k // config.top_groups}[config.group_score]
    group_score = by_group[..., :best].sum(-1)
    order = jnp.argsort(-group_score, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    return jnp.repeat(rank < config.top_groups, experts // config.num_groups, axis=-1)


def route(
    logits: Float[Array, "T E"], config: RouterConfig, top_k: int, bias: Float[Array, " E"] | None = None
) -> Routing:
    """Returns the experts and weights of each token, and the balance losses; see `moax.route` for the arguments."""
    tokens, experts = logits.shape
    logits = logits.astype(jnp.float32)
    selection = score(logits, config) if config.order == "score_then_topk" else logits
    if bias is not None:
        selection = selection + bias[None, :]
    if config.num_groups > 1:
        selection = jnp.where(eligible_experts(selection, config, top_k), selection, -jnp.inf)
    chosen = jnp.argsort(-jax.lax.stop_gradient(selection), axis=-1, stable=True)[:, :top_k]

    if config.order == "score_then_topk":
        weights = jnp.take_along_axis(score(logits, config), chosen, axis=-1)
    else:
        weights = score(jnp.take_along_axis(logits, chosen, axis=-1), config)
    if config.normalize and top_k > 1:
        weights = weights / weights.sum(-1, keepdims=True)
    weights = config.scale * weights

    probabilities = score(logits, config)
    probabilities = probabilities / probabilities.sum(-1, keepdims=True)
    counts = (chosen[:, :, None] == jnp.arange(experts)[None, None, :]).sum((0, 1))
    aux = experts / (top_k * tokens**2) * jnp.sum(probabilities.sum(0) * counts.astype(jnp.float32))
    z = jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
    return Routing(chosen, weights, config.aux_loss * aux, config.z_loss * z, counts)


def activate(h: Float[Array, "... G F"], activation: str) -> Float[Array, "... F"]:
    """Returns act(gate) * up, or act(up); see `moax.ops.activation`."""
    gate, up = h[..., 0, :], h[..., -1, :]
    if activation == "swiglu":
        return gate / (1.0 + jnp.exp(-gate)) * up
    if activation == "geglu":
        return jax.nn.gelu(gate, approximate=True) * up
    if activation == "swiglu_oai":
        gate, up = jnp.minimum(gate, 7.0), jnp.clip(up, -7.0, 7.0)
        return gate / (1.0 + jnp.exp(-1.702 * gate)) * (up + 1.0)
    if activation == "silu":
        return up / (1.0 + jnp.exp(-up))
    if activation == "gelu":
        return jax.nn.gelu(up, approximate=True)
    return jnp.maximum(up, 0.0) ** 2


def expert(
    x: Float[Array, "T H"],
    wi: Float[Array, "H G F"],
    wo: Float[Array, "F H"],
    bi: Float[Array, "G F"] | None,
    bo: Float[Array, " H"] | None,
    activation: str,
) -> Float[Array, "T H"]:
    """Runs one expert on every token: act(x wi + bi) wo + bo, with wi [H, G, F] and wo [F, H]."""
    h = jnp.einsum("th,hgf->tgf", x, wi, precision=HIGHEST)
    h = h if bi is None else h + bi[None]
    y = jnp.einsum("tf,fh->th", activate(h, activation), wo, precision=HIGHEST)
    return y if bo is None else y + bo[None]


def moe(
    x: Float[Array, "*batch H"], params: MoEParams[Array], config: MoEConfig, kept: Bool[Array, "T K"] | None = None
) -> tuple[Float[Array, "*batch H"], MoEStats]:
    """y[t] = sum_k weights[t, k] expert[experts[t, k]](x[t]) + shared(x[t]).

    Args:
      x: [..., H], floating point.
      params: see `MoEParams`.
      config: see `MoEConfig`. `weights_at` makes no difference here, because nothing is rounded.
      kept: [T, K], whether each assignment found room; the others add nothing to y. None keeps all.

    Returns:
      (y [..., H] in float32, stats).
    """
    f32 = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    tokens = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    logits = jnp.einsum("th,he->te", tokens, f32.router, precision=HIGHEST)
    if f32.logits_bias is not None:
        logits = logits + f32.logits_bias[None, :]
    routing = route(logits, config.router, config.top_k, f32.router_bias)
    weights = routing.weights if kept is None else jnp.where(kept, routing.weights, 0.0)

    run_experts = jax.vmap(lambda wi, wo, bi, bo: expert(tokens, wi, wo, bi, bo, config.activation))
    out = run_experts(f32.wi, f32.wo, f32.bi, f32.bo)  # [E, T, H]: every expert on every token
    chose = routing.experts[None] == jnp.arange(config.num_experts)[:, None, None]  # [E, T, K]
    weight = jnp.where(chose, weights[None], 0.0).sum(-1)
    y = jnp.where(chose.any(-1)[..., None], weight[..., None] * out, 0.0).sum(0)
    if f32.shared_wi is not None:
        y = y + expert(tokens, f32.shared_wi, f32.shared_wo, None, None, config.activation)
    dropped = jnp.int32(0) if kept is None else jnp.sum(~kept)
    stats = MoEStats(routing.aux_loss, routing.z_loss, routing.tokens_per_expert, dropped)
    return y.reshape(x.shape), stats
