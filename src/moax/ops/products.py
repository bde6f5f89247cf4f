"""Grouped matmul: each group of rows times its own matrix.

    forward  y[m]  = x[m] w[g(m)] + bias[g(m)]       x [M, K], w [E, K, *C]  -> [M, *C]
    dgrad    dx[m] = dy[m] w[g(m)]^T                 contracts *C            -> [M, K]
    wgrad    dw[g] = sum over m of g: x[m]^T dy[m]   contracts rows          -> [E, K, *C]
    dbias[g]       = sum over m of g: dy[m]

Rows lie as in `moax.groups`: group g starts at a multiple of `align`. Padding may hold anything, NaN included, and is 0
in y and dx. With group sizes (3, 0, 2), align 4 and 8 rows, rows 0 to 2 are times w[0], rows 4 and 5 times w[2], and
rows 3, 6 and 7 are padding. An empty group has a zero gradient. With a recipe each operand is quantized along the
contracted dim just before its product: the weight on its shard, then gathered as bytes. Sums are float32.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moax.kernels import implementation, select_kernels
from moax.mesh.axes import Axes, Names, Roles
from moax.mesh.collectives import keep_on_first, scatter_gradient
from moax.mesh.partition import Contract, MeshView, Partitioned, differentiable, find_mesh_view
from moax.mesh.place import keep_rows
from moax.mesh.specs import Layout, Spec, pad, spec, weight_layout
from moax.options import Engine
from moax.recipe import Recipe, get_recipe


@dataclasses.dataclass(frozen=True)
class GroupedSpec:
    """All that is static of a grouped matmul.

    align: rows to which group starts are aligned. dtype: of the products. declared: how w lies where its type does not
    say. kernels: the name of the implementation.
    """

    recipe: Recipe
    align: int
    dtype: jnp.dtype
    declared: Spec
    roles: Roles
    kernels: str


def grouped_matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "E K *C"],
    group_sizes: Int[Array, " E"],
    bias: Float[Array, " E *C"] | None = None,
    *,
    recipe: str | Recipe | None = None,
    align: int | None = None,
    w_spec: Spec | None = None,
    axes: Axes = Axes(),
    engine: Engine = "auto",
    kernels: str = "auto",
) -> Float[Array, " M *C"]:
    """y[m] = x[m] w[g(m)] + bias[g(m)].

    Args:
      x: [M, K], rows sorted by group, M over (dp, fsdp, ep): on a mesh each shard has rows of its own experts.
      w: [E, K, *C], E over ep; K or one of *C may be over tp; any dim may be over fsdp besides, and is gathered.
      group_sizes: [E] i32 of each shard: on a mesh shards * E / ranks of ep entries, sharded like the rows.
      bias: [E, *C], E over ep.
      recipe: a name, a Recipe, or None.
      align: rows to which group starts are aligned; default: what the recipe needs, 1 without.
      w_spec: how w lies on an Auto mesh with engine="shard_map", and inside a `shard_map`; elsewhere it is seen.
        Default: E over (ep), nothing else.
      axes, engine, kernels: see `moax.moe`. Inside a `shard_map`, sums over tp are the caller's, as for `jnp.dot`.

    Returns:
      y: [M, *C] in x.dtype, rows like x, *C like w. Differentiable in x, w and bias; gradients in their dtypes.

    Raises:
      ValueError: shapes; an align that the recipe's blocks of rows do not divide; a layout of w that cannot be used.
    """
    recipe = get_recipe(recipe)
    align = recipe.row_alignment if align is None else align
    if align < 1 or align % recipe.row_alignment:
        raise ValueError(f"align={align} must be a multiple of {recipe.row_alignment}, the recipe's blocks of rows")
    if x.ndim != 2 or w.ndim < 3 or group_sizes.ndim != 1:
        raise ValueError(
            f"x, w, group_sizes have shapes {x.shape}, {w.shape}, {group_sizes.shape}; they must be "
            "[M, K], [E, K, *C], [E]"
        )
    view = find_mesh_view(axes, engine, x, w)
    if view.engine != "local" or not view.manual:
        ranks = view.roles.size(view.roles.tokens) // view.roles.size(view.roles.ep)
        if x.shape[1] != w.shape[1] or group_sizes.shape[0] != w.shape[0] * ranks:
            raise ValueError(f"x {x.shape}, w {w.shape} and group_sizes {group_sizes.shape} do not fit each other")
    if bias is not None and not view.manual and bias.shape != (w.shape[0], *w.shape[2:]):
        raise ValueError(f"bias has shape {bias.shape}; it must be {(w.shape[0], *w.shape[2:])}")
    declared = spec(view.roles.ep, *[None] * (w.ndim - 1)) if w_spec is None else w_spec
    widths = widths_of(view, w.shape, declared)
    chosen = select_kernels(kernels, x.dtype, **widths)
    static = GroupedSpec(recipe, align, jnp.dtype(x.dtype), declared, view.roles, chosen)
    return grouped(view, static, x, w, group_sizes, bias)


def widths_of(view: MeshView, shape, declared: Spec) -> dict[str, int]:
    """Columns and contracted elements of a weight [E, K, *C] on one device, by name."""
    kept = ((),) * len(shape) if view.manual else kept_axes(declared, len(shape), view.roles)
    _, rows, *columns = (n // view.roles.size(names) for n, names in zip(shape, kept, strict=True))
    return {"w's dim 1": rows, "w's columns": math.prod(columns)}


def grouped(view: MeshView, static: GroupedSpec, x, w, group_sizes, bias):
    """`grouped_matmul` on a view of the mesh; `group_sizes` None: one group, all rows."""
    return _grouped(view, static, *_forward.lay_operands(view, static, x, w, group_sizes, bias))


def _grouped_forward(view: MeshView, static: GroupedSpec, x, w, group_sizes, bias):
    (y,) = _forward(view, static, x, w, group_sizes, bias)
    # Columns take the sharding of w's, for tp; fsdp there must not win over the rows' own.
    y = keep_rows(y, view.roles) if view.engine == "custom_partitioning" else y
    return y, (x, w, group_sizes, bias)


def _grouped_backward(view: MeshView, static: GroupedSpec, saved, dy):
    x, w, group_sizes, bias = saved
    w, dy = lax.optimization_barrier((w, dy))  # w is gathered again: XLA must not keep what forward gathered
    dx, dw, dbias = _backward(view, static, x, w, group_sizes, dy)
    return dx, dw, None, None if bias is None else dbias.astype(bias.dtype)


_grouped = differentiable(_grouped_forward, _grouped_backward)


def matmul_forward(static: GroupedSpec, layout, x, w, group_sizes, bias):
    """y [M, *C] of one device, a partial sum where K is over tp."""
    (layout, kept), kernels = layout, implementation(static.kernels)
    packed = kernels.pack_rows(group_sizes, static.align, x.shape[0])
    gathered = kernels.quantize_and_gather(
        w, static.recipe, "rows", layout.gather, _axes_of_matrix(layout, kept), static.dtype
    )
    rows, _ = kernels.quantize_for_matmul(
        packed.pack(x), static.recipe, "x", packed.groups, static.roles.tokens + kept[1]
    )
    bias = None if bias is None else keep_on_first(bias, kept[1])
    y = kernels.matmul(rows, gathered, packed.groups, static.dtype, bias)
    return (packed.unpack(y).reshape(-1, *_whole(static, w, layout)[2:]),)


def matmul_backward(static: GroupedSpec, layout, x, w, group_sizes, dy):
    """dx [M, K], dw of this device's shard and dbias, all of one device."""
    (layout, kept), kernels, recipe, dtype = layout, implementation(static.kernels), static.recipe, static.dtype
    packed = kernels.pack_rows(group_sizes, static.align, x.shape[0])
    groups, dy = packed.groups, packed.pack(dy)
    columns, tokens = tuple(n for names in kept[2:] for n in names), static.roles.tokens
    gathered = kernels.quantize_and_gather(w, recipe, "columns", layout.gather, _axes_of_matrix(layout, kept), dtype)
    d_rows, d_columns = kernels.quantize_for_matmul(dy, recipe, "dy", groups, tokens + columns)
    _, x_columns = kernels.quantize_for_matmul(packed.pack(x), recipe, "x", groups, tokens + kept[1])
    dx = packed.unpack(kernels.matmul(d_rows, gathered, groups, dtype, transpose=True))  # [M, K] = [M, C] [E, K, C]^T
    dw = kernels.wgrad(x_columns, d_columns, groups, dtype)  #                             [E, K, C] = [M, K]^T [M, C]
    dw = scatter_gradient(dw.reshape(_whole(static, w, layout)), layout.gather).astype(w.dtype)
    return dx, dw, keep_on_first(kernels.bias_grad(dy, groups), kept[1])


def _whole(static: GroupedSpec, w, layout: Layout) -> list[int]:
    """The shape of the gathered weight."""
    return [n * static.roles.size(names) for n, names in zip(w.shape, layout.gather, strict=True)]


def _axes_of_matrix(layout: Layout, kept) -> Names:
    """The axes that split a matrix of the weight."""
    return tuple(n for names in layout.gather[1:] + kept[1:] for n in names)


def kept_axes(of: Spec, ndim: int, roles: Roles) -> tuple[Names, ...]:
    """What a product leaves split of a weight [E, K, *C]: E over ep, and K or *C over tp where the spec has it."""
    entries = pad(of, ndim)
    return (roles.ep, *(roles.tp if roles.tp and roles.tp[0] in entry else () for entry in entries[1:]))


def _layout(static: GroupedSpec, found, ndim):
    of = static.declared if found is None else found
    kept = kept_axes(of, ndim, static.roles)
    return weight_layout("w", of, kept, static.roles), kept


def _sizes_spec(static, group_sizes):
    return None if group_sizes is None else spec(static.roles.tokens)


def replicated(roles: Roles, layout) -> Names:
    """The axes over which a weight's gradient is still a partial sum after `scatter_gradient`."""
    gathered = {n for names in layout.gather for n in names}
    return tuple(n for n in roles.dp + roles.fsdp if n not in gathered)


def _forward_contract(static: GroupedSpec, operands, found):
    layout, kept = _layout(static, found[1], operands[1].ndim)
    roles = static.roles
    bias = None if operands[3] is None else spec(roles.ep, *kept[2:])
    at = (spec(roles.tokens, kept[1]), layout.spec, _sizes_spec(static, operands[2]), bias)
    return Contract(at, (spec(roles.tokens, *kept[2:]),), (kept[1],), (layout, kept))


def _backward_contract(static: GroupedSpec, operands, found):
    layout, kept = _layout(static, found[1], operands[1].ndim)
    roles = static.roles
    rows, columns = spec(roles.tokens, kept[1]), tuple(n for names in kept[2:] for n in names)
    return Contract(
        (rows, layout.spec, _sizes_spec(static, operands[2]), spec(roles.tokens, *kept[2:])),
        (rows, layout.spec, spec(roles.ep, *kept[2:])),
        (columns, replicated(roles, layout), roles.dp + roles.fsdp + kept[1]),
        (layout, kept),
    )


def _factors(operands, names: tuple[str, ...], results: tuple[str, ...]):
    """`names` of the operands that are given, and of the results; `*` are columns, `+` columns by other names."""
    columns = range(operands[1].ndim - 2)
    own, other = (" ".join(f"{letter}{i}" for i in columns) for letter in "cd")
    given = (n for n, operand in zip(names, operands, strict=True) if operand is not None)
    return tuple(tuple(n.replace("*", own).replace("+", other) for n in side) for side in (given, results))


# A weight's dims have names of their own: fsdp on K, or backward on *C, must not propagate to activations.
_forward = Partitioned(
    matmul_forward,
    _forward_contract,
    lambda static, operands: _factors(operands, ("m k", "e h *", "g", "b *"), ("m *",)),
    name="grouped_matmul",
)
_backward = Partitioned(
    matmul_backward,
    _backward_contract,
    lambda static, operands: _factors(operands, ("m k", "e h +", "g", "m *"), ("m k", "e h +", "b *")),
    name="grouped_matmul_grad",
)
