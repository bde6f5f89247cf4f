"""The kernel that dequantizes FP8 rows which arrived over the wire.

x[r, c] = data[r, c] * scale[r, c / 128]
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moax.errors import Unsupported
from moax.kernels.hopper.formats import BLOCK, HALF
from moax.kernels.hopper.pallas.quantize import launch, load_tiles, rows_of, tile_buffer


def dequantize_rows(
    data: Float[Array, "R C"], words: Int[Array, "R W"], ends: Int[Array, " N"], *, dtype=jnp.bfloat16
) -> Float[Array, "R C"]:
    """x[r, c] = data[r, c] * scale[r, c / 128], rounded once. Rows from ends[-1] on may hold anything.

    Args:
      data: [R, C] float8_e4m3fn or float8_e5m2, R a multiple of 128 and C of 32.
      words: [R, W] i32. The first ceil(C / 128) columns are the bits of the f32 scales; other columns are not read.
      ends: [N] i32; ends[-1] is the number of rows to dequantize.
      dtype: the dtype of the result, bfloat16 or float32.

    Returns:
      [R, C] in `dtype`.

    Raises:
      Unsupported: the kernel does not take these shapes.
    """
    size, width = data.shape
    blocks = -(-width // BLOCK)
    if size % BLOCK or width % 32 or words.shape[0] != size or words.shape[1] < blocks:
        raise Unsupported(
            f"data and words have shapes {data.shape}, {words.shape}; the kernel takes multiples of {BLOCK} rows and "
            "of 32 columns, with a word for each 128 columns"
        )

    def dequantize_rows(data, words, ends, out, *, tile, wide, loaded):
        i, j = lax.axis_index("i"), lax.axis_index("j")

        @pl.when(i * BLOCK < ends[ends.shape[0] - 1])
        def _():
            load_tiles([(data.at[pl.ds(i * BLOCK, BLOCK), pl.ds(j * BLOCK, BLOCK)], tile)], loaded)
            for half in (0, 1):
                scale = words.at[pl.ds(i * BLOCK + half * HALF, HALF), j]
                scale = plgpu.load(scale, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
                scale = lax.bitcast_convert_type(scale, jnp.float32)
                value = rows_of(tile, half, optimized=False)
                value = value * lax.broadcast_in_dim(scale, value.shape, [0])
                wide[pl.ds(half * HALF, HALF)] = value.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(wide, out.at[pl.ds(i * BLOCK, BLOCK), pl.ds(j * BLOCK, BLOCK)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    scratch = dict(tile=tile_buffer(data.dtype, width), wide=tile_buffer(dtype, width), loaded=plgpu.Barrier())
    out = jax.ShapeDtypeStruct((size, width), dtype)
    return launch(dequantize_rows, out, dict(i=size // BLOCK, j=blocks), scratch)(data, words, ends)
