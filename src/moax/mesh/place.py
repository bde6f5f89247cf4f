"""These functions bring arrays to the layout of a spec, on the mesh in force."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from moax.mesh.axes import ResolvedAxes
from moax.mesh.specs import AnyMesh, is_explicit, manual_axes, mesh_in_force, mesh_of


def named(mesh: AnyMesh, specs: PyTree[PartitionSpec]) -> Any:
    """Returns the NamedSharding on `mesh` of each spec in a tree."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs)


def constrain(x: Array, to: PartitionSpec) -> Array:
    """Returns x, resharded to the spec `to` on Explicit axes, and constrained to it on Auto axes.

    Without a mesh, and where an axis is Manual, the result is x itself.
    """
    mesh = mesh_of(x)
    if mesh is None or manual_axes(mesh):
        return x
    if is_explicit(mesh):
        return jax.sharding.reshard(x, NamedSharding(mesh, to))
    in_force = not jax.sharding.get_abstract_mesh().empty
    return lax.with_sharding_constraint(x, to if in_force else NamedSharding(mesh, to))


def keep_rows(y: Array, axes: ResolvedAxes) -> Array:
    """Returns y, with its leading dim over the token axes of an Auto mesh. XLA chooses the layout of the other dims."""
    return constrain(y, PartitionSpec(axes.tokens, *[PartitionSpec.UNCONSTRAINED] * (y.ndim - 1)))


def make_sharded(make: Callable, specs: PyTree[PartitionSpec] | None) -> Callable:
    """Returns `make`, with its results sharded by `specs` on the mesh in force, so that each device makes its own
    shards.

    Where `specs` is None, or an axis is Manual, the result is `make` itself.
    """
    mesh = mesh_in_force()
    if specs is None or mesh is None or manual_axes(mesh):
        return make
    if isinstance(mesh, Mesh):  # the mesh of `with mesh:`
        return jax.jit(make, out_shardings=named(mesh, specs))
    # These are specs, and no NamedShardings on the abstract mesh: vmap would replicate a result with a NamedSharding.
    if is_explicit(mesh):
        return jax.jit(jax.sharding.auto_axes(make, out_sharding=specs))
    return jax.jit(make, out_shardings=specs)


def zeros_of(of: Any) -> Array:
    """Returns zeros of an array's type, with its Explicit sharding and its varying Manual axes."""
    explicit = is_explicit(of.sharding.mesh)
    zeros = jnp.zeros(of.shape, of.dtype, out_sharding=of.sharding if explicit else None)
    names = tuple(of.manual_axis_type.varying)
    return lax.pcast(zeros, names, to="varying") if names else zeros


def reshard_like(y: Array, x: Array) -> Array:
    """Returns y, with the sharding in the type of x where mesh axes are Explicit; elsewhere y itself."""
    sharding = jax.typeof(x).sharding
    return jax.sharding.reshard(y, sharding) if is_explicit(sharding.mesh) else y
