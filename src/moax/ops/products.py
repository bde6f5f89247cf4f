"""Grouped matmul: each group of rows is multiplied by its own matrix. g(m) is the group of row m.

    forward  y[m]  = x[m] w[g(m)] + bias[g(m)]       x [M, K], w [E, K, *C]  -> [M, *C]
    dgrad    dx[m] = dy[m] w[g(m)]^T                 contracts *C            -> [M, K]
    wgrad    dw[g] = sum over m of g: x[m]^T dy[m]   contracts rows          -> [E, K, *C]
    dbias[g]       = sum over m of g: dy[m]

Rows lie as in `moax.groups`: each group starts at a multiple of `align`. Padding of x and dy may hold anything, NaN
included; padding of y and dx is 0. With group sizes (3, 0, 2), align 4 and 8 rows, rows 0 to 2 are multiplied by w[0]
and rows 4 and 5 by w[2]; rows 3, 6 and 7 are padding. An empty group has the gradient 0. With a recipe each operand is
quantized along the contracted dim just before its product. A weight is quantized on its shard and gathered as bytes.
An operand that is a QArray was quantized before. Sums are float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer

from moax.checks import check_float, check_int
from moax.kernels import Packed, Role, implementation
from moax.mesh.axes import Axes, Names, Roles
from moax.mesh.collectives import (
    GradReduce,
    get_grad_reduce,
    keep_on_first,
    scatter_gradient,
    sum_dtype,
    take_shard,
)
from moax.mesh.partition import Contract, Engine, MeshView, Partitioned, differentiable, find_mesh_view
from moax.mesh.place import keep_rows
from moax.mesh.specs import Layout, Spec, check_spec, pad, spec, weight_layout
from moax.ops.operands import (
    check_align,
    check_operand,
    check_quantized,
    dequantize_shard,
    gather_quantized,
    operand_spec,
    pick_kernels,
    product_dtypes,
    wider,
)
from moax.recipe import Contracted, Recipe, get_recipe
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


def grouped_matmul(
    x: Float[Array, "M K"] | QArray,
    w: Float[Array, "E K *C"] | QArray,
    group_sizes: Integer[Array, " groups"],
    bias: Float[Array, " E *C"] | None = None,
    *,
    recipe: str | Recipe | None = None,
    quantized: QArray | None = None,
    align: int | None = None,
    preferred_element_type: DTypeLike | None = None,
    w_spec: Spec | None = None,
    axes: Axes = Axes(),
    engine: Engine = "auto",
    kernels: str = "auto",
    grad_reduce_dtype: DTypeLike | None = None,
) -> Float[Array, " M *C"]:
    """y[m] = x[m] w[g(m)] + bias[g(m)].

    Args:
      x: [M, K], floating point, or a QArray, rows sorted by group, M over (dp, fsdp, ep, cp). On a mesh each shard has
        rows of its own experts alone.
      w: [E, K, *C], floating point, or a QArray, E over ep. K or one of *C may lie over tp. Any dim may also lie over
        fsdp, and is then gathered.
      group_sizes: [E], integers, the rows of each group of one shard. On a mesh the sizes of all shards follow one
        another: [shards * E / ranks], sharded like the rows. With E = 4, ep = 2 and dp = 2 there are 4 shards of 2
        experts, so group_sizes has 8 entries. With E entries, the rows and the sizes lie over ep alone, and all devices
        along dp and fsdp compute the same rows.
      bias: [E, *C], E over ep.
      recipe: the name of a recipe, a Recipe, or None to quantize nothing. It says how operands are quantized that are
        no QArray.
      quantized: w as a QArray, for example of `quantize` with `block=recipe.w.weight_block(w.ndim, "rows")`, or None.
        The products take it instead of w: it is gathered as bytes and not quantized again. Its gradient flows to w.
      align: each group starts at a multiple of so many rows. The default is the recipe's `row_alignment`, which is 1
        without a recipe.
      preferred_element_type: the dtype of y, as in `jax.lax.ragged_dot`; None is that of x. A sum is rounded once, to
        the dtype of y. A QArray x needs it, and enters the products in this dtype.
      w_spec: the spec of w, needed on an Auto mesh with engine="shard_map" and inside a `shard_map`; elsewhere the
        type or the sharding of w says it. The default splits E over ep and no other dim.
      axes, engine, kernels, grad_reduce_dtype: see `moax.Options`. Inside a `shard_map` the caller sums y over tp, as
        for `jnp.dot`.

    Returns:
      y: [M, *C], with the rows of x and the columns of w. It is differentiable in x, w and bias; each gradient has the
        dtype of its array. A QArray has no gradient. The gradient of x is a product with the same values of w: those
        of a QArray, whatever its blocks, and else of w quantized along its columns.

    Raises:
      ValueError: the shapes do not fit, align is no multiple of the recipe's blocks of rows, or w has a layout that
        cannot be gathered.
      Unsupported: the engine or the kernels that were chosen by name cannot run; the kernels of `xla` alone take a
        QArray, or compute a y that is wider than x.
    """
    check_operand("x", x, "[M, K]")
    check_operand("w", w, "[E, K, *C]")
    check_quantized(w, quantized)
    check_int("group_sizes", group_sizes, "[E]")
    if bias is not None:
        check_float("bias", bias, "[E, *C]")
    recipe, reduce = get_recipe(recipe), get_grad_reduce(grad_reduce_dtype)
    align = check_align(align, recipe)
    if x.ndim != 2 or w.ndim < 3 or group_sizes.ndim != 1:
        raise ValueError(
            f"x, w, group_sizes have shapes {x.shape}, {w.shape}, {group_sizes.shape}; they must be "
            "[M, K], [E, K, *C], [E]"
        )
    view = find_mesh_view(axes, engine, x, w)
    rows = view.roles.tokens
    if view.engine != "local" or not view.manual:
        ranks = view.roles.size(view.roles.tokens) // view.roles.size(view.roles.ep)
        if ranks > 1 and group_sizes.shape[0] == w.shape[0]:
            rows, ranks = view.roles.ep, 1
        if x.shape[1] != w.shape[1] or group_sizes.shape[0] != w.shape[0] * ranks:
            raise ValueError(
                f"x {x.shape}, w {w.shape} and group_sizes {group_sizes.shape} do not fit each other; with this w, x "
                f"must be [M, {w.shape[1]}] and group_sizes [{w.shape[0] * ranks}]"
            )
    if bias is not None and not view.manual and bias.shape != (w.shape[0], *w.shape[2:]):
        raise ValueError(f"bias has shape {bias.shape}; it must be {(w.shape[0], *w.shape[2:])}")
    declared = spec(view.roles.ep, *[None] * (w.ndim - 1)) if w_spec is None else check_spec("w_spec", w_spec, w.ndim)
    widths = widths_of(view, w.shape, declared)
    dtype, out = product_dtypes(x, preferred_element_type)
    chosen = pick_kernels(kernels, wider(dtype, out), (x, w, quantized), **widths)
    static = GroupedSpec(recipe, align, dtype, out, declared, view.roles, chosen, rows, view.manual, reduce)
    return grouped(view, static, x, w, quantized, jnp.asarray(group_sizes).astype(jnp.int32), bias)


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
    x: Float[Array, "M K"] | QArray,
    w: Float[Array, "E K *C"] | QArray,
    quantized: QArray | None,
    group_sizes: Int[Array, " groups"] | None,
    bias: Float[Array, "E *C"] | None,
) -> Float[Array, " M *C"]:
    """Runs `grouped_matmul` on a view of the mesh. With `group_sizes` None one group holds all rows."""
    if x.shape[0] == 0:  # y has no rows, and the gradient of each operand is 0
        sums = jnp.zeros(0, static.out) if isinstance(x, QArray) else x.sum(1).astype(static.out)
        return jnp.broadcast_to(sums.reshape(0, *[1] * (w.ndim - 2)), (0, *w.shape[2:]))
    weights = (None, w) if isinstance(w, QArray) else (w, quantized)
    return _grouped(view, static, *_forward.lay_operands(view, static, x, *weights, group_sizes, bias))


def _grouped_forward(view: MeshView, static: GroupedSpec, x, w, quantized, group_sizes, bias):
    """Runs the forward of the `custom_vjp` and returns y, and the operands."""
    (y,) = _forward(view, static, x, w, quantized, group_sizes, bias)
    # The columns of y take the sharding of w's columns, for tp. An fsdp axis there must not displace fsdp from the
    # rows.
    if view.engine == "custom_partitioning" and static.rows == view.roles.tokens:
        y = keep_rows(y, view.roles)
    return y, (x, w, quantized, group_sizes, bias)


def _grouped_backward(view: MeshView, static: GroupedSpec, saved, dy):
    """Runs the backward of the `custom_vjp` and returns dx, dw and dbias; a QArray has no gradient."""
    x, w, quantized, group_sizes, bias = saved
    # w is gathered again, so XLA must not keep the w of forward
    w, quantized, dy = lax.optimization_barrier((w, quantized, dy))
    results = iter(_backward(view, static, x, w, quantized, group_sizes, dy.astype(static.dtype)))
    dx = None if isinstance(x, QArray) else next(results)
    dw = None if w is None else next(results).astype(w.dtype)
    return dx, dw, None, None, None if bias is None else next(results).astype(bias.dtype)


_grouped = differentiable(_grouped_forward, _grouped_backward, once="grouped_matmul")


def matmul_forward(static: GroupedSpec, layout, x, w, quantized, group_sizes, bias):
    """Returns y [M, *C] of one device. It is a partial sum where K lies over tp."""
    (layout, kept), kernels = layout, implementation(static.kernels)
    packed = kernels.pack_rows(group_sizes, static.align, x.shape[0])
    gathered = _gather(static, layout, kept, w, quantized, "rows")
    rows, _ = _quantize_rows(static, packed, x, "x", kept[1], columns=False)
    bias = None if bias is None else keep_on_first(bias, kept[1])
    y = kernels.matmul(rows, gathered, packed.groups, wider(static.dtype, static.out), bias)
    return (packed.unpack(y).astype(static.out).reshape(-1, *whole_shape(static, weight(w, quantized), layout)[2:]),)


def matmul_backward(static: GroupedSpec, layout, x, w, quantized, group_sizes, dy):
    """Returns dx [M, K], dw [E, K, *C] of the shard, and dbias [E, *C], all of one device.

    dx is left out where x is a QArray, and dw where w is None.
    """
    (layout, kept), kernels, dtype, results = layout, implementation(static.kernels), static.dtype, ()
    packed = kernels.pack_rows(group_sizes, static.align, x.shape[0])
    groups, columns = packed.groups, tuple(n for names in kept[2:] for n in names)
    wanted = {"rows": not isinstance(x, QArray), "columns": w is not None}
    d_rows, d_columns = _quantize_rows(static, packed, dy, "dy", columns, **wanted)
    if not isinstance(x, QArray):
        gathered = _gather(static, layout, kept, w, quantized, "columns")
        # [M, K] = [M, C] [E, K, C]^T
        results += (packed.unpack(kernels.matmul(d_rows, gathered, groups, dtype, transpose=True)),)
    if w is not None:
        _, x_columns = _quantize_rows(static, packed, x, "x", kept[1], rows=False)
        reduce = static.grad_reduce
        dw = kernels.wgrad(x_columns, d_columns, groups, dtype, sum_dtype(reduce, dtype))  # [M, K]^T [M, C]
        dw = dw.reshape(whole_shape(static, w, layout))
        alone = static.rows != static.roles.tokens
        dw = take_shard(dw, layout.gather) if alone else scatter_gradient(dw, layout.gather, reduce)
        results += (dw.astype(w.dtype) if reduce is None else dw,)  # the others are cast after the sum over dp
    return *results, keep_on_first(kernels.bias_grad(packed.pack(dy), groups), kept[1])


def _quantize_rows(static: GroupedSpec, packed: Packed, x, role: Role, split: Names, **wanted: bool):
    """Returns rows [M, ...] as operands of a product over columns and of wgrad; `split` are the axes of the columns.

    `wanted` are the keywords of `quantize_for_matmul`.
    """
    if isinstance(x, QArray):
        values = packed.pack(dequantize_shard(x, _entries(static, (static.rows, split)), static.roles, static.dtype))
        return values, values
    kernels = implementation(static.kernels)
    over = static.rows + split
    return kernels.quantize_for_matmul(packed.pack(x), static.recipe, role, packed.groups, over, **wanted)


def _gather(static: GroupedSpec, layout: Layout, kept, w, quantized, contracted: Contracted):
    """Returns the whole weight as an operand of a product over `contracted`."""
    if quantized is not None:
        entries = _entries(static, pad(layout.spec, quantized.ndim))
        return gather_quantized(quantized, entries, layout.gather, static.roles, static.dtype)
    over, kernels = axes_of_matrix(layout, kept), implementation(static.kernels)
    return kernels.quantize_and_gather(w, static.recipe, contracted, layout.gather, over, static.dtype)


def _entries(static: GroupedSpec, entries: Sequence[Names]) -> Sequence[Names]:
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


def _operand_specs(static: GroupedSpec, operands, found_specs):
    """Returns the Layout of w and the axes that its dims keep, and the specs of x, w, `quantized` and the sizes."""
    x, w, quantized, group_sizes = operands[:4]
    found = found_specs[2].data if w is None else found_specs[1]
    layout, kept = find_layout(static, found, weight(w, quantized).ndim)
    kept_too = None
    if quantized is not None:
        kept_too = operand_spec(
            "quantized", quantized, _entries(static, pad(layout.spec, quantized.ndim)), static.roles
        )
    rows = operand_spec("x", x, _entries(static, (static.rows, kept[1])), static.roles)
    sizes = None if group_sizes is None else spec(static.rows)
    return layout, kept, (rows, None if w is None else layout.spec, kept_too, sizes)


def _forward_contract(static: GroupedSpec, operands, found_specs):
    """Returns the contract of forward: rows are split as tokens are, and y is summed over the axes that split K."""
    layout, kept, operand_specs = _operand_specs(static, operands, found_specs)
    bias = None if operands[4] is None else spec(static.roles.ep, *kept[2:])
    return Contract((*operand_specs, bias), (spec(static.rows, *kept[2:]),), (kept[1],), (layout, kept))


def _backward_contract(static: GroupedSpec, operands, found_specs):
    """Returns the contract of backward: each gradient has the layout of its array."""
    layout, kept, operand_specs = _operand_specs(static, operands, found_specs)
    columns = tuple(n for names in kept[2:] for n in names)
    alone = static.rows != static.roles.tokens  # along dp and fsdp all devices have the same rows
    over_rows = () if alone else static.roles.same_experts
    results = [(spec(static.roles.ep, *kept[2:]), over_rows + kept[1])]
    if operands[1] is not None:
        results.insert(0, (layout.spec, () if alone else replicated(static.roles, layout)))
    if not isinstance(operands[0], QArray):
        results.insert(0, (operand_specs[0], columns))
    specs, reduce = zip(*results, strict=True)
    return Contract((*operand_specs, spec(static.rows, *kept[2:])), specs, reduce, (layout, kept))


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


def _forward_factors(static: GroupedSpec, operands):
    """Returns the Shardy rule of forward."""
    return factors(operands, ("m k", "e h *", "e h *", "g", "b *"), ("m *",), weight(*operands[1:3]).ndim)


def _backward_factors(static: GroupedSpec, operands):
    """Returns the Shardy rule of backward."""
    results = (*([] if isinstance(operands[0], QArray) else ["m k"]), *([] if operands[1] is None else ["e h +"]))
    names = ("m k", "e h +", "e h +", "g", "m *")
    return factors(operands, names, (*results, "b *"), weight(*operands[1:3]).ndim)


# The dims of a weight have names of their own, so that fsdp on K, or on *C in backward, does not move activations.
_forward = Partitioned(matmul_forward, _forward_contract, _forward_factors, name="grouped_matmul")
_backward = Partitioned(matmul_backward, _backward_contract, _backward_factors, name="grouped_matmul_grad")
