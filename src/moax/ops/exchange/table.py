"""The transports by name, and how the name that a user gives becomes one of them."""

from __future__ import annotations

from typing import Literal, get_args

from moax.errors import Unsupported
from moax.mesh.axes import Roles
from moax.mesh.partition import MeshView
from moax.ops.exchange.all_gather import AllGather
from moax.ops.exchange.all_to_all import AllToAll
from moax.ops.exchange.one_sided import OneSided
from moax.ops.exchange.transport import Transport

Exchange = Literal["auto", "all_gather", "all_to_all", "one_sided"]  # "auto", and the keys of TRANSPORTS
TRANSPORTS: dict[str, Transport] = {
    "all_gather": AllGather(),
    "all_to_all": AllToAll(),
    "one_sided": OneSided(),
}
AUTO = "all_gather"  # `auto` means this transport, except in the block: see `BlockSpec.choose`
EXCHANGES = get_args(Exchange)


def find_transport(exchange: str, roles: Roles | None = None) -> str:
    """Returns the name of the transport that `exchange` means; nothing is asked of this machine.

    Args:
      exchange: `auto`, which is all_gather, or the name of a transport.
      roles: the mesh axes by role. Where ep has one rank nothing travels, and all_gather takes the place of a transport
        that does not run everywhere.

    Raises:
      ValueError: there is no transport of this name.
    """
    choices = ("auto", *TRANSPORTS)
    if exchange not in choices:
        raise ValueError(f"exchange={exchange!r} must be one of {', '.join(map(repr, choices))}")
    if exchange == "auto" or (roles is not None and not roles.ep and not TRANSPORTS[exchange].portable):
        return AUTO
    return exchange


def select_transport(exchange: str, view: MeshView | None = None, row_bytes: int | None = None) -> str:
    """Returns the name of the transport that `exchange` means, which this machine can run.

    Args:
      exchange: `auto`, which is all_gather, or the name of a transport.
      view: the view of the mesh; None asks about this machine alone.
      row_bytes: the bytes of a row that travels; None asks about this machine alone.

    Raises:
      ValueError: there is no transport of this name.
      Unsupported: the transport cannot run on this machine and mesh.
    """
    name = find_transport(exchange)
    refuse(name, TRANSPORTS[name].why_not(view, row_bytes))
    return find_transport(name, None if view is None else view.roles)


def refuse(name: str, why: str | None) -> None:
    """Raises Unsupported with the reason why the transport of this name cannot run, unless that is None."""
    if why is not None:
        portable = " or ".join(repr(n) for n, transport in TRANSPORTS.items() if transport.portable)
        raise Unsupported(f"exchange={name!r}: {why}; use {portable}")
