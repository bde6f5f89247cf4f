"""Quantized operands of products: a QArray that the caller made once, and that no product quantizes again.

    x ~ data * scale        the product multiplies these values, rounded once to its dtype

A weight [E, K, *C] is gathered as bytes and scales, and dequantized where it has arrived. A QArray has no gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moax.checks import check_count, check_float, check_float_dtype, check_kind
from moax.errors import Unsupported
from moax.kernels import DEFAULT, select_kernels
from moax.kernels.scales import dequantize
from moax.mesh.axes import Names, Roles
from moax.mesh.collectives import gather_weight
from moax.mesh.specs import spec
from moax.mesh.tokens import flatten_tokens
from moax.ops.quantization import check_cuts, scale_spec
from moax.recipe import Recipe
from moax.types import QArray


def check_operand(name: str, value: Array | QArray, dims: str) -> None:
    """Raises ValueError unless value is a QArray, or an array of floating point; `dims` is as in `check_float`."""
    if not isinstance(value, QArray):
        check_float(name, value, dims)


def check_align(align: int | None, recipe: Recipe) -> int:
    """Returns align, or the recipe's `row_alignment` for None. Raises ValueError unless it is a multiple of that."""
    align = recipe.row_alignment if align is None else align
    check_count("align", align)
    if align % recipe.row_alignment:
        raise ValueError(f"align={align} must be a multiple of {recipe.row_alignment}, the recipe's blocks of rows")
    return align


def check_quantized(w: Array | QArray, quantized: QArray | None) -> None:
    """Raises ValueError unless `quantized` is None or fits w."""
    if quantized is None:
        return
    check_kind("quantized", quantized, QArray, "moax.ops.quantize")
    if isinstance(w, QArray):
        raise ValueError("quantized was given with a QArray w; w must then be the weight in floating point")
    if quantized.shape != w.shape:
        raise ValueError(f"quantized has shape {quantized.shape}; it must be that of w, {w.shape}")


def product_dtypes(x: Array | QArray, preferred: DTypeLike | None) -> tuple[jnp.dtype, jnp.dtype]:
    """Returns the dtype in which operands enter a product, and the dtype of its result.

    Raises:
      ValueError: `preferred` is no floating-point dtype, or None where x is a QArray.
    """
    if preferred is not None:
        check_float_dtype("preferred_element_type", preferred)
    elif isinstance(x, QArray):
        raise ValueError("preferred_element_type=None, and x is a QArray, which has no dtype; it must be that of y")
    dtype = jnp.dtype(preferred if isinstance(x, QArray) else x.dtype)
    return dtype, jnp.dtype(dtype if preferred is None else preferred)


def wider(dtype: jnp.dtype, out: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of a product of operands of `dtype` that is rounded to `out`: float32 unless they are equal."""
    return dtype if dtype == out else jnp.dtype(jnp.float32)


def pick_kernels(kernels: str, dtype: DTypeLike, operands: Sequence[Array | QArray | None], **widths: int) -> str:
    """Returns the name of the implementation of a product of these operands.

    The implementation that runs everywhere takes a QArray of any blocks.

    Raises:
      Unsupported: another implementation was chosen by name for a QArray, or cannot run.
    """
    if not any(isinstance(v, QArray) for v in operands):
        return select_kernels(kernels, dtype, **widths)
    chosen = select_kernels(DEFAULT if kernels == "auto" else kernels, dtype, **widths)
    if chosen != DEFAULT:
        raise Unsupported(f"kernels={kernels!r} takes no QArray as an operand; use 'auto' or {DEFAULT!r}")
    return chosen


def operand_spec(name: str, operand: Array | QArray, entries: Sequence[Names], roles: Roles):
    """Returns the spec of an operand whose dims lie over the axes `entries`; of a QArray a QArray of specs.

    Raises:
      ValueError: these axes cut the blocks of a QArray.
    """
    if not isinstance(operand, QArray):
        return spec(*entries)
    check_cuts(name, operand, entries, roles)
    return jax.tree.unflatten(jax.tree.structure(operand), [spec(*entries), scale_spec(entries, operand.block)])


def dequantize_shard(q: QArray, entries: Sequence[Names], roles: Roles, dtype: DTypeLike) -> Float[Array, "..."]:
    """Returns the values of one device's shard of a QArray, whose dims lie over the axes `entries`."""
    return dequantize(_local(q, entries, roles), dtype)


def gather_quantized(
    q: QArray, entries: Sequence[Names], gather: Sequence[Names], roles: Roles, dtype: DTypeLike
) -> Float[Array, "E K C"]:
    """Returns the whole weight [E, K, C] of a shard [E, K, *C]: its bytes and scales are gathered, then dequantized.

    Args:
      q: the shard. Where one block holds a whole dim, its scale is that of all shards.
      entries: the axes that split each dim of the QArray that the caller gave.
      gather: the axes over which each dim is gathered.
      roles: the mesh axes by role.
      dtype: the dtype of the result.
    """
    local = _local(q, entries, roles)
    along = [() if b is None else names for names, b in zip(gather, q.block, strict=True)]
    pieces = tuple(n * roles.size(names) for n, names in zip(local.pieces, along, strict=True))
    data, scale = gather_weight(q.data, gather), gather_weight(q.scale, along)
    whole = dequantize(QArray(data, scale, q.dtype, q.block, pieces), dtype)
    return whole.reshape(*whole.shape[:2], -1)


def flatten_rows(x: Array | QArray, roles: Roles) -> Array | QArray:
    """Reshapes x [..., K] to [T, K], as `flatten_tokens` does.

    Raises:
      ValueError: x is a QArray of more than two dims, whose blocks go over several rows.
    """
    if not isinstance(x, QArray):
        return flatten_tokens(x, roles)
    *rows, last = x.block
    if x.ndim > 2 and any(b != 1 for b in rows) and any(b is not None for b in x.block):
        raise ValueError(f"x is a QArray with block={x.block}; its blocks must have one row, such as (1, 1, 128)")
    one = x.scale.size == 1
    scale = x.scale.reshape(1, 1) if one and x.ndim > 2 else flatten_tokens(x.scale, roles)
    block = (rows[0] if x.ndim == 2 else None if one else 1, last)
    pieces = (x.pieces[0] if x.ndim == 2 else 1, x.pieces[-1])
    return QArray(flatten_tokens(x.data, roles), scale, x.dtype, block, pieces)


def stack_one(w: QArray) -> QArray:
    """Returns w [K, *C] as the weight [1, K, *C] of one group."""
    return QArray(w.data[None], w.scale[None], w.dtype, (1, *w.block), (1, *w.pieces))


def _local(q: QArray, entries: Sequence[Names], roles: Roles) -> QArray:
    """Returns one device's shard of a QArray with the pieces of the shard, from those of the whole."""
    pieces = tuple(max(1, n // roles.size(names)) for n, names in zip(q.pieces, entries, strict=True))
    return dataclasses.replace(q, pieces=pieces)
