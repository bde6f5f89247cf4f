"""The routing of a block: the router's own, the caller's, or the caller's experts with the router's weights.

    nothing is given                 `moax.route` gives experts and weights
    experts [..., K] are given       the router's scores give their weights: replay, or hash routing
    experts and weights are given    the router does not run: a router of the caller's own

With E = 4, K = 2 and the experts (2, 2) and weights (0.3, 0.7) of a token, the token goes to expert 2 once, with the
weight 1.0, and the second place is (4, 0.0): no expert.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from moax.checks import check_float, check_int
from moax.config import MoEConfig, Options
from moax.mesh.axes import ResolvedAxes
from moax.mesh.specs import MeshView, find_row_axes, flatten_tokens
from moax.ops.router import router_logits
from moax.ops.routing import route
from moax.params import MoEParams
from moax.types import Routing

Ids = Integer[Array, "*batch K"]
RoutingInput = Routing | tuple[Ids, Float[Array, "*batch K"]] | Ids


def check_routing(routing: RoutingInput | None, shape: tuple[int, ...]) -> Routing | Ids | None:
    """Returns `routing` in int32 and float32, a pair as a Routing; ValueError where an array is not of `shape`."""
    if routing is None:
        return None
    none: Any = None
    if isinstance(routing, tuple) and len(routing) == 2:
        routing = Routing(*routing, none, none, none)
    experts = routing.experts if isinstance(routing, Routing) else routing
    what = "routing: its experts" if isinstance(routing, Routing) else "routing"
    check_int(what, experts, f"{list(shape)}, or a pair of ids and weights, or a moax.Routing")
    if experts.shape != shape:
        raise ValueError(f"{what} has shape {experts.shape}; it must be {shape}")
    experts = experts.astype(jnp.int32)
    if not isinstance(routing, Routing):
        return experts
    weights = routing.weights
    check_float("routing: its weights", weights, str(list(shape)))
    if weights.shape != shape:
        raise ValueError(f"routing: its weights have shape {weights.shape}; it must be {shape}")
    return Routing(experts, weights.astype(jnp.float32), routing.aux_loss, routing.z_loss, none)


def find_routing(
    view: MeshView,
    x: Float[Array, "*batch H"],
    tokens: Float[Array, "T H"],
    params: MoEParams[Array],
    config: MoEConfig,
    options: Options,
    given: Routing | Ids | None,
    real: Bool[Array, "T 1"] | None,
    segments: Integer[Array, "*batch"] | None = None,
) -> tuple[Routing, Int[Array, "T K"], Float[Array, "T K"]]:
    """Returns the Routing of `tokens`, and the experts and weights of the block: each expert of a token once.

    `tokens` are x, or what the router reads in its place, flattened, with 0 in padding. Where `real` is None, all
    tokens are real.
    """
    resolved, router = view.axes, config.router
    if isinstance(given, Routing):
        experts, weights = (flatten_tokens(of, resolved) for of in (given.experts, given.weights))
        some = (experts >= 0) & (experts < config.num_experts)  # a negative id stands for no expert too
        some = some if real is None else some & real
        experts, weights = jnp.where(some, experts, config.num_experts), jnp.where(some, weights, 0.0)
        chose = experts[:, :, None] == jnp.arange(config.num_experts, dtype=jnp.int32)[None, None]
        counts = view.psum(chose.sum((0, 1), dtype=jnp.int32), resolved.tokens)
        aux, z = (jnp.zeros((), jnp.float32) if v is None else v for v in (given.aux_loss, given.z_loss))
        routing = Routing(experts, weights, aux, z, counts)
    else:
        how = dict(axes=options.axes, engine=options.engine)
        experts = None if given is None else flatten_tokens(given, resolved)
        logits = router_logits(tokens, params.router, **how)
        logits = logits if params.logits_bias is None else logits + params.logits_bias.astype(jnp.float32)[None]
        routing = route(
            logits, router, config.top_k, params.router_bias,
            experts=experts, mask=None if real is None else real[:, 0],
            sequences=_find_sequences(x, segments, resolved) if router.sequence_aux_loss else None,
            sequence_axes=find_row_axes(x, view), kernels=options.kernels, **how,
        )  # fmt: skip
    experts, weights = routing.experts, routing.weights
    if given is not None:
        experts, weights = _merge_duplicate_experts(routing, config)
    if params.expert_scale is not None:
        chosen = experts[:, :, None] == jnp.arange(config.num_experts, dtype=jnp.int32)[None, None]
        weights = weights * jnp.where(chosen, params.expert_scale.astype(jnp.float32)[None, None], 0.0).sum(-1)
    return routing, experts, weights


def _merge_duplicate_experts(routing: Routing, config: MoEConfig) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
    """Returns each expert of a token once, with the sum of its weights; a second appearance becomes E with weight 0."""
    experts, weights = routing.experts, routing.weights
    same = experts[:, :, None] == experts[:, None, :]
    place = jnp.arange(config.top_k, dtype=jnp.int32)
    later = (same & (place[None, :] < place[:, None])[None]).any(-1)
    total = jnp.where(same, weights[:, None, :], 0.0).sum(-1)
    return jnp.where(later, config.num_experts, experts), jnp.where(later, 0.0, total)


def _find_sequences(x: Float[Array, "*batch H"], segments, resolved: ResolvedAxes) -> Int[Array, " T"]:
    """Returns the sequence of each token of x: (0, 0, 0, 1, 1, 1) for x [2, 3, H] without segments."""
    if x.ndim < 3:
        raise ValueError(f"x has shape {x.shape}; it must be [..., S, H] for RouterConfig.sequence_aux_loss")
    rows = jnp.arange(math.prod(x.shape[:-2]), dtype=jnp.int32).reshape(*x.shape[:-2], 1)
    if segments is None:
        sequences = jnp.broadcast_to(rows, x.shape[:-1])
    else:  # a shard of S may have any id of its row
        most = x.shape[-2] * resolved.size(resolved.sequence) + 1
        sequences = jnp.where(segments < 0, -1, rows * most + jnp.minimum(segments, most - 1))
    return flatten_tokens(sequences[..., None], resolved)[:, 0]
