"""Collectives on weights, and on what a mesh reduces, by axis name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from moax.mesh.axes import Names


def gather_weight(w: Array, gather: Sequence[Names]) -> Array:
    """The whole of a weight: its shards, all-gathered along each dim by the axes named for that dim."""
    with jax.named_scope("gather_weight"):
        for dim, names in enumerate(gather):
            w = lax.all_gather(w, names, axis=dim, tiled=True) if names else w
    return w


def scatter_gradient(dw: Array, gather: Sequence[Names]) -> Array:
    """The transpose of `gather_weight`: sums over the axes and leaves each device its shard."""
    with jax.named_scope("scatter_gradient"):
        for dim, names in reversed(tuple(enumerate(gather))):
            dw = lax.psum_scatter(dw, names, scatter_dimension=dim, tiled=True) if names else dw
    return dw


def reduce_max(x: Array, names: Names) -> Array:
    """The largest over `names`."""
    return lax.pmax(x, names) if names else x


def keep_on_first(x: Array, names: Names) -> Array:
    """x on the first device along `names`, 0 on the others: their sum then counts x once."""
    first = functools.reduce(jnp.logical_and, [lax.axis_index(name) == 0 for name in names], True)
    return jnp.where(first, x, jnp.zeros_like(x))


def varying(x: Array) -> frozenset[str]:
    """The manual mesh axes that x is typed as varying over."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary_like(x: Array, *others: PyTree) -> Array:
    """`x` typed as varying over every manual axis that `others` vary over (inside `shard_map` with `check_vma`)."""
    missing = frozenset().union(*map(varying, jax.tree.leaves(others))) - varying(x)
    return lax.pcast(x, tuple(missing), to="varying") if missing else x


def typed[**P, R](call: Callable[P, R]) -> Callable[P, R]:
    """`call` with results typed as varying like its operands, inside a `shard_map` with `check_vma`; JAX types the
    results of a kernel as equal on every device."""

    @functools.wraps(call)
    def wrapped(*args: P.args, **options: P.kwargs) -> R:
        operands = [v for v in jax.tree.leaves((args, options)) if isinstance(v, jax.Array)]
        return jax.tree.map(lambda result: vary_like(result, operands), call(*args, **options))

    return wrapped
