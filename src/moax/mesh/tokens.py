"""Mesh axes split tokens by their leading dims: B of x [B, S, H] over some axes and S over others.

The ops take rows [T, H]. Each device flattens its shard [B/b, S/s, H] to T/(b s) rows, so that no row leaves its
device. Where an axis splits S, the rows of the whole array therefore have another order than a plain reshape gives. In
a block only the tokens that a capacity drops depend on this order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import NamedSharding
from jaxtyping import Array, Shaped

from moax.mesh.axes import Axes, Names, ResolvedAxes
from moax.mesh.specs import FREE, AnyMesh, MeshView, Spec, constrain, mesh_in_force, pad


def check_token_axes(x: Array, axes: Axes) -> None:
    """Raises ValueError where x [..., H] has tokens sharded over a mesh axis without a role in `axes`."""
    sharding = jax.typeof(x).sharding
    for dim, names in enumerate(pad(sharding.spec, x.ndim)[:-1]):
        for name in names:
            if name not in axes.names and sharding.mesh.shape[name] > 1:
                raise ValueError(
                    f"x: dim {dim} is sharded over mesh axis {name!r}, which has no role in {axes}; "
                    f"give it a role, for example Axes(dp={(*axes.dp, name)})"
                )


def find_token_dims(x: Array, axes: Axes, resolved: ResolvedAxes) -> Axes:
    """Returns `axes`, with `tokens` the axes over each leading dim of x [..., H] where mesh axes are Explicit.

    A token axis that the type of x does not name splits a dim further, the first dim or S where it divides it: P("ep")
    of x [B, S, H] on a mesh of fsdp and ep becomes (("ep", "fsdp"), ()). Where none divides, the result is `axes`
    itself.
    """
    mesh = mesh_in_force(x)
    if mesh is None or not mesh.explicit_axes or set(mesh.manual_axes).intersection(resolved.tokens):
        return axes
    dims = [tuple(n for n in names if n in resolved.tokens) for names in pad(jax.typeof(x).sharding.spec, x.ndim)[:-1]]
    named_in_x = {name for names in dims for name in names}
    for name in resolved.tokens:
        if name in named_in_x:
            continue
        order = sorted(range(len(dims)), reverse=name in resolved.sequence)
        home = next((d for d in order if x.shape[d] % resolved.size((*dims[d], name)) == 0), None)
        if home is None:
            return axes
        dims[home] += (name,)
    return axes if tuple(dims) == resolved.over(len(dims)) else dataclasses.replace(axes, tokens=tuple(dims))


def flatten_tokens(x: Shaped[Array, "*batch H"], resolved: ResolvedAxes) -> Shaped[Array, "T H"]:
    """Reshapes x [..., H] to [T, H], with T over `axes.tokens`. Each device flattens its own shard.

    If two devices of cp split S=4 of x [2, 4, H], the first one has the rows (0, 0), (0, 1), (1, 0), (1, 1), and the
    second one (0, 2), (0, 3), (1, 2), (1, 3). Where the axes do not divide the leading dims of x, the rows have the
    order of a plain reshape, and on Explicit axes `axes.tokens` split T if they divide it.
    """
    (mesh, dims), columns = _find_split(x, resolved), ()
    later = dims is not None and any(dims[1:])  # a plain reshape keeps rows in place if axes split the first dim alone
    if mesh is not None:
        columns = tuple(n for n in pad(jax.typeof(x).sharding.spec, x.ndim)[-1] if n not in resolved.tokens)
        x = jax.sharding.reshard(x, NamedSharding(mesh, Spec(*dims or [None] * (x.ndim - 1), columns)))
    elif later:
        x = constrain(x, Spec(*dims, FREE))
    if later:
        return _merge(x, dims, resolved, mesh, columns)
    rows = x.reshape(-1, x.shape[-1])
    if mesh is None:
        return rows
    over = resolved.tokens if rows.shape[0] % resolved.size(resolved.tokens) == 0 else ()
    return jax.sharding.reshard(rows, NamedSharding(mesh, Spec(over, columns)))


def unflatten_tokens(
    y: Shaped[Array, "T *C"], x: Shaped[Array, "*batch H"], resolved: ResolvedAxes
) -> Shaped[Array, "..."]:
    """Reshapes y [T, *C] to [..., *C], the inverse of `flatten_tokens`, sharded as x where axes are Explicit."""
    (mesh, dims), shape, columns = _find_split(x, resolved), (*x.shape[:-1], *y.shape[1:]), ()
    if mesh is not None:
        columns = tuple(jax.typeof(y).sharding.spec)[1:]
        y = y if dims is not None else jax.sharding.reshard(y, NamedSharding(mesh, Spec(None, *columns)))
    later = dims is not None and any(dims[1:])
    y = _unmerge(y, shape, dims, resolved, mesh, columns) if later else y.reshape(shape)
    if mesh is not None:
        leading = tuple(jax.typeof(x).sharding.spec)[: x.ndim - 1]
        return jax.sharding.reshard(y, NamedSharding(mesh, Spec(*leading, *columns)))
    return constrain(y, Spec(*dims, *[FREE] * (y.ndim - len(dims)))) if later else y


def find_row_axes(x: Array, view: MeshView) -> Names:
    """Returns the axes that may split a row [S, H] of x [..., S, H] once `flatten_tokens` has flattened x."""
    divide = view.manual or _find_split(x, view.axes)[1] is not None
    return view.axes.sequence if divide else view.axes.tokens


def _find_split(x: Array, resolved: ResolvedAxes) -> tuple[AnyMesh | None, tuple[Names, ...] | None]:
    """Returns the mesh of x if its axes are Explicit, and the axes over its leading dims if these divide; else None."""
    mesh = mesh_in_force(x)
    if mesh is None or set(mesh.manual_axes).intersection(resolved.tokens):
        return None, None
    dims = resolved.over(x.ndim - 1)
    divide = all(size % resolved.size(names) == 0 for size, names in zip(x.shape[:-1], dims, strict=True))
    return mesh if mesh.explicit_axes else None, dims if divide else None


def _merge(x, dims, resolved: ResolvedAxes, mesh: AnyMesh | None, columns: Names):
    """Reshapes x [B, S, H] to [T, H] by [b, B/b, s, S/s, H] and [b, s, B/b, S/s, H], for b and s devices."""
    n, blocks = len(dims), _blocks(x.shape[: len(dims)], dims, resolved)
    over = [names for entry in dims for names in (entry, ())]
    x = x.reshape(*blocks, x.shape[-1], out_sharding=_typed(mesh, *over, columns))
    x = x.transpose(*range(0, 2 * n, 2), *range(1, 2 * n, 2), 2 * n)
    return x.reshape(-1, x.shape[-1], out_sharding=_typed(mesh, resolved.tokens, columns))


def _unmerge(y, shape, dims, resolved: ResolvedAxes, mesh: AnyMesh | None, columns: Sequence):
    n, blocks = len(dims), _blocks(shape[: len(dims)], dims, resolved)
    free = [None] * n
    y = y.reshape(*blocks[::2], *blocks[1::2], *y.shape[1:], out_sharding=_typed(mesh, *dims, *free, *columns))
    y = y.transpose(*(i for pair in zip(range(n), range(n, 2 * n), strict=True) for i in pair), *range(2 * n, y.ndim))
    return y.reshape(shape, out_sharding=_typed(mesh, *dims, *columns))


def _blocks(sizes: Sequence[int], dims: Sequence[Names], resolved: ResolvedAxes) -> list[int]:
    """Returns for each dim the devices over it and the size of a shard: [8, 6] over 4 and 2 is [4, 2, 2, 3]."""
    counts = [resolved.size(names) for names in dims]
    return [n for size, count in zip(sizes, counts, strict=True) for n in (count, size // count)]


def _typed(mesh: AnyMesh | None, *entries) -> NamedSharding | None:
    return None if mesh is None else NamedSharding(mesh, Spec(*entries))
