"""Where arrays lie: the algebra of specs, and the PartitionSpec of every array. `partition.py` runs ops on them.

Specs are values, computed from axis names and sizes; size-1 and absent axes have vanished in `Axes.on` before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from moax.axes import Axes, Names, Roles, as_names
from moax.config import MoEConfig
from moax.types import MoEParams, full_shapes, param_shapes, params_of

Spec = PartitionSpec

# The algebra of specs.


def spec(*entries) -> PartitionSpec:
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


def mesh_sizes(mesh=None) -> dict[str, int]:
    """Axis sizes of `mesh`, or of the mesh in force (`jax.set_mesh`, or an enclosing `shard_map`); {} for none."""
    return dict((mesh or jax.sharding.get_abstract_mesh()).shape)


def mesh_of(*arrays):
    """The mesh in force, else the one in an array's type; None where there is neither."""
    meshes = [jax.sharding.get_abstract_mesh()] + [jax.typeof(a).sharding.mesh for a in arrays]
    return next((m for m in meshes if not m.empty), None)


def device_spec(roles: Roles) -> PartitionSpec:
    """Of values that belong to one device each: the leading dim over every axis."""
    return spec(roles.all)


def token_spec(axes: Axes, ndim: int = 2, mesh=None) -> PartitionSpec:
    """Of tokens [T, ...] of `ndim` dims: the leading dim over (dp, fsdp, ep)."""
    return spec(axes.on(mesh_sizes(mesh)).tokens, *[None] * (ndim - 1))


def dense_spec_on(roles: Roles, shape: Sequence[int]) -> PartitionSpec:
    """`dense_spec` on a mesh of these roles."""
    for names in (roles.fsdp + roles.ep, roles.fsdp):
        for dim, size in enumerate(shape):
            if names and size % roles.size(names) == 0:
                return spec(*[()] * dim, names, *[()] * (len(shape) - dim - 1))
    return spec(*[()] * len(shape))


def dense_spec(axes: Axes, shape: Sequence[int], mesh=None) -> PartitionSpec:
    """Of a dense weight: over (fsdp, ep) on the first dim they divide; else over fsdp alone; else whole."""
    return dense_spec_on(axes.on(mesh_sizes(mesh)), shape)


def local_shape(shape: Sequence[int], of: PartitionSpec, roles: Roles) -> tuple[int, ...]:
    """The shape of one device's shard; a dim that does not divide is rounded up."""
    return tuple(-(-n // roles.size(names)) for n, names in zip(shape, pad(of, len(shape)), strict=True))


def expert_specs(config: MoEConfig, axes: Axes, roles: Roles, *, checked: bool = True) -> Any:
    """The spec of each parameter, expert biases included whether or not `init` makes them; sizes checked."""
    c, ep, tp = config, roles.ep, roles.tp
    whole = c.num_experts % roles.size(ep + roles.fsdp) == 0
    by_experts = axes.fsdp_dim == "experts" or (axes.fsdp_dim == "auto" and whole)
    experts, model = (ep + roles.fsdp, ()) if by_experts else (ep, roles.fsdp)
    shared = dense_spec_on(roles, (c.d_model,))[0]
    specs = params_of(
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


def shard_specs(params: MoEParams, config: MoEConfig, axes: Axes, roles: Roles) -> Any:
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
    return params_of(**found)


def param_specs(config: MoEConfig, axes: Axes = Axes(), mesh=None) -> MoEParams:
    """The PartitionSpec of every parameter that `init` makes, on `mesh` (None: the one in force).

    Raises ValueError where there is no mesh, or a dim does not divide by its mesh axes.
    """
    sizes = mesh_sizes(mesh)
    if not sizes:
        raise ValueError("param_specs: no mesh; pass mesh=, or call it under `with jax.set_mesh(mesh)`")
    specs, made = expert_specs(config, axes, axes.on(sizes)), param_shapes(config)
    names = [f.name for f in dataclasses.fields(MoEParams)]
    return params_of(**{n: getattr(specs, n) if getattr(made, n) is not None else None for n in names})


def named(mesh, specs: Any) -> Any:
    """A tree of specs as a tree of NamedShardings on `mesh`."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs)


def constrain(x, to: PartitionSpec):
    """`x` laid out by `to` on the mesh in force, whatever the type of its axes; `x` itself where there is none."""
    mesh = mesh_of(x)
    if mesh is None or any(t == AxisType.Manual for t in mesh.axis_types):
        return x
    if is_explicit(mesh):
        return jax.sharding.reshard(x, NamedSharding(mesh, to))
    in_force = not jax.sharding.get_abstract_mesh().empty
    return lax.with_sharding_constraint(x, to if in_force else NamedSharding(mesh, to))


def keep_rows(y, roles: Roles):
    """Rows over the token axes of an Auto mesh, and other dims as propagation has them."""
    return constrain(y, PartitionSpec(roles.tokens, *[PartitionSpec.UNCONSTRAINED] * (y.ndim - 1)))


def lay_out(params: MoEParams, declared: MoEParams) -> MoEParams:
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


def make_sharded(make: Callable, specs: Any) -> Callable:
    """`make` with its results laid out by `specs` on the mesh in force, each device making its shards alone; None: by
    no mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if specs is None or any(kind == AxisType.Manual for kind in mesh.axis_types):
        return make
    # Specs, not NamedShardings on the abstract mesh: vmap adds a dim to those that replicates the whole.
    if is_explicit(mesh):
        return jax.jit(jax.sharding.auto_axes(make, out_sharding=specs))
    return jax.jit(make, out_shardings=specs)


def like(y, x):
    """`y` with the sharding that the type of `x` states; `y` itself unless mesh axes are Explicit."""
    of = jax.typeof(x).sharding
    return jax.sharding.reshard(y, of) if is_explicit(of.mesh) else y


def check_token_axes(x, axes: Axes) -> None:
    """Raises ValueError where the type of x [..., H] splits its tokens over a mesh axis that has no role in `axes`."""
    of = jax.typeof(x).sharding
    for dim, names in enumerate(pad(of.spec, x.ndim)[:-1]):
        for name in names:
            if name not in axes.names and of.mesh.shape[name] > 1:
                raise ValueError(
                    f"x: dim {dim} is sharded over mesh axis {name!r}, which has no role in {axes}; "
                    f"give it one, such as Axes(dp={(*axes.dp, name)})"
                )


def flatten_tokens(x, roles: Roles):
    """[..., H] -> [T, H]; on Explicit axes T typed as over `roles.tokens` where they divide it."""
    mesh = mesh_of(x)
    if mesh is None or not is_explicit(mesh):
        return x.reshape(-1, x.shape[-1])
    columns = tuple(n for n in pad(jax.typeof(x).sharding.spec, x.ndim)[-1] if n not in roles.tokens)

    def over_tokens(x):
        rows = roles.tokens if x.shape[0] % roles.size(roles.tokens) == 0 else ()
        return jax.sharding.reshard(x, NamedSharding(mesh, spec(rows, *[None] * (x.ndim - 2), columns)))

    return over_tokens(over_tokens(x).reshape(-1, x.shape[-1]))


def unflatten_tokens(y, x, roles: Roles):
    """[T, *C] -> [..., *C], leading dims and their sharding as those of x [..., H]."""
    columns = y.shape[1:]
    mesh = mesh_of(x)
    if mesh is None or not is_explicit(mesh):
        return y.reshape(*x.shape[:-1], *columns)
    over = tuple(jax.typeof(y).sharding.spec)
    divides = x.ndim == 2 or x.shape[0] % roles.size(roles.tokens) == 0
    y = y if divides else jax.sharding.reshard(y, NamedSharding(mesh, spec(None, *over[1:])))
    leading = tuple(jax.typeof(x).sharding.spec)[: x.ndim - 1]
    return jax.sharding.reshard(y.reshape(*x.shape[:-1], *columns), NamedSharding(mesh, spec(*leading, *over[1:])))


def is_explicit(mesh) -> bool:
    """Whether any axis of the mesh is Explicit."""
    return any(kind == AxisType.Explicit for kind in mesh.axis_types)
