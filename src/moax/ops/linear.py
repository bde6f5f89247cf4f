"""Dense: y = x w + bias, for layers outside the experts. The weight is quantized before it is gathered, as theirs is.

    forward  y = x w + bias        x [..., K], w [K, *C]  -> [..., *C]
    dgrad    dx = dy w^T           wgrad  dw = x^T dy      dbias = sum dy

A batch that is split over (fsdp, ep) goes with weights that are split over the same tuple, so a dense layer treats ep
as one more axis of fsdp. The op is the grouped matmul of one group that holds all rows, with its vjp and its partition
rule.
"""

from __future__ import annotations

import dataclasses

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moax.checks import check_float
from moax.mesh.axes import Axes
from moax.mesh.collectives import get_grad_reduce
from moax.mesh.partition import Engine, find_mesh_view
from moax.mesh.specs import Spec, check_spec, spec
from moax.mesh.tokens import find_token_dims, unflatten_tokens
from moax.ops.grouped import GroupedSpec, widths_of
from moax.ops.operands import (
    check_operand,
    check_quantized,
    flatten_rows,
    pick_kernels,
    product_dtypes,
    stack_one,
    wider,
)
from moax.ops.products import grouped
from moax.recipe import Recipe, get_recipe
from moax.sharding import dense_spec_on
from moax.types import QArray


def dense(
    x: Float[Array, "*rows K"] | QArray,
    w: Float[Array, " K *C"] | QArray,
    bias: Float[Array, "*C"] | None = None,
    *,
    recipe: str | Recipe | None = None,
    quantized: QArray | None = None,
    preferred_element_type: DTypeLike | None = None,
    w_spec: Spec | None = None,
    axes: Axes = Axes(),
    engine: Engine = "auto",
    kernels: str = "auto",
    grad_reduce_dtype: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """y = x w + bias.

    Args:
      x: [..., K], floating point, or a QArray whose blocks have one row. Its rows lie over (dp, fsdp, ep), and S of
        [..., S, K] over cp; see `Axes`. K lies over tp where K of w does.
      w: [K, *C], floating point, or a QArray. Dims over tp stay split. Dims over fsdp or ep are gathered, as bytes
        where w is quantized.
      bias: [*C], split over tp where *C of w is, and replicated over the other axes.
      recipe: the name of a recipe, a Recipe, or None to quantize nothing.
      quantized, preferred_element_type: w as a QArray, and the dtype of y, as in `grouped_matmul`.
      w_spec: the spec of w, needed on an Auto mesh with engine="shard_map" and inside a `shard_map`; elsewhere the
        type or the sharding of w says it. The default is `moax.sharding.dense_spec` of w's shape, and inside a
        `shard_map` a replicated w.
      axes, engine, kernels, grad_reduce_dtype: see `moax.Options`. Inside a `shard_map` the caller sums y over tp, as
        for `jnp.dot`.

    Returns:
      y: [..., *C]. It is differentiable in x, w and bias; each gradient has the dtype of its array. A QArray has no
        gradient.

    Raises:
      ValueError: the shapes do not fit, the mesh does not divide the rows, or w has a layout that cannot be gathered.
      Unsupported: the engine or the kernels that were chosen by name cannot run.
    """
    check_operand("x", x, "[..., K]")
    check_operand("w", w, "[K, *C]")
    check_quantized(w, quantized)
    if bias is not None:
        check_float("bias", bias, "[*C]")
    recipe, reduce = get_recipe(recipe), get_grad_reduce(grad_reduce_dtype)
    view = find_mesh_view(axes, engine, x, w)
    if x.ndim < 2 or w.ndim < 2 or (not view.manual and x.shape[-1] != w.shape[0]):
        raise ValueError(f"x and w have shapes {x.shape}, {w.shape}; they must be [..., K] and [K, *C]")
    if bias is not None and not view.manual and bias.shape != w.shape[1:]:
        raise ValueError(f"bias has shape {bias.shape}; it must be {w.shape[1:]}")
    values = x.data if isinstance(x, QArray) else x
    roles = view.on(find_token_dims(values, axes, view.roles)).roles
    roles = dataclasses.replace(roles, fsdp=roles.fsdp + roles.ep, ep=())
    view = view._replace(roles=roles)
    if w_spec is None:
        w_spec = spec() if view.manual else dense_spec_on(roles, w.shape)
    declared = spec(None, *check_spec("w_spec", w_spec, w.ndim))
    dtype, out = product_dtypes(x, preferred_element_type)
    widths = widths_of(view, (1, *w.shape), declared)
    chosen = pick_kernels(kernels, wider(dtype, out), (x, w, quantized), **widths)
    align, rows = recipe.row_alignment, roles.tokens
    static = GroupedSpec(recipe, align, dtype, out, declared, roles, chosen, rows, view.manual, reduce)
    rows, kept = flatten_rows(x, roles), None if quantized is None else stack_one(quantized)
    one = stack_one(w) if isinstance(w, QArray) else w[None]
    y = grouped(view, static, rows, one, kept, None, None if bias is None else bias[None])
    return unflatten_tokens(y, values, roles)
