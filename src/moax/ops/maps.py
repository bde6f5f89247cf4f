"""Routing maps, and the weights of sorted rows: what `permute` takes beside rows and expert ids.

    list_experts:     ids[r, :] = the experts e with map[r, e], in ascending order, then "none"
    pick_weights:     w[r, k] = weights[r, ids[r, k]]
    permute_weights:  row_weights[position[r, k]] = w[r, k]

With 3 experts, a row of the map (true, false, true) and K = 2 has the ids (0, 2); (false, true, false) has (1, 3), and
3 means no expert. The gradient of a weight is that of its row, 0 where it has no row.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moax.mesh.axes import Roles
from moax.mesh.partition import Contract, MeshView, Partitioned, differentiable
from moax.mesh.specs import spec
from moax.types import Plan


@dataclasses.dataclass(frozen=True)
class MapSpec:
    """The static arguments: K, the most experts of a row, and the mesh axes by role."""

    top_k: int
    roles: Roles


def list_experts(view: MeshView, routing_map: Bool[Array, "R E"], top_k: int) -> tuple[Array, Array]:
    """Returns the expert ids [R, K] of a map, and [shards], how many experts of a shard's rows are beyond K."""
    return _list_op(view, MapSpec(top_k, view.roles), routing_map)


def pick_weights(view: MeshView, weights: Float[Array, "R E"], ids: Int[Array, "R K"]) -> Float[Array, "R K"]:
    """Returns the weights of the experts `ids`, 0 for none. They are differentiable in `weights`."""
    static = MapSpec(ids.shape[1], view.roles)
    return _pick(view, static, *_pick_op.lay_operands(view, static, weights, ids))


def permute_weights(view: MeshView, weights: Float[Array, "R K"], plan: Plan) -> Float[Array, " N"]:
    """Returns the weight of each sorted row, 0 in padding. It is differentiable in `weights`."""
    static = MapSpec(weights.shape[1], view.roles)
    return _carry(view, static, *_carry_op.lay_operands(view, static, weights, plan))


def _pick_forward(view: MeshView, static: MapSpec, weights, ids):
    """Runs the forward of the `custom_vjp` and returns the weights, and what backward needs: shapes and ids."""
    return _pick_op(view, static, weights, ids)[0], (weights, ids)


def _pick_backward(view: MeshView, static: MapSpec, saved, d_picked):
    """Runs the backward of the `custom_vjp` and returns the gradient of `weights`."""
    return _pick_grad_op(view, static, *saved, d_picked)[0], None


_pick = differentiable(_pick_forward, _pick_backward, once="permute")


def _carry_forward(view: MeshView, static: MapSpec, weights, plan):
    """Runs the forward of the `custom_vjp` and returns the weights of the rows, and the plan."""
    return _carry_op(view, static, weights, plan)[0], plan


def _carry_backward(view: MeshView, static: MapSpec, plan, d_rows):
    """Runs the backward of the `custom_vjp` and returns the gradient of `weights`."""
    return _carry_grad_op(view, static, plan, d_rows)[0], None


_carry = differentiable(_carry_forward, _carry_backward, once="permute")


def list_of_map(routing_map: Bool[Array, "R E"], top_k: int) -> tuple[Int[Array, "R K"], Int[Array, " 1"]]:
    """Returns `list_experts` of one device."""
    num_experts = routing_map.shape[1]
    chosen = jnp.argsort(~routing_map, axis=1, stable=True)[:, :top_k].astype(jnp.int32)
    count = routing_map.sum(1, dtype=jnp.int32)
    ids = jnp.where(jnp.arange(chosen.shape[1], dtype=jnp.int32)[None] < count[:, None], chosen, num_experts)
    return ids, jnp.maximum(count - top_k, 0).sum(dtype=jnp.int32)[None]


def pick_forward(weights: Float[Array, "R E"], ids: Int[Array, "R K"]) -> Float[Array, "R K"]:
    """Returns `pick_weights` of one device."""
    return jnp.take_along_axis(weights, ids, axis=1, mode="fill", fill_value=0)


def pick_backward(weights: Float[Array, "R E"], ids: Int[Array, "R K"], d_picked: Float[Array, "R K"]):
    """Returns the gradient [R, E] of the weights of one device."""
    rows = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
    return jnp.zeros_like(weights).at[rows, ids].set(d_picked.astype(weights.dtype), mode="drop")


def weights_of_rows(plan: Plan, weights: Float[Array, "R K"]) -> Float[Array, " N"]:
    """Returns the weight [N] of each sorted row, from weights [R, K]; 0 in padding."""
    row = jnp.arange(plan.source.shape[0], dtype=jnp.int32)
    at = jnp.take(plan.position, plan.source, axis=0, mode="fill", fill_value=row.shape[0])  # [N, K]
    own = jnp.take(weights, plan.source, axis=0, mode="clip")
    return jnp.where(at == row[:, None], own, jnp.zeros((), weights.dtype)).sum(1)


def weights_from_rows(plan: Plan, row_values):
    """Returns the value [R, K] of each assignment, from the values [N] of sorted rows.

    An assignment without a row has 0.
    """
    return jnp.take(row_values, plan.position, mode="fill", fill_value=0)


def one_result(static, operands, found_specs):
    """Returns the contract of an op of one result: the axes of `static.roles.tokens` split all operands and it."""
    leading = spec(static.roles.tokens)
    return Contract(jax.tree.map(lambda _: leading, operands), (leading,), ((),))


def two_results(static, operands, found_specs):
    """Returns the contract of an op of two results, as `one_result` does."""
    operand_specs, leading, none, _ = one_result(static, operands, found_specs)
    return Contract(operand_specs, (*leading, *leading), (*none, *none))


def _list_local(static: MapSpec, layout, routing_map):
    """Runs `list_experts` on one device."""
    return list_of_map(routing_map, static.top_k)


def _pick_local(static: MapSpec, layout, weights, ids):
    """Runs `pick_weights` on one device."""
    return (pick_forward(weights, ids),)


def _pick_grad_local(static: MapSpec, layout, weights, ids, d_picked):
    """Runs the backward of `pick_weights` on one device."""
    return (pick_backward(weights, ids, d_picked),)


def _carry_local(static: MapSpec, layout, weights, plan):
    """Runs `permute_weights` on one device."""
    return (weights_of_rows(plan, weights),)


def _carry_grad_local(static: MapSpec, layout, plan, d_rows):
    """Runs the backward of `permute_weights` on one device."""
    return (weights_from_rows(plan, d_rows),)


_list_op = Partitioned(_list_local, two_results, lambda static, operands: (("r e",), ("r k",)), name="list_experts")
_pick_op = Partitioned(
    _pick_local, one_result, lambda static, operands: (("r e", "r k"), ("r k",)), name="pick_weights"
)
_pick_grad_op = Partitioned(
    _pick_grad_local, one_result, lambda static, operands: (("r e", "r k", "r k"), ("r e",)), name="pick_weights_grad"
)
_carry_op = Partitioned(
    _carry_local, one_result, lambda static, operands: (("r k", "n", "r k", "e", "o"), ("n",)), name="permute_weights"
)
_carry_grad_op = Partitioned(
    _carry_grad_local,
    one_result,
    lambda static, operands: (("n", "r k", "e", "o", "n"), ("r k",)),
    name="permute_weights_grad",
)
