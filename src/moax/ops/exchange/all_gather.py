"""all_gather: every token goes to every rank of ep, and a reduce-scatter sums the rows back.

    dispatch   rows[s T + t] = x[t] of rank s          R = T * ranks
    combine    y[t] of rank s = sum over ranks of rows[s T + t]

With 2 ranks and T = 3, token 1 of rank 1 is row 4 on both ranks. Every token has a row, so nothing is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from moax.mesh.partition import MeshView
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


@dataclasses.dataclass(frozen=True)
class AllGather:
    """The transport `all_gather`; see `Transport`. It has no slots, so its plan is None."""

    note: str = "drops nothing on the way"
    has_slots: bool = False
    portable: bool = True

    def plan(self, static: ExchangeSpec, experts, index=0) -> Planned:
        del static, experts, index
        return Planned(None, jnp.zeros(1, jnp.int32), jnp.ones((), jnp.int32))

    def send(self, static: CombineSpec, rows, narrow: Sequence, sent: Sent) -> Arrived:
        del sent
        ep = static.roles.ep
        ep = ep if rows.shape[0] else ()  # XLA gathers no array of no rows
        rows, *narrow = (lax.all_gather(v, ep, axis=0, tiled=True) if ep else v for v in (rows, *narrow))
        return Arrived(rows, narrow)

    def combine(self, static: CombineSpec, arrays: Sequence, sent: Sent, tokens: int) -> list:
        del sent
        ep = static.roles.ep if tokens else ()
        return [lax.psum_scatter(rows, ep, scatter_dimension=0, tiled=True) if ep else rows for rows in arrays]

    def why_not(self, view: MeshView | None, row_bytes: int | None) -> str | None:
        del view, row_bytes
        return None

    def why_not_on(self, gpus: int, host: int, kernels: str) -> str | None:
        del gpus, host, kernels
        return None

    def received_rows(self, tokens: int, ranks: int, slots: int) -> int:
        del slots
        return tokens * ranks

    def buffer_rows(self, tokens: int, top_k: int, ranks: int, slots: int) -> int:
        del top_k
        return self.received_rows(tokens, ranks, slots)

    def plan_entries(self, tokens: int, top_k: int, ranks: int, slots: int) -> int:
        del tokens, top_k, ranks, slots
        return 0

    def cost(self, static: ExchangeSpec, tokens: int, top_k: int, step: Step, columns: Columns) -> list[Transfer]:
        del top_k
        kind, rows = ("reduce-scatter", tokens) if step == "combine" else ("all-gather", tokens * static.ranks)
        return [collective(kind, dtype, (rows, width), static.roles, static.roles.ep) for width, dtype in columns]
