"""dispatch and combine: tokens go to the ranks that own their experts, and the sums of their rows come back.

    dispatch   rows[r] = x[t] on every rank that owns one of t's experts, once
    combine    y[t] = sum over ranks of the row of t on each rank

With 2 ranks of 2 experts each, a token with experts (0, 3) becomes a row on both ranks. Its experts are (0, none) on
rank 0 and (none, 1) on rank 1, and its weights are 0 where its expert is none.

Each op is the transpose of the other. The gradient of a dispatch combines: dx[t] is the sum of the gradients of t's
rows. The gradient of a combine sends: the gradient of a row of t is dy[t].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Integer

from moax.checks import check_arrays, check_value
from moax.exchange import AUTO, TRANSPORTS, find_transport
from moax.exchange.transport import ExchangeSpec, Planned, Sent, allot_slots
from moax.kernels.groups import narrow_ids
from moax.mesh.axes import Axes
from moax.mesh.op import Op, with_gradient
from moax.mesh.specs import Engine, MeshView, find_mesh_view
from moax.types import Received


def dispatch(
    x: Float[Array, "T H"],
    experts: Integer[Array, "T K"],
    weights: Float[Array, "T K"],
    num_experts: int,
    *,
    exchange: str = "auto",
    capacity_factor: float | None = None,
    axes: Axes = Axes(),
    engine: Engine = "auto",
) -> Received:
    """rows[r] = x[t]: each token t becomes one row on every rank that owns one of its experts.

    Args:
      x: [T, H], floating point, T over (dp, fsdp, ep, cp).
      experts: [T, K], integers, split as x. Rank i of ep owns the experts [i E/ranks, (i + 1) E/ranks). A number
        outside of [0, E) means no expert.
      weights: [T, K] f32, split as x.
      num_experts: E.
      exchange: the transport; `auto` is all_gather.
      capacity_factor: the slots of each pair of ranks, as a multiple of the balanced load T K / ranks. None has room
        for every token. all_gather has no slots, so the factor does not change it.
      axes, engine: see `moax.Options`.

    Returns:
      Received, each of its fields sharded by rank on its leading dim. It is differentiable in x and weights.

    Raises:
      ValueError: a shape does not fit, no transport has this name, or ep does not divide E.
    """
    check_value("num_experts", num_experts, int)
    if capacity_factor is not None:
        check_value("capacity_factor", capacity_factor, float, above=0)
    check_arrays("x [T, H], experts int [T, K], weights [T, K]", x, experts, weights)
    view = find_mesh_view(axes, engine, x)
    ranks = view.axes.size(view.axes.ep)
    if num_experts % ranks:
        raise ValueError(f"num_experts={num_experts} is not divisible by mesh axes {view.axes.ep} of {ranks} devices")
    tokens = x.shape[0] // _count_shards(view)
    transport = find_transport(exchange)
    if tokens == 0:
        transport = AUTO  # which sends no token, and has no slots
    slots, _ = allot_slots(tokens, experts.shape[1], ranks, num_experts, capacity_factor, None)
    static = ExchangeSpec(
        transport=transport,
        axes=view.axes,
        ranks=ranks,
        tokens=tokens,
        slots=slots,
        num_experts=num_experts,
        capacity=slots,
    )
    experts = narrow_ids(experts, num_experts)
    experts = jnp.where(experts < 0, num_experts, experts)
    results = _dispatch(view, static, x, experts, weights)
    rows, local, arrived_weights, (count, dropped, sent) = results
    return Received(rows, local, arrived_weights, count, dropped, sent, transport, tokens)


def combine(
    rows: Float[Array, "R H"], received: Received, *, axes: Axes = Axes(), engine: Engine = "auto"
) -> Float[Array, "T H"]:
    """y[t] = the sum of the rows of t on the ranks that received t.

    Args:
      rows: [R, H], one for each of `received.rows` and sharded like them. A row without an expert is added too, so it
        must be 0.
      received: the result of `dispatch`.
      axes, engine: see `moax.Options`.

    Returns:
      y: [T, H] in the dtype of rows, T over (dp, fsdp, ep, cp). It is differentiable in rows.

    Raises:
      ValueError: `received` is no result of `dispatch`, or rows has another shape than `received.rows`.
    """
    check_value("received", received, Received, "moax.ops.dispatch")
    check_arrays("rows [R, H]", rows, R=received.rows.shape[0])
    view = find_mesh_view(axes, engine, rows)
    ranks = view.axes.size(view.axes.ep)
    slots = rows.shape[0] // (_count_shards(view) * ranks)
    static = ExchangeSpec(received.transport, view.axes, ranks, received.num_tokens, slots)
    return _combine(view, static, rows, received.slots)[0]


def _count_shards(view: MeshView) -> int:
    """Returns the number of shards of an array that is split as tokens are: one inside a `shard_map`."""
    if view.manual:
        return 1
    return view.axes.size(view.axes.tokens)


def dispatch_forward(
    static: ExchangeSpec,
    x: Float[Array, "T H"],
    experts: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    index: int | Int[Array, ""] = 0,
) -> tuple[Received, Int[Array, ""]]:
    """Runs round `index` of a dispatch on one device; it moves the slots of each pair of ranks from index * slots on.

    It returns the rows that this rank received, and the number of rounds that this rank knows to be needed. The
    exchange needs the largest number of all ranks of ep. `dropped` counts the assignments that find no slot in any
    round.
    """
    no_expert = static.num_experts
    local_experts = static.num_experts // static.ranks
    transport = TRANSPORTS[static.transport]
    with jax.named_scope("dispatch"):
        planned = Planned(None, jnp.zeros(1, jnp.int32), jnp.ones((), jnp.int32))
        if transport.has_slots:
            planned = transport.plan(static, experts, index)
        sent, dropped, rounds = planned
        # Each id travels as id - E. An empty slot holds 0, which becomes E on arrival: the expert of no rank.
        rows, ids, weights = transport.send(static, (x, experts - no_expert, weights), sent)
        ids = ids + no_expert
        first_id = 0
        if static.axes.ep:
            first_id = lax.axis_index(static.axes.ep) * local_experts
        is_local = (ids >= first_id) & (ids < first_id + local_experts)
        local_ids = jnp.where(is_local, ids - first_id, local_experts).astype(jnp.int32)
        weights = jnp.where(is_local, weights, 0.0)
        count = is_local.any(-1).sum(dtype=jnp.int32)
    received = Received(rows, local_ids, weights, count[None], dropped, sent, static.transport, x.shape[0])
    return received, rounds


def dispatch_backward(
    static: ExchangeSpec,
    sent: Sent,
    d_rows: Float[Array, "R H"],
    d_weights_rows: Float[Array, "R K"],
) -> tuple[Float[Array, "T H"], Float[Array, "T K"]]:
    """Returns dx, d_weights [T, K] f32 of one device; d_rows is 0 in empty slots, d_weights_rows without an expert."""
    with jax.named_scope("dispatch_grad"):
        dx, d_weights = TRANSPORTS[static.transport].combine(static, (d_rows, d_weights_rows), sent)
    return dx, d_weights


def combine_forward(static: ExchangeSpec, rows: Float[Array, "R H"], sent: Sent) -> Float[Array, "T H"]:
    """Runs `combine` on one device; `sent` is `Received.slots` of the dispatch."""
    with jax.named_scope("combine"):
        return TRANSPORTS[static.transport].combine(static, (rows,), sent)[0]


def combine_backward(static: ExchangeSpec, dy: Float[Array, "T H"], sent: Sent) -> Float[Array, "R H"]:
    """Returns d_rows of one device."""
    with jax.named_scope("combine_grad"):
        return TRANSPORTS[static.transport].send(static, (dy,), sent)[0]


def _dispatch_shards(static: ExchangeSpec, x, experts, weights):
    received, _ = dispatch_forward(static, x, experts, weights)
    per_rank = (received.count, received.dropped, received.slots)
    return received.rows, received.experts, received.weights, per_rank


def _dispatch_grad_shards(static: ExchangeSpec, sent, local, d_rows, d_weights):
    d_weights = jnp.where(local < static.num_experts // static.ranks, d_weights, 0.0)
    return dispatch_backward(static, sent, d_rows, d_weights)


def _save_dispatch(operands, results):
    _, local_ids, _, (_, _, sent) = results
    return sent, local_ids


def _pull_dispatch(run_grad, saved, cotangents):
    d_rows, _, d_weights_rows, _ = cotangents
    dx, d_weights = run_grad(*saved, d_rows, d_weights_rows)
    return dx, None, d_weights


_dispatch = with_gradient(
    "dispatch",
    Op("dispatch", _dispatch_shards, "t h, t k, t k -> r h, r k, r k, @r"),
    Op("dispatch_grad", _dispatch_grad_shards, "@r, r k, r h, r k -> t h, t k"),
    save=_save_dispatch,
    pull=_pull_dispatch,
)
_combine = with_gradient(
    "combine",
    Op("combine", combine_forward, "r h, @r -> t h"),
    Op("combine_grad", combine_backward, "t h, @r -> r h"),
    save=lambda operands, results: operands[1],
    pull=lambda grad, sent, d: (*grad(*d, sent), None),
)
