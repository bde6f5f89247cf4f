"""The PartitionSpec of every array of a block; `mesh/specs.py` has the algebra of specs.

Specs are computed from axis names and sizes alone. `Axes.resolve` has dropped axes of size 1 and absent axes before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

from moax.config import MoEConfig
from moax.mesh.axes import Axes, ResolvedAxes
from moax.mesh.specs import AnyMesh, Spec, check_divides, constrain, local_shape, mesh_in_force, named, resolve_axes
from moax.params import BY_EXPERT, DIMS, MoEParams, param_shapes


def token_spec(axes: Axes, ndim: int = 2, mesh: AnyMesh | None = None) -> PartitionSpec:
    """Returns the spec of tokens [T, ...] of `ndim` dims, with T over (dp, fsdp, ep, cp).

    Tokens [B, ..., S, H] have B over (dp, fsdp, ep) and S over cp, or as `axes.tokens` says. `mesh` None means the mesh
    in force.
    """
    return Spec(*resolve_axes(axes, mesh).over(max(1, ndim - 1)), *[None] * min(1, ndim - 1))


def operand_shapes(
    config: MoEConfig, tokens: int, axes: Axes, mesh: AnyMesh, dtype: Any, param_dtype: Any
) -> tuple[MoEParams[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    """Returns the parameters and x [tokens, H] of a block on a mesh as shapes, with the shardings that it declares.

    Raises:
      ValueError: the mesh axes of a dim do not divide its size.
    """
    spec, shape = token_spec(axes, 2, mesh), (tokens, config.d_model)
    check_divides("tokens", shape, spec, resolve_axes(axes, mesh))
    at, shapes = named(mesh, param_specs(config, axes, mesh)), param_shapes(config)
    params = jax.tree.map(lambda place, of: jax.ShapeDtypeStruct(of, param_dtype, sharding=place), at, shapes)
    return params, jax.ShapeDtypeStruct(shape, dtype, sharding=named(mesh, spec))


def dense_spec_on(resolved: ResolvedAxes, shape: Sequence[int]) -> PartitionSpec:
    """Returns `dense_spec` for resolved axes."""
    for names in (resolved.fsdp + resolved.ep, resolved.fsdp):
        for dim, size in enumerate(shape):
            if names and size % resolved.size(names) == 0:
                return Spec(*[()] * dim, names, *[()] * (len(shape) - dim - 1))
    return Spec(*[()] * len(shape))


def dense_spec(axes: Axes, shape: Sequence[int], mesh: AnyMesh | None = None) -> PartitionSpec:
    """Returns the spec of a dense weight of this shape; `mesh` None means the mesh in force.

    (fsdp, ep) split the first dim that they divide, or else fsdp splits the first dim that it divides, or else the
    weight is replicated. With fsdp=4 and ep=2, the shape (12, 16) gives PartitionSpec(None, ("fsdp", "ep")).
    """
    return dense_spec_on(resolve_axes(axes, mesh), shape)


def expert_specs(config: MoEConfig, axes: Axes, resolved: ResolvedAxes) -> MoEParams[PartitionSpec]:
    """Returns the spec of each parameter of a block. Expert biases have a spec even where `init` makes none.

    Raises:
      ValueError: the mesh axes of a dim do not divide its size.
    """
    specs, shapes = _lay_out(config, axes, resolved), param_shapes(config, optional=True)
    for name in DIMS:
        shape = getattr(shapes, name)
        if shape is not None:
            check_divides(f"params.{name}", shape, getattr(specs, name), resolved)
    return specs


def _lay_out(config: MoEConfig, axes: Axes, resolved: ResolvedAxes) -> MoEParams[PartitionSpec]:
    """Returns `expert_specs`, whether or not the mesh axes of a dim divide its size."""
    c, ep, tp = config, resolved.ep, resolved.tp
    whole = c.num_experts % resolved.size(ep + resolved.fsdp) == 0
    by_experts = axes.fsdp_dim == "experts" or (axes.fsdp_dim == "auto" and whole)
    experts, model = (ep + resolved.fsdp, ()) if by_experts else (ep, resolved.fsdp)
    shared = dense_spec_on(resolved, (c.d_model,))[0]
    return MoEParams(
        router=Spec(None, None),
        wi=Spec(experts, model, None, tp),
        wo=Spec(experts, tp, model),
        router_bias=Spec(None),
        logits_bias=Spec(None),
        bi=Spec(ep, None, tp),
        bo=Spec(ep, None),
        shared_wi=Spec(shared, None, tp),
        shared_wo=Spec(tp, shared),
        shared_gate=Spec(None),
        expert_scale=Spec(None),
        latent_down=dense_spec_on(resolved, (c.d_model, c.d_rows)),
        latent_up=dense_spec_on(resolved, (c.d_rows, c.d_model)),
    )


def shard_specs(
    params: MoEParams[Array], config: MoEConfig, axes: Axes, resolved: ResolvedAxes
) -> MoEParams[PartitionSpec]:
    """Returns the spec of each parameter inside a `shard_map` of the caller, who knows the shapes of the shards alone.

    ep splits the experts and tp splits F. The shape of a shard then shows whether fsdp splits the experts, H, or
    no dim. With E = 8, ep=2 and fsdp=2, a `wi` of 2 experts is split by both axes, and a `wi` of 4 experts by ep alone.

    Raises:
      ValueError: no such layout has shards of the shape of a parameter.
    """
    whole = dataclasses.replace(resolved, fsdp=())
    layouts = [
        _lay_out(config, dataclasses.replace(axes, fsdp_dim=dim), r)
        for r in (resolved, whole, dataclasses.replace(whole, ep=()))
        for dim in ("experts", "model")
    ]
    shapes = param_shapes(config, optional=True)
    found: dict[str, Any] = dict.fromkeys(DIMS)
    for name in DIMS:
        shape, shard = getattr(shapes, name), getattr(params, name)
        if shard is None:
            continue
        # The experts are over ep in the first four layouts.
        specs = [getattr(layout, name) for layout in layouts[: 4 if name in BY_EXPERT else 6]]
        shards = [local_shape(shape, s, resolved) for s in specs]
        if shard.shape not in shards:
            wanted = " or ".join(sorted(set(map(str, shards))))
            raise ValueError(f"params.{name} has shape {shard.shape} inside the shard_map; a shard has {wanted}")
        found[name] = specs[shards.index(shard.shape)]
    return MoEParams(**found)


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
    specs, made = expert_specs(config, axes, resolve_axes(axes, mesh)), param_shapes(config)
    found: dict[str, Any] = {n: None if getattr(made, n) is None else getattr(specs, n) for n in DIMS}
    return MoEParams(**found)


def reshard_params(params: MoEParams[Array], declared: MoEParams[PartitionSpec]) -> MoEParams[Array]:
    """Returns the parameters, resharded as declared where axes are Explicit and the type of a parameter names none."""
    mesh = mesh_in_force(*jax.tree.leaves(params))
    if mesh is None or not mesh.explicit_axes:
        return params

    def move(p, to):
        return p if p is None or any(jax.typeof(p).sharding.spec) else constrain(p, to)

    moved: dict[str, Any] = {n: move(getattr(params, n), getattr(declared, n)) for n in DIMS}
    return MoEParams(**moved)
