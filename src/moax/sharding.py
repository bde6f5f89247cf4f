"""The PartitionSpec of every array of a block; `mesh/specs.py` has the algebra of specs.

Specs are values, computed from axis names and sizes; size-1 and absent axes have vanished in `Axes.on` before.
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
from moax.mesh.specs import AnyMesh, check_divides, is_explicit, local_shape, mesh_of, mesh_sizes, pad, spec
from moax.params import MoEParams, full_shapes, param_shapes, params_by_name


def token_spec(axes: Axes, ndim: int = 2, mesh: AnyMesh | None = None) -> PartitionSpec:
    """Of tokens [T, ...] of `ndim` dims: the leading dim over (dp, fsdp, ep)."""
    return spec(axes.on(mesh_sizes(mesh)).tokens, *[None] * (ndim - 1))


def dense_spec_on(roles: Roles, shape: Sequence[int]) -> PartitionSpec:
    """`dense_spec` on a mesh of these roles."""
    for names in (roles.fsdp + roles.ep, roles.fsdp):
        for dim, size in enumerate(shape):
            if names and size % roles.size(names) == 0:
                return spec(*[()] * dim, names, *[()] * (len(shape) - dim - 1))
    return spec(*[()] * len(shape))


def dense_spec(axes: Axes, shape: Sequence[int], mesh: AnyMesh | None = None) -> PartitionSpec:
    """Of a dense weight: over (fsdp, ep) on the first dim they divide; else over fsdp alone; else whole."""
    return dense_spec_on(axes.on(mesh_sizes(mesh)), shape)


def expert_specs(config: MoEConfig, axes: Axes, roles: Roles, *, checked: bool = True) -> MoEParams[PartitionSpec]:
    """The spec of each parameter, expert biases included whether or not `init` makes them; sizes checked."""
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
    )
    for field in dataclasses.fields(MoEParams):
        shape = getattr(full_shapes(c), field.name)
        if shape is not None and checked:
            check_divides(f"params.{field.name}", shape, getattr(specs, field.name), roles)
    return specs


def shard_specs(params: MoEParams[Array], config: MoEConfig, axes: Axes, roles: Roles) -> MoEParams[PartitionSpec]:
    """How the shards that a caller's own `shard_map` passed lie, found by their shapes: experts over ep, F over tp,
    and fsdp on experts, on H, or on nothing.

    Raises ValueError for a shape that is none of these.
    """
    whole = dataclasses.replace(roles, fsdp=())
    layouts = [
        expert_specs(config, dataclasses.replace(axes, fsdp_dim=dim), r, checked=False)
        for r in (roles, whole, dataclasses.replace(whole, ep=()))
        for dim in ("experts", "model")
    ]
    found = {}
    for field in dataclasses.fields(MoEParams):
        name, shape = field.name, getattr(full_shapes(config), field.name)
        have = None if getattr(params, name) is None else tuple(getattr(params, name).shape)
        specs = [getattr(layout, name) for layout in layouts]
        if name.startswith("w") or name.startswith("b"):
            specs = specs[:4]  # experts are over ep, whatever else
        fits = [s for s in specs if shape is not None and have == local_shape(shape, s, roles)]
        if have is not None and not fits:
            wanted = sorted({str(local_shape(shape, s, roles)) for s in specs})
            raise ValueError(f"params.{name} has shape {have} inside the shard_map; a shard has {' or '.join(wanted)}")
        found[name] = fits[0] if fits else None
    return params_by_name(found)


def param_specs(config: MoEConfig, axes: Axes = Axes(), mesh: AnyMesh | None = None) -> MoEParams[PartitionSpec]:
    """The PartitionSpec of every parameter that `init` makes, on `mesh` (None: the one in force).

    Raises ValueError where there is no mesh, or a dim does not divide by its mesh axes.
    """
    sizes = mesh_sizes(mesh)
    if not sizes:
        raise ValueError("param_specs: no mesh; pass mesh=, or call it under `with jax.set_mesh(mesh)`")
    specs, made = expert_specs(config, axes, axes.on(sizes)), param_shapes(config)
    names = [f.name for f in dataclasses.fields(MoEParams)]
    return params_by_name({n: getattr(specs, n) if getattr(made, n) is not None else None for n in names})


def lay_out(params: MoEParams[Array], declared: MoEParams[PartitionSpec]) -> MoEParams[Array]:
    """Parameters laid out as declared where axes are Explicit and their types name none: they were made elsewhere."""
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
