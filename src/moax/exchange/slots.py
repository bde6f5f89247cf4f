"""Which token travels in which slot, and the row that it becomes on the rank that receives it.

Each rank numbers, for every rank, the tokens that want it: the first such token has slot 0, the next one slot 1. Slots
at or past the capacity are dropped. Round i moves the slots from i * slots on: with 4 slots, slot 5 of a pair of
ranks travels in round 1, as slot 1. Two facts decide everything that follows: the slot of each token for each rank, and
how many rows travel between each pair of ranks.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from moax.exchange.transport import ExchangeSpec
from moax.groups import allot_rows
from moax.types import SendPlan


def slots_per_pair(tokens: int, top_k: int, ranks: int, capacity_factor: float | None) -> int:
    """slots = min(T, ceil(capacity_factor T K / ranks)), a multiple of the balanced load; T without a factor."""
    return tokens if capacity_factor is None else min(tokens, math.ceil(capacity_factor * tokens * top_k / ranks))


def balanced_rows(tokens: int, top_k: int, ranks: int, num_experts: int) -> int:
    """Returns T (1 - C(E - E/ranks, K) / C(E, K)), rounded up: the tokens that want one rank, if routing is random.

    With 4 experts, 2 ranks and K = 2, five of the six choices hold an expert of rank 0, so 6 tokens send it 5 rows.
    """
    every, others = (math.comb(experts, top_k) for experts in (num_experts, num_experts - num_experts // ranks))
    return -(-tokens * (every - others) // every)


def allot_slots(
    tokens: int, top_k: int, ranks: int, num_experts: int, capacity_factor: float | None, buffer_factor: float | None
) -> tuple[int, int]:
    """Returns the slots of a pair of ranks in one round, and its capacity: the slots of all rounds together.

    A capacity factor bounds the rows of a pair already, so that one round has slots for all of them.
    """
    capacity = slots_per_pair(tokens, top_k, ranks, capacity_factor)
    if capacity_factor is not None:
        return capacity, capacity
    return allot_rows(balanced_rows(tokens, top_k, ranks, num_experts), buffer_factor, capacity), capacity


def find_owners(experts: Int[Array, "T K"], static: ExchangeSpec) -> Int[Array, "T K"]:
    """Returns the rank that owns each expert: rank i owns experts [i E/ranks, (i + 1) E/ranks)."""
    return lax.div(experts, jnp.full_like(experts, static.num_experts // static.ranks))


def count_dropped(owner: Int[Array, "T K"], slot: Int[Array, "T ranks"], capacity: int) -> Int[Array, " 1"]:
    """Returns how many assignments (token, expert) go to a rank for which their token has no slot."""
    tokens, ranks = slot.shape
    if capacity >= tokens:
        return jnp.zeros(1, jnp.int32)
    rank = jnp.arange(ranks, dtype=jnp.int32)
    lost = (owner[..., None] == rank[None, None]) & (slot >= capacity)[:, None]
    return lost.sum(dtype=jnp.int32)[None]


def slots_of_round(slot: Int[Array, "T ranks"], index: int | Int[Array, ""], slots: int) -> Int[Array, "T ranks"]:
    """Returns the slots of the tokens in round `index`; T for a token of an earlier round, and for one of no round.

    A slot at or past `slots` is of a later round. With 4 slots, round 1 has (0, 3, T, 4) of the slots (4, 7, 2, 8).
    """
    if isinstance(index, int) and index == 0:
        return slot
    tokens, moved = slot.shape[0], slot - index * slots
    return jnp.where((moved < 0) | (slot >= tokens), tokens, moved)


def rows_of_round(rows: Int[Array, "..."], static: ExchangeSpec, index: int | Int[Array, ""]) -> Int[Array, "..."]:
    """Returns how many of a pair's `rows`, of all rounds and before the capacity, travel in round `index`."""
    return jnp.clip(jnp.minimum(rows, static.capacity) - index * static.slots, 0, static.slots)


def rounds_of_pairs(rows: Int[Array, "..."], static: ExchangeSpec) -> Int[Array, ""]:
    """Returns the rounds, at least 1, that pairs of ranks with so many `rows` need."""
    return jnp.maximum(1, -(-jnp.minimum(rows, static.capacity).max() // static.slots))


def find_slots(owner: Int[Array, "T K"], ranks: int) -> tuple[Int[Array, "T ranks"], Int[Array, "ranks W"]]:
    """Returns the slot of each token for each rank, and how many tokens want each rank up to the end of each 32 tokens.

    Tokens 0, 1, 2 that want ranks {0, 1}, {1}, {0} have the slots (0, 0), (T, 1), (1, T): T marks a rank that the token
    does not want. The counts are ((2,), (2,)).

    A scan along the tokens would be several kernels; this is two. One bit says whether a token wants a rank, and 32
    tokens are a word. The slot of a token is the number of bits in the words before its own, which are few enough to
    compare each with each, plus the number of bits below its own in its word.

    `owner` has the ranks that each token wants. One rank may appear several times, and a number outside [0, ranks) is
    no rank.
    """
    tokens, top_k = owner.shape
    words = jnp.pad(owner, ((0, -tokens % 32), (0, 0)), constant_values=ranks).reshape(1, -1, 32 * top_k)
    bit = jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32)
    wanted = words == jnp.arange(ranks, dtype=jnp.int32)[:, None, None]
    bits = lax.reduce_or(jnp.where(wanted, jnp.repeat(bit, top_k)[None, None], jnp.uint32(0)), axes=(2,))
    word = jnp.arange(bits.shape[1], dtype=jnp.int32)
    earlier = (word[:, None] >= word[None])[None]
    until = jnp.where(earlier, _count_bits(bits)[:, None], 0).sum(-1, dtype=jnp.int32)
    own, bit = bits.T[:, None], bit[None, :, None]
    slot = until.T[:, None] - _count_bits(own & ~(bit - 1))
    return jnp.where((own & bit) != 0, slot, tokens).reshape(-1, ranks)[:tokens], until


def _count_bits(bits):
    return lax.population_count(bits).astype(jnp.int32)


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
