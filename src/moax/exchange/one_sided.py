"""The transport `one_sided`: each rank writes its rows into the memory of the ranks that own their experts.

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

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from moax.exchange.transport import (
    Arrived,
    ExchangeSpec,
    Planned,
    Sent,
    Transfer,
    Transport,
    balanced_rows,
    collective,
    count_rounds,
    number_slots,
)
from moax.kernels import DEFAULT, find_peer_kernels, implementation
from moax.kernels.device import COPY_BYTES, why_not_peers
from moax.kernels.groups import align_up
from moax.mesh.specs import MeshView
from moax.types import SendPlan

WORD = 4  # the bytes of a word


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

    def cost(self, static: ExchangeSpec, top_k: int, step: str, moved: Sequence[Transfer]) -> list[Transfer]:
        ranks, axes, columns = static.ranks, static.axes, [(t.shape[1], t.dtype) for t in moved]
        if step in ("dispatch", "combine_grad") and len(columns) > 1:  # `send` makes words of the narrow arrays
            columns = [columns[0], (sum(_words(width, jnp.dtype(dtype)) for width, dtype in columns[1:]), "int32")]
        pair = min(static.slots, balanced_rows(static.tokens, top_k, ranks, static.num_experts))
        sent = [(ranks - 1) * pair * align_up(width * jnp.dtype(of).itemsize, COPY_BYTES) for width, of in columns]
        puts = [
            Transfer("put", dtype, (ranks * pair, width), axes.ep, ranks, size)
            for (width, dtype), size in zip(columns, sent, strict=True)
        ]
        words = ranks, ranks, -(-static.tokens // 32)
        return [collective("all-gather", "int32", words, axes, axes.ep), *puts] if step == "dispatch" else puts

    @property
    def peers(self):
        """The implementation whose kernels write into the memory of other devices."""
        return implementation(find_peer_kernels() or DEFAULT)

    def _put(self, static: ExchangeSpec, arrays: Sequence, source, places, way: int, out_rows: int) -> list:
        """Runs `put_rows` for arrays of any width: rows are padded to whole 16 bytes, and the padding is cut off."""
        axes = tuple((name, static.axes.size((name,))) for name in static.axes.ep)
        arrived = self.peers.put_rows([_pad(v) for v in arrays], source, places, way, out_rows, axes)
        return [rows[:, : v.shape[1]] for rows, v in zip(arrived, arrays, strict=True)]


def plan_sends(slot: Int[Array, "T ranks"], sent, kept: Int[Array, "ranks ranks"], rank, entries: int) -> SendPlan:
    """Returns the SendPlan of one rank. Each row comes back to the place that it was sent from.

    Rank 0 of 2 has tokens 0, 1, 2 that want ranks {0, 1}, {1}, {0}, so its `slot` is (0, 0), (T, 1), (1, T). Rank 1
    sends 1 row to rank 0 and none to itself, so `kept` is ((2, 2), (1, 0)). Then rank 0 sends `token` = (0, 2, 0, 1),
    and `position` is (0, 2), (C, 3), (1, C). No rank before rank 0 sends to rank 1, so the two rows for rank 1 are
    there from row 0 on: rows 2 and 3 of what rank 0 sends shift by -2.

    Args:
      slot: as `find_slots` numbers them. A token whose slot is at or past `sent` of a rank does not go there.
      sent: [ranks] i32, how many rows this rank sends to each rank. It equals `kept[rank]`, but is local, so that
        consumers need not wait for the all-gather.
      kept: how many rows go from rank (dim 0) to rank (dim 1).
      rank: [] i32, this rank.
      entries: C, the most rows that this rank can send.
    """
    end = jnp.cumsum(sent)
    start = end - sent
    position = jnp.where(slot < sent[None], start[None] + slot, entries)
    which = lax.broadcasted_iota(jnp.int32, position.shape, 0)
    token = lax.empty((entries,), jnp.int32).at[position].set(which, mode="drop")

    received = kept[:, rank]
    last, arrive, leave = jnp.cumsum(received), jnp.cumsum(kept, axis=0) - kept, jnp.cumsum(kept, axis=1) - kept
    # A shift is the first row of a pair of ranks on the receiving rank, less its first row on the sending rank.
    shift_there, shift_back = arrive[rank] - start, leave[:, rank] - (last - received)
    return SendPlan(token, position, jnp.stack([shift_there, end, shift_back, last]).reshape(2, 2, -1))


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
