"""Collectives of one device's function: weights are gathered, their gradients scattered, and values reduced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from moax.mesh.axes import Names


def gather_weight(w: Array, gather: Sequence[Names]) -> Array:
    """All-gathers a weight: dim i over the axes `gather[i]`.

    A shard [8, 16] with gather (("ep", "fsdp"), ()) becomes [8 * ranks, 16], with the ranks of ep and fsdp together.
    """
    with jax.named_scope("gather_weight"):
        for dim, names in enumerate(gather):
            w = lax.all_gather(w, names, axis=dim, tiled=True) if names else w
    return w


def scatter_gradient(dw: Array, gather: Sequence[Names]) -> Array:
    """Reduce-scatters a gradient: the transpose of `gather_weight`. It sums over the axes and returns one shard."""
    with jax.named_scope("scatter_gradient"):
        for dim, names in reversed(tuple(enumerate(gather))):
            dw = lax.psum_scatter(dw, names, scatter_dimension=dim, tiled=True) if names else dw
    return dw


def take_shard(x: Array, gather: Sequence[Names]) -> Array:
    """Returns this device's shard of x, which is equal on all devices along `gather`: dim i is split over `gather[i]`.

    It is `scatter_gradient` where the sum has been made on every device.
    """
    for dim, names in enumerate(gather):
        if names:
            size = x.shape[dim] // lax.axis_size(names)
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(names) * size, size, dim)
    return x


def reduce_max(x: Array, names: Names) -> Array:
    """Returns the maximum of x over the devices along `names`, elementwise."""
    return lax.pmax(x, names) if names else x


def keep_on_first(x: Array, names: Names) -> Array:
    """Returns x on the first device along `names` and 0 on the others, so that a sum over `names` counts x once."""
    first = functools.reduce(jnp.logical_and, [lax.axis_index(name) == 0 for name in names], True)
    return jnp.where(first, x, jnp.zeros_like(x))


def varying(x: Array) -> frozenset[str]:
    """Returns the Manual mesh axes over which the type of x says that x varies."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary_like(x: Array, *others: PyTree) -> Array:
    """Returns x, with a type that varies over every Manual axis over which `others` vary.

    It matters inside a `shard_map` with `check_vma`, where JAX refuses to mix types that vary differently.
    """
    missing = frozenset().union(*map(varying, jax.tree.leaves(others))) - varying(x)
    return lax.pcast(x, tuple(missing), to="varying") if missing else x


def typed[**P, R](call: Callable[P, R]) -> Callable[P, R]:
    """Wraps the call of a kernel, so that the types of its results vary over the same mesh axes as its operands.

    JAX types the results of a kernel as equal on every device, which `shard_map` with `check_vma` would believe.
    """

    @functools.wraps(call)
    def wrapped(*args: P.args, **options: P.kwargs) -> R:
        operands = [v for v in jax.tree.leaves((args, options)) if isinstance(v, jax.Array)]
        return jax.tree.map(lambda result: vary_like(result, operands), call(*args, **options))

    return wrapped
