"""`Transport` is the base of an object that sends rows, sums them back, and says what both cost.

A transport is one class, and one line of `TRANSPORTS`. Nothing else in moax asks which transport it is: the ops, the
block, `moax info` and `moax estimate` ask the object.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int

from moax.kernels import DEFAULT
from moax.mesh.axes import Names, ResolvedAxes
from moax.mesh.specs import MeshView
from moax.recipe import Format

Sent = Any  # the plan of a rank, `Received.slots`: only its transport knows the type
Step = Literal["plan", "send", "combine"]
Columns = Sequence[tuple[int, str]]  # (width, dtype) of each array that travels


@dataclasses.dataclass(frozen=True)
class ExchangeSpec:
    """The static arguments of a dispatch, of its combine, and of the gradients of both.

    Attributes:
      transport: the name of the transport, a key of `TRANSPORTS`.
      axes: the mesh axes by role.
      tokens: T of a shard.
      slots: the rows that each pair of ranks exchanges in one round, if the transport has slots.
      wire: the format of rows that are sent; None sends them in their own dtype. Sums travel in their own dtype.
      kernels: the implementation that quantizes rows for the wire.
      num_experts: E of the whole mesh; a combine does not ask.
      capacity: the most rows that each pair of ranks exchanges in all rounds; a token past them is dropped.
    """

    transport: str
    axes: ResolvedAxes
    tokens: int
    slots: int
    wire: Format | None = None
    kernels: str = DEFAULT
    num_experts: int = 0
    capacity: int = 0

    @property
    def ranks(self) -> int:
        """The number of devices along ep."""
        return self.axes.size(self.axes.ep)


class Planned(NamedTuple):
    """The rows that one rank sends in one round."""

    sent: Sent
    dropped: Int[Array, " 1"]  # the rank's assignments (token, expert) that find no slot in any round
    rounds: Int[Array, ""]  # which this rank knows to be needed; the most of all ranks of ep are needed


class Arrived(NamedTuple):
    """The rows that one rank received from a `send`.

    Attributes:
      rows: [R, H], the rows that arrived.
      narrow: one array [R, W] for each narrow array that was sent, bit for bit.
      words: [R, V] i32, the narrow arrays side by side in their order, if they travelled as words; else None.
      ends: [P] i32. Rows from ends[-1] on may hold anything. None means that every row holds a token, or 0 in an empty
        slot.
    """

    rows: Array
    narrow: list[Array]
    words: Array | None = None
    ends: Array | None = None


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One array that a transport moves; the fields are as in `moax.inspect.Collective`.

    `kind` may also be "put": a kernel writes rows to peers, and `shape` has the rows that arrive.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    axes: Names
    group_size: int
    bytes: int


def collective(kind: str, dtype: str, shape: Sequence[int], resolved: ResolvedAxes, axes: Names) -> Transfer:
    """Returns the Transfer of a collective by the ring algorithm.

    With b the bytes of the result and g devices, a device sends b (g-1)/g of an all-gather or all-to-all, 2 b (g-1)/g
    of an all-reduce and b (g-1) of a reduce-scatter. An all-gather to 1024 bytes in a group of 4 sends 768.
    """
    group = resolved.size(axes)
    sent = math.prod(shape) * jnp.dtype(dtype).itemsize * (group - 1)
    if kind != "reduce-scatter":
        sent = -(-sent * (2 if kind == "all-reduce" else 1) // group)
    return Transfer(kind, dtype, tuple(shape), axes, group, sent)


class Transport:
    """How rows travel between the ranks of ep. Its functions take and return the arrays of one device.

    Attributes:
      note: one line of `moax info`: what a user must know about the transport.
      has_slots: whether each pair of ranks has `slots` rows. An assignment that finds no slot is dropped, and `send`
        and `combine` need the plan that `plan` made. Without slots every rank receives all tokens, and the plan is
        None.
      portable: whether the transport runs on every mesh and machine.
    """

    note: str
    has_slots: bool = True
    portable: bool = True

    def plan(self, static: ExchangeSpec, experts: Int[Array, "T K"], index: int | Int[Array, ""] = 0) -> Planned:
        """Returns which tokens this rank sends where in round `index`. A transport without slots has one round."""
        raise NotImplementedError

    def send(self, static: ExchangeSpec, rows: Array, narrow: Sequence[Array], sent: Sent) -> Arrived:
        """Sends the rows [T, H] of this rank's tokens to the ranks of the plan.

        Each narrow array [T, W], of 4 bytes or 1 byte an element, travels with the rows.
        """
        raise NotImplementedError

    def combine(self, static: ExchangeSpec, arrays: Sequence[Array], sent: Sent) -> list[Array]:
        """Computes the transpose of `send` for arrays [R, W]: y[t] sums the rows of t on the ranks that it went to."""
        raise NotImplementedError

    def why_not(self, view: MeshView | None, row_bytes: int | None) -> str | None:
        """Returns why the transport cannot run on the mesh of `view` and this machine; None where it can.

        Where `view` or `row_bytes`, the bytes of a row, is None, the question is about this machine alone.
        """
        return None

    def received_rows(self, tokens: int, ranks: int, slots: int) -> int:
        """Returns R, the rows of the buffer that a rank receives into."""
        return (slots if self.has_slots else tokens) * ranks

    def cost(self, static: ExchangeSpec, top_k: int, step: Step, columns: Columns) -> list[Transfer]:
        """Returns the Transfers of one step, if each token takes K experts at random.

        `columns` has (width, dtype) of each array of a `send` or a `combine`, the rows first; () for a plan.
        """
        raise NotImplementedError
