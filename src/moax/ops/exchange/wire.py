"""Rows on the wire are quantized to one byte an element, if the spec has a format, and dequantized on arrival.

A row of H elements travels as H bytes and a scale for each block of `format.block` elements. Ids, weights and sums are
not quantized.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float

from moax.kernels import implementation
from moax.kernels.scales import dequantize
from moax.ops.exchange.table import TRANSPORTS
from moax.ops.exchange.transport import Arrived, Columns, CombineSpec, Sent
from moax.recipe import Format


def wire_bytes(x: Array, wire: Format | None = None) -> int:
    """Returns the bytes of a row of x on the wire, without its scales."""
    return x.shape[-1] * (1 if wire is not None else x.dtype.itemsize)


def wire_columns(width: int, dtype: str, wire: Format | None) -> Columns:
    """Returns (width, dtype) of each array that travels for rows of `width` elements.

    These are the rows, and their scales if they are quantized. Rows of 2048 bfloat16 in a format of 128 float32 blocks
    travel as ((2048, "uint8"), (16, "float32")).
    """
    if wire is None:
        return ((width, dtype),)
    blocks = 1 if wire.block is None else -(-width // wire.block)
    return ((width, "uint8"), (blocks, "uint8" if wire.scale == "e8m0" else "float32"))


def send_rows(static: CombineSpec, x: Float[Array, "T H"], narrow: Sequence[Array], sent: Sent) -> Arrived:
    """Sends rows x [T, H] and narrow arrays [T, W] to the ranks of the plan; the rows are quantized on the wire.

    Args:
      static: the spec; `static.wire` is the format of the rows. Where ep has one rank nothing travels, so nothing is
        quantized.
      x: [T, H], floating point.
      narrow: arrays [T, W] of 4 bytes or 1 byte an element, which travel bit for bit.
      sent: the plan of the transport.

    Returns:
      Arrived, with rows in x.dtype.
    """
    transport, wire = TRANSPORTS[static.transport], static.wire
    if wire is None or not static.roles.ep:
        return transport.send(static, x, narrow, sent)
    local = implementation(static.kernels)
    q = local.quantize(x, wire, wire.row_block(2, "columns"))
    arrived = transport.send(static, q.data, (q.scale, *narrow), sent)
    scale, *narrow = arrived.narrow
    if arrived.words is not None and scale.dtype == jnp.float32:
        # The words begin with the scales, so the kernel reads the scales where they arrived.
        rows = local.dequantize_wire(arrived.rows, arrived.words, arrived.ends, wire, x.dtype)
    else:
        rows = dequantize(dataclasses.replace(q, data=arrived.rows, scale=scale), x.dtype)
    return arrived._replace(rows=rows, narrow=narrow)
