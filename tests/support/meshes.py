"""Meshes by name, and the ways in which an op meets one."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

MESHES: dict[str, dict[str, int]] = {
    "8x1": {"fsdp": 8, "ep": 1},
    "1x8": {"fsdp": 1, "ep": 8},
    "2x4": {"fsdp": 2, "ep": 4},
    "4x2": {"fsdp": 4, "ep": 2},
    "dp2x2x2": {"dp": 2, "fsdp": 2, "ep": 2},
    "tp2x2x2": {"fsdp": 2, "ep": 2, "tp": 2},
}
TOKENS = ("dp", "fsdp", "ep")

# How an op meets a mesh: not at all; on Auto axes, by either engine; on Explicit axes; in the user's own shard_map
# (check_vma False, True), differentiated from outside it, or (inside) within it.
ENGINES = ("custom_partitioning", "shard_map")
WAYS = (*ENGINES, "explicit", "user", "user_vma", "user_inside")


def make_mesh(name: str, way: str = "custom_partitioning") -> jax.sharding.Mesh:
    """Returns the mesh of this name, with the axis types that `way` needs."""
    sizes = MESHES[name]
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def spec(mesh: str, *entries) -> PartitionSpec:
    """Returns a PartitionSpec of the axes that the mesh of this name has."""
    names = [e if isinstance(e, tuple) else (e,) for e in entries]
    return PartitionSpec(*(tuple(n for n in e if n in MESHES[mesh]) or None for e in names))


def size(mesh: str, *names: str) -> int:
    """Returns the number of devices of the mesh of this name along these axes; axes that it lacks count as 1."""
    return int(np.prod([MESHES[mesh].get(n, 1) for n in names]))


def put(mesh: jax.sharding.Mesh, specs: Any, tree: Any) -> Any:
    """Returns the arrays of `tree` on the mesh, laid out by `specs`, a tree prefix of it."""

    def is_spec(value):
        return isinstance(value, PartitionSpec)

    def place(spec, tree):
        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec)), tree)

    return jax.tree.map(place, specs, tree, is_leaf=is_spec)


def in_user_shard_map() -> bool:
    """Returns whether the caller is inside a `shard_map`: there, sums that an op leaves to its caller are due."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def gather_counts(way: str) -> tuple[int, ...]:
    """Returns how often a compiled step may gather a weight that forward and backward read: twice.

    XLA of JAX 0.11.0 may see through the barrier between the two gathers of one program and keep the result of the
    first.
    """
    return (1, 2) if jax.__version_info__ < (0, 11, 1) and way != "custom_partitioning" else (2,)
