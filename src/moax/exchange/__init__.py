"""The transports, and how the name that a user gives becomes one of them."""

from __future__ import annotations

from typing import Literal, get_args

from moax.checks import Unsupported
from moax.exchange.one_sided import OneSided
from moax.exchange.transport import AllGather, AllToAll, Transport
from moax.mesh.axes import ResolvedAxes
from moax.mesh.specs import MeshView

Exchange = Literal["auto", "all_gather", "all_to_all", "one_sided"]  # "auto", and the keys of TRANSPORTS
EXCHANGES = get_args(Exchange)
TRANSPORTS: dict[str, Transport] = dict(all_gather=AllGather(), all_to_all=AllToAll(), one_sided=OneSided())
AUTO = "all_gather"  # `auto` means this transport, except in the block: see `moax.block.plan.choose_transport`


def find_transport(exchange: str, axes: ResolvedAxes | None = None) -> str:
    """Returns the name of the transport that `exchange` means; nothing is asked of this machine.

    `auto` is all_gather. Where ep of the mesh `axes` has one rank nothing travels, and all_gather takes the place of a
    transport that does not run everywhere. ValueError is raised where there is no transport of this name.
    """
    name = AUTO if exchange == "auto" else exchange
    if name not in TRANSPORTS:
        raise ValueError(f"exchange={exchange!r} must be one of {', '.join(map(repr, ('auto', *TRANSPORTS)))}")
    return AUTO if axes is not None and not axes.ep and not TRANSPORTS[name].portable else name


def select_transport(exchange: str, view: MeshView | None = None, row_bytes: int | None = None) -> str:
    """Returns the name of the transport that `exchange` means, and raises Unsupported where it cannot run.

    Where `view`, or `row_bytes` of a row that travels, is None, the question is about this machine alone.
    """
    name = find_transport(exchange)
    if (why := TRANSPORTS[name].why_not(view, row_bytes)) is not None:
        portable = " or ".join(repr(n) for n, transport in TRANSPORTS.items() if transport.portable)
        raise Unsupported(f"exchange={name!r}: {why}; use {portable}")
    return find_transport(name, None if view is None else view.axes)
