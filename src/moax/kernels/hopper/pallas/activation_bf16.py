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
from moax.kernels.hopper.pallas import activation
from moax.kernels.hopper.pallas.activation import PART, check_h, locate_half, row_values, tiles_of, zero_half
from moax.kernels.hopper.pallas.quantize import HALF, launch, load_tiles
from moax.mesh.collectives import with_vma_of_inputs

COLUMNS = (128, 64, 32)  # the numbers of columns that a tile may have


@with_vma_of_inputs
def activate_rows(
    h: Float[Array, "N GF"], blocks: Blocks, act: Callable, *, gated: bool, weights: Float[Array, " N"] | None = None
) -> Float[Array, "N F"]:
    """a = act(gate, up) * weight, [N, F] bf16.

    Args:
      h: [N, G F] bf16, N a multiple of 64 and F of 32.
      blocks, act, gated, weights: see `activation.activate_quantize`.

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

            activation.activate_tile(act, tiles, tiles[0], weight, columns)
            _store(tiles_of(out, tiles[:1], i, j, width))

    grid = dict(i=activation.halves_of(blocks), j=width // columns)
    out = jax.ShapeDtypeStruct((size, width), h.dtype)
    run = launch(activate_rows, out, grid, _scratch(1 + gated, h.dtype, columns, PART), approx_math=True)
    return run(h, blocks.start, blocks.rows, weights)


@with_vma_of_inputs
def activate_grad_rows(
    h: Float[Array, "N GF"], d_a: Float[Array, "N F"], blocks: Blocks, act: Callable, *, weights: Float[Array, " N"]
) -> tuple[Float[Array, "N F"], Float[Array, "N GF"], Float[Array, "J N"]]:
    """Returns (a * weight, d_h, inner), with inner[j, n] the sum of d_a a over the j-th tile of columns.

    Args:
      h: [N, G F] bf16, as in `activate_rows`. G is the width of h divided by the width of d_a.
      d_a, blocks, act, weights: see `activation.activate_grad_quantize`.

    Returns:
      a * weight: [N, F] bf16.
      d_h: [N, G F] bf16.
      inner: [J, N] f32, with J tiles of 128, 64 or 32 columns.

    Raises:
      ValueError: d_a has another shape or dtype than h asks for.
      Unsupported: h has another dtype or shape.
    """
    gated = h.shape[1] == 2 * d_a.shape[1]
    size, width = check_h(h, gated, HALF, COLUMNS[-1], d_a)
    columns, part = _columns(width), activation.part_of(act, gated)

    def activate_grad_rows(h, d_a, start, rows, weights, a_out, d_h, inner, *, tiles, loaded, met):
        (i, count), j, (grad, *of_h) = locate_half(start, rows), lax.axis_index("j"), tiles

        @pl.when(count > 0)
        def _():
            weight = row_values(weights, i * HALF, part)
            load_tiles([*tiles_of(h, of_h, i, j, width), *tiles_of(d_a, [grad], i, j, width)], loaded)
            zero_half(tiles, count, met)

            inner[j, pl.ds(i * HALF, HALF)] = activation.differentiate_tile(act, grad, of_h, weight, columns, part)
            _store([*tiles_of(a_out, [grad], i, j, width), *tiles_of(d_h, of_h, i, j, width)])

    steps = width // columns
    out = (
        jax.ShapeDtypeStruct(d_a.shape, h.dtype),
        jax.ShapeDtypeStruct(h.shape, h.dtype),
        jax.ShapeDtypeStruct((steps, size), jnp.float32),
    )
    scratch = _scratch(2 + gated, h.dtype, columns, part)
    run = launch(activate_grad_rows, out, dict(i=activation.halves_of(blocks), j=steps), scratch, approx_math=True)
    return run(h, d_a, blocks.start, blocks.rows, weights)


def _columns(width: int) -> int:
    """Returns the columns of a tile, which divide F."""
    return next(n for n in COLUMNS if width % n == 0)


def _scratch(count: int, dtype, columns: int, part: int) -> dict:
    """Returns the shared memory: tiles with boxes of `part` columns, since a kernel addresses whole boxes."""
    transforms = (plgpu.TilingTransform((8, part)), plgpu.SwizzleTransform(part * jnp.dtype(dtype).itemsize))
    tile = plgpu.SMEM((HALF, columns), dtype, transforms=transforms)
    return dict(tiles=[tile] * count, loaded=plgpu.Barrier(num_arrivals=count), met=plgpu.Barrier())


def _store(copies) -> None:
    """Copies each tile of the (target, tile) pairs to its target, and waits until all tiles are read."""
    plgpu.commit_smem()
    for target, tile in copies:
        plgpu.copy_smem_to_gmem(tile, target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
