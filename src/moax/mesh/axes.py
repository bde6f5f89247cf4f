"""`Axes` says which role each mesh axis plays; `Roles` is its answer for one mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

Names = tuple[str, ...]
ROLES = ("dp", "fsdp", "ep", "tp")


def as_names(entry: Any) -> tuple:
    """Returns the axis names of one entry of a PartitionSpec, or of one field of `Axes`."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


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

    Raises:
      ValueError: a field is not made of names, two roles have the same name, or fsdp_dim is unknown.
    """

    dp: str | Names | list[str] = "dp"
    fsdp: str | Names | list[str] = "fsdp"
    ep: str | Names | list[str] = "ep"
    tp: str | Names | list[str] = "tp"
    other: str | Names | list[str] = ()
    fsdp_dim: Literal["auto", "experts", "model"] = "auto"

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
        if self.fsdp_dim not in ("auto", "experts", "model"):
            raise ValueError(f"Axes: fsdp_dim={self.fsdp_dim!r} must be 'auto', 'experts' or 'model'")

    @property
    def names(self) -> Names:
        """The names of all mesh axes that have a role."""
        return tuple(name for role in ROLES for name in getattr(self, role))

    def on(self, sizes: Mapping[str, int]) -> Roles:
        """Returns the roles of the axes that have more than one device.

        On a mesh of {"fsdp": 4, "ep": 2, "tp": 1} the result has fsdp ("fsdp",), ep ("ep",), and no dp and no tp.

        Args:
          sizes: the number of devices along each mesh axis, by name.

        Raises:
          ValueError: an axis of more than one device has no role and is not in `other`.
        """
        nameless = [n for n, size in sizes.items() if size > 1 and n not in (*self.names, *as_names(self.other))]
        if nameless:
            name = nameless[0]
            raise ValueError(
                f"mesh axis {name!r} of {sizes[name]} devices has no role in {self}; name it in dp (it splits tokens), "
                "fsdp (tokens and weights), ep (tokens and experts) or tp (the expert width), for example "
                f"Axes(fsdp={name!r}), or in other=({name!r},) where moax is to leave the axis out"
            )
        by_role = {role: tuple(n for n in getattr(self, role) if sizes.get(n, 1) > 1) for role in ROLES}
        return Roles(**by_role, sizes=tuple((n, sizes[n]) for names in by_role.values() for n in names))


@dataclasses.dataclass(frozen=True)
class Roles:
    """The mesh axes of more than one device, by role. A local function needs to know no more of the mesh.

    Attributes:
      dp, fsdp, ep, tp: the names of the axes of each role; see `Axes`.
      sizes: (name, number of devices) of each of these axes.
    """

    dp: Names = ()
    fsdp: Names = ()
    ep: Names = ()
    tp: Names = ()
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def tokens(self) -> Names:
        """The axes that split tokens: dp, then fsdp, then ep, which is innermost."""
        return self.dp + self.fsdp + self.ep

    @property
    def all(self) -> Names:
        """Every axis of more than one device: those of tokens, then tp."""
        return self.tokens + self.tp

    def size(self, names: Names) -> int:
        """Returns the number of devices along the axes `names`, 1 for no names."""
        sizes = dict(self.sizes)
        return math.prod(sizes[n] for n in names)
