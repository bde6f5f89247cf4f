"""What the ops ask of the Mosaic kernels, on one device; the only file that imports them.

Imported lazily: without kernels/ nothing here is called, and `select_kernels` says why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moax.backend import device_kind
from moax.groups import BLOCK, Blocks, align_up, find_groups, group_starts, row_groups, zero_rows
from moax.mesh.collectives import vary_like
from moax.types import Operand


def typed[**P, R](call: Callable[P, R]) -> Callable[P, R]:
    """`call` with results typed as varying like its operands, inside a `shard_map` with `check_vma`: those of a kernel
    are typed as the same on every device."""

    @functools.wraps(call)
    def wrapped(*args: P.args, **options: P.kwargs) -> R:
        operands = [v for v in jax.tree.leaves((args, options)) if isinstance(v, jax.Array)]
        return jax.tree.map(lambda result: vary_like(result, operands), call(*args, **options))

    return wrapped


@typed
def matmul(x, w, blocks: Blocks, dtype, bias=None, *, transpose: bool = False):
    """Rows [M, K] times the weight of their group: [E, K, N], or with `transpose` [E, N, K]; Operands [E, N, K]. And
    the bias [E, N] of their group."""
    from moax.kernels.hopper.matmul import grouped_matmul
    from moax.kernels.hopper.matmul_fp8 import grouped_matmul_fp8

    if isinstance(x, Operand):
        tile = _tile("matmul_fp8", x.data.shape[1], w.data.shape[1], blocks)
        return grouped_matmul_fp8(x, w, blocks, tile, bias=bias, out_dtype=dtype)
    columns = w.shape[1] if transpose else w.shape[2]
    tile = _tile("matmul_transposed" if transpose else "matmul", x.shape[1], columns, blocks)
    return grouped_matmul(x, w, blocks, tile, transpose=transpose, bias=bias, out_dtype=dtype)


@typed
def wgrad(x, dy, blocks: Blocks, dtype):
    """[M, K], [M, N] -> [E, K, N]; rows of padding in used blocks are 0. Operands are [K, M], [N, M]."""
    from moax.kernels.hopper.wgrad import grouped_wgrad
    from moax.kernels.hopper.wgrad_fp8 import grouped_wgrad_fp8

    if isinstance(x, Operand):
        tile = _tile("wgrad_fp8", x.data.shape[0], dy.data.shape[0], blocks)
        return grouped_wgrad_fp8(x, dy, blocks, tile, out_dtype=dtype)
    return grouped_wgrad(x, dy, blocks, _tile("wgrad", x.shape[1], dy.shape[1], blocks), out_dtype=dtype)


def _tile(op, contracted, columns, blocks: Blocks):
    from moax.kernels.hopper.tiles import pick_tile

    rows = blocks.group.shape[0] * BLOCK // blocks.first.shape[0]
    return pick_tile(op, contracted, columns, rows, device_kind())


@typed
def quantize_rows(x, blocks: Blocks, dtype, *, pow2: bool, scale=None, source=None) -> tuple[Operand, Operand]:
    """Rows [M, C], or x[source], as forward or dgrad takes them [M, C], and as wgrad does [C, M]."""
    from moax.kernels.hopper import quantize

    made = quantize.quantize_rows(x, blocks, source=source, dtype=dtype, pow2=pow2, scale=scale)
    return made  # pyrefly: ignore[bad-return]


@typed
def quantize_wire(x, dtype, *, pow2: bool) -> Operand:
    """Rows [T, C] as forward takes them, but for the scales, which lie row by row: [T, ceil(C / 128)]."""
    from moax.kernels.hopper import quantize

    made = quantize.quantize_rows(x, None, dtype=dtype, columns=False, pow2=pow2, by_row=True)[0]
    return made  # pyrefly: ignore[bad-return]


@typed
def dequantize_rows(data, words, ends, dtype):
    """Rows [R, C] of FP8 times the scales of 1 x 128 blocks that `words` begin with; those from ends[-1] on are
    garbage."""
    from moax.kernels.hopper import quantize

    return quantize.dequantize_rows(data, words, ends, dtype=dtype)


@typed
def quantize_weight(w, dtype, *, transposed: bool, pow2: bool, scale=None) -> Operand:
    """A weight [E, R, C] in 128 x 128 blocks, as it lies or transposed."""
    from moax.kernels.hopper import quantize

    made = quantize.quantize_weight(
        w, dtype=dtype, native=not transposed, transposed=transposed, pow2=pow2, scale=scale
    )
    return made[transposed]  # pyrefly: ignore[bad-return]


@typed
def activate_quantize(h, blocks: Blocks, act, dtype, *, gated: bool, weights, pow2: bool) -> Operand:
    """act(h) times each row's weight, as forward takes it; h [N, G F]."""
    from moax.kernels.hopper import activation

    return activation.activate_quantize(h, blocks, act, gated=gated, weights=weights, dtype=dtype, pow2=pow2)


@typed
def activate_grad_quantize(h, d_a, blocks: Blocks, act, dtype_x, dtype_dy, *, weights, pow2: bool):
    """(a as wgrad takes it, d_h as dgrad does, d_h as wgrad does, <d_a, a> of each row)."""
    from moax.kernels.hopper import activation

    a, rows, columns, inner = activation.activate_grad_quantize(
        h, d_a, blocks, act, weights=weights, dtype_x=dtype_x, dtype_dy=dtype_dy, pow2=pow2
    )
    return a, rows, columns, inner.sum(0)


@typed
def activate_rows(h, blocks: Blocks, act, *, gated: bool, weights):
    """act(h) times each row's weight, [N, F]; h [N, G F]."""
    from moax.kernels.hopper import activation_plain

    return activation_plain.activate_rows(h, blocks, act, gated=gated, weights=weights)


@typed
def activate_grad_rows(h, d_a, blocks: Blocks, act, *, weights):
    """(act(h) times each row's weight [N, F], d_h [N, G F], <d_a, act(h)> of each row)."""
    from moax.kernels.hopper import activation_plain

    a, d_h, inner = activation_plain.activate_grad_rows(h, d_a, blocks, act, weights=weights)
    return a, d_h, inner.sum(0)


@typed
def gather_rows(x, source, used=None):
    """x[source], 0 where source is past the end; rows of blocks past the `used` ones may hold anything."""
    from moax.kernels.hopper.permute import gather_rows

    rows = source.shape[0]
    source = jnp.pad(source, (0, -rows % BLOCK), constant_values=x.shape[0])
    return gather_rows(x, source, used)[:rows]


@typed
def gather_sum(rows, position, weights=None):
    """sum over k of weights[r, k] rows[position[r, k]]."""
    from moax.kernels.hopper.permute import gather_sum

    return gather_sum(rows, position, weights)


@typed
def put_rows(arrays, source, places, way: int, out_rows: int, axes, sms: int | None = None):
    """out[i + shift[p]] of rank p = x[source[i]], for end[p - 1] <= i < end[p], each array x, and (shift, end) that
    places[way] holds; what is not written is garbage."""
    from moax.kernels.hopper.exchange import SMS, put_rows

    return put_rows(arrays, source, places, way, out_rows, axes, sms=sms or SMS)


class Packing:
    """Rows as a product takes them, and back: the kernels want groups at multiples of 128, and zeros in padding."""

    def __init__(self, group_sizes: Any, align: int, num_rows: int, kernels: bool):
        self.kernels, self.num_rows = kernels, num_rows
        self.own = find_groups(group_sizes, align, num_rows)
        self.groups, self.there = self.own, None
        if not self.kernels:
            return
        rows = align_up(num_rows, BLOCK)
        if group_sizes is not None and align % BLOCK:
            rows = align_up(num_rows + group_sizes.shape[0] * (BLOCK - 1), BLOCK)
        self.groups = find_groups(group_sizes, BLOCK, rows, blocks=True)
        if group_sizes is not None and align % BLOCK:
            here, there = group_starts(group_sizes, align), group_starts(group_sizes, BLOCK)
            group, real = row_groups(group_sizes, BLOCK, rows)
            self.there = jnp.where(real, here[group] + jnp.arange(rows, dtype=jnp.int32) - there[group], num_rows)
            group, real = row_groups(group_sizes, align, num_rows)
            self.back = jnp.where(real, there[group] + jnp.arange(num_rows, dtype=jnp.int32) - here[group], rows)

    def pack(self, x):
        """The rows of x, 0 in padding where kernels compute."""
        if not self.kernels:
            return x
        if self.there is not None:
            return gather_rows(x.reshape(x.shape[0], -1), self.there).reshape(-1, *x.shape[1:])
        x = jnp.pad(x, [(0, -x.shape[0] % BLOCK), *[(0, 0)] * (x.ndim - 1)])
        return x if self.groups.real is None else zero_rows(x, self.groups.real)

    def unpack(self, y):
        """Rows of a product where those of x were, 0 in padding."""
        if self.there is not None:
            return gather_rows(y, self.back)
        y = y[: self.num_rows]
        return y if self.own.real is None or not self.kernels else zero_rows(y, self.own.real)
