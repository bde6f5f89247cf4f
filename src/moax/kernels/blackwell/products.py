"""Grouped matmul on GPUs of compute capability 10.0, by the Pallas kernel that JAX ships for them.

    matmul     y[m]  = x[m] w[g(m)] + bias[g(m)]       with `transpose` dy[m] w[g(m)]^T

The kernel multiplies tiles of 256 rows. A tile at the border of two groups runs once for each of them, and each run
stores the rows of its own group: with sizes (200, 300) the first tile runs twice and stores rows 0 to 199, then rows
200 to 255. A row of the result depends on the same row of x alone, so padding does not change the rows of a group.

The possible race: two multiprocessors share a tile, and the first one issues the products of both. Before it overwrites
their sums it waits until it has stored its own half (`store_done_barrier`), and does not wait for the second one. JAX's
kernel for one group has a barrier of both there.

JAX ships no kernel for the gradient of a weight that Blackwell can run: `transposed_ragged_dot_mgpu` issues `wgmma`,
which compute capability 9.0 alone has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moax.groups import Groups, align_up, zero_rows
from moax.kernels.scales import dequantize
from moax.kernels.xla import products
from moax.mesh.collectives import typed
from moax.types import QArray

ROWS = 256  # the rows of a tile, 128 for each of two multiprocessors
WIDTH = 128  # the fewest columns of a tile; a step contracts a divisor of this number
STEP = 64  # the contracted elements of a step: 128 bytes, the widest swizzle
STAGES = 6  # the steps in shared memory, 32 KB each; a multiprocessor has 227 KB
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def matmul(
    x: Array | QArray, w: Array | QArray, groups: Groups, dtype: Any, bias: Any = None, *, transpose: bool = False
) -> Float[Array, "M N"]:
    """y[m] = x[m] w[g(m)] + bias[g(m)], or with `transpose` y[m] = x[m] w[g(m)]^T + bias[g(m)].

    The kernel reads weights [E, contracted, columns] alone. `transpose` therefore transposes the weights in memory
    first, which reads and writes them once. Rows are padded to a multiple of 256, which copies x if M is no such
    multiple. Where one group holds all rows, XLA multiplies.

    Args:
      x: [M, K], or with `transpose` [M, N].
      w: [E, K, N].
      groups: the layout of the rows.
      dtype: the dtype of the product.
      bias: [E, *C] or None, added after the product is rounded.
      transpose: whether w is transposed.

    Returns:
      [M, N], or with `transpose` [M, K], with 0 in padding.
    """
    if groups.sizes is None:
        return products.matmul(x, w, groups, dtype, bias, transpose=transpose)
    x, w = (dequantize(v, dtype) if isinstance(v, QArray) else v.astype(dtype) for v in (x, w))
    w = jnp.swapaxes(w, 1, 2) if transpose else w
    padded = jnp.pad(x, ((0, -x.shape[0] % ROWS), (0, 0)))
    y = zero_rows(_multiply(padded, w, find_spans(groups.sizes, groups.align))[: x.shape[0]], groups.real)
    return y if bias is None else products.add_bias(y, bias.reshape(bias.shape[0], -1), groups)


def matmul_activate(
    x: Array | QArray, w: Array | QArray, groups: Groups, dtype: Any, act: Callable, gates: int, bias: Any = None
) -> tuple[Float[Array, "M GF"], None]:
    """Returns the product h and None, because the kernel does not activate."""
    del act, gates
    return matmul(x, w, groups, dtype, bias), None


def find_spans(group_sizes: Int[Array, " E"], align: int) -> Int[Array, " E"]:
    """Returns the rows from the start of each group to the start of the next, and the rows of the last group.

    Sizes (3, 0, 5) at multiples of 4 span (4, 0, 5). The kernel takes groups that follow each other without a gap.
    """
    return align_up(group_sizes, align).at[-1].set(group_sizes[-1]).astype(jnp.int32)


@typed
def _multiply(x, w, spans):
    """Runs the kernel on whole tiles, with w [E, contracted, columns].

    A tile has 256 columns where 256 divides the columns, and 128 elsewhere.
    """
    from jax.experimental.pallas.ops.gpu import blackwell_ragged_dot_mgpu as shipped

    wide = w.shape[2] % (2 * WIDTH) == 0
    tile = shipped.TuningConfig(
        tile_m=ROWS // 2,
        tile_n=WIDTH if wide else WIDTH // 2,
        tile_k=STEP,
        max_concurrent_steps=STAGES,
        collective=True,
        grid_tile_width=8,
        grid_minor_dim=shipped.blackwell_matmul_mgpu.MatmulDimension.N,
    )
    return shipped.ragged_dot_kernel(x, w, spans, tile)
