"""`LogicalAxes` names the dims of the parameters for the logical axis rules of Flax.

A rule maps a logical name to mesh axes: with the rules (("exp", "expert"), ("embed", "fsdp"), ("mlp", "tensor")) `wi`,
whose dims have the names ("exp", "embed", None, "mlp"), lies by PartitionSpec("expert", "fsdp", None, "tensor").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from moax.config import MoEConfig
from moax.mesh.axes import Axes
from moax.mesh.specs import mesh_sizes
from moax.params import DIMS, ROUTER, MoEParams, param_shapes, params_by_name
from moax.sharding import param_specs

Names = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class LogicalAxes:
    """The logical name of each dim letter of the parameters; None gives a dim no name.

    These are the dims of each parameter, and their names by default:

        router                      H E        ("embed", None)
        router_bias, logits_bias    E          (None,)
        expert_scale                E          (None,)
        wi                          E H G F    ("exp", "embed", None, "mlp")
        wo                          E F H      ("exp", "mlp", "embed")
        bi                          E G F      ("exp", None, "mlp")
        bo                          E H        ("exp", "embed")
        shared_wi                   H G S      ("embed", None, "mlp")
        shared_wo                   S H        ("mlp", "embed")
        shared_gate                 H          ("embed",)

    Attributes:
      E: the experts. The E of the router, of its biases and scales has no name, because every device needs all logits.
      H: the model width.
      F: the expert width.
      G: gate and up, a dim of size 2 or 1.
      S: the width of the shared expert.

    Raises:
      ValueError: a field is neither a name nor None, or two dims of one parameter have the same name.
    """

    E: str | None = "exp"
    H: str | None = "embed"
    F: str | None = "mlp"
    G: str | None = None
    S: str | None = "mlp"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            name = getattr(self, field.name)
            if name is not None and not isinstance(name, str):
                raise ValueError(f"LogicalAxes: {field.name}={name!r} must be a name or None")
        for param in DIMS:
            named = [name for name in self.names(param) if name is not None]
            if len(set(named)) < len(named):
                raise ValueError(f"LogicalAxes: {param} has the names {named}; each dim needs a name of its own")

    def names(self, param: str) -> Names:
        """Returns the names of the dims of a parameter: `names("wo")` is `("exp", "mlp", "embed")`."""
        return tuple(None if n == "E" and param in ROUTER else getattr(self, n) for n in DIMS[param])


def named_params(config: MoEConfig, logical: LogicalAxes) -> MoEParams[Names]:
    """Returns the logical names of the dims of every parameter that `init` makes."""
    made = param_shapes(config)
    return params_by_name({name: None if getattr(made, name) is None else logical.names(name) for name in DIMS})


def find_layout(
    config: MoEConfig, axes: Axes, logical: LogicalAxes | None, rules: Sequence[Any], to_mesh_axes: Callable
) -> MoEParams[Any] | None:
    """Returns the PartitionSpec of every parameter that a layer makes; None where no mesh is in force.

    Logical names decide where a rule maps one of them, or where one of them is a mesh axis by itself. The layout is
    that of `param_specs` otherwise.

    Args:
      config: the sizes of the block.
      axes: the role of each mesh axis.
      logical: the logical names; None for none.
      rules: the rules in force, pairs (logical name, mesh axes).
      to_mesh_axes: to_mesh_axes(names, rules) -> PartitionSpec, which is `flax.linen.logical_to_mesh_axes`.

    Raises:
      ValueError: as `param_specs`; or logical names decide, and one of them has no rule and is no mesh axis.
    """
    mesh = mesh_sizes()
    if not mesh:
        return None
    default, ruled = param_specs(config, axes), {rule[0] for rule in rules}
    if logical is None or not any(name in ruled or name in mesh for name in dataclasses.astuple(logical)):
        return default
    rules = (*rules, *((name, name) for name in mesh if name not in ruled))
    named, specs = named_params(config, logical), {}
    for param in DIMS:
        names = getattr(named, param)
        for name in names or ():
            if name is not None and name not in ruled and name not in mesh:
                raise ValueError(
                    f"logical_axes: {name!r} of params.{param} has no rule, and is no axis of the mesh {tuple(mesh)}; "
                    f"add a rule, for example ({name!r}, None), or name the dim None"
                )
        specs[param] = None if names is None else to_mesh_axes(names, rules)
    return params_by_name(specs)
