"""Jaxprs: the operations of a function, which its kernels and its checks read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.extend import core


def called(eqn: core.JaxprEqn) -> Any:
    """Returns the closed jaxpr of a call, such as that of jit or of a custom derivative; None for an operation."""
    return eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))


def operations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Yields the operations of a jaxpr; in the place of a call, those of its body."""
    for eqn in jaxpr.eqns:
        inner = called(eqn)
        if inner is None:
            yield eqn
        else:
            yield from operations(getattr(inner, "jaxpr", inner))
