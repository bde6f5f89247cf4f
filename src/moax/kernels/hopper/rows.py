"""Operations on rows by kernels: gathers, weighted sums, and packing to blocks of 128 rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moax.groups import Groups, align_up, group_starts, row_groups, zero_rows
from moax.groups import find_groups as find_unblocked
from moax.kernels.hopper.formats import (
    BLOCK,
    HALF,
    BlockedGroups,
    find_groups,
)
from moax.kernels.xla import place_rows as xla_place_rows
from moax.kernels.xla import top_k as xla_top_k
from moax.mesh.collectives import typed


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
@typed
def top_k(x: Float[Array, "T E"], k: int):
    """Returns the k largest of each row of x and their indices i32; XLA finds them where the kernel does not take x."""
    from moax.kernels.hopper.pallas.topk import takes, top_k_rows

    return top_k_rows(x, k) if takes(x.shape, k) else xla_top_k(x, k)


@top_k.defjvp
def _top_k_jvp(k: int, primals, tangents):
    """Returns the results of `top_k` and their tangents, as JAX has them for `lax.top_k`."""
    values, indices = top_k(*primals, k)
    tangent = jnp.take_along_axis(tangents[0], indices, axis=1)
    return (values, indices), (tangent, np.zeros(indices.shape, jax.dtypes.float0))


@typed
def place_rows(
    experts: Int[Array, "R K"], num_groups: int, align: int, num_rows: int, weights: Any = None,
    keep: Callable | None = None,
):  # fmt: skip
    """Returns source, position, group sizes and by_row; XLA finds them where the kernels do not take the experts."""
    from moax.kernels.hopper.pallas.plan import count_groups, place_rows, takes

    if not takes(experts.shape, num_groups):
        return xla_place_rows(experts, num_groups, align, num_rows, weights, keep)
    counted = count_groups(experts, num_groups)
    part = None if keep is None else keep(counted.counts.sum(0)[:num_groups])
    return place_rows(experts, counted, num_groups, align, num_rows, weights, part)


@typed
def gather_rows(x: Float[Array, "R H"], source: Int[Array, " N"], groups: Groups | None = None):
    """rows[n] = x[source[n]], 0 where source[n] >= R. Rows past the last group of `groups` may hold anything."""
    from moax.kernels.hopper.pallas.permute import gather_rows

    rows = source.shape[0]
    source = jnp.pad(source, (0, -rows % HALF), constant_values=x.shape[0])
    return gather_rows(x, source, groups.blocks if isinstance(groups, BlockedGroups) else None)[:rows]


@typed
def gather_sum(rows: Float[Array, "N H"], position: Int[Array, "R K"], weights: Any = None):
    """y[r] = sum_k weights[r, k] rows[position[r, k]] in float32, over the positions below N; weights None are 1."""
    from moax.kernels.hopper.pallas.permute import gather_sum

    return gather_sum(rows, position, weights)


@typed
def put_rows(arrays: Sequence, source: Any, places: Any, way: int, out_rows: int, axes: Any, sms: int | None) -> tuple:
    """Writes rows into the memory of the ranks that own their experts; see `moax.kernels.Implementation`."""
    from moax.kernels.hopper.pallas.exchange import SMS, put_rows

    return put_rows(arrays, source, places, way, out_rows, axes, sms=sms or SMS)


class Packing:
    """A packing that moves rows to groups at multiples of 128, and back.

    With group sizes (3, 2) and align 4, `pack` moves row 4, the first row of group 1, to row 128.
    """

    def __init__(self, group_sizes: Any, align: int, num_rows: int):
        self.own, self.num_rows = find_unblocked(group_sizes, align, num_rows), num_rows
        self.moves = group_sizes is not None and align != BLOCK
        rows = align_up(num_rows + (group_sizes.shape[0] * (BLOCK - 1) if self.moves else 0), BLOCK)
        self.groups = find_groups(group_sizes, BLOCK, rows)
        if self.moves:
            unpacked, packed = group_starts(group_sizes, align), group_starts(group_sizes, BLOCK)
            group, real = row_groups(group_sizes, BLOCK, rows)
            row = unpacked[group] + jnp.arange(rows, dtype=jnp.int32) - packed[group]
            self.source = jnp.where(real, row, num_rows)
            group, real = row_groups(group_sizes, align, num_rows)
            row = packed[group] + jnp.arange(num_rows, dtype=jnp.int32) - unpacked[group]
            self.position = jnp.where(real, row, rows)

    def pack(self, x: Array) -> Array:
        """Returns the rows of x in groups at multiples of 128, with 0 in padding."""
        if self.moves:
            return gather_rows(x.reshape(x.shape[0], -1), self.source).reshape(-1, *x.shape[1:])
        x = jnp.pad(x, [(0, -x.shape[0] % BLOCK), *[(0, 0)] * (x.ndim - 1)])
        return x if self.groups.real is None else zero_rows(x, self.groups.real)

    def unpack(self, y: Array) -> Array:
        """Returns the rows of a product in the layout of x, with 0 in padding."""
        if self.moves:
            return gather_rows(y, self.position)
        y = y[: self.num_rows]
        return y if self.own.real is None else zero_rows(y, self.own.real)
