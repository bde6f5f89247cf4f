"""The transports that run everywhere, by collectives of XLA.

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

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from moax.exchange.slots import count_dropped, find_owners, find_slots, rounds_of_pairs, slots_of_round
from moax.exchange.transport import Arrived, Columns, ExchangeSpec, Planned, Sent, Step, Transfer, Transport, collective


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
        tokens, ranks, slots = experts.shape[0], static.ranks, static.slots
        owner = find_owners(experts, static)
        slot, until = find_slots(owner, ranks)
        rank, token = jnp.arange(ranks, dtype=jnp.int32), jnp.arange(tokens, dtype=jnp.int32)
        empty = jnp.full((ranks, slots), tokens, jnp.int32)
        now = slots_of_round(slot, index, slots)
        sent = empty.at[rank[None], now].set(token[:, None], mode="drop").reshape(-1)
        return Planned(sent, count_dropped(owner, slot, static.capacity), rounds_of_pairs(until[:, -1], static))

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


def _swap(static: ExchangeSpec, values):
    """Slot n for rank r becomes slot n from rank r."""
    return lax.all_to_all(values, static.axes.ep, 0, 0, tiled=True) if static.axes.ep else values
