"""Permute: copies of received rows [R, H], sorted by expert, and weighted sums of the sorted rows [N, H].

    permute:    rows[n] = x[gather_idx[n]]                        for the rows n of each group
    unpermute:  y[r]    = sum_k weights[r, k] rows[scatter_idx[r, k]]

With x = (a, b, c), experts = ((1, 0), (1, none), (0, none)) and align 1, rows = (a, c, a, b), group_sizes = (2, 2),
gather_idx = (0, 2, 0, 1) and scatter_idx = ((2, 0), (3, N), (1, N)): row 0 of x goes to expert 1 as sorted row 2 and to
expert 0 as sorted row 0. Within a group the rows keep their order of arrival. Each group starts at a multiple of
`align`. `permute` writes 0 into padding, and `unpermute` reads no padding. Each shard sorts its own rows, so the ops do
not communicate.

Permute and unpermute are transposes of each other. dx is the unpermute of d_rows with weights 1. d_rows is the permute
of dy, times the weight of each row, and d_weights[r, k] = <dy[r], rows[scatter_idx[r, k]]>.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer

from moax.checks import check_arrays, check_value
from moax.kernels import DEFAULT, implementation, select_kernels
from moax.kernels.groups import Groups, align_up, narrow_ids
from moax.mesh.axes import Axes, ResolvedAxes
from moax.mesh.op import Op, with_gradient
from moax.mesh.specs import Engine, MeshView, find_mesh_view
from moax.types import Plan


@dataclasses.dataclass(frozen=True)
class PermuteSpec:
    """The static arguments of a permutation."""

    num_groups: int  # the experts of a rank; each one is a group of rows
    align: int  # each group starts at a multiple of so many rows
    capacity: int | None  # the most rows that a rank keeps; None keeps all
    kernels: str
    axes: ResolvedAxes = ResolvedAxes()
    max_rows: int | None = None  # the most rows of one round; None sorts all rows in one round


def sorted_rows(received: int, top_k: int, num_groups: int, align: int, capacity: int | None) -> int:
    """Returns N, as many sorted rows as any distribution of R = `received` rows with K assignments each needs.

    With 3 received rows of 2 assignments, 2 groups, align 4 and no capacity, at most 6 rows are sorted. Each of the 2
    groups adds at most 3 rows of padding, so N = 12. Align 1 gives the rows without padding.
    """
    rows = received * min(top_k, num_groups)
    if capacity is not None:
        rows = jax.core.min_dim(rows, capacity)  # `jax.export` has symbolic rows
    return align_up(rows + jax.core.min_dim(num_groups, rows) * (align - 1), align)


@typing.overload
def permute(  # pyrefly: ignore[inconsistent-overload]
    x: Array, experts: Array, num_groups: int, *, weights: None = None, **keywords: Any
) -> tuple[Array, Plan]: ...


@typing.overload
def permute(  # pyrefly: ignore[inconsistent-overload]
    x: Array, experts: Array, num_groups: int, *, weights: Array, **keywords: Any
) -> tuple[Array, Array, Plan]: ...


def permute(
    x: Float[Array, "R H"],
    experts: Integer[Array, "R K"],
    num_groups: int,
    *,
    weights: Float[Array, "R K"] | None = None,
    align: int = 1,
    capacity: int | None = None,
    axes: Axes = Axes(),
    engine: Engine = "auto",
    kernels: str = "auto",
) -> tuple[Float[Array, "N H"], Plan] | tuple[Float[Array, "N H"], Float[Array, " N"], Plan]:
    """rows[n] = x[gather_idx[n]]: the rows of x, sorted by expert. A row appears once for each of its assignments.

    Args:
      x: [R, H], floating point, R over (dp, fsdp, ep, cp).
      experts: [R, K], integers, split as x; one outside of [0, num_groups) means no expert.
      num_groups: the number of experts by which each shard sorts.
      weights: [R, K], floating point, the weight of each assignment; None for none.
      align: each group starts at a multiple of so many rows.
      capacity: the most rows that a shard keeps; None keeps all. The busiest experts lose the rows beyond it, the last
        arrivals first.
      axes, engine, kernels: see `moax.Options`.

    Returns:
      rows: [N, H] in x.dtype, 0 in padding, differentiable in x. N is static: see `sorted_rows`.
      row_weights: [N], only with `weights`: the weight of each row, 0 in padding, differentiable in weights.
      plan: the Plan, for `unpermute`. Rows and plan are split by shard, as x is.

    Raises:
      ValueError: the shapes do not fit, or num_groups, align or capacity is no int of at least 1.
      Unsupported: the engine or the kernels that were chosen by name cannot run.
    """
    check_value("num_groups", num_groups, int)
    check_value("align", align, int)
    if capacity is not None:
        check_value("capacity", capacity, int)
    check_arrays("x [R, H], experts int [R, K], weights? [R, K]", x, experts, weights)
    experts = narrow_ids(experts, num_groups)
    experts = jnp.where(experts < 0, num_groups, experts)
    view = find_mesh_view(axes, engine, x)
    static = _make_spec(view, kernels, x, num_groups, align, capacity)
    if weights is None:
        rows, (plan, _) = _permute(view, static, x, experts, None)
        return rows, plan
    rows, (plan, row_weights) = _permute(view, static, x, experts, weights.astype(jnp.float32))
    return rows, row_weights.astype(weights.dtype), plan


def unpermute(
    rows: Float[Array, "N H"],
    plan: Plan,
    weights: Float[Array, "R K"] | None = None,
    *,
    axes: Axes = Axes(),
    engine: Engine = "auto",
    kernels: str = "auto",
) -> Float[Array, "R H"]:
    """y[r] = sum_k weights[r, k] rows[scatter_idx[r, k]], summed in float32.

    Args:
      rows: [N, H], floating point, sorted by `plan` and split by shard.
      plan: the Plan that `permute` returned. An assignment without a row (dropped, or of no expert) adds nothing.
      weights: [R, K] f32, split by shard; None is 1 for each assignment.
      axes, engine, kernels: see `moax.Options`.

    Returns:
      y: [R, H] in the dtype of rows, split by shard. It is differentiable in rows and weights.

    Raises:
      ValueError: the shapes of rows or weights do not fit the plan.
      Unsupported: the engine or the kernels that were chosen by name cannot run.
    """
    check_value("plan", plan, Plan, "moax.ops.permute")
    received, top_k = plan.scatter_idx.shape
    num_sorted = plan.gather_idx.shape[0]
    check_arrays("rows [N, H], weights? [R, K]", rows, weights, N=num_sorted, R=received, K=top_k)
    if weights is None:
        weights = jnp.ones_like(plan.scatter_idx, jnp.float32)
    view = find_mesh_view(axes, engine, rows)
    static = _make_spec(view, kernels, rows, plan.group_sizes.shape[0])
    return _unpermute(view, static, rows, plan, weights)[0]


def _make_spec(
    view: MeshView,
    kernels: str,
    rows,
    num_groups: int,
    align=1,
    capacity=None,
) -> PermuteSpec:
    """Returns the spec of an op that moves rows [M, H]; no kernel moves no rows."""
    chosen_kernels = select_kernels(kernels, rows.dtype, **{"the rows' width": rows.shape[1]})
    if rows.size == 0:
        chosen_kernels = DEFAULT
    return PermuteSpec(num_groups, align, capacity, chosen_kernels, view.axes)


def plan_rows(
    static: PermuteSpec,
    experts: Int[Array, "R K"],
    weights: Float[Array, "R K"] | None = None,
    start: int | Int[Array, ""] = 0,
) -> tuple[Plan, Any]:
    """Returns the Plan of one round on one device, from the experts [R, K] of its received rows.

    With weights [R, K] f32 it also returns the weight [N] of each sorted row, 0 in padding; None without them. The
    round has the sorted rows from `start` on, counted without padding, up to the number that it has room for.
    """
    groups = static.num_groups
    max_rows = static.max_rows
    capacity = static.capacity
    room = capacity if max_rows is None else max_rows
    received, top_k = experts.shape
    num_rows = sorted_rows(received, top_k, groups, static.align, room)

    def keep_part(arrived):
        """Returns the first row and the number of rows of each group in this round, of the rows that arrived."""
        retained = arrived if capacity is None else limit_groups(arrived, capacity)
        if max_rows is None:
            return jnp.zeros_like(retained), retained
        return cut_groups(retained, start, max_rows)

    keep = None if max_rows is None and capacity is None else keep_part
    build = implementation(static.kernels).build_permutation
    gather_idx, scatter_idx, sizes, row_weights = build(experts, groups, static.align, num_rows, weights, keep)
    dropped = jnp.zeros((), jnp.int32)
    if capacity is not None:
        assignments = jnp.sum(experts < groups, dtype=jnp.int32)
        dropped = jnp.maximum(assignments - capacity, 0)
    return Plan(gather_idx, scatter_idx, sizes, dropped[None]), row_weights


def count_rows(static: PermuteSpec, experts: Int[Array, "R K"]) -> Int[Array, ""]:
    """Returns how many sorted rows a rank keeps of its received rows in all rounds, without padding."""
    rows = jnp.sum(experts < static.num_groups, dtype=jnp.int32)
    if static.capacity is None:
        return rows
    return jnp.minimum(rows, static.capacity)


def permute_forward(
    static: PermuteSpec, x: Float[Array, "R H"], plan: Plan, groups: Groups | None = None
) -> Float[Array, "N H"]:
    """Returns rows [N, H] of one device; with `groups`, rows past the last group may hold anything."""
    with jax.named_scope("permute"):
        return implementation(static.kernels).gather_rows(x, plan.gather_idx, groups)


def unpermute_forward(
    static: PermuteSpec,
    rows: Float[Array, "N H"],
    plan: Plan,
    weights: Float[Array, "R K"] | None = None,
) -> Float[Array, "R H"]:
    """Returns y [R, H] of one device: weighted sums of sorted rows. Weights None are 1, for the gradient of permute."""
    with jax.named_scope("unpermute"):
        return implementation(static.kernels).gather_sum(rows, plan.scatter_idx, weights)


def unpermute_backward(
    static: PermuteSpec,
    rows: Float[Array, "N H"],
    plan: Plan,
    weights: Float[Array, "R K"],
    dy: Float[Array, "R H"],
) -> tuple[Float[Array, "N H"], Float[Array, "R K"]]:
    """Returns d_rows [N, H], dy of each row's received row times its weight, and d_weights [R, K], <dy, row>."""
    d_rows = permute_forward(static, dy, plan)
    d_row_weights = jnp.sum(d_rows.astype(jnp.float32) * rows.astype(jnp.float32), axis=-1)
    row = jnp.arange(plan.gather_idx.shape[0], dtype=jnp.int32)
    # [N, K]: the sorted rows of the received row that row n copies, and the weights of its assignments
    no_row = row.shape[0]
    siblings = jnp.take(plan.scatter_idx, plan.gather_idx, axis=0, mode="fill", fill_value=no_row)
    sibling_weights = jnp.take(weights, plan.gather_idx, axis=0, mode="clip")
    is_row = siblings == row[:, None]
    zero = jnp.zeros((), weights.dtype)
    row_weights = jnp.where(is_row, sibling_weights, zero).sum(1)  # [N], 0 in padding
    d_rows = (d_rows.astype(jnp.float32) * row_weights[:, None]).astype(rows.dtype)
    return d_rows, weights_from_rows(plan, d_row_weights)


def weights_from_rows(plan: Plan, row_values: Float[Array, " N"]) -> Float[Array, "R K"]:
    """Returns the value [R, K] of each assignment, from the values [N] of sorted rows; 0 without a row."""
    return jnp.take(row_values, plan.scatter_idx, mode="fill", fill_value=0)


def cut_groups(
    sizes: Int[Array, " E"], start: int | Int[Array, ""], max_rows: int
) -> tuple[Int[Array, " E"], Int[Array, " E"]]:
    """Returns the first row and the number of rows of each group in the round of `max_rows` rows from `start` on.

    Of groups of 3 and 5 rows, the round of 4 rows from row 4 on has rows 1 to 4 of the second: (3, 1), (0, 4).
    """
    rows_before = jnp.cumsum(sizes) - sizes
    stop = start + max_rows
    begin = jnp.clip(start - rows_before, 0, sizes)
    end = jnp.clip(stop - rows_before, 0, sizes)
    return begin, end - begin


def limit_groups(arrived: Int[Array, " E"], capacity: int) -> Int[Array, " E"]:
    """Returns the rows that each group keeps, at most `capacity` in all, of the rows [E] that arrived.

    All groups have one limit, and the first groups above it share the rest, one row each: of (5, 1, 6) rows and a
    capacity of 10, the limit is 4, one row is left, and (5, 1, 4) rows are kept.
    """
    size = arrived.shape[0]
    ascending = jnp.sort(arrived)
    below = jnp.cumsum(ascending) - ascending  # the rows of all smaller groups
    # the groups that share the rest of the capacity
    above = size - jnp.arange(size, dtype=jnp.int32)
    level = (capacity - below) // above
    cut = jnp.argmax(ascending > level)  # the index of the smallest group that does not fit whole
    fits = arrived.sum() <= capacity
    limit = jnp.where(fits, ascending[-1], level[cut])
    rest = jnp.where(fits, 0, (capacity - below[cut]) % above[cut])
    exceeds = arrived > limit
    extra = exceeds & (jnp.cumsum(exceeds.astype(jnp.int32)) <= rest)
    return jnp.minimum(arrived, limit) + extra.astype(jnp.int32)


def _permute_shards(static: PermuteSpec, x, experts, weights):
    plan, row_weights = plan_rows(static, experts, weights)
    return permute_forward(static, x, plan), (plan, row_weights)


def _permute_grad_shards(static: PermuteSpec, plan, d_rows, d_row_weights):
    d_weights = None
    if d_row_weights is not None:
        d_weights = weights_from_rows(plan, d_row_weights)
    return unpermute_forward(static, d_rows, plan), d_weights


def _save_permute(operands, results):
    _, (plan, _) = results
    return plan


def _pull_permute(run_grad, plan, cotangents):
    d_rows, (_, d_row_weights) = cotangents
    dx, d_weights = run_grad(plan, d_rows, d_row_weights)
    return dx, None, d_weights


def _pull_unpermute(run_grad, saved, cotangents):
    d_rows, d_weights = run_grad(*saved, *cotangents)
    return d_rows, None, d_weights


_permute = with_gradient(
    "permute",
    Op("permute", _permute_shards, "r h, r k, r k -> n h, @n"),
    Op("permute_grad", _permute_grad_shards, "{n | r k | @n | @n}, n h, n -> r h, r k"),
    save=_save_permute,
    pull=_pull_permute,
)
_unpermute = with_gradient(
    "unpermute",
    Op("unpermute", unpermute_forward, "n h, {n | r k | @n | @n}, r k -> r h"),
    Op("unpermute_grad", unpermute_backward, "n h, {n | r k | @n | @n}, r k, r h -> n h, r k"),
    save=lambda operands, results: operands,
    pull=_pull_unpermute,
)
