"""Grouped matmul: each group of rows times its own matrix.

    forward  y[m]  = x[m] w[g(m)] + bias[g(m)]       x [M, K], w [E, K, *C]  -> [M, *C]
    dgrad    dx[m] = dy[m] w[g(m)]^T                 contracts *C            -> [M, K]
    wgrad    dw[g] = sum over m of g: x[m]^T dy[m]   contracts rows          -> [E, K, *C]
    dbias[g]       = sum over m of g: dy[m]

Rows lie as in `moax.groups`: group g starts at a multiple of `align`; padding may hold anything, NaN included, and is
0 in y and dx. An empty group has a zero gradient. With a recipe each operand is quantized along the contracted dim
just before its product (the weight on its shard, then gathered as bytes); sums are float32.

On XLA the work is proportional to the rows: one product a tile of rows, in a loop over as many tiles as there are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moax.backend import KERNEL_WIDTH, Kernels, select_kernels
from moax.groups import Groups, group_starts, row_groups, zero_rows
from moax.kernels import mosaic
from moax.mesh.axes import Axes, Names, Roles
from moax.mesh.collectives import scatter_gradient, vary_like
from moax.mesh.partition import Contract, Engine, Partitioned, View, find_view
from moax.mesh.place import keep_rows
from moax.mesh.specs import Spec, pad, spec, weight_layout
from moax.ops.quantization import dequantize_local, enter_rows, fits_operand, gather_operand, gather_quantized
from moax.recipe import Recipe, get_recipe
from moax.types import Operand, QArray


@dataclasses.dataclass(frozen=True)
class GroupedSpec:
    """recipe; align: rows to which group starts are aligned; dtype: of the products; declared: how w lies where its
    type does not say; kernels: which implementation runs."""

    recipe: Recipe
    align: int
    dtype: jnp.dtype
    declared: Spec
    roles: Roles
    kernels: Literal["xla", "mosaic"] = "xla"


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
    kernels: Kernels = "auto",
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
    view = find_view(axes, engine, x, w)
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


def widths_of(view: View, shape, declared: Spec) -> dict[str, int]:
    """Columns and contracted elements of a weight [E, K, *C] on one device, by name."""
    kept = ((),) * len(shape) if view.manual else kept_axes(declared, len(shape), view.roles)
    _, rows, *columns = (n // view.roles.size(names) for n, names in zip(shape, kept, strict=True))
    return {"w's dim 1": rows, "w's columns": math.prod(columns)}


def grouped(view: View, static: GroupedSpec, x, w, group_sizes, bias):
    """`grouped_matmul` on a view of the mesh; `group_sizes` None: one group, all rows."""
    return _grouped(view, static, *_forward.lay(view, static, x, w, group_sizes, bias))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _grouped(view: View, static: GroupedSpec, x, w, group_sizes, bias):
    (y,) = _forward(view, static, x, w, group_sizes, bias)
    # Columns take the sharding of w's, for tp; fsdp there must not win over the rows' own.
    return keep_rows(y, view.roles) if view.engine == "custom_partitioning" else y


def _grouped_fwd(view, static, x, w, group_sizes, bias):
    return _grouped(view, static, x, w, group_sizes, bias), (x, w, group_sizes, bias)


def _grouped_bwd(view, static, residuals, dy):
    x, w, group_sizes, bias = residuals
    w, dy = lax.optimization_barrier((w, dy))  # gather again, rather than keep what forward gathered
    dx, dw, dbias = _backward(view, static, x, w, group_sizes, dy)
    return dx, dw, None, None if bias is None else dbias.astype(bias.dtype)


_grouped.defvjp(_grouped_fwd, _grouped_bwd)


def matmul_local(x: Any, w: Any, groups: Groups, dtype, bias: Any = None, *, transpose: bool = False):
    """Forward, or dgrad with `transpose`, of one device -> [M, N] in `dtype`, all columns in one dim.

    x, w: arrays or QArrays [M, ...], [E, K, *C]; or Operands. bias: [E, *C]; kernels add it before they round, XLA
    after. Padding of the result may hold anything.
    """
    bias = None if bias is None else bias.reshape(bias.shape[0], -1)
    if isinstance(x, Operand):
        return mosaic.matmul(x, w, groups.blocks, dtype, bias)
    x, w = _plain(x, dtype), _plain(w, dtype)
    x, w = x.reshape(x.shape[0], -1), w.reshape(*w.shape[:2], -1)
    if groups.blocks is not None:
        return mosaic.matmul(x, w, groups.blocks, dtype, bias, transpose=transpose)
    y = _matmul_xla(x, w, groups, dtype, transpose)
    return y if bias is None else add_bias(y, bias, groups)


def _matmul_xla(x, w, groups: Groups, dtype, transpose: bool):
    width = w.shape[1] if transpose else w.shape[2]
    contract = (((1,), (1 if transpose else 0,)), ((), ()))
    if groups.sizes is None:
        return _dot(x, w[0], contract).astype(dtype)
    size, tiles = _tiles(groups, x.shape[0])

    def body(i, y):
        group, at, real = tiles(i)
        rows = lax.dynamic_slice_in_dim(x, at, size)
        part = _dot(rows, lax.dynamic_index_in_dim(w, group, keepdims=False), contract).astype(dtype)
        old = lax.dynamic_slice_in_dim(y, at, size)
        return lax.dynamic_update_slice_in_dim(y, jnp.where(real[:, None], part, old), at, 0)

    y = vary_like(jnp.zeros((x.shape[0], width), dtype), x, w, groups.sizes)
    return lax.fori_loop(0, tiles.count, body, y)


def wgrad_local(x: Any, dy: Any, groups: Groups, dtype):
    """[M, K], [M, ...] -> [E, K, N] in `dtype`, summed in float32; arrays or QArrays, or Operands [K, M], [N, M].

    For the kernels, arrays are 0 in padding.
    """
    if isinstance(x, Operand):
        return mosaic.wgrad(x, dy, groups.blocks, dtype)
    x, dy = _plain(x, dtype), _plain(dy, dtype)
    x, dy = x.reshape(x.shape[0], -1), dy.reshape(dy.shape[0], -1)
    if groups.blocks is not None:
        return mosaic.wgrad(x, dy, groups.blocks, dtype)
    if groups.sizes is None:
        return _dot(x, dy, (((0,), (0,)), ((), ()))).astype(dtype)[None]
    size, tiles = _tiles(groups, x.shape[0])

    def body(i, dw):
        group, at, real = tiles(i)
        rows, d_rows = (zero_rows(lax.dynamic_slice_in_dim(v, at, size), real) for v in (x, dy))
        part = lax.dynamic_index_in_dim(dw, group, keepdims=False) + _dot(rows, d_rows, (((0,), (0,)), ((), ())))
        return lax.dynamic_update_index_in_dim(dw, part, group, 0)

    dw = jnp.zeros((groups.sizes.shape[0], x.shape[1], dy.shape[1]), jnp.float32)
    return lax.fori_loop(0, tiles.count, body, vary_like(dw, x, dy, groups.sizes)).astype(dtype)


def add_bias(y, bias, groups: Groups):
    """y[m] + bias[g(m)]; padding as it was."""
    bias = bias.astype(y.dtype)
    if groups.real is None:
        return y + bias
    group = row_groups(groups.sizes, groups.align, y.shape[0])[0]
    return jnp.where(groups.real.reshape(-1, *[1] * (y.ndim - 1)), y + bias[group], y)


def bias_grad(dy, groups: Groups):
    """dbias[g] = the sum of the group's dy, in float32. By the kernels, where `groups` has blocks for them, the rows of
    padding in dy must be 0."""
    if groups.real is None:
        return dy.astype(jnp.float32).sum(0, keepdims=True)
    experts = groups.sizes.shape[0]
    if groups.blocks is not None:  # a product with ones: on a GPU XLA's scatter takes several times as long
        ones = jnp.ones((dy.shape[0], KERNEL_WIDTH), dy.dtype)
        sums = mosaic.wgrad(ones, dy.reshape(dy.shape[0], -1), groups.blocks, jnp.float32)
        return sums[:, 0].reshape(experts, *dy.shape[1:])
    group = row_groups(groups.sizes, groups.align, dy.shape[0])[0]
    return jax.ops.segment_sum(zero_rows(dy.astype(jnp.float32), groups.real), group, num_segments=experts)


def once(x, names: Names):
    """What only the first of the ranks along `names` adds to their sum."""
    first = functools.reduce(jnp.logical_and, [lax.axis_index(n) == 0 for n in names], True)
    return jnp.where(first, x, jnp.zeros_like(x))


def _plain(x, dtype):
    return dequantize_local(x, dtype) if isinstance(x, QArray) else x.astype(dtype)


def _dot(a, b, contract):
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


class _Tiles:
    """Tile i of the groups' rows: its group, its first row, and which of its rows are real."""

    def __init__(self, group_sizes, align, num_rows, size):
        per_group = -(-group_sizes // size)
        self.last = jnp.cumsum(per_group)
        self.count = self.last[-1]
        self.before = self.last - per_group
        self.start = group_starts(group_sizes, align)
        self.end = self.start + group_sizes
        self.num_rows, self.size = num_rows, size

    def __call__(self, i):
        group = jnp.searchsorted(self.last, i, side="right").astype(jnp.int32)
        first = self.start[group] + (i - self.before[group]) * self.size
        at = jnp.minimum(first, self.num_rows - self.size)  # a tile never hangs over the end; it overlaps instead
        rows = at + jnp.arange(self.size, dtype=jnp.int32)
        return group, at, (rows >= first) & (rows < self.end[group])


def _tiles(groups: Groups, num_rows):
    """Rows a tile, a power of two near the mean group, and the tiles."""
    mean = max(1, num_rows // groups.sizes.shape[0])
    size = min(num_rows, max(16, min(512, 1 << (mean - 1).bit_length())))
    return size, _Tiles(groups.sizes, groups.align, num_rows, size)


def kept_axes(of: Spec, ndim: int, roles: Roles) -> tuple[Names, ...]:
    """What a product leaves split of a weight [E, K, *C]: E over ep, and K or *C over tp where the spec has it."""
    entries = pad(of, ndim)
    return (roles.ep, *(roles.tp if roles.tp and roles.tp[0] in entry else () for entry in entries[1:]))


def _layout(static: GroupedSpec, found, ndim):
    of = static.declared if found is None else found
    kept = kept_axes(of, ndim, static.roles)
    return weight_layout("w", of, kept, static.roles), kept


def _amax_over(layout, kept):
    """The axes that split a matrix."""
    return tuple(n for names in layout.gather[1:] + kept[1:] for n in names)


def _sizes_spec(static, group_sizes):
    return None if group_sizes is None else spec(static.roles.tokens)


def _weight(static: GroupedSpec, layout, kept, w, contracted, fp8: bool):
    over = _amax_over(layout, kept)
    if fp8 and static.recipe.w is not None:
        return gather_operand(w, static.recipe.w, contracted, layout.gather, over)
    return gather_quantized(w, static.recipe.w, contracted, layout.gather, over, static.dtype)


def _runs_fp8(static: GroupedSpec, layout, w) -> bool:
    return static.kernels == "mosaic" and static.recipe.hopper_fp8 and fits_operand(w, layout.gather)


def _forward_local(static: GroupedSpec, layout, x, w, group_sizes, bias):
    layout, kept = layout
    fp8, packing = (
        _runs_fp8(static, layout, w),
        mosaic.Packing(group_sizes, static.align, x.shape[0], static.kernels == "mosaic"),
    )
    columns = [n * static.roles.size(names) for n, names in zip(w.shape, layout.gather, strict=True)][2:]
    over = static.roles.tokens + kept[1]
    rows, _ = enter_rows(packing.pack(x), static.recipe.x, packing.groups, over, fp8=fp8)
    bias = None if bias is None else once(bias, kept[1])
    y = matmul_local(rows, _weight(static, layout, kept, w, "rows", fp8), packing.groups, static.dtype, bias)
    return (packing.unpack(y).reshape(-1, *columns),)


def _backward_local(static: GroupedSpec, layout, x, w, group_sizes, dy):
    layout, kept = layout
    recipe, tokens, dtype = static.recipe, static.roles.tokens, static.dtype
    fp8, packing = (
        _runs_fp8(static, layout, w),
        mosaic.Packing(group_sizes, static.align, x.shape[0], static.kernels == "mosaic"),
    )
    groups = packing.groups
    columns = tuple(n for names in kept[2:] for n in names)
    whole = _weight(static, layout, kept, w, "columns", fp8)
    d_rows, d_columns = enter_rows(packing.pack(dy), recipe.dy, groups, tokens + columns, fp8=fp8)
    _, x_columns = enter_rows(packing.pack(x), recipe.x, groups, tokens + kept[1], fp8=fp8)
    dx = packing.unpack(matmul_local(d_rows, whole, groups, dtype, transpose=True))
    dw = wgrad_local(x_columns, d_columns, groups, dtype)
    shape = [n * static.roles.size(names) for n, names in zip(w.shape, layout.gather, strict=True)]
    dbias = once(bias_grad(dy, packing.own), kept[1])
    return dx, scatter_gradient(dw.reshape(shape), layout.gather).astype(w.dtype), dbias


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
    _forward_local,
    _forward_contract,
    lambda static, operands: _factors(operands, ("m k", "e h *", "g", "b *"), ("m *",)),
    name="grouped_matmul",
)
_backward = Partitioned(
    _backward_local,
    _backward_contract,
    lambda static, operands: _factors(operands, ("m k", "e h +", "g", "m *"), ("m k", "e h +", "b *")),
    name="grouped_matmul_grad",
)
