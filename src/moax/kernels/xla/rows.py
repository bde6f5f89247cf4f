"""Operations on rows by XLA: gathers, weighted sums, and the activation between the products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from moax.checks import Unsupported
from moax.groups import Groups, find_groups, zero_rows
from moax.kernels.xla.quantization import quantize_for_matmul
from moax.mesh.axes import Names
from moax.recipe import Format, Recipe, Recipes


def top_k(x: Float[Array, "T E"], k: int) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
    """Returns the k largest of each row of x and their indices i32."""
    values, indices = lax.top_k(x, k)
    return values, indices.astype(jnp.int32)


def gather_rows(
    x: Float[Array, "R H"], gather_idx: Int[Array, " N"], groups: Groups | None = None
) -> Float[Array, "N H"]:
    """rows[n] = x[gather_idx[n]], 0 where it is R or more."""
    return jnp.take(x, gather_idx, axis=0, mode="fill", fill_value=0)


def gather_sum(
    rows: Float[Array, "N H"], scatter_idx: Int[Array, "R K"], weights: Array | None = None
) -> Float[Array, "R H"]:
    """y[r] = sum_k weights[r, k] rows[scatter_idx[r, k]] in float32."""
    total = jnp.zeros((), jnp.float32)
    for k in range(scatter_idx.shape[1]):  # K is small, and this way no array [R, K, H] is in memory
        index = scatter_idx[:, k]
        row = jnp.take(rows, index, axis=0, mode="fill", fill_value=0).astype(jnp.float32)
        if weights is not None:
            row = row * jnp.where(index < rows.shape[0], weights[:, k], 0.0)[:, None]
        total = total + row
    return total.astype(rows.dtype)


def put_rows(arrays: Sequence, source: Any, places: Any, way: int, out_rows: int, axes: Any) -> tuple:
    raise Unsupported("kernels='xla' cannot write into the memory of another device; use another exchange")


def matmul_gathers_rows(format: Format | None, width: int, hidden: int) -> bool:
    """Returns False: no product of XLA gathers its rows."""
    return False


def gather_and_quantize(
    x: Float[Array, "R H"], gather_idx: Int[Array, " N"], recipe: Recipe, role: str, groups: Groups,
    amax_over: Names = (), *, rows: bool = True, columns: bool = True, in_products: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """Runs `quantize_for_matmul` on the rows x[gather_idx]."""
    with jax.named_scope("permute"):
        gathered = gather_rows(x, gather_idx)
    return quantize_for_matmul(gathered, recipe, role, groups, amax_over)


def activate(
    h: Float[Array, "N G F"], act: Callable, recipe: Recipe, groups: Groups, *, weights: Array | None, amax_over: Names
) -> Any:
    """Returns the Operand of act(h), times the weight of each row."""
    with jax.named_scope("activate"):
        a = activate_rows(h, act, groups, weights)
    return quantize_for_matmul(a, recipe, "x", groups, amax_over)[0]


def activate_grad(
    h: Float[Array, "N G F"], d_a: Float[Array, "N F"], act: Callable, groups: Groups, weights: Float[Array, " N"]
) -> tuple[Float[Array, "N F"], Float[Array, "N G F"], Float[Array, " N"]]:
    """Returns act(h) times the weights, d_h, and inner [N] = <d_a, act(h)>."""
    with jax.named_scope("activate"):
        a, pull = jax.vjp(lambda h: activate_rows(h, act, groups), h)
        inner = jnp.sum(d_a.astype(jnp.float32) * a.astype(jnp.float32), axis=-1)
        (d_h,) = pull(scale_rows(d_a, weights, groups))
        return scale_rows(a, weights, groups), d_h, inner


def activate_grad_quantize(
    h: Float[Array, "N G F"], d_a: Float[Array, "N F"], act: Callable, recipes: Recipes, groups: Groups, *,
    weights: Float[Array, " N"], amax_over: Names,
) -> tuple[Any, Any, Any, Float[Array, " N"]]:  # fmt: skip
    """Runs `activate_grad`, and quantizes its results."""
    a, d_h, inner = activate_grad(h, d_a, act, groups, weights)
    _, a = quantize_for_matmul(a, recipes.wo, "x", groups, amax_over)
    return a, *quantize_for_matmul(d_h, recipes.wi, "dy", groups, amax_over), inner


def activate_rows(h: Float[Array, "N G F"], act: Callable, groups: Groups, weights: Any = None) -> Float[Array, "N F"]:
    """Returns act(h), computed in float32, times the weight of each row; weights None are 1."""
    a = act(*(h[:, g].astype(jnp.float32) for g in range(h.shape[1]))).astype(h.dtype)
    return a if weights is None else scale_rows(a, weights, groups)


def scale_rows(x: Float[Array, "N C"], weights: Float[Array, " N"], groups: Groups) -> Float[Array, "N C"]:
    """Returns each real row times its weight, multiplied in float32 and returned in the dtype of x; padding is 0."""
    return zero_rows(x.astype(jnp.float32) * weights[:, None], groups.real).astype(x.dtype)


class Packing:
    """A packing that moves no row: XLA's products take groups that start at any row."""

    def __init__(self, group_sizes: Any, align: int, num_rows: int):
        self.groups = find_groups(group_sizes, align, num_rows)

    def pack(self, x: Array) -> Array:
        return x  # the products do not read padding

    def unpack(self, y: Array) -> Array:
        return y  # the products left 0 in padding
