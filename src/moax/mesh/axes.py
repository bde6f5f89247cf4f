"""`make_mesh` makes a mesh, `Axes` names the role of each mesh axis, and `ResolvedAxes` has the axes of one mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from moax.checks import check_value, suggest_fields

AnyMesh = Mesh | AbstractMesh
Names = tuple[str, ...]
Entry = str | Names | list[str] | None
ROLES = ("dp", "fsdp", "cp", "ep", "tp")


def as_names(entry: Any) -> tuple:
    """Returns the axis names of one entry of a PartitionSpec, or of one field of `Axes`."""
    if entry is None:
        return ()
    if isinstance(entry, tuple | list):
        return tuple(entry)
    return (entry,)


def make_mesh(
    sizes: Mapping[str, int],
    *,
    axis_type: AxisType = AxisType.Auto,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Makes the mesh of these axes over all devices, in row-major order, with the devices of a host side by side.

    Name axes from the farthest apart to the nearest: `{"dp": 4, "fsdp": 16, "ep": 8}` on hosts of 8 GPUs keeps each
    group of ep on the NVLink of one host, and fsdp and dp cross the network. `jax.make_mesh` does the same on one host,
    and refuses GPUs of several hosts.

    Args:
      sizes: the number of devices along each axis, by name; the product is the number of all devices.
      axis_type: the type of every axis.
      devices: the devices of the mesh; None takes all devices of all processes.

    Raises:
      ValueError: sizes is no mapping, or a size is no int of at least 1, or the product of the sizes is not the number
        of devices.
    """
    if not isinstance(sizes, Mapping):
        raise ValueError(f"sizes={sizes!r} must be a mapping from names of axes to sizes, such as {{'fsdp': 8}}")
    for name, size in sizes.items():
        check_value(f"sizes[{name!r}]", size, int)
    if devices is None:
        devices = jax.devices()
    shape = tuple(sizes.values())
    if math.prod(shape) != len(devices):
        text = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"sizes {text} make a mesh of {math.prod(shape)} devices; there are {len(devices)}")
    return Mesh(np.array(order(devices)).reshape(shape), tuple(sizes), (axis_type,) * len(sizes))


def order(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Returns the devices sorted by `slice_index`, then by id, so that the devices of a host are side by side."""
    # `jax.devices()` sorts by process, and a launcher may put neighbouring processes on different hosts. A slice is a
    # host, or a group of hosts that NVLink connects.
    return sorted(devices, key=lambda device: (getattr(device, "slice_index", 0), device.id))


@suggest_fields
@dataclasses.dataclass(frozen=True)
class Axes:
    """Which mesh axes play which role. A field is a name or a tuple of names; a name that the mesh lacks has size 1.

    Attributes:
      dp: data parallel. These axes split tokens; every device along them holds the same weights.
      fsdp: these axes split tokens and weights. A block gathers the weights when it uses them, as bytes where the
        recipe quantizes them.
      ep: expert parallel. These axes split tokens and experts.
      tp: tensor parallel. These axes split the expert width F.
      other: axes that moax leaves out: every device along them does the same work on the same weights, unless
        `jax.vmap(spmd_axis_name=...)` or the caller's own `shard_map` splits a batch over them. A pipeline's "stage" is
        one. A mesh axis of more than one device that no field names is an error.
      fsdp_dim: the dim of expert weights that fsdp splits: `experts` (E), `model` (H), or `auto`. `auto` splits the
        experts where ep and fsdp together divide E, and H elsewhere.
      cp: context parallel. These axes split tokens as dp does, but along S of x [B, S, H]. They split no weight.
      tokens: the axes over each leading dim of x [..., H], as a PartitionSpec of them: `(("ep", "fsdp"), "cp")`. Its
        last entry is of S, and the others are of the first dims. () is ((dp, fsdp, ep), cp). An axis that it leaves
        out splits the first dim before the others, or S after the others if it is of cp. Where axes are Explicit, the
        type of x decides.
      names: all mesh axes that have a role.

    Raises:
      ValueError: a field is not made of names, two roles have the same name, fsdp_dim is unknown, or `tokens` names an
        axis twice or one whose role splits no tokens.
    """

    dp: str | Names | list[str] = "dp"
    fsdp: str | Names | list[str] = "fsdp"
    ep: str | Names | list[str] = "ep"
    tp: str | Names | list[str] = "tp"
    other: str | Names | list[str] = ()
    fsdp_dim: Literal["auto", "experts", "model"] = "auto"
    cp: str | Names | list[str] = "cp"
    tokens: Iterable[Entry] = ()
    names: Names = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self):
        owner: dict[str, str] = {}
        for role in (*ROLES, "other"):
            value = getattr(self, role)
            names = as_names(value)
            if not all(isinstance(name, str) for name in names):
                raise ValueError(f"Axes: {role}={value!r} must be a mesh axis name or a tuple of them")
            object.__setattr__(self, role, names)
            for name in names:
                if name in owner:
                    raise ValueError(
                        f"Axes: mesh axis {name!r} is named by both {owner[name]} and {role}; name it once"
                    )
                owner[name] = role
        names_with_role = tuple(name for name, role in owner.items() if role != "other")
        object.__setattr__(self, "names", names_with_role)
        check_value("Axes: fsdp_dim", self.fsdp_dim, ("auto", "experts", "model"))
        object.__setattr__(self, "tokens", self._check_tokens(owner))

    def _check_tokens(self, owner: Mapping[str, str]) -> tuple[Names, ...]:
        """Returns the axes over each leading dim of x; `owner` has the role of each axis."""
        tokens = self.tokens
        remedy = 'it must be the mesh axes of each leading dim of x, such as (("ep", "fsdp"), "cp")'
        if isinstance(tokens, str) or not isinstance(tokens, Iterable):
            raise ValueError(f"Axes: tokens={tokens!r}; {remedy}")
        dims = tuple(map(as_names, tokens))
        listed = [name for names in dims for name in names]
        for name in listed:
            if owner.get(name) not in ("dp", "fsdp", "ep", "cp"):
                raise ValueError(f"Axes: tokens={tokens!r} names {name!r}, which is in none of dp, fsdp, ep and cp")
        if len(set(listed)) < len(listed):
            raise ValueError(f"Axes: tokens={tokens!r} names a mesh axis twice; {remedy}")
        return dims

    def resolve(self, mesh: AnyMesh | None) -> ResolvedAxes:
        """Returns the axes of a mesh that have more than one device, by role. Manual axes need no role.

        On a mesh of {"fsdp": 4, "ep": 2, "tp": 1} the result has fsdp ("fsdp",), ep ("ep",), and no dp and no tp.

        Raises:
          ValueError: mesh is no mesh, or an axis of more than one device has no role and is not in `other`, or some
            axes are Auto and others Explicit.
        """
        if mesh is None:
            return ResolvedAxes()
        if not isinstance(mesh, AnyMesh):
            raise ValueError(
                f"mesh={mesh!r} must be a jax.sharding.Mesh or AbstractMesh, or None for the mesh in force"
            )
        if mesh.auto_axes and mesh.explicit_axes:
            raise ValueError(
                f"mesh axes {list(mesh.auto_axes)} are Auto and {list(mesh.explicit_axes)} are "
                "Explicit; moax works on meshes whose axes are all of one kind: pass "
                "axis_types=(AxisType.Auto,) * n, or Explicit for all, to jax.make_mesh"
            )
        sizes = {name: size for name, size in mesh.shape.items() if size > 1}
        for name, size in sizes.items():
            if name not in (*self.names, *as_names(self.other), *mesh.manual_axes):
                raise ValueError(
                    f"mesh axis {name!r} of {size} devices has no role in {self}; name it in dp "
                    "(it splits tokens), fsdp (tokens and weights), cp (tokens along S), ep "
                    "(tokens and experts) or tp (the expert width), for example "
                    f"Axes(fsdp={name!r}), or in other=({name!r},) where moax is to leave the axis "
                    "out"
                )
        names_of_role: dict[str, Names] = {}
        for role in ROLES:
            names_of_role[role] = tuple(name for name in getattr(self, role) if name in sizes)
        batch = names_of_role["dp"] + names_of_role["fsdp"] + names_of_role["ep"]
        cp = names_of_role["cp"]
        dims = []
        for entry in self.tokens:
            dims.append(tuple(name for name in as_names(entry) if name in batch + cp))
        dims += [()] * (2 - len(dims))
        listed = {name for names in dims for name in names}
        dims[0] = tuple(name for name in batch if name not in listed) + dims[0]
        dims[-1] += tuple(name for name in cp if name not in listed)
        names = [name for names in names_of_role.values() for name in names]
        sizes_by_role = tuple((name, sizes[name]) for name in names)
        return ResolvedAxes(**names_of_role, sizes=sizes_by_role, dims=tuple(dims))


@dataclasses.dataclass(frozen=True)
class ResolvedAxes:
    """The mesh axes of more than one device, by role: all that a local function needs to know of the mesh.

    Attributes:
      dp, fsdp, ep, tp, cp: the names of the axes of each role; see `Axes`.
      sizes: (name, number of devices) of each of these axes.
      dims: the axes of tokens over each leading dim of x [..., H], of which the last is S.
      tokens: the axes that split flattened tokens: the axes of all `dims`.
      sequence: the axes of tokens that split S of x [..., S, H].
      all: every axis of more than one device: the axes of tokens, then tp.
      replica_axes: the axes of tokens along which devices compute with the same experts: all but ep.
    """

    dp: Names = ()
    fsdp: Names = ()
    ep: Names = ()
    tp: Names = ()
    sizes: tuple[tuple[str, int], ...] = ()
    cp: Names = ()
    dims: tuple[Names, ...] = ((), ())
    tokens: Names = dataclasses.field(init=False, repr=False)
    sequence: Names = dataclasses.field(init=False, repr=False)
    all: Names = dataclasses.field(init=False, repr=False)
    replica_axes: Names = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        tokens = tuple(name for names in self.dims for name in names)
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "sequence", self.dims[-1])
        object.__setattr__(self, "all", tokens + self.tp)
        replica_axes = tuple(name for name in tokens if name not in self.ep)
        object.__setattr__(self, "replica_axes", replica_axes)

    def over(self, count: int) -> tuple[Names, ...]:
        """Returns the axes of tokens over each of the `count` leading dims of x; the one dim of x [T, H] has them all.

        Raises:
          ValueError: x has fewer dims than `Axes.tokens` has entries.
        """
        if count == 1:
            return (self.tokens,)
        *dims_before, dims_of_sequence = self.dims
        if count < len(self.dims):
            raise ValueError(f"x has {count} dims before H, and Axes.tokens has {len(self.dims)} entries: {self.dims}")
        whole_dims = [()] * (count - len(self.dims))
        return (*dims_before, *whole_dims, dims_of_sequence)

    def size(self, names: Names) -> int:
        """Returns the number of devices along the axes `names`, 1 for no names."""
        sizes = dict(self.sizes)
        return math.prod(sizes[n] for n in names)
