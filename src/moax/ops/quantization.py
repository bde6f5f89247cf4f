"""Quantize and dequantize: x ~ data * scale, one scale a block.

    scale[b] = max |x| over block b / format.max        (rounded up to a power of two where the format says so)
    data     = round_to_format(x / scale)

A NaN or Inf becomes NaN in its own element and leaves the block's scale alone, so that it stays visible and stays put;
an all-zero block has scale 1. A last block that is not full is an edge block. Exact for powers of two times values of
the format. No gradient: products quantize inside their own `custom_vjp`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moax.kernels import implementation, select_kernels
from moax.kernels.xla.quantization import dequantize as dequantize_local
from moax.mesh.axes import Axes, Roles
from moax.mesh.partition import Contract, Partitioned, find_mesh_view
from moax.mesh.specs import Spec, pad, spec
from moax.options import Engine
from moax.recipe import Format
from moax.types import QArray


@dataclasses.dataclass(frozen=True)
class QuantizeSpec:
    """All that is static of `quantize`.

    block: block length of each dim, None for the whole dim. declared: how x lies where no type says it. kernels: the
    name of the implementation.
    """

    format: Format
    block: tuple[int | None, ...]
    roles: Roles
    declared: Spec
    kernels: str


def quantize(
    x: Float[Array, ...],
    format: Format = Format(),
    *,
    block: tuple[int | None, ...] | None = None,
    x_spec: Spec | None = None,
    axes: Axes = Axes(),
    engine: Engine = "auto",
    kernels: str = "auto",
) -> QArray:
    """data = round(x / scale), scale = amax(block) / format.max; each shard by itself, wherever it lies.

    Args:
      x: any shape, floating point, any sharding over `axes`; data and scale have the same.
      format: of the values and scales.
      block: block length of each dim, None for one block over the dim (its amax is taken over the mesh). Default:
        `format.block` along the last dim, 1 along the others.
      x_spec: how x lies on an Auto mesh, or inside a `shard_map`. Needed only where its shards are no multiple of the
        block, which then end in edge blocks of their own (`pieces`); unsaid, x is brought together there first.
      axes, engine, kernels: see `moax.moe`.

    Raises:
      ValueError: `block` has not one positive entry a dim.
    """
    block = format.row_block(x.ndim, "columns") if block is None else tuple(block)
    if len(block) != x.ndim or any(b is not None and b < 1 for b in block):
        raise ValueError(f"block={block} must have one positive int (or None) for each of the {x.ndim} dims of x")
    view = find_mesh_view(axes, engine, x)
    declared = jax.typeof(x).sharding.spec if view.explicit else spec() if x_spec is None else x_spec
    chosen = select_kernels(kernels, None)
    static = QuantizeSpec(format, block, view.roles, declared, chosen)
    data, scale = _quantize(view, static, x)
    scale = view.typed_as_equal(scale, ())
    shards = [()] * x.ndim if view.engine == "local" else _entries(view.roles, declared, x.ndim)
    pieces = tuple(
        1 if b is None or n // view.roles.size(names) % b == 0 else view.roles.size(names)
        for n, names, b in zip(x.shape, shards, block, strict=True)
    )
    return QArray(data, scale, format.dtype, block, pieces)


def dequantize(q: QArray, dtype=jnp.float32, *, axes: Axes = Axes(), engine: Engine = "auto") -> Float[Array, ...]:
    """data * scale, rounded once to `dtype`; sharded like `q.data`.

    Raises:
      ValueError: mesh axes cut the blocks of `q` (shards other than those that were quantized).
    """
    view = find_mesh_view(axes, engine, q)
    static = DequantizeSpec(q.dtype, q.block, q.pieces, jnp.dtype(dtype), view.roles, q.shape)
    return _dequantize(view, static, q.data, q.scale)[0]


def _entries(roles: Roles, of: Spec, ndim: int):
    sizes = dict(roles.sizes)
    return [tuple(n for n in entry if n in sizes) for entry in pad(of, ndim)]


def _scale_spec(entries, block):
    return spec(*(() if b is None else names for names, b in zip(entries, block, strict=True)))


def _dim_names(shape, block, shards):
    """Shardy factors of data and scale: a dim of whole blocks is (blocks, within a block); and sizes of the latter."""
    whole = [b is not None and n % (b * s) == 0 for n, b, s in zip(shape, block, shards, strict=True)]
    data = [f"(b{i} i{i})" if w and b != 1 else f"b{i}" for i, (w, b) in enumerate(zip(whole, block, strict=True))]
    scale = [f"b{i}" if w else f"s{i}" for i, w in enumerate(whole)]
    sizes = tuple((f"i{i}", b) for i, b in enumerate(block) if data[i].startswith("("))
    return " ".join(data), " ".join(scale), sizes


def _local(static: QuantizeSpec, amax_over, x):
    q = implementation(static.kernels).quantize(x, static.format, static.block, amax_over)
    return q.data, q.scale


def _contract(static: QuantizeSpec, operands, found):
    (x,), (of,) = operands, found
    declared = _entries(static.roles, static.declared, x.ndim)
    entries = declared if of is None else _entries(static.roles, of, x.ndim)
    for dim, (n, names, b) in enumerate(zip(x.shape, entries, static.block, strict=True)):
        if b is not None and names and n // static.roles.size(names) % b and entries != declared:
            raise ValueError(f"x: dim {dim} of size {n} over {names} cuts blocks of {b} where x_spec does not")
    amax_over = tuple(n for names, b in zip(entries, static.block, strict=True) if b is None for n in names)
    return Contract((spec(*entries),), (spec(*entries), _scale_spec(entries, static.block)), ((), ()), amax_over)


def _factors(static: QuantizeSpec, operands):
    entries = _entries(static.roles, static.declared, operands[0].ndim)
    data, scale, sizes = _dim_names(operands[0].shape, static.block, map(static.roles.size, entries))
    return (data,), (data, scale), sizes


_quantize = Partitioned(_local, _contract, _factors, name="quantize")


@dataclasses.dataclass(frozen=True)
class DequantizeSpec:
    """The static half of a QArray of this shape, and the dtype to make of it."""

    dtype: str
    block: tuple[int | None, ...]
    pieces: tuple[int, ...]
    out: jnp.dtype
    roles: Roles
    shape: tuple[int, ...]


def _dequantize_local(static: DequantizeSpec, shards, data, scale):
    pieces = tuple(max(1, p // s) for p, s in zip(static.pieces, shards, strict=True))
    return (dequantize_local(QArray(data, scale, static.dtype, static.block, pieces), static.out),)


def _dequantize_contract(static: DequantizeSpec, operands, found):
    entries = _entries(static.roles, found[0] or spec(), len(static.shape))
    shards = tuple(map(static.roles.size, entries))
    for dim, (n, b, pieces, count) in enumerate(zip(static.shape, static.block, static.pieces, shards, strict=True)):
        if b is not None and (pieces % count if pieces > 1 else n // count % b and count > 1):
            raise ValueError(f"q: dim {dim} of size {n} over {entries[dim]} cuts the blocks of {pieces} shards")
    at = spec(*entries)
    return Contract((at, _scale_spec(entries, static.block)), (at,), ((),), shards)


def _dequantize_factors(static: DequantizeSpec, operands):
    data, scale, sizes = _dim_names(static.shape, static.block, static.pieces)
    return (data, scale), (data,), sizes


_dequantize = Partitioned(_dequantize_local, _dequantize_contract, _dequantize_factors, name="dequantize")
