"""Peers are other implementations of the same products. A peer is imported only when it is measured.

A peer in this process is a module with a function calls(problem, direction, quick), which returns a call for each
tile; the fastest call counts. It takes rows without padding between groups. PyTorch has a process of its own
(`torch_grouped`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

JAX_PEERS = {
    "ragged_dot": "jax.lax.ragged_dot",
    "pallas_mgpu": "jax.experimental.pallas.ops.gpu",
}
TORCH = "torch"
NAMES = (*JAX_PEERS, TORCH)


def parse(text: str, names: tuple[str, ...] = NAMES) -> tuple[str, ...]:
    """Parses --peers: `all` of `names`, `none`, or some of them with commas."""
    if text in ("all", "none"):
        return names if text == "all" else ()
    chosen = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in chosen if name not in names]
    if unknown:
        raise ValueError(f"--peers {text}: unknown {', '.join(unknown)}; use all, none, or some of {', '.join(names)}")
    return chosen


def calls_of(name: str) -> Callable:
    """Returns the function `calls` of a peer in this process."""
    return importlib.import_module(f"benchmarks.peers.{name}").calls
