"""Sort chunks: rows come in chunks that follow one another, and leave in another order of chunks.

    rows[n] = x[m]        chunk j of the result is chunk order[j] of x

With x = (a, b, c, d, -), sizes = (1, 0, 3) and order = (2, 0, 1) the result is (b, c, d, a, 0). After an exchange the
rows of a rank come in chunks by (source rank, expert); the order (expert, source rank) groups them by expert. Rows past
the last chunk may hold anything, NaN included, and are 0 in the result. Each shard sorts its own chunks, so the op does
not communicate. Transformer Engine calls it `sort_chunks_by_index`.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Integer

from moax.checks import check_float, check_int
from moax.kernels import DEFAULT, implementation, select_kernels
from moax.mesh.axes import Axes, ResolvedAxes
from moax.mesh.op import Op, with_gradient
from moax.mesh.specs import Engine, find_mesh_view


@dataclasses.dataclass(frozen=True)
class ChunksSpec:
    """The static arguments of `sort_chunks`: the name of the implementation, and the mesh axes by role."""

    kernels: str
    axes: ResolvedAxes


def sort_chunks(
    x: Float[Array, "M *C"],
    sizes: Integer[Array, " chunks"],
    order: Integer[Array, " chunks"],
    *,
    axes: Axes = Axes(),
    engine: Engine = "auto",
    kernels: str = "auto",
) -> Float[Array, "M *C"]:
    """Returns the chunks of x in another order: chunk j of the result is chunk order[j] of x.

    Args:
      x: [M, *C], floating point, M over (dp, fsdp, ep, cp). Weights [M] of the rows are sorted by a second call.
      sizes: [chunks], integers, the rows of each chunk of x. On a mesh the sizes of all shards follow one another:
        [shards * chunks], sharded like the rows.
      order: [chunks], integers, each of [0, chunks) once; on a mesh as `sizes`, each shard with its own chunks.
      axes, engine, kernels: see `moax.Options`.

    Returns:
      [M, *C] in x.dtype, 0 past the last chunk. It is differentiable in x.

    Raises:
      ValueError: the shapes do not fit.
      Unsupported: the engine or the kernels that were chosen by name cannot run.
    """
    check_float("x", x, "[M, *C]")
    check_int("sizes", sizes, "[chunks]")
    check_int("order", order, "[chunks]")
    if x.ndim < 1 or sizes.ndim != 1 or sizes.shape != order.shape:
        raise ValueError(
            f"x, sizes, order have shapes {x.shape}, {sizes.shape}, {order.shape}; they must be [M, *C], [chunks], "
            "[chunks]"
        )
    view = find_mesh_view(axes, engine, x)
    chosen = select_kernels(kernels, x.dtype, **{"the rows' width": math.prod(x.shape[1:])})
    static = ChunksSpec(chosen if x.size else DEFAULT, view.axes)
    return _sort(view, static, x, *(jnp.asarray(v).astype(jnp.int32) for v in (sizes, order)))[0]


def sort_forward(static: ChunksSpec, x, sizes: Int[Array, " chunks"], order: Int[Array, " chunks"]):
    """Returns the chunks of x of one device, in another order."""
    return (_move(static, x, sizes[order], (jnp.cumsum(sizes) - sizes)[order]),)


def sort_backward(static: ChunksSpec, d_rows, sizes: Int[Array, " chunks"], order: Int[Array, " chunks"]):
    """Returns dx of one device: each chunk of d_rows, where it was in x."""
    placed = sizes[order]
    starts = jnp.zeros_like(sizes).at[order].set(jnp.cumsum(placed) - placed, unique_indices=True)
    return (_move(static, d_rows, sizes, starts),)


_sort = with_gradient(
    Op("sort_chunks", sort_forward, "r *c, @r, @r -> r *c"),
    Op("sort_chunks_grad", sort_backward, "r *c, @r, @r -> r *c"),
    save=lambda operands, results: operands[1:],
    pull=lambda grad, saved, d: (*grad(d[0], *saved), None, None),
    once="sort_chunks",
)


def _move(static: ChunksSpec, x, sizes, starts):
    """Returns chunks of these sizes, one after the other, of which each starts at its row `starts` of x."""
    # With sizes (3, 1) and starts (1, 0) the rows are x[1], x[2], x[3], x[0].
    num_rows, ends = x.shape[0], jnp.cumsum(sizes)
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    chunk = jnp.minimum(jnp.searchsorted(ends, rows, side="right").astype(jnp.int32), max(sizes.shape[0] - 1, 0))
    source = jnp.take(starts + sizes - ends, chunk, mode="clip") + rows if sizes.shape[0] else rows
    source = jnp.where(rows < (ends[-1] if sizes.shape[0] else 0), source, num_rows)
    with jax.named_scope("sort_chunks"):
        moved = implementation(static.kernels).gather_rows(x.reshape(num_rows, math.prod(x.shape[1:])), source)
    return moved.reshape(x.shape)
