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
THERE = 0  # the way to the peers in `SendPlan.places`
BACK = 1  # and the way back


class OneSided(Transport):
    """The transport `one_sided`. Its plan is a SendPlan."""

    note = "over the first GPUs of the machine, within one process"
    portable = False

    def plan(self, static: ExchangeSpec, experts, index) -> Planned:
        tokens, top_k = experts.shape
        ep = static.axes.ep
        slot, until, dropped = number_slots(static, experts, index)
        # The ranks gather all of `until` and then take its last column. To take the column first would be one more
        # kernel, and the additional bytes take no longer.
        wanted = lax.all_gather(until, ep)[..., -1]

        def rows_of_round(rows):
            later = jnp.minimum(rows, static.capacity) - index * static.slots
            return jnp.clip(later, 0, static.slots)

        sent = rows_of_round(until[:, -1])
        sent_by_pair = rows_of_round(wanted)
        entries = tokens * min(top_k, static.ranks)
        plan = plan_sends(slot, sent, sent_by_pair, lax.axis_index(ep), entries)
        return Planned(plan, dropped, count_rounds(static, wanted))

    def send(self, static: ExchangeSpec, rows, narrow: Sequence, sent: Sent) -> Arrived:
        """Sends the rows in one pass of one kernel, with the narrow arrays as one row of words beside each row."""
        out_rows = static.ranks * static.slots
        # The last number of the plan is how many rows arrive. To take it alone would be one more kernel.
        ends = sent.places.reshape(-1)
        if not narrow:
            (rows,) = self._put(static, [rows], sent.token, sent.places, THERE, out_rows)
            return Arrived(rows, [], ends)
        words = jnp.concatenate([_to_words(v) for v in narrow], axis=1)
        rows, words = self._put(static, [rows, words], sent.token, sent.places, THERE, out_rows)
        return Arrived(rows, split_words(words, narrow), ends)

    def combine(self, static: ExchangeSpec, arrays: Sequence, sent: Sent) -> list:
        """Returns the rows in one pass of one kernel and sums them in float32. It reads no other row."""
        returned = self._put(static, arrays, None, sent.places, BACK, sent.token.shape[0])
        with jax.named_scope("sum"):
            return [self.peers.gather_sum(_pad(rows), sent.position)[:, : rows.shape[1]] for rows in returned]

    def why_not(self, view: MeshView | None, row_bytes: int | None) -> str | None:
        if find_peer_kernels() is None:
            return "this installation has no kernels that write into the memory of another device"
        rows_travel = view is None or view.axes.ep
        reason = why_not_peers(row_bytes if rows_travel else None)
        if reason is None and view is not None and view.nested:
            return "it cannot run inside a shard_map over other axes; take all axes of the mesh into it, or none"
        return reason

    def cost(self, static: ExchangeSpec, top_k: int, step: str, moved: Sequence[Transfer]) -> list[Transfer]:
        ranks = static.ranks
        axes = static.axes
        columns = [(transfer.shape[1], transfer.dtype) for transfer in moved]
        if step in ("dispatch", "combine_grad") and len(columns) > 1:
            # `send` makes words of the narrow arrays.
            wide, *narrow = columns
            words = sum(_words(width, jnp.dtype(dtype)) for width, dtype in narrow)
            columns = [wide, (words, "int32")]
        pair = min(static.slots, balanced_rows(static.tokens, top_k, ranks, static.num_experts))
        puts = []
        for width, dtype in columns:
            row_bytes = align_up(width * jnp.dtype(dtype).itemsize, COPY_BYTES)
            sent_bytes = (ranks - 1) * pair * row_bytes
            puts.append(Transfer("put", dtype, (ranks * pair, width), axes.ep, ranks, sent_bytes))
        if step != "dispatch":
            return puts
        counts = ranks, ranks, -(-static.tokens // 32)
        return [collective("all-gather", "int32", counts, axes, axes.ep), *puts]

    @property
    def peers(self):
        """The implementation whose kernels write into the memory of other devices."""
        return implementation(find_peer_kernels() or DEFAULT)

    def _put(
        self,
        static: ExchangeSpec,
        arrays: Sequence,
        source,
        places,
        way: int,
        out_rows: int,
    ) -> list:
        """Runs `put_rows` for arrays of any width: rows are padded to whole 16 bytes, and the padding is cut off."""
        axes = tuple((name, static.axes.size((name,))) for name in static.axes.ep)
        arrived = self.peers.put_rows(
            [_pad(v) for v in arrays],
            source,
            places,
            way,
            out_rows,
            axes,
        )
        return [rows[:, : v.shape[1]] for rows, v in zip(arrived, arrays, strict=True)]


def plan_sends(
    slot: Int[Array, "T ranks"],
    sent,
    counts: Int[Array, "ranks ranks"],
    rank,
    entries: int,
) -> SendPlan:
    """Returns the SendPlan of one rank. Each row comes back to the place that it was sent from.

    Rank 0 of 2 has tokens 0, 1, 2 that want ranks {0, 1}, {1}, {0}, so its `slot` is (0, 0), (T, 1), (1, T). Rank 1
    sends 1 row to rank 0 and none to itself, so `counts` is ((2, 2), (1, 0)). Then rank 0 sends `token` = (0, 2, 0, 1),
    and `position` is (0, 2), (C, 3), (1, C). No rank before rank 0 sends to rank 1, so the two rows for rank 1 are
    there from row 0 on: rows 2 and 3 of what rank 0 sends shift by -2.

    Args:
      slot: as `find_slots` numbers them. A token whose slot is at or past `sent` of a rank does not go there.
      sent: [ranks] i32, how many rows this rank sends to each rank. It equals `counts[rank]`, but is local, so that
        consumers need not wait for the all-gather.
      counts: how many rows go from rank (dim 0) to rank (dim 1).
      rank: [] i32, this rank.
      entries: C, the most rows that this rank can send.
    """
    end = jnp.cumsum(sent)
    start = end - sent
    position = jnp.where(slot < sent[None], start[None] + slot, entries)
    which = lax.broadcasted_iota(jnp.int32, position.shape, 0)
    token = lax.empty((entries,), jnp.int32).at[position].set(which, mode="drop")

    received = counts[:, rank]
    last = jnp.cumsum(received)
    arrive = jnp.cumsum(counts, axis=0) - counts
    leave = jnp.cumsum(counts, axis=1) - counts
    # A shift is the first row of a pair of ranks on the receiving rank, less its first row on the sending rank.
    shift_there = arrive[rank] - start
    shift_back = leave[:, rank] - (last - received)
    places = jnp.stack([shift_there, end, shift_back, last]).reshape(2, 2, -1)
    return SendPlan(token, position, places)


def split_words(words, like: Sequence) -> list:
    """Returns the arrays that the words [R, V] hold side by side, with the widths and dtypes of the arrays of `like`.

    Three i32 ids and 5 scales of one byte are V = 3 + 2 words; the last three bytes of a row are padding.
    """
    parts = []
    start = 0
    for v in like:
        end = start + _words(v.shape[1], v.dtype)
        values = lax.bitcast_convert_type(words[:, start:end], v.dtype)
        parts.append(values.reshape(words.shape[0], -1)[:, : v.shape[1]])
        start = end
    return parts


def _words(width: int, dtype) -> int:
    """Returns the number of words that a row of `width` elements takes."""
    return -(-width * dtype.itemsize // WORD)


def _pad(v):
    """Returns v, with columns of zeros up to rows of whole 16 bytes: a bulk copy moves multiples of 16 bytes."""
    elements = COPY_BYTES // v.dtype.itemsize
    return jnp.pad(v, ((0, 0), (0, -v.shape[1] % elements)))


def _to_words(v):
    """Returns the bytes of v [T, C], of 4 bytes or 1 byte an element, as words [T, V] i32."""
    if v.dtype.itemsize == WORD:
        return lax.bitcast_convert_type(v, jnp.int32)
    v = jnp.pad(v, ((0, 0), (0, -v.shape[1] % WORD)))
    return lax.bitcast_convert_type(v.reshape(v.shape[0], -1, WORD), jnp.int32)
