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

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moax.axes import Axes, Names, Roles
from moax.backend import Kernels, select_kernels
from moax.groups import group_starts, row_groups
from moax.ops.quantize import dequantize_local, gather_quantized, quantize_rows
from moax.partition import Contract, Engine, Partitioned, View, find_view, scatter_gradient, vary_like
from moax.recipe import Recipe, get_recipe
from moax.sharding import Spec, keep_rows, pad, spec, weight_layout
from moax.types import QArray


@dataclasses.dataclass(frozen=True)
class GroupedSpec:
    """recipe; align: rows to which group starts are aligned; dtype: of the products; declared: how w lies where its
    type does not say."""

    recipe: Recipe
    align: int
    dtype: jnp.dtype
    declared: Spec
    roles: Roles


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
    select_kernels(kernels)
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
    static = GroupedSpec(recipe, align, jnp.dtype(x.dtype), declared, view.roles)
    return grouped(view, static, x, w, group_sizes, bias)


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


def matmul_local(x, w, group_sizes, align: int, dtype, *, transpose: bool = False):
    """Forward, or dgrad with `transpose`, of one device; x and w arrays or QArrays -> [M, *C] or [M, K] in `dtype`.
    `group_sizes` None: one group, all rows."""
    x, w = _plain(x, dtype), _plain(w, dtype)
    columns = w.shape[1:2] if transpose else w.shape[2:]
    w = w.reshape(*w.shape[:2], -1)
    x = x.reshape(x.shape[0], -1)
    width = w.shape[1] if transpose else w.shape[2]
    contract = (((1,), (1 if transpose else 0,)), ((), ()))
    if group_sizes is None:
        return _dot(x, w[0], contract).astype(dtype).reshape(x.shape[0], *columns)
    size, tiles = _tiles(group_sizes, align, x.shape[0])

    def body(i, y):
        group, at, real = tiles(i)
        rows = lax.dynamic_slice_in_dim(x, at, size)
        part = _dot(rows, lax.dynamic_index_in_dim(w, group, keepdims=False), contract).astype(dtype)
        old = lax.dynamic_slice_in_dim(y, at, size)
        return lax.dynamic_update_slice_in_dim(y, jnp.where(real[:, None], part, old), at, 0)

    y = vary_like(jnp.zeros((x.shape[0], width), dtype), x, w, group_sizes)
    y = lax.fori_loop(0, tiles.count, body, y)
    return y.reshape(x.shape[0], *columns)


def wgrad_local(x, dy, group_sizes, align: int, dtype):
    """[M, K], [M, *C] -> [E, K, *C] in `dtype`, summed in float32; arrays or QArrays. `group_sizes` None: one group."""
    x, dy = _plain(x, dtype), _plain(dy, dtype)
    columns = dy.shape[1:]
    dy = dy.reshape(dy.shape[0], -1)
    if group_sizes is None:
        return _dot(x, dy, (((0,), (0,)), ((), ()))).astype(dtype).reshape(1, x.shape[1], *columns)
    size, tiles = _tiles(group_sizes, align, x.shape[0])

    def body(i, dw):
        group, at, real = tiles(i)
        rows, d_rows = (
            jnp.where(real[:, None], lax.dynamic_slice_in_dim(v, at, size), jnp.zeros((), v.dtype)) for v in (x, dy)
        )
        part = lax.dynamic_index_in_dim(dw, group, keepdims=False) + _dot(rows, d_rows, (((0,), (0,)), ((), ())))
        return lax.dynamic_update_index_in_dim(dw, part, group, 0)

    dw = jnp.zeros((group_sizes.shape[0], x.shape[1], dy.shape[1]), jnp.float32)
    dw = lax.fori_loop(0, tiles.count, body, vary_like(dw, x, dy, group_sizes))
    return dw.astype(dtype).reshape(*dw.shape[:2], *columns)


def add_bias(y, bias, group_sizes, align: int):
    """y[m] + bias[g(m)]; padding as it was."""
    bias = bias.astype(y.dtype)
    if group_sizes is None:
        return y + bias
    group, real = row_groups(group_sizes, align, y.shape[0])
    return jnp.where(real.reshape(-1, *[1] * (y.ndim - 1)), y + bias[group], y)


def bias_grad(dy, group_sizes, align: int):
    """dbias[g] = the sum of the group's dy, in float32."""
    if group_sizes is None:
        return dy.astype(jnp.float32).sum(0, keepdims=True)
    group, real = row_groups(group_sizes, align, dy.shape[0])
    rows = jnp.where(real.reshape(-1, *[1] * (dy.ndim - 1)), dy.astype(jnp.float32), 0.0)
    return jax.ops.segment_sum(rows, group, num_segments=group_sizes.shape[0])


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


def _tiles(group_sizes, align, num_rows):
    """Rows a tile, a power of two near the mean group, and the tiles."""
    mean = max(1, num_rows // group_sizes.shape[0])
    size = min(num_rows, max(16, min(512, 1 << (mean - 1).bit_length())))
    return size, _Tiles(group_sizes, align, num_rows, size)


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


def _forward_local(static: GroupedSpec, layout, x, w, group_sizes, bias):
    layout, kept = layout
    recipe, roles = static.recipe, static.roles
    real = None if group_sizes is None else row_groups(group_sizes, static.align, x.shape[0])[1]
    w = gather_quantized(w, recipe.w, "rows", layout.gather, _amax_over(layout, kept), static.dtype)
    x = quantize_rows(x, recipe.x, "columns", roles.tokens + kept[1], real)
    y = matmul_local(x, w, group_sizes, static.align, static.dtype)
    if bias is None:
        return (y,)
    return (add_bias(y, once(bias, kept[1]), group_sizes, static.align),)


def _backward_local(static: GroupedSpec, layout, x, w, group_sizes, dy):
    layout, kept = layout
    recipe, roles, align, dtype = static.recipe, static.roles, static.align, static.dtype
    real = None if group_sizes is None else row_groups(group_sizes, align, x.shape[0])[1]
    columns = tuple(n for names in kept[2:] for n in names)
    whole = gather_quantized(w, recipe.w, "columns", layout.gather, _amax_over(layout, kept), dtype)
    dx = matmul_local(
        quantize_rows(dy, recipe.dy, "columns", roles.tokens + columns, real), whole, group_sizes, align, dtype,
        transpose=True,
    )  # fmt: skip
    dw = wgrad_local(
        quantize_rows(x, recipe.x, "rows", roles.tokens + kept[1], real),
        quantize_rows(dy, recipe.dy, "rows", roles.tokens + columns, real),
        group_sizes, align, dtype,
    )  # fmt: skip
    dbias = once(bias_grad(dy, group_sizes, align), kept[1])
    return dx, scatter_gradient(dw, layout.gather).astype(w.dtype), dbias


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
