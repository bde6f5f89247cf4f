"""Rows on the wire: quantized to one byte an element where the spec has a format, and dequantized where they arrive.

A row of H elements travels as H bytes and a scale for each block of `format.block` elements. Ids, weights and sums are
not quantized.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from moax.ops.exchange.table import TRANSPORTS
from moax.ops.exchange.transport import Arrived, Columns, CombineSpec, Sent
from moax.ops.quantization import dequantize_local, dequantize_wire, fits_wire, quantize_wire
from moax.recipe import Format


def wire_bytes(x, wire: Format | None = None) -> int:
    """Bytes of a row of x on its way, without its scales."""
    return x.shape[-1] * (1 if wire is not None else x.dtype.itemsize)


def wire_columns(width: int, dtype: str, wire: Format | None) -> Columns:
    """(width, dtype) of the arrays that rows of `width` elements are on their way: the rows, and their scales."""
    if wire is None:
        return ((width, dtype),)
    blocks = 1 if wire.block is None else -(-width // wire.block)
    return ((width, "uint8"), (blocks, "uint8" if wire.scale == "e8m0" else "float32"))


def send_rows(static: CombineSpec, x, narrow: Sequence, sent: Sent) -> Arrived:
    """Rows x [T, H] and narrow arrays [T, W] to the ranks of the plan, the rows quantized on their way.

    Args:
      static: `wire` is the format of the rows. Where ep has one rank nothing travels, so nothing is quantized.
      narrow: they travel as they are.
      sent: the plan of the transport.
    """
    transport, wire = TRANSPORTS[static.transport], static.wire
    if wire is None or not static.roles.ep:
        return transport.send(static, x, narrow, sent)
    kernels = static.kernels == "mosaic"
    q = quantize_wire(x, wire, kernels)
    got = transport.send(static, q.data, (q.scale, *narrow), sent)
    scale, *narrow = got.narrow
    if kernels and got.words is not None and fits_wire(wire, *got.rows.shape):
        # The words begin with the scales, so the kernel reads them where they arrived.
        rows = dequantize_wire(got.rows, got.words, got.ends, wire, x.dtype)
    else:
        rows = dequantize_local(dataclasses.replace(q, data=got.rows, scale=scale), x.dtype)
    return got._replace(rows=rows, narrow=narrow)
