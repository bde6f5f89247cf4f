"""Where arrays lie: the algebra of specs, and the PartitionSpec of every array. `partition.py` runs ops on them.

Specs are values, computed from axis names and sizes; size-1 and absent axes have vanished in `Axes.on` before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from jaxtyping import Array

from moax.mesh.axes import Names, Roles, as_names

Spec = PartitionSpec
AnyMesh = Mesh | AbstractMesh

# The algebra of specs.


def spec(*entries: str | Names | None) -> PartitionSpec:
    """A PartitionSpec; empty tuples become None, tuples of one name that name."""
    return PartitionSpec(*(names[0] if len(names) == 1 else names or None for names in map(as_names, entries)))


def pad(of: PartitionSpec, ndim: int) -> tuple[Names, ...]:
    """The axis names of each of `ndim` dims."""
    if len(of) > ndim:
        raise ValueError(f"the spec {of} has {len(of)} entries, for an array of {ndim} dims")
    return tuple(as_names(entry) for entry in of) + ((),) * (ndim - len(of))


def check_divides(what: str, shape: Sequence[int], of: PartitionSpec, roles: Roles) -> None:
    """Raises ValueError where a dim does not divide by its mesh axes, naming both."""
    for dim, (size, names) in enumerate(zip(shape, pad(of, len(shape)), strict=True)):
        if size % roles.size(names):
            raise ValueError(
                f"{what}: dim {dim} of size {size} does not divide by mesh axes {names} of {roles.size(names)} devices"
            )


class Layout(NamedTuple):
    """How a weight lies on the mesh. spec: its PartitionSpec. gather: for each dim, the axes to gather before use."""

    spec: PartitionSpec
    gather: tuple[Names, ...]


def weight_layout(what: str, of: PartitionSpec, kept: Sequence[Names], roles: Roles) -> Layout:
    """The layout of a weight whose dim i a product needs split by `kept[i]` and by nothing else.

    Raises ValueError unless each dim of the spec names its `kept` axes first, then axes that may be gathered: those
    of fsdp, and of ep where no dim keeps it.
    """
    sizes = dict(roles.sizes)
    gatherable = roles.fsdp + (() if any(n in roles.ep for need in kept for n in need) else roles.ep)
    entries = [tuple(n for n in entry if n in sizes) for entry in pad(of, len(kept))]
    for dim, (entry, need) in enumerate(zip(entries, kept, strict=True)):
        if entry[: len(need)] != need or not set(entry[len(need) :]) <= set(gatherable):
            raise ValueError(
                f"{what}: dim {dim} is sharded over mesh axes {entry}; it must be sharded over {need} first, then over "
                f"any of {gatherable}"
            )
    return Layout(spec(*entries), tuple(entry[len(need) :] for entry, need in zip(entries, kept, strict=True)))


# The spec of every array.


def mesh_sizes(mesh: AnyMesh | None = None) -> dict[str, int]:
    """Axis sizes of `mesh`, or of the mesh in force (`jax.set_mesh`, or an enclosing `shard_map`); {} for none."""
    return dict((mesh or jax.sharding.get_abstract_mesh()).shape)


def mesh_of(*arrays: Array) -> AnyMesh | None:
    """The mesh in force, else the one in an array's type; None where there is neither."""
    meshes = [jax.sharding.get_abstract_mesh()] + [jax.typeof(a).sharding.mesh for a in arrays]
    return next((m for m in meshes if not m.empty), None)


def device_spec(roles: Roles) -> PartitionSpec:
    """Of values that belong to one device each: the leading dim over every axis."""
    return spec(roles.all)


def local_shape(shape: Sequence[int], of: PartitionSpec, roles: Roles) -> tuple[int, ...]:
    """The shape of one device's shard; a dim that does not divide is rounded up."""
    return tuple(-(-n // roles.size(names)) for n, names in zip(shape, pad(of, len(shape)), strict=True))


def is_explicit(mesh: AnyMesh) -> bool:
    """Whether any axis of the mesh is Explicit."""
    return any(kind == AxisType.Explicit for kind in mesh.axis_types)
