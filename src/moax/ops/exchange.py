"""Exchange: tokens to the ranks that own their experts, and sums of what those computed back to the tokens.

    dispatch: rows[r] = x[t] on every rank that owns one of t's experts, once
    combine:  y[t] = sum over ranks of rows[r(t, rank)]

Each is the other's transpose, so the vjp of one is the other. Two transports deliver the same `Received`:

    all_gather   every token to every rank of ep; R = T * ranks; combine is a reduce-scatter. Drops nothing.
    all_to_all   `slots` rows for each pair of ranks, empty ones included; R = slots * ranks. What does not fit is
                 counted in `Received.dropped`, in assignments (token, expert).

With `wire`, rows travel quantized (in dispatch, forward and backward; sums travel in the dtype of the rows). Only this
file and partition.py call collectives.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moax.axes import Axes, Roles
from moax.backend import Unsupported
from moax.ops.quantize import dequantize_local, quantize_local
from moax.partition import Contract, Engine, Partitioned, View, find_view
from moax.recipe import Format
from moax.sharding import spec
from moax.types import Received

Transport = Literal["auto", "all_gather", "all_to_all", "one_sided"]
TRANSPORTS = ("auto", "all_gather", "all_to_all", "one_sided")


@dataclasses.dataclass(frozen=True)
class ExchangeSpec:
    """transport; num_experts: E of the whole mesh; slots: rows for each pair of ranks (all_to_all);
    wire: format of rows on their way, None for their own dtype."""

    transport: Literal["all_gather", "all_to_all"]
    num_experts: int
    roles: Roles
    slots: int = 0
    wire: Format | None = None

    @property
    def ranks(self) -> int:
        return self.roles.size(self.roles.ep)


def select_transport(exchange: Transport) -> Literal["all_gather", "all_to_all"]:
    """The transport of a name; `auto` is all_gather.

    Raises ValueError for an unknown name, and Unsupported for `one_sided`, which needs Mosaic kernels.
    """
    if exchange not in TRANSPORTS:
        raise ValueError(f"exchange={exchange!r} must be one of {', '.join(map(repr, TRANSPORTS))}")
    if exchange == "one_sided":
        raise Unsupported("exchange='one_sided' is not in this version; use 'all_gather' or 'all_to_all'")
    return "all_gather" if exchange == "auto" else exchange


def slots_per_pair(tokens: int, top_k: int, ranks: int, capacity_factor: float | None) -> int:
    """Rows to keep for each pair of ranks: that multiple of the balanced load T K / ranks, at most T."""
    return tokens if capacity_factor is None else min(tokens, math.ceil(capacity_factor * tokens * top_k / ranks))


def dispatch(
    x: Float[Array, "T H"],
    experts: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    num_experts: int,
    *,
    exchange: Transport = "auto",
    capacity_factor: float | None = None,
    wire: Format | None = None,
    axes: Axes = Axes(),
    engine: Engine = "auto",
) -> Received:
    """rows[r] = x[t] on every rank that owns one of t's experts, once.

    Args:
      x: [T, H]; experts: [T, K] i32, in [0, num_experts); weights: [T, K] f32. T over (dp, fsdp, ep). Rank i of ep
        owns experts [i E/ranks, (i + 1) E/ranks).
      num_experts: E.
      exchange: the transport; `auto` is all_gather.
      capacity_factor: bounds the slots of all_to_all; None drops nothing.
      wire: format of the rows on their way.
      axes, engine: see `moax.moe`.

    Returns:
      Received, each of its fields sharded by rank on its leading dim. Differentiable in x and weights.

    Raises:
      ValueError: shapes, an unknown transport, E that ep does not divide. Unsupported: a transport that cannot run.
    """
    if x.ndim != 2 or experts.ndim != 2 or experts.shape != weights.shape or experts.shape[0] != x.shape[0]:
        raise ValueError(
            f"x, experts, weights have shapes {x.shape}, {experts.shape}, {weights.shape}; they must be "
            "[T, H], [T, K], [T, K]"
        )
    view = find_view(axes, engine, x)
    roles = view.roles
    if num_experts % roles.size(roles.ep):
        raise ValueError(
            f"num_experts={num_experts} does not divide by mesh axes {roles.ep} of {roles.size(roles.ep)} devices"
        )
    tokens = x.shape[0] // (1 if view.manual else roles.size(roles.tokens))
    transport = select_transport(exchange)
    slots = slots_per_pair(tokens, experts.shape[1], roles.size(roles.ep), capacity_factor)
    static = ExchangeSpec(transport, num_experts, roles, slots, wire)
    operands = _dispatch_op.lay(view, static, x, experts, weights)
    rows, local, weights, count, dropped, sent = _dispatch(view, static, *operands)
    return Received(rows, local, weights, count, dropped, sent, transport, tokens)


def combine(
    rows: Float[Array, "R H"], received: Received, *, axes: Axes = Axes(), engine: Engine = "auto"
) -> Float[Array, "T H"]:
    """y[t] = the sum, over the ranks t went to, of its row there.

    Args:
      rows: [R, H], one for each of `received.rows`; rows without an expert count too, so they must be 0.
      received: what `dispatch` returned.
      axes, engine: see `moax.moe`.

    Returns:
      y: [T, H], T over (dp, fsdp, ep). Differentiable in rows.
    """
    view = find_view(axes, engine, rows)
    static = ExchangeSpec(select_transport(received.transport), 0, view.roles, received.num_tokens)
    return _combine(view, static, *_combine_op.lay(view, static, rows, received.slots))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dispatch(view: View, static: ExchangeSpec, x, experts, weights):
    results = _dispatch_op(view, static, x, experts, weights)
    return results if static.transport == "all_to_all" else (*results, None)


def _dispatch_fwd(view, static, x, experts, weights):
    results = _dispatch(view, static, x, experts, weights)
    tokens = x.shape[0] // (1 if view.manual else view.roles.size(view.roles.tokens))
    mine = results[1] < static.num_experts // static.ranks
    return results, (results[-1], mine, tokens)


def _dispatch_bwd(view, static, residuals, cotangents):
    sent, mine, tokens = residuals
    back = dataclasses.replace(static, slots=tokens)
    d_weights = jnp.where(mine, cotangents[2], 0.0)
    return _combine(view, back, cotangents[0], sent), None, _combine(view, back, d_weights, sent)


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _combine(view: View, static: ExchangeSpec, rows, sent):
    """`static.slots` is the number of tokens of a shard here."""
    return _combine_op(view, static, rows, sent)[0]


def _combine_fwd(view, static, rows, sent):
    return _combine(view, static, rows, sent), sent


def _combine_bwd(view, static, sent, dy):
    return _send_op(view, static, dy, sent)[0], None


_combine.defvjp(_combine_fwd, _combine_bwd)


def dispatch_local(static: ExchangeSpec, x, experts, weights) -> Received:
    """`dispatch` of one device."""
    local_experts, nobody = static.num_experts // static.ranks, static.num_experts
    with jax.named_scope("dispatch"):
        sent, dropped = None, jnp.zeros(1, jnp.int32)
        if static.transport == "all_to_all":
            sent, dropped = assign_slots(static, experts)
        ids = send(static, experts - nobody, sent) + nobody  # an empty slot holds 0, so it is nobody's
        first = lax.axis_index(static.roles.ep) * local_experts if static.roles.ep else 0
        mine = (ids >= first) & (ids < first + local_experts)
        local = jnp.where(mine, ids - first, local_experts).astype(jnp.int32)
        weights = jnp.where(mine, send(static, weights, sent), 0.0)
        rows = send_rows(static, x, sent)
        count = mine.any(-1).sum(dtype=jnp.int32)[None]
    return Received(rows, local, weights, count, dropped, sent, static.transport, x.shape[0])


def assign_slots(static: ExchangeSpec, experts):
    """Which token goes in each slot for each rank, in order of tokens: [ranks * slots], T for none; and how many
    assignments found no slot."""
    tokens, slots = experts.shape[0], static.slots
    owner, rank = experts // (static.num_experts // static.ranks), jnp.arange(static.ranks, dtype=jnp.int32)
    wanted = (owner[:, None] == rank[None, :, None]).any(-1)
    slot = jnp.cumsum(wanted.astype(jnp.int32), axis=0) - 1
    slot = jnp.where(wanted & (slot < slots), slot, slots)
    sent = jnp.full((static.ranks, slots), tokens, jnp.int32)
    sent = sent.at[rank[None], slot].set(jnp.arange(tokens, dtype=jnp.int32)[:, None], mode="drop").reshape(-1)
    lost = (jnp.take_along_axis(slot, owner, axis=1) == slots).astype(jnp.int32)
    return sent, lost.sum(dtype=jnp.int32)[None]


def send(static: ExchangeSpec, values, sent):
    """Values of this rank's tokens [T, C] to where their rows went: [R, C]. Empty slots hold 0."""
    if static.transport == "all_to_all":
        values = jnp.take(values, sent, axis=0, mode="fill", fill_value=0)
        return _all_to_all(static, values)
    return lax.all_gather(values, static.roles.ep, axis=0, tiled=True) if static.roles.ep else values


def send_rows(static: ExchangeSpec, x, sent):
    """`send` of rows, quantized on the wire where `static.wire` says so."""
    if static.wire is None or not static.roles.ep:
        return send(static, x, sent)
    q = quantize_local(x, static.wire, static.wire.row_block(x.ndim, "columns"))
    q = dataclasses.replace(q, data=send(static, q.data, sent), scale=send(static, q.scale, sent))
    return dequantize_local(q, x.dtype)


def combine_local(static: ExchangeSpec, rows, sent, tokens: int):
    """`combine` of one device; also the transpose of `send`."""
    with jax.named_scope("combine"):
        if static.transport == "all_to_all":
            back = _all_to_all(static, rows).astype(jnp.float32)
            return jnp.zeros((tokens, rows.shape[1]), jnp.float32).at[sent].add(back, mode="drop").astype(rows.dtype)
        if not static.roles.ep:
            return rows
        return lax.psum_scatter(rows, static.roles.ep, scatter_dimension=0, tiled=True)


def _all_to_all(static, values):
    return lax.all_to_all(values, static.roles.ep, 0, 0, tiled=True) if static.roles.ep else values


def _dispatch_shards(static: ExchangeSpec, layout, x, experts, weights):
    r = dispatch_local(static, x, experts, weights)
    results = (r.rows, r.experts, r.weights, r.count, r.dropped)
    return results if r.slots is None else (*results, r.slots)


def _tokens_contract(results: int):
    def contract(static: ExchangeSpec, operands, found):
        leading = spec(static.roles.tokens)
        return Contract(jax.tree.map(lambda _: leading, operands), (leading,) * results, ((),) * results)

    return contract


def _dispatch_contract(static: ExchangeSpec, operands, found):
    return _tokens_contract(5 + (static.transport == "all_to_all"))(static, operands, found)


_dispatch_op = Partitioned(
    _dispatch_shards,
    _dispatch_contract,
    lambda static, operands: (("t h", "t k", "t k"), ("r h", "r k", "r k")),
    name="dispatch",
)
_combine_op = Partitioned(
    lambda static, layout, rows, sent: (combine_local(static, rows, sent, static.slots),),
    _tokens_contract(1),
    lambda static, operands: (("r h", "s")[: 1 + (operands[1] is not None)], ("t h",)),
    name="combine",
)
_send_op = Partitioned(
    lambda static, layout, values, sent: (send_rows(static, values, sent),),
    _tokens_contract(1),
    lambda static, operands: (("t h", "s")[: 1 + (operands[1] is not None)], ("r h",)),
    name="send",
)
