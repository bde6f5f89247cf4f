"""Collectives of one device's function: weights are gathered, their gradients scattered, and values reduced."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from moax.mesh.axes import Names
from moax.types import QShard

GradReduce = Literal["float32", "bfloat16"]
GRAD_REDUCE: tuple[GradReduce, ...] = get_args(GradReduce)
# XLA's options for `jax.jit(compiler_options=...)`, by which the weights of a layer cross while it computes. By default
# XLA counts the kernels of moax as no time, so that it sees nothing to hide a collective behind.
OVERLAP_OPTIONS: dict[str, Any] = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_analytical_sol_latency_estimator": False,
    "xla_gpu_experimental_collective_start_as_early_as_possible": True,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 8,
}
# (x, names) -> the maximum of x over the devices along `names`, which is x without names
reduce_max = lax.pmax


def gather_weight(w: Array, gather: Sequence[Names], *, equal: bool = False) -> Array:
    """All-gathers a weight: dim i over the axes `gather[i]`.

    A shard [8, 16] with gather (("ep", "fsdp"), ()) becomes [8 * ranks, 16], with the ranks of ep and fsdp together.
    With `equal` the type of the result says that it is equal on these ranks, so that an op may return it.
    """
    # Where types say nothing, as outside of `check_vma`, JAX refuses "invarying".
    to = "invarying" if equal and varying(w) else "varying"
    with jax.named_scope("gather_weight"):
        for dim, names in enumerate(gather):
            if names:
                w = lax.all_gather(w, names, axis=dim, tiled=True, to=to)
    return w


def gather_qshard(
    shard: QShard[Array],
    gather: Sequence[Names],
    scale_axes: Sequence[Names],
    scales_first: bool,
    *,
    equal: bool = False,
) -> QShard[Array]:
    """All-gathers the values of a quantized weight over `gather`, and its scales over `scale_axes`.

    With `scales_first` the gather of the values starts when the scales have arrived. For `equal` see `gather_weight`.
    """
    scale = gather_weight(shard.scale, scale_axes, equal=equal)
    values = shard.data
    if scales_first and any(gather):
        values, scale = lax.optimization_barrier((values, scale))
    return QShard(gather_weight(values, gather, equal=equal), scale)


def sum_scatter(x: Array, names: Names, *, in_pieces: bool) -> Array:
    """Returns this device's rows of the sum of x over the devices along `names`."""
    if not names:
        return x
    if in_pieces:
        whole_dims = [()] * (x.ndim - 1)
        return _sum_pieces(x, (names, *whole_dims))
    return lax.psum_scatter(x, names, scatter_dimension=0, tiled=True)


def scatter_gradient(
    dw: Array, gather: Sequence[Names], reduce: GradReduce | None = None, *, in_pieces: bool = False
) -> Array:
    """Reduce-scatters this device's gradient of a whole weight: the transpose of `gather_weight`.

    The shard has the dtype `sum_dtype(reduce, dw.dtype)`. For `reduce` see `moax.Options.grad_reduce_dtype`. With
    `in_pieces` an all-to-all and a sum take the place of every reduce-scatter.
    """
    with jax.named_scope("scatter_gradient"):
        dw = dw.astype(sum_dtype(reduce, dw.dtype))
        if in_pieces:
            return _sum_pieces(dw, gather)
        for dim, names in reversed(tuple(enumerate(gather))):
            if names:
                dw = lax.psum_scatter(dw, names, scatter_dimension=dim, tiled=True)
    return dw


def sum_dtype(reduce: GradReduce | None, dtype: DTypeLike) -> np.dtype:
    """Returns the dtype in which gradients of weights are summed: `dtype` for None."""
    return np.dtype(dtype if reduce is None else reduce)


def get_grad_reduce(reduce: DTypeLike | None) -> GradReduce | None:
    """Returns the name of a `grad_reduce_dtype`: None, a name, or a dtype. Raises ValueError otherwise."""
    if reduce is None:
        return None
    with contextlib.suppress(TypeError):
        name = reduce if isinstance(reduce, str) else np.dtype(reduce).name
        if name in GRAD_REDUCE:
            return cast(GradReduce, name)
    names = ", ".join(map(repr, GRAD_REDUCE))
    raise ValueError(f"grad_reduce_dtype={reduce!r} must be one of {names}, or None for the dtype of x")


def _sum_pieces(x: Array, gather: Sequence[Names]) -> Array:
    """Returns the shard of a sum in float32, rounded once; each device sends each other device its piece once."""
    names = tuple(name for axes in gather for name in axes)
    if not names:
        return x
    counts = [math.prod(map(lax.axis_size, axes)) for axes in gather]
    split_shape = []
    for size, count in zip(x.shape, counts, strict=True):
        split_shape += [count, size // count]
    dims = range(2 * x.ndim)
    order = (*dims[::2], *dims[1::2])
    pieces = x.reshape(split_shape).transpose(order)  # [c0, c1, ..., s0, s1, ...]
    pieces = pieces.reshape(-1, *pieces.shape[x.ndim :])
    pieces = lax.all_to_all(pieces, names, split_axis=0, concat_axis=0, tiled=True)
    return pieces.astype(jnp.float32).sum(0).astype(x.dtype)


def is_alone() -> bool:
    """Returns whether the traced program has no mesh, or one of one device: it then has no collectives."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or mesh.size == 1


def all_gather_rows(x: Array, names: Names) -> Array:
    """Returns the rows of all devices along `names`, in the order of the devices."""
    if not names:
        return x
    return lax.all_gather(x, names, tiled=True)


def take_own_rows(x: Array, names: Names) -> Array:
    """Returns this device's rows of x, which has the rows of all devices along `names` as `all_gather_rows` has."""
    if not names:
        return x
    size = x.shape[0] // lax.axis_size(names)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(names) * size, size)


def mask_to_first_rank(x: Array, names: Names) -> Array:
    """Returns x on the first device along `names` and 0 on the others, so that a sum over `names` counts x once."""
    is_first_along = [lax.axis_index(name) == 0 for name in names]
    is_first = functools.reduce(jnp.logical_and, is_first_along, True)
    return jnp.where(is_first, x, jnp.zeros_like(x))


def varying(x: Array) -> frozenset[str]:
    """Returns the Manual mesh axes over which the type of x says that x varies."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary_like(x: Array, *others: PyTree) -> Array:
    """Returns x, with a type that varies over every Manual axis over which `others` vary.

    Inside a `shard_map` with `check_vma` JAX refuses to mix types that vary differently.
    """
    varying_of_others = frozenset().union(*map(varying, jax.tree.leaves(others)))
    missing = tuple(varying_of_others - varying(x))
    if not missing:
        return x
    return lax.pcast(x, missing, to="varying")
