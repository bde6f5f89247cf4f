"""The routing of a block: the router's own, the caller's, or the caller's experts with the router's weights.

    nothing is given                 `moax.route` gives experts and weights
    experts [..., K] are given       the router's scores give their weights: replay, or hash routing
    experts and weights are given    the router does not run: a router of the caller's own

With E = 4, K = 2 and the experts (2, 2) and weights (0.3, 0.7) of a token, the token goes to expert 2 once, with the
weight 1.0, and the second place is (4, 0.0): no expert.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from moax.checks import check_float, check_int
from moax.config import MoEConfig
from moax.mesh.axes import ResolvedAxes
from moax.mesh.specs import MeshView
from moax.mesh.tokens import find_row_axes, flatten_tokens
from moax.ops.router import router_logits
from moax.ops.routing import route
from moax.options import Options
from moax.params import MoEParams
from moax.types import Routing

Ids = Integer[Array, "*batch K"]
RoutingInput = Routing | tuple[Ids, Float[Array, "*batch K"]] | Ids


class RoutingOverride(NamedTuple):
    """The caller's part of a routing, in place of the router's choice; None where the router decides.

    Attributes:
      experts: [..., K] i32.
      weights: [..., K] f32, given only with experts.
      losses: the aux loss and the z loss of a Routing, [] f32 each.
    """

    experts: Int[Array, "*batch K"] | None = None
    weights: Float[Array, "*batch K"] | None = None
    losses: tuple[Float[Array, ""], Float[Array, ""]] | None = None


def check_routing(routing: RoutingInput | None, shape: tuple[int, ...]) -> RoutingOverride:
    """Returns what the argument `routing` of `moax.moe` gives; ValueError where an array is not of `shape` [..., K]."""
    if routing is None:
        return RoutingOverride()
    weights, losses = None, None
    if isinstance(routing, Routing):
        experts, weights, losses = routing.experts, routing.weights, (routing.aux_loss, routing.z_loss)
    elif isinstance(routing, tuple) and len(routing) == 2:
        experts, weights = routing
    else:
        experts = routing
    what = "routing" if weights is None else "routing: its experts"
    check_int(what, experts, f"{list(shape)}, or a pair of ids and weights, or a moax.Routing")
    if experts.shape != shape:
        raise ValueError(f"{what} has shape {experts.shape}; it must be {shape}")
    if weights is None:
        return RoutingOverride(experts.astype(jnp.int32))
    check_float("routing: its weights", weights, str(list(shape)))
    if weights.shape != shape:
        raise ValueError(f"routing: its weights have shape {weights.shape}; it must be {shape}")
    return RoutingOverride(experts.astype(jnp.int32), weights.astype(jnp.float32), losses)


def find_routing(
    view: MeshView,
    x: Float[Array, "*batch H"],
    tokens: Float[Array, "T H"],
    params: MoEParams[Array],
    config: MoEConfig,
    options: Options,
    given: RoutingOverride,
    real: Bool[Array, "T 1"] | None,
    segments: Integer[Array, "*batch"] | None = None,
) -> Routing:
    """Returns the Routing of `tokens`: x flattened, with 0 in padding. Where `real` is None, all tokens are real."""
    resolved, router = view.axes, config.router
    experts = None if given.experts is None else flatten_tokens(given.experts, resolved)
    mask = None if real is None else real[:, 0]
    if experts is not None and given.weights is not None:
        return _as_given(view, experts, flatten_tokens(given.weights, resolved), given, config, real)
    how = dict(axes=options.axes, engine=options.engine)
    logits = router_logits(tokens, params.router, **how)
    logits = logits if params.logits_bias is None else logits + params.logits_bias.astype(jnp.float32)[None]
    sequences = _find_sequences(x, segments, resolved) if router.sequence_aux_loss else None
    return route(
        logits, router, config.top_k, params.router_bias,
        experts=experts, mask=mask, sequences=sequences, sequence_axes=find_row_axes(x, view),
        kernels=options.kernels, **how,
    )  # fmt: skip


def _as_given(view: MeshView, experts, weights, given: RoutingOverride, config: MoEConfig, real) -> Routing:
    """Returns the Routing that the caller gave, without padding; a negative id stands for no expert too."""
    none = config.num_experts
    some = (experts >= 0) & (experts < none)
    some = some if real is None else some & real
    experts, weights = jnp.where(some, experts, none), jnp.where(some, weights, 0.0)
    chose = experts[:, :, None] == jnp.arange(none, dtype=jnp.int32)[None, None]
    tokens = view.psum(chose.sum((0, 1), dtype=jnp.int32), view.axes.tokens)
    return Routing(experts, weights, *(given.losses or (jnp.zeros((), jnp.float32),) * 2), tokens)


def merge_duplicate_experts(routing: Routing, config: MoEConfig) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
    """Returns experts and weights in which each expert of a token appears once, with the sum of its weights.

    A second appearance becomes E, no expert, with the weight 0.
    """
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
