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
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from moax.backend import KERNEL_WIDTH
from moax.groups import BLOCK, Groups, zero_rows
from moax.kernels import mosaic
from moax.mesh.axes import Axes, Names, Roles
from moax.mesh.collectives import gather_weight, reduce_max
from moax.mesh.partition import Contract, Engine, Partitioned, find_view
from moax.mesh.specs import Spec, pad, spec
from moax.recipe import Format
from moax.types import Operand, QArray

DTYPES = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
TINY = 2.0**-126  # the least normal float32


@dataclasses.dataclass(frozen=True)
class QuantizeSpec:
    """format; block: block length of each dim, None for the whole dim; declared: how x lies where no type says it."""

    format: Format
    block: tuple[int | None, ...]
    roles: Roles
    declared: Spec


def quantize(
    x: Float[Array, ...],
    format: Format = Format(),
    *,
    block: tuple[int | None, ...] | None = None,
    x_spec: Spec | None = None,
    axes: Axes = Axes(),
    engine: Engine = "auto",
) -> QArray:
    """data = round(x / scale), scale = amax(block) / format.max; each shard by itself, wherever it lies.

    Args:
      x: any shape, floating point, any sharding over `axes`; data and scale have the same.
      format: of the values and scales.
      block: block length of each dim, None for one block over the dim (its amax is taken over the mesh). Default:
        `format.block` along the last dim, 1 along the others.
      x_spec: how x lies on an Auto mesh, or inside a `shard_map`. Needed only where its shards are no multiple of the
        block, which then end in edge blocks of their own (`pieces`); unsaid, x is brought together there first.
      axes, engine: see `moax.moe`.

    Raises:
      ValueError: `block` has not one positive entry a dim.
    """
    block = format.row_block(x.ndim, "columns") if block is None else tuple(block)
    if len(block) != x.ndim or any(b is not None and b < 1 for b in block):
        raise ValueError(f"block={block} must have one positive int (or None) for each of the {x.ndim} dims of x")
    view = find_view(axes, engine, x)
    declared = jax.typeof(x).sharding.spec if view.explicit else spec() if x_spec is None else x_spec
    static = QuantizeSpec(format, block, view.roles, declared)
    data, scale = _quantize(view, static, x)
    scale = view.same(scale, ())
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
    view = find_view(axes, engine, q)
    static = DequantizeSpec(q.dtype, q.block, q.pieces, jnp.dtype(dtype), view.roles, q.shape)
    return _dequantize(view, static, q.data, q.scale)[0]


def dequantize_local(q: QArray, dtype=jnp.float32) -> Float[Array, ...]:
    """`dequantize` of what one device holds."""
    data = lax.bitcast_convert_type(q.data, DTYPES[q.dtype]).astype(jnp.float32)
    scale = exponent_to_scale(q.scale) if q.scale.dtype == jnp.uint8 else q.scale
    return (data * _expand(scale, q)).astype(dtype)


def quantize_local(
    x, format: Format, block: tuple[int | None, ...], amax_over: Names = (), real: Bool[Array, " M"] | None = None
) -> QArray:
    """`quantize` of what one device holds. `amax_over`: axes that split a dim of one block. `real`: which rows of x
    count; the others quantize to zero."""
    x = x.astype(jnp.float32)
    if real is not None:
        x = zero_rows(x, real)
    amax = reduce_max(_block_max(_finite(x), block), amax_over)
    scale = _scale(amax, format)
    stored = _exponent(scale) if format.scale == "e8m0" else scale
    q = QArray(x, stored, format.dtype, block, (1,) * x.ndim)
    data = (x / _expand(scale, q)).astype(DTYPES[format.dtype])
    if format.dtype == "e5m2":  # has an infinity: keep "not finite" one thing, NaN
        data = jnp.where(jnp.isfinite(x), data, jnp.array(jnp.nan, data.dtype))
    # Rounded for good: on GPUs XLA takes a cast to fewer bits and back for no cast at all ("excess precision").
    return dataclasses.replace(q, data=lax.optimization_barrier(lax.bitcast_convert_type(data, jnp.uint8)))


def fits_wire(format: Format, rows: int, width: int) -> bool:
    """Whether the kernels quantize and dequantize so many rows of a format."""
    return format.block == BLOCK and format.scale != "e8m0" and rows % BLOCK == 0 and width % KERNEL_WIDTH == 0


def quantize_wire(x, format: Format, kernels: bool) -> QArray:
    """Rows [T, C] in blocks of their columns, by the kernels where these take them. Theirs multiply by 1 / scale."""
    block = format.row_block(x.ndim, "columns")
    if not kernels or not fits_wire(format, *x.shape):
        return quantize_local(x, format, block)
    made = mosaic.quantize_wire(x, DTYPES[format.dtype], pow2=_pow2(format))
    return QArray(lax.bitcast_convert_type(made.data, jnp.uint8), made.scale, format.dtype, block, (1, 1))


def dequantize_wire(data, words, ends, format: Format, dtype):
    """Rows [R, C] by the kernel, of values and of words that begin with their scales; those from ends[-1] on may hold
    anything."""
    return mosaic.dequantize_rows(lax.bitcast_convert_type(data, DTYPES[format.dtype]), words, ends, dtype)


def gather_quantized(w, format: Format | None, contracted, gather, amax_over: Names, dtype):
    """A weight's shard [E, K, ..., N] -> the whole weight: quantized, then gathered as bytes; without a format cast to
    `dtype`, then gathered. `amax_over`: axes that split a matrix of one block."""
    with jax.named_scope("quantize"):
        if format is None:
            w = w.astype(dtype)
        else:
            block = format.weight_block(w.ndim, contracted)
            w = quantize_local(w, format, block, amax_over if format.block is None else ())
    return gather_weight(w, gather)


def quantize_rows(x, format: Format | None, contracted, amax_over: Names = (), real: Bool[Array, " M"] | None = None):
    """Rows [M, ..., C] that enter a product over `columns` or over `rows`; x itself without a format.

    `amax_over`: axes that split a tensor of one block. `real` matters where a scale is shared by rows: those that are
    not real neither set it nor count.
    """
    if format is None:
        return x
    with jax.named_scope("quantize"):
        shared = format.block is None or contracted == "rows"
        amax_over = amax_over if format.block is None else ()
        return quantize_local(x, format, format.row_block(x.ndim, contracted), amax_over, real if shared else None)


def enter_rows(x, format: Format | None, groups: Groups, amax_over: Names = (), *, fp8: bool = False):
    """Rows [M, ..., C] as they enter two products: over columns (forward or dgrad), and over rows (wgrad).

    `fp8`: as Operands of the FP8 kernels, made in one read, [M, C'] and [C', M] where C' is all columns.
    """
    if not fp8 or format is None:
        return tuple(quantize_rows(x, format, over, amax_over, groups.real) for over in ("columns", "rows"))
    with jax.named_scope("quantize"):
        flat = x.reshape(x.shape[0], -1)
        scale = None
        if format.block is None:
            amax = jnp.max(_finite(flat if groups.real is None else zero_rows(flat, groups.real)))
            scale = _scale(reduce_max(amax, amax_over), format).reshape(1)
        return mosaic.quantize_rows(flat, groups.blocks, DTYPES[format.dtype], pow2=_pow2(format), scale=scale)


def enter_gathered(x, source: Int[Array, " M"], format: Format, groups: Groups) -> tuple[Operand, Operand]:
    """The rows x[source] of x [R, C] as `enter_rows` makes them with `fp8`, gathered in the same read. For blocks of
    scales: one of a whole tensor must be known before."""
    with jax.named_scope("quantize"):
        return mosaic.quantize_rows(x, groups.blocks, DTYPES[format.dtype], pow2=_pow2(format), source=source)


def gather_operand(w, format: Format, contracted, gather, amax_over: Names) -> Operand:
    """A weight's shard [E, K, *C] -> the whole weight as an Operand of the FP8 kernels, which take K-major data only:
    quantized, transposed where rows are contracted, then gathered as bytes."""
    with jax.named_scope("quantize"):
        transposed = contracted == "rows"
        experts, rows, *columns = w.shape
        flat = w.reshape(experts, rows, -1)
        scale = None
        if format.block is None:
            scale = _scale(reduce_max(_finite(flat).max((1, 2)), amax_over), format)
        q = mosaic.quantize_weight(flat, DTYPES[format.dtype], transposed=transposed, pow2=_pow2(format), scale=scale)
    data, scale = lax.bitcast_convert_type(q.data, jnp.uint8), q.scale
    apart = any(gather[2:])  # each dim of the columns by itself, to gather it
    wide = tuple(columns) if apart else (flat.shape[2],)
    blocks = (*columns[:-1], columns[-1] // BLOCK) if apart else (-(-flat.shape[2] // BLOCK),)
    along = (gather[0], gather[1], *(gather[2:] if apart else ((),)))
    order = lambda k, c: (*c, k) if transposed else (k, *c)  # noqa: E731
    along = (along[0], *order(along[1], along[2:]))
    data = gather_weight(data.reshape(experts, *order(rows, wide)), along)
    scale = gather_weight(scale.reshape(experts, *order(-(-rows // BLOCK), blocks)), along)
    merge = lambda v: v.reshape(v.shape[0], -1, v.shape[-1]) if transposed else v.reshape(*v.shape[:2], -1)  # noqa: E731
    return Operand(lax.bitcast_convert_type(merge(data), DTYPES[format.dtype]), merge(scale))


def fits_operand(w, gather) -> bool:
    """Whether `gather_operand` takes this shard [E, K, *C]: no gathered dim may end in an edge block."""
    return all(not names or dim == 0 or w.shape[dim] % BLOCK == 0 for dim, names in enumerate(gather))


def exponent_to_scale(exponent):
    """2**(exponent - 127) as float32, by bits; exponent 0 (2**-127, subnormal) is never written by `quantize`."""
    return lax.bitcast_convert_type(exponent.astype(jnp.int32) << 23, jnp.float32)


def _finite(x):
    """|x| in float32, 0 where it is not finite."""
    x = x.astype(jnp.float32)
    return jnp.where(jnp.isfinite(x), jnp.abs(x), 0.0)


def _pow2(format: Format) -> bool:
    return format.scale != "float32"


def _exponent(scale):
    return (lax.bitcast_convert_type(scale, jnp.int32) >> 23).astype(jnp.uint8)


def _scale(amax, format: Format):
    scale = amax * (1.0 / format.max)  # what XLA may make of a division by a constant: everywhere alike
    scale = jnp.where(scale < TINY, 1.0, scale)  # all zero, or too small to divide by
    if format.scale == "float32":
        return scale
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    up = (bits + 0x7FFFFF) & ~0x7FFFFF  # to the next power of two unless it is one
    return lax.bitcast_convert_type(up, jnp.float32)


def _full(block, shape):
    return tuple(max(n, 1) if b is None else b for b, n in zip(block, shape, strict=True))


def _block_max(x, block):
    full = _full(block, x.shape)
    padding = [(0, -n % b) for n, b in zip(x.shape, full, strict=True)]
    x = jnp.pad(x, padding) if any(p for _, p in padding) else x
    split = [m for n, b in zip(x.shape, full, strict=True) for m in (n // b, b)]
    return x.reshape(split).max(axis=tuple(range(1, 2 * x.ndim, 2)))


def _expand(scale, q: QArray):
    """Each element's scale; broadcast over dims of one block."""
    for dim, (n, b, pieces) in enumerate(zip(q.shape, q.block, q.pieces, strict=True)):
        size = n // pieces
        if b == 1 or (scale.shape[dim] == 1):
            continue
        b = size if b is None else b
        blocks = -(-size // b)
        scale = jnp.repeat(scale, b, axis=dim)
        if blocks * b != size:
            shape = scale.shape
            cut = scale.reshape(shape[:dim] + (pieces, blocks * b) + shape[dim + 1 :])
            cut = lax.slice_in_dim(cut, 0, size, axis=dim + 1)
            scale = cut.reshape(shape[:dim] + (n,) + shape[dim + 1 :])
    return scale


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
    q = quantize_local(x, static.format, static.block, amax_over)
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
