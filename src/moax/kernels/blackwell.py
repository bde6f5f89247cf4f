"""Grouped matmul on Blackwell GPUs of compute capability 10.0, by the Pallas kernel that JAX ships for them.

    matmul     y[m]  = x[m] w[g(m)]           with `transpose` dx[m] = dy[m] w[g(m)]^T

The kernel multiplies tiles of 256 rows. A tile at the border of two groups runs once for each of them, and each run
stores the rows of its own group: with sizes (200, 300) the first tile runs twice and stores rows 0 to 199, then rows
200 to 255. A row of the result depends on the same row of x alone, so padding reaches nothing.

JAX ships no kernel for the gradient of a weight that Blackwell can run: `transposed_ragged_dot_mgpu` issues `wgmma`,
which compute capability 9.0 alone has.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moax.errors import Unsupported
from moax.groups import align_up, group_starts

ROWS = 256  # of a tile: two multiprocessors with 128 each
WIDTH = 128  # elements: the least columns of a tile, and a multiple of what one step contracts
STEP = 64  # contracted elements of a step: 128 bytes, the widest swizzle
STAGES = 6  # steps in shared memory: 32 KB each of a multiprocessor's 227
DTYPES = (jnp.bfloat16, jnp.float16)


def why_not_matmul(dtype: Any, **widths: int) -> str | None:
    """Why the kernel cannot multiply; None where it can.

    Args:
      dtype: of both operands.
      widths: contracted elements and columns of one device, by name.
    """
    if importlib.util.find_spec("absl") is None:
        return "the kernel that JAX ships imports absl, and absl-py is not installed"
    if jnp.dtype(dtype) not in map(jnp.dtype, DTYPES):
        return f"the kernel multiplies bfloat16 or float16, not {jnp.dtype(dtype).name}"
    for name, size in widths.items():
        if size % WIDTH or not size:
            return f"{name} of {size} elements a device is no multiple of {WIDTH}, the columns of a tile"
    return None


def matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "E K N"],
    group_sizes: Int[Array, " E"],
    align: int = 1,
    *,
    transpose: bool = False,
) -> Float[Array, "M N"]:
    """y[m] = x[m] w[g(m)], or with `transpose` x [M, N] times the transposed weights.

    The kernel reads weights [E, contracted, columns] alone. Weights to be transposed are therefore transposed in memory
    first, which reads and writes them once. Rows are padded to a multiple of 256, which copies x where M is none.

    Args:
      x: [M, K], bfloat16 or float16; padding may hold anything.
      w: [E, K, N] in x.dtype; K and N are multiples of 128.
      group_sizes: [E] i32; group g starts at a multiple of `align`, right after group g - 1. Groups may be empty.
      align: rows to which group starts are aligned.

    Returns:
      y: [M, N] in x.dtype, summed in float32; padding may hold anything.

    Raises:
      Unsupported: a dtype or widths that the kernel does not take, or a JAX whose kernel cannot be imported.
    """
    _, rows, columns = w.shape
    why = why_not_matmul(x.dtype, **{"w's dim 1": rows, "w's columns": columns})
    if why is not None:
        raise Unsupported(f"kernels='blackwell': {why}; use 'auto' or 'xla'")
    from jax.experimental.pallas.ops.gpu import blackwell_ragged_dot_mgpu as shipped

    w = jnp.swapaxes(w, 1, 2) if transpose else w
    padding = align_up(x.shape[0], ROWS) - x.shape[0]
    padded = jnp.pad(x, ((0, padding), (0, 0))) if padding else x
    y = shipped.ragged_dot_kernel(padded, w, spans(group_sizes, align), _tile(shipped, w.shape[2]))
    return y[: x.shape[0]]


def spans(group_sizes: Int[Array, " E"], align: int) -> Int[Array, " E"]:
    """Rows from each group's start to the next one's, and the last group's own: sizes (3, 0, 5) at multiples of 4 span
    (4, 0, 5). The kernel takes groups that follow each other without a gap."""
    starts = group_starts(group_sizes, align)
    return jnp.append(starts[1:] - starts[:-1], group_sizes[-1:]).astype(jnp.int32)


def _tile(shipped: Any, columns: int):
    """The kernel's tile: 256 columns of the pair of multiprocessors where they divide the columns, else 128."""
    wide = columns % (2 * WIDTH) == 0
    return shipped.TuningConfig(
        tile_m=ROWS // 2,
        tile_n=WIDTH if wide else WIDTH // 2,
        tile_k=STEP,
        max_concurrent_steps=STAGES,
        collective=True,
        grid_tile_width=8,
        grid_minor_dim=shipped.blackwell_matmul_mgpu.MatmulDimension.N,
    )
