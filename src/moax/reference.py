"""The whole block in plain float32 jnp, with one function for each op. The tests compare every other file with it.

A reader of moax starts here: this is the block without meshes, buffers, formats or speed. Every expert runs on every
token, and the weight of an expert that a token did not choose is 0. Its values are right by definition, so it stays
simple.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moax.activations import Activation
from moax.config import MoEConfig, MoEStats, RouterConfig
from moax.params import MoEParams
from moax.types import Routing

HIGHEST = jax.lax.Precision.HIGHEST


def score(logits: Float[Array, "... E"], config: RouterConfig) -> Float[Array, "... E"]:
    """Returns softmax(logits), sigmoid(logits) or sqrt(softplus(logits))."""
    if config.score == "softmax":
        e = jnp.exp(logits - logits.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)
    if config.score == "sqrt_softplus":
        return jnp.sqrt(jnp.log1p(jnp.exp(logits)))
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
    logits: Float[Array, "T E"],
    config: RouterConfig,
    top_k: int,
    bias: Float[Array, " E"] | None = None,
    *,
    experts: Int[Array, "T K"] | None = None,
    sequences: Int[Array, " T"] | None = None,
) -> Routing:
    """Returns the experts and weights of each token, and the balance losses; see `moax.route` for the arguments."""
    replayed = experts
    tokens, num_experts = logits.shape
    logits = logits.astype(jnp.float32)
    selection = score(logits, config) if config.order == "score_then_topk" else logits
    if bias is not None:
        selection = selection + bias[None, :]
    if config.num_groups > 1:
        selection = jnp.where(eligible_experts(selection, config, top_k), selection, -jnp.inf)
    chosen = jnp.argsort(-jax.lax.stop_gradient(selection), axis=-1, stable=True)[:, :top_k]
    chosen = chosen if replayed is None else replayed

    if config.order == "score_then_topk":
        weights = jnp.take_along_axis(score(logits, config), chosen, axis=-1)
    else:
        weights = score(jnp.take_along_axis(logits, chosen, axis=-1), config)
    if config.normalize and top_k > 1:
        weights = weights / weights.sum(-1, keepdims=True)
    weights = config.scale * weights

    probabilities = score(logits, config)
    probabilities = probabilities / probabilities.sum(-1, keepdims=True)
    chose = (chosen[:, :, None] == jnp.arange(num_experts)[None, None, :]).sum(1)
    counts = chose.sum(0)
    aux = config.aux_loss * balance(probabilities, chose, jnp.ones(tokens, bool), top_k)
    if sequences is not None:  # every token compares its own sequence with all tokens
        same = sequences[:, None] == sequences[None, :]
        sizes = same.sum(1, dtype=jnp.float32)
        each = jax.vmap(lambda real: balance(probabilities, chose, real, top_k))(same) / sizes
        aux = aux + config.sequence_aux_loss * each.sum() / (1.0 / sizes).sum()
    z = jnp.mean(jax.nn.logsumexp(logits, axis=-1) ** 2)
    return Routing(chosen, weights, aux, config.z_loss * z, counts)


def balance(
    probabilities: Float[Array, "T E"],
    chose: Int[Array, "T E"],
    real: Bool[Array, " T"],
    top_k: int,
) -> Float[Array, ""]:
    """Returns E / (K T^2) sum_e (sum_t p[t, e]) tokens[e] over the T tokens that are real."""
    share = jnp.where(real[:, None], probabilities, 0.0).sum(0)
    tokens = jnp.where(real[:, None], chose, 0).sum(0).astype(jnp.float32)
    return chose.shape[1] / (top_k * real.sum(dtype=jnp.float32) ** 2) * jnp.sum(share * tokens)


def activate(
    h: Float[Array, "... G F"],
    activation: Activation,
    limit: float | None = None,
) -> Float[Array, "... F"]:
    """Returns act(gate, up), or act(up); see `moax.ops.activation`."""
    gate, up = h[..., 0, :], h[..., -1, :]
    limit = 7.0 if limit is None and activation == "swiglu_oai" else limit
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    if callable(activation):
        return activation(gate, up) if h.shape[-2] == 2 else activation(up)
    if isinstance(activation, tuple):
        return activate(gate[..., None, :], activation[0]) * activate(up[..., None, :], activation[1])
    if activation == "swiglu":
        return gate / (1.0 + jnp.exp(-gate)) * up
    if activation == "geglu":
        return jax.nn.gelu(gate, approximate=True) * up
    if activation == "swiglu_oai":
        return gate / (1.0 + jnp.exp(-1.702 * gate)) * (up + 1.0)
    if activation == "silu":
        return up / (1.0 + jnp.exp(-up))
    if activation == "gelu":
        return jax.nn.gelu(up, approximate=True)
    if activation in ("relu2", "squared_relu"):
        return jnp.maximum(up, 0.0) ** 2
    if activation == "reglu":
        return up * jnp.maximum(gate, 0.0)
    if activation == "glu":
        return up * (1.0 / (1.0 + jnp.exp(-gate)))
    if activation == "quick_gelu":
        return up / (1.0 + jnp.exp(-1.702 * up))
    return up if activation == "linear" else getattr(jax.nn, activation)(up)


def expert(
    x: Float[Array, "T H"],
    wi: Float[Array, "H G F"],
    wo: Float[Array, "F H"],
    bi: Float[Array, "G F"] | None,
    bo: Float[Array, " H"] | None,
    activation: Activation,
    limit: float | None = None,
) -> Float[Array, "T H"]:
    """Runs one expert on every token: act(x wi + bi) wo + bo, with wi [H, G, F] and wo [F, H]."""
    h = jnp.einsum("th,hgf->tgf", x, wi, precision=HIGHEST)
    h = h if bi is None else h + bi[None]
    y = jnp.einsum("tf,fh->th", activate(h, activation, limit), wo, precision=HIGHEST)
    return y if bo is None else y + bo[None]


def moe(
    x: Float[Array, "*batch H"],
    params: MoEParams[Array],
    config: MoEConfig,
    kept: Bool[Array, "T K"] | None = None,
    router_input: Float[Array, "*batch H"] | None = None,
    *,
    experts: Int[Array, "T K"] | None = None,
    weights: Float[Array, "T K"] | None = None,
    sequences: Int[Array, " T"] | None = None,
) -> tuple[Float[Array, "*batch H"], MoEStats]:
    """y[t] = sum_k weights[t, k] expert[experts[t, k]](x[t]) + shared(x[t]).

    Latent experts are sum_k weights[t, k] expert[experts[t, k]](x[t] latent_down) latent_up.

    Args:
      x: [..., H], floating point.
      params: see `MoEParams`.
      config: see `MoEConfig`.
      experts: [T, K], experts in place of the router's choice, and weights [T, K] in place of its weights.
      sequences: [T], the sequence of each token, for `config.router.sequence_aux_loss`.
      kept: [T, K], whether each assignment found room; the others add nothing to y. None keeps all.
      router_input: [..., H], what the router reads in place of x; None means x.

    Returns:
      (y [..., H] in float32, stats).
    """
    f32 = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    tokens = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    read = tokens
    if router_input is not None:
        read = router_input.reshape(tokens.shape).astype(jnp.float32)
    logits = jnp.einsum("th,he->te", read, f32.router, precision=HIGHEST)
    if f32.logits_bias is not None:
        logits = logits + f32.logits_bias[None, :]
    routing = route(
        logits,
        config.router,
        config.top_k,
        f32.router_bias,
        experts=experts,
        sequences=sequences,
    )
    if weights is None:
        weights = routing.weights
    if f32.expert_scale is not None:
        weights = weights * f32.expert_scale[routing.experts]
    if kept is not None:
        weights = jnp.where(kept, weights, 0.0)

    act = config.activation, config.activation_limit
    chose = routing.experts[None] == jnp.arange(config.num_experts)[:, None, None]  # [E, T, K]
    weight = jnp.where(chose, weights[None], 0.0).sum(-1)[..., None]
    before = jnp.ones_like(weight)
    after = weight
    if config.weights_at == "input":
        before = weight
        after = 1.0
    rows = tokens
    if f32.latent_down is not None:
        rows = jnp.einsum("th,hl->tl", tokens, f32.latent_down, precision=HIGHEST)
    run_experts = jax.vmap(lambda w, wi, wo, bi, bo: expert(w * rows, wi, wo, bi, bo, *act))
    # [E, T, H or L]: every expert on every token
    out = run_experts(before, f32.wi, f32.wo, f32.bi, f32.bo)
    y = jnp.where(chose.any(-1)[..., None], after * out, 0.0).sum(0)
    if f32.latent_up is not None:
        y = jnp.einsum("tl,lh->th", y, f32.latent_up, precision=HIGHEST)
    if f32.shared_wi is not None:
        shared = expert(tokens, f32.shared_wi, f32.shared_wo, None, None, *act)
        gate = 1.0 if f32.shared_gate is None else jax.nn.sigmoid(tokens @ f32.shared_gate)[:, None]
        y = y + gate * shared
    dropped = jnp.int32(0) if kept is None else jnp.sum(~kept)
    stats = MoEStats(routing.aux_loss, routing.z_loss, routing.tokens_per_expert, dropped, jnp.int32(1))
    return y.reshape(x.shape), stats
