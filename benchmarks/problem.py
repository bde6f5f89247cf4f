"""The operands of a case: x [M', K], dy [M', N] and w [G, K, N] of random values, with expert-sorted rows.

Moax's kernels need groups that start at multiples of 128 rows. M' is the most rows that M rows in G padded groups may
take, and padding is 0. For other kernels `Problem.packed` returns the M rows without padding. Groups of 3 and 2 rows:

    padded row    0 1 2 3 ... 127 128 129 130 ...
    packed row    0 1 2 -      -   3   4   -
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from benchmarks.cases import Case, Direction
from moax.kernels.groups import align_up
from moax.kernels.hopper.formats import BLOCK, Blocks, KMajorFp8, make_blocks


class Problem:
    """The arrays of one case, which its directions, recipes and peers share.

    Attributes:
      case: the shape.
      sizes: [G], rows of each group.
      starts: [G], the first padded row of each group.
      packed_starts: [G], the first packed row of each group.
      num_rows: M', the padded rows.
      index: [M] i32, the padded row of each packed row.
      group_sizes: `sizes` as a JAX array.
      x, dy, w: the operands in bf16.
    """

    def __init__(self, case: Case, seed: int = 0):
        self.case = case
        self.sizes = case.sizes
        padded = align_up(self.sizes, BLOCK)
        self.starts = np.cumsum(padded) - padded
        self.packed_starts = np.cumsum(self.sizes) - self.sizes
        self.num_rows = align_up(case.rows + min(case.groups, case.rows) * (BLOCK - 1), BLOCK)
        index = np.arange(case.rows) + np.repeat(self.starts - self.packed_starts, self.sizes)
        self.index = jnp.asarray(index, jnp.int32)
        keys = jax.random.split(jax.random.key(seed), 3)
        self.group_sizes = jnp.asarray(self.sizes)
        self.x = _rows(keys[0], self.index, self.num_rows, case.contracted)
        self.dy = _rows(keys[1], self.index, self.num_rows, case.columns)
        self.w = _normal(
            keys[2],
            (case.groups, case.contracted, case.columns),
            case.contracted**-0.5,
        )

    def blocks(self) -> Blocks:
        """Returns the groups in the form that moax's kernels take."""
        return _make_blocks(self.group_sizes, self.num_rows)

    def packed(self, name: str) -> Float[Array, "M C"]:
        """Returns `x` or `dy` without padding: packed[i] = x[index[i]]."""
        return _take(getattr(self, name), self.index)

    def operands(self, direction: Direction) -> tuple[jax.Array, jax.Array]:
        """Returns both operands of a direction in bf16, with the contracted dim last."""
        if direction == "wgrad":
            return self.x.T, self.dy.T
        if direction == "fwd":
            return (self.x, self.w.swapaxes(1, 2))
        return (self.dy, self.w)

    def quantized(self, direction: Direction) -> tuple[KMajorFp8, KMajorFp8]:
        """Returns `operands` in FP8, quantized by plain jnp."""
        left, right = self.operands(direction)
        return quantize_rows(left), quantize_rows(right) if direction == "wgrad" else quantize_weight(right)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key, shape, scale):
    return (jax.random.normal(key, shape, jnp.bfloat16) * scale).astype(jnp.bfloat16)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _rows(key, index, num_rows, width):
    rows = jax.random.normal(key, (index.shape[0], width), jnp.bfloat16)
    return jnp.zeros((num_rows, width), jnp.bfloat16).at[index].set(rows, unique_indices=True)


_make_blocks = jax.jit(make_blocks, static_argnums=1)


@jax.jit
def _take(x, index):
    return jnp.take(x, index, axis=0)


@jax.jit
def quantize_rows(x: Float[Array, "R K"]) -> KMajorFp8:
    """Quantizes rows in 1 x 128 blocks: scale[k // 128, r] = amax of a block / 448, and 1 for a block of zeros."""
    blocks = _pad(x, (1,)).reshape(x.shape[0], -1, BLOCK).astype(jnp.float32)
    scale = _scale(jnp.max(jnp.abs(blocks), axis=-1))
    data = (blocks / scale[..., None]).astype(jnp.float8_e4m3fn)
    return KMajorFp8(data.reshape(x.shape[0], -1)[:, : x.shape[1]], _pad(scale.T, (1,), 1.0))


@jax.jit
def quantize_weight(w: Float[Array, "E N K"]) -> KMajorFp8:
    """Quantizes weights in 128 x 128 blocks, as `quantize_rows` does rows."""
    groups, rows, columns = w.shape
    padded = _pad(w, (1, 2))
    blocks = padded.reshape(groups, padded.shape[1] // BLOCK, BLOCK, -1, BLOCK).astype(jnp.float32)
    scale = _scale(jnp.max(jnp.abs(blocks), axis=(2, 4)))
    data = (blocks / scale[:, :, None, :, None]).astype(jnp.float8_e4m3fn)
    return KMajorFp8(data.reshape(padded.shape)[:, :rows, :columns], scale)


def dequantize(operand: KMajorFp8, dtype=jnp.float32) -> Float[Array, "..."]:
    """Computes data * scale of rows [R, K] or of weights [E, K, N], in `dtype`."""
    data, scale = operand
    if data.ndim == 2:
        by_row = jnp.repeat(scale[:, : data.shape[0]].T, BLOCK, axis=1)[:, : data.shape[1]]
        return (data.astype(jnp.float32) * by_row).astype(dtype)
    whole = jnp.repeat(jnp.repeat(scale, BLOCK, axis=1), BLOCK, axis=2)[:, : data.shape[1], : data.shape[2]]
    return (data.astype(jnp.float32) * whole).astype(dtype)


def _scale(amax):
    return jnp.where(amax == 0.0, 1.0, amax / 448.0)


def _pad(x, axes: tuple[int, ...], value: float = 0.0):
    widths = [(0, align_up(n, BLOCK) - n if axis in axes else 0) for axis, n in enumerate(x.shape)]
    return jnp.pad(x, widths, constant_values=value)
