"""Chunks: the tokens of a device in equal parts, which no data joins until their results are put together.

    tokens 0 to n - 1     dispatch   products   combine
    tokens n to T - 1                dispatch   products   combine        n = ceil(T / chunks)

XLA may then run the dispatch and the combine of one chunk beside the products of another. All chunks take the same
gathered weights. In backward the gradient of a weight goes from chunk to chunk and each one adds to it, so that it is
scattered once. Every chunk has buffers of its own, and overflow rounds of its own where its tokens need them.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree

from moax.block.moe import NO_TOTAL, BlockPlan, Inputs, Residuals, Weights
from moax.block.overflow import after, run_backward, run_forward
from moax.kernels import Operand
from moax.ops.weights import QuantizedWeight, WeightLayout


def forward_chunks(
    p: BlockPlan, layouts: tuple[WeightLayout, WeightLayout], inputs: Inputs, w: Weights[Array],
    gathered: tuple[Operand, Operand],
) -> tuple[Float[Array, "T H"], Int[Array, " 1"], Int[Array, " 1"], tuple[Residuals, ...]]:  # fmt: skip
    """Runs `run_forward` for each chunk: y, the dropped assignments, the most rounds, and the residuals by chunk."""
    made, known = [], None
    for chunk in _split(p, inputs):
        made.append(run_forward(p, layouts, _in_order(p, known, chunk), w, gathered))
        known = made[-1][0], made[-1][2]
    y, dropped, rounds, saved = zip(*made, strict=True)
    return _join(y, inputs.x), sum(dropped[1:], dropped[0]), functools.reduce(jnp.maximum, rounds), saved


def backward_chunks(
    p: BlockPlan, layouts: tuple[WeightLayout, WeightLayout], saved: tuple[Residuals, ...], inputs: Inputs | None,
    w: Weights[Array], quantized: tuple[QuantizedWeight | None, ...], gathered: tuple[Operand, Operand],
    dy: Float[Array, "T H"],
) -> tuple[Float[Array, "T H"], Float[Array, "T K"], Weights[Array]]:  # fmt: skip
    """Runs `run_backward` for each chunk, which adds its gradients of the weights to those of the chunks before it."""
    made, known = [], [residuals.overflow for residuals in saved[1:]] or None  # forward of all chunks comes first
    total: Weights[Any] = NO_TOTAL
    for chunk, residuals in zip(_split(p, (inputs, dy)), saved, strict=True):
        own, d_own = _in_order(p, known, chunk)
        *known, total = run_backward(p, layouts, residuals, own, w, quantized, gathered, d_own, total)
        made.append(known)
    dx, d_weights = zip(*made, strict=True)
    return _join(dx, dy), _join(d_weights, dy), total


def _split[T](p: BlockPlan, values: T) -> list[T]:
    """Returns the chunks of the arrays [T, ...] of a pytree; tokens of 0 and of no expert complete the last chunk."""
    if p.chunks == 1:
        return [values]
    size = p.first.exchange.tokens

    def complete(rows: Array) -> Array:
        none = p.first.exchange.num_experts if jnp.issubdtype(rows.dtype, jnp.integer) else 0
        return lax.pad(rows, jnp.asarray(none, rows.dtype), ((0, size * p.chunks - rows.shape[0], 0), (0, 0, 0)))

    values = jax.tree.map(complete, values)
    return [jax.tree.map(lambda rows, i=i: rows[i * size : (i + 1) * size], values) for i in range(p.chunks)]


def _join(chunks: tuple[Array, ...], like: Array) -> Array:
    """Returns the rows of all chunks, as many as `like` has."""
    return jnp.concatenate(chunks)[: like.shape[0]] if len(chunks) > 1 else chunks[0]


def _in_order[T](p: BlockPlan, known: PyTree, then: T) -> T:
    """Returns `then`, where chunks have loops on a CPU not before `known`; see `after`."""
    return after(known, then) if p.overflows else then
