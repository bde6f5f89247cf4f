"""`Transport` sends rows, and sums them back. `AllGather` and `AllToAll` do so by collectives.

A transport is one class, and one line of `TRANSPORTS`. Nothing else in moax asks which transport it is: the ops, the
block and the command `moax` ask the object.

Transports with slots number, for every rank, the tokens that want it: the first such token has slot 0, the next one
slot 1. Slots at or past the capacity are dropped. Round i moves the slots from i * slots on: with 4 slots, slot 5 of a
pair of ranks travels in round 1, as slot 1. Two facts decide everything that follows: the slot of each token for each
rank, and how many rows travel between each pair of ranks.

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
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from moax.kernels.device import sums_in_pieces
from moax.kernels.groups import allot_rows
from moax.mesh.axes import Names, ResolvedAxes
from moax.mesh.collectives import sum_scatter

Sent = Any  # the plan of a rank, `Received.slots`: only its transport knows the type


@dataclasses.dataclass(frozen=True)
class ExchangeSpec:
    """The static arguments of a dispatch, of its combine, and of the gradients of both.

    Attributes:
      transport: the name of the transport, a key of `TRANSPORTS`.
      axes, ranks: the mesh axes by role, and the number of devices along ep.
      tokens: T of a shard.
      slots: the rows that each pair of ranks exchanges in one round, if the transport has slots.
      num_experts: E of the whole mesh; a combine does not ask.
      capacity: the most rows that each pair of ranks exchanges in all rounds; a token past them is dropped.
    """

    transport: str
    axes: ResolvedAxes
    ranks: int
    tokens: int
    slots: int
    num_experts: int = 0
    capacity: int = 0


class Planned(NamedTuple):
    """The rows that one rank sends in one round."""

    sent: Sent
    # the rank's assignments (token, expert) that find no slot in any round
    dropped: Int[Array, " 1"]
    # which this rank knows to be needed; the most of all ranks of ep are needed
    rounds: Int[Array, ""]


class NumberedSlots(NamedTuple):
    """The slots of the tokens of one rank in one round.

    Attributes:
      slot: [T, ranks] i32. A slot at or past `slots` is of a later round, and T marks a token of an earlier round, or
        of no round.
      counts: [ranks] i32, the counts of `find_slots`.
      dropped: [1] i32, the assignments that find no slot in any round.
    """

    slot: Int[Array, "T ranks"]
    counts: Int[Array, " ranks"]
    dropped: Int[Array, " 1"]


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One array that a collective moves; the fields are as in `moax.inspect.Collective`."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    axes: Names
    group_size: int
    bytes: int


def collective(kind: str, dtype: str, shape: Sequence[int], resolved: ResolvedAxes, axes: Names) -> Transfer:
    """Returns the Transfer of a collective by the ring algorithm."""
    group = resolved.size(axes)
    sent = ring_bytes(kind, math.prod(shape) * jnp.dtype(dtype).itemsize, group)
    return Transfer(kind, dtype, tuple(shape), axes, group, sent)


def ring_bytes(kind: str, size: int, group: int) -> int:
    """Returns the bytes that one of `group` devices sends for a result of `size` bytes, by the ring algorithm.

    With b the bytes of the result and g devices, a device sends b (g-1)/g of an all-gather or all-to-all, 2 b (g-1)/g
    of an all-reduce, b (g-1) of a reduce-scatter, and b to another device. An all-gather to 1024 bytes in a group of 4
    sends 768.
    """
    if group == 1:
        return 0
    if kind in ("collective-permute", "collective-broadcast"):
        return size
    if kind == "reduce-scatter":
        return size * (group - 1)
    rounds = 2 if kind == "all-reduce" else 1
    return -(-size * (group - 1) * rounds // group)


class Transport:
    """How rows travel between the ranks of ep. Its functions take and return the arrays of one device.

    Attributes:
      note: one line of the command `moax`: what a user must know about the transport.
      has_slots: whether each pair of ranks has `slots` rows. An assignment that finds no slot is dropped, and `send`
        and `combine` need the plan that `plan` made. Without slots every rank receives all tokens in one round, and
        the plan is None.
    """

    note: str
    has_slots: bool = True

    def plan(self, static: ExchangeSpec, experts: Int[Array, "T K"], index: int | Int[Array, ""]) -> Planned:
        """Returns which tokens this rank sends where in round `index`; nobody asks a transport without slots."""
        raise NotImplementedError

    def send(self, static: ExchangeSpec, arrays: Sequence[Array], sent: Sent) -> list[Array]:
        """Sends the rows of arrays [T, W] to the ranks of the plan, and returns the arrays [R, W] that arrived here.

        A row that arrives holds a token bit for bit, or 0 in an empty slot.
        """
        raise NotImplementedError

    def combine(self, static: ExchangeSpec, arrays: Sequence[Array], sent: Sent) -> list[Array]:
        """Computes the transpose of `send` for arrays [R, W]: y[t] sums the rows of t on the ranks that it went to."""
        raise NotImplementedError


def balanced_rows(tokens: int, top_k: int, ranks: int, num_experts: int) -> int:
    """Returns T (1 - C(E - E/ranks, K) / C(E, K)), rounded up: the tokens that want one rank, if routing is random.

    With 4 experts, 2 ranks and K = 2, five of the six choices hold an expert of rank 0, so 6 tokens send it 5 rows.
    """
    every = math.comb(num_experts, top_k)
    others = math.comb(num_experts - num_experts // ranks, top_k)
    return -(-tokens * (every - others) // every)


def allot_slots(
    tokens: int,
    top_k: int,
    ranks: int,
    num_experts: int,
    capacity_factor: float | None,
    buffer_factor: float | None,
) -> tuple[int, int]:
    """Returns the slots of a pair of ranks in one round, and its capacity: the slots of all rounds together.

    capacity = min(T, ceil(capacity_factor T K / ranks)), a multiple of the balanced load; T without a factor. A factor
    bounds the rows of a pair already, so that one round has slots for all of them.
    """
    if capacity_factor is not None:
        capacity = min(tokens, math.ceil(capacity_factor * tokens * top_k / ranks))
        return capacity, capacity
    balanced = balanced_rows(tokens, top_k, ranks, num_experts)
    return allot_rows(balanced, buffer_factor, tokens), tokens


def number_slots(
    static: ExchangeSpec,
    experts: Int[Array, "T K"],
    index: int | Int[Array, ""],
) -> NumberedSlots:
    """Returns the slots of the tokens in round `index`; with 4 slots, round 1 has (0, 3, T, 4) of (4, 7, 2, 8)."""
    tokens = experts.shape[0]
    ranks = static.ranks
    # Rank i owns experts [i E/ranks, (i + 1) E/ranks).
    owner = lax.div(experts, jnp.full_like(experts, static.num_experts // ranks))
    slot, counts = find_slots(owner, ranks)
    dropped = jnp.zeros(1, jnp.int32)
    if static.capacity < tokens:
        wanted = owner[..., None] == jnp.arange(ranks, dtype=jnp.int32)[None, None]
        dropped = (wanted & (slot >= static.capacity)[:, None]).sum(dtype=jnp.int32)[None]
    if not isinstance(index, int) or index:
        moved = slot - index * static.slots
        slot = jnp.where((moved < 0) | (slot >= tokens), tokens, moved)
    return NumberedSlots(slot, counts, dropped)


def find_slots(
    owner: Int[Array, "T K"],
    ranks: int,
) -> tuple[Int[Array, "T ranks"], Int[Array, " ranks"]]:
    """Returns the slot of each token for each rank, and how many tokens want each rank.

    Tokens 0, 1, 2 that want ranks {0, 1}, {1}, {0} have the slots (0, 0), (T, 1), (1, T): T marks a rank that the token
    does not want. The counts are (2, 2).

    A scan along the tokens would be several kernels; this is two. One bit says whether a token wants a rank, and 32
    tokens are a word. The slot of a token is the number of bits in the words before its own, which are few enough to
    compare each with each, plus the number of bits below its own in its word.

    `owner` has the ranks that each token wants. One rank may appear several times, and a number outside [0, ranks) is
    no rank.
    """
    tokens, top_k = owner.shape
    padded = jnp.pad(owner, ((0, -tokens % 32), (0, 0)), constant_values=ranks)
    words = padded.reshape(1, padded.shape[0] // 32, 32 * top_k)
    bit = jnp.uint32(1) << jnp.arange(32, dtype=jnp.uint32)
    wanted = words == jnp.arange(ranks, dtype=jnp.int32)[:, None, None]
    wanted_bits = jnp.where(wanted, jnp.repeat(bit, top_k)[None, None], jnp.uint32(0))
    bits = lax.reduce_or(wanted_bits, axes=(2,))
    word = jnp.arange(bits.shape[1], dtype=jnp.int32)
    earlier = (word[:, None] >= word[None])[None]
    in_word = lax.population_count(bits).astype(jnp.int32)
    until = jnp.where(earlier, in_word[:, None], 0).sum(-1, dtype=jnp.int32)
    own = bits.T[:, None]
    bit = bit[None, :, None]
    slot = until.T[:, None] - lax.population_count(own & ~(bit - 1)).astype(jnp.int32)
    return jnp.where((own & bit) != 0, slot, tokens).reshape(-1, ranks)[:tokens], until[:, -1]


class AllGather(Transport):
    """The transport `all_gather`. It has no slots, so its plan is None."""

    note = "drops nothing on the way"
    has_slots = False

    def send(self, static: ExchangeSpec, arrays: Sequence, sent: Sent) -> list:
        ep = static.axes.ep
        if not ep or static.tokens == 0:
            # XLA gathers no array of no rows.
            return list(arrays)
        return [lax.all_gather(rows, ep, axis=0, tiled=True) for rows in arrays]

    def combine(self, static: ExchangeSpec, arrays: Sequence, sent: Sent) -> list:
        ep = static.axes.ep if static.tokens else ()
        return [sum_scatter(rows, ep, in_pieces=sums_in_pieces()) for rows in arrays]


class AllToAll(Transport):
    """The transport `all_to_all`. Its plan is [ranks * slots] i32: the token in each slot, T for an empty one."""

    note = "bounded by buffer_factor and capacity_factor"

    def plan(self, static: ExchangeSpec, experts, index) -> Planned:
        tokens = experts.shape[0]
        ranks = static.ranks
        numbered = number_slots(static, experts, index)
        rank = jnp.arange(ranks, dtype=jnp.int32)
        token = jnp.arange(tokens, dtype=jnp.int32)
        empty = jnp.full((ranks, static.slots), tokens, jnp.int32)
        sent = empty.at[rank[None], numbered.slot].set(token[:, None], mode="drop").reshape(-1)
        rows = jnp.minimum(numbered.counts, static.capacity).max()  # of the busiest pair of ranks
        return Planned(sent, numbered.dropped, jnp.maximum(1, -(-rows // static.slots)))

    def send(self, static: ExchangeSpec, arrays: Sequence, sent: Sent) -> list:
        slots = [jnp.take(rows, sent, axis=0, mode="fill", fill_value=0) for rows in arrays]
        return [_swap(static, rows) for rows in slots]

    def combine(self, static: ExchangeSpec, arrays: Sequence, sent: Sent) -> list:
        def add(rows):
            back = _swap(static, rows).astype(jnp.float32)
            zero = jnp.zeros((static.tokens, rows.shape[1]), jnp.float32)
            return zero.at[sent].add(back, mode="drop").astype(rows.dtype)

        return [add(rows) for rows in arrays]


def _swap(static: ExchangeSpec, values):
    """Slot n for rank r becomes slot n from rank r."""
    if not static.axes.ep:
        return values
    return lax.all_to_all(values, static.axes.ep, 0, 0, tiled=True)
