"""Dense: y = x w + bias, for layers outside the experts. The weight is quantized before it is gathered, as theirs is.

    forward  y = x w + bias        x [..., K], w [K, *C]  -> [..., *C]
    dgrad    dx = dy w^T           wgrad  dw = x^T dy      dbias = sum dy

A batch that is split over (fsdp, ep) goes with weights that are split over the same tuple, so a dense layer treats ep
as one more axis of fsdp. The op is the grouped matmul of one group that holds all rows, with its vjp and its partition
rule.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from moax.checks import check_float
from moax.kernels import select_kernels
from moax.mesh.axes import Axes
from moax.mesh.collectives import get_grad_reduce
from moax.mesh.partition import Engine, find_mesh_view
from moax.mesh.place import flatten_tokens, unflatten_tokens
from moax.mesh.specs import Spec, check_spec, spec
from moax.ops.products import GroupedSpec, grouped, widths_of
from moax.recipe import Recipe, get_recipe
from moax.sharding import dense_spec_on


def dense(
    x: Float[Array, "*rows K"],
    w: Float[Array, " K *C"],
    bias: Float[Array, "*C"] | None = None,
    *,
    recipe: str | Recipe | None = None,
    w_spec: Spec | None = None,
    axes: Axes = Axes(),
    engine: Engine = "auto",
    kernels: str = "auto",
    grad_reduce_dtype: DTypeLike | None = None,
) -> Float[Array, "..."]:
    """y = x w + bias.

    Args:
      x: [..., K], floating point. Its flattened rows lie over (dp, fsdp, ep); K lies over tp where K of w does.
      w: [K, *C]. Dims over tp stay split. Dims over fsdp or ep are gathered, as bytes where the recipe quantizes w.
      bias: [*C], split over tp where *C of w is, and replicated over the other axes.
      recipe: the name of a recipe, a Recipe, or None to quantize nothing.
      w_spec: the spec of w, needed on an Auto mesh with engine="shard_map" and inside a `shard_map`; elsewhere the
        type or the sharding of w says it. The default is `moax.sharding.dense_spec` of w's shape, and inside a
        `shard_map` a replicated w.
      axes, engine, kernels, grad_reduce_dtype: see `moax.Options`. Inside a `shard_map` the caller sums y over tp, as
        for `jnp.dot`.

    Returns:
      y: [..., *C] in x.dtype. It is differentiable in x, w and bias; each gradient has the dtype of its array.

    Raises:
      ValueError: the shapes do not fit, the mesh does not divide the rows, or w has a layout that cannot be gathered.
      Unsupported: the engine or the kernels that were chosen by name cannot run.
    """
    check_float("x", x, "[..., K]")
    check_float("w", w, "[K, *C]")
    if bias is not None:
        check_float("bias", bias, "[*C]")
    recipe, reduce = get_recipe(recipe), get_grad_reduce(grad_reduce_dtype)
    view = find_mesh_view(axes, engine, x, w)
    if x.ndim < 2 or w.ndim < 2 or (not view.manual and x.shape[-1] != w.shape[0]):
        raise ValueError(f"x and w have shapes {x.shape}, {w.shape}; they must be [..., K] and [K, *C]")
    if bias is not None and not view.manual and bias.shape != w.shape[1:]:
        raise ValueError(f"bias has shape {bias.shape}; it must be {w.shape[1:]}")
    roles = view.roles
    roles = dataclasses.replace(roles, fsdp=roles.fsdp + roles.ep, ep=())
    view = view._replace(roles=roles)
    if w_spec is None:
        w_spec = spec() if view.manual else dense_spec_on(roles, w.shape)
    declared = spec(None, *check_spec("w_spec", w_spec, w.ndim))
    chosen = select_kernels(kernels, x.dtype, **widths_of(view, (1, *w.shape), declared))
    static = GroupedSpec(recipe, recipe.row_alignment, jnp.dtype(x.dtype), declared, roles, chosen, reduce)
    rows = flatten_tokens(x, roles)
    y = grouped(view, static, rows, w[None], None, None if bias is None else bias[None])
    return unflatten_tokens(y, x, roles)
