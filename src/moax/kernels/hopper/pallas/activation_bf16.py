"""Activation and its gradient in bf16, each in one read of h.

    activate_rows        a = act(gate, up) * weight
    activate_grad_rows   a * weight, d h = (d act / d h)^T (d a * weight), inner = <d a, act(gate, up)>

Roundings are those of `activation`. A tile is 64 rows x 128, 64 or 32 columns of F: the most that cut neither gate nor
up. It is computed in place of what was loaded and stored from there, so that an SM holds four blocks of threads, which
load and store while others compute. Blocks past the used ones are neither read nor written.
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
    load_part,
    part_at,
    part_of,
    rounded,
    row_values,
    tiles_of,
    with_grads,
    zero_half,
)
from moax.kernels.hopper.pallas.quantize import HALF, launch, load_tiles

COLUMNS = (128, 64, 32)  # that a tile may have


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
      h: [N, G F] bf16, N a multiple of 128 and F of 32.
      blocks: which rows are real; the others are 0.
      act: of f32 arrays, elementwise: act(gate, up), or act(up) if not gated. 0 at 0.
      gated: whether G is 2.
      weights: [N] f32, finite, of each row; None: 1.
    """
    size, width = check_h(h, gated, COLUMNS[-1])
    columns = _columns(width)

    def activate_rows(h, counts, weights, out, *, tiles, loaded, met):
        i, j = lax.axis_index("i"), lax.axis_index("j")  # i counts halves of blocks
        count = counts[lax.div(i, 2)]

        @pl.when(count > 0)
        def _():
            weight = None if weights is None else row_values(weights, i * HALF, PART)
            load_tiles(tiles_of(h, tiles, i, j, width), loaded)
            zero_half(tiles, count - lax.rem(i, 2) * HALF, met)

            @pl.loop(0, columns // PART)
            def _(step):
                at = part_at(0, step, PART)
                (a,) = evaluate(act, *(load_part(tile, at) for tile in tiles))
                a = a if weight is None else rounded(a) * weight
                tiles[0][at] = a.astype(h.dtype)

            _store(tiles_of(out, tiles[:1], i, j, width))

    grid = dict(i=size // HALF, j=width // columns)
    out = jax.ShapeDtypeStruct((size, width), h.dtype)
    run = launch(activate_rows, out, grid, _scratch(1 + gated, h.dtype, columns, PART), approx_math=True)
    return run(h, blocks.rows, weights)


def activate_grad_rows(
    h: Float[Array, "N GF"],
    d_a: Float[Array, "N F"],
    blocks: Blocks,
    act: Callable,
    *,
    weights: Float[Array, " N"],
) -> tuple[Float[Array, "N F"], Float[Array, "N GF"], Float[Array, "J N"]]:
    """a * weight; d h; inner[j, n] = the sum of d_a a over the j-th tile of columns.

    Args:
      h: [N, G F] bf16, as in `activate_rows`; G is h's width over that of d_a.
      d_a: [N, F] bf16.
      blocks, act: as in `activate_rows`.
      weights: [N] f32, finite, of each row.

    Returns:
      a * weight [N, F] and d h [N, G F] bf16; inner [J, N] f32, J tiles of 128, 64 or 32 columns.
    """
    gated = h.shape[1] == 2 * d_a.shape[1]
    size, width = check_h(h, gated, COLUMNS[-1])
    if d_a.shape != (size, width) or d_a.dtype != h.dtype:
        raise ValueError(f"d_a is {d_a.dtype} {d_a.shape}; with h {h.dtype} {h.shape} it must be [N, F] like it")
    columns, part = _columns(width), part_of(act, gated)

    def activate_grad_rows(h, d_a, counts, weights, a_out, d_h, inner, *, tiles, loaded, met):
        i, j = lax.axis_index("i"), lax.axis_index("j")  # i counts halves of blocks
        count, (grad, *of_h) = counts[lax.div(i, 2)], tiles

        @pl.when(count > 0)
        def _():
            weight = row_values(weights, i * HALF, part)
            load_tiles([*tiles_of(h, of_h, i, j, width), *tiles_of(d_a, [grad], i, j, width)], loaded)
            zero_half(tiles, count - lax.rem(i, 2) * HALF, met)

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
    run = launch(activate_grad_rows, out, dict(i=size // HALF, j=steps), scratch, approx_math=True)
    return run(h, d_a, blocks.rows, weights)


def _columns(width: int) -> int:
    """Of a tile."""
    return next(n for n in COLUMNS if width % n == 0)


def _scratch(count: int, dtype, columns: int, part: int) -> dict:
    """Tiles laid out in boxes of `part` columns: a box is the least that is addressed."""
    transforms = (plgpu.TilingTransform((8, part)), plgpu.SwizzleTransform(part * jnp.dtype(dtype).itemsize))
    tile = plgpu.SMEM((HALF, columns), dtype, transforms=transforms)
    return dict(tiles=[tile] * count, loaded=plgpu.Barrier(num_arrivals=count), met=plgpu.Barrier())


def _store(copies) -> None:
    """Copies each tile to its (target, tile), and waits until all are read."""
    plgpu.commit_smem()
    for target, tile in copies:
        plgpu.copy_smem_to_gmem(tile, target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
