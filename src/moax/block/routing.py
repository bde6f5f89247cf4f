"""The experts and weights of each token of a block: the router's, or those that a caller gives.

    experts [..., K] are given       the router's scores give their weights: replay, or hash routing
    experts and weights are given    the router does not run: a router of the caller's own

With E = 4, K = 2 and the experts (2, 2) and weights (0.3, 0.7) of a token, the token goes to expert 2 once, with the
weight 1.0, and the second place is (4, 0.0): no expert.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from moax.config import MoEConfig, Options
from moax.mesh.specs import MeshView, flatten_tokens
from moax.ops.balance import split_ids
from moax.ops.router import route, router_logits
from moax.params import MoEParams
from moax.types import Routing

Ids = Integer[Array, "*batch K"]
RoutingInput = Routing | tuple[Ids, Float[Array, "*batch K"]] | Ids


class Tokens(NamedTuple):
    """The tokens of a block.

    Attributes:
      x: [..., H], as the caller gives them.
      rows: [T, H], flat; 0 for padding.
      router_rows: [T, H], the rows that the router reads; 0 for padding.
      real: [T, 1] bool, False for padding; None where no token is padding.
      segment_ids: [..., S], integers, or None.
    """

    x: Float[Array, "*batch H"]
    rows: Float[Array, "T H"]
    router_rows: Float[Array, "T H"]
    real: Bool[Array, "T 1"] | None
    segment_ids: Integer[Array, "*batch"] | None


class RoutingOverride(NamedTuple):
    """What a caller gives in place of the router's choice.

    Attributes:
      experts: [..., K], integers.
      weights: [..., K]; None takes them from the router's scores.
      aux_loss, z_loss: [] f32; None is 0. Without weights nothing reads them.
    """

    experts: Ids
    weights: Float[Array, "*batch K"] | None = None
    aux_loss: Float[Array, ""] | None = None
    z_loss: Float[Array, ""] | None = None


class BlockRouting(NamedTuple):
    """The routing of a block.

    Attributes:
      routing: the Routing of the tokens, as the router or the caller gives it.
      experts: [T, K], each expert of a token once; E is no expert.
      weights: [T, K], the weights of these experts, with the scale of each expert.
    """

    routing: Routing
    experts: Int[Array, "T K"]
    weights: Float[Array, "T K"]


def read_override(routing: Any) -> RoutingOverride | None:
    """Returns the argument `routing` of `moax.moe` in one form; its arrays are not checked yet."""
    if routing is None:
        return None
    if isinstance(routing, Routing):
        return RoutingOverride(routing.experts, routing.weights, routing.aux_loss, routing.z_loss)
    if isinstance(routing, tuple) and len(routing) == 2:
        return RoutingOverride(*routing)
    return RoutingOverride(routing)


def route_tokens(
    view: MeshView,
    tokens: Tokens,
    params: MoEParams[Array],
    config: MoEConfig,
    options: Options,
    override: RoutingOverride | None,
) -> BlockRouting:
    """Returns the routing of the tokens, from the router or from the override."""
    if override is not None and override.weights is not None:
        routing = _use_override(view, config, override, override.weights, tokens.real)
    else:
        routing = _run_router(view, tokens, params, config, options, override)
    experts = routing.experts
    weights = routing.weights
    if override is not None:
        experts, weights = merge_twins(experts, weights, config.num_experts)
    if params.expert_scale is not None:
        scale = params.expert_scale.astype(jnp.float32)[None, None]
        is_expert = experts[:, :, None] == _list_experts(config)
        weights = weights * jnp.where(is_expert, scale, 0.0).sum(-1)
    return BlockRouting(routing, experts, weights)


def _list_experts(config: MoEConfig) -> Int[Array, "1 1 E"]:
    """Returns the ids of all experts, to compare with experts [T, K, 1]."""
    return jnp.arange(config.num_experts, dtype=jnp.int32)[None, None]


def _use_override(
    view: MeshView,
    config: MoEConfig,
    override: RoutingOverride,
    weights: Float[Array, "*batch K"],
    real: Bool[Array, "T 1"] | None,
) -> Routing:
    """Returns the caller's own experts and weights, counted; an id outside of [0, E) and padding have no expert."""
    experts = flatten_tokens(override.experts, view, whole_rows=True)
    weights = flatten_tokens(weights.astype(jnp.float32), view, whole_rows=True)
    is_used = (experts >= 0) & (experts < config.num_experts)
    if real is not None:
        is_used = is_used & real
    experts = jnp.where(is_used, experts, config.num_experts)
    weights = jnp.where(is_used, weights, 0.0)
    counts = (experts[:, :, None] == _list_experts(config)).sum((0, 1), dtype=jnp.int32)
    counts = view.psum(counts, view.axes.tokens)
    zero = jnp.zeros((), jnp.float32)
    aux_loss = zero if override.aux_loss is None else override.aux_loss
    z_loss = zero if override.z_loss is None else override.z_loss
    return Routing(experts, weights, aux_loss, z_loss, counts)


def _run_router(
    view: MeshView,
    tokens: Tokens,
    params: MoEParams[Array],
    config: MoEConfig,
    options: Options,
    override: RoutingOverride | None,
) -> Routing:
    """Returns the router's experts and weights; with an override, the weights of the caller's experts."""
    experts = None
    if override is not None:
        experts = flatten_tokens(override.experts, view, whole_rows=True)
    logits = router_logits(tokens.router_rows, params.router, axes=options.axes, engine=options.engine)
    if params.logits_bias is not None:
        logits = logits + params.logits_bias.astype(jnp.float32)[None]
    sequences = None
    if config.router.sequence_aux_loss:
        sequences = find_sequences(tokens.x, tokens.segment_ids, view)
    return route(
        logits,
        config.router,
        config.top_k,
        params.router_bias,
        experts=experts,
        mask=None if tokens.real is None else tokens.real[:, 0],
        sequences=sequences,
        # The axes that may split a row [S, H] of x, once x is flattened.
        sequence_axes=view.axes.tokens if view.dims is None else view.axes.sequence,
        kernels=options.kernels,
        axes=options.axes,
        engine=options.engine,
    )


def merge_twins(
    experts: Int[Array, "T K"], weights: Float[Array, "T K"], num_experts: int
) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
    """Returns each expert of a token once: the first appearance has the sum of the weights, others become E and 0."""
    same = experts[:, :, None] == experts[:, None, :]
    place = jnp.arange(experts.shape[1], dtype=jnp.int32)
    is_later = (same & (place[None, :] < place[:, None])[None]).any(-1)
    total = jnp.where(same, weights[:, None, :], 0.0).sum(-1)
    return jnp.where(is_later, num_experts, experts), jnp.where(is_later, 0.0, total)


def find_sequences(
    x: Float[Array, "*batch H"], segment_ids: Integer[Array, "*batch"] | None, view: MeshView
) -> Int[Array, "T C"]:
    """Returns the row of each token of x, (0, 0, 0, 1, 1, 1) for x [2, 3, H], and the columns of its segment."""
    if x.ndim < 3:
        raise ValueError(f"x has shape {x.shape}; it must be [..., S, H] for RouterConfig.sequence_aux_loss")
    rows = jnp.arange(math.prod(x.shape[:-2]), dtype=jnp.int32).reshape(*x.shape[:-2], 1)
    if segment_ids is None:
        sequences = jnp.broadcast_to(rows, x.shape[:-1])[..., None]
    else:
        row_of_token = jnp.where(segment_ids < 0, -1, rows)[..., None]
        sequences = jnp.concatenate([row_of_token, split_ids(segment_ids[..., None])], axis=-1)
    return flatten_tokens(sequences, view)
