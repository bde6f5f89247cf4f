"""dispatch and combine: tokens go to the ranks that own their experts, and sums of their results come back.

    dispatch   rows[r] = x[t] on every rank that owns one of t's experts, once
    combine    y[t] = sum over ranks of the row that t became there

With 2 ranks of 2 experts each, a token with experts (0, 3) becomes a row on both ranks. Its experts are (0, none) on
rank 0 and (none, 1) on rank 1, and its weights are 0 where its expert is none. A token with experts (2, 3) becomes one
row on rank 1.

Each op is the transpose of the other. The gradient of a dispatch combines: dx[t] is the sum of the gradients of t's
rows. The gradient of a combine sends: the gradient of a row of t is dy[t].

Each op is a pair of functions of one device, `dispatch_forward` and `dispatch_backward`, `combine_forward` and
`combine_backward`. The block calls these pairs, and the public ops are made of them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Integer

from moax.checks import check_count, check_float, check_int, check_kind, is_number
from moax.kernels import select_kernels
from moax.mesh.axes import Axes
from moax.mesh.partition import Contract, Engine, MeshView, Partitioned, differentiable, find_mesh_view
from moax.mesh.specs import spec
from moax.ops.exchange.plan import slots_per_pair
from moax.ops.exchange.table import TRANSPORTS, select_transport
from moax.ops.exchange.transport import CombineSpec, ExchangeSpec, Sent, Transfer
from moax.ops.exchange.wire import send_rows, wire_bytes, wire_columns
from moax.recipe import Format
from moax.types import Received


def dispatch(
    x: Float[Array, "T H"],
    experts: Integer[Array, "T K"],
    weights: Float[Array, "T K"],
    num_experts: int,
    *,
    exchange: str = "auto",
    capacity_factor: float | None = None,
    wire: Format | None = None,
    axes: Axes = Axes(),
    engine: Engine = "auto",
) -> Received:
    """rows[r] = x[t]: each token t becomes one row on every rank that owns one of its experts.

    Args:
      x: [T, H], floating point, T over (dp, fsdp, ep, cp).
      experts: [T, K], integers in [0, num_experts), T over (dp, fsdp, ep, cp). Rank i of ep owns the experts
        [i E/ranks, (i + 1) E/ranks).
      weights: [T, K] f32, T over (dp, fsdp, ep, cp).
      num_experts: E.
      exchange: the transport; `auto` is all_gather.
      capacity_factor: the slots of each pair of ranks, as a multiple of the balanced load T K / ranks. None has room
        for every token. all_gather has no slots, so the factor changes nothing there.
      wire: the format of the rows on their way; None sends them in their own dtype.
      axes, engine: see `moax.Options`.

    Returns:
      Received, each of its fields sharded by rank on its leading dim. It is differentiable in x and weights.

    Raises:
      ValueError: a shape does not fit, no transport has this name, or ep does not divide E.
      Unsupported: the transport cannot run on this machine and mesh.
    """
    check_float("x", x, "[T, H]")
    check_int("experts", experts, "[T, K]")
    check_float("weights", weights, "[T, K]")
    check_count("num_experts", num_experts)
    if capacity_factor is not None and not (is_number(capacity_factor) and 0 < capacity_factor < math.inf):
        raise ValueError(f"capacity_factor={capacity_factor!r} must be a finite number > 0, or None")
    if wire is not None:
        check_kind("wire", wire, Format)
    if x.ndim != 2 or experts.ndim != 2 or experts.shape != weights.shape or experts.shape[0] != x.shape[0]:
        raise ValueError(
            f"x, experts, weights have shapes {x.shape}, {experts.shape}, {weights.shape}; they must be "
            "[T, H], [T, K], [T, K]"
        )
    view = find_mesh_view(axes, engine, x)
    roles = view.roles
    ranks = roles.size(roles.ep)
    if num_experts % ranks:
        raise ValueError(f"num_experts={num_experts} does not divide by mesh axes {roles.ep} of {ranks} devices")
    tokens = x.shape[0] // (1 if view.manual else roles.size(roles.tokens))
    transport = select_transport(exchange, view, wire_bytes(x, wire))
    slots = slots_per_pair(tokens, experts.shape[1], ranks, capacity_factor)
    kernels = select_kernels("auto", x.dtype, width=x.shape[1])
    whole = ExchangeSpec(transport, roles, slots, wire, kernels, num_experts=num_experts, capacity=slots)
    static = _Sized(whole, tokens)
    operands = _dispatch_op.lay_operands(view, static, x, experts.astype(jnp.int32), weights)
    rows, local, arrived_weights, count, dropped, sent = _dispatch(view, static, *operands)
    return Received(rows, local, arrived_weights, count, dropped, sent, transport, tokens)


def combine(
    rows: Float[Array, "R H"], received: Received, *, axes: Axes = Axes(), engine: Engine = "auto"
) -> Float[Array, "T H"]:
    """y[t] = the sum, over the ranks that t went to, of its row there.

    Args:
      rows: [R, H], one for each of `received.rows` and sharded like them. A row without an expert is added too, so it
        must be 0.
      received: what `dispatch` returned.
      axes, engine: see `moax.Options`.

    Returns:
      y: [T, H] in the dtype of rows, T over (dp, fsdp, ep, cp). It is differentiable in rows.

    Raises:
      ValueError: `received` is not what `dispatch` returns, or rows has another shape than its rows.
      Unsupported: the transport of `received` cannot run on this machine and mesh.
    """
    check_float("rows", rows, "[R, H]")
    check_kind("received", received, Received, "moax.ops.dispatch")
    if rows.ndim != 2 or rows.shape[0] != received.rows.shape[0]:
        raise ValueError(f"rows has shape {rows.shape}; it must be [R={received.rows.shape[0]}, H]")
    view = find_mesh_view(axes, engine, rows)
    transport = select_transport(received.transport, view, wire_bytes(rows))
    shards = 1 if view.manual else view.roles.size(view.roles.tokens)
    slots = rows.shape[0] // (shards * view.roles.size(view.roles.ep))
    static = _Sized(CombineSpec(transport, view.roles, slots), received.num_tokens)
    return _combine(view, static, *_combine_op.lay_operands(view, static, rows, received.slots))


class _Sized[S: CombineSpec](NamedTuple):
    """A spec, and T of a shard. The rows that come back do not say how many tokens they become, so T is static."""

    spec: S
    tokens: int


def dispatch_forward(
    static: ExchangeSpec,
    x: Float[Array, "T H"],
    experts: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    index: int | Int[Array, ""] = 0,
) -> tuple[Received, Int[Array, ""]]:
    """Runs `dispatch` on one device, or one pass of it.

    Args:
      static: the spec of the exchange.
      x: [T, H].
      experts: [T, K] i32, ids of the whole mesh.
      weights: [T, K] f32.
      index: the pass, which moves the slots of each pair of ranks from index * slots on.

    Returns:
      received: Received of this rank: rows [R, H], local experts [R, K], weights [R, K], and the plan for the way back.
        `dropped` counts the assignments that find no slot in any pass.
      passes: [] i32, the passes that this rank knows to be needed; the most of all ranks of ep are needed.
    """
    local_experts, none = static.local_experts, static.num_experts
    transport = TRANSPORTS[static.transport]
    with jax.named_scope("dispatch"):
        sent, dropped, passes = transport.plan(static, experts, index)
        # Each id travels as id - E. An empty slot holds 0, which becomes E on arrival: the expert of no rank.
        arrived = send_rows(static, x, (experts - none, weights), sent)
        ids, weights = arrived.narrow
        ids = ids + none
        first = lax.axis_index(static.roles.ep) * local_experts if static.roles.ep else 0
        mine = (ids >= first) & (ids < first + local_experts)
        if arrived.ends is not None:
            mine &= (jnp.arange(ids.shape[0], dtype=jnp.int32) < arrived.ends[-1])[:, None]
        local = jnp.where(mine, ids - first, local_experts).astype(jnp.int32)
        weights = jnp.where(mine, weights, 0.0)
        count = mine.any(-1).sum(dtype=jnp.int32) if arrived.ends is None else arrived.ends[-1]
    received = Received(arrived.rows, local, weights, count[None], dropped, sent, static.transport, x.shape[0])
    return received, passes


def dispatch_backward(
    static: CombineSpec, sent: Sent, d_rows: Float[Array, "R H"], d_weights_rows: Float[Array, "R K"], tokens: int
) -> tuple[Float[Array, "T H"], Float[Array, "T K"]]:
    """Computes the transpose of `dispatch_forward`, of one device.

    Args:
      static: the spec of the forward.
      sent: `Received.slots` of the forward.
      d_rows: [R, H], the gradient of `Received.rows`; 0 in empty slots.
      d_weights_rows: [R, K] f32, the gradient of `Received.weights`; 0 where the expert is none.
      tokens: T.

    Returns:
      (dx [T, H], d_weights [T, K] f32).
    """
    with jax.named_scope("combine"):
        dx, d_weights = TRANSPORTS[static.transport].combine(static, (d_rows, d_weights_rows), sent, tokens)
    return dx, d_weights


def combine_forward(static: CombineSpec, rows: Float[Array, "R H"], sent: Sent, tokens: int) -> Float[Array, "T H"]:
    """Runs `combine` on one device: rows [R, H] to y [T, H].

    `sent` is `Received.slots` of the dispatch, and `tokens` is T.
    """
    with jax.named_scope("combine"):
        return TRANSPORTS[static.transport].combine(static, (rows,), sent, tokens)[0]


def combine_backward(static: CombineSpec, dy: Float[Array, "T H"], sent: Sent) -> Float[Array, "R H"]:
    """Computes the transpose of `combine_forward` on one device: dy [T, H] to d_rows [R, H].

    dy is quantized on the wire where `static.wire` is a format. `sent` is `Received.slots` of the dispatch.
    """
    return send_rows(static, dy, (), sent).rows


def dispatch_cost(static: ExchangeSpec, tokens: int, top_k: int, width: int, dtype: str) -> list[Transfer]:
    """Returns the Transfers of `dispatch_forward` with T tokens of K experts.

    They are those of the plan, of rows, ids and weights.
    """
    transport = TRANSPORTS[static.transport]
    columns = (*wire_columns(width, dtype, static.wire), (top_k, "int32"), (top_k, "float32"))
    plan = transport.cost(static, tokens, top_k, "plan", ())
    return plan + transport.cost(static, tokens, top_k, "send", columns)


def dispatch_backward_cost(static: ExchangeSpec, tokens: int, top_k: int, width: int, dtype: str) -> list[Transfer]:
    """Returns the Transfers of `dispatch_backward`: the gradients of rows and of weights travel."""
    columns = ((width, dtype), (top_k, "float32"))
    return TRANSPORTS[static.transport].cost(static, tokens, top_k, "combine", columns)


def combine_cost(static: ExchangeSpec, tokens: int, top_k: int, width: int, dtype: str) -> list[Transfer]:
    """Returns the Transfers of `combine_forward`: rows travel."""
    return TRANSPORTS[static.transport].cost(static, tokens, top_k, "combine", ((width, dtype),))


def combine_backward_cost(static: ExchangeSpec, tokens: int, top_k: int, width: int, dtype: str) -> list[Transfer]:
    """Returns the Transfers of `combine_backward`: the gradients of tokens travel."""
    columns = wire_columns(width, dtype, static.wire)
    return TRANSPORTS[static.transport].cost(static, tokens, top_k, "send", columns)


def exchange_bytes(static: ExchangeSpec, tokens: int, top_k: int, width: int, dtype: str) -> int:
    """Returns the bytes that a device sends in both directions of one pass, forward and backward."""
    costs = (dispatch_cost, combine_cost, combine_backward_cost, dispatch_backward_cost)
    return sum(moved.bytes for cost in costs for moved in cost(static, tokens, top_k, width, dtype))


def _dispatch_forward(view: MeshView, static: _Sized[ExchangeSpec], x, experts, weights):
    """Runs the forward of the `custom_vjp` and returns the arrays of Received, and the residuals."""
    results = _dispatch_op(view, static, x, experts, weights)
    results = results if TRANSPORTS[static.spec.transport].has_slots else (*results, None)
    mine = jnp.asarray(results[1]) < static.spec.local_experts
    return results, (results[-1], mine)


def _dispatch_backward(view: MeshView, static: _Sized[ExchangeSpec], saved, cotangents):
    """Runs the backward of the `custom_vjp` and returns the gradients of x and weights."""
    sent, mine = saved
    d_weights = jnp.where(mine, cotangents[2], 0.0)
    dx, d_weights = _dispatch_grad_op(view, static, sent, cotangents[0], d_weights)
    return dx, None, d_weights


_dispatch = differentiable(_dispatch_forward, _dispatch_backward, once="dispatch")


def _combine_forward(view: MeshView, static: _Sized[CombineSpec], rows, sent):
    """Runs the forward of the `custom_vjp` and returns y, and the plan."""
    return _combine_op(view, static, rows, sent)[0], sent


def _combine_backward(view: MeshView, static: _Sized[CombineSpec], sent, dy):
    """Runs the backward of the `custom_vjp` and returns the gradient of the rows."""
    return _combine_grad_op(view, static, dy, sent)[0], None


_combine = differentiable(_combine_forward, _combine_backward, once="combine")


def _dispatch_shards(static: _Sized[ExchangeSpec], layout, x, experts, weights):
    """Returns the arrays of `dispatch_forward`, as a tuple."""
    received, _ = dispatch_forward(static.spec, x, experts, weights)
    results = (received.rows, received.experts, received.weights, received.count, received.dropped)
    return results if received.slots is None else (*results, received.slots)


def _dispatch_grad_shards(static: _Sized, layout, sent, rows, weights):
    """Runs the backward of `dispatch` on one device."""
    return dispatch_backward(static.spec, sent, rows, weights, static.tokens)


def _combine_shards(static: _Sized, layout, rows, sent):
    """Runs `combine` on one device."""
    return (combine_forward(static.spec, rows, sent, static.tokens),)


def _combine_grad_shards(static: _Sized, layout, dy, sent):
    """Runs the backward of `combine` on one device."""
    return (combine_backward(static.spec, dy, sent),)


def _by_tokens(static: _Sized, operands, results: int) -> Contract:
    """Returns the contract of an op whose operands and results are all split as the tokens are."""
    leading = spec(static.spec.roles.tokens)
    return Contract(jax.tree.map(lambda _: leading, operands), (leading,) * results, ((),) * results)


def _dispatch_contract(static: _Sized, operands, found_specs):
    """Returns the contract of `dispatch`; the slots are a result of transports that have some."""
    return _by_tokens(static, operands, 5 + TRANSPORTS[static.spec.transport].has_slots)


def _dispatch_grad_contract(static: _Sized, operands, found_specs):
    """Returns the contract of the backward of `dispatch`."""
    return _by_tokens(static, operands, 2)


def _combine_contract(static: _Sized, operands, found_specs):
    """Returns the contract of `combine` and of its backward."""
    return _by_tokens(static, operands, 1)


def _own_dims(sent):
    """Returns the strings of a Shardy rule for the plan, which shares no dim with another operand."""
    return ("",) * len(jax.tree.leaves(sent))


_dispatch_op = Partitioned(
    _dispatch_shards,
    _dispatch_contract,
    lambda static, operands: (("t h", "t k", "t k"), ("r h", "r k", "r k")),
    name="dispatch",
)
_dispatch_grad_op = Partitioned(
    _dispatch_grad_shards,
    _dispatch_grad_contract,
    lambda static, operands: ((*_own_dims(operands[0]), "r h", "r k"), ("t h", "t k")),
    name="dispatch_grad",
)
_combine_op = Partitioned(
    _combine_shards,
    _combine_contract,
    lambda static, operands: (("r h", *_own_dims(operands[1])), ("t h",)),
    name="combine",
)
_combine_grad_op = Partitioned(
    _combine_grad_shards,
    _combine_contract,
    lambda static, operands: (("t h", *_own_dims(operands[1])), ("r h",)),
    name="combine_grad",
)
