"""The static arguments of a grouped matmul, and how its weight lies on a mesh."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from moax.mesh.axes import Names, Roles
from moax.mesh.collectives import GradReduce, sum_dtype
from moax.mesh.partition import MeshView
from moax.mesh.specs import Layout, Spec, pad, weight_layout
from moax.recipe import Recipe
from moax.types import QArray


@dataclasses.dataclass(frozen=True)
class GroupedSpec:
    """The static arguments of a grouped matmul.

    Attributes:
      recipe: the formats of the operands.
      align: each group starts at a multiple of so many rows.
      dtype: the dtype in which operands enter the products.
      out: the dtype of y.
      declared: the spec of w, used where neither its type nor its sharding says one.
      roles: the mesh axes by role.
      kernels: the name of the implementation.
      rows: the mesh axes over which the rows lie: those of tokens, or ep alone.
      shards: whether operands come as shards, as inside a `shard_map` of the caller.
      grad_reduce: how the gradient of w is summed; see `moax.Options.grad_reduce_dtype`.
      apart: whether the gather of w and the scatter of its gradient are ops of their own; see `wire.py`.
    """

    recipe: Recipe
    align: int
    dtype: jnp.dtype
    out: jnp.dtype
    declared: Spec
    roles: Roles
    kernels: str
    rows: Names
    shards: bool
    grad_reduce: GradReduce | None = None
    apart: bool = True

    @property
    def grad_dtype(self) -> np.dtype:
        """The dtype in which the gradient of w is computed and summed."""
        return sum_dtype(self.grad_reduce, self.dtype)


def widths_of(view: MeshView, shape: Sequence[int], declared: Spec) -> dict[str, int]:
    """Returns the sizes of K and of the columns of a weight [E, K, *C] on one device.

    Their keys are the names that errors give them.
    """
    kept = ((),) * len(shape) if view.manual else kept_axes(declared, len(shape), view.roles)
    _, rows, *columns = (n // view.roles.size(names) for n, names in zip(shape, kept, strict=True))
    return {"w's dim 1": rows, "w's columns": math.prod(columns)}


def entries_of(static: GroupedSpec, entries: Sequence[Names]) -> Sequence[Names]:
    """Returns the axes that split each dim of a QArray that the caller gave; none where the caller gave a shard."""
    return ((),) * len(entries) if static.shards else entries


def weight(w, quantized):
    """Returns the array that has the shape of the weight: w, or else the bytes of `quantized`."""
    return quantized.data if w is None else w


def whole_shape(static: GroupedSpec, w, layout: Layout) -> list[int]:
    """Returns the shape of the gathered weight."""
    return [n * static.roles.size(names) for n, names in zip(w.shape, layout.gather, strict=True)]


def axes_of_matrix(layout: Layout, kept) -> Names:
    """Returns the axes that split the matrix of one expert, by its K or its columns."""
    return tuple(n for names in layout.gather[1:] + kept[1:] for n in names)


def kept_axes(w_spec: Spec, ndim: int, roles: Roles) -> tuple[Names, ...]:
    """Returns the axes that stay split in a product, for each dim of a weight [E, K, *C].

    E stays split over ep, and K or a dim of *C over tp where the spec names tp there.
    """
    entries = pad(w_spec, ndim)
    return (roles.ep, *(roles.tp if roles.tp and roles.tp[0] in entry else () for entry in entries[1:]))


def find_layout(static: GroupedSpec, found_spec, ndim):
    """Returns the Layout of w, and the axes that each dim keeps in a product.

    The spec is the one that was found, or else the declared one.
    """
    w_spec = static.declared if found_spec is None else found_spec
    kept = kept_axes(w_spec, ndim, static.roles)
    return weight_layout("w", w_spec, kept, static.roles), kept


def replicated(roles: Roles, layout: Layout) -> Names:
    """Returns the axes over which a weight's gradient is still a partial sum after `scatter_gradient`."""
    gathered = {n for names in layout.gather for n in names}
    return tuple(n for n in roles.same_experts if n not in gathered)


def factors(operands, names: Sequence[str], results: Sequence[str], ndim: int):
    """Returns the Shardy rule: `names` of the operands that are not None, and `results`.

    A `*` stands for the columns of a weight of `ndim` dims, as "c0 c1", and a `+` for columns of other names, as
    "d0 d1". The scales of a QArray share no dim with anything.
    """
    own, other = (" ".join(f"{letter}{i}" for i in range(ndim - 2)) for letter in "cd")
    given = []
    for name, operand in zip(names, operands, strict=True):
        given += [] if operand is None else [name, ""] if isinstance(operand, QArray) else [name]
    return tuple(tuple(n.replace("*", own).replace("+", other) for n in side) for side in (given, results))


def own_dims(tree) -> tuple[str, ...]:
    """Returns the rule of operands whose dims appear in no other operand."""
    return ("",) * len(jax.tree.leaves(tree))
