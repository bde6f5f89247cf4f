"""Grouped matmul: each group of rows is multiplied by its own matrix. g(m) is the group of row m.

    forward  y[m]  = x[m] w[g(m)] + bias[g(m)]       x [M, K], w [E, K, *C]  -> [M, *C]
    dgrad    dx[m] = dy[m] w[g(m)]^T                 contracts *C            -> [M, K]
    wgrad    dw[g] = sum over m of g: x[m]^T dy[m]   contracts rows          -> [E, K, *C]
    dbias[g]       = sum over m of g: dy[m]

Rows are ordered as in `moax.kernels.groups`: each group starts at a multiple of `align`. Padding of x and dy may hold
anything, NaN included; padding of y and dx is 0. With group sizes (3, 0, 2), align 4 and 8 rows, rows 0 to 2 are
multiplied by w[0] and rows 4 and 5 by w[2]; rows 3, 6 and 7 are padding. An empty group has the gradient 0. A recipe
quantizes each operand along the contracted dim just before its matmul, and a weight before it is gathered. Sums are
float32.

A dense layer is one group that holds all rows. Its batch and its weight are split over the same axes (fsdp, ep), so it
treats ep as one more axis of fsdp.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Integer

from moax.checks import check_arrays, check_value
from moax.kernels import Role, implementation, select_kernels
from moax.kernels.groups import Packing
from moax.mesh.axes import Axes, Names
from moax.mesh.collectives import get_grad_reduce, mask_to_first_rank
from moax.mesh.op import Op, OpSharding, differentiable
from moax.mesh.specs import (
    FREE,
    Engine,
    MeshView,
    Spec,
    check_spec,
    constrain,
    find_mesh_view,
    find_token_dims,
    flatten_tokens,
    unflatten_tokens,
)
from moax.ops import weights
from moax.ops.weights import GatherSpec, WeightLayout, WeightSpec, find_layout, lay_out_weight
from moax.params import dense_spec_on
from moax.recipe import Recipe, get_recipe


@dataclasses.dataclass(frozen=True)
class GroupedSpec:
    """The static arguments of a grouped matmul."""

    weight: WeightSpec
    align: int  # each group starts at a multiple of so many rows
    # Whether w is gathered, and its gradient scattered, by ops of their own. On Auto axes with tp the compiler alone
    # knows over which dims tp splits w, and so the shape of a gathered weight.
    apart: bool


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
      x: [M, K], floating point, rows sorted by group, M over (dp, fsdp, ep, cp). On a mesh each shard has rows of its
        own experts alone.
      w: [E, K, *C], floating point, E over ep. K or one of *C may be split over tp. Any dim may also be split over
        fsdp, and is then gathered.
      group_sizes: [E], integers, the rows of each group. On a mesh the sizes of all shards follow one another, split as
        rows are: with E = 4, ep = 2 and dp = 2, 4 shards have 2 experts each, so group_sizes has 8 entries.
      bias: [E, *C], E over ep.
      recipe: the name of a recipe, a Recipe, or None to quantize nothing.
      align: each group starts at a multiple of so many rows. The default is the recipe's `row_alignment`, or 1.
      w_spec: the spec of w, needed on an Auto mesh with engine="shard_map" and inside a `shard_map`; elsewhere the
        type or the sharding of w is its spec. The default splits E over ep and no other dim.
      axes, engine, kernels, grad_reduce_dtype: see `moax.Options`. Inside a `shard_map` the caller sums y over tp, as
        for `jnp.dot`.

    Returns:
      y: [M, *C] in x.dtype. It is differentiable in x, w and bias; each gradient has the dtype of its array.

    Raises:
      ValueError: the shapes do not fit, a dim of w is 0, align is no multiple of the recipe's blocks of rows, or w has
        a layout that cannot be gathered.
      Unsupported: the engine or the kernels that were chosen by name cannot run.
    """
    view = find_mesh_view(axes, engine, x, w)
    rule = "x [M, K], w [E, K, *D, C], group_sizes int [groups], bias? [E, *D, C]"
    check_arrays(rule, x, w, group_sizes, bias, local=view.manual)
    if not view.manual:
        groups = w.shape[0] * view.axes.size(view.axes.tokens) // view.axes.size(view.axes.ep)
        check_arrays("group_sizes int [groups]", group_sizes, groups=groups)
    w_spec = Spec(view.axes.ep) if w_spec is None else check_spec("w_spec", w_spec, w.ndim)
    declared = Spec(*w_spec, *[None] * (w.ndim - len(w_spec)))
    static = _make_spec(
        view,
        x.dtype,
        w.shape,
        declared,
        recipe=recipe,
        align=align,
        kernels=kernels,
        grad_reduce=grad_reduce_dtype,
    )
    return _grouped_matmul(view, static, x, w, jnp.asarray(group_sizes).astype(jnp.int32), bias)


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
    """y = x w + bias, for layers outside the experts. The weight is quantized before it is gathered.

    Args:
      x: [..., K], floating point. Its rows are split over (dp, fsdp, ep), and S of [..., S, K] over cp; see `Axes`. K
        is split over tp where K of w is.
      w: [K, *C], floating point. Dims over tp stay split, and dims over fsdp or ep are gathered.
      bias: [*C], split over tp where *C of w is, and replicated over the other axes.
      w_spec: the default is `moax.params.dense_spec` of w's shape, and inside a `shard_map` a replicated w.
      recipe, axes, engine, kernels, grad_reduce_dtype: as in `grouped_matmul`.

    Returns:
      y: [..., *C] in x.dtype. It is differentiable in x, w and bias; each gradient has the dtype of its array.

    Raises:
      ValueError: the shapes do not fit, a dim of w is 0, the mesh does not divide the rows, or w has a layout that
        cannot be gathered.
      Unsupported: the engine or the kernels that were chosen by name cannot run.
    """
    view = find_mesh_view(axes, engine, x, w)
    check_arrays("x [*batch, T, K], w [K, *D, C], bias? [*D, C]", x, w, bias, local=view.manual)
    _, view = find_token_dims(x, axes, view)
    resolved = dataclasses.replace(view.axes, fsdp=view.axes.fsdp + view.axes.ep, ep=())
    view = view._replace(axes=resolved)
    if w_spec is None:
        w_spec = Spec() if view.manual else dense_spec_on(resolved, w.shape)
    declared = Spec(None, *check_spec("w_spec", w_spec, w.ndim))
    static = _make_spec(
        view,
        x.dtype,
        (1, *w.shape),
        declared,
        recipe=recipe,
        kernels=kernels,
        grad_reduce=grad_reduce_dtype,
        added_dims=1,
    )
    rows = flatten_tokens(x, view)
    if bias is not None:
        bias = bias[None]
    y = _grouped_matmul(view, static, rows, w[None], None, bias)
    return unflatten_tokens(y, x, view)


def _make_spec(
    view: MeshView,
    dtype: np.dtype,
    shape: Sequence[int],
    declared: Spec,
    *,
    recipe: str | Recipe | None,
    kernels: str,
    align: int | None = None,
    grad_reduce: DTypeLike | None = None,
    added_dims: int = 0,
) -> GroupedSpec:
    """Returns the static arguments of a matmul with a weight of this whole shape, and chooses its kernels."""
    if 0 in shape:
        raise ValueError(f"w has shape {tuple(shape[added_dims:])}; each of its dims must be at least 1")
    recipe = get_recipe(recipe)
    reduce = get_grad_reduce(grad_reduce)
    if align is None:
        align = recipe.row_alignment
    check_value("align", align, int)
    if align % recipe.row_alignment:
        raise ValueError(f"align={align} must be a multiple of {recipe.row_alignment}, the recipe's blocks of rows")
    name = "w"
    split: Sequence[Names] = [()] * len(shape)
    if not view.manual:
        split = lay_out_weight(name, declared, view.axes, len(shape), added_dims=added_dims).split
    sizes = [size // view.axes.size(names) for size, names in zip(shape, split, strict=True)]
    widths = {"w's dim 1": sizes[1], "w's columns": math.prod(sizes[2:])}
    weight = WeightSpec(
        name=name,
        declared=declared,
        axes=view.axes,
        recipe=recipe,
        kernels=select_kernels(kernels, dtype, **widths),
        dtype=dtype,
        grad_reduce=reduce,
        added_dims=added_dims,
    )
    apart = view.engine != "custom_partitioning" or not view.axes.tp
    return GroupedSpec(weight, align, apart)


def _grouped_matmul(
    view: MeshView,
    static: GroupedSpec,
    x,
    w,
    group_sizes: Int[Array, " groups"] | None,
    bias,
):
    """Runs `grouped_matmul`. With `group_sizes` None one group holds all rows."""
    if x.shape[0] == 0:  # y has no rows, and the gradient of each operand is 0
        sums = x.sum(1)
        return jnp.broadcast_to(sums.reshape(0, *[1] * (w.ndim - 2)), (0, *w.shape[2:]))
    _, (*operands, _) = _matmul.lay_out(view, static, x, w, group_sizes, bias, None)
    return _differentiable_matmul(view, static, *operands)


def _forward(view: MeshView, static: GroupedSpec, x, w, group_sizes, bias):
    gathered = None
    if static.apart:
        gathered = weights.gather_weight(view, GatherSpec(static.weight, "fprop"), w, None).operand
    (y,) = _matmul(view, static, x, w, group_sizes, bias, gathered)
    # tp splits the columns of y as it splits those of w. fsdp may split the columns of w too, and must split the rows
    # of y alone.
    if view.engine == "custom_partitioning":
        y = constrain(y, Spec(view.axes.tokens, *[FREE] * (y.ndim - 1)))
    return y, (x, w, group_sizes, bias)


def _backward(view: MeshView, static: GroupedSpec, saved, dy):
    x, w, group_sizes, bias = saved
    # The gather waits for nothing: behind dy it would wait for the scatters of the weights behind this one, since
    # collectives run in the order of their starts.
    gathered = None
    if static.apart:
        gathered = weights.gather_weight(view, GatherSpec(static.weight, "dgrad"), w, None).operand
    dx, d_bias, dw = _matmul_grad(view, static, x, w, group_sizes, dy, gathered)
    if static.apart:
        dw = weights.scatter_gradient(view, static.weight, dw, w)
    d_bias = None if bias is None else d_bias.astype(bias.dtype)
    return dx, dw.astype(w.dtype), None, d_bias


_differentiable_matmul = differentiable("grouped_matmul", _forward, _backward)


def matmul_forward(static: GroupedSpec, layout: WeightLayout, x, w, group_sizes, bias, gathered):
    """Returns y [M, *C] of one device, a partial sum where tp splits K. Without `gathered` it gathers w."""
    kernels = implementation(static.weight.kernels)
    if gathered is None:
        gathered = weights.gather_shard(GatherSpec(static.weight, "fprop"), layout, w, None).operand
    packed = kernels.pack_rows(group_sizes, static.align, x.shape[0])
    contracted = layout.split[1]
    rows, _ = _quantize_rows(static, packed, x, "x", wgrad=False)
    if bias is not None:
        bias = mask_to_first_rank(bias, contracted)
    y = packed.unpack(kernels.matmul(rows, gathered, packed.groups, static.weight.dtype, bias))
    columns = layout.whole_shape(w.shape, static.weight.axes)[2:]
    return (y.reshape(-1, *columns),)


def matmul_backward(static: GroupedSpec, layout: WeightLayout, x, w, group_sizes, dy, gathered):
    """Returns dx [M, K], dbias [E, *C] and dw of one device; without `gathered` dw is a shard, as w is."""
    weight = static.weight
    dtype = weight.dtype
    kernels = implementation(weight.kernels)
    if gathered is None:
        gathered = weights.gather_shard(GatherSpec(weight, "dgrad"), layout, w, None).operand
    packed = kernels.pack_rows(group_sizes, static.align, x.shape[0])
    groups = packed.groups
    contracted = layout.split[1]
    dgrad_dy, wgrad_dy = _quantize_rows(static, packed, dy, "dy")
    # [M, K] = [M, C] [E, K, C]^T
    dx = kernels.matmul(dgrad_dy, gathered, groups, dtype, transpose=True)
    dx = packed.unpack(dx)
    d_bias = mask_to_first_rank(kernels.bias_grad(packed.pack(dy), groups), contracted)
    _, wgrad_x = _quantize_rows(static, packed, x, "x", fprop_or_dgrad=False)
    dw = kernels.wgrad(wgrad_x, wgrad_dy, groups, dtype, weight.grad_dtype)  # [M, K]^T [M, C]
    dw = dw.reshape(layout.whole_shape(w.shape, weight.axes))
    if not static.apart:
        dw = weights.sum_shards(weight, layout, dw)
    return dx, d_bias, dw


def _quantize_rows(static: GroupedSpec, packed: Packing, x, role: Role, **wanted):
    """Returns rows [M, ...] as operands of fprop or dgrad, and of wgrad."""
    weight = static.weight
    rows = packed.pack(x)
    return implementation(weight.kernels).quantize_for_matmul(rows, weight.recipe, role, packed.groups, **wanted)


def _sharding(static: GroupedSpec, operands, operand_specs, *, backward: bool = False) -> OpSharding:
    """Returns the layout of a direction: rows are split as tokens are, and y is summed over the axes that split K."""
    _, w, group_sizes, bias_or_dy, gathered = operands
    weight = static.weight
    axes = weight.axes
    layout = find_layout(weight, operand_specs[1], w.ndim)
    _, contracted, *columns = layout.split
    x = Spec(axes.tokens, contracted)
    y = Spec(axes.tokens, *columns)
    bias = Spec(axes.ep, *columns)
    sizes = None if group_sizes is None else Spec(axes.tokens)
    whole = jax.tree.map(lambda _: Spec(axes.all), gathered)
    if not backward:
        forward_bias = None if bias_or_dy is None else bias
        return OpSharding((x, layout.spec, sizes, forward_bias, whole), (y,), (contracted,), layout)
    dw = layout.spec
    dw_axes = weights.replicas(weight, layout)
    if static.apart:
        dw = Spec(axes.all)
        dw_axes = ()
    reduce = (sum(columns, ()), axes.replica_axes + contracted, dw_axes)
    return OpSharding((x, layout.spec, sizes, y, whole), (x, bias, dw), reduce, layout)


def _backward_rule(static: GroupedSpec, operands) -> str:
    dw = "@" if static.apart else "e h *d"
    return f"m k, e h *d, @, m *c, @ -> m k, b *c, {dw}"


# The dims of a weight have names of their own, so that fsdp on K, or on *C in backward, does not move activations.
_matmul = Op("grouped_matmul", matmul_forward, "m k, e h *c, @, b *c, @ -> m *c", sharding=_sharding)
_matmul_grad = Op(
    "grouped_matmul_grad",
    matmul_backward,
    _backward_rule,
    sharding=functools.partial(_sharding, backward=True),
)
