"""The transports, and how the name that a user gives becomes one of them.

all_gather: every token goes to every rank of ep, and a reduce-scatter sums the rows back.

    dispatch   rows[s T + t] = x[t] of rank s          R = T * ranks
    combine    y[t] of rank s = sum over ranks of rows[s T + t]

With 2 ranks and T = 3, token 1 of rank 1 is row 4 on both ranks. Every token has a row, so nothing is dropped.

all_to_all: each pair of ranks exchanges `slots` rows, empty slots included.

    dispatch   rows[s slots + n] on rank r = x[token in slot n of rank s for rank r]          R = slots * ranks
    combine    y[t] = sum over ranks of the rows that came back from the slots of t

With 2 ranks and 2 slots, a rank whose tokens 0, 1, 2 want ranks {0, 1}, {1}, {1} has the plan (0, 3, 0, 1): T = 3 marks
an empty slot, and token 2 has no slot. `capacity_factor` sets the number of slots and drops token 2. Without a factor
nothing is dropped: in the block token 2 travels in the next round, and `dispatch` has slots = T.

one_sided: each rank writes its rows into the memory of the ranks that own their experts, and writes sums back.

    dispatch   rows[i + shift] on the rank that row i goes to = x[token[i]]
    combine    returned[r + shift] on the rank that row r came from = rows[r]
               y[t] = sum over ranks of returned[position[t, rank]]

A rank sends its rows in order of the ranks they go to, then of tokens. A rank receives rows in order of the ranks they
come from, then of tokens. So the rows of one pair of ranks are neighbours at both ends, and one number, the shift,
says where they go. If ranks 0 and 1 send 5 and 7 rows to rank 1, and rank 1 sends rank 0 its first 4 rows, then rows
4, 5, ... of rank 1 are for itself: they begin at row 5, and their shift is 1. `plan_sends` makes the plan of both
ways.

On the way back, a rank writes into the memory of the rank that owns the tokens, which then sums in float32. The owner
could read the rows from its peers instead, but a read waits for its answer and a write waits for nothing. The price of
writing is one more pass over the owner's memory, which is ten times as fast as the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from moax.backend import COPY_BYTES, why_not_peers
from moax.checks import Unsupported
from moax.exchange.transport import (
    Arrived,
    Columns,
    ExchangeSpec,
    Planned,
    Sent,
    Step,
    Transfer,
    Transport,
    balanced_rows,
    collective,
    count_rounds,
    number_slots,
    plan_sends,
)
from moax.kernels import DEFAULT, find_peer_kernels, implementation
from moax.kernels.groups import align_up
from moax.mesh.axes import ResolvedAxes
from moax.mesh.specs import MeshView

WORD = 4  # the bytes of a word


class AllGather(Transport):
    """The transport `all_gather`. It has no slots, so its plan is None."""

    note = "drops nothing on the way"
    has_slots = False

    def plan(self, static: ExchangeSpec, experts, index=0) -> Planned:
        return Planned(None, jnp.zeros(1, jnp.int32), jnp.ones((), jnp.int32))

    def send(self, static: ExchangeSpec, rows, narrow: Sequence, sent: Sent) -> Arrived:
        ep = static.axes.ep if rows.shape[0] else ()  # XLA gathers no array of no rows
        rows, *narrow = (lax.all_gather(v, ep, axis=0, tiled=True) if ep else v for v in (rows, *narrow))
        return Arrived(rows, narrow)

    def combine(self, static: ExchangeSpec, arrays: Sequence, sent: Sent) -> list:
        ep = static.axes.ep if static.tokens else ()
        return [lax.psum_scatter(rows, ep, scatter_dimension=0, tiled=True) if ep else rows for rows in arrays]

    def cost(self, static: ExchangeSpec, top_k: int, step: Step, columns: Columns) -> list[Transfer]:
        kind, ranks = ("reduce-scatter", 1) if step == "combine" else ("all-gather", static.ranks)
        rows, axes = static.tokens * ranks, static.axes
        return [collective(kind, dtype, (rows, width), axes, axes.ep) for width, dtype in columns]


class AllToAll(Transport):
    """The transport `all_to_all`. Its plan is [ranks * slots] i32: the token in each slot, T for an empty one."""

    note = "bounded by buffer_factor and capacity_factor"

    def plan(self, static: ExchangeSpec, experts, index=0) -> Planned:
        tokens, ranks = experts.shape[0], static.ranks
        slot, until, dropped = number_slots(static, experts, index)
        rank, token = jnp.arange(ranks, dtype=jnp.int32), jnp.arange(tokens, dtype=jnp.int32)
        empty = jnp.full((ranks, static.slots), tokens, jnp.int32)
        sent = empty.at[rank[None], slot].set(token[:, None], mode="drop").reshape(-1)
        return Planned(sent, dropped, count_rounds(static, until[:, -1]))

    def send(self, static: ExchangeSpec, rows, narrow: Sequence, sent: Sent) -> Arrived:
        filled = [jnp.take(v, sent, axis=0, mode="fill", fill_value=0) for v in (rows, *narrow)]
        rows, *narrow = (_swap(static, v) for v in filled)
        return Arrived(rows, narrow)

    def combine(self, static: ExchangeSpec, arrays: Sequence, sent: Sent) -> list:
        def add(rows):
            back = _swap(static, rows).astype(jnp.float32)
            zero = jnp.zeros((static.tokens, rows.shape[1]), jnp.float32)
            return zero.at[sent].add(back, mode="drop").astype(rows.dtype)

        return [add(rows) for rows in arrays]

    def cost(self, static: ExchangeSpec, top_k: int, step: Step, columns: Columns) -> list[Transfer]:
        rows, axes = static.slots * static.ranks, static.axes
        return [collective("all-to-all", dtype, (rows, width), axes, axes.ep) for width, dtype in columns]


class OneSided(Transport):
    """The transport `one_sided`. Its plan is a SendPlan."""

    note = "over the first GPUs of the machine, within one process"
    portable = False

    def plan(self, static: ExchangeSpec, experts, index=0) -> Planned:
        (tokens, top_k), ep = experts.shape, static.axes.ep
        slot, until, dropped = number_slots(static, experts, index)
        # The ranks gather all of `until` and then take its last column. To take the column first would be one more
        # kernel, and the additional bytes take no longer.
        wanted = lax.all_gather(until, ep)[..., -1]
        sent, kept = (
            jnp.clip(jnp.minimum(rows, static.capacity) - index * static.slots, 0, static.slots)
            for rows in (until[:, -1], wanted)
        )
        plan = plan_sends(slot, sent, kept, lax.axis_index(ep), tokens * min(top_k, static.ranks))
        return Planned(plan, dropped, count_rounds(static, wanted))

    def send(self, static: ExchangeSpec, rows, narrow: Sequence, sent: Sent) -> Arrived:
        """Sends the rows in one pass of one kernel, with the narrow arrays as one row of words beside each row."""
        wide = [rows, *([jnp.concatenate([_to_words(v) for v in narrow], axis=1)] if narrow else [])]
        rows, *words = self._put(static, wide, sent.token, sent.places, 0, static.ranks * static.slots)
        found = split_words(words[0], narrow) if narrow else []
        return Arrived(rows, found, words[0] if narrow else None, sent.places.reshape(-1))

    def combine(self, static: ExchangeSpec, arrays: Sequence, sent: Sent) -> list:
        """Returns the rows in one pass of one kernel and sums them in float32. It reads no other row."""
        returned = self._put(static, arrays, None, sent.places, 1, sent.token.shape[0])
        with jax.named_scope("sum"):
            return [self.peers.gather_sum(_pad(rows), sent.position)[:, : rows.shape[1]] for rows in returned]

    def why_not(self, view: MeshView | None, row_bytes: int | None) -> str | None:
        if find_peer_kernels() is None:
            return "this installation has no kernels that write into the memory of another device"
        why = why_not_peers(row_bytes if view is None or view.axes.ep else None)
        if why is None and view is not None and view.nested:
            return "it cannot run inside a shard_map over other axes; take all axes of the mesh into it, or none"
        return why

    def cost(self, static: ExchangeSpec, top_k: int, step: Step, columns: Columns) -> list[Transfer]:
        ranks, axes = static.ranks, static.axes
        if step == "plan":
            return [collective("all-gather", "int32", (ranks, ranks, -(-static.tokens // 32)), axes, axes.ep)]
        if step == "send" and len(columns) > 1:
            columns = [columns[0], (sum(_words(width, jnp.dtype(dtype)) for width, dtype in columns[1:]), "int32")]
        pair = min(static.slots, balanced_rows(static.tokens, top_k, ranks, static.num_experts))
        sent = [(ranks - 1) * pair * align_up(width * jnp.dtype(of).itemsize, COPY_BYTES) for width, of in columns]
        return [
            Transfer("put", dtype, (ranks * pair, width), axes.ep, ranks, size)
            for (width, dtype), size in zip(columns, sent, strict=True)
        ]

    @property
    def peers(self):
        """The implementation whose kernels write into the memory of other devices."""
        return implementation(find_peer_kernels() or DEFAULT)

    def _put(self, static: ExchangeSpec, arrays: Sequence, source, places, way: int, out_rows: int) -> list:
        """Runs `put_rows` for arrays of any width: rows are padded to whole 16 bytes, and the padding is cut off."""
        axes = tuple((name, static.axes.size((name,))) for name in static.axes.ep)
        arrived = self.peers.put_rows([_pad(v) for v in arrays], source, places, way, out_rows, axes)
        return [rows[:, : v.shape[1]] for rows, v in zip(arrived, arrays, strict=True)]


Exchange = Literal["auto", "all_gather", "all_to_all", "one_sided"]  # "auto", and the keys of TRANSPORTS
EXCHANGES = get_args(Exchange)
TRANSPORTS: dict[str, Transport] = dict(all_gather=AllGather(), all_to_all=AllToAll(), one_sided=OneSided())
AUTO = "all_gather"  # `auto` means this transport, except in the block: see `moax.block.plan`


def find_transport(exchange: str, axes: ResolvedAxes | None = None) -> str:
    """Returns the name of the transport that `exchange` means; nothing is asked of this machine.

    `auto` is all_gather. Where ep of the mesh `axes` has one rank nothing travels, and all_gather takes the place of a
    transport that does not run everywhere. ValueError is raised where there is no transport of this name.
    """
    name = AUTO if exchange == "auto" else exchange
    if name not in TRANSPORTS:
        raise ValueError(f"exchange={exchange!r} must be one of {', '.join(map(repr, ('auto', *TRANSPORTS)))}")
    return AUTO if axes is not None and not axes.ep and not TRANSPORTS[name].portable else name


def select_transport(exchange: str, view: MeshView | None = None, row_bytes: int | None = None) -> str:
    """Returns the name of the transport that `exchange` means, and raises Unsupported where it cannot run.

    Where `view`, or `row_bytes` of a row that travels, is None, the question is about this machine alone.
    """
    name = find_transport(exchange)
    if (why := TRANSPORTS[name].why_not(view, row_bytes)) is not None:
        portable = " or ".join(repr(n) for n, transport in TRANSPORTS.items() if transport.portable)
        raise Unsupported(f"exchange={name!r}: {why}; use {portable}")
    return find_transport(name, None if view is None else view.axes)


def _swap(static: ExchangeSpec, values):
    """Slot n for rank r becomes slot n from rank r."""
    return lax.all_to_all(values, static.axes.ep, 0, 0, tiled=True) if static.axes.ep else values


def split_words(words, like: Sequence) -> list:
    """Returns the arrays that the words [R, V] hold side by side, with the widths and dtypes of the arrays of `like`.

    Three i32 ids and 5 scales of one byte are V = 3 + 2 words; the last three bytes of a row are padding.
    """
    first, parts = 0, []
    for v in like:
        last = first + _words(v.shape[1], v.dtype)
        values = lax.bitcast_convert_type(words[:, first:last], v.dtype)
        parts.append(values.reshape(words.shape[0], -1)[:, : v.shape[1]])
        first = last
    return parts


def _words(width: int, dtype) -> int:
    """Returns the number of words that a row of `width` elements takes."""
    return -(-width * dtype.itemsize // WORD)


def _pad(v):
    """Returns v, with columns of zeros up to rows of whole 16 bytes: a bulk copy moves multiples of 16 bytes."""
    return jnp.pad(v, ((0, 0), (0, -v.shape[1] % (COPY_BYTES // v.dtype.itemsize))))


def _to_words(v):
    """Returns the bytes of v [T, C], of 4 bytes or 1 byte an element, as words [T, V] i32."""
    if v.dtype.itemsize == WORD:
        return lax.bitcast_convert_type(v, jnp.int32)
    v = jnp.pad(v, ((0, 0), (0, -v.shape[1] % WORD)))
    return lax.bitcast_convert_type(v.reshape(v.shape[0], -1, WORD), jnp.int32)
