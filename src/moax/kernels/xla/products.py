"""Grouped products by XLA: one product for each group, over the smallest capacity that holds the rows of the group.

    matmul     y[m]  = x[m] w[g(m)] + bias[g(m)]       with `transpose` dy[m] w[g(m)]^T
    wgrad      dw[g] = sum over rows m of group g: x[m]^T dy[m]
    bias_grad  db[g] = sum over rows m of group g: dy[m]

XLA compiles a product for a fixed number of rows, its capacity. A group of 700 rows with capacities (0, 256, 512, 768,
1024) takes the product over 768 rows, of which the last 68 are no rows of the group. A group without rows takes no
product. The products compute at most twice the rows of the groups and, for each group, a quarter of the mean group or
128 rows. They take memory for the rows and for one matrix. Quantized operands are dequantized before the product, to
its dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moax.backend import platform
from moax.groups import Groups, align_up, group_starts, least, row_groups, rows_of_groups, zero_rows
from moax.kernels.scales import to_array
from moax.mesh.collectives import vary_like
from moax.types import QArray

ROWS = (((0,), (0,)), ((), ()))  # dimension numbers that contract the rows of both operands
STEP = 128  # a GPU multiplies fewer rows in about the same time, since it reads the same weights


def matmul(
    x: Array | QArray, w: Array | QArray, groups: Groups, dtype: DTypeLike, bias: Array | None = None,
    *, transpose: bool = False,
) -> Float[Array, "M N"]:  # fmt: skip
    """y[m] = x[m] w[g(m)] + bias[g(m)], or with `transpose` x[m] w[g(m)]^T + bias[g(m)]; 0 in padding.

    The bias is added after the product is rounded. See `moax.kernels.Implementation`.
    """
    x, w = to_array(x, dtype), to_array(w, dtype)
    width, contract = w.shape[1 if transpose else 2], (((1,), (1 if transpose else 0,)), ((), ()))
    if groups.sizes is None:
        y = _dot(x, w[0], contract)
        return y if bias is None else y + bias.reshape(1, -1).astype(dtype)
    switch, steps = _plan(groups, x.shape[0])

    def of_group(y, step):
        matrix, *step = step

        def over(first, real):
            part = _dot(lax.dynamic_slice_in_dim(x, first, real.shape[0]), matrix, contract)
            before = lax.dynamic_slice_in_dim(y, first, real.shape[0])
            return lax.dynamic_update_slice_in_dim(y, jnp.where(real[:, None], part, before), first, 0)

        return switch(step, over), None

    y = vary_like(jnp.zeros((x.shape[0], width), dtype), x, w, groups.sizes)
    y = lax.scan(of_group, y, (w, *steps))[0]
    if bias is None:
        return y
    rows = rows_of_groups(bias.reshape(bias.shape[0], -1).astype(dtype), groups, y.shape[0])
    return jnp.where(groups.real[:, None], y + rows, y)


def matmul_activate(
    x: Array | QArray, w: Array | QArray, groups: Groups, dtype: DTypeLike, act: Callable, gates: int,
    bias: Array | None = None,
) -> tuple[Float[Array, "M GF"], None]:  # fmt: skip
    """Returns the product h and None, because a product of XLA does not activate."""
    return matmul(x, w, groups, dtype, bias), None


def wgrad(
    x: Array | QArray, dy: Array | QArray, groups: Groups, dtype: DTypeLike, out_dtype: DTypeLike | None = None,
    total: Array | None = None,
) -> Float[Array, "E K N"]:  # fmt: skip
    """dw[g] = sum over rows m of group g: x[m]^T dy[m], in float32. A `total` gets its sum in its own memory.

    See `moax.kernels.Implementation`.
    """
    x, dy = to_array(x, dtype), to_array(dy, dtype)
    if total is not None:
        out_dtype = jnp.float32 if total.dtype.itemsize < 4 else total.dtype
    if groups.sizes is None:
        whole = _dot(x, dy, ROWS, out_dtype)[None]
        return whole if total is None else _add(total, whole)
    switch, steps = _plan(groups, x.shape[0])

    def over(first, real):
        rows, d_rows = (zero_rows(lax.dynamic_slice_in_dim(v, first, real.shape[0]), real) for v in (x, dy))
        return _dot(rows, d_rows, ROWS, out_dtype)

    def add(total, step):
        group, *step = step
        return lax.dynamic_update_index_in_dim(total, _add(total[group], switch(step, over)), group, 0), None

    if total is None:
        return lax.scan(lambda _, step: (None, switch(step, over)), None, steps)[1]
    total = vary_like(total, x, dy, groups.sizes)
    return lax.scan(add, total, (jnp.arange(groups.sizes.shape[0], dtype=jnp.int32), *steps))[0]


def bias_grad(dy: Float[Array, "M *C"], groups: Groups) -> Float[Array, "E *C"]:
    """dbias[g] = sum over rows m of group g: dy[m], in float32."""
    dy = dy.astype(jnp.float32)
    if groups.sizes is None:
        return dy.sum(0, keepdims=True)
    group = row_groups(groups.sizes, groups.align, dy.shape[0])[0]
    return jax.ops.segment_sum(zero_rows(dy, groups.real), group, num_segments=groups.sizes.shape[0])


def pick_capacities(num_rows: int, num_groups: int, expected: int | None = None) -> tuple[int, ...]:
    """Returns the capacities: 0, quarters of the mean group up to twice the mean, doubles of the mean, and all rows.

    All but the last are multiples of `STEP`. The mean is `expected` rows over the groups; None expects `num_rows`.

    16384 rows of 4 groups give (0, 1024, 2048, ..., 8192, 16384); 300 rows of 8 groups give (0, 128, 256, 300).
    """
    mean = -(-(expected or num_rows) // num_groups)
    doubles = (mean * 2**n for n in range(2, num_groups.bit_length()))
    capacities = [align_up(rows, STEP) for rows in (*(mean * n // 4 for n in range(1, 9)), *doubles)]
    if not isinstance(num_rows, int):  # a symbolic number of rows, of which nobody knows whether it is larger
        return (0, *(least(rows, num_rows) for rows in capacities), num_rows)
    return tuple(sorted({0, num_rows, *(rows for rows in capacities if rows < num_rows)}))


def _plan(groups: Groups, num_rows: int):
    """Returns switch(step, over), which runs over(first, real) on the rows of a group, and the step of each group."""
    # `over` gets the first row of the smallest capacity that holds the group, and whether each row is the group's.
    capacities = pick_capacities(num_rows, groups.sizes.shape[0], groups.expected)
    # A search inside the loop over groups would be a loop of small kernels.
    index = sum(((groups.sizes > rows).astype(jnp.int32) for rows in capacities[:-1]), jnp.zeros_like(groups.sizes))

    def switch(step, over: Callable):
        index, start, size = step

        def run(capacity: int):
            first = jnp.minimum(start, num_rows - capacity)
            rows = first + jnp.arange(capacity, dtype=jnp.int32)
            return over(first, (rows >= start) & (rows < start + size))

        return lax.switch(index, [functools.partial(run, capacity) for capacity in capacities])

    return switch, (index, group_starts(groups.sizes, groups.align), groups.sizes)


def _add(total, more):
    """Returns the sum in the dtype of `total`, of which `more` has the same or a wider one."""
    return (total.astype(more.dtype) + more).astype(total.dtype)


def _dot(a, b, contract, dtype: DTypeLike | None = None):
    """Returns the product in this dtype, by default that of its operands, summed in float32 or wider."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dtype = a.dtype if dtype is None else jnp.dtype(dtype)
    # A CPU multiplies bfloat16 to float32 alone; a GPU writes bfloat16 at once, half the bytes.
    result = jnp.float32 if a.dtype.itemsize < 4 and platform() != "gpu" else dtype
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=result).astype(dtype)
