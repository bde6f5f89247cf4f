"""Grouped wgrad: dw[g] = sum over rows m of group g: x[m]^T dy[m], the gradient of a grouped matmul's weight.

    forward   dw[g]  = sum over m of g: x[m]^T dy[m]      x [M, K], dy [M, *C]  -> [E, K, *C]
    backward  dx[m]  = dy[m] ddw[g(m)]^T                  ddy[m] = x[m] ddw[g(m)]

Rows lie as in `moax.groups`. Padding may hold anything, NaN included. An empty group has dw 0. With a recipe x and dy
are quantized along their rows, in its formats `x` and `dy`. Sums are float32.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer

from moax.checks import check_float, check_int
from moax.kernels import implementation, select_kernels
from moax.mesh.axes import Axes
from moax.mesh.collectives import scatter_gradient
from moax.mesh.partition import Contract, Engine, MeshView, Partitioned, differentiable, find_mesh_view
from moax.mesh.specs import Spec, check_spec, spec
from moax.ops.grouped import GroupedSpec, axes_of_matrix, factors, find_layout, replicated, widths_of
from moax.ops.operands import check_align, product_dtypes, wider
from moax.recipe import Recipe, get_recipe


def grouped_wgrad(
    x: Float[Array, "M K"],
    dy: Float[Array, "M *C"],
    group_sizes: Integer[Array, " groups"],
    *,
    recipe: str | Recipe | None = None,
    align: int | None = None,
    preferred_element_type: DTypeLike | None = None,
    w_spec: Spec | None = None,
    axes: Axes = Axes(),
    engine: Engine = "auto",
    kernels: str = "auto",
) -> Float[Array, "E K *C"]:
    """dw[g] = sum over rows m of group g: x[m]^T dy[m].

    Args:
      x: [M, K], floating point, rows sorted by group, M over (dp, fsdp, ep, cp), K over tp where `w_spec` says so.
      dy: [M, *C], floating point, rows as those of x, a dim of *C over tp where `w_spec` says so.
      group_sizes: see `grouped_matmul`. On a mesh the sizes of all shards follow one another: [shards * E / ranks].
      recipe: the name of a recipe, a Recipe, or None to quantize nothing.
      align: each group starts at a multiple of so many rows. The default is the recipe's `row_alignment`.
      preferred_element_type: the dtype of dw; None is that of x. Devices sum in this dtype too.
      w_spec: the spec of dw, on any mesh. The default splits E over ep and no other dim.
      axes, engine, kernels: see `moax.Options`. Inside a `shard_map` dw is the caller's to sum over dp, and over fsdp
        where `w_spec` does not name it.

    Returns:
      dw: [E, K, *C], laid out by `w_spec`: summed over dp, and reduce-scattered over fsdp where the spec names it. It
      is differentiable in x and dy; these gradients have the dtypes of their arrays.

    Raises:
      ValueError: the shapes do not fit, align is no multiple of the recipe's blocks of rows, or dw cannot have the
        layout `w_spec`.
      Unsupported: the engine or the kernels that were chosen by name cannot run; the kernels of `xla` alone compute a
        dw that is wider than x.
    """
    check_float("x", x, "[M, K]")
    check_float("dy", dy, "[M, *C]")
    check_int("group_sizes", group_sizes, "[E]")
    recipe = get_recipe(recipe)
    align = check_align(align, recipe)
    if x.ndim != 2 or dy.ndim < 2 or group_sizes.ndim != 1 or x.shape[0] != dy.shape[0]:
        raise ValueError(
            f"x, dy, group_sizes have shapes {x.shape}, {dy.shape}, {group_sizes.shape}; they must be "
            "[M, K], [M, *C], [E]"
        )
    view = find_mesh_view(axes, engine, x, dy)
    roles = view.roles
    ranks = 1 if view.manual else roles.size(roles.tokens) // roles.size(roles.ep)
    if group_sizes.shape[0] % ranks:
        raise ValueError(f"group_sizes has {group_sizes.shape[0]} entries; on this mesh it must have {ranks} * E")
    shape = group_sizes.shape[0] // ranks, x.shape[1], *dy.shape[1:]
    given = spec(roles.ep) if w_spec is None else check_spec("w_spec", w_spec, len(shape))
    declared = spec(*given, *[None] * (len(shape) - len(given)))
    dtype, out = product_dtypes(x, preferred_element_type)
    chosen = select_kernels(kernels, wider(dtype, out), **widths_of(view, shape, declared))
    static = GroupedSpec(recipe, align, dtype, out, declared, roles, chosen, roles.tokens, view.manual)
    if x.shape[0] == 0:
        return jnp.zeros(shape, out)
    sizes = jnp.asarray(group_sizes).astype(jnp.int32)
    return _wgrad(view, static, *_forward.lay_operands(view, static, x, dy, sizes))


def _wgrad_forward(view: MeshView, static: GroupedSpec, x, dy, group_sizes):
    """Runs the forward of the `custom_vjp` and returns dw, and the operands."""
    return _forward(view, static, x, dy, group_sizes)[0], (x, dy, group_sizes)


def _wgrad_backward(view: MeshView, static: GroupedSpec, saved, d_dw):
    """Runs the backward of the `custom_vjp` and returns the gradients of x and dy."""
    return *_backward(view, static, *saved, d_dw), None


_wgrad = differentiable(_wgrad_forward, _wgrad_backward, once="grouped_wgrad")


def wgrad_forward(static: GroupedSpec, layout, x, dy, group_sizes):
    """Returns dw [E, K, *C] of the shard of one device; it is a partial sum over dp."""
    (layout, kept), kernels, recipe = layout, implementation(static.kernels), static.recipe
    packed = kernels.pack_rows(group_sizes, static.align, x.shape[0])
    columns, tokens = tuple(n for names in kept[2:] for n in names), static.rows
    dtype, groups = static.dtype, packed.groups
    quantize = functools.partial(kernels.quantize_for_matmul, rows=False)
    _, x_columns = quantize(packed.pack(x), recipe, "x", groups, tokens + kept[1])
    _, d_columns = quantize(packed.pack(dy.astype(dtype)), recipe, "dy", groups, tokens + columns)
    dw = kernels.wgrad(x_columns, d_columns, groups, wider(dtype, static.out)).astype(static.out)
    return (scatter_gradient(dw.reshape(-1, x.shape[1], *dy.shape[1:]), layout.gather),)


def wgrad_backward(static: GroupedSpec, layout, x, dy, group_sizes, d_dw):
    """Returns the gradients of x [M, K] and dy [M, *C] of one device, from the shard of d_dw."""
    (layout, kept), kernels, recipe, dtype = layout, implementation(static.kernels), static.recipe, static.dtype
    packed = kernels.pack_rows(group_sizes, static.align, x.shape[0])
    columns, tokens, groups = tuple(n for names in kept[2:] for n in names), static.rows, packed.groups
    over = axes_of_matrix(layout, kept)
    by_rows, by_columns = (
        kernels.quantize_and_gather(d_dw, recipe, contracted, layout.gather, over, dtype)
        for contracted in ("rows", "columns")
    )
    quantize = functools.partial(kernels.quantize_for_matmul, columns=False)
    x_rows, _ = quantize(packed.pack(x), recipe, "x", groups, tokens + kept[1])
    d_rows, _ = quantize(packed.pack(dy.astype(dtype)), recipe, "dy", groups, tokens + columns)
    d_x = packed.unpack(kernels.matmul(d_rows, by_columns, groups, dtype, transpose=True))
    d_dy = packed.unpack(kernels.matmul(x_rows, by_rows, groups, dtype))
    return d_x.astype(x.dtype), d_dy.astype(dy.dtype).reshape(dy.shape)


def _specs(static: GroupedSpec, found_spec):
    """Returns the Layout of dw, the axes that its dims keep, and the specs of x, dy and the sizes."""
    layout, kept = find_layout(static, found_spec, len(static.declared))
    return layout, kept, (spec(static.rows, kept[1]), spec(static.rows, *kept[2:]), spec(static.rows))


def _forward_contract(static: GroupedSpec, operands, found_specs):
    """Returns the contract of forward: dw has the declared layout, and is summed over axes that it does not name."""
    layout, kept, specs = _specs(static, None)
    return Contract(specs, (layout.spec,), (replicated(static.roles, layout),), (layout, kept))


def _backward_contract(static: GroupedSpec, operands, found_specs):
    """Returns the contract of backward: each gradient has the layout of its array."""
    layout, kept, specs = _specs(static, found_specs[3])
    columns = tuple(n for names in kept[2:] for n in names)
    return Contract((*specs, layout.spec), specs[:2], (columns, kept[1]), (layout, kept))


# The dims of dw have names of their own, so that fsdp there does not move activations.
_forward = Partitioned(
    wgrad_forward,
    _forward_contract,
    lambda static, operands: factors(operands, ("m k", "m *", "g"), ("e h +",), operands[1].ndim + 1),
    name="grouped_wgrad",
)
_backward = Partitioned(
    wgrad_backward,
    _backward_contract,
    lambda static, operands: factors(operands, ("m k", "m *", "g", "e h +"), ("m k", "m *"), operands[1].ndim + 1),
    name="grouped_wgrad_grad",
)
