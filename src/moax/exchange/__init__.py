"""The transports, and how the name that a user gives becomes one of them."""

from __future__ import annotations

from moax.exchange.transport import AllGather, AllToAll, Transport

TRANSPORTS: dict[str, Transport] = {
    "all_gather": AllGather(),
    "all_to_all": AllToAll(),
}
EXCHANGES = ("auto", *TRANSPORTS)
# `auto` means this transport, except in the block: see `moax.block.plan.choose_transport`.
AUTO = "all_gather"


def find_transport(exchange: str) -> str:
    """Returns the name of the transport that `exchange` means; `auto` is all_gather.

    Raises:
      ValueError: there is no transport of this name.
    """
    name = AUTO if exchange == "auto" else exchange
    if name not in TRANSPORTS:
        raise ValueError(f"exchange={exchange!r} must be one of {', '.join(map(repr, EXCHANGES))}")
    return name
