"""Exchanges of rows by JAX alone, for one device in a shard_map over `ep`: peers of the benchmark `exchange`."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped


def all_to_all(rows: Shaped[Array, "N W"]) -> Shaped[Array, "N W"]:
    """Sends the d-th equal part of the rows to device d."""
    return lax.all_to_all(rows, "ep", 0, 0, tiled=True)


def ragged(rows: Shaped[Array, "N W"], into: Shaped[Array, "R W"], sizes: Int[Array, "S D"]) -> Shaped[Array, "R W"]:
    """Sends rows, which are sorted by target device, and returns `into` with the received rows at its head.

    The received rows are sorted by source device: the rows from device s begin at row sum(sizes[:s, me]) of `into`.

    Args:
      rows: [N, W], the rows of this device.
      into: [R, W], the buffer for received rows.
      sizes: [S, D] i32; device s sends sizes[s, d] rows to device d. Every device knows all sizes.
    """
    me = lax.axis_index("ep")
    send_starts = jnp.cumsum(sizes, axis=1) - sizes
    receive_starts = jnp.cumsum(sizes, axis=0) - sizes
    return lax.ragged_all_to_all(
        rows, into, send_starts[me], sizes[me], receive_starts[me], sizes[:, me], axis_name="ep"
    )
