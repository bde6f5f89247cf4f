"""The activation and its gradient, in bf16 or quantized; each kernel reads h once.

    activate_rows            a = act(gate, up)                                                [N, F]
    activate_quantize        the same, quantized                                              for fprop with wo
    activate_grad_rows       a * weight, d h = (d act / d h)^T (d a * weight), inner = <d a, act(gate, up)>
    activate_grad_quantize   a * weight, quantized                                            for wgrad of wo
                             d h, quantized twice                                             for dgrad and wgrad of wi
                             inner                                                            for d weight

h [N, G F] holds the gate in its first F columns and up in its last F columns; with G = 1 it holds up alone. The kernels
compute in float32. They round to bf16 where `moax.moe` rounds: a, then a * weight; d a * weight; d h. A tile is 64 or
128 rows by 128 columns of F, or in bf16 by 64 or 32 where 128 do not divide F. A kernel writes a tile's results into
the memory of its operands, and stores or quantizes them from there. Blocks, and halves of blocks but where columns are
quantized, that have no real rows are neither read nor written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend import core
from jaxtyping import Array, Float

from moax.activations import called, operations
from moax.checks import Unsupported
from moax.kernels.hopper.formats import BLOCK, HALF, Blocks, KMajorFp8
from moax.kernels.hopper.pallas.ptx import launch, trace_once
from moax.kernels.hopper.pallas.quantize import (
    Target,
    columns_of,
    load_tiles,
    meet,
    put,
    rows_of,
    tile_buffer,
    zero_tail,
)
from moax.kernels.scales import DTYPES
from moax.recipe import Format

# The axis `i` of a grid counts halves of blocks, unless columns are quantized.
HALVES = BLOCK // HALF
# A warpgroup computes so many columns at one time, so that two blocks of threads fit the registers of an SM.
PART = 32
# The elementwise primitives that Mosaic lowers for Hopper GPUs; `evaluate` makes an addition of add_any.
KNOWN = {
    "abs", "add", "add_any", "and", "broadcast_in_dim", "clamp", "convert_element_type", "cos", "div", "eq", "erf",
    "exp", "exp2", "ge", "gt", "integer_pow", "le", "log", "log2", "logistic", "lt", "max", "min", "mul", "ne", "neg",
    "not", "one_minus_square", "or", "rsqrt", "select_n", "sign", "sin", "sqrt", "square", "sub", "tanh", "xor",
}  # fmt: skip
LONG = 20  # a gradient of more operations is computed for half as many columns at one time
COLUMNS = (128, 64, 32)  # the numbers of columns that a tile in bf16 may have


@trace_once
def activate_quantize(
    h: Float[Array, "N GF"], blocks: Blocks, act: Callable, *, gated: bool,
    format: Format = Format(),
) -> KMajorFp8:  # fmt: skip
    """a = act(gate, up), quantized for fprop: data [N, F], scale [F / 128, N].

    Args:
      h: [N, G F] bf16, N and F multiples of 128.
      blocks: the blocks of the rows. A row of padding in a half of a block that has real rows becomes 0.
      act: act(gate, up), or act(up) if not gated. It works on f32 arrays elementwise, and is 0 at 0.
      gated: whether G is 2.
      format: see `quantize.quantize_rows`.

    Raises:
      Unsupported: h has another dtype or shape.
    """
    size, width = check_h(h, gated)

    def activate_quantize(h, start, rows, data, scale, *, tiles, buffer, loaded, met):
        i, count = locate_half(start, rows)
        j = lax.axis_index("j")
        row = i * HALF

        @pl.when(count > 0)
        def _():
            load_tiles(tiles_of(h, tiles, i, j, width), loaded)
            pl.when(count < HALF)(lambda: zero_tail(tiles, count, [0], met))
            activate_tile(act, tiles, tiles[-1], BLOCK)
            put(rows_of(tiles[-1], 0), Target(data, scale, buffer), row, j, 0, format)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    scratch = _scratch(1 + gated, h.dtype, BLOCK, PART)
    scratch["buffer"] = tile_buffer(DTYPES[format.dtype], BLOCK, HALF)
    grid = dict(i=blocks.group.shape[0] * HALVES, j=width // BLOCK)
    run = launch(activate_quantize, _out((size, width), format), grid, scratch, approx_math=True)
    return KMajorFp8(*run(h, blocks.start, blocks.rows))


@trace_once
def activate_grad_quantize(
    h: Float[Array, "N GF"], d_a: Float[Array, "N F"], blocks: Blocks, act: Callable, *,
    weights: Float[Array, " N"], of_a: Format = Format(), of_h: Format = Format(),
) -> tuple[KMajorFp8, KMajorFp8, KMajorFp8, Float[Array, "J N"]]:  # fmt: skip
    """Returns (a * weight for wgrad, d_h for dgrad, d_h for wgrad, inner), quantized but for inner.

    Args:
      h, act: see `activate_quantize`. G is the width of h divided by the width of d_a.
      d_a: [N, F] bf16, the gradient of a before the weights multiply it.
      blocks: the blocks of the rows. A row of padding in a block that has real rows becomes 0.
      weights: [N] f32, finite, the weight of each row.
      of_a, of_h: the formats of a and of d_h.

    Returns:
      a: data [F, N], scale [N / 128, F].
      d_h for dgrad: data [N, G F], scale [G F / 128, N].
      d_h for wgrad: data [G F, N], scale [N / 128, G F].
      inner: [F / 128, N] f32; inner[j, n] is the sum of d_a a over columns 128 j to 128 j + 127.

    Raises:
      ValueError: d_a has another shape or dtype than h asks for.
      Unsupported: h has another dtype or shape.
    """
    gated = h.shape[1] == 2 * d_a.shape[1]
    size, width = check_h(h, gated, d_a=d_a)
    steps = width // BLOCK
    part = part_of(act, gated)

    def activate_grad_quantize(
        h, d_a, starts, counts, weights, a_out, dgrad_out, wgrad_out, inner, *, tiles, shared,
        buffer, loaded, met,
    ):  # fmt: skip
        block, j, half = (lax.axis_index(name) for name in ("i", "j", "wg"))
        grad, later = shared

        @pl.when(counts[block] > 0)
        def _():
            i = lax.div(starts[block], HALVES)
            copies = [*tiles_of(h, tiles, i, j, width), *tiles_of(d_a, [grad], i, j, width)]
            load_tiles(copies, loaded)
            zero_tail([*tiles, grad], counts[block], [half], met)
            weight = row_values(weights, i * BLOCK + half * HALF, part)

            sums = differentiate_tile(act, grad, tiles, weight, BLOCK, part, half)
            inner[j, pl.ds(i * BLOCK + half * HALF, HALF)] = sums
            meet(met)  # a column spans rows that both warpgroups wrote
            put(columns_of(grad, half), Target(*a_out, buffer=buffer), j * BLOCK + half * HALF, i, half, of_a)
            meet(met)  # `grad` has been read, and `later` takes its memory
            for g, tile in enumerate(tiles):
                column = g * steps + j
                if g:  # the last copy may still read its buffer, but not the next buffer
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                value = rows_of(tile, half)
                row = i * BLOCK + half * HALF
                put(value, Target(*dgrad_out, buffer=later[0]), row, column, half, of_h)
                if g:
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                value = columns_of(tile, half)
                row = column * BLOCK + half * HALF
                put(value, Target(*wgrad_out, buffer=later[1]), row, i, half, of_h)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    out = _out((width, size), of_a), _out(h.shape, of_h), _out(h.shape[::-1], of_h)
    buffers_of_h = [tile_buffer(DTYPES[of_h.dtype], BLOCK)] * 2
    scratch = dict(
        tiles=[tile_buffer(h.dtype, part)] * (1 + gated),
        shared=plgpu.RefUnion(tile_buffer(h.dtype, part), buffers_of_h),
        buffer=tile_buffer(DTYPES[of_a.dtype], BLOCK),
        loaded=plgpu.Barrier(num_arrivals=2 + gated),
        met=plgpu.Barrier(num_arrivals=2),
    )
    grid = dict(i=size // BLOCK, j=steps)
    out = *out, jax.ShapeDtypeStruct((steps, size), jnp.float32)
    run = launch(activate_grad_quantize, out, grid, scratch, warpgroups=2, approx_math=True)
    a, for_dgrad, for_wgrad, inner = run(h, d_a, blocks.start, blocks.rows, weights)
    return KMajorFp8(*a), KMajorFp8(*for_dgrad), KMajorFp8(*for_wgrad), inner


@trace_once
def activate_rows(h: Float[Array, "N GF"], blocks: Blocks, act: Callable, *, gated: bool) -> Float[Array, "N F"]:
    """a = act(gate, up), [N, F] bf16.

    Args:
      h: [N, G F] bf16, N a multiple of 64 and F of 32.
      blocks, act, gated: see `activate_quantize`.

    Raises:
      Unsupported: h has another dtype or shape.
    """
    size, width = check_h(h, gated, HALF, COLUMNS[-1])
    columns = next(n for n in COLUMNS if width % n == 0)

    def activate_rows(h, start, rows, out, *, tiles, loaded, met):
        i, count = locate_half(start, rows)
        j = lax.axis_index("j")

        @pl.when(count > 0)
        def _():
            load_tiles(tiles_of(h, tiles, i, j, width), loaded)
            pl.when(count < HALF)(lambda: zero_tail(tiles, count, [0], met))

            activate_tile(act, tiles, tiles[0], columns)
            store(tiles_of(out, tiles[:1], i, j, width))

    grid = dict(i=blocks.group.shape[0] * HALVES, j=width // columns)
    out = jax.ShapeDtypeStruct((size, width), h.dtype)
    scratch = _scratch(1 + gated, h.dtype, columns, PART)
    run = launch(activate_rows, out, grid, scratch, approx_math=True)
    return run(h, blocks.start, blocks.rows)


@trace_once
def activate_grad_rows(
    h: Float[Array, "N GF"], d_a: Float[Array, "N F"], blocks: Blocks, act: Callable, *,
    weights: Float[Array, " N"],
) -> tuple[Float[Array, "N F"], Float[Array, "N GF"], Float[Array, "J N"]]:  # fmt: skip
    """Returns (a * weight, d_h, inner), with inner[j, n] the sum of d_a a over the j-th tile of columns.

    Args:
      h: [N, G F] bf16, as in `activate_rows`. G is the width of h divided by the width of d_a.
      d_a, blocks, act, weights: see `activate_grad_quantize`.

    Returns:
      a * weight [N, F] bf16, d_h [N, G F] bf16, and inner [J, N] f32, with J tiles of 128, 64 or 32 columns.

    Raises:
      ValueError: d_a has another shape or dtype than h asks for.
      Unsupported: h has another dtype or shape.
    """
    gated = h.shape[1] == 2 * d_a.shape[1]
    size, width = check_h(h, gated, HALF, COLUMNS[-1], d_a)
    columns = next(n for n in COLUMNS if width % n == 0)
    part = part_of(act, gated)

    def activate_grad_rows(h, d_a, start, rows, weights, a_out, d_h, inner, *, tiles, loaded, met):
        i, count = locate_half(start, rows)
        j = lax.axis_index("j")
        grad, *of_h = tiles

        @pl.when(count > 0)
        def _():
            weight = row_values(weights, i * HALF, part)
            copies = [*tiles_of(h, of_h, i, j, width), *tiles_of(d_a, [grad], i, j, width)]
            load_tiles(copies, loaded)
            pl.when(count < HALF)(lambda: zero_tail(tiles, count, [0], met))

            sums = differentiate_tile(act, grad, of_h, weight, columns, part)
            inner[j, pl.ds(i * HALF, HALF)] = sums
            store([*tiles_of(a_out, [grad], i, j, width), *tiles_of(d_h, of_h, i, j, width)])

    steps = width // columns
    grid = dict(i=blocks.group.shape[0] * HALVES, j=steps)
    out = (
        jax.ShapeDtypeStruct(d_a.shape, h.dtype),
        jax.ShapeDtypeStruct(h.shape, h.dtype),
        jax.ShapeDtypeStruct((steps, size), jnp.float32),
    )
    scratch = _scratch(2 + gated, h.dtype, columns, part)
    run = launch(activate_grad_rows, out, grid, scratch, approx_math=True)
    return run(h, d_a, blocks.start, blocks.rows, weights)


def check_h(h, gated: bool, rows: int = BLOCK, columns: int = BLOCK, d_a=None) -> tuple[int, int]:
    """Returns N and F of h [N, G F] bf16. Raises where `rows` or `columns` do not divide them, or d_a does not fit."""
    size = h.shape[0]
    width = h.shape[1] // (1 + gated)
    if h.dtype != jnp.bfloat16:
        raise Unsupported(f"h is {h.dtype}; the kernel takes bfloat16")
    if size % rows or width % columns:
        raise Unsupported(f"h has {size} rows and F is {width}; the kernel takes multiples of {rows} and {columns}")
    if d_a is not None and (d_a.shape != (size, width) or d_a.dtype != h.dtype):
        raise ValueError(f"d_a is {d_a.dtype} {d_a.shape}; with h {h.shape} it must be {h.dtype} {(size, width)}")
    return size, width


def activate_tile(act: Callable, tiles, to, columns: int) -> None:
    """Writes act(gate, up) of 64 rows of the tiles to the tile `to`."""

    @pl.loop(0, columns // PART)  # the loop is not unrolled, which would take more registers
    def _(step):
        index = part_at(0, step, PART)
        (a,) = evaluate(act, *(load_part(tile, index) for tile in tiles))
        to[index] = a.astype(to.dtype)


def differentiate_tile(act: Callable, grad, tiles, weight, columns: int, part: int, half=0):
    """Writes a * weight over d_a and d_h over h, in 64 rows of their tiles; returns the sum of d_a a of each row."""

    def compute(step, sums):
        index = part_at(half, step, part)
        d = load_part(grad, index)
        weighted = rounded(d * weight)
        a, *d_h = evaluate(with_grads(act), weighted, *(load_part(tile, index) for tile in tiles))
        a = rounded(a)
        grad[index] = (a * weight).astype(grad.dtype)
        for tile, d_tile in zip(tiles, d_h, strict=True):
            tile[index] = d_tile.astype(tile.dtype)
        return sums + jnp.sum(d * a, axis=1)

    zeros = plgpu.layout_cast(jnp.zeros((HALF,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))
    return lax.fori_loop(0, columns // part, compute, zeros)


def _out(shape, format: Format):
    """Returns the types of data with this shape, and of scales of blocks along its last dim."""
    scale_shape = (shape[1] // BLOCK, shape[0])
    data = jax.ShapeDtypeStruct(shape, DTYPES[format.dtype])
    return data, jax.ShapeDtypeStruct(scale_shape, jnp.float32)


def _scratch(count: int, dtype, columns: int, part: int) -> dict:
    """Returns the shared memory: tiles with boxes of `part` columns, since a kernel addresses whole boxes."""
    tile = tile_buffer(dtype, part, HALF, columns)
    return dict(tiles=[tile] * count, loaded=plgpu.Barrier(num_arrivals=count), met=plgpu.Barrier())


def store(copies) -> None:
    """Copies each tile of the (target, tile) pairs to its target, and waits until all tiles are read."""
    plgpu.commit_smem()
    for target, tile in copies:
        plgpu.copy_smem_to_gmem(tile, target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def tiles_of(x, tiles, i, j, width: int):
    """Returns a pair (part of x, tile) for each tile: tile g takes rows i and columns j of the g-th projection of x."""
    rows, columns = tiles[0].shape
    mine = pl.ds(i * rows, rows)
    parts = [x.at[mine, pl.ds(g * width + j * columns, columns)] for g in range(len(tiles))]
    return list(zip(parts, tiles, strict=True))


def locate_half(start, rows):
    """Returns the half of all rows of this block of threads, and how many real rows it has, below 1 for none."""
    # With start (0, 2) and rows (128, 5), the half i = 3 of the blocks is the half 3 of all rows, with -59 real ones.
    i = lax.axis_index("i")
    block = lax.div(i, HALVES)
    half = lax.rem(i, HALVES)
    return start[block] + half, rows[block] - half * HALF


def part_at(half, step, part: int):
    """Returns the index of a part of a tile: half of the rows, and columns from step * part on."""
    return pl.ds(half * HALF, HALF), pl.ds(pl.multiple_of(step * part, part), part)


def load_part(tile, index):
    """Returns a part of a tile, as f32."""
    return plgpu.load(tile.at[index], layout=plgpu.Layout.WGMMA).astype(jnp.float32)


def rounded(x):
    """Returns x rounded to bf16, as f32."""
    bits = lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


def row_values(x, row, part: int):
    """Returns the f32 values x[row] to x[row + 63] of 64 rows, as an array [64, part] with equal columns."""
    values = x.at[pl.ds(row, HALF)]
    value = plgpu.load(values, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
    return lax.broadcast_in_dim(value, (HALF, part), [0])


def with_grads(act: Callable) -> Callable:
    """Returns the function (d, *inputs) -> (act(*inputs), and the gradient of act by each input, times d)."""

    def run(d, *inputs):
        a, pull = jax.vjp(act, *inputs)
        return a, *pull(d)

    return run


def part_of(act: Callable, gated: bool) -> int:
    """Returns the columns of a gradient that a warpgroup computes at one time, fewer for a long formula."""
    length = sum(1 for _ in operations(gradient_jaxpr(act, gated).jaxpr))
    return PART if length <= LONG else PART // 2


def gradient_jaxpr(act: Callable, gated: bool) -> core.ClosedJaxpr:
    """Returns the jaxpr of `with_grads(act)`, over as many elements as a warpgroup computes at one time."""
    value = jax.ShapeDtypeStruct((HALF, PART), jnp.float32)
    return jax.make_jaxpr(with_grads(act))(*[value] * (2 + gated))


@functools.cache
def why_not_in_kernels(act: Callable, gated: bool) -> str | None:
    """Returns the operation of `act`, or of its gradient, that Mosaic does not know; None if it knows all of them."""
    closed = gradient_jaxpr(act, gated)
    unknown = sorted({eqn.primitive.name for eqn in operations(closed.jaxpr)} - KNOWN)
    if closed.consts:
        return "a constant array"
    return unknown[0] if unknown else None


def evaluate(f: Callable, *args) -> list:
    """Returns the flat results of f(*args), computed with primitives that Mosaic knows.

    Calls are inlined, `add_any`, by which JAX sums cotangents, becomes an addition, and x^-2 becomes 1 / x^2.
    """
    closed = jax.make_jaxpr(f)(*args)

    def run(jaxpr, consts, args):
        known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(variable):
            return variable.val if isinstance(variable, core.Literal) else known[variable]

        for eqn in jaxpr.eqns:
            values = [read(v) for v in eqn.invars]
            if (inner := called(eqn)) is not None:
                results = run(inner.jaxpr, inner.consts, values)
            elif eqn.primitive.name == "add_any":
                results = [jnp.add(*values)]
            elif eqn.primitive.name == "integer_pow" and eqn.params["y"] < -1:
                results = [1.0 / lax.integer_pow(values[0], -eqn.params["y"])]
            else:
                results = eqn.primitive.bind(*values, **eqn.params)
                if not eqn.primitive.multiple_results:
                    results = [results]
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    return run(closed.jaxpr, closed.consts, args)
