"""The mesh in force, how ops run on it, the specs of arrays on it, and the rows [T, H] of tokens [B, S, H].

A PartitionSpec says over which mesh axes each dim of an array is split. Specs are computed from axis names and sizes
alone; `Axes.resolve` has dropped axes of size 1 and absent axes before. `MeshView` says how ops run on the mesh in
force. The kind of the mesh axes decides the engine:

| mesh axes are            | engine                                                                            |
|--------------------------|-----------------------------------------------------------------------------------|
| absent, or all of size 1 | the local function runs on the operands                                           |
| Auto                     | `custom_partitioning`, or `shard_map` where the caller names it                    |
| Explicit                 | `shard_map` (`custom_partitioning` fails there: jax-ml/jax#34811)                  |
| Manual, all of them      | the local function; the caller sums over axes that split no dim of a result       |
| Manual, others alone     | `shard_map` over the axes that are not Manual                                     |

Mesh axes split tokens by their leading dims: B of x [B, S, H] over some axes and S over others. The ops take rows
[T, H]: each device flattens its shard [B/b, S/s, H] to T/(b s) rows, so that no row leaves its device. Where an axis
splits S, the rows of the whole array have another order than a plain reshape gives. In a block only the tokens that a
capacity drops depend on this order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree, Shaped

from moax.checks import Unsupported, check_value
from moax.mesh.axes import AnyMesh, Axes, Names, ResolvedAxes, as_names
from moax.mesh.collectives import reduce_max, varying

Spec = PartitionSpec  # Spec(("fsdp", "ep"), (), ("tp",)) is Spec(("fsdp", "ep"), None, "tp")
FREE = Spec.UNCONSTRAINED  # XLA chooses the layout of the dim

Engine = Literal["auto", "custom_partitioning", "shard_map"]
ENGINES = get_args(Engine)


class WholeWeight(ValueError):
    """A weight is not sharded, although mesh axes must split it."""

    WARNING = (
        "the declared layout is used for weights that every device of the mesh holds whole, and "
        "so are their gradients and the state of an optimizer: they were made outside of "
        "jax.set_mesh. Make the layer, or call moax.init, under `with jax.set_mesh(mesh):`, or "
        "move the parameters to the layout of moax.param_specs by jax.device_put"
    )


class MeshView(NamedTuple):
    """How ops run on the mesh in force.

    Attributes:
      axes: the mesh axes of more than one device, by role.
      engine: the way from global arrays to shards; `local` calls the local function on the operands as they are.
      manual: whether the caller is inside a `shard_map` over all of `axes`. The operands are then shards, and the
        caller sums over axes that split no dim of a result, as it does for `jnp.dot`.
      explicit: whether an axis of the mesh is Explicit, and ops see global arrays.
      mesh: the mesh in force, or else in the type of an operand; None without one.
      dims: the axes over each leading dim of the tokens x [..., H] of `find_token_dims`; None where the axes do not
        divide the dims.
    """

    axes: ResolvedAxes
    engine: Literal["local", "custom_partitioning", "shard_map"]
    manual: bool = False
    explicit: bool = False
    mesh: Any = None
    dims: tuple[Names, ...] | None = ()

    def psum(self, x: Array, names: Names) -> Array:
        """Sums x over `names` inside a `shard_map`, where an op leaves this sum to its caller; elsewhere returns x."""
        if not self.manual:
            return x
        names = names + self._size_one_axes(x)
        if not names:
            return x
        return lax.psum(x, names)

    def assume_replicated(self, x: Array, names: Names) -> Array:
        """Returns x, which is equal on all devices along `names`, with a type that says so inside a `shard_map`."""
        if not self.manual:
            return x
        names = names + self._size_one_axes(x)
        varying_names = tuple(name for name in names if name in varying(x))
        return reduce_max(x, varying_names or names)  # JAX refuses varying axes beside others

    def _size_one_axes(self, x) -> Names:
        """Returns the axes of size 1 over which the type of x varies; its values cannot vary along one device."""
        return tuple(n for n in sorted(varying(x)) if self.mesh.shape[n] == 1)


def find_mesh_view(axes: Axes, engine: Engine, *operands: PyTree) -> MeshView:
    """Returns the view of the mesh in force for an op on `operands`.

    Args:
      axes: the role of each mesh axis.
      engine: see `moax.Options`.
      *operands: trees of arrays. Their types name the mesh where none is in force.

    Raises:
      ValueError: the engine is unknown, a mesh axis of more than one device has no role, some axes are Auto and others
        Explicit, an operand is of another mesh, or some axes that `axes` names are Manual and others are not.
      Unsupported: this mesh cannot run the engine, or a vmap goes over a dim that Explicit axes split.
    """
    check_value("engine", engine, ENGINES)
    check_value("axes", axes, Axes)
    mesh = mesh_in_force(*jax.tree.leaves(operands))
    if mesh is None:
        return MeshView(ResolvedAxes(), "local")
    resolved = axes.resolve(mesh)
    explicit = bool(mesh.explicit_axes)
    if explicit:
        _check_vmap()
    manual = mesh.manual_axes
    inside = [n for n in resolved.all if n in manual]
    outside = [n for n in resolved.all if n not in manual]
    if manual and not outside and (inside or not explicit):
        return MeshView(resolved, "local", manual=True, mesh=mesh)
    if inside:
        raise ValueError(
            f"mesh axes {inside} are Manual (inside a shard_map) but {outside} are not; take all "
            "of them, or none, into the shard_map's axis_names"
        )
    if not outside and not explicit:
        return MeshView(resolved, "local", mesh=mesh)
    _check_meshes(mesh, jax.tree.leaves(operands))
    if engine == "custom_partitioning" and (explicit or manual):
        kind = f"axes {sorted(manual)} are Manual" if manual else "axes are Explicit"
        raise Unsupported(f"engine='custom_partitioning' cannot run on this mesh: {kind}; use 'auto' or 'shard_map'")
    if explicit or manual or engine == "shard_map":
        return MeshView(resolved, "shard_map", explicit=explicit, mesh=mesh)
    return MeshView(resolved, "custom_partitioning", mesh=mesh)


def _check_vmap() -> None:
    """Raises Unsupported inside a vmap over a dim that an Explicit axis splits, where JAX refuses a `shard_map`."""
    try:
        from jax._src.core import get_axis_env  # JAX has no public name for it
    except ImportError:
        return
    split = sorted(getattr(get_axis_env(), "explicit_mesh_axis_names", ()))
    if split:
        raise Unsupported(
            f"vmap over a dim that Explicit mesh axes {split} split: JAX has no shard_map there; make the dim whole by "
            "jax.sharding.reshard, or pass it as a dim of the tokens"
        )


def _check_meshes(mesh: AnyMesh, operands: Sequence[Any]) -> None:
    """Raises ValueError for an operand of a mesh whose axes have other names or sizes; XLA may abort then."""
    for operand in operands:
        other = jax.typeof(operand).sharding.mesh
        if other.empty:
            continue
        least = 1 if other.explicit_axes else 2  # JAX moves Auto arrays between meshes that differ in axes of size 1
        sizes = [entry for entry in mesh.shape.items() if entry[1] >= least]
        if sizes != [entry for entry in other.shape.items() if entry[1] >= least]:
            raise ValueError(
                f"an array of shape {operand.shape} lies on a mesh of {dict(other.shape)}, and the mesh in force has "
                f"{dict(mesh.shape)}; move the array by jax.device_put, or set its mesh by jax.set_mesh"
            )


def pad(array_spec: Spec, ndim: int) -> tuple[Names, ...]:
    """Returns the axis names of each of `ndim` dims. PartitionSpec("ep") of 2 dims is (("ep",), ())."""
    if len(array_spec) > ndim:
        raise ValueError(f"the spec {array_spec} has {len(array_spec)} entries, for an array of {ndim} dims")
    return tuple(as_names(entry) for entry in array_spec) + ((),) * (ndim - len(array_spec))


def check_divides(name: str, shape: Sequence[int], array_spec: Spec, axes: ResolvedAxes) -> None:
    """Raises ValueError where the mesh axes of a dim do not divide its size. `name` names the array."""
    entries = pad(array_spec, len(shape))
    for dim, (size, names) in enumerate(zip(shape, entries, strict=True)):
        devices = axes.size(names)
        if size % devices:
            raise ValueError(
                f"{name}: dim {dim} of size {size} is not divisible by mesh axes {names} of {devices} devices"
            )


def local_shape(shape: Sequence[int], array_spec: Spec, axes: ResolvedAxes) -> tuple[int, ...]:
    """Returns the shape of one device's shard, rounded up where devices do not divide it: 10 over 4 is 3."""
    entries = pad(array_spec, len(shape))
    return tuple(-(-size // axes.size(names)) for size, names in zip(shape, entries, strict=True))


def check_spec(name: str, value: Any, ndim: int) -> Spec:
    """Returns `value`. Raises ValueError unless it is a PartitionSpec of at most `ndim` entries."""
    if not isinstance(value, Spec) or len(value) > ndim:
        raise ValueError(f"{name}={value!r} must be a jax.sharding.PartitionSpec of at most {ndim} entries")
    return value


def mesh_in_force(*arrays: Any) -> AnyMesh | None:
    """Returns the mesh of `jax.set_mesh`, of an enclosing `shard_map`, or of `with mesh:`; None without one.

    Where no mesh is in force, the result is the mesh in the type of one of the arrays.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return mesh
    # `with mesh:` is deprecated, and JAX has no other name for its mesh; large trainers still use it.
    try:
        from jax._src.mesh import thread_resources

        mesh = thread_resources.env.physical_mesh
    except ImportError:
        pass
    meshes = [mesh]
    for array in arrays:
        if isinstance(array, jax.Array | jax.ShapeDtypeStruct):
            meshes.append(jax.typeof(array).sharding.mesh)
    return next((m for m in meshes if not m.empty), None)


def mesh_sizes() -> dict[str, int]:
    """Returns the axis sizes of the mesh in force, by name; {} without a mesh."""
    mesh = mesh_in_force()
    if mesh is None:
        return {}
    return dict(mesh.shape)


def named(mesh: AnyMesh, specs: PyTree[Spec]) -> Any:
    """Returns the NamedSharding on `mesh` of each spec in a tree."""
    return jax.tree.map(lambda s: NamedSharding(mesh, s), specs)


def constrain(x: Array, to: Spec) -> Array:
    """Returns x, resharded to the spec `to` on Explicit axes, and constrained to it on Auto axes.

    Without a mesh, and where an axis is Manual, the result is x itself.
    """
    mesh = mesh_in_force(x)
    if mesh is None or mesh.manual_axes:
        return x
    if mesh.explicit_axes:
        return jax.sharding.reshard(x, NamedSharding(mesh, to))
    if jax.sharding.get_abstract_mesh().empty:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, to))
    return lax.with_sharding_constraint(x, to)


def reshard_like(x: Array, dims: str, other: Array, dims_of_other: str) -> Array:
    """Returns x, on Explicit axes resharded so that both arrays may be operands of one operation.

    A dim of x is split as the dim of `other` with the same letter is, and is whole where no dim has its letter. With
    the dims "ehr" and "ehgf", and the spec ("ep", "fsdp", None, "tp") of `other`, x has the spec ("ep", "fsdp", None).
    """
    sharding = jax.typeof(other).sharding
    if not sharding.mesh.explicit_axes:
        return x
    entries = dict(zip(dims_of_other, pad(sharding.spec, other.ndim), strict=True))
    spec = Spec(*(entries.get(dim) or None for dim in dims))
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))


def make_sharded(make: Callable, specs: PyTree[Spec] | None) -> Callable:
    """Returns `make`, whose results each device then makes as its own shards, by `specs` on the mesh in force.

    Where `specs` is None, or an axis is Manual, the result is `make` itself.
    """
    mesh = mesh_in_force()
    if specs is None or mesh is None or mesh.manual_axes:
        return make
    if isinstance(mesh, Mesh):  # the mesh of `with mesh:`
        return jax.jit(make, out_shardings=named(mesh, specs))
    # These are specs, and no NamedShardings on the abstract mesh: vmap would replicate a result with a NamedSharding.
    if mesh.explicit_axes:
        return jax.jit(jax.sharding.auto_axes(make, out_sharding=specs))
    return jax.jit(make, out_shardings=specs)


def find_token_dims(x: Array, axes: Axes, view: MeshView) -> tuple[Axes, MeshView]:
    """Returns axes and view for a call on tokens x [..., H]: the view has the `dims` of x, by its type if Explicit.

    A token axis that the type of x does not name splits a dim further, the first dim or S where it divides it: P("ep")
    of x [B, S, H] on a mesh of fsdp and ep becomes (("ep", "fsdp"), ()). Where it divides neither, `axes` stay as they
    are.

    Raises:
      ValueError: x has fewer dims than `axes.tokens` has entries, or tokens sharded over a mesh axis without a role.
    """
    num_dims = x.ndim - 1
    if view.manual:
        return axes, view._replace(dims=((),) * num_dims)
    resolved = view.axes
    dims_of_type = _dims_by_type(x, axes, view) if view.explicit else None
    if dims_of_type is not None and dims_of_type != resolved.over(num_dims):
        axes = dataclasses.replace(axes, tokens=dims_of_type)
        at_least_two = (*dims_of_type, *[()] * (2 - num_dims))
        resolved = dataclasses.replace(resolved, dims=at_least_two)
    dims = resolved.over(num_dims)
    pairs = zip(x.shape[:-1], dims, strict=True)
    divisible = all(size % resolved.size(names) == 0 for size, names in pairs)
    return axes, view._replace(axes=resolved, dims=dims if divisible else None)


def _dims_by_type(x: Array, axes: Axes, view: MeshView) -> tuple[Names, ...] | None:
    """Returns all axes of tokens over the leading dims of x, by its type; None where an axis divides no dim."""
    resolved = view.axes
    dims = []
    for dim, names in enumerate(entries_of_type(x)[:-1]):
        for name in names:
            if name not in axes.names and view.mesh.shape[name] > 1:
                raise ValueError(
                    f"x: dim {dim} is sharded over mesh axis {name!r}, which has no role in "
                    f"{axes}; give it a role, for example Axes(dp={(*axes.dp, name)})"
                )
        dims.append(tuple(name for name in names if name in resolved.tokens))
    placed = {name for names in dims for name in names}
    for name in resolved.tokens:
        if name in placed:
            continue
        order = sorted(range(len(dims)), reverse=name in resolved.sequence)
        divisible = (dim for dim in order if x.shape[dim] % resolved.size((*dims[dim], name)) == 0)
        dim = next(divisible, None)
        if dim is None:
            return None
        dims[dim] += (name,)
    return tuple(dims)


def entries_of_type(x: Array) -> tuple[Names, ...]:
    """Returns the axes over each dim of x, by its type."""
    return pad(jax.typeof(x).sharding.spec, x.ndim)


def check_whole(name: str, x: Array, dim: int) -> None:
    """Raises ValueError where the type of x, an array of this name, splits a dim that each device needs whole."""
    sharding = jax.typeof(x).sharding
    split = [axis for axis in entries_of_type(x)[dim] if sharding.mesh.shape[axis] > 1]
    if split:
        raise ValueError(
            f"{name} has the layout {sharding.spec}: dim {dim} is sharded over mesh axes {split}; it must be whole, as "
            "jax.sharding.reshard makes it"
        )


def flatten_tokens(x: Shaped[Array, "*batch H"], view: MeshView, *, whole_rows: bool = False) -> Shaped[Array, "T H"]:
    """Reshapes x [..., H] to [T, H], with T over `view.axes.tokens`. Each device flattens its own shard.

    If two devices of cp split S=4 of x [2, 4, H], the first one has the rows (0, 0), (0, 1), (1, 0), (1, 1), and the
    second one (0, 2), (0, 3), (1, 2), (1, 3). Where the axes do not divide the leading dims of x, the rows have the
    order of a plain reshape, and on Explicit axes the axes of tokens split T if they divide it. There H stays split as
    the type of x says, unless `whole_rows` asks for whole rows.
    """
    dims = view.dims
    tokens = view.axes.tokens
    columns = ()
    if view.explicit and not whole_rows:
        columns = tuple(name for name in entries_of_type(x)[-1] if name not in tokens)
    if view.explicit:
        leading = dims or [None] * (x.ndim - 1)
        x = jax.sharding.reshard(x, NamedSharding(view.mesh, Spec(*leading, columns)))
    # Where axes split the first dim alone, a plain reshape keeps each row on its device.
    if dims is not None and any(dims[1:]):
        return _on_shards(lambda x: x.reshape(-1, x.shape[-1]), x, view, dims, (tokens,))
    rows = x.reshape(-1, x.shape[-1])
    if not view.explicit:
        return rows
    row_axes = tokens if rows.shape[0] % view.axes.size(tokens) == 0 else ()
    return jax.sharding.reshard(rows, NamedSharding(view.mesh, Spec(row_axes, columns)))


def unflatten_tokens(
    y: Shaped[Array, "T *C"],
    x: Shaped[Array, "*batch H"],
    view: MeshView,
) -> Shaped[Array, "..."]:
    """Reshapes y [T, *C] to [..., *C], the inverse of `flatten_tokens`, sharded as x where axes are Explicit."""
    dims = view.dims
    columns = tuple(jax.typeof(y).sharding.spec)[1:] if view.explicit else ()
    if dims is not None and any(dims[1:]):
        shard = local_shape(x.shape[:-1], Spec(*dims), view.axes)
        row_dims = (view.axes.tokens,)
        y = _on_shards(lambda y: y.reshape(*shard, *y.shape[1:]), y, view, row_dims, dims)
    else:
        if view.explicit and dims is None:
            y = jax.sharding.reshard(y, NamedSharding(view.mesh, Spec(None, *columns)))
        y = y.reshape(*x.shape[:-1], *y.shape[1:])
    if not view.explicit or mesh_in_force(x) is None:  # the types of the weights alone name a mesh
        return y
    leading = tuple(jax.typeof(x).sharding.spec)[: x.ndim - 1]
    return jax.sharding.reshard(y, NamedSharding(view.mesh, Spec(*leading, *columns)))


def _on_shards(
    local: Callable,
    x: Array,
    view: MeshView,
    dims: Sequence[Names],
    result_dims: Sequence[Names],
) -> Array:
    """Returns local(shard) of every device, for x and a result whose leading dims the same axes split."""
    names = {name for entry in dims for name in entry}
    on_shards = jax.shard_map(
        local,
        mesh=view.mesh,
        in_specs=Spec(*dims),
        out_specs=Spec(*result_dims),
        axis_names=names,
        check_vma=bool(varying(x)),
    )
    return jax.jit(on_shards)(x)
