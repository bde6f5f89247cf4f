"""The PartitionSpec of every array of a block; `mesh/specs.py` has the algebra of specs.

Specs are computed from axis names and sizes alone. `Axes.on` has dropped axes of size 1 and absent axes before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from moax.config import MoEConfig
from moax.mesh.axes import Axes, Roles
from moax.mesh.place import constrain
from moax.mesh.specs import (
    AnyMesh,
    check_divides,
    find_roles,
    is_explicit,
    local_shape,
    mesh_in_force,
    mesh_of,
    pad,
    spec,
)
from moax.params import MoEParams, full_shapes, param_shapes, params_by_name


def token_spec(axes: Axes, ndim: int = 2, mesh: AnyMesh | None = None) -> PartitionSpec:
    """Returns the spec of tokens [T, ...] of `ndim` dims: T lies over (dp, fsdp, ep, cp).

    Tokens [B, ..., S, H] have B over (dp, fsdp, ep) and S over cp, or as `axes.tokens` says.

    Args:
      axes: the role of each mesh axis.
      ndim: the number of dims.
      mesh: the mesh; None means the mesh in force.
    """
    return spec(*find_roles(axes, mesh).over(max(1, ndim - 1)), *[None] * min(1, ndim - 1))


def dense_spec_on(roles: Roles, shape: Sequence[int]) -> PartitionSpec:
    """Returns `dense_spec` for the axes of `roles`."""
    for names in (roles.fsdp + roles.ep, roles.fsdp):
        for dim, size in enumerate(shape):
            if names and size % roles.size(names) == 0:
                return spec(*[()] * dim, names, *[()] * (len(shape) - dim - 1))
    return spec(*[()] * len(shape))


def dense_spec(axes: Axes, shape: Sequence[int], mesh: AnyMesh | None = None) -> PartitionSpec:
    """Returns the spec of a dense weight of this shape.

    The first dim that (fsdp, ep) divide lies over them. If they divide no dim, the first dim that fsdp divides lies
    over fsdp. If fsdp divides no dim either, the weight is replicated. With fsdp=4 and ep=2, the shape (12, 16) gives
    PartitionSpec(None, ("fsdp", "ep")).

    Args:
      axes: the role of each mesh axis.
      shape: the shape of the whole weight.
      mesh: the mesh; None means the mesh in force.
    """
    return dense_spec_on(find_roles(axes, mesh), shape)


def expert_specs(config: MoEConfig, axes: Axes, roles: Roles, *, checked: bool = True) -> MoEParams[PartitionSpec]:
    """Returns the spec of each parameter of a block, as a MoEParams. Expert biases have a spec even where `init` makes
    none.

    Args:
      config: the sizes of the block.
      axes: the role of each mesh axis.
      roles: the axes of the mesh by role.
      checked: whether to raise where a size does not divide.

    Raises:
      ValueError: `checked` is set, and the mesh axes of a dim do not divide its size.
    """
    c, ep, tp = config, roles.ep, roles.tp
    whole = c.num_experts % roles.size(ep + roles.fsdp) == 0
    by_experts = axes.fsdp_dim == "experts" or (axes.fsdp_dim == "auto" and whole)
    experts, model = (ep + roles.fsdp, ()) if by_experts else (ep, roles.fsdp)
    shared = dense_spec_on(roles, (c.d_model,))[0]
    specs = MoEParams(
        router=spec(None, None),
        wi=spec(experts, model, None, tp),
        wo=spec(experts, tp, model),
        router_bias=spec(None),
        logits_bias=spec(None),
        bi=spec(ep, None, tp),
        bo=spec(ep, None),
        shared_wi=spec(shared, None, tp),
        shared_wo=spec(tp, shared),
        shared_gate=spec(None),
        expert_scale=spec(None),
    )
    for field in dataclasses.fields(MoEParams):
        shape = getattr(full_shapes(c), field.name)
        if shape is not None and checked:
            check_divides(f"params.{field.name}", shape, getattr(specs, field.name), roles)
    return specs


def shard_specs(params: MoEParams[Array], config: MoEConfig, axes: Axes, roles: Roles) -> MoEParams[PartitionSpec]:
    """Returns the spec of each parameter inside a `shard_map` of the caller, where only the shapes of the shards are
    known.

    The experts of a shard lie over ep and F lies over tp. The shape then shows whether fsdp splits the experts, H, or
    no dim. With E = 8, ep=2 and fsdp=2, a `wi` of 2 experts is split by both axes, and a `wi` of 4 experts by ep alone.

    Raises:
      ValueError: no such layout has shards of the shape of a parameter.
    """
    whole = dataclasses.replace(roles, fsdp=())
    layouts = [
        expert_specs(config, dataclasses.replace(axes, fsdp_dim=dim), r, checked=False)
        for r in (roles, whole, dataclasses.replace(whole, ep=()))
        for dim in ("experts", "model")
    ]
    specs_by_name = {}
    for field in dataclasses.fields(MoEParams):
        name, shape = field.name, getattr(full_shapes(config), field.name)
        have = None if getattr(params, name) is None else tuple(getattr(params, name).shape)
        specs = [getattr(layout, name) for layout in layouts]
        if name.startswith("w") or name.startswith("b"):
            specs = specs[:4]  # the experts are over ep in the first four layouts
        fits = [s for s in specs if shape is not None and have == local_shape(shape, s, roles)]
        if have is not None and not fits:
            wanted = sorted({str(local_shape(shape, s, roles)) for s in specs})
            raise ValueError(f"params.{name} has shape {have} inside the shard_map; a shard has {' or '.join(wanted)}")
        specs_by_name[name] = fits[0] if fits else None
    return params_by_name(specs_by_name)


def param_specs(config: MoEConfig, axes: Axes = Axes(), mesh: AnyMesh | None = None) -> MoEParams[PartitionSpec]:
    """Returns the PartitionSpec of every parameter that `init` makes.

    Args:
      config: the sizes of the block.
      axes: the role of each mesh axis.
      mesh: the mesh; None means the mesh in force (`jax.set_mesh`).

    Returns:
      A MoEParams of specs; None where the config has no such parameter.

    Raises:
      ValueError: there is no mesh, a mesh axis of more than one device has no role, or the mesh axes of a dim do not
        divide its size.
    """
    if mesh is None and mesh_in_force() is None:
        raise ValueError("param_specs: no mesh; pass mesh=, or call it under `with jax.set_mesh(mesh)`")
    specs, made = expert_specs(config, axes, find_roles(axes, mesh)), param_shapes(config)
    names = [f.name for f in dataclasses.fields(MoEParams)]
    return params_by_name({n: getattr(specs, n) if getattr(made, n) is not None else None for n in names})


def lay_out(params: MoEParams[Array], declared: MoEParams[PartitionSpec]) -> MoEParams[Array]:
    """Returns the parameters, with the declared layout for those without one where mesh axes are Explicit.

    A parameter has no layout if its type names no mesh axis: it was made without the mesh.
    """
    mesh = mesh_of(*jax.tree.leaves(params))
    if mesh is None or not is_explicit(mesh):
        return params
    values = {f.name: getattr(params, f.name) for f in dataclasses.fields(MoEParams)}
    moved = {
        name: constrain(p, getattr(declared, name))
        for name, p in values.items()
        if p is not None and not any(pad(jax.typeof(p).sharding.spec, p.ndim))
    }
    return dataclasses.replace(params, **moved)
