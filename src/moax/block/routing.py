"""The routing of a block: the router's own, the caller's, or the caller's experts with the router's weights.

    nothing is given                 experts and weights are those of `moax.route`
    experts [..., K] are given       weights are those of the router's scores: replay, or hash routing
    experts and weights are given    the router does not run: a router of the caller's own

With E = 4, K = 2 and the experts (2, 2) and weights (0.3, 0.7) of a token, the token goes to expert 2 once, with the
weight 1.0, and the second place is (4, 0.0): no expert.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypedDict

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from moax.checks import check_float, check_int
from moax.config import MoEConfig
from moax.lora import Adapters
from moax.mesh.axes import Roles
from moax.mesh.partition import MeshView
from moax.mesh.tokens import flatten_tokens, unflatten_tokens
from moax.ops.logits import router_logits
from moax.ops.routing import route
from moax.options import Options
from moax.params import MoEParams
from moax.types import QuantizedParams, Routing

Ids = Integer[Array, "*batch K"]
RoutingInput = Routing | tuple[Ids, Float[Array, "*batch K"]] | Ids


class CallKeywords(TypedDict, total=False):
    """The keywords of `moax.moe` that belong to one call and its tokens, as a layer's call takes them."""

    router_input: Float[Array, "*batch H"] | None
    quantized: QuantizedParams | None
    adapters: Adapters[Array] | None
    routing: RoutingInput | None
    mask: Bool[Array, "*batch"] | None
    return_routing: bool


class Given(NamedTuple):
    """What the caller gave in place of the router's choice; None for what the router decides.

    Attributes:
      experts: [..., K] i32.
      weights: [..., K] f32, given only with experts.
      losses: the aux loss and the z loss of a Routing, [] f32 each.
    """

    experts: Int[Array, "*batch K"] | None = None
    weights: Float[Array, "*batch K"] | None = None
    losses: tuple[Float[Array, ""], Float[Array, ""]] | None = None


def check_routing(routing: RoutingInput | None, shape: tuple[int, ...]) -> Given:
    """Returns what the argument `routing` of `moax.moe` gives; `shape` is that of expert ids, [..., K].

    Raises:
      ValueError: the argument is none of what it may be, or an array has another shape.
    """
    if routing is None:
        return Given()
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
        return Given(experts.astype(jnp.int32))
    check_float("routing: its weights", weights, str(list(shape)))
    if weights.shape != shape:
        raise ValueError(f"routing: its weights have shape {weights.shape}; it must be {shape}")
    return Given(experts.astype(jnp.int32), weights.astype(jnp.float32), losses)


def find_routing(
    view: MeshView,
    x: Float[Array, "*batch H"],
    tokens: Float[Array, "T H"],
    params: MoEParams[Array],
    config: MoEConfig,
    options: Options,
    given: Given,
    real: Bool[Array, "T 1"] | None,
) -> Routing:
    """Returns the Routing of the tokens.

    Args:
      view: how ops run on the mesh in force.
      x: [..., H], whose leading dims are those of what was given.
      tokens: [T, H], x flattened, with 0 in padding.
      params: the parameters; the router is replicated.
      config: the sizes of the block and its router.
      options: how the block runs.
      given: what the caller gave.
      real: [T, 1], whether each token is real; None where all are.
    """
    roles, router = view.roles, config.router
    experts = None if given.experts is None else flatten_tokens(given.experts, roles)
    mask = None if real is None else real[:, 0]
    if experts is not None and given.weights is not None:
        return _as_given(view, experts, flatten_tokens(given.weights, roles), given, config, real)
    how = dict(axes=options.axes, engine=options.engine)
    logits = router_logits(tokens, params.router, **how)
    logits = logits if params.logits_bias is None else logits + params.logits_bias.astype(jnp.float32)[None]
    sequences, count = _find_sequences(x, roles) if router.sequence_aux_loss else (None, 0)
    return route(
        logits, router, config.top_k, params.router_bias,
        experts=experts, mask=mask, sequences=sequences, num_sequences=count,
        kernels=options.kernels, **how,
    )  # fmt: skip


def _as_given(view: MeshView, experts, weights, given: Given, config: MoEConfig, real) -> Routing:
    """Returns the Routing that the caller gave, without padding; a negative id stands for no expert too."""
    none = config.num_experts
    some = (experts >= 0) & (experts < none)
    some = some if real is None else some & real
    experts, weights = jnp.where(some, experts, none), jnp.where(some, weights, 0.0)
    chose = experts[:, :, None] == jnp.arange(none, dtype=jnp.int32)[None, None]
    tokens = view.psum(chose.sum((0, 1), dtype=jnp.int32), view.roles.tokens)
    zero = jnp.zeros((), jnp.float32)
    aux, z = given.losses or (zero, zero)
    return Routing(experts, weights, aux, z, tokens)


def merge_twins(routing: Routing, config: MoEConfig) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
    """Returns experts and weights in which each expert of a token appears once, with the sum of its weights.

    A second appearance becomes E, no expert, with the weight 0.
    """
    experts, weights = routing.experts, routing.weights
    same = experts[:, :, None] == experts[:, None, :]
    place = jnp.arange(config.top_k, dtype=jnp.int32)
    later = (same & (place[None, :] < place[:, None])[None]).any(-1)
    total = jnp.where(same, weights[:, None, :], 0.0).sum(-1)
    return jnp.where(later, config.num_experts, experts), jnp.where(later, 0.0, total)


def _find_sequences(x: Float[Array, "*batch H"], roles: Roles) -> tuple[Int[Array, " T"], int]:
    """Returns the sequence of each token of x [..., S, H], laid out as the tokens are, and the number of sequences.

    x [2, 3, H] has the sequences (0, 0, 0, 1, 1, 1).

    Raises ValueError where x has no dim of sequences.
    """
    if x.ndim < 3:
        raise ValueError(f"x has shape {x.shape}; it must be [..., S, H] for RouterConfig.sequence_aux_loss")
    count = math.prod(x.shape[:-2])
    of_row = jnp.arange(count, dtype=jnp.int32).reshape(*x.shape[:-2], 1, 1)
    return flatten_tokens(jnp.broadcast_to(of_row, (*x.shape[:-1], 1)), roles)[:, 0], count


def like_tokens(routing: Routing, x: Float[Array, "*batch H"], roles: Roles) -> Routing:
    """Returns the Routing with experts and weights [..., K], whose leading dims are those of x [..., H]."""
    experts, weights = (unflatten_tokens(v, x, roles) for v in (routing.experts, routing.weights))
    return Routing(experts, weights, routing.aux_loss, routing.z_loss, routing.tokens_per_expert)
