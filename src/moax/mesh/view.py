"""`MeshView` says how ops run on the mesh in force. The kind of the mesh axes decides the engine:

| mesh axes are            | engine                                                                            |
|--------------------------|-----------------------------------------------------------------------------------|
| absent, or all of size 1 | the local function runs on the operands                                           |
| Auto                     | `custom_partitioning`, or `shard_map` where the caller names it                    |
| Explicit                 | `shard_map` (`custom_partitioning` fails there: jax issue 34811)                   |
| Manual, all of them      | the local function; the caller sums over axes that split no dim of a result       |
| Manual, others alone     | `shard_map` over the axes that are not Manual                                     |
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import jax
from jax import lax
from jaxtyping import Array, PyTree

from moax.checks import Unsupported, check_choice, check_kind
from moax.mesh.axes import Axes, Names, ResolvedAxes
from moax.mesh.collectives import reduce_max, varying
from moax.mesh.specs import is_explicit, manual_axes, mesh_of, resolve_axes

Engine = Literal["auto", "custom_partitioning", "shard_map"]
ENGINES = get_args(Engine)


class MeshView(NamedTuple):
    """How ops run on the mesh in force.

    Attributes:
      axes: the mesh axes of more than one device, by role.
      engine: the way from global arrays to shards; `local` calls the local function on the operands as they are.
      manual: whether the caller is inside a `shard_map` over all of `axes`. The operands are then shards, and the
        caller sums over axes that split no dim of a result, as it does for `jnp.dot`.
      explicit: whether an axis of the mesh is Explicit, and ops see global arrays.
      mesh: the mesh in force, or else in the type of an operand; None without one.
    """

    axes: ResolvedAxes
    engine: Literal["local", "custom_partitioning", "shard_map"]
    manual: bool = False
    explicit: bool = False
    mesh: Any = None

    @property
    def mapped(self) -> set[str]:
        """The mesh axes that the `shard_map` of an op makes Manual: all that are not."""
        return set(self.mesh.axis_names) - manual_axes(self.mesh)

    @property
    def nested(self) -> bool:
        """Whether ops run inside a `shard_map` that leaves out a part of the mesh, or open one inside another."""
        if self.mesh is None or not manual_axes(self.mesh):
            return False
        return not self.manual or bool(self.mapped)

    def psum(self, x: Array, names: Names) -> Array:
        """Sums x over `names` inside a `shard_map`, where an op leaves this sum to its caller; elsewhere returns x."""
        names = names + self._size_one_axes(x) if self.manual else ()
        return lax.psum(x, names) if names else x

    def assume_replicated(self, x: Array, names: Names) -> Array:
        """Returns x, which is equal on all devices along `names`, with a type that says so inside a `shard_map`."""
        if not self.manual:
            return x
        names = names + self._size_one_axes(x)
        return reduce_max(x, tuple(n for n in names if n in varying(x)) or names)  # JAX refuses a mixture

    def _size_one_axes(self, x) -> Names:
        """Returns the axes of size 1 over which the type of x varies; there is one device, so only the type varies."""
        return tuple(n for n in sorted(varying(x)) if self.mesh.shape[n] == 1)


def find_mesh_view(axes: Axes, engine: Engine, *operands: PyTree[Array]) -> MeshView:
    """Returns the view of the mesh in force for an op on `operands`.

    Args:
      axes: the role of each mesh axis.
      engine: see `moax.Options`.
      *operands: trees of arrays. Their types name the mesh where none is in force.

    Raises:
      ValueError: the engine is unknown, a mesh axis of more than one device has no role, some axes are Auto and others
        Explicit, or some axes that `axes` names are Manual and others are not.
      Unsupported: this mesh cannot run the engine.
    """
    check_choice("engine", engine, ENGINES)
    check_kind("axes", axes, Axes)
    mesh = mesh_of(*jax.tree.leaves(operands))
    if mesh is None:
        return MeshView(ResolvedAxes(), "local")
    resolved, explicit, manual = resolve_axes(axes, mesh), is_explicit(mesh), manual_axes(mesh)
    inside = [n for n in resolved.all if n in manual]
    outside = [n for n in resolved.all if n not in manual]
    if manual and not outside and (inside or not explicit):
        return MeshView(resolved, "local", manual=True, mesh=mesh)
    if inside:
        raise ValueError(
            f"mesh axes {inside} are Manual (inside a shard_map) but {outside} are not; take all of them, or none, "
            "into the shard_map's axis_names"
        )
    if not outside and not explicit:
        return MeshView(resolved, "local", mesh=mesh)
    if engine == "custom_partitioning" and (explicit or manual):
        reason = f"axes {sorted(manual)} are Manual" if manual else "axes are Explicit"
        raise Unsupported(f"engine='custom_partitioning' cannot run on this mesh: {reason}; use 'auto' or 'shard_map'")
    partitioned = not explicit and not manual and engine != "shard_map"
    return MeshView(resolved, "custom_partitioning" if partitioned else "shard_map", explicit=explicit, mesh=mesh)
