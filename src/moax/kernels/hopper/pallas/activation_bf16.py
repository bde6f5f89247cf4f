"""The activation and its gradient in bf16; each kernel reads h once.

    activate_rows        a = act(gate, up) * weight
    activate_grad_rows   a * weight, d h = (d act / d h)^T (d a * weight), inner = <d a, act(gate, up)>

The kernels round where the kernels of `activation` round. A tile is 64 rows by 128, 64 or 32 columns of F, the largest
of these numbers that divides F. A kernel writes a tile's results into the memory of its operands and stores them from
there. An SM then holds four blocks of threads, of which some load and store while others compute. Halves of blocks
without rows are neither read nor written.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from moax.kernels.hopper.formats import Blocks
from moax.kernels.hopper.pallas.activation import (
    PART,
    check_h,
    evaluate,
    halves_of,
    load_part,
    locate_half,
    part_at,
    part_of,
    rounded,
    row_values,
    tiles_of,
    with_grads,
    zero_half,
)
from moax.kernels.hopper.pallas.quantize import HALF, launch, load_tiles

COLUMNS = (128, 64, 32)  # the numbers of columns that a tile may have


def activate_rows(
    h: Float[Array, "N GF"],
    blocks: Blocks,
    act: Callable,
    *,
    gated: bool,
    weights: Float[Array, " N"] | None = None,
) -> Float[Array, "N F"]:
    """a = act(gate, up) * weight.

    Args:
      h: [N, G F] bf16, N a multiple of 64 and F of 32.
      blocks: the blocks of the rows. A row of padding in a half of a block that has real rows becomes 0.
      act: act(gate, up), or act(up) if not gated. It works on f32 arrays elementwise, and is 0 at 0.
      gated: whether G is 2.
      weights: [N] f32, finite, the weight of each row; None means 1.

    Returns:
      [N, F] bf16.

    Raises:
      Unsupported: h has another dtype or shape.
    """
    size, width = check_h(h, gated, HALF, COLUMNS[-1])
    columns = _columns(width)

    def activate_rows(h, start, rows, weights, out, *, tiles, loaded, met):
        (i, count), j = locate_half(start, rows), lax.axis_index("j")

        @pl.when(count > 0)
        def _():
            weight = None if weights is None else row_values(weights, i * HALF, PART)
            load_tiles(tiles_of(h, tiles, i, j, width), loaded)
            zero_half(tiles, count, met)

            @pl.loop(0, columns // PART)
            def _(step):
                at = part_at(0, step, PART)
                (a,) = evaluate(act, *(load_part(tile, at) for tile in tiles))
                a = a if weight is None else rounded(a) * weight
                tiles[0][at] = a.astype(h.dtype)

            _store(tiles_of(out, tiles[:1], i, j, width))

    grid = dict(i=halves_of(blocks), j=width // columns)
    out = jax.ShapeDtypeStruct((size, width), h.dtype)
    run = launch(activate_rows, out, grid, _scratch(1 + gated, h.dtype, columns, PART), approx_math=True)
    return run(h, blocks.start, blocks.rows, weights)


def activate_grad_rows(
    h: Float[Array, "N GF"],
    d_a: Float[Array, "N F"],
    blocks: Blocks,
    act: Callable,
    *,
    weights: Float[Array, " N"],
) -> tuple[Float[Array, "N F"], Float[Array, "N GF"], Float[Array, "J N"]]:
    """Returns (a * weight, d_h, inner), with inner[j, n] the sum of d_a a over the j-th tile of columns.

    Args:
      h: [N, G F] bf16, as in `activate_rows`. G is the width of h divided by the width of d_a.
      d_a: [N, F] bf16, the gradient of a before the weights multiply it.
      blocks, act: see `activate_rows`.
      weights: [N] f32, finite, the weight of each row.

    Returns:
      a * weight: [N, F] bf16.
      d_h: [N, G F] bf16.
      inner: [J, N] f32, with J tiles of 128, 64 or 32 columns.

    Raises:
      ValueError: d_a has another shape or dtype than h asks for.
      Unsupported: h has another dtype or shape.
    """
    gated = h.shape[1] == 2 * d_a.shape[1]
    size, width = check_h(h, gated, HALF, COLUMNS[-1])
    if d_a.shape != (size, width) or d_a.dtype != h.dtype:
        raise ValueError(
            f"d_a is {d_a.dtype} {d_a.shape}; with h {h.dtype} {h.shape} it must be {h.dtype} {(size, width)}"
        )
    columns, part = _columns(width), part_of(act, gated)

    def activate_grad_rows(h, d_a, start, rows, weights, a_out, d_h, inner, *, tiles, loaded, met):
        (i, count), j, (grad, *of_h) = locate_half(start, rows), lax.axis_index("j"), tiles

        @pl.when(count > 0)
        def _():
            weight = row_values(weights, i * HALF, part)
            load_tiles([*tiles_of(h, of_h, i, j, width), *tiles_of(d_a, [grad], i, j, width)], loaded)
            zero_half(tiles, count, met)

            def compute(step, sums):
                at = part_at(0, step, part)
                d = load_part(grad, at)
                a, *d_parts = evaluate(with_grads(act), rounded(d * weight), *(load_part(tile, at) for tile in of_h))
                a = rounded(a)
                grad[at] = (a * weight).astype(h.dtype)
                for tile, d_part in zip(of_h, d_parts, strict=True):
                    tile[at] = d_part.astype(h.dtype)
                return sums + jnp.sum(d * a, axis=1)

            zeros = plgpu.layout_cast(jnp.zeros((HALF,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))
            inner[j, pl.ds(i * HALF, HALF)] = lax.fori_loop(0, columns // part, compute, zeros)
            _store([*tiles_of(a_out, [grad], i, j, width), *tiles_of(d_h, of_h, i, j, width)])

    steps = width // columns
    out = (
        jax.ShapeDtypeStruct(d_a.shape, h.dtype),
        jax.ShapeDtypeStruct(h.shape, h.dtype),
        jax.ShapeDtypeStruct((steps, size), jnp.float32),
    )
    scratch = _scratch(2 + gated, h.dtype, columns, part)
    run = launch(activate_grad_rows, out, dict(i=halves_of(blocks), j=steps), scratch, approx_math=True)
    return run(h, d_a, blocks.start, blocks.rows, weights)


def _columns(width: int) -> int:
    """Returns the columns of a tile, which divide F."""
    return next(n for n in COLUMNS if width % n == 0)


def _scratch(count: int, dtype, columns: int, part: int) -> dict:
    """Returns the shared memory of a kernel.

    Its tiles have boxes of `part` columns, since a kernel addresses whole boxes.
    """
    transforms = (plgpu.TilingTransform((8, part)), plgpu.SwizzleTransform(part * jnp.dtype(dtype).itemsize))
    tile = plgpu.SMEM((HALF, columns), dtype, transforms=transforms)
    return dict(tiles=[tile] * count, loaded=plgpu.Barrier(num_arrivals=count), met=plgpu.Barrier())


def _store(copies) -> None:
    """Copies each tile of the (target, tile) pairs to its target, and waits until all tiles are read."""
    plgpu.commit_smem()
    for target, tile in copies:
        plgpu.copy_smem_to_gmem(tile, target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
