"""What a transport is: an object that sends rows, sums them back, and says what both cost.

A transport is one file with one object, and one line in `table.py`. Nothing else in moax asks which transport it is:
the ops, the block, `moax info` and `moax estimate` ask the object.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Int

from moax.mesh.axes import Names, Roles
from moax.mesh.partition import MeshView
from moax.recipe import Format

Sent = Any  # the plan of a rank, `Received.slots`: only its transport knows the type
Step = Literal["plan", "send", "combine"]
Columns = Sequence[tuple[int, str]]  # (width, dtype) of each array that travels


@dataclasses.dataclass(frozen=True)
class CombineSpec:
    """The static arguments of a combine, and of its transpose.

    Attributes:
      transport: the name of the transport, a key of `TRANSPORTS`.
      roles: the mesh axes by role.
      slots: the rows that each pair of ranks exchanges in one pass, if the transport has slots.
      wire: the format of rows that are sent; None sends them in their own dtype. Sums travel in their own dtype.
      kernels: the implementation that quantizes rows for the wire.
      sms: multiprocessors that copy rows to peers; None leaves the number to the kernel.
    """

    transport: str
    roles: Roles
    slots: int
    wire: Format | None = None
    kernels: str = "xla"
    sms: int | None = None

    @property
    def ranks(self) -> int:
        """The number of devices along ep."""
        return self.roles.size(self.roles.ep)


@dataclasses.dataclass(frozen=True)
class ExchangeSpec(CombineSpec):
    """The static arguments of a dispatch, of its combine, and of the gradients of both.

    Attributes:
      num_experts: E of the whole mesh.
      capacity: the most rows that each pair of ranks exchanges in all passes; a token past them is dropped.
    """

    num_experts: int = dataclasses.field(kw_only=True)
    capacity: int = dataclasses.field(kw_only=True)

    @property
    def local_experts(self) -> int:
        """The number of experts of one rank."""
        return self.num_experts // self.ranks


class Planned(NamedTuple):
    """What one rank sends in one pass.

    Attributes:
      sent: the plan of the transport, which `send` and `combine` take.
      dropped: [1] i32, the rank's assignments (token, expert) that find no slot in any pass.
      passes: [] i32, the passes of the exchange that this rank knows to be needed. The most of all ranks of ep are
        needed.
    """

    sent: Sent
    dropped: Int[Array, " 1"]
    passes: Int[Array, ""]


class Arrived(NamedTuple):
    """What one rank received from a `send`.

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
    """One array that a transport moves.

    Attributes:
      kind: the name of a collective, as in `moax.inspect`, or "put": a kernel writes rows to peers.
      dtype: the name of the dtype in NumPy.
      shape: the shape of the result on one device. Of a put it is the shape of the rows that arrive.
      axes: the mesh axes of the group.
      group_size: the number of devices of the group.
      bytes: the bytes that one device sends to others.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    axes: Names
    group_size: int
    bytes: int


def collective(kind: str, dtype: str, shape: Sequence[int], roles: Roles, axes: Names) -> Transfer:
    """Returns the Transfer of a collective by the ring algorithm.

    With b the bytes of the result and g devices, a device sends b (g-1)/g of an all-gather or all-to-all, 2 b (g-1)/g
    of an all-reduce and b (g-1) of a reduce-scatter. An all-gather to 1024 bytes in a group of 4 sends 768.

    Args:
      kind, dtype, shape, axes: see `Transfer`.
      roles: the mesh axes by role.
    """
    group, size = roles.size(axes), jnp.dtype(dtype).itemsize
    for n in shape:
        size *= n
    if kind == "reduce-scatter":
        sent = size * (group - 1)
    else:
        sent = -(-size * (group - 1) * (2 if kind == "all-reduce" else 1) // group)
    return Transfer(kind, dtype, tuple(shape), axes, group, sent)


@runtime_checkable
class Transport(Protocol):
    """How rows travel between the ranks of ep. Its functions take and return the arrays of one device.

    Attributes:
      note: one line of `moax info`: what a user must know about the transport.
      has_slots: whether each pair of ranks has `slots` rows. An assignment that finds no slot is dropped, and `send`
        and `combine` need the plan that `plan` made. Without slots the plan is None.
      portable: whether the transport runs on every mesh and machine.
    """

    @property
    def note(self) -> str: ...

    @property
    def has_slots(self) -> bool: ...

    @property
    def portable(self) -> bool: ...

    def plan(self, static: ExchangeSpec, experts: Int[Array, "T K"], index: int | Int[Array, ""] = 0) -> Planned:
        """Returns which tokens this rank sends where in pass `index`. A transport without slots has one pass."""
        ...

    def send(self, static: CombineSpec, rows: Array, narrow: Sequence[Array], sent: Sent) -> Arrived:
        """Sends the rows [T, H] of this rank's tokens to the ranks of the plan.

        Each narrow array [T, W], of 4 bytes or 1 byte an element, travels with the rows.
        """
        ...

    def combine(self, static: CombineSpec, arrays: Sequence[Array], sent: Sent, tokens: int) -> list[Array]:
        """Computes the transpose of `send`: y[t] is the sum, over the ranks that t went to, of its row there.

        This holds for each of the arrays [R, W].
        """
        ...

    def why_not(self, view: MeshView | None, row_bytes: int | None) -> str | None:
        """Returns why the transport cannot run on the mesh of `view` and this machine; None where it can.

        `row_bytes` are the bytes of a row. Where `view` or `row_bytes` is None, the question is about this machine
        alone.
        """
        ...

    def why_not_on(self, gpus: int, host: int, kernels: str) -> str | None:
        """Returns why the transport cannot run on a mesh of `gpus` GPUs, `host` of them in each machine; None where it
        can.

        The answer does not depend on this machine. `kernels` is the name of the implementation.
        """
        ...

    def received_rows(self, tokens: int, ranks: int, slots: int) -> int:
        """Returns R, the rows of the buffer that a rank receives into."""
        ...

    def buffer_rows(self, tokens: int, top_k: int, ranks: int, slots: int) -> int:
        """Returns the rows of all buffers of an exchange: the received rows, and copies that are sent or summed."""
        ...

    def plan_entries(self, tokens: int, top_k: int, ranks: int, slots: int) -> int:
        """Returns the number of i32 entries of the plan, which forward leaves to backward."""
        ...

    def cost(self, static: ExchangeSpec, tokens: int, top_k: int, step: Step, columns: Columns) -> list[Transfer]:
        """Returns the Transfers of one step, if each token takes K experts at random.

        Args:
          static: the spec of the exchange.
          tokens: T of a shard.
          top_k: K.
          step: `plan`, `send` or `combine`.
          columns: (width, dtype) of each array of a `send` or a `combine`, the rows first; () for a plan.
        """
        ...
