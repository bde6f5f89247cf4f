"""Grouped matmul: each group of rows is multiplied by its own matrix. g(m) is the group of row m.

    forward  y[m]  = x[m] w[g(m)] + bias[g(m)]       x [M, K], w [E, K, *C]  -> [M, *C]
    dgrad    dx[m] = dy[m] w[g(m)]^T                 contracts *C            -> [M, K]
    wgrad    dw[g] = sum over m of g: x[m]^T dy[m]   contracts rows          -> [E, K, *C]
    dbias[g]       = sum over m of g: dy[m]

Rows lie as in `moax.groups`: each group starts at a multiple of `align`. Padding of x and dy may hold anything, NaN
included; padding of y and dx is 0. With group sizes (3, 0, 2), align 4 and 8 rows, rows 0 to 2 are multiplied by w[0]
and rows 4 and 5 by w[2]; rows 3, 6 and 7 are padding. An empty group has the gradient 0. With a recipe each operand is
quantized along the contracted dim just before its product. A weight is quantized on its shard and gathered as bytes.
Sums are float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer

from moax.checks import check_count, check_float, check_int
from moax.kernels import implementation, select_kernels
from moax.mesh.axes import Axes, Names, Roles
from moax.mesh.collectives import GradReduce, get_grad_reduce, keep_on_first, scatter_gradient, sum_dtype
from moax.mesh.partition import Contract, Engine, MeshView, Partitioned, differentiable, find_mesh_view
from moax.mesh.place import keep_rows
from moax.mesh.specs import Layout, Spec, check_spec, pad, spec, weight_layout
from moax.recipe import Recipe, get_recipe


@dataclasses.dataclass(frozen=True)
class GroupedSpec:
    """The static arguments of a grouped matmul.

    Attributes:
      recipe: the formats of the operands.
      align: each group starts at a multiple of so many rows.
      dtype: the dtype of the products.
      declared: the spec of w, used where neither its type nor its sharding says one.
      roles: the mesh axes by role.
      kernels: the name of the implementation.
      grad_reduce: how the gradient of w is summed; see `moax.Options.grad_reduce_dtype`.
    """

    recipe: Recipe
    align: int
    dtype: jnp.dtype
    declared: Spec
    roles: Roles
    kernels: str
    grad_reduce: GradReduce | None = None


def grouped_matmul(
    x: Float[Array, "M K"],
    w: Float[Array, "E K *C"],
    group_sizes: Integer[Array, " groups"],
    bias: Float[Array, " E *C"] | None = None,
    *,
    recipe: str | Recipe | None = None,
    align: int | None = None,
    w_spec: Spec | None = None,
    axes: Axes = Axes(),
    engine: Engine = "auto",
    kernels: str = "auto",
    grad_reduce_dtype: DTypeLike | None = None,
) -> Float[Array, " M *C"]:
    """y[m] = x[m] w[g(m)] + bias[g(m)].

    Args:
      x: [M, K], floating point, rows sorted by group, M over (dp, fsdp, ep). On a mesh each shard has rows of its own
        experts alone.
      w: [E, K, *C], E over ep. K or one of *C may lie over tp. Any dim may also lie over fsdp, and is then gathered.
      group_sizes: [E], integers, the rows of each group of one shard. On a mesh the sizes of all shards follow one
        another: [shards * E / ranks], sharded like the rows. With E = 4, ep = 2 and dp = 2 there are 4 shards of 2
        experts, so group_sizes has 8 entries.
      bias: [E, *C], E over ep.
      recipe: the name of a recipe, a Recipe, or None to quantize nothing.
      align: each group starts at a multiple of so many rows. The default is the recipe's `row_alignment`, which is 1
        without a recipe.
      w_spec: the spec of w, needed on an Auto mesh with engine="shard_map" and inside a `shard_map`; elsewhere the
        type or the sharding of w says it. The default splits E over ep and no other dim.
      axes, engine, kernels, grad_reduce_dtype: see `moax.Options`. Inside a `shard_map` the caller sums y over tp, as
        for `jnp.dot`.

    Returns:
      y: [M, *C] in x.dtype, with the rows of x and the columns of w. It is differentiable in x, w and bias; each
        gradient has the dtype of its array.

    Raises:
      ValueError: the shapes do not fit, align is no multiple of the recipe's blocks of rows, or w has a layout that
        cannot be gathered.
      Unsupported: the engine or the kernels that were chosen by name cannot run.
    """
    check_float("x", x, "[M, K]")
    check_float("w", w, "[E, K, *C]")
    check_int("group_sizes", group_sizes, "[E]")
    if bias is not None:
        check_float("bias", bias, "[E, *C]")
    recipe, reduce = get_recipe(recipe), get_grad_reduce(grad_reduce_dtype)
    align = recipe.row_alignment if align is None else align
    check_count("align", align)
    if align % recipe.row_alignment:
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
            raise ValueError(
                f"x {x.shape}, w {w.shape} and group_sizes {group_sizes.shape} do not fit each other; with this w, x "
                f"must be [M, {w.shape[1]}] and group_sizes [{w.shape[0] * ranks}]"
            )
    if bias is not None and not view.manual and bias.shape != (w.shape[0], *w.shape[2:]):
        raise ValueError(f"bias has shape {bias.shape}; it must be {(w.shape[0], *w.shape[2:])}")
    declared = spec(view.roles.ep, *[None] * (w.ndim - 1)) if w_spec is None else check_spec("w_spec", w_spec, w.ndim)
    widths = widths_of(view, w.shape, declared)
    chosen = select_kernels(kernels, x.dtype, **widths)
    static = GroupedSpec(recipe, align, jnp.dtype(x.dtype), declared, view.roles, chosen, reduce)
    return grouped(view, static, x, w, group_sizes.astype(jnp.int32), bias)


def widths_of(view: MeshView, shape: Sequence[int], declared: Spec) -> dict[str, int]:
    """Returns the sizes of K and of the columns of a weight [E, K, *C] on one device.

    Their keys are the names that errors give them.
    """
    kept = ((),) * len(shape) if view.manual else kept_axes(declared, len(shape), view.roles)
    _, rows, *columns = (n // view.roles.size(names) for n, names in zip(shape, kept, strict=True))
    return {"w's dim 1": rows, "w's columns": math.prod(columns)}


def grouped(
    view: MeshView,
    static: GroupedSpec,
    x: Float[Array, "M K"],
    w: Float[Array, "E K *C"],
    group_sizes: Int[Array, " groups"] | None,
    bias: Float[Array, "E *C"] | None,
) -> Float[Array, " M *C"]:
    """Runs `grouped_matmul` on a view of the mesh. With `group_sizes` None one group holds all rows."""
    if x.shape[0] == 0:  # y has no rows, and the gradient of each operand is 0
        return jnp.broadcast_to(x.sum(1).reshape(0, *[1] * (w.ndim - 2)), (0, *w.shape[2:]))
    return _grouped(view, static, *_forward.lay_operands(view, static, x, w, group_sizes, bias))


def _grouped_forward(view: MeshView, static: GroupedSpec, x, w, group_sizes, bias):
    """Runs the forward of the `custom_vjp` and returns y, and the operands."""
    (y,) = _forward(view, static, x, w, group_sizes, bias)
    # The columns of y take the sharding of w's columns, for tp. An fsdp axis there must not displace fsdp from the
    # rows.
    y = keep_rows(y, view.roles) if view.engine == "custom_partitioning" else y
    return y, (x, w, group_sizes, bias)


def _grouped_backward(view: MeshView, static: GroupedSpec, saved, dy):
    """Runs the backward of the `custom_vjp` and returns dx, dw and dbias."""
    x, w, group_sizes, bias = saved
    w, dy = lax.optimization_barrier((w, dy))  # w is gathered again, so XLA must not keep the w of forward
    dx, dw, dbias = _backward(view, static, x, w, group_sizes, dy)
    return dx, dw.astype(w.dtype), None, None if bias is None else dbias.astype(bias.dtype)


_grouped = differentiable(_grouped_forward, _grouped_backward, once="grouped_matmul")


def matmul_forward(static: GroupedSpec, layout, x, w, group_sizes, bias):
    """Returns y [M, *C] of one device. It is a partial sum where K lies over tp."""
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
    """Returns dx [M, K], dw [E, K, *C] of the shard, and dbias [E, *C], all of one device."""
    (layout, kept), kernels, recipe, dtype = layout, implementation(static.kernels), static.recipe, static.dtype
    packed = kernels.pack_rows(group_sizes, static.align, x.shape[0])
    groups, dy = packed.groups, packed.pack(dy)
    columns, tokens = tuple(n for names in kept[2:] for n in names), static.roles.tokens
    gathered = kernels.quantize_and_gather(w, recipe, "columns", layout.gather, _axes_of_matrix(layout, kept), dtype)
    d_rows, d_columns = kernels.quantize_for_matmul(dy, recipe, "dy", groups, tokens + columns)
    _, x_columns = kernels.quantize_for_matmul(packed.pack(x), recipe, "x", groups, tokens + kept[1])
    dx = packed.unpack(kernels.matmul(d_rows, gathered, groups, dtype, transpose=True))  # [M, K] = [M, C] [E, K, C]^T
    total = sum_dtype(static.grad_reduce, dtype)
    dw = kernels.wgrad(x_columns, d_columns, groups, dtype, total)  #                      [E, K, C] = [M, K]^T [M, C]
    dw = scatter_gradient(dw.reshape(_whole(static, w, layout)), layout.gather, static.grad_reduce)
    dw = dw.astype(w.dtype) if static.grad_reduce is None else dw  # the others are cast after the sum over dp
    return dx, dw, keep_on_first(kernels.bias_grad(dy, groups), kept[1])


def _whole(static: GroupedSpec, w, layout: Layout) -> list[int]:
    """Returns the shape of the gathered weight."""
    return [n * static.roles.size(names) for n, names in zip(w.shape, layout.gather, strict=True)]


def _axes_of_matrix(layout: Layout, kept) -> Names:
    """Returns the axes that split the matrix of one expert, by its K or its columns."""
    return tuple(n for names in layout.gather[1:] + kept[1:] for n in names)


def kept_axes(w_spec: Spec, ndim: int, roles: Roles) -> tuple[Names, ...]:
    """Returns the axes that stay split in a product, for each dim of a weight [E, K, *C].

    E stays split over ep, and K or a dim of *C over tp where the spec names tp there.
    """
    entries = pad(w_spec, ndim)
    return (roles.ep, *(roles.tp if roles.tp and roles.tp[0] in entry else () for entry in entries[1:]))


def _layout(static: GroupedSpec, found_spec, ndim):
    """Returns the Layout of w, and the axes that each dim keeps in a product.

    The spec is the one that was found, or else the declared one.
    """
    w_spec = static.declared if found_spec is None else found_spec
    kept = kept_axes(w_spec, ndim, static.roles)
    return weight_layout("w", w_spec, kept, static.roles), kept


def _sizes_spec(static, group_sizes):
    """Returns the spec of the group sizes, None where there are none."""
    return None if group_sizes is None else spec(static.roles.tokens)


def replicated(roles: Roles, layout: Layout) -> Names:
    """Returns the axes over which a weight's gradient is still a partial sum after `scatter_gradient`."""
    gathered = {n for names in layout.gather for n in names}
    return tuple(n for n in roles.dp + roles.fsdp if n not in gathered)


def _forward_contract(static: GroupedSpec, operands, found_specs):
    """Returns the contract of forward: rows are split as tokens are, and y is summed over the axes that split K."""
    layout, kept = _layout(static, found_specs[1], operands[1].ndim)
    roles = static.roles
    bias = None if operands[3] is None else spec(roles.ep, *kept[2:])
    operand_specs = (spec(roles.tokens, kept[1]), layout.spec, _sizes_spec(static, operands[2]), bias)
    return Contract(operand_specs, (spec(roles.tokens, *kept[2:]),), (kept[1],), (layout, kept))


def _backward_contract(static: GroupedSpec, operands, found_specs):
    """Returns the contract of backward: each gradient has the layout of its array."""
    layout, kept = _layout(static, found_specs[1], operands[1].ndim)
    roles = static.roles
    rows, columns = spec(roles.tokens, kept[1]), tuple(n for names in kept[2:] for n in names)
    return Contract(
        (rows, layout.spec, _sizes_spec(static, operands[2]), spec(roles.tokens, *kept[2:])),
        (rows, layout.spec, spec(roles.ep, *kept[2:])),
        (columns, replicated(roles, layout), roles.dp + roles.fsdp + kept[1]),
        (layout, kept),
    )


def _factors(operands, names: tuple[str, ...], results: tuple[str, ...]):
    """Returns the Shardy rule: `names` of the operands that are not None, and `results`.

    A `*` stands for the columns, as "c0 c1", and a `+` for columns of other names, as "d0 d1".
    """
    columns = range(operands[1].ndim - 2)
    own, other = (" ".join(f"{letter}{i}" for i in columns) for letter in "cd")
    given = (n for n, operand in zip(names, operands, strict=True) if operand is not None)
    return tuple(tuple(n.replace("*", own).replace("+", other) for n in side) for side in (given, results))


# The dims of a weight have names of their own, so that fsdp on K, or on *C in backward, does not move activations.
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
