"""Operations on rows by kernels: gathers, weighted sums, and packing to blocks of 128 rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moax.groups import Groups, align_up, group_starts, row_groups, zero_rows
from moax.groups import find_groups as find_unblocked
from moax.kernels.hopper.formats import BLOCK, HALF, BlockedGroups, find_groups
from moax.kernels.hopper.pallas import permute, plan, topk
from moax.kernels.xla import functions as xla


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def top_k(x: Float[Array, "T E"], k: int):
    """Returns the k largest of each row of x and their indices i32; XLA finds those that the kernel cannot."""
    return topk.top_k_rows(x, k) if topk.supports(x.shape, k) else xla.top_k(x, k)


@top_k.defjvp
def _top_k_jvp(k: int, primals, tangents):
    values, indices = top_k(*primals, k)
    tangent = jnp.take_along_axis(tangents[0], indices, axis=1)
    return (values, indices), (tangent, np.zeros(indices.shape, jax.dtypes.float0))


def build_permutation(
    experts: Int[Array, "R K"], num_groups: int, align: int, num_rows: int, weights: Any = None,
    keep: Callable | None = None,
):  # fmt: skip
    """Returns gather_idx, scatter_idx, group sizes and row weights; XLA finds them where the kernels cannot."""
    if not plan.supports(experts.shape, num_groups):
        return xla.build_permutation(experts, num_groups, align, num_rows, weights, keep)
    counted = plan.count_groups(experts, num_groups)
    part = None if keep is None else keep(counted.counts.sum(0)[:num_groups])
    return plan.build_permutation(experts, counted, num_groups, align, num_rows, weights, part)


def gather_rows(x: Float[Array, "R H"], gather_idx: Int[Array, " N"], groups: Groups | None = None):
    """rows[n] = x[gather_idx[n]]; see `moax.kernels.Implementation`."""
    rows = gather_idx.shape[0]
    gather_idx = jnp.pad(gather_idx, (0, -rows % HALF), constant_values=x.shape[0])
    blocks = groups.blocks if isinstance(groups, BlockedGroups) else None
    return permute.gather_rows(x, gather_idx, blocks)[:rows]


class Packing:
    """A packing that moves rows to groups at multiples of 128: in groups (3, 2) at align 4, row 4 moves to row 128."""

    def __init__(self, group_sizes: Any, align: int, num_rows: int):
        self.own, self.num_rows = find_unblocked(group_sizes, align, num_rows), num_rows
        self.moves = group_sizes is not None and align != BLOCK
        rows = align_up(num_rows + (group_sizes.shape[0] * (BLOCK - 1) if self.moves else 0), BLOCK)
        self.groups = find_groups(group_sizes, BLOCK, rows)
        if self.moves:
            unpacked, packed = group_starts(group_sizes, align), group_starts(group_sizes, BLOCK)
            group, real = row_groups(group_sizes, BLOCK, rows)
            row = unpacked[group] + jnp.arange(rows, dtype=jnp.int32) - packed[group]
            self.gather_idx = jnp.where(real, row, num_rows)
            group, real = row_groups(group_sizes, align, num_rows)
            row = packed[group] + jnp.arange(num_rows, dtype=jnp.int32) - unpacked[group]
            self.scatter_idx = jnp.where(real, row, rows)

    def pack(self, x: Array) -> Array:
        if self.moves:
            return gather_rows(x.reshape(x.shape[0], -1), self.gather_idx).reshape(-1, *x.shape[1:])
        x = jnp.pad(x, [(0, -x.shape[0] % BLOCK), *[(0, 0)] * (x.ndim - 1)])
        return x if self.groups.real is None else zero_rows(x, self.groups.real)

    def unpack(self, y: Array) -> Array:
        if self.moves:
            return gather_rows(y, self.scatter_idx)
        y = y[: self.num_rows]
        return y if self.own.real is None else zero_rows(y, self.own.real)
