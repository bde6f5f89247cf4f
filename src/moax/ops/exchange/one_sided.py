"""one_sided: each rank writes its rows into the memory of the ranks that own their experts, and writes sums back.

    dispatch   rows[i + shift] on the rank that row i goes to = x[token[i]]
    combine    returned[r + shift] on the rank that row r came from = rows[r]
               y[t] = sum over ranks of returned[position[t, rank]]

A rank sends its rows in order of the ranks they go to, then of tokens. A rank receives rows in order of the ranks they
come from, then of tokens. So the rows of one pair of ranks lie side by side at both ends, and one number, the shift,
says where they go. If ranks 0 and 1 send 5 and 7 rows to rank 1, and rank 1 sends rank 0 its first 4 rows, then rows
4, 5, ... of rank 1 are for itself: they lie from row 5 on, and their shift is 1. `plan_sends` makes the plan of both
ways.

On the way back, a rank writes into the memory of the rank that owns the tokens, which then sums in float32. The owner
could read the rows from its peers instead, but a read waits for its answer and a write waits for nothing. The price of
writing is one more pass over the owner's memory, which is ten times as fast as the wire.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from moax.backend import COPY_BYTES, why_not_peers
from moax.kernels import implementation
from moax.mesh.partition import MeshView
from moax.ops.exchange.plan import (
    balanced_rows,
    count_dropped,
    find_owners,
    find_slots,
    passes_of_pairs,
    plan_sends,
    rows_of_pass,
    slots_of_pass,
)
from moax.ops.exchange.transport import (
    Arrived,
    Columns,
    CombineSpec,
    ExchangeSpec,
    Planned,
    Sent,
    Step,
    Transfer,
    collective,
)

WORD = 4  # the bytes of a word
KERNELS = "hopper"  # the implementation whose kernels write into the memory of peers


@dataclasses.dataclass(frozen=True)
class OneSided:
    """The transport `one_sided`; see `Transport`. Its plan is a SendPlan."""

    note: str = "over the first GPUs of the machine, within one process"
    has_slots: bool = True
    portable: bool = False

    def plan(self, static: ExchangeSpec, experts, index=0) -> Planned:
        (tokens, top_k), ranks, slots, ep = experts.shape, static.ranks, static.slots, static.roles.ep
        owner = find_owners(experts, static.local_experts)
        slot, until = find_slots(owner, ranks)
        # The ranks gather all of `until` and then take its last column. To take the column first would be one more
        # kernel, and the additional bytes take no longer.
        wanted = lax.all_gather(until, ep)[..., -1]
        sent, kept = (rows_of_pass(rows, static, index) for rows in (until[:, -1], wanted))
        now = slots_of_pass(slot, index, slots)
        plan = plan_sends(now, sent, kept, lax.axis_index(ep), tokens * min(top_k, ranks))
        return Planned(plan, count_dropped(owner, slot, static.capacity), passes_of_pairs(wanted, static))

    def send(self, static: CombineSpec, rows, narrow: Sequence, sent: Sent) -> Arrived:
        """Sends the rows in one pass of one kernel, with the narrow arrays as one row of words beside each row."""
        words = [jnp.concatenate([_to_words(v) for v in narrow], axis=1)] if narrow else []
        arrived = self._put(static, [rows, *words], sent.token, sent.places, 0, static.ranks * static.slots)
        ends = sent.places.reshape(-1)
        if not narrow:
            return Arrived(arrived[0], [], None, ends)
        return Arrived(arrived[0], split_words(arrived[1], narrow), arrived[1], ends)

    def combine(self, static: CombineSpec, arrays: Sequence, sent: Sent, tokens: int) -> list:
        """Returns the rows in one pass of one kernel and sums them in float32. It reads no other row."""
        del tokens
        returned = self._put(static, arrays, None, sent.places, 1, sent.token.shape[0])
        with jax.named_scope("sum"):
            return [self.gather_sum(_pad(rows), sent.position)[:, : rows.shape[1]] for rows in returned]

    def why_not(self, view: MeshView | None, row_bytes: int | None) -> str | None:
        why = why_not_peers(row_bytes if view is None or view.roles.ep else None)
        if why is None and view is not None and view.nested:
            return "it cannot run inside a shard_map over other axes; take all axes of the mesh into it, or none"
        return why

    def why_not_on(self, gpus: int, host: int, kernels: str) -> str | None:
        if kernels != KERNELS:
            return "its kernels are for NVIDIA GPUs of compute capability 9.0"
        if gpus > host:
            return f"it writes into the memory of the {host} GPUs of one machine, and the mesh has {gpus}"
        return None

    def received_rows(self, tokens: int, ranks: int, slots: int) -> int:
        del tokens
        return slots * ranks

    def buffer_rows(self, tokens: int, top_k: int, ranks: int, slots: int) -> int:
        return self.received_rows(tokens, ranks, slots) + tokens * min(top_k, ranks)

    def plan_entries(self, tokens: int, top_k: int, ranks: int, slots: int) -> int:
        del slots
        return tokens * (min(top_k, ranks) + ranks) + 4 * ranks

    def cost(self, static: ExchangeSpec, tokens: int, top_k: int, step: Step, columns: Columns) -> list[Transfer]:
        ranks, roles = static.ranks, static.roles
        if step == "plan":
            return [collective("all-gather", "int32", (ranks, ranks, -(-tokens // 32)), roles, roles.ep)]
        if step == "send" and len(columns) > 1:
            columns = [columns[0], (sum(_words(width, jnp.dtype(dtype)) for width, dtype in columns[1:]), "int32")]
        pair = min(static.slots, balanced_rows(tokens, top_k, ranks, static.num_experts))
        moved = []
        for width, dtype in columns:
            size = width * jnp.dtype(dtype).itemsize
            size += -size % COPY_BYTES
            moved.append(Transfer("put", dtype, (ranks * pair, width), roles.ep, ranks, (ranks - 1) * pair * size))
        return moved

    def put_rows(self, arrays: Sequence, source, places, way: int, out_rows: int, axes, sms: int | None) -> tuple:
        """out[i + shift[p]] on rank p = x[source[i]] for end[p - 1] <= i < end[p], for each array x; see the kernel."""
        return implementation(KERNELS).put_rows(arrays, source, places, way, out_rows, axes, sms)

    def gather_sum(self, rows, position):
        """y[t] = sum over k of rows[position[t, k]] in float32; a position past the last row adds nothing."""
        return implementation(KERNELS).gather_sum(rows, position)

    def _put(self, static: CombineSpec, arrays: Sequence, source, places, way: int, out_rows: int) -> list:
        """Runs `put_rows` for arrays of any width: rows are padded to whole 16 bytes, and the padding is cut off."""
        roles = static.roles
        axes = tuple((name, roles.size((name,))) for name in roles.ep)
        arrived = self.put_rows([_pad(v) for v in arrays], source, places, way, out_rows, axes, static.sms)
        return [rows[:, : v.shape[1]] for rows, v in zip(arrived, arrays, strict=True)]


def split_words(words, like: Sequence) -> list:
    """Returns the narrow arrays that the words [R, V] hold side by side; the arrays of `like` have their widths and
    dtypes.

    Three i32 ids and 5 scales of one byte are V = 3 + 2 words; the last three bytes of a row are padding.
    """
    first, parts = 0, []
    for v in like:
        size = _words(v.shape[1], v.dtype)
        parts.append(_from_words(words[:, first : first + size], v))
        first += size
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


def _from_words(words, like):
    """Returns the inverse of `_to_words`; `like` has the width and dtype of the result."""
    values = lax.bitcast_convert_type(words, like.dtype)
    return values.reshape(words.shape[0], -1)[:, : like.shape[1]]
