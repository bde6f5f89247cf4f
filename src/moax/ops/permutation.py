"""Permute: received rows [R, H] into rows sorted by expert [N, H], and weighted sums of those back.

    permute:    rows[n] = x[source[n]]                        for the rows n of each group
    unpermute:  y[r]    = sum_k weights[r, k] rows[position[r, k]]

With x = (a, b, c), experts = ((1, 0), (1, none), (0, none)) and align 1: rows = (a, c, a, b), group_sizes = (2, 2),
source = (0, 2, 0, 1), position = ((2, 0), (3, N), (1, N)). The order within a group is the order of arrival. Each
group starts at a multiple of `align`. Each shard sorts its own rows; nothing is communicated.

Each is the transpose of the other: d x = unpermute of d rows with weights 1, d rows = permute of d y times the weight
of each row, d weights[r, k] = <d y[r], rows[position[r, k]]>. Rows of padding are 0 in `permute`, and whatever they
hold is not read by `unpermute`.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moax.groups import Groups, align_up, group_starts
from moax.kernels import implementation, select_kernels
from moax.mesh.axes import Axes, Roles
from moax.mesh.partition import Contract, MeshView, Partitioned, differentiable, find_mesh_view
from moax.mesh.specs import spec
from moax.options import Engine
from moax.types import Plan


@dataclasses.dataclass(frozen=True)
class PermuteSpec:
    """All that is static of a permutation.

    num_groups: experts of a rank. align: rows to which a group's start is aligned. capacity: the most rows to keep,
    None for all. kernels: the name of the implementation.
    """

    num_groups: int
    align: int
    capacity: int | None
    kernels: str
    roles: Roles = Roles()


def sorted_rows(received: int, top_k: int, num_groups: int, align: int, capacity: int | None) -> int:
    """N: rows that hold `received` rows of `top_k` assignments, or `capacity` of them, in any distribution."""
    rows = received * min(top_k, num_groups)
    rows = rows if capacity is None else min(rows, capacity)
    return align_up(rows + min(num_groups, rows) * (align - 1), align)


def capacity_rows(tokens: int, top_k: int, capacity_factor: float | None) -> int | None:
    """The most rows a rank keeps: that multiple of the balanced load, T K."""
    return None if capacity_factor is None else math.ceil(capacity_factor * tokens * top_k)


def permute(
    x: Float[Array, "R H"],
    experts: Int[Array, "R K"],
    num_groups: int,
    *,
    align: int = 1,
    capacity: int | None = None,
    axes: Axes = Axes(),
    engine: Engine = "auto",
    kernels: str = "auto",
) -> tuple[Float[Array, "N H"], Plan]:
    """rows[n] = x[source[n]]: the rows of x sorted by expert, once for each assignment.

    Args:
      x: [R, H]; experts: [R, K] i32 in [0, num_groups], `num_groups` for none. R over (dp, fsdp, ep).
      num_groups: experts that each shard sorts by.
      align: group starts are multiples of it.
      capacity: the most rows a shard keeps. What exceeds it is taken from the busiest experts, last arrivals first.
      axes, engine, kernels: see `moax.moe`.

    Returns:
      rows [N, H], 0 in padding, and the Plan; both by shard. N is static: see `sorted_rows`. Differentiable in x.

    Raises:
      ValueError: shapes; num_groups, align or capacity below 1.
    """
    if x.ndim != 2 or experts.ndim != 2 or experts.shape[0] != x.shape[0]:
        raise ValueError(f"x and experts have shapes {x.shape}, {experts.shape}; they must be [R, H] and [R, K]")
    for name, value in (("num_groups", num_groups), ("align", align), ("capacity", capacity)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    view = find_mesh_view(axes, engine, x)
    chosen = _select(kernels, x)
    static = PermuteSpec(num_groups, align, capacity, chosen, view.roles)
    return _permute(view, static, *_permute_op.lay_operands(view, static, x, experts))


def unpermute(
    rows: Float[Array, "N H"],
    plan: Plan,
    weights: Float[Array, "R K"],
    *,
    axes: Axes = Axes(),
    engine: Engine = "auto",
    kernels: str = "auto",
) -> Float[Array, "R H"]:
    """y[r] = sum_k weights[r, k] rows[position[r, k]], summed in float32, in the dtype of rows.

    Args:
      rows: [N, H], sorted by `plan`; weights: [R, K] f32; both by shard.
      plan: what `permute` returned. Dropped assignments, and those of no expert here, add nothing.
      axes, engine, kernels: see `moax.moe`.

    Differentiable in rows and weights.
    """
    if weights.shape != plan.position.shape or rows.ndim != 2 or rows.shape[:1] != plan.source.shape:
        raise ValueError(
            f"rows and weights have shapes {rows.shape}, {weights.shape}; this plan needs "
            f"({plan.source.shape[0]}, H) and {plan.position.shape}"
        )
    view = find_mesh_view(axes, engine, rows)
    static = PermuteSpec(plan.group_sizes.shape[0], 1, None, _select(kernels, rows), view.roles)
    return _unpermute(view, static, *_unpermute_op.lay_operands(view, static, rows, plan, weights))


def _select(kernels: str, rows) -> str:
    """The implementation that moves rows [M, H]."""
    return select_kernels(kernels, rows.dtype, **{"the rows' dim 1": rows.shape[1]})


def _permute_forward(view: MeshView, static: PermuteSpec, x, experts):
    rows, plan = _permute_op(view, static, x, experts)
    return (rows, plan), plan


def _permute_backward(view: MeshView, static: PermuteSpec, plan, cotangents):
    return _permute_grad_op(view, static, plan, cotangents[0])[0], None


_permute = differentiable(_permute_forward, _permute_backward)


def _unpermute_forward(view: MeshView, static: PermuteSpec, rows, plan, weights):
    return _unpermute_op(view, static, rows, plan, weights)[0], (rows, plan, weights)


def _unpermute_backward(view: MeshView, static: PermuteSpec, saved, dy):
    d_rows, d_weights = _unpermute_grad_op(view, static, *saved, dy)
    return d_rows, None, d_weights


_unpermute = differentiable(_unpermute_forward, _unpermute_backward)


def plan_rows(static: PermuteSpec, experts) -> Plan:
    """The Plan of one device's experts [R, K]."""
    received, top_k = experts.shape
    groups, rows = static.num_groups, sorted_rows(received, top_k, static.num_groups, static.align, static.capacity)
    flat = experts.reshape(-1)
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)
    arrived = jnp.zeros(groups + 1, jnp.int32).at[flat].add(1)[:groups]
    kept = arrived if static.capacity is None else _keep(arrived, static.capacity)
    # Of each assignment, in sorted order: its rank within its expert, and from that its row.
    expert = flat[order]
    first = jnp.append(jnp.cumsum(arrived) - arrived, 0)
    rank = jnp.arange(flat.shape[0], dtype=jnp.int32) - first[expert]
    start, limit = jnp.append(group_starts(kept, static.align), rows), jnp.append(kept, 0)
    row = jnp.where(rank < limit[expert], start[expert] + rank, rows)
    source = jnp.full(rows, received, jnp.int32).at[row].set(order // top_k, mode="drop")
    position = jnp.zeros(flat.shape, jnp.int32).at[order].set(row, unique_indices=True).reshape(experts.shape)
    return Plan(source, position, kept, (arrived - kept).sum(dtype=jnp.int32)[None])


def _keep(arrived, capacity: int):
    """At most `capacity` rows in all: a common limit on every group, the last rows to the first groups above it."""
    size = arrived.shape[0]
    ascending = jnp.sort(arrived)
    below = jnp.cumsum(ascending) - ascending  # rows of the smaller groups
    above = size - jnp.arange(size, dtype=jnp.int32)  # groups that share the rest
    level = (capacity - below) // above
    cut = jnp.argmax(ascending > level)  # the smallest group that does not fit whole
    fits = arrived.sum() <= capacity
    limit = jnp.where(fits, ascending[-1], level[cut])
    rest = jnp.where(fits, 0, (capacity - below[cut]) % above[cut])
    over = arrived > limit
    extra = over & (jnp.cumsum(over.astype(jnp.int32)) <= rest)
    return jnp.minimum(arrived, limit) + extra.astype(jnp.int32)


def permute_forward(static: PermuteSpec, x, plan: Plan, groups: Groups | None = None):
    """rows [N, H] of one device, by its plan. Where `groups` is given, rows past the last group may hold anything."""
    with jax.named_scope("permute"):
        return implementation(static.kernels).gather_rows(x, plan.source, groups)


def permute_backward(static: PermuteSpec, plan: Plan, d_rows):
    """dx [R, H] of one device: the sum of the gradients of each row's copies."""
    with jax.named_scope("unpermute"):
        return implementation(static.kernels).gather_sum(d_rows, plan.position)


def unpermute_forward(static: PermuteSpec, rows, plan: Plan, weights):
    """y [R, H] of one device; weights None are 1."""
    with jax.named_scope("unpermute"):
        return implementation(static.kernels).gather_sum(rows, plan.position, weights)


def unpermute_backward(static: PermuteSpec, rows, plan: Plan, weights, dy):
    """d_rows [N, H] and d_weights [R, K] of one device: dy times the weight of each row, and <dy, row>."""
    d_rows = permute_forward(static, dy, plan)
    inner = jnp.sum(d_rows.astype(jnp.float32) * rows.astype(jnp.float32), axis=-1)
    d_rows = d_rows.astype(jnp.float32) * weights_of_rows(plan, weights)[:, None]
    return d_rows.astype(rows.dtype), weights_from_rows(plan, inner)


def weights_of_rows(plan: Plan, weights):
    """The weight [N] of each sorted row, 0 in padding."""
    flat = jnp.zeros(plan.source.shape, weights.dtype)
    return flat.at[plan.position.reshape(-1)].set(weights.reshape(-1), mode="drop")


def weights_from_rows(plan: Plan, of_rows):
    """A number of each sorted row [N] as one of each assignment [R, K]; 0 where that has no row."""
    return jnp.take(of_rows, plan.position, mode="fill", fill_value=0)


def _permute_local(static: PermuteSpec, layout, x, experts):
    plan = plan_rows(static, experts)
    return permute_forward(static, x, plan), plan


def _contract(results: int):
    def contract(static: PermuteSpec, operands, found):
        leading = spec(static.roles.tokens)
        return Contract(jax.tree.map(lambda _: leading, operands), (leading,) * results, ((),) * results)

    return contract


_permute_op = Partitioned(
    _permute_local, _contract(2), lambda static, operands: (("r h", "r k"), ("n h",)), name="permute"
)
_permute_grad_op = Partitioned(
    lambda static, layout, plan, d_rows: (permute_backward(static, plan, d_rows),),
    _contract(1),
    lambda static, operands: (("n", "r k", "e", "o", "n h"), ("r h",)),
    name="permute_grad",
)
_unpermute_op = Partitioned(
    lambda static, layout, rows, plan, weights: (unpermute_forward(static, rows, plan, weights),),
    _contract(1),
    lambda static, operands: (("n h", "n", "r k", "e", "o", "r k"), ("r h",)),
    name="unpermute",
)
_unpermute_grad_op = Partitioned(
    lambda static, layout, *operands: unpermute_backward(static, *operands),
    _contract(2),
    lambda static, operands: (("n h", "n", "r k", "e", "o", "r k", "r h"), ("n h", "r k")),
    name="unpermute_grad",
)
