"""The implementation that runs everywhere: XLA, on every backend of JAX and in any dtype.

`moax.kernels.protocol` documents each function. The file `operands` has the functions that gather and quantize.

XLA compiles a matmul of a group for a fixed number of rows, its capacity. A group of 700 rows with capacities (0, 256,
512, 768, 1024) takes the matmul over 768 rows, of which the last 68 are no rows of the group. A group without rows
takes no matmul. The matmuls compute at most twice the rows of the groups and, for each group, a quarter of the mean
group or 128 rows. They take memory for the rows and for one matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from moax.kernels import Operand, Role
from moax.kernels.device import rounds_in_matmul
from moax.kernels.groups import Groups, Packing, align_up, find_groups, scale_rows, sum_before, zero_rows
from moax.kernels.results import ActivationGrads, Permutation, QuantizedActivationGrads
from moax.kernels.scales import dequantize
from moax.kernels.xla.operands import (
    gather_rows,
    make_weight_operand,
    quantize_for_matmul,
    quantize_shard,
)
from moax.mesh.collectives import vary_like
from moax.recipe import FULL, Recipe, Use
from moax.types import QArray

__all__ = [
    "activate", "activate_grad", "activate_grad_quantize", "bias_grad", "build_permutation", "choose_rows",
    "find_groups", "gather_rows", "gather_sum", "make_weight_operand", "matmul", "matmul_activate",
    "pack_rows", "quantize_for_matmul", "quantize_shard",
    "stores_weight_transposed", "supports_fp8", "top_k", "wgrad",
]  # fmt: skip
COUNTED = 256  # the assignments of a block, each of which is compared with each
# The most comparisons of blocks. A cumulative sum, which takes their place, is several kernels and few additions.
COMPARED = 1 << 26
ROWS = (((0,), (0,)), ((), ()))  # dimension numbers that contract the rows of both operands
STEP = 128  # a GPU multiplies fewer rows in about the same time, since it reads the same weights


def supports_fp8(recipe: Recipe) -> bool:
    """Returns False: operands are dequantized to the dtype."""
    return False


def stores_weight_transposed(recipe: Recipe, use: Use) -> bool:
    """Returns False: a quantized shard of a weight has the dims (E, K, *C)."""
    return False


def choose_rows(recipe: Recipe, role: Role, width: int, hidden: int) -> tuple[int, bool]:
    """Returns the alignment of the recipe, so that no block of rows holds rows of two groups, and False."""
    return recipe.row_alignment, False


def pack_rows(group_sizes: Int[Array, " E"] | None, align: int, num_rows: int) -> Packing:
    """Returns a packing that leaves all rows where they are."""
    # The matmuls take groups that start at any row, do not read padding, and leave 0 in it.
    return Packing(find_groups(group_sizes, align, num_rows), lambda x: x, lambda y: y)


def top_k(x: Float[Array, "T E"], k: int) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
    """Returns the k largest of each row of x, and their indices i32."""
    values, indices = lax.top_k(x, k)
    return values, indices


def build_permutation(
    experts: Int[Array, "R K"], num_groups: int, align: int, num_rows: int,
    weights: Float[Array, "R K"] | None = None, keep: Callable | None = None,
) -> Permutation:  # fmt: skip
    """Returns the Permutation of the experts."""
    # An assignment a of block b to expert e is arrival before[b, e] + earlier[a] of its expert. With blocks of 3 in
    # place of `COUNTED`, the experts (1, 0, 1, 1, 2, 1) have before ((0, 0, 0), (1, 2, 0)), sizes (1, 4, 1) and earlier
    # (0, 0, 1, 0, 0, 1). A sort would find the same in many kernels, and these sums over comparisons are three.
    flat = experts.reshape(-1)
    count = flat.shape[0]
    # R and the number of blocks may be symbolic dimensions of `jax.export`.
    num_blocks = (count + COUNTED - 1) // COUNTED
    padded = jnp.pad(flat, (0, num_blocks * COUNTED - count), constant_values=num_groups)
    blocks = padded.reshape(num_blocks, COUNTED)
    in_group = blocks[:, :, None] == jnp.arange(num_groups, dtype=jnp.int32)[None, None]
    sums = _sum_blocks_before(in_group.sum(1, dtype=jnp.int32), num_blocks, num_groups)
    before = sums[:-1]
    sizes = sums[-1]
    place = jnp.arange(COUNTED, dtype=jnp.int32)
    same = (blocks[:, :, None] == blocks[:, None, :]) & (place[None, :] < place[:, None])[None]
    earlier = same.sum(2, dtype=jnp.int32).reshape(-1)[:count]
    if keep is not None:
        begin, sizes = keep(sizes)
        before = before - begin[None]
    # An assignment follows its group's first assignment in its block by as many rows as are earlier in the block.
    starts = sum_before(align_up(sizes, align))
    has_row = flat < num_groups
    group = jnp.minimum(flat, num_groups - 1)
    block = lax.div(lax.iota(jnp.int32, count), jnp.int32(COUNTED))
    row = (before + starts[None]).reshape(-1)[block * num_groups + group] + earlier
    if keep is not None:
        has_row &= (row >= starts[group]) & (row < (starts + sizes)[group])
    scatter_idx = jnp.where(has_row, row, num_rows).reshape(experts.shape)
    received = lax.broadcasted_iota(jnp.int32, experts.shape, 0)
    gather_idx = jnp.full(num_rows, experts.shape[0], jnp.int32)
    gather_idx = gather_idx.at[scatter_idx].set(received, mode="drop")
    row_weights = None
    if weights is not None:
        row_weights = jnp.zeros(num_rows, jnp.float32).at[scatter_idx].set(weights, mode="drop")
    return Permutation(gather_idx, scatter_idx, sizes, row_weights)


def _sum_blocks_before(
    in_block: Int[Array, "B G"], num_blocks, num_groups: int,
) -> Int[Array, "B+1 G"]:  # fmt: skip
    """Returns the sum of the blocks before each block, and last the sum of all blocks."""
    if not isinstance(num_blocks, int) or num_blocks**2 * num_groups > COMPARED:
        return jnp.cumsum(jnp.pad(in_block, ((1, 0), (0, 0))), axis=0)
    index = jnp.arange(num_blocks + 1, dtype=jnp.int32)
    is_before = index[None, :-1] < index[:, None]
    return jnp.where(is_before[:, :, None], in_block[None], 0).sum(1, dtype=jnp.int32)


def gather_sum(
    rows: Float[Array, "N H"], scatter_idx: Int[Array, "R K"],
    weights: Float[Array, "R K"] | None = None,
) -> Float[Array, "R H"]:  # fmt: skip
    """y[r] = sum_k weights[r, k] rows[scatter_idx[r, k]] in float32."""
    total = jnp.zeros((), jnp.float32)
    # K is small, and in this loop no array [R, K, H] is in memory.
    for k in range(scatter_idx.shape[1]):
        index = scatter_idx[:, k]
        row = jnp.take(rows, index, axis=0, mode="fill", fill_value=0).astype(jnp.float32)
        if weights is not None:
            row = row * jnp.where(index < rows.shape[0], weights[:, k], 0.0)[:, None]
        total = total + row
    return total.astype(rows.dtype)


def matmul(
    x: Array | QArray, w: Array | QArray, groups: Groups, dtype: DTypeLike,
    bias: Array | None = None, *, transpose: bool = False,
) -> Float[Array, "M N"]:  # fmt: skip
    """y[m] = x[m] w[g(m)] + bias[g(m)], or with `transpose` dx[m] = dy[m] w[g(m)]^T."""
    x = dequantize(x, dtype)
    w = dequantize(w, dtype)
    width, contracted_dim = w.shape[2], 0
    if transpose:
        width, contracted_dim = w.shape[1], 1
    contract = (((1,), (contracted_dim,)), ((), ()))
    if groups.sizes is None:
        y = _dot(x, w[0], contract)
        return y if bias is None else y + bias.reshape(1, -1).astype(dtype)
    capacities, steps = plan_matmuls(groups, x.shape[0])
    index_of_rows = jnp.arange(x.shape[0], dtype=jnp.int32)

    def add_group(capacity: int, y, matrix, start, end):
        # Each slice that would end past the last row begins earlier, with rows of other groups.
        row, rows, before = (lax.dynamic_slice_in_dim(v, start, capacity) for v in (index_of_rows, x, y))
        real = (row >= start) & (row < end)
        part = jnp.where(real[:, None], _dot(rows, matrix, contract), before)
        return lax.dynamic_update_slice_in_dim(y, part, start, 0)

    # A group without rows takes no matmul. One of 0 rows would leave a residual of size 0 to `jax.checkpoint`, and
    # XLA's pass from Shardy to GSPMD crashes on such an array.
    matmuls = [lambda y, *_: y, *(functools.partial(add_group, capacity) for capacity in capacities[1:])]

    def step(y, group):
        index, *operands = group
        return lax.switch(index, matmuls, y, *operands), None

    # y stays 0 in padding.
    y = vary_like(jnp.zeros((x.shape[0], width), dtype), x, w, groups.sizes)
    index, *edges = steps
    y, _ = lax.scan(step, y, (index, w, *edges))
    if bias is None:
        return y
    rows = bias.reshape(bias.shape[0], -1).astype(dtype)[groups.index]
    return jnp.where(groups.real[:, None], y + rows, y)


def matmul_activate(
    x: Array | QArray, w: Array | QArray, groups: Groups, dtype: DTypeLike, act: Callable,
    gates: int, bias: Array | None = None,
) -> tuple[Float[Array, "M GF"], None]:  # fmt: skip
    """h[m] = x[m] w[g(m)] + bias[g(m)], without the activation."""
    return matmul(x, w, groups, dtype, bias), None


def wgrad(
    x: Array | QArray, dy: Array | QArray, groups: Groups, dtype: DTypeLike,
    out_dtype: DTypeLike | None = None, total: Array | None = None,
) -> Float[Array, "E K N"]:  # fmt: skip
    """dw[g] = sum over rows m of group g: x[m]^T dy[m], summed in float32, and added to `total`."""
    x = dequantize(x, dtype)
    dy = dequantize(dy, dtype)
    if total is not None:
        out_dtype = jnp.float32 if total.dtype.itemsize < 4 else total.dtype
    if groups.sizes is None:
        whole = _dot(x, dy, ROWS, out_dtype)[None]
        return whole if total is None else _add(total, whole)
    capacities, steps = plan_matmuls(groups, x.shape[0])
    index_of_rows, index_of_groups = (jnp.arange(n, dtype=jnp.int32) for n in (x.shape[0], groups.sizes.shape[0]))

    def multiply(capacity: int, start, end):
        row, *operands = (lax.dynamic_slice_in_dim(v, start, capacity) for v in (index_of_rows, x, dy))
        rows, d_rows = (zero_rows(v, (row >= start) & (row < end)) for v in operands)
        return _dot(rows, d_rows, ROWS, out_dtype)

    def no_rows(start, end):
        zeros = jnp.zeros((x.shape[1], dy.shape[1]), dtype if out_dtype is None else out_dtype)
        return vary_like(zeros, x, dy, start)

    matmuls = [no_rows, *(functools.partial(multiply, capacity) for capacity in capacities[1:])]

    def step(total, operands):
        group, index, *edges = operands
        dw = lax.switch(index, matmuls, *edges)
        if total is None:
            return None, dw
        return lax.dynamic_update_index_in_dim(total, _add(total[group], dw), group, 0), None

    if total is not None:
        total = vary_like(total, x, dy, groups.sizes)
    total, dw = lax.scan(step, total, (index_of_groups, *steps))
    return cast(Array, dw if total is None else total)


def bias_grad(dy: Float[Array, "M *C"], groups: Groups) -> Float[Array, "E *C"]:
    """dbias[g] = sum over rows m of group g: dy[m], in float32."""
    dy = dy.astype(jnp.float32)
    if groups.sizes is None:
        return dy.sum(0, keepdims=True)
    return jax.ops.segment_sum(zero_rows(dy, groups.real), groups.index, num_segments=groups.sizes.shape[0])


def activate(h: Float[Array, "N G F"], act: Callable, recipe: Recipe, groups: Groups) -> Operand:
    """Returns the Operand of act(h)."""
    with jax.named_scope("activate"):
        a = act(*(h[:, g].astype(jnp.float32) for g in range(h.shape[1]))).astype(h.dtype)
    return quantize_for_matmul(a, recipe, "x", groups)[0]


def activate_grad(
    h: Float[Array, "N G F"], d_a: Float[Array, "N F"], act: Callable, groups: Groups,
    weights: Float[Array, " N"],
) -> ActivationGrads:  # fmt: skip
    """Returns act(h) times the weights, d_h, and inner [N] = <d_a, act(h)>."""
    a, pull = jax.vjp(lambda h: activate(h, act, FULL, groups), h)
    with jax.named_scope("activate"):
        inner = jnp.sum(d_a.astype(jnp.float32) * a.astype(jnp.float32), axis=-1)
        (d_h,) = pull(scale_rows(d_a, weights, groups))
        return ActivationGrads(scale_rows(a, weights, groups), d_h, inner)


def activate_grad_quantize(
    h: Float[Array, "N G F"], d_a: Float[Array, "N F"], act: Callable, recipe: Recipe,
    groups: Groups, *, weights: Float[Array, " N"],
) -> QuantizedActivationGrads:  # fmt: skip
    """Returns a for wgrad of wo, d_h for dgrad and for wgrad of wi, and inner."""
    grads = activate_grad(h, d_a, act, groups, weights)
    _, a = quantize_for_matmul(grads.a, recipe, "x", groups)
    d_h, d_h_wgrad = quantize_for_matmul(grads.d_h, recipe, "dy", groups)
    return QuantizedActivationGrads(a, d_h, d_h_wgrad, grads.inner)


def plan_matmuls(
    groups: Groups, num_rows: int,
) -> tuple[tuple[int, ...], tuple[Array, Array, Array]]:  # fmt: skip
    """Returns the capacities, and of each group the index of the smallest one that holds it, its first row and its end.

    The first capacity is 0. The others are quarters of the mean group up to twice the mean, doubles of the mean, and
    all rows. All but the last are multiples of `STEP`. The mean is `groups.expected` rows over the groups; None expects
    `num_rows`.

    16384 rows of 4 groups give (0, 1024, 2048, ..., 8192, 16384); 300 rows of 8 groups give (0, 128, 256, 300).
    """
    num_groups = groups.sizes.shape[0]
    mean = -(-(groups.expected or num_rows) // num_groups)
    quarters = [mean * n // 4 for n in range(1, 9)]
    doubles = [mean * 2**n for n in range(2, num_groups.bit_length())]
    capacities = [align_up(rows, STEP) for rows in (*quarters, *doubles)]
    if isinstance(num_rows, int):
        capacities = sorted({0, num_rows, *(rows for rows in capacities if rows < num_rows)})
    else:  # a symbolic number of rows, of which nobody knows whether it is larger
        capacities = [0, *(jax.core.min_dim(rows, num_rows) for rows in capacities), num_rows]
    # A search inside the loop over groups would be a loop of small kernels.
    index = sum(((groups.sizes > rows).astype(jnp.int32) for rows in capacities[:-1]), jnp.zeros_like(groups.sizes))
    starts = sum_before(align_up(groups.sizes, groups.align))
    return tuple(capacities), (index, starts, starts + groups.sizes)


def _add(total, term):
    """Returns the sum in the dtype of `total`, of which `term` has the same or a wider one."""
    return (total.astype(term.dtype) + term).astype(total.dtype)


def _dot(a, b, contract, dtype: DTypeLike | None = None):
    """Returns the matmul in this dtype, by default that of its operands, summed in float32 or wider."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    dtype = a.dtype if dtype is None else jnp.dtype(dtype)
    written = dtype
    if a.dtype.itemsize < 4 and not rounds_in_matmul():
        written = jnp.float32
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=written).astype(dtype)
