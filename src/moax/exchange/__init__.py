"""The transports, and how the name that a user gives becomes one of them."""

from __future__ import annotations

from moax.checks import Unsupported
from moax.exchange.one_sided import OneSided
from moax.exchange.transport import AllGather, AllToAll, Transport
from moax.mesh.axes import ResolvedAxes
from moax.mesh.specs import MeshView

TRANSPORTS: dict[str, Transport] = {
    "all_gather": AllGather(),
    "all_to_all": AllToAll(),
    "one_sided": OneSided(),
}
EXCHANGES = ("auto", *TRANSPORTS)
# `auto` means this transport, except in the block: see `moax.block.plan.choose_transport`.
AUTO = "all_gather"


def find_transport(exchange: str, axes: ResolvedAxes | None = None) -> str:
    """Returns the name of the transport that `exchange` means; nothing is asked of this machine.

    `auto` is all_gather. Where ep of the mesh `axes` has one rank nothing travels, and all_gather takes the place of a
    transport that does not run everywhere. ValueError is raised where there is no transport of this name.
    """
    name = AUTO if exchange == "auto" else exchange
    if name not in TRANSPORTS:
        raise ValueError(f"exchange={exchange!r} must be one of {', '.join(map(repr, EXCHANGES))}")
    if axes is not None and not axes.ep and not TRANSPORTS[name].portable:
        return AUTO
    return name


def select_transport(exchange: str, view: MeshView | None = None, row_bytes: int | None = None) -> str:
    """Returns the name of the transport that `exchange` means, and raises Unsupported where it cannot run.

    Where `view`, or `row_bytes` of a row that travels, is None, the question is about this machine alone.
    """
    name = find_transport(exchange)
    reason = TRANSPORTS[name].why_not(view, row_bytes)
    if reason is not None:
        portable = " or ".join(repr(n) for n, transport in TRANSPORTS.items() if transport.portable)
        raise Unsupported(f"exchange={name!r}: {reason}; use {portable}")
    return find_transport(name, None if view is None else view.axes)
