"""What a transport is: an object that sends rows, sums them back, and says what both cost.

A transport is one file with one object, and one line in `table.py`. Nothing else in moax asks which transport it is:
the ops, the block, `moax info` and `moax estimate` ask the object.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Int

from moax.mesh.axes import Names, Roles
from moax.mesh.partition import MeshView
from moax.recipe import Format

Sent = Any  # which tokens a rank sent where: `Received.slots`, of a type that only its transport knows
Step = Literal["plan", "send", "combine"]
Columns = Sequence[tuple[int, str]]  # (width, dtype) of each array that travels


@dataclasses.dataclass(frozen=True)
class CombineSpec:
    """What is static of a combine, and of its transpose.

    Attributes:
      transport: the name of the transport, a key of `TRANSPORTS`.
      roles: the axes of the mesh.
      slots: rows for each pair of ranks, of a transport that has slots.
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
        """Devices along ep."""
        return self.roles.size(self.roles.ep)


@dataclasses.dataclass(frozen=True)
class ExchangeSpec(CombineSpec):
    """What is static of a dispatch, of its combine, and of the gradients of both. num_experts: E of the whole mesh."""

    num_experts: int = dataclasses.field(kw_only=True)

    @property
    def local_experts(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.ranks


class Arrived(NamedTuple):
    """What one rank received of a send.

    Attributes:
      rows: [R, H].
      narrow: an array [R, W] of each narrow one that was sent, with the bits that were sent.
      words: [R, V] i32, the narrow arrays side by side in their order, where they travelled so; else None.
      ends: [P] i32: rows from ends[-1] on hold anything. None: every row holds a token, or 0 in an empty slot.
    """

    rows: Array
    narrow: list[Array]
    words: Array | None = None
    ends: Array | None = None


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One array that a transport moves.

    Attributes:
      kind: a collective as `moax.inspect` names it, or "put": rows that a kernel writes to peers.
      dtype: NumPy's name. shape: of the result on one device, of a put the rows that arrive.
      axes: the mesh axes of the group. group_size: its devices.
      bytes: what one device sends to others.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    axes: Names
    group_size: int
    bytes: int


def collective(kind: str, dtype: str, shape: Sequence[int], roles: Roles, axes: Names) -> Transfer:
    """The Transfer of a collective by the ring algorithm.

    With b the bytes of the result and g devices, a device sends b (g-1)/g of an all-gather or all-to-all, 2 b (g-1)/g
    of an all-reduce and b (g-1) of a reduce-scatter. An all-gather to 1024 bytes in a group of 4 sends 768.

    Args:
      kind, dtype, shape, axes: as of `Transfer`.
      roles: the axes of the mesh.
    """
    group, size = roles.size(axes), jnp.dtype(dtype).itemsize
    for n in shape:
        size *= n
    if kind == "reduce-scatter":
        sent = size * (group - 1)
    else:
        sent = -(-size * (group - 1) * (2 if kind == "all-reduce" else 1) // group)
    return Transfer(kind, dtype, tuple(shape), axes, group, sent)


class Transport(Protocol):
    """How rows travel between the ranks of ep. Its functions of arrays are those of one device.

    Attributes:
      note: what a user must know of it, in one line of `moax info`.
      has_slots: each pair of ranks has `slots` rows. What finds no slot is dropped, and `send` and `combine` need the
        plan that `plan` made. Without slots the plan is None.
      portable: it runs on every mesh and machine.
    """

    @property
    def note(self) -> str: ...

    @property
    def has_slots(self) -> bool: ...

    @property
    def portable(self) -> bool: ...

    def plan(self, static: ExchangeSpec, experts: Int[Array, "T K"]) -> tuple[Sent, Int[Array, " 1"]]:
        """Which tokens this rank sends where, and how many of its assignments (token, expert) found no slot."""
        ...

    def send(self, static: CombineSpec, rows: Array, narrow: Sequence[Array], sent: Sent) -> Arrived:
        """The rows [T, H] of this rank's tokens, and each narrow array [T, W] of 4 bytes or 1 an element, to the ranks
        of the plan."""
        ...

    def combine(self, static: CombineSpec, arrays: Sequence[Array], sent: Sent, tokens: int) -> list[Array]:
        """The transpose of `send`: y[t] = the sum over ranks of the row that token t became there, of each array
        [R, W]."""
        ...

    def why_not(self, view: MeshView | None, row_bytes: int | None) -> str | None:
        """Why it cannot run on the mesh of `view` and this machine, for rows of so many bytes; None where it can. None
        for either asks this machine alone."""
        ...

    def why_not_on(self, gpus: int, host: int, kernels: str) -> str | None:
        """The same of a mesh of `gpus` GPUs, `host` of them in each machine, with these kernels; nothing is asked of
        this machine."""
        ...

    def received_rows(self, tokens: int, ranks: int, slots: int) -> int:
        """R: rows of the buffer that a rank receives into."""
        ...

    def buffer_rows(self, tokens: int, top_k: int, ranks: int, slots: int) -> int:
        """Rows of all buffers of an exchange: those received, and copies made to be sent or to be summed."""
        ...

    def plan_entries(self, tokens: int, top_k: int, ranks: int, slots: int) -> int:
        """i32 numbers of the plan that forward leaves to backward."""
        ...

    def cost(self, static: ExchangeSpec, tokens: int, top_k: int, step: Step, columns: Columns) -> list[Transfer]:
        """What one step moves where each token takes K experts at random.

        Args:
          tokens: T. top_k: K.
          step: `plan`, `send` or `combine`.
          columns: the arrays of a `send` or a `combine`, rows first; () of a plan.
        """
        ...
