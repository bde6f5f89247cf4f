"""One-sided exchange: each rank writes its rows into the memory of the ranks that own their experts.

    dispatch   received[row[i]] on rank peer[i] = x[token[i]]
    combine    returned[back[r]] on rank home[r] = rows[r],     y[t] = sum over ranks of returned[position[t, rank]]

A pure function makes the plan of both from two facts: in which of its source's slots each token travels, and how many
rows travel between each pair of ranks. Rows land packed, by source, then by token. Combine is the way back: a rank
writes into the memory of the tokens' owner, and the owner sums in float32. The owner could read from its peers as well,
but a read waits for its answer and a write for nothing; what writing costs is one more pass over the owner's own
memory, which is ten times as fast as the wire. `exchange.py` calls this; all functions here are of one device.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from moax import mosaic
from moax.axes import Roles
from moax.backend import COPY_BYTES
from moax.types import SendPlan

WORD = 4  # bytes


def plan_sends(slot: Int[Array, "T ranks"], kept: Int[Array, "ranks ranks"], rank, slots: int, top_k: int) -> SendPlan:
    """The plan of one rank.

    Args:
      slot: in which slot for a rank each token goes, numbered from 0 in order of tokens; `slots` for none.
      kept: how many rows go from rank (dim 0) to rank (dim 1).
      rank: [] i32, this one.
      slots: the most rows of a pair. top_k: K.
    """
    tokens, ranks = slot.shape
    sent, received = kept[rank], kept[:, rank]
    start, first = jnp.cumsum(sent) - sent, jnp.cumsum(received) - received
    theirs = (jnp.cumsum(kept, axis=0) - kept)[rank]  # where this rank's rows begin on each
    returned = (jnp.cumsum(kept, axis=1) - kept)[:, rank]  # where those from this rank begin in what each gets back

    entries = tokens * min(top_k, ranks)
    position = jnp.where(slot < slots, start[None] + slot, entries)
    which = jnp.arange(tokens * ranks, dtype=jnp.int32).reshape(tokens, ranks)
    which = jnp.zeros(entries, jnp.int32).at[position].set(which, mode="drop")
    token, peer = which // ranks, which % ranks
    row = jnp.arange(entries, dtype=jnp.int32) + (theirs - start)[peer]

    at = jnp.arange(ranks * slots, dtype=jnp.int32)
    home = (at[:, None] >= (first + received)[None]).sum(-1, dtype=jnp.int32)
    home = jnp.minimum(home, ranks - 1)
    back = at + (returned - first)[home]
    return SendPlan(token, peer, row, home, back, position, jnp.stack([sent.sum(), received.sum()]))


def send_rows(rows, others: Sequence, plan: SendPlan, roles: Roles, sms: int | None = None) -> list:
    """Values of this rank's tokens, each [T, C], to where its rows go: [R, C]. `others`, narrow ones of 4 bytes or 1 an
    element, travel as one row of words. Rows past `plan.count[1]` hold anything. sms: that copy."""
    words = [_to_words(v) for v in others]
    arrays = [rows] if not words else [rows, jnp.concatenate(words, axis=1)]
    got, *packed = _put(arrays, plan.token, plan.peer, plan.row, plan.count[:1], plan.home.shape[0], roles, sms)
    if not packed:
        return [got]
    ends = [sum(w.shape[1] for w in words[: i + 1]) for i in range(len(words))]
    parts = jnp.split(packed[0], ends, axis=1)
    return [got, *(_from_words(part, v) for part, v in zip(parts, others, strict=False))]


def combine_rows(rows, plan: SendPlan, roles: Roles, sms: int | None = None):
    """y[t] = the sum in float32 of the rows [R, H] that token t became: [T, H]. No other row is read."""
    entries = plan.token.shape[0]
    (returned,) = _put([rows], None, plan.home, plan.back, plan.count[1:], entries, roles, sms)
    with jax.named_scope("sum"):
        padded = _pad(returned)
        return mosaic.gather_sum(padded, plan.position)[:, : rows.shape[1]]


def _put(arrays, source, peer, row, count, out_rows: int, roles: Roles, sms: int | None):
    axes = tuple((name, roles.size((name,))) for name in roles.ep)
    got = mosaic.put_rows([_pad(v) for v in arrays], source, peer, row, count, out_rows, axes, sms)
    return [g[:, : v.shape[1]] for g, v in zip(got, arrays, strict=True)]


def _pad(v):
    """Columns of zeros up to rows of whole 16 bytes, as bulk copies move."""
    return jnp.pad(v, ((0, 0), (0, -v.shape[1] % (COPY_BYTES // v.dtype.itemsize))))


def _to_words(v):
    """[T, C] of 4 bytes or 1 an element -> [T, W] i32, the same bytes."""
    if v.dtype.itemsize == WORD:
        return lax.bitcast_convert_type(v, jnp.int32)
    v = jnp.pad(v, ((0, 0), (0, -v.shape[1] % WORD)))
    return lax.bitcast_convert_type(v.reshape(v.shape[0], -1, WORD), jnp.int32)


def _from_words(words, like):
    """The inverse of `_to_words`, for values like these."""
    values = lax.bitcast_convert_type(words, like.dtype)
    return values.reshape(words.shape[0], -1)[:, : like.shape[1]]
