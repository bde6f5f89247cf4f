"""`LogicalAxes` names the dims of the parameters for the logical axis rules of Flax.

A rule maps a logical name to mesh axes: with the rules (("exp", "expert"), ("embed", "fsdp"), ("mlp", "tensor")) `wi`,
whose dims have the names ("exp", "embed", None, "mlp"), has PartitionSpec("expert", "fsdp", None, "tensor").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from moax.config import MoEConfig
from moax.mesh.axes import Axes
from moax.mesh.specs import Spec, manual_axes, mesh_in_force, mesh_sizes
from moax.params import DIMS, ROUTER, MoEParams, param_shapes, params_by_name
from moax.sharding import dense_spec, param_specs

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
        latent_down                 H L        ("embed", None)
        latent_up                   L H        (None, "embed")

    Attributes:
      E: the experts. The E of the router, of its biases and scales has no name, because every device needs all logits.
      H: the model width. The rows of latent experts, whose wi, wo and bo have L for H, have its name too.
      F: the expert width.
      G: gate and up, a dim of size 2 or 1.
      S: the width of the shared expert.
      L: the width of latent experts, in their two projections.

    Raises:
      ValueError: a field is neither a name nor None, or two dims of one parameter have the same name.
    """

    E: str | None = "exp"
    H: str | None = "embed"
    F: str | None = "mlp"
    G: str | None = None
    S: str | None = "mlp"
    L: str | None = None

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

    Logical names decide if one of them has a rule (logical name, mesh axes) or is a mesh axis; else `param_specs` does.
    `to_mesh_axes` is `flax.linen.logical_to_mesh_axes`.
    """
    if mesh_in_force() is None:
        return None
    default = param_specs(config, axes)
    if logical is None or not _decide(dataclasses.astuple(logical), rules):
        return default
    named = named_params(config, logical)
    specs = {name: _find_spec(f"params.{name}", getattr(named, name), rules, to_mesh_axes) for name in DIMS}
    return params_by_name(specs)


def find_dense_layout(
    shape: Sequence[int], axes: Axes, logical: Names | None, rules: Sequence[Any], to_mesh_axes: Callable
) -> tuple[Spec, Spec] | None:
    """Returns the specs of the kernel [K, C] and the bias [C] of a dense layer; None without mesh or in a `shard_map`.

    Logical names decide as in `find_layout`; else the kernel has `dense_spec`, and the bias is replicated.
    """
    mesh = mesh_in_force()
    if mesh is None or manual_axes(mesh):
        return None
    if logical is None or not _decide(logical, rules):
        return dense_spec(axes, shape), Spec(None)
    kernel = _find_spec("kernel", logical, rules, to_mesh_axes)
    return kernel, _find_spec("bias", logical[1:], rules, to_mesh_axes)


def check_dense_names(logical: Any) -> None:
    """Raises ValueError unless `logical` is None or two logical names, each a string or None."""
    if logical is None:
        return
    if not isinstance(logical, tuple) or len(logical) != 2 or any(not isinstance(n, str | None) for n in logical):
        raise ValueError(f"logical_axes={logical!r} must be the names of two dims, such as ('embed', 'mlp'), or None")


def _decide(names: Names, rules: Sequence[Any]) -> bool:
    """Returns whether one of the logical names has a rule or is an axis of the mesh in force."""
    return not {rule[0] for rule in rules}.union(mesh_sizes()).isdisjoint(names)


def _find_spec(what: str, names: Names | None, rules: Sequence[Any], to_mesh_axes: Callable) -> Any:
    """Returns the PartitionSpec of the array `what`; a name without a rule maps to the mesh axis of this name."""
    if names is None:
        return None
    mesh, ruled = mesh_sizes(), {rule[0] for rule in rules}
    for name in names:
        if not (name is None or name in ruled or name in mesh):
            raise ValueError(
                f"logical_axes: {name!r} of {what} has no rule, and is no axis of the mesh {tuple(mesh)}; "
                f"add a rule, for example ({name!r}, None), or name the dim None"
            )
    return to_mesh_axes(names, (*rules, *((name, name) for name in mesh if name not in ruled)))
