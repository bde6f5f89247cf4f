"""Collectives on weights, and on what a mesh reduces, by axis name."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from jax import lax

from moax.mesh.axes import Names
from moax.types import QArray


def gather_weight(w, gather: Sequence[Names]):
    """All-gathers a weight's shards along each dim, by the axes named for it; a QArray crosses as bytes."""
    if isinstance(w, QArray):
        return dataclasses.replace(w, data=_gather(w.data, gather), scale=_gather(w.scale, gather), pieces=tuple(
            n * lax.axis_size(names) if names else n for n, names in zip(w.pieces, gather, strict=True)))  # fmt: skip
    return _gather(w, gather)


def _gather(w, gather):
    with jax.named_scope("gather_weight"):
        for dim, names in enumerate(gather):
            w = lax.all_gather(w, names, axis=dim, tiled=True) if names else w
    return w


def scatter_gradient(dw, gather: Sequence[Names]):
    """The transpose of `gather_weight`: sums over the axes and leaves each device its shard."""
    with jax.named_scope("scatter_gradient"):
        for dim, names in reversed(tuple(enumerate(gather))):
            dw = lax.psum_scatter(dw, names, scatter_dimension=dim, tiled=True) if names else dw
    return dw


def reduce_max(x, names: Names):
    """The largest over `names`."""
    return lax.pmax(x, names) if names else x


def varying(x) -> frozenset:
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary_like(x, *others):
    """`x` typed as varying over every manual axis that `others` vary over (inside `shard_map` with `check_vma`)."""
    missing = frozenset().union(*map(varying, jax.tree.leaves(others))) - varying(x)
    return lax.pcast(x, tuple(missing), to="varying") if missing else x
