"""Grouped products by XLA: a loop over the tiles of the groups computes one product for each tile of rows.

    matmul     y[m]  = x[m] w[g(m)] + bias[g(m)]       with `transpose` dy[m] w[g(m)]^T
    wgrad      dw[g] = sum over rows m of group g: x[m]^T dy[m]
    bias_grad  db[g] = sum over rows m of group g: dy[m]

The work is proportional to the number of real rows. Quantized operands are dequantized before the product, to its
dtype.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from moax.groups import Groups, group_starts, row_groups, zero_rows
from moax.kernels.scales import dequantize
from moax.mesh.collectives import vary_like
from moax.types import QArray

ROWS = (((0,), (0,)), ((), ()))  # dimension numbers that contract the rows of both operands


def matmul(
    x: Array | QArray, w: Array | QArray, groups: Groups, dtype: Any, bias: Any = None, *, transpose: bool = False
) -> Float[Array, "M N"]:
    """y[m] = x[m] w[g(m)] + bias[g(m)], or with `transpose` y[m] = x[m] w[g(m)]^T + bias[g(m)].

    Args:
      x: [M, K], or with `transpose` [M, N].
      w: [E, K, N].
      groups: the layout of the rows.
      dtype: the dtype of the product.
      bias: [E, *C] or None, added after the product is rounded.

    Returns:
      [M, N], or with `transpose` [M, K]. Padding may hold anything.
    """
    x, w = _plain(x, dtype), _plain(w, dtype)
    width, contract = w.shape[1 if transpose else 2], (((1,), (1 if transpose else 0,)), ((), ()))
    if groups.sizes is None:
        y = _dot(x, w[0], contract).astype(dtype)
        return y if bias is None else y + bias.reshape(1, -1).astype(dtype)
    tiles = _Tiles(groups, x.shape[0])

    def body(i, y):
        group, first, real = tiles.find(i)
        rows = lax.dynamic_slice_in_dim(x, first, tiles.size)
        part = _dot(rows, lax.dynamic_index_in_dim(w, group, keepdims=False), contract).astype(dtype)
        before = lax.dynamic_slice_in_dim(y, first, tiles.size)
        return lax.dynamic_update_slice_in_dim(y, jnp.where(real[:, None], part, before), first, 0)

    y = vary_like(jnp.zeros((x.shape[0], width), dtype), x, w, groups.sizes)
    y = lax.fori_loop(0, tiles.count, body, y)
    return y if bias is None else add_bias(y, bias.reshape(bias.shape[0], -1), groups)


def wgrad(x: Array | QArray, dy: Array | QArray, groups: Groups, dtype: Any) -> Float[Array, "E K N"]:
    """dw[g] = sum over rows m of group g: x[m]^T dy[m], in float32. Padding of x and dy may hold anything."""
    x, dy = _plain(x, dtype), _plain(dy, dtype)
    if groups.sizes is None:
        return _dot(x, dy, ROWS).astype(dtype)[None]
    tiles = _Tiles(groups, x.shape[0])

    def body(i, dw):
        group, first, real = tiles.find(i)
        rows, d_rows = (zero_rows(lax.dynamic_slice_in_dim(v, first, tiles.size), real) for v in (x, dy))
        part = lax.dynamic_index_in_dim(dw, group, keepdims=False) + _dot(rows, d_rows, ROWS)
        return lax.dynamic_update_index_in_dim(dw, part, group, 0)

    dw = jnp.zeros((groups.sizes.shape[0], x.shape[1], dy.shape[1]), jnp.float32)
    return lax.fori_loop(0, tiles.count, body, vary_like(dw, x, dy, groups.sizes)).astype(dtype)


def bias_grad(dy: Float[Array, "M *C"], groups: Groups) -> Float[Array, "E *C"]:
    """dbias[g] = sum over rows m of group g: dy[m], in float32. Padding of dy may hold anything."""
    dy = dy.astype(jnp.float32)
    if groups.sizes is None:
        return dy.sum(0, keepdims=True)
    group = row_groups(groups.sizes, groups.align, dy.shape[0])[0]
    return jax.ops.segment_sum(zero_rows(dy, groups.real), group, num_segments=groups.sizes.shape[0])


def add_bias(y: Float[Array, "M N"], bias: Float[Array, "E N"], groups: Groups) -> Float[Array, "M N"]:
    """Returns y[m] + bias[g(m)] in the real rows; padding is not changed."""
    group = row_groups(groups.sizes, groups.align, y.shape[0])[0]
    return jnp.where(groups.real[:, None], y + bias.astype(y.dtype)[group], y)


def _plain(x, dtype):
    """Returns x as an array of this dtype, dequantized if it is a QArray."""
    return dequantize(x, dtype) if isinstance(x, QArray) else x.astype(dtype)


def _dot(a, b, contract):
    """Returns the product of a and b, summed in float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


class _Tiles:
    """Tiles of `size` rows that cover the groups; no tile holds real rows of two groups.

    With groups of 3 and 5 rows, align 1 and tiles of 4 rows, tile 0 is rows 0 to 3, of which 0 to 2 are real. Tiles 1
    and 2 are rows 3 to 6 and 4 to 7, of which 3 to 6 and 7 are real: no tile hangs over the end of the rows.
    """

    def __init__(self, groups: Groups, num_rows: int):
        mean = max(1, num_rows // groups.sizes.shape[0])
        self.size = min(num_rows, max(16, min(512, 1 << (mean - 1).bit_length())))
        tiles_per_group = -(-groups.sizes // self.size)
        self.last = jnp.cumsum(tiles_per_group)
        self.before = self.last - tiles_per_group
        self.count = self.last[-1]
        self.start = group_starts(groups.sizes, groups.align)
        self.end = self.start + groups.sizes
        self.num_rows = num_rows

    def find(self, i):
        """Returns the group of tile i, the first row of the tile, and [size] bool.

        The bool says whether each row of the tile belongs to the group and is real.
        """
        group = jnp.searchsorted(self.last, i, side="right").astype(jnp.int32)
        begin = self.start[group] + (i - self.before[group]) * self.size
        first = jnp.minimum(begin, self.num_rows - self.size)
        rows = first + jnp.arange(self.size, dtype=jnp.int32)
        return group, first, (rows >= begin) & (rows < self.end[group])
