"""This script times ways of quantizing gathered rows on one GPU, and compares their bits with those of the old kernel.

old      one kernel, each copy of a row issued by all four warps
new      one kernel, each copy of a row issued by one warp
tokens   rows: each token is quantized once, then bytes and scales are gathered; columns: `new`, columns alone
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.kernels.permute import expert_sorted
from benchmarks.tokens import Tokens
from moax.kernels.hopper.formats import BLOCK, KMajorFp8
from moax.kernels.hopper.pallas import quantize
from moax.kernels.hopper.pallas.permute import gather_rows
from moax.tune.timing import Repeats, kernel_time

CASES = (Tokens.of("qwen3", "qwen3-30b", tokens=8192), Tokens.of("mixtral", "mixtral-8x7b", tokens=8192))
BY_WARPS = quantize.gather_tile


def old_gather_tile(x, source, first, column, tile, loaded) -> None:
    """Copies the 128 rows x[source[first]], ... to the tile; each warp issues each copy."""

    def some(n, _):
        at = [source[first + n * 32 + k] for k in range(32)]
        for k in range(32):
            row = tile.at[pl.ds(n * 32 + k, 1)]
            plgpu.copy_gmem_to_smem(x.at[pl.ds(at[k], 1), pl.ds(column, BLOCK)], row, loaded)

    lax.fori_loop(0, BLOCK // 32, some, None)
    plgpu.barrier_wait(loaded)


def one_kernel(gather, **wanted):
    """Returns (x, source, blocks) -> x[source] quantized by one kernel that gathers tiles by `gather`."""

    def run(x, source, blocks):
        quantize.gather_tile = gather
        try:
            return quantize.quantize_rows(x, blocks, source=source, **wanted)
        finally:
            quantize.gather_tile = BY_WARPS

    return run


def rows_of_tokens(x, source, blocks):
    """Returns the rows x[source] quantized by rows: tokens are quantized, then their bytes and scales are gathered."""
    made = quantize.quantize_rows(x, None, columns=False)[0]
    data = gather_rows(lax.bitcast_convert_type(made.data, jnp.uint8), source, blocks.used)
    scale = jnp.take(made.scale, source, axis=1, mode="fill", fill_value=1)
    return KMajorFp8(lax.bitcast_convert_type(data, made.data.dtype), scale)


def by_tokens(x, source, blocks):
    """Returns both results: rows by `rows_of_tokens`, and columns by a kernel for columns alone."""
    columns = one_kernel(BY_WARPS, rows=False)(x, source, blocks)[1]
    return rows_of_tokens(x, source, blocks), columns


WAYS = {
    "old both": one_kernel(old_gather_tile),
    "new both": one_kernel(BY_WARPS),
    "tokens both": by_tokens,
    "old rows": one_kernel(old_gather_tile, columns=False),
    "new rows": one_kernel(BY_WARPS, columns=False),
    "tokens rows": lambda *args: (rows_of_tokens(*args), None),
    "old columns": one_kernel(old_gather_tile, rows=False),
    "new columns": one_kernel(BY_WARPS, rows=False),
}


def bits(operand: KMajorFp8, used: int, dim: int) -> list[np.ndarray]:
    """Returns the bytes and the scales of an operand, of the first `used` rows."""
    data, scale = np.asarray(lax.bitcast_convert_type(operand.data, jnp.uint8)), np.asarray(operand.scale)
    return [data[:used], scale[:, :used]] if dim == 0 else [data[:, :used], scale[: used // BLOCK]]


def main() -> int:
    """Prints microseconds and kernels of each way. Returns 1 where bits differ."""
    wrong = 0
    for case in CASES:
        x, source, blocks = expert_sorted(case)
        x = x.at[5, 7].set(jnp.nan).at[9, 300].set(jnp.inf).at[11].set(0)
        used = int(blocks.used[0]) * BLOCK
        want = jax.jit(WAYS["old both"])(x, source, blocks)
        for name, way in WAYS.items():
            run = jax.jit(way)
            got = run(x, source, blocks)
            same = all(
                np.array_equal(a, b)
                for dim, (g, w) in enumerate(zip(got, want, strict=True))
                if g is not None
                for a, b in zip(bits(g, used, dim), bits(w, used, dim), strict=True)
            )
            wrong += not same
            timing = kernel_time(run, (x, source, blocks), Repeats(5, 21))
            kernels = ", ".join(f"{kernel[:40]} {us:.1f}" for kernel, us in timing.kernels)
            print(
                f"{case.name} {name}: {timing.us:.1f} us, bits {'equal' if same else 'DIFFER'} ({kernels})", flush=True
            )
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
