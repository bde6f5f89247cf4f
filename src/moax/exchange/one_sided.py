"""one_sided: each rank writes its rows into the memory of the ranks that own their experts, and writes sums back.

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

from moax.backend import COPY_BYTES, why_not_peers
from moax.exchange.slots import (
    balanced_rows,
    count_dropped,
    find_owners,
    find_slots,
    plan_sends,
    rounds_of_pairs,
    rows_of_round,
    slots_of_round,
)
from moax.exchange.transport import Arrived, Columns, ExchangeSpec, Planned, Sent, Step, Transfer, Transport, collective
from moax.kernels import DEFAULT, find_peer_kernels, implementation
from moax.mesh.specs import MeshView

WORD = 4  # the bytes of a word


class OneSided(Transport):
    """The transport `one_sided`. Its plan is a SendPlan."""

    note = "over the first GPUs of the machine, within one process"
    portable = False

    def plan(self, static: ExchangeSpec, experts, index=0) -> Planned:
        (tokens, top_k), ranks, slots, ep = experts.shape, static.ranks, static.slots, static.axes.ep
        owner = find_owners(experts, static)
        slot, until = find_slots(owner, ranks)
        # The ranks gather all of `until` and then take its last column. To take the column first would be one more
        # kernel, and the additional bytes take no longer.
        wanted = lax.all_gather(until, ep)[..., -1]
        sent, kept = (rows_of_round(rows, static, index) for rows in (until[:, -1], wanted))
        now = slots_of_round(slot, index, slots)
        plan = plan_sends(now, sent, kept, lax.axis_index(ep), tokens * min(top_k, ranks))
        return Planned(plan, count_dropped(owner, slot, static.capacity), rounds_of_pairs(wanted, static))

    def send(self, static: ExchangeSpec, rows, narrow: Sequence, sent: Sent) -> Arrived:
        """Sends the rows in one pass of one kernel, with the narrow arrays as one row of words beside each row."""
        words = [jnp.concatenate([_to_words(v) for v in narrow], axis=1)] if narrow else []
        received = static.ranks * static.slots
        rows, *arrived = self._put(static, [rows, *words], sent.token, sent.places, 0, received)
        ends = sent.places.reshape(-1)
        if not narrow:
            return Arrived(rows, [], None, ends)
        return Arrived(rows, split_words(arrived[0], narrow), arrived[0], ends)

    def combine(self, static: ExchangeSpec, arrays: Sequence, sent: Sent) -> list:
        """Returns the rows in one pass of one kernel and sums them in float32. It reads no other row."""
        returned = self._put(static, arrays, None, sent.places, 1, sent.token.shape[0])
        with jax.named_scope("sum"):
            return [self.gather_sum(_pad(rows), sent.position)[:, : rows.shape[1]] for rows in returned]

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
        moved = []
        for width, dtype in columns:
            size = width * jnp.dtype(dtype).itemsize
            size += -size % COPY_BYTES
            moved.append(Transfer("put", dtype, (ranks * pair, width), axes.ep, ranks, (ranks - 1) * pair * size))
        return moved

    def put_rows(self, arrays: Sequence, source, places, way: int, out_rows: int, axes) -> tuple:
        """out[i + shift[p]] on rank p = x[source[i]] for end[p - 1] <= i < end[p], for each array x; see the kernel."""
        return implementation(find_peer_kernels() or DEFAULT).put_rows(arrays, source, places, way, out_rows, axes)

    def gather_sum(self, rows, position):
        """y[t] = sum over k of rows[position[t, k]] in float32; a position past the last row adds nothing."""
        return implementation(find_peer_kernels() or DEFAULT).gather_sum(rows, position)

    def _put(self, static: ExchangeSpec, arrays: Sequence, source, places, way: int, out_rows: int) -> list:
        """Runs `put_rows` for arrays of any width: rows are padded to whole 16 bytes, and the padding is cut off."""
        axes = tuple((name, static.axes.size((name,))) for name in static.axes.ep)
        arrived = self.put_rows([_pad(v) for v in arrays], source, places, way, out_rows, axes)
        return [rows[:, : v.shape[1]] for rows, v in zip(arrived, arrays, strict=True)]


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
