"""Rows on the wire: quantized to one byte an element where the spec has a format, and dequantized where they arrive.

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
    """Bytes of a row of x on its way, without its scales."""
    return x.shape[-1] * (1 if wire is not None else x.dtype.itemsize)


def wire_columns(width: int, dtype: str, wire: Format | None) -> Columns:
    """(width, dtype) of the arrays that rows of `width` elements are on their way: the rows, and their scales."""
    if wire is None:
        return ((width, dtype),)
    blocks = 1 if wire.block is None else -(-width // wire.block)
    return ((width, "uint8"), (blocks, "uint8" if wire.scale == "e8m0" else "float32"))


def send_rows(static: CombineSpec, x: Float[Array, "T H"], narrow: Sequence[Array], sent: Sent) -> Arrived:
    """Rows x [T, H] and narrow arrays [T, W] to the ranks of the plan, the rows quantized on their way.

    Args:
      static: `wire` is the format of the rows. Where ep has one rank nothing travels, so nothing is quantized.
      narrow: they travel as they are.
      sent: the plan of the transport.
    """
    transport, wire = TRANSPORTS[static.transport], static.wire
    if wire is None or not static.roles.ep:
        return transport.send(static, x, narrow, sent)
    local = implementation(static.kernels)
    q = local.quantize(x, wire, wire.row_block(2, "columns"))
    got = transport.send(static, q.data, (q.scale, *narrow), sent)
    scale, *narrow = got.narrow
    if got.words is not None and scale.dtype == jnp.float32:
        # The words begin with the scales, so they are read where they arrived.
        rows = local.dequantize_wire(got.rows, got.words, got.ends, wire, x.dtype)
    else:
        rows = dequantize(dataclasses.replace(q, data=got.rows, scale=scale), x.dtype)
    return got._replace(rows=rows, narrow=narrow)
