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

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer

from moax.checks import check_float, check_int
from moax.kernels import Packed, Role, implementation
from moax.mesh.axes import Axes, Names
from moax.mesh.collectives import get_grad_reduce, keep_on_first
from moax.mesh.partition import Contract, Engine, MeshView, Partitioned, differentiable, find_mesh_view
from moax.mesh.place import keep_rows
from moax.mesh.specs import Spec, check_spec, device_spec, spec
from moax.ops.grouped import GroupedSpec, entries_of, factors, own_dims, replicated, weight, whole_shape, widths_of
from moax.ops.operands import (
    check_align,
    check_operand,
    check_quantized,
    dequantize_shard,
    operand_spec,
    pick_kernels,
    product_dtypes,
    wider,
)
from moax.ops.wire import gather_local, gather_matrix, scatter_local, scatter_matrix, set_apart, weight_operands
from moax.recipe import Recipe, get_recipe
from moax.types import QArray


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
    static = set_apart(view, static)
    if x.shape[0] == 0:  # y has no rows, and the gradient of each operand is 0
        sums = jnp.zeros(0, static.out) if isinstance(x, QArray) else x.sum(1).astype(static.out)
        return jnp.broadcast_to(sums.reshape(0, *[1] * (w.ndim - 2)), (0, *w.shape[2:]))
    weights = (None, w) if isinstance(w, QArray) else (w, quantized)
    *operands, _ = _forward.lay_operands(view, static, x, *weights, group_sizes, bias, None)
    return _grouped(view, static, *operands)


def _grouped_forward(view: MeshView, static: GroupedSpec, x, w, quantized, group_sizes, bias):
    """Runs the forward of the `custom_vjp` and returns y, and the operands."""
    gathered = gather_matrix(view, static, w, quantized, "rows")
    (y,) = _forward(view, static, x, w, quantized, group_sizes, bias, gathered)
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
    gathered = None if isinstance(x, QArray) else gather_matrix(view, static, w, quantized, "columns")
    results = iter(_backward(view, static, x, w, quantized, group_sizes, dy.astype(static.dtype), gathered))
    dx, d_bias = None if isinstance(x, QArray) else next(results), next(results)
    dw = None if w is None else scatter_matrix(view, static, next(results), w).astype(w.dtype)
    return dx, dw, None, None, None if bias is None else d_bias.astype(bias.dtype)


_grouped = differentiable(_grouped_forward, _grouped_backward, once="grouped_matmul")


def matmul_forward(static: GroupedSpec, layout, x, w, quantized, group_sizes, bias, gathered):
    """Returns y [M, *C] of one device, a partial sum where K lies over tp.

    `gathered` is the weight for products over rows; with None it is gathered here.
    """
    if gathered is None:
        (gathered,) = gather_local((static, "rows"), layout, w, quantized)
    (layout, kept), kernels = layout, implementation(static.kernels)
    packed = kernels.pack_rows(group_sizes, static.align, x.shape[0])
    rows, _ = _quantize_rows(static, packed, x, "x", kept[1], columns=False)
    bias = None if bias is None else keep_on_first(bias, kept[1])
    y = kernels.matmul(rows, gathered, packed.groups, wider(static.dtype, static.out), bias)
    return (packed.unpack(y).astype(static.out).reshape(-1, *whole_shape(static, weight(w, quantized), layout)[2:]),)


def matmul_backward(static: GroupedSpec, layout, x, w, quantized, group_sizes, dy, gathered):
    """Returns dx [M, K], dbias [E, *C] and dw [E, K, *C], all of one device.

    dx is left out where x is a QArray, and dw where w is None. `gathered` is the weight for products over columns; dw
    is then a term of the gradient of the whole weight, and with None the gradient of the shard.
    """
    if gathered is None and not isinstance(x, QArray):
        (gathered,) = gather_local((static, "columns"), layout, w, quantized)
    (layout, kept), kernels, dtype, results = layout, implementation(static.kernels), static.dtype, ()
    packed = kernels.pack_rows(group_sizes, static.align, x.shape[0])
    groups, columns = packed.groups, tuple(n for names in kept[2:] for n in names)
    wanted = {"rows": gathered is not None, "columns": w is not None}
    d_rows, d_columns = _quantize_rows(static, packed, dy, "dy", columns, **wanted)
    if gathered is not None:
        # [M, K] = [M, C] [E, K, C]^T
        results += (packed.unpack(kernels.matmul(d_rows, gathered, groups, dtype, transpose=True)),)
    results += (keep_on_first(kernels.bias_grad(packed.pack(dy), groups), kept[1]),)
    if w is not None:
        _, x_columns = _quantize_rows(static, packed, x, "x", kept[1], rows=False)
        term = kernels.wgrad(x_columns, d_columns, groups, dtype, static.grad_dtype)  # [M, K]^T [M, C]
        term = term.reshape(whole_shape(static, w, layout))
        results += (term,) if static.apart else scatter_local(static, layout, term, w)
    return results


def _quantize_rows(static: GroupedSpec, packed: Packed, x, role: Role, split: Names, **wanted: bool):
    """Returns rows [M, ...] as operands of a product over columns and of wgrad; `split` are the axes of the columns.

    `wanted` are the keywords of `quantize_for_matmul`.
    """
    if isinstance(x, QArray):
        values = packed.pack(dequantize_shard(x, entries_of(static, (static.rows, split)), static.roles, static.dtype))
        return values, values
    kernels = implementation(static.kernels)
    over = static.rows + split
    return kernels.quantize_for_matmul(packed.pack(x), static.recipe, role, packed.groups, over, **wanted)


def _operand_specs(static: GroupedSpec, operands, found_specs):
    """Returns the Layout of w, the axes that its dims keep, and the specs of x, w, `quantized` and the sizes.

    The last result has the specs of the gathered weight.
    """
    x, w, quantized, group_sizes, _, gathered = operands
    found = found_specs[2].data if w is None else found_specs[1]
    layout, kept, weights = weight_operands(static, w, quantized, found)
    rows = operand_spec("x", x, entries_of(static, (static.rows, kept[1])), static.roles)
    sizes = None if group_sizes is None else spec(static.rows)
    return layout, kept, (rows, *weights, sizes), jax.tree.map(lambda _: device_spec(static.roles), gathered)


def _forward_contract(static: GroupedSpec, operands, found_specs):
    """Returns the contract of forward: rows are split as tokens are, and y is summed over the axes that split K."""
    layout, kept, operand_specs, whole = _operand_specs(static, operands, found_specs)
    bias = None if operands[4] is None else spec(static.roles.ep, *kept[2:])
    return Contract((*operand_specs, bias, whole), (spec(static.rows, *kept[2:]),), (kept[1],), (layout, kept))


def _backward_contract(static: GroupedSpec, operands, found_specs):
    """Returns the contract of backward. The gradient of w is the term of each device, which `wire.py` scatters."""
    layout, kept, operand_specs, whole = _operand_specs(static, operands, found_specs)
    columns = tuple(n for names in kept[2:] for n in names)
    alone = static.rows != static.roles.tokens  # along dp and fsdp all devices have the same rows
    over_rows = () if alone else static.roles.same_experts
    results = [(spec(static.roles.ep, *kept[2:]), over_rows + kept[1])]
    if not isinstance(operands[0], QArray):
        results.insert(0, (operand_specs[0], columns))
    if operands[1] is not None:
        summed = layout.spec, () if alone else replicated(static.roles, layout)
        results.append((device_spec(static.roles), ()) if static.apart else summed)
    specs, reduce = zip(*results, strict=True)
    return Contract((*operand_specs, spec(static.rows, *kept[2:]), whole), specs, reduce, (layout, kept))


def _forward_factors(static: GroupedSpec, operands):
    """Returns the Shardy rule of forward."""
    *given, gathered = operands
    rule, results = factors(given, ("m k", "e h *", "e h *", "g", "b *"), ("m *",), weight(*given[1:3]).ndim)
    return (*rule, *own_dims(gathered)), results


def _backward_factors(static: GroupedSpec, operands):
    """Returns the Shardy rule of backward."""
    *given, gathered = operands
    results = (
        *([] if isinstance(given[0], QArray) else ["m k"]),
        "b *",
        *([] if given[1] is None or static.apart else ["e h +"]),
    )
    rule, results = factors(given, ("m k", "e h +", "e h +", "g", "m *"), results, weight(*given[1:3]).ndim)
    return (*rule, *own_dims(gathered)), results


# The dims of a weight have names of their own, so that fsdp on K, or on *C in backward, does not move activations.
_forward = Partitioned(matmul_forward, _forward_contract, _forward_factors, name="grouped_matmul")
_backward = Partitioned(matmul_backward, _backward_contract, _backward_factors, name="grouped_matmul_grad")
