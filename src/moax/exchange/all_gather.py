"""all_gather: every token goes to every rank of ep, and a reduce-scatter sums the rows back.

    dispatch   rows[s T + t] = x[t] of rank s          R = T * ranks
    combine    y[t] of rank s = sum over ranks of rows[s T + t]

With 2 ranks and T = 3, token 1 of rank 1 is row 4 on both ranks. Every token has a row, so nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from moax.exchange.transport import Arrived, Columns, ExchangeSpec, Planned, Sent, Step, Transfer, Transport, collective


class AllGather(Transport):
    """The transport `all_gather`. It has no slots, so its plan is None."""

    note = "drops nothing on the way"
    has_slots = False

    def plan(self, static: ExchangeSpec, experts, index=0) -> Planned:
        del static, experts, index
        return Planned(None, jnp.zeros(1, jnp.int32), jnp.ones((), jnp.int32))

    def send(self, static: ExchangeSpec, rows, narrow: Sequence, sent: Sent) -> Arrived:
        del sent
        ep = static.axes.ep if rows.shape[0] else ()  # XLA gathers no array of no rows
        rows, *narrow = (lax.all_gather(v, ep, axis=0, tiled=True) if ep else v for v in (rows, *narrow))
        return Arrived(rows, narrow)

    def combine(self, static: ExchangeSpec, arrays: Sequence, sent: Sent) -> list:
        del sent
        ep = static.axes.ep if static.tokens else ()
        return [lax.psum_scatter(rows, ep, scatter_dimension=0, tiled=True) if ep else rows for rows in arrays]

    def received_rows(self, tokens: int, ranks: int, slots: int) -> int:
        del slots
        return tokens * ranks

    def cost(self, static: ExchangeSpec, top_k: int, step: Step, columns: Columns) -> list[Transfer]:
        del top_k
        kind = "reduce-scatter" if step == "combine" else "all-gather"
        rows = static.tokens * (1 if step == "combine" else static.ranks)
        return [collective(kind, dtype, (rows, width), static.axes, static.axes.ep) for width, dtype in columns]
