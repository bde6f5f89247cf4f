"""One-sided exchange: each rank writes its rows into the memory of the ranks that own their experts.

    dispatch   received[i + shift] on the rank of i = x[token[i]]
    combine    returned[r + shift] on the rank of r = rows[r],     y[t] = sum over ranks of returned[position[t, rank]]

Rows are sent in order of the ranks they go to, then of tokens, and land packed, by source, then by token: those of one
pair of ranks lie side by side on both, so that where they go is one number a pair. A pure function makes the plan of
both ways from two facts: in which of its source's slots each token travels, and how many rows travel between each pair
of ranks. Combine is the way back: a rank writes into the memory of the tokens' owner, and the owner sums in float32.
The owner could read from its peers as well, but a read waits for its answer and a write for nothing; what writing costs
is one more pass over the owner's own memory, which is ten times as fast as the wire. `exchange.py` calls this; all
functions here are of one device.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from moax.backend import COPY_BYTES
from moax.kernels.hopper.rows import gather_sum
from moax.mesh.axes import Roles
from moax.mesh.collectives import typed
from moax.types import SendPlan

WORD = 4  # bytes


def plan_sends(slot: Int[Array, "T ranks"], sent, kept: Int[Array, "ranks ranks"], rank, entries: int) -> SendPlan:
    """The plan of one rank.

    Args:
      slot: in which slot for a rank each token goes, numbered from 0 in order of tokens; those that are not below
        `sent`, for none.
      sent: [ranks] i32, how many rows this rank sends to each, so that these need not wait for `kept`.
      kept: how many rows go from rank (dim 0) to rank (dim 1).
      rank: [] i32, this one.
      entries: C, the most rows it sends.
    """
    end = jnp.cumsum(sent)
    start = end - sent
    position = jnp.where(slot < sent[None], start[None] + slot, entries)
    which = lax.broadcasted_iota(jnp.int32, position.shape, 0)
    token = lax.empty((entries,), jnp.int32).at[position].set(which, mode="drop")

    received = kept[:, rank]
    last, theirs, returned = jnp.cumsum(received), jnp.cumsum(kept, axis=0) - kept, jnp.cumsum(kept, axis=1) - kept
    # Where rows of a pair begin on the rank that they go to, less where they begin here.
    there, back = theirs[rank] - start, returned[:, rank] - (last - received)
    return SendPlan(token, position, jnp.stack([there, end, back, last]).reshape(2, 2, -1))


def send_rows(rows, others: Sequence, plan: SendPlan, out_rows: int, roles: Roles, sms: int | None = None) -> list:
    """Values of this rank's tokens [T, H] to where its rows go: [out_rows, H]. With `others`, narrow ones of 4 bytes or
    1 an element, comes one row of words of each, which `split_words` takes apart. Rows past `plan.received` hold
    anything. sms: that copy."""
    words = [jnp.concatenate([_to_words(v) for v in others], axis=1)] if others else []
    return _put([rows, *words], plan.token, plan.places, 0, out_rows, roles, sms)


def split_words(words, others: Sequence) -> list:
    """What arrived of each of the others."""
    first, parts = 0, []
    for v in others:
        size = -(-v.shape[1] * v.dtype.itemsize // WORD)
        parts.append(_from_words(words[:, first : first + size], v))
        first += size
    return parts


def combine_rows(arrays: Sequence, plan: SendPlan, roles: Roles, sms: int | None = None) -> list:
    """y[t] = the sum in float32 of the rows that token t became, of each array [R, W]: [T, W]. They travel in one pass;
    no other row is read."""
    returned = _put(arrays, None, plan.places, 1, plan.token.shape[0], roles, sms)
    with jax.named_scope("sum"):
        return [gather_sum(_pad(rows), plan.position)[:, : rows.shape[1]] for rows in returned]


def _put(arrays, source, places, way: int, out_rows: int, roles: Roles, sms: int | None):
    axes = tuple((name, roles.size((name,))) for name in roles.ep)
    from moax.kernels.hopper.exchange import SMS, put_rows

    got = typed(put_rows)([_pad(v) for v in arrays], source, places, way, out_rows, axes, sms=sms or SMS)
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
