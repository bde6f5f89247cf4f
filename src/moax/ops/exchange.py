"""Exchange: tokens to the ranks that own their experts, and sums of what those computed back to the tokens.

    dispatch: rows[r] = x[t] on every rank that owns one of t's experts, once
    combine:  y[t] = sum over ranks of rows[r(t, rank)]

Each is the other's transpose, so the vjp of one is the other. Three transports deliver the same `Received`:

    all_gather   every token to every rank of ep; R = T * ranks; combine is a reduce-scatter. Drops nothing.
    all_to_all   `slots` rows for each pair of ranks, empty ones included; R = slots * ranks. What does not fit is
                 counted in `Received.dropped`, in assignments (token, expert).
    one_sided    as all_to_all, but ranks write the rows that there are into their peers' memory: `one_sided.py`.

With `wire`, rows travel quantized (in dispatch, forward and backward; sums travel in the dtype of the rows). Only this
file and partition.py call collectives; what one_sided moves, a kernel writes.
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

from moax.backend import why_not_peers
from moax.errors import Unsupported
from moax.kernels import implementation, select_kernels
from moax.kernels.xla.quantization import dequantize as dequantize_local
from moax.mesh.axes import Axes, Roles
from moax.mesh.partition import Contract, Partitioned, View, find_view
from moax.mesh.specs import spec
from moax.ops import one_sided
from moax.options import Engine
from moax.recipe import Format
from moax.types import Received, SendPlan

Chosen = Literal["all_gather", "all_to_all", "one_sided"]
Transport = Literal["auto", "all_gather", "all_to_all", "one_sided"]
TRANSPORTS = ("auto", "all_gather", "all_to_all", "one_sided")


@dataclasses.dataclass(frozen=True)
class ExchangeSpec:
    """transport; num_experts: E of the whole mesh; slots: rows for each pair of ranks (not of all_gather);
    wire: format of rows on their way, None for their own dtype; tokens: of a shard (of `combine`); kernels: what
    quantizes; sms: of one_sided, None for as many as it takes."""

    transport: str
    num_experts: int
    roles: Roles
    slots: int = 0
    wire: Format | None = None
    tokens: int = 0
    kernels: str = "xla"
    sms: int | None = None

    @property
    def ranks(self) -> int:
        return self.roles.size(self.roles.ep)


def select_transport(exchange: str, view: View | None = None, row_bytes: int | None = None) -> Chosen:
    """The transport of a name; `auto` is all_gather, and so is `one_sided` where nothing moves.

    Args:
      exchange: the name.
      view: of the mesh that it is for, and row_bytes: of a row that is to travel. None asks for this machine.

    Raises ValueError for an unknown name, and Unsupported for `one_sided` where kernels cannot write into the memory of
    all devices of the mesh.
    """
    if exchange not in TRANSPORTS:
        raise ValueError(f"exchange={exchange!r} must be one of {', '.join(map(repr, TRANSPORTS))}")
    if exchange != "one_sided":
        return "all_gather" if exchange == "auto" else exchange
    why = why_not_peers(row_bytes if view is None or view.roles.ep else None)
    if why is None and view is not None and view.nested:
        why = "it cannot run inside a shard_map over other axes; take all axes of the mesh into it, or none"
    if why is not None:
        raise Unsupported(f"exchange='one_sided': {why}; use 'all_gather' or 'all_to_all'")
    return "one_sided" if view is None or view.roles.ep else "all_gather"


def wire_bytes(x, wire: Format | None = None) -> int:
    """Bytes of a row of x on its way."""
    return x.shape[-1] * (1 if wire is not None else x.dtype.itemsize)


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
      capacity_factor: bounds the slots of all_to_all and of one_sided; None drops nothing.
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
    transport = select_transport(exchange, view, wire_bytes(x, wire))
    slots = slots_per_pair(tokens, experts.shape[1], roles.size(roles.ep), capacity_factor)
    kernels = "xla" if wire is None else select_kernels("auto", x.dtype, width=x.shape[1])
    static = ExchangeSpec(transport, num_experts, roles, slots, wire, tokens, kernels)
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
    transport = select_transport(received.transport, view, wire_bytes(rows))
    shards = 1 if view.manual else view.roles.size(view.roles.tokens)
    slots = rows.shape[0] // (shards * view.roles.size(view.roles.ep))
    static = ExchangeSpec(transport, 0, view.roles, slots, tokens=received.num_tokens)
    return _combine(view, static, *_combine_op.lay(view, static, rows, received.slots))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dispatch(view: View, static: ExchangeSpec, x, experts, weights):
    results = _dispatch_op(view, static, x, experts, weights)
    return (*results, None) if static.transport == "all_gather" else results


def _dispatch_fwd(view, static, x, experts, weights):
    results = _dispatch(view, static, x, experts, weights)
    return results, (results[-1], results[1] < static.num_experts // static.ranks)


def _dispatch_bwd(view, static, residuals, cotangents):
    sent, mine = residuals
    d_weights = jnp.where(mine, cotangents[2], 0.0)
    return _combine(view, static, cotangents[0], sent), None, _combine(view, static, d_weights, sent)


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _combine(view: View, static: ExchangeSpec, rows, sent):
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
        if static.transport != "all_gather":
            sent, dropped = assign_slots(static, experts)
        others = (experts - nobody, weights)  # an empty slot holds 0, so it is nobody's
        rows, ids, weights = send_with(static, x, others, sent)
        ids = ids + nobody
        first = lax.axis_index(static.roles.ep) * local_experts if static.roles.ep else 0
        mine = (ids >= first) & (ids < first + local_experts)
        if isinstance(sent, SendPlan):
            mine &= (jnp.arange(ids.shape[0], dtype=jnp.int32) < sent.received)[:, None]
        local = jnp.where(mine, ids - first, local_experts).astype(jnp.int32)
        weights = jnp.where(mine, weights, 0.0)
        count = sent.received if isinstance(sent, SendPlan) else mine.any(-1).sum(dtype=jnp.int32)
    return Received(rows, local, weights, count[None], dropped, sent, static.transport, x.shape[0])


def assign_slots(static: ExchangeSpec, experts):
    """Which token goes in each slot for each rank, in order of tokens: [ranks * slots], T for none, or a SendPlan; and
    how many assignments found no slot."""
    (tokens, top_k), ranks, slots = experts.shape, static.ranks, static.slots
    owner = lax.div(experts, jnp.full_like(experts, static.num_experts // ranks))
    slot, until = find_slots(owner, ranks)
    rank, dropped = jnp.arange(ranks, dtype=jnp.int32), jnp.zeros(1, jnp.int32)
    if slots < tokens:
        lost = (owner[..., None] == rank[None, None]) & (slot >= slots)[:, None]
        dropped = lost.sum(dtype=jnp.int32)[None]
    if static.transport == "one_sided":
        # All of `until`, whose ends are what everyone must know: that is a kernel less, and so few bytes are no slower.
        kept = jnp.minimum(lax.all_gather(until, static.roles.ep)[..., -1], slots)
        sent, here = jnp.minimum(until[:, -1], slots), lax.axis_index(static.roles.ep)
        return one_sided.plan_sends(slot, sent, kept, here, tokens * min(top_k, ranks)), dropped
    empty = jnp.full((ranks, slots), tokens, jnp.int32)
    sent = empty.at[rank[None], slot].set(jnp.arange(tokens, dtype=jnp.int32)[:, None], mode="drop").reshape(-1)
    return sent, dropped


def find_slots(owner: Int[Array, "T K"], ranks: int) -> tuple[Int[Array, "T ranks"], Int[Array, "ranks W"]]:
    """How many tokens before this one want each rank, T where it does not itself; and how many do until the end of each
    32 tokens. owner: ranks that each token wants, any number of times; what is not in [0, ranks) is none.

    Whether a token wants a rank is a bit. Those of 32 tokens are a word, so that what comes before a token is a count
    of words, few enough to compare each with each, and of bits of its own: no scan along the tokens, which is several
    kernels where this is two, and what follows is elementwise.
    """
    tokens, top_k = owner.shape
    words = jnp.pad(owner, ((0, -tokens % 32), (0, 0)), constant_values=ranks).reshape(1, -1, 32 * top_k)
    bit = jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32)
    mine = words == jnp.arange(ranks, dtype=jnp.int32)[:, None, None]
    bits = lax.reduce_or(jnp.where(mine, jnp.repeat(bit, top_k)[None, None], jnp.uint32(0)), axes=(2,))
    count = lambda bits: lax.population_count(bits).astype(jnp.int32)  # noqa: E731
    word = jnp.arange(bits.shape[1], dtype=jnp.int32)
    earlier = (word[:, None] >= word[None])[None]
    until = jnp.where(earlier, count(bits)[:, None], 0).sum(-1, dtype=jnp.int32)
    own, bit = bits.T[:, None], bit[None, :, None]
    slot = until.T[:, None] - count(own & ~(bit - 1))
    return jnp.where((own & bit) != 0, slot, tokens).reshape(-1, ranks)[:tokens], until


def send(static: ExchangeSpec, values, others, sent):
    """Values of this rank's tokens [T, C], and each of the narrow others, to where their rows went: [R, C]. Empty slots
    hold 0; under one_sided rows past the last one hold anything."""
    if static.transport == "one_sided":
        got = one_sided.send_rows(values, others, sent, static.ranks * static.slots, static.roles, static.sms)
        return [got[0], *one_sided.split_words(got[1], others)] if others else got
    if static.transport == "all_to_all":
        take = lambda v: jnp.take(v, sent, axis=0, mode="fill", fill_value=0)  # noqa: E731
        return [_all_to_all(static, take(v)) for v in (values, *others)]
    gather = lambda v: lax.all_gather(v, static.roles.ep, axis=0, tiled=True)  # noqa: E731
    return [gather(v) if static.roles.ep else v for v in (values, *others)]


def send_with(static: ExchangeSpec, x, others, sent):
    """`send` of rows, quantized on the wire where `static.wire` says so, and of narrow values as they are."""
    if static.wire is None or not static.roles.ep:
        return send(static, x, others, sent)
    local, received = implementation(static.kernels), static.ranks * static.slots
    q = local.quantize(x, static.wire, static.wire.row_block(2, "columns"))
    others = (q.scale, *others)
    if static.transport == "one_sided" and q.scale.dtype == jnp.float32:
        data, words = one_sided.send_rows(q.data, others, sent, received, static.roles, static.sms)
        rows = local.dequantize_wire(data, words, sent.places.reshape(-1), static.wire, x.dtype)
        return [rows, *one_sided.split_words(words, others)[1:]]
    data, scale, *others = send(static, q.data, others, sent)
    return [dequantize_local(dataclasses.replace(q, data=data, scale=scale), x.dtype), *others]


def send_rows(static: ExchangeSpec, x, sent):
    """Rows of this rank's tokens to where `dispatch` sent them."""
    return send_with(static, x, (), sent)[0]


def combine_local(static: ExchangeSpec, rows, sent, tokens: int):
    """`combine` of one device; also the transpose of `send`."""
    return combine_arrays(static, (rows,), sent, tokens)[0]


def combine_arrays(static: ExchangeSpec, arrays, sent, tokens: int) -> list:
    """`combine_local` of each array; under one_sided in one pass."""
    with jax.named_scope("combine"):
        if static.transport == "one_sided":
            return one_sided.combine_rows(arrays, sent, static.roles, static.sms)
        return [_combine_array(static, rows, sent, tokens) for rows in arrays]


def _combine_array(static, rows, sent, tokens):
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
    return _tokens_contract(5 + (static.transport != "all_gather"))(static, operands, found)


def _own_dims(sent):
    """Of a Shardy rule: what was sent where has dims of its own."""
    return ("",) * len(jax.tree.leaves(sent))


_dispatch_op = Partitioned(
    _dispatch_shards,
    _dispatch_contract,
    lambda static, operands: (("t h", "t k", "t k"), ("r h", "r k", "r k")),
    name="dispatch",
)
_combine_op = Partitioned(
    lambda static, layout, rows, sent: (combine_local(static, rows, sent, static.tokens),),
    _tokens_contract(1),
    lambda static, operands: (("r h", *_own_dims(operands[1])), ("t h",)),
    name="combine",
)
_send_op = Partitioned(
    lambda static, layout, values, sent: (send_rows(static, values, sent),),
    _tokens_contract(1),
    lambda static, operands: (("t h", *_own_dims(operands[1])), ("r h",)),
    name="send",
)


dispatch_forward = dispatch_local


def dispatch_backward(static, sent, d_rows, d_weights, tokens):
    return combine_arrays(static, (d_rows, d_weights), sent, tokens)


combine_forward = combine_local


def combine_backward(static, dy, sent):
    return send_rows(static, dy, sent)
