"""The roles that mesh axes play: data, weights, experts, width."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

Names = tuple[str, ...]
ROLES = ("dp", "fsdp", "ep", "tp")


def as_names(entry: str | tuple[str, ...] | list[str] | None) -> Names:
    """The axis names of one entry of a PartitionSpec, or of one field of `Axes`."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, tuple | list) else (entry,)


@dataclasses.dataclass(frozen=True)
class Axes:
    """Which mesh axes play which role: a name, or a tuple of names; one that the mesh lacks counts as size 1.

    Attributes:
      dp: data parallel: tokens are split, weights are not.
      fsdp: tokens are split, and weights too; gathered (quantized, where a recipe says so) when used.
      ep: tokens are split, and experts.
      tp: expert width F is split.
      fsdp_dim: what fsdp splits of expert weights: `experts`, `model` (the dim H), or `auto`: experts where the mesh
        divides them, else model.
    """

    dp: str | Names | list[str] = "dp"
    fsdp: str | Names | list[str] = "fsdp"
    ep: str | Names | list[str] = "ep"
    tp: str | Names | list[str] = "tp"
    fsdp_dim: Literal["auto", "experts", "model"] = "auto"

    def __post_init__(self):
        owner: dict[str, str] = {}
        for role in ROLES:
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
        """Every mesh axis that has a role."""
        return tuple(name for role in ROLES for name in getattr(self, role))

    def on(self, sizes: Mapping[str, int]) -> Roles:
        """The axes of a mesh of these `sizes` that have more than one device, by role."""
        found = {role: tuple(n for n in getattr(self, role) if sizes.get(n, 1) > 1) for role in ROLES}
        return Roles(**found, sizes=tuple((n, sizes[n]) for names in found.values() for n in names))


@dataclasses.dataclass(frozen=True)
class Roles:
    """Mesh axes of more than one device, by role: all that a local function needs to know of the mesh."""

    dp: Names = ()
    fsdp: Names = ()
    ep: Names = ()
    tp: Names = ()
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def tokens(self) -> Names:
        """The axes that split tokens, ep innermost."""
        return self.dp + self.fsdp + self.ep

    @property
    def all(self) -> Names:
        return self.tokens + self.tp

    def size(self, names: Names) -> int:
        """Devices along `names`."""
        sizes = dict(self.sizes)
        return math.prod(sizes[n] for n in names)
