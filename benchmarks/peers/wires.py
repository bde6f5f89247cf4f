"""Exchanges of rows by JAX alone, of one device in a shard_map over `ep`: peers of the benchmark `exchange`."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped


def all_to_all(rows: Shaped[Array, "N W"]) -> Shaped[Array, "N W"]:
    """As many rows to every device."""
    return lax.all_to_all(rows, "ep", 0, 0, tiled=True)


def ragged(rows: Shaped[Array, "N W"], into: Shaped[Array, "R W"], sizes: Int[Array, "S D"]) -> Shaped[Array, "R W"]:
    """Rows sorted by the device that they go to -> `into` with those received at its head, by the device they are of.

    sizes: rows that device s sends to device d, known on every one.
    """
    me = lax.axis_index("ep")
    begin = jnp.cumsum(sizes, axis=1) - sizes
    there = jnp.cumsum(sizes, axis=0) - sizes  # where each peer puts what comes from here
    return lax.ragged_all_to_all(rows, into, begin[me], sizes[me], there[me], sizes[:, me], axis_name="ep")
