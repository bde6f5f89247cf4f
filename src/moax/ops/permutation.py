"""Permute: copies of received rows [R, H], sorted by expert, and weighted sums of the sorted rows [N, H].

    permute:    rows[n] = x[source[n]]                        for the rows n of each group
    unpermute:  y[r]    = sum_k weights[r, k] rows[position[r, k]]

With x = (a, b, c), experts = ((1, 0), (1, none), (0, none)) and align 1, rows = (a, c, a, b), group_sizes = (2, 2),
source = (0, 2, 0, 1) and position = ((2, 0), (3, N), (1, N)). Row 0 of x goes to expert 1 as sorted row 2 and to expert
0 as sorted row 0. Within a group the rows keep their order of arrival. Each group starts at a multiple of `align`. Each
shard sorts its own rows, so the ops do not communicate.

Each op is the transpose of the other. dx is the unpermute of d_rows with weights 1. d_rows is the permute of dy, times
the weight of each row, and d_weights[r, k] = <dy[r], rows[position[r, k]]>. `permute` writes 0 into padding, and
`unpermute` reads no padding. `permute` takes a routing map in place of expert ids, and carries weights; see
`moax.ops.maps`.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Integer

from moax.checks import check_count, check_float, check_int, check_kind, check_mask
from moax.groups import Groups, align_up, least
from moax.kernels import DEFAULT, implementation, select_kernels
from moax.mesh.axes import Axes, Roles
from moax.mesh.partition import Engine, MeshView, Partitioned, differentiable, find_mesh_view
from moax.ops.arrivals import cut_groups, limit_groups
from moax.ops.maps import (
    list_experts,
    one_result,
    permute_weights,
    pick_weights,
    two_results,
    weights_from_rows,
    weights_of_rows,
)
from moax.types import Plan


@dataclasses.dataclass(frozen=True)
class PermuteSpec:
    """The static arguments of a permutation.

    Attributes:
      num_groups: the experts of a rank; each one is a group of rows.
      align: each group starts at a multiple of so many rows.
      capacity: the most rows that a rank keeps; None keeps all.
      kernels: the name of the implementation.
      roles: the mesh axes by role.
      room: the most rows of one pass; None sorts all rows in one pass.
    """

    num_groups: int
    align: int
    capacity: int | None
    kernels: str
    roles: Roles = Roles()
    room: int | None = None


def kept_rows(received: int, top_k: int, num_groups: int, capacity: int | None) -> int:
    """Returns the most rows that a rank keeps, without padding; for the arguments see `sorted_rows`."""
    rows = received * min(top_k, num_groups)
    return rows if capacity is None else least(rows, capacity)


def sorted_rows(received: int, top_k: int, num_groups: int, align: int, capacity: int | None) -> int:
    """Returns N, as many sorted rows as any distribution of the assignments over the groups needs.

    With 3 received rows of 2 assignments, 2 groups, align 4 and no capacity, there are at most 6 rows. Each of the 2
    groups adds at most 3 rows of padding, so N = 12.

    Args:
      received: R, the received rows of a rank.
      top_k: K, the assignments of a row.
      num_groups: the experts of a rank.
      align: each group starts at a multiple of so many rows.
      capacity: the most rows that a rank keeps; None keeps all.
    """
    rows = kept_rows(received, top_k, num_groups, capacity)
    return align_up(rows + least(num_groups, rows) * (align - 1), align)


def capacity_rows(tokens: int, top_k: int, capacity_factor: float | None) -> int | None:
    """Returns the most sorted rows that a rank keeps: `capacity_factor` times the balanced load T K.

    None keeps all rows.
    """
    return None if capacity_factor is None else math.ceil(capacity_factor * tokens * top_k)


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
    experts: Integer[Array, "R K"] | Bool[Array, "R E"],
    num_groups: int,
    *,
    weights: Float[Array, "R _"] | None = None,
    top_k: int | None = None,
    align: int = 1,
    capacity: int | None = None,
    axes: Axes = Axes(),
    engine: Engine = "auto",
    kernels: str = "auto",
) -> tuple[Float[Array, "N H"], Plan] | tuple[Float[Array, "N H"], Float[Array, " N"], Plan]:
    """rows[n] = x[source[n]]: the rows of x, sorted by expert. A row appears once for each of its assignments.

    Args:
      x: [R, H], floating point, R over (dp, fsdp, ep, cp).
      experts: [R, K], integers in [0, num_groups], R over (dp, fsdp, ep, cp). The value `num_groups` means no expert.
        Or a routing map [R, num_groups] of bool: whether each expert has a row of x.
      num_groups: the number of experts by which each shard sorts.
      weights: a weight of each assignment, floating point, in the shape of `experts`, or None.
      top_k: K of a map, the most experts of a row; None is `num_groups`. Buffers have room for K copies of each row.
        Experts beyond K, the last ones of a row, are dropped and counted.
      align: each group starts at a multiple of so many rows.
      capacity: the most rows that a shard keeps; None keeps all. The busiest experts lose the rows beyond it, the last
        arrivals first.
      axes, engine, kernels: see `moax.Options`.

    Returns:
      rows: [N, H] in x.dtype, 0 in padding. They are differentiable in x. N is static: see `sorted_rows`.
      row_weights: [N], only where `weights` are given: the weight of each row, 0 in padding; differentiable in weights.
      plan: the Plan, for `unpermute`. Rows and plan are split by shard, as x is.

    Raises:
      ValueError: the shapes do not fit, or num_groups, align or capacity is no int of at least 1.
      Unsupported: the engine or the kernels that were chosen by name cannot run.
    """
    check_float("x", x, "[R, H]")
    mapped = getattr(experts, "dtype", None) == jnp.bool_
    if not mapped:
        check_int("experts", experts, "[R, K]")
    if x.ndim != 2 or experts.ndim != 2 or experts.shape[0] != x.shape[0]:
        raise ValueError(f"x and experts have shapes {x.shape}, {experts.shape}; they must be [R, H] and [R, K]")
    for name, value in (("num_groups", num_groups), ("align", align), ("capacity", capacity), ("top_k", top_k)):
        if name not in ("capacity", "top_k") or value is not None:
            check_count(name, value)
    if top_k is not None and not mapped:
        raise ValueError(f"top_k={top_k} must be None beside ids; experts is no map of bool, but {experts.dtype}")
    if mapped:
        check_mask("experts", experts, (x.shape[0], num_groups))
    if weights is not None:
        check_float("weights", weights, str(experts.shape))
        if weights.shape != experts.shape:
            raise ValueError(f"weights has shape {weights.shape}; it must be that of experts, {experts.shape}")
    view = find_mesh_view(axes, engine, x)
    chosen = _select(kernels, x)
    static, over = PermuteSpec(num_groups, align, capacity, chosen, view.roles), None
    if mapped:
        experts, over = list_experts(view, experts, min(top_k or num_groups, num_groups))
        weights = None if weights is None else pick_weights(view, weights, experts)
    rows, plan = _permute(view, static, *_permute_op.lay_operands(view, static, x, experts.astype(jnp.int32)))
    if over is not None:
        plan = dataclasses.replace(plan, dropped=plan.dropped + over)
    return (rows, plan) if weights is None else (rows, permute_weights(view, weights, plan), plan)


def unpermute(
    rows: Float[Array, "N H"],
    plan: Plan,
    weights: Float[Array, "R K"] | None = None,
    *,
    axes: Axes = Axes(),
    engine: Engine = "auto",
    kernels: str = "auto",
) -> Float[Array, "R H"]:
    """y[r] = sum_k weights[r, k] rows[position[r, k]], summed in float32.

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
    check_float("rows", rows, "[N, H]")
    check_kind("plan", plan, Plan, "moax.ops.permute")
    weights = jnp.ones_like(plan.position, jnp.float32) if weights is None else weights
    check_float("weights", weights, "[R, K]")
    if weights.shape != plan.position.shape or rows.ndim != 2 or rows.shape[:1] != plan.source.shape:
        raise ValueError(
            f"rows and weights have shapes {rows.shape}, {weights.shape}; this plan needs "
            f"({plan.source.shape[0]}, H) and {plan.position.shape}"
        )
    view = find_mesh_view(axes, engine, rows)
    static = PermuteSpec(plan.group_sizes.shape[0], 1, None, _select(kernels, rows), view.roles)
    return _unpermute(view, static, *_unpermute_op.lay_operands(view, static, rows, plan, weights))


def _select(kernels: str, rows) -> str:
    """Returns the name of the implementation that moves rows [M, H]. It is `xla` where there are no rows to move."""
    chosen = select_kernels(kernels, rows.dtype, **{"the rows' dim 1": rows.shape[1]})
    return chosen if rows.shape[0] else DEFAULT


def _permute_forward(view: MeshView, static: PermuteSpec, x, experts):
    """Runs the forward of the `custom_vjp` and returns rows and plan, and the plan."""
    rows, plan = _permute_op(view, static, x, experts)
    return (rows, plan), plan


def _permute_backward(view: MeshView, static: PermuteSpec, plan, cotangents):
    """Runs the backward of the `custom_vjp` and returns dx."""
    return _permute_grad_op(view, static, plan, cotangents[0])[0], None


_permute = differentiable(_permute_forward, _permute_backward, once="permute")


def _unpermute_forward(view: MeshView, static: PermuteSpec, rows, plan, weights):
    """Runs the forward of the `custom_vjp` and returns y, and the operands."""
    return _unpermute_op(view, static, rows, plan, weights)[0], (rows, plan, weights)


def _unpermute_backward(view: MeshView, static: PermuteSpec, saved, dy):
    """Runs the backward of the `custom_vjp` and returns the gradients of rows and weights."""
    d_rows, d_weights = _unpermute_grad_op(view, static, *saved, dy)
    return d_rows, None, d_weights


_unpermute = differentiable(_unpermute_forward, _unpermute_backward, once="unpermute")


def plan_rows(
    static: PermuteSpec,
    experts: Int[Array, "R K"],
    weights: Float[Array, "R K"] | None = None,
    start: int | Int[Array, ""] = 0,
) -> tuple[Plan, Any]:
    """Returns the Plan of one pass of one device, from the experts [R, K] of its received rows.

    With weights [R, K] f32 it also returns the weight [N] of each sorted row, 0 in padding; None without them.

    The pass has the sorted rows from `start` on, counted without padding, as many as there is room for. With a room of
    4, groups of 3 and 5 rows become the groups (3, 1) of the pass from row 0 on, and (0, 4) of the pass from row 4 on.
    """
    received, top_k = experts.shape
    groups, room, capacity = static.num_groups, static.room, static.capacity
    rows = sorted_rows(received, top_k, groups, static.align, capacity if room is None else room)

    def keep(arrived):
        kept = arrived if capacity is None else limit_groups(arrived, capacity)
        return (jnp.zeros_like(kept), kept) if room is None else cut_groups(kept, start, room)

    every = room is None and capacity is None
    place = implementation(static.kernels).place_rows
    source, position, sizes, by_row = place(experts, groups, static.align, rows, weights, None if every else keep)
    dropped = jnp.zeros((), jnp.int32)
    if capacity is not None:
        dropped = jnp.maximum(jnp.sum(experts < groups, dtype=jnp.int32) - capacity, 0)
    return Plan(source, position, sizes, dropped[None]), by_row


def count_rows(static: PermuteSpec, experts: Int[Array, "R K"]) -> Int[Array, ""]:
    """Returns how many sorted rows a rank keeps of its received rows in all passes, without padding."""
    rows = jnp.sum(experts < static.num_groups, dtype=jnp.int32)
    return rows if static.capacity is None else jnp.minimum(rows, static.capacity)


def permute_forward(
    static: PermuteSpec, x: Float[Array, "R H"], plan: Plan, groups: Groups | None = None
) -> Float[Array, "N H"]:
    """Returns rows [N, H] of one device: row n is x[source[n]].

    With `groups`, rows past the last group may hold anything.
    """
    with jax.named_scope("permute"):
        return implementation(static.kernels).gather_rows(x, plan.source, groups)


def permute_backward(static: PermuteSpec, plan: Plan, d_rows: Float[Array, "N H"]) -> Float[Array, "R H"]:
    """Returns dx [R, H] of one device: each row sums the gradients of its copies."""
    with jax.named_scope("unpermute"):
        return implementation(static.kernels).gather_sum(d_rows, plan.position)


def unpermute_forward(
    static: PermuteSpec, rows: Float[Array, "N H"], plan: Plan, weights: Float[Array, "R K"] | None
) -> Float[Array, "R H"]:
    """Returns y [R, H] of one device: weighted sums of sorted rows. Weights None are 1."""
    with jax.named_scope("unpermute"):
        return implementation(static.kernels).gather_sum(rows, plan.position, weights)


def unpermute_backward(
    static: PermuteSpec,
    rows: Float[Array, "N H"],
    plan: Plan,
    weights: Float[Array, "R K"],
    dy: Float[Array, "R H"],
) -> tuple[Float[Array, "N H"], Float[Array, "R K"]]:
    """Returns d_rows [N, H] and d_weights [R, K] of one device.

    d_rows[n] is the dy of row n's received row times the row's weight, and a weight's gradient is <dy, row>.
    """
    d_rows = permute_forward(static, dy, plan)
    inner = jnp.sum(d_rows.astype(jnp.float32) * rows.astype(jnp.float32), axis=-1)
    d_rows = d_rows.astype(jnp.float32) * weights_of_rows(plan, weights)[:, None]
    return d_rows.astype(rows.dtype), weights_from_rows(plan, inner)


def _permute_local(static: PermuteSpec, layout, x, experts):
    """Runs `permute` on one device and returns the rows and the plan."""
    plan, _ = plan_rows(static, experts)
    return permute_forward(static, x, plan), plan


def _permute_grad_local(static: PermuteSpec, layout, plan, d_rows):
    """Runs the backward of `permute` on one device."""
    return (permute_backward(static, plan, d_rows),)


def _unpermute_local(static: PermuteSpec, layout, rows, plan, weights):
    """Runs `unpermute` on one device."""
    return (unpermute_forward(static, rows, plan, weights),)


def _unpermute_grad_local(static: PermuteSpec, layout, rows, plan, weights, dy):
    """Runs the backward of `unpermute` on one device."""
    return unpermute_backward(static, rows, plan, weights, dy)


_permute_op = Partitioned(
    _permute_local, two_results, lambda static, operands: (("r h", "r k"), ("n h",)), name="permute"
)
_permute_grad_op = Partitioned(
    _permute_grad_local,
    one_result,
    lambda static, operands: (("n", "r k", "e", "o", "n h"), ("r h",)),
    name="permute_grad",
)
_unpermute_op = Partitioned(
    _unpermute_local,
    one_result,
    lambda static, operands: (("n h", "n", "r k", "e", "o", "r k"), ("r h",)),
    name="unpermute",
)
_unpermute_grad_op = Partitioned(
    _unpermute_grad_local,
    two_results,
    lambda static, operands: (("n h", "n", "r k", "e", "o", "r k", "r h"), ("n h", "r k")),
    name="unpermute_grad",
)
