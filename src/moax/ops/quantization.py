"""Quantize and dequantize: x ~ data * scale, with one scale for each block.

    scale[b] = max |x| over block b / format.max        (rounded up to a power of two where the format says so)
    data     = round_to_format(x * (1 / scale))

Blocks of 128 along a dim of 300 elements are elements 0 to 127, 128 to 255, and the edge block 256 to 299. A NaN or Inf
becomes NaN in its own element and does not enter the scale of its block. A block of zeros has scale 1. The result is
exact where the scale is a power of two and x / scale is a value of the format. Quantization has no gradient: products
quantize inside their own `custom_vjp`.

Rows in groups lie as in `moax.groups`. With group sizes (3, 0, 2), align 4, 12 rows and blocks of 4 rows, block 0 has
the rows 0 to 2, block 1 the rows 4 and 5, and block 2 none; rows 3, 6 to 11 are padding, which may hold anything and is
quantized to 0.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from moax.checks import check_count, check_float, check_float_dtype, check_int, check_kind, is_int
from moax.groups import row_groups, zero_rows
from moax.kernels import implementation, select_kernels
from moax.kernels.scales import dequantize as dequantize_local
from moax.kernels.scales import to_exponent, to_scale
from moax.mesh.axes import Axes, Roles
from moax.mesh.partition import Contract, Engine, Partitioned, find_mesh_view
from moax.mesh.specs import Spec, check_spec, pad, spec
from moax.recipe import Format
from moax.types import QArray


@dataclasses.dataclass(frozen=True)
class QuantizeSpec:
    """The static arguments of `quantize`.

    Attributes:
      format: the format of values and scales.
      block: the block length of each dim; None makes the whole dim one block.
      roles: the mesh axes by role.
      declared: the spec of x, used where neither its type nor its sharding says one.
      kernels: the name of the implementation.
      align: each group starts at a multiple of so many rows; None where all rows are real.
    """

    format: Format
    block: tuple[int | None, ...]
    roles: Roles
    declared: Spec
    kernels: str
    align: int | None


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
    """data = round(x * (1 / scale)) with scale = amax(block) / format.max. Each shard is quantized by itself.

    Args:
      x: any shape, floating point, any sharding over `axes`.
      format: the format of values and scales.
      block: the block length of each dim, in elements. None makes the whole dim one block, whose amax is taken over the
        mesh. The default is `format.block` along the last dim and 1 along the others.
      group_sizes: [groups], integers, the rows of each group, or None: all rows are real. On a mesh x then lies over
        (dp, fsdp, ep, cp) along its rows, and the sizes of all shards follow one another, as in `grouped_matmul`.
      align: each group starts at a multiple of so many rows. It must be a multiple of `block[0]`, which is the default,
        so that no block has rows of two groups.
      x_spec: the spec of x on an Auto mesh, or inside a `shard_map`. It matters only where the size of a shard is no
        multiple of the block: each shard then ends in an edge block of its own (see `QArray.pieces`). Without it, such
        a dim is gathered before it is quantized.
      axes, engine, kernels: see `moax.Options`.

    Returns:
      The QArray. Its data have the shape of x, and data and scale have the sharding of x.

    Raises:
      ValueError: `block` does not have one positive entry, or None, for each dim of x, or blocks of rows go over two
        groups.
      Unsupported: the engine or the kernels that were chosen by name cannot run.
    """
    check_float("x", x, "[...]")
    check_kind("format", format, Format)
    block = format.row_block(x.ndim, "columns") if block is None else block
    block = tuple(block) if isinstance(block, list | tuple) else (block,)
    if len(block) != x.ndim or any(b is not None and (not is_int(b) or b < 1) for b in block):
        raise ValueError(f"block={block} must have one positive int (or None) for each of the {x.ndim} dims of x")
    align = _check_groups(x, block, group_sizes, align)
    view = find_mesh_view(axes, engine, x)
    declared = jax.typeof(x).sharding.spec if view.explicit else spec()
    if x_spec is not None:
        declared = check_spec("x_spec", x_spec, x.ndim) if not view.explicit else declared
    if group_sizes is not None:
        declared = spec(view.roles.tokens, *pad(declared, x.ndim)[1:])
    chosen = select_kernels(kernels, None)
    static = QuantizeSpec(format, block, view.roles, declared, chosen, align)
    if x.size == 0:
        return _quantize_nothing(x.shape, format, block)
    sizes = None if group_sizes is None else jnp.asarray(group_sizes).astype(jnp.int32)
    if sizes is not None:
        x, sizes = _quantize.lay_operands(view, static, x, sizes)
    data, scale = _quantize(view, static, x, sizes)
    scale = view.typed_as_equal(scale, ())
    shards = [()] * x.ndim if view.engine == "local" else _entries(view.roles, declared, x.ndim)
    pieces = tuple(
        1 if b is None or n // view.roles.size(names) % b == 0 else view.roles.size(names)
        for n, names, b in zip(x.shape, shards, block, strict=True)
    )
    return QArray(data, scale, format.dtype, block, pieces)


def _check_groups(x: Array, block: tuple[int | None, ...], group_sizes: Array | None, align: int | None) -> int | None:
    """Returns at how many rows groups start, from the arguments of `quantize`; None where it has no groups."""
    if group_sizes is None:
        if align is not None:
            raise ValueError(f"align={align} is that of groups; it must be None without group_sizes")
        return None
    check_int("group_sizes", group_sizes, "[groups]")
    if group_sizes.ndim != 1 or x.ndim < 1:
        raise ValueError(
            f"x and group_sizes have shapes {x.shape}, {group_sizes.shape}; they must be [M, ...], [groups]"
        )
    rows = block[0] or 1
    align = rows if align is None else align
    check_count("align", align)
    if align % rows:
        raise ValueError(f"align={align} must be a multiple of {rows}, the rows of a block of block={block}")
    return align


def _quantize_nothing(shape: tuple[int, ...], format: Format, block: tuple[int | None, ...]) -> QArray:
    """Returns the QArray of an array without elements. Its scales, if it has any, are 1."""
    counts = tuple(1 if b is None else -(-n // b) for n, b in zip(shape, block, strict=True))
    scale = to_scale(jnp.zeros(counts, jnp.float32), format)
    scale = to_exponent(scale) if format.scale == "e8m0" else scale
    return QArray(jnp.zeros(shape, jnp.uint8), scale, format.dtype, block, (1,) * len(shape))


def dequantize(
    q: QArray, dtype: jax.typing.DTypeLike = jnp.float32, *, axes: Axes = Axes(), engine: Engine = "auto"
) -> Float[Array, "..."]:
    """x = data * scale, rounded once to `dtype`.

    Args:
      q: values and scales, as `quantize` returns them.
      dtype: the dtype of the result.
      axes, engine: see `moax.Options`.

    Returns:
      [...] in `dtype`, with the shape and the sharding of `q.data`.

    Raises:
      ValueError: mesh axes cut the blocks of `q`, because its shards are not the shards that were quantized.
    """
    check_kind("q", q, QArray)
    check_float_dtype("dtype", dtype)
    view = find_mesh_view(axes, engine, q)
    static = DequantizeSpec(q.dtype, q.block, q.pieces, jnp.dtype(dtype), view.roles, q.shape)
    return _dequantize(view, static, q.data, q.scale)[0]


def _entries(roles: Roles, x_spec: Spec, ndim: int):
    """Returns the axes of more than one device that split each dim of an array with this spec."""
    sizes = dict(roles.sizes)
    return [tuple(n for n in entry if n in sizes) for entry in pad(x_spec, ndim)]


def scale_spec(entries, block):
    """Returns the spec of the scales: that of the data, but a dim of one block is not split."""
    return spec(*(() if b is None else names for names, b in zip(entries, block, strict=True)))


def check_cuts(name: str, q: QArray, entries, roles: Roles) -> None:
    """Raises ValueError where the axes `entries` of the dims of a QArray cut its blocks. `name` is for the message.

    Shards of q may be those that were quantized, or have whole blocks.
    """
    for dim, (n, b, pieces, names) in enumerate(zip(q.shape, q.block, q.pieces, entries, strict=True)):
        count = roles.size(names)
        if b is not None and (pieces % count if pieces > 1 else n // count % b and count > 1):
            raise ValueError(
                f"{name}: dim {dim} of size {n} is sharded over mesh axes {names}, which cut its blocks of {b}; "
                f"it was quantized in {pieces} shards"
            )


def _dim_names(shape, block, shards):
    """Returns the Shardy factors of data and scale, and the sizes of the factors inside a block.

    A dim 256 in blocks of 128 is "(b0 i0)" in data and "b0" in scale, with i0 = 128: an axis that splits the blocks
    splits both. A dim whose shards are no multiple of the block, or that is one block, has unrelated factors in data
    and scale: Shardy refuses a factor of size 1 inside parentheses.
    """
    whole = [
        b is not None and n % (b * s) == 0 and (b == 1 or n > b) for n, b, s in zip(shape, block, shards, strict=True)
    ]
    data = [f"(b{i} i{i})" if w and b != 1 else f"b{i}" for i, (w, b) in enumerate(zip(whole, block, strict=True))]
    scale = [f"b{i}" if w else f"s{i}" for i, w in enumerate(whole)]
    sizes = tuple((f"i{i}", b) for i, b in enumerate(block) if data[i].startswith("("))
    return " ".join(data), " ".join(scale), sizes


def _local(static: QuantizeSpec, amax_over, x, group_sizes):
    """Runs `quantize` on one device and returns data and scale."""
    if group_sizes is not None:
        x = zero_rows(x, row_groups(group_sizes, static.align or 1, x.shape[0])[1])
    q = implementation(static.kernels).quantize(x, static.format, static.block, amax_over)
    return q.data, q.scale


def _contract(static: QuantizeSpec, operands, found_specs):
    """Returns the contract of `quantize`: data and scale have the layout of x.

    Raises ValueError where shards cut blocks.
    """
    (x, group_sizes), found_spec = operands, found_specs[0]
    declared = _entries(static.roles, static.declared, x.ndim)
    entries = declared if found_spec is None else _entries(static.roles, found_spec, x.ndim)
    if group_sizes is not None:
        entries = [static.roles.tokens, *entries[1:]]
    for dim, (n, names, b) in enumerate(zip(x.shape, entries, static.block, strict=True)):
        if b is not None and names and n // static.roles.size(names) % b and entries != declared:
            raise ValueError(
                f"x: dim {dim} of size {n} is sharded over mesh axes {names}, which cut its blocks of {b}; "
                "x_spec must name these axes"
            )
    amax_over = tuple(n for names, b in zip(entries, static.block, strict=True) if b is None for n in names)
    sizes = None if group_sizes is None else spec(static.roles.tokens)
    return Contract((spec(*entries), sizes), (spec(*entries), scale_spec(entries, static.block)), ((), ()), amax_over)


def _factors(static: QuantizeSpec, operands):
    """Returns the Shardy rule of `quantize`."""
    entries = _entries(static.roles, static.declared, operands[0].ndim)
    data, scale, sizes = _dim_names(operands[0].shape, static.block, map(static.roles.size, entries))
    return (data,) if operands[1] is None else (data, "g"), (data, scale), sizes


_quantize = Partitioned(_local, _contract, _factors, name="quantize")


@dataclasses.dataclass(frozen=True)
class DequantizeSpec:
    """The static fields of a QArray, its shape, the mesh axes by role, and the dtype `out` of the result."""

    dtype: str
    block: tuple[int | None, ...]
    pieces: tuple[int, ...]
    out: jnp.dtype
    roles: Roles
    shape: tuple[int, ...]


def _dequantize_local(static: DequantizeSpec, shards, data, scale):
    """Runs `dequantize` on one device; `shards` counts the shards of each dim."""
    pieces = tuple(max(1, p // s) for p, s in zip(static.pieces, shards, strict=True))
    return (dequantize_local(QArray(data, scale, static.dtype, static.block, pieces), static.out),)


def _dequantize_contract(static: DequantizeSpec, operands, found_specs):
    """Returns the contract of `dequantize`: the result has the layout of the data."""
    entries = _entries(static.roles, found_specs[0] or spec(), len(static.shape))
    shards = tuple(map(static.roles.size, entries))
    q = QArray(operands[0], operands[1], static.dtype, static.block, static.pieces)
    check_cuts("q", q, entries, static.roles)
    data = spec(*entries)
    return Contract((data, scale_spec(entries, static.block)), (data,), ((),), shards)


def _dequantize_factors(static: DequantizeSpec, operands):
    """Returns the Shardy rule of `dequantize`."""
    data, scale, sizes = _dim_names(static.shape, static.block, static.pieces)
    return (data, scale), (data,), sizes


_dequantize = Partitioned(_dequantize_local, _dequantize_contract, _dequantize_factors, name="dequantize")
