"""Grouped products by XLA: one product a group, over the smallest of a few numbers of rows that holds the group.

    matmul     y[m]  = x[m] w[g(m)] + bias[g(m)]       with `transpose` dy[m] w[g(m)]^T
    wgrad      dw[g] = sum over rows m of group g: x[m]^T dy[m]
    bias_grad  db[g] = sum over rows m of group g: dy[m]

XLA compiles a product for a fixed number of rows, its capacity. A group of 700 rows with capacities (0, 256, 512, 768,
1024) takes the product over 768 rows, of which the last 68 are no rows of the group. A group without rows takes none.
The work is at most twice the rows of the groups and, for each group, a quarter of the mean group or 128 rows. The
memory is that of the rows and of one matrix. Quantized operands are dequantized to the dtype of the product before it.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moax.backend import platform
from moax.groups import Groups, align_up, group_starts, row_groups, zero_rows
from moax.kernels.scales import dequantize
from moax.mesh.collectives import vary_like
from moax.types import QArray

ROWS = (((0,), (0,)), ((), ()))  # contracts the rows of both operands
STEP = 128  # rows: a GPU multiplies fewer in about the same time, as it reads the same weights


def matmul(
    x: Array | QArray,
    w: Array | QArray,
    groups: Groups,
    dtype: DTypeLike,
    bias: Array | None = None,
    *,
    transpose: bool = False,
) -> Float[Array, "M N"]:
    """x [M, K] times the weight of each row's group, [E, K, N]; with `transpose` x [M, N] times [E, K, N]^T.

    bias: [E, *C] or None, added after the product is rounded. Padding of the result is 0.
    """
    x, w = _plain(x, dtype), _plain(w, dtype)
    width, contract = w.shape[1 if transpose else 2], (((1,), (1 if transpose else 0,)), ((), ()))
    if groups.sizes is None:
        y = _dot(x, w[0], contract)
        return y if bias is None else y + bias.reshape(1, -1).astype(dtype)

    def of_group(y, step):
        matrix, index, start, size = step

        def over(capacity: int):
            first, real = _window(start, size, capacity, x.shape[0])
            part = _dot(lax.dynamic_slice_in_dim(x, first, capacity), matrix, contract)
            before = lax.dynamic_slice_in_dim(y, first, capacity)
            return lax.dynamic_update_slice_in_dim(y, jnp.where(real[:, None], part, before), first, 0)

        return _switch(index, over, capacities), None

    capacities, steps = _plan(groups, x.shape[0])
    y = vary_like(jnp.zeros((x.shape[0], width), dtype), x, w, groups.sizes)
    y = lax.scan(of_group, y, (w, *steps))[0]
    return y if bias is None else add_bias(y, bias.reshape(bias.shape[0], -1), groups)


def wgrad(x: Array | QArray, dy: Array | QArray, groups: Groups, dtype: DTypeLike) -> Float[Array, "E K N"]:
    """x [M, K] and dy [M, N], whatever their padding holds -> [E, K, N], summed in float32."""
    x, dy = _plain(x, dtype), _plain(dy, dtype)
    if groups.sizes is None:
        return _dot(x, dy, ROWS)[None]

    def of_group(_, step):
        index, start, size = step

        def over(capacity: int):
            first, real = _window(start, size, capacity, x.shape[0])
            rows, d_rows = (zero_rows(lax.dynamic_slice_in_dim(v, first, capacity), real) for v in (x, dy))
            return _dot(rows, d_rows, ROWS)

        return None, _switch(index, over, capacities)

    capacities, steps = _plan(groups, x.shape[0])
    return lax.scan(of_group, None, steps)[1]


def bias_grad(dy: Float[Array, "M *C"], groups: Groups) -> Float[Array, "E *C"]:
    """The sum of each group's rows, in float32; padding may hold anything."""
    dy = dy.astype(jnp.float32)
    if groups.sizes is None:
        return dy.sum(0, keepdims=True)
    group = row_groups(groups.sizes, groups.align, dy.shape[0])[0]
    return jax.ops.segment_sum(zero_rows(dy, groups.real), group, num_segments=groups.sizes.shape[0])


def add_bias(y: Float[Array, "M N"], bias: Float[Array, "E N"], groups: Groups) -> Float[Array, "M N"]:
    """y[m] + bias[g(m)]; padding stays as it was."""
    group = row_groups(groups.sizes, groups.align, y.shape[0])[0]
    return jnp.where(groups.real[:, None], y + bias.astype(y.dtype)[group], y)


def pick_capacities(num_rows: int, num_groups: int) -> tuple[int, ...]:
    """0, quarters of the mean group up to twice the mean, doubles of the mean, and all rows, in whole steps.

    16384 rows of 4 groups give (0, 1024, 2048, ..., 8192, 16384); 300 rows of 8 groups give (0, 128, 256, 300).
    """
    mean = -(-num_rows // num_groups)
    doubles = (mean << n for n in range(2, num_groups.bit_length()))
    found = {align_up(rows, STEP) for rows in (*(mean * n // 4 for n in range(1, 9)), *doubles)}
    return tuple(sorted({0, num_rows, *(rows for rows in found if rows < num_rows)}))


def _plan(groups: Groups, num_rows: int):
    """The capacities, and (index of the capacity that holds it, first row, rows) of every group.

    The index of all groups is found at once: a search inside a loop over groups is a loop of small kernels itself.
    """
    capacities = pick_capacities(num_rows, groups.sizes.shape[0])
    index = sum(((groups.sizes > rows).astype(jnp.int32) for rows in capacities[:-1]), jnp.zeros_like(groups.sizes))
    return capacities, (index, group_starts(groups.sizes, groups.align), groups.sizes)


def _window(start, size, capacity: int, num_rows: int):
    """The first of `capacity` rows that hold rows start to start + size, and which of them are those rows.

    Rows 3 to 5 of 6 within 4 rows begin at row 2, and the last 3 of the 4 are real.
    """
    first = jnp.minimum(start, num_rows - capacity)
    rows = first + jnp.arange(capacity, dtype=jnp.int32)
    return first, (rows >= start) & (rows < start + size)


def _switch(index, over: Callable, capacities: tuple[int, ...]):
    return lax.switch(index, [lambda capacity=capacity: over(capacity) for capacity in capacities])


def _plain(x, dtype):
    return dequantize(x, dtype) if isinstance(x, QArray) else x.astype(dtype)


def _dot(a, b, contract):
    """The product in the dtype of its operands, summed in float32 or wider.

    A GPU writes the result in that dtype at once, which halves what it writes. A CPU has products of bfloat16 with
    results in float32 alone.
    """
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    result = jnp.float32 if a.dtype.itemsize < 4 and platform() != "gpu" else a.dtype
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=result).astype(a.dtype)
