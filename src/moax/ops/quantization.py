"""Quantize and dequantize: x ~ data * scale, with one scale for each block.

    scale[b] = max |x| over block b / max of the format (rounded up to a power of two where the format says so)
    data     = x * (1 / scale), rounded to the format

Blocks of 128 along a dim of 300 elements are elements 0 to 127, 128 to 255, and the edge block 256 to 299. A NaN or Inf
becomes NaN in its own element and does not enter the scale of its block. A block of zeros has scale 1. Quantization has
no gradient: matmuls quantize inside their own `custom_vjp`.

Rows in groups are ordered as in `moax.kernels.groups`. With group sizes (3, 0, 2), align 4 and blocks of 4 rows,
block 0 has the rows 0 to 2, and block 1 the rows 4 and 5. Padding may hold anything, and is quantized to 0.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from moax.checks import check_arrays, check_value
from moax.kernels import DEFAULT, implementation, select_kernels
from moax.kernels.groups import find_groups, zero_rows
from moax.kernels.scales import dequantize as dequantize_array
from moax.mesh.axes import Axes, Names, ResolvedAxes
from moax.mesh.op import Op, OpSharding
from moax.mesh.specs import Engine, Spec, check_spec, find_mesh_view, pad
from moax.recipe import Format
from moax.types import QArray


@dataclasses.dataclass(frozen=True)
class QuantizeSpec:
    """The static arguments of both ops."""

    format: Format  # `dequantize` knows its dtype alone
    block: tuple[int | None, ...]  # the block length of each dim
    axes: ResolvedAxes
    manual: bool  # operands are shards, so that the mesh cuts no block
    explicit: bool  # a dim of which the mesh cuts a block is refused; elsewhere it is gathered first
    declared: Spec | None = None  # the spec of x where neither its type nor its sharding says one
    kernels: str = DEFAULT
    align: int | None = None  # the alignment of groups; None without groups
    out: jnp.dtype | None = None  # the dtype of the result of `dequantize`; None in `quantize`


def quantize(
    x: Float[Array, "..."],
    format: Format = Format(),
    *,
    block: tuple[int | None, ...] | None = None,
    group_sizes: Integer[Array, " groups"] | None = None,
    align: int | None = None,
    x_spec: Spec | None = None,
    axes: Axes = Axes(),
    engine: Engine = "auto",
    kernels: str = "auto",
) -> QArray:
    """data = round(x * (1 / scale)) with scale = amax(block) / max of the format.

    Args:
      x: any shape, floating point, any sharding over `axes`.
      format: the format of values and scales.
      block: the block length of each dim, in elements. None makes the whole dim one block, whose amax is taken over the
        mesh. The default is `format.block` along the last dim and 1 along the others.
      group_sizes: [groups], integers, the rows of each group, or None: all rows are real. Rows and sizes are split over
        a mesh as in `grouped_matmul`.
      align: each group starts at a multiple of so many rows: of `block[0]`, which is the default, so that no block has
        rows of two groups.
      x_spec: the spec of x on an Auto mesh; on Explicit axes the type of x has it. With engine="custom_partitioning"
        x keeps the sharding that it has. Without `x_spec` the scales of a dim are then split only where the number
        of its blocks is divisible by that of all devices of the mesh.
      axes, engine, kernels: see `moax.Options`.

    Returns:
      The QArray. Its data have the shape of x, and data and scale have the sharding of x.

    Raises:
      ValueError: `block` does not have one positive entry, or None, for each dim of x; a block of rows has rows of two
        groups; or the shards of x have no whole blocks on Explicit axes (on Auto axes such a dim is gathered first).
      Unsupported: the engine or the kernels that were chosen by name cannot run.
    """
    check_arrays("x [...], group_sizes? int [groups]", x, group_sizes)
    check_value("format", format, Format)
    if block is None:
        block = format.row_block(x.ndim, "fprop")
    block = tuple(block) if isinstance(block, list | tuple) else (block,)
    if len(block) != x.ndim:
        raise ValueError(f"block={block} must have one positive int (or None) for each of the {x.ndim} dims of x")
    for dim, length in enumerate(block):
        if length is not None:
            check_value(f"block[{dim}]", length, int)
    if group_sizes is not None:
        check_arrays("x [M, ...]", x)
        rows = block[0] or 1
        if align is None:
            align = rows
        check_value("align", align, int)
        if align % rows:
            raise ValueError(f"align={align} must be a multiple of {rows}, the rows of a block of block={block}")
    elif align is not None:
        raise ValueError(f"align={align} must be None without group_sizes; pass group_sizes too")
    view = find_mesh_view(axes, engine, x)
    declared = None if x_spec is None else check_spec("x_spec", x_spec, x.ndim)
    chosen_kernels = select_kernels(kernels, None)
    if x.size == 0:
        return _quantize_no_elements(x.shape, format, block)
    static = QuantizeSpec(format, block, view.axes, view.manual, view.explicit, declared, chosen_kernels, align)
    sizes = None
    if group_sizes is not None:
        sizes = jnp.asarray(group_sizes).astype(jnp.int32)
        _, (x, sizes) = _quantize.lay_out(view, static, x, sizes)
    data, scale = _quantize(view, static, x, sizes)
    return QArray(data, view.assume_replicated(scale, ()), format.dtype, block)


def dequantize(
    q: QArray, dtype: DTypeLike = jnp.float32, *, axes: Axes = Axes(), engine: Engine = "auto"
) -> Float[Array, "..."]:
    """x = data * scale, rounded once to `dtype`.

    Args:
      q: values and scales, as `quantize` returns them.
      dtype: the dtype of the result.
      axes, engine: see `moax.Options`.

    Returns:
      [...] in `dtype`, with the shape and the sharding of `q.data`.

    Raises:
      ValueError: the shards of `q` have no whole blocks on Explicit axes (on Auto axes such a dim is gathered first).
    """
    check_value("q", q, QArray)
    check_value("dtype", dtype, jnp.floating)
    view = find_mesh_view(axes, engine, q)
    format = Format(cast(Any, q.dtype))
    static = QuantizeSpec(format, q.block, view.axes, view.manual, view.explicit, out=jnp.dtype(dtype))
    return _dequantize(view, static, q.data, q.scale)[0]


def _quantize_no_elements(shape: tuple[int, ...], format: Format, block: tuple[int | None, ...]) -> QArray:
    """Returns the QArray of an array without elements, whose scales, if it has any, are 1."""
    blocks = tuple(1 if b is None else -(-size // b) for size, b in zip(shape, block, strict=True))
    if format.scale == "e8m0":
        scale = jnp.full(blocks, 127, jnp.uint8)
    else:
        scale = jnp.ones(blocks, jnp.float32)
    return QArray(jnp.zeros(shape, jnp.uint8), scale, format.dtype, block)


def _entries(static: QuantizeSpec, spec: Spec | None, ndim: int) -> list[Names]:
    """Returns the mesh axes of more than one device over each dim."""
    sizes = dict(static.axes.sizes)
    return [tuple(name for name in entry if name in sizes) for entry in pad(spec or Spec(), ndim)]


def _split(static: QuantizeSpec, shape, spec: Spec | None) -> list[Names]:
    """Returns the axes that split each dim of an array whose type or sharding has this spec."""
    split = _entries(static, spec, len(shape))
    for dim, (size, b, names) in enumerate(zip(shape, static.block, split, strict=True)):
        if b is None or not names or static.manual:
            continue
        shard_size = size // static.axes.size(names)
        if shard_size % b == 0:
            continue
        split[dim] = ()
        if static.explicit:
            raise ValueError(
                f"dim {dim} of size {size} is sharded over mesh axes {names}, which cut its blocks "
                f"of {b}; take a block that divides {shard_size}, or another layout"
            )
    return split


def _quantize_shards(static: QuantizeSpec, amax_over: Names, x, group_sizes):
    if group_sizes is not None:
        x = zero_rows(x, find_groups(group_sizes, static.align or 1, x.shape[0]).real)
    q = implementation(static.kernels).quantize(x, static.format, static.block, amax_over)
    return q.data, q.scale


def _dequantize_shards(static: QuantizeSpec, _, data, scale):
    return dequantize_array(QArray(data, scale, static.format.dtype, static.block), static.out)


def _sharding(static: QuantizeSpec, operands, operand_specs) -> OpSharding:
    """Returns the layout of an op: data and scale are split as x is."""
    spec = static.declared if operand_specs[0] is None else operand_specs[0]
    split = _split(static, operands[0].shape, spec)
    if static.align is not None:
        split = [static.axes.tokens, *split[1:]]
    split_scale: list[Names] = []
    amax_over: Names = ()
    for names, b in zip(split, static.block, strict=True):
        if b is None:
            split_scale.append(())
            amax_over += names
        else:
            split_scale.append(names)
    data = Spec(*split)
    scale = Spec(*split_scale)
    if static.out is not None:
        return OpSharding((data, scale), (data,), ((),))
    sizes = None if static.align is None else Spec(static.axes.tokens)
    return OpSharding((data, sizes), (data, scale), ((), ()), amax_over)


def _rule(static: QuantizeSpec, operands) -> tuple[str, tuple[tuple[str, int], ...]]:
    """Returns the rule of an op, and the sizes of the dims inside a block."""
    # A dim 256 in blocks of 128 is "(b0 i0)" in data and "b0" in scale, with i0 = 128, so an axis that splits blocks
    # splits both. A dim of one block, or of blocks that the mesh may cut, has unrelated names in data and scale:
    # Shardy would split a part of an axis, which JAX cannot read.
    shape = operands[0].shape
    split = [static.axes.all] * len(shape)
    if static.declared is not None:
        split = _entries(static, static.declared, len(shape))
    data_dims = []
    scale_dims = []
    sizes = []
    for i, (size, b, names) in enumerate(zip(shape, static.block, split, strict=True)):
        devices = static.axes.size(names)
        # The mesh may cut blocks, or the dim is one block.
        if b is None or size % (b * devices) or (b > 1 and size <= b):
            data_dims.append(f"b{i}")
            scale_dims.append(f"s{i}")
            continue
        scale_dims.append(f"b{i}")
        if b == 1:
            data_dims.append(f"b{i}")
        else:
            data_dims.append(f"(b{i} i{i})")
            sizes.append((f"i{i}", b))
    data = " ".join(data_dims)
    scale = " ".join(scale_dims)
    if static.out is None:
        return f"{data}, @ -> {data}, {scale}", tuple(sizes)
    return f"{data}, {scale} -> {data}", tuple(sizes)


_quantize = Op("quantize", _quantize_shards, _rule, sharding=_sharding)
_dequantize = Op("dequantize", _dequantize_shards, _rule, sharding=_sharding)
