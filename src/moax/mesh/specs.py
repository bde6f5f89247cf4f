"""A PartitionSpec says over which mesh axes each dim of an array is split.

This file has the algebra of specs, finds the mesh in force, and brings arrays to the layout of a spec on it. Specs are
computed from axis names and sizes alone. `Axes.resolve` has dropped axes of size 1 and absent axes before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from moax.mesh.axes import Axes, Names, ResolvedAxes, as_names

Spec = PartitionSpec  # Spec(("fsdp", "ep"), (), ("tp",)) is Spec(("fsdp", "ep"), None, "tp")
FREE = Spec.UNCONSTRAINED  # XLA chooses the layout of the dim
AnyMesh = Mesh | AbstractMesh


def pad(array_spec: Spec, ndim: int) -> tuple[Names, ...]:
    """Returns the axis names of each of `ndim` dims. PartitionSpec("ep") of 2 dims is (("ep",), ())."""
    if len(array_spec) > ndim:
        raise ValueError(f"the spec {array_spec} has {len(array_spec)} entries, for an array of {ndim} dims")
    return tuple(as_names(entry) for entry in array_spec) + ((),) * (ndim - len(array_spec))


def check_divides(what: str, shape: Sequence[int], array_spec: Spec, axes: ResolvedAxes) -> None:
    """Raises ValueError where the mesh axes of a dim do not divide its size. `what` names the array in the message."""
    for dim, (size, names) in enumerate(zip(shape, pad(array_spec, len(shape)), strict=True)):
        if size % axes.size(names):
            raise ValueError(
                f"{what}: dim {dim} of size {size} does not divide by mesh axes {names} of {axes.size(names)} devices"
            )


def local_shape(shape: Sequence[int], array_spec: Spec, axes: ResolvedAxes) -> tuple[int, ...]:
    """Returns the shape of one device's shard, rounded up where devices do not divide it: 10 over 4 is 3."""
    return tuple(-(-n // axes.size(names)) for n, names in zip(shape, pad(array_spec, len(shape)), strict=True))


def device_spec(axes: ResolvedAxes) -> Spec:
    """Returns the spec of per-device arrays: the leading dim is sharded over all mesh axes."""
    return Spec(axes.all)


def check_spec(name: str, value: Any, ndim: int) -> Spec:
    """Returns `value`. Raises ValueError unless it is a PartitionSpec of at most `ndim` entries."""
    if not isinstance(value, Spec) or len(value) > ndim:
        raise ValueError(f"{name}={value!r} must be a jax.sharding.PartitionSpec of at most {ndim} entries")
    return value


def weight_gather(
    name: str, weight_spec: Spec, kept: Sequence[Names], axes: ResolvedAxes
) -> tuple[Spec, tuple[Names, ...], tuple[Names, ...]]:
    """Returns the spec of a weight, `kept`, and for each dim the axes over which it is gathered before a product.

    Dim i stays split over `kept[i]` in the product, and over no other axis. With the spec (("ep", "fsdp"), None, "tp")
    and kept (("ep",), (), ("tp",)), the dims are gathered over (("fsdp",), (), ()).

    Raises:
      ValueError: a dim of the spec does not name its `kept` axes first, or names an axis that may not be gathered
        after them. The axes of fsdp may be gathered, and those of ep where no dim keeps ep.
    """
    gatherable = axes.fsdp + (() if any(n in axes.ep for need in kept for n in need) else axes.ep)
    roles = axes.all
    entries = [tuple(n for n in entry if n in roles) for entry in pad(weight_spec, len(kept))]
    for dim, (entry, need) in enumerate(zip(entries, kept, strict=True)):
        if entry[: len(need)] != need or not set(entry[len(need) :]) <= set(gatherable):
            has = f"is sharded over {_listed(entry)}" if entry else "is not sharded"
            raise ValueError(f"{name}: dim {dim} {has}; {_allowed(need, gatherable)}")
    gather = tuple(entry[len(need) :] for entry, need in zip(entries, kept, strict=True))
    return Spec(*entries), tuple(kept), gather


def _allowed(need: Names, gatherable: Names) -> str:
    if not need:
        return f"it may be sharded over {_listed(gatherable)} alone" if gatherable else "it must not be sharded"
    first = f"it must be sharded over {_listed(need)}"
    return f"{first} first, and may then be sharded over {_listed(gatherable)}" if gatherable else f"{first} alone"


def _listed(names: Names) -> str:
    return f"mesh {'axis' if len(names) == 1 else 'axes'} {', '.join(map(repr, names))}"


def mesh_in_force() -> AnyMesh | None:
    """Returns the mesh of `jax.set_mesh`, of an enclosing `shard_map`, or of `with mesh:`; None without one."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return mesh
    try:  # `with mesh:` is deprecated, and JAX has no other name for its mesh; large trainers still use it
        from jax._src.mesh import thread_resources
    except ImportError:
        return None
    physical = thread_resources.env.physical_mesh
    return None if physical.empty else physical


def mesh_sizes() -> dict[str, int]:
    """Returns the axis sizes of the mesh in force, by name; {} without a mesh."""
    mesh = mesh_in_force()
    return {} if mesh is None else dict(mesh.shape)


def mesh_of(*arrays: Array) -> AnyMesh | None:
    """Returns the mesh in force, or else the mesh in the type of an array; None if there is neither."""
    typed = (jax.typeof(a).sharding.mesh for a in arrays)
    return mesh_in_force() or next((m for m in typed if not m.empty), None)


def is_explicit(mesh: AnyMesh) -> bool:
    """Returns whether any axis of the mesh is Explicit."""
    return AxisType.Explicit in mesh.axis_types


def manual_axes(mesh: AnyMesh) -> set[str]:
    """Returns the mesh axes that a `shard_map` around the caller has made Manual."""
    return {n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Manual}


def resolve_axes(axes: Axes, mesh: AnyMesh | None = None) -> ResolvedAxes:
    """Returns the axes of a mesh by role; None means the mesh in force. Manual axes need no role.

    Raises:
      ValueError: an axis of more than one device has no role and is not in `axes.other`, or some axes are Auto and
        others Explicit.
    """
    mesh = mesh or mesh_in_force()
    if mesh is None:
        return ResolvedAxes()
    kinds, manual = dict(zip(mesh.axis_names, mesh.axis_types, strict=True)), manual_axes(mesh)
    if {AxisType.Auto, AxisType.Explicit} <= set(kinds.values()):
        auto, explicit = ([n for n in kinds if kinds[n] == kind] for kind in (AxisType.Auto, AxisType.Explicit))
        raise ValueError(
            f"mesh axes {auto} are Auto and {explicit} are Explicit; moax works on meshes whose axes are all of one "
            "kind: pass axis_types=(AxisType.Auto,) * n, or Explicit for all, to jax.make_mesh"
        )
    return axes.resolve({n: size for n, size in mesh.shape.items() if n in axes.names or n not in manual})


def named(mesh: AnyMesh, specs: PyTree[Spec]) -> Any:
    """Returns the NamedSharding on `mesh` of each spec in a tree."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs)


def constrain(x: Array, to: Spec) -> Array:
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
    """Returns y, with its leading dim over the token axes of an Auto mesh; the other dims are free."""
    return constrain(y, Spec(axes.tokens, *[FREE] * (y.ndim - 1)))


def make_sharded(make: Callable, specs: PyTree[Spec] | None) -> Callable:
    """Returns `make`, whose results each device then makes as its own shards, by `specs` on the mesh in force.

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
