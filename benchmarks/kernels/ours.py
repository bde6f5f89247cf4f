"""Moax's own grouped matmuls as the benchmarks call them: by the Hopper kernels, or by XLA.

The `Blocks` of rows are made before the clock starts, since a layer makes them once for all six matmuls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.cases import Direction
from benchmarks.problem import Problem, dequantize
from benchmarks.report import HOPPER
from moax.kernels.device import find_device
from moax.kernels.hopper.formats import BLOCK, KMajorFp8
from moax.kernels.hopper.pallas import tiles
from moax.kernels.hopper.pallas.matmul import grouped_matmul
from moax.kernels.hopper.pallas.wgrad import grouped_wgrad
from moax.ops import grouped_matmul as grouped_matmul_of

# {op: (its kernel, its options, the directions that it computes)}
KERNELS: dict[str, tuple[Callable, dict[str, Any], tuple[Direction, ...]]] = {
    "matmul": (grouped_matmul, {}, ("fwd",)),
    "matmul_transposed": (grouped_matmul, {"transpose": True}, ("dgrad",)),
    "wgrad": (grouped_wgrad, {}, ("wgrad",)),
    "matmul_fp8": (grouped_matmul, {}, ("fwd", "dgrad")),
    "wgrad_fp8": (grouped_wgrad, {}, ("wgrad",)),
}
Operands = tuple[KMajorFp8, KMajorFp8] | None  # in FP8; None: those of the problem, in bf16


class Call(NamedTuple):
    """A call f(*args) to time, what runs it (`hopper`, `xla` or `peer`), and the chosen tile as text."""

    f: Callable
    args: tuple
    path: str
    tile: str = ""


def operands_of(problem: Problem, direction: Direction) -> tuple[jax.Array, jax.Array]:
    """Returns the operands of a direction in bf16."""
    return {"fwd": (problem.x, problem.w), "dgrad": (problem.dy, problem.w), "wgrad": (problem.x, problem.dy)}[
        direction
    ]


def dims(problem: Problem, direction: Direction) -> tuple[int, int, int]:
    """Returns the dims by which a tile is chosen: contracted K and columns N of the kernel, and the rows of a group."""
    case = problem.case
    contracted, columns = (case.contracted, case.columns)[:: -1 if direction == "dgrad" else 1]
    return contracted, columns, problem.num_rows // case.groups


def gemm(problem: Problem, direction: Direction, operands: Operands) -> Call:
    """Returns the matmul of a direction by the Hopper kernel with the tile that moax picks, and on a CPU by XLA."""
    if find_device().platform != "gpu":
        return xla_gemm(problem, direction, operands)
    fp8 = operands is not None
    op = next(op for op, (*_, those) in KERNELS.items() if direction in those and op.endswith("_fp8") == fp8)
    tile = tiles.pick_tile(op, *dims(problem, direction), find_device().device_kind)
    return hopper_gemm(problem, op, direction, operands, tile)


def hopper_gemm(problem: Problem, op: str, direction: Direction, operands: Operands, tile) -> Call:
    """Returns the matmul by the kernel of `op` with a tile."""
    kernel, options, _ = KERNELS[op]
    f = jax.jit(lambda left, right, blocks: kernel(left, right, blocks, tile, out_dtype=jnp.bfloat16, **options))
    name = " ".join(f"{field.name[0]}{getattr(tile, field.name)}" for field in dataclasses.fields(tile))
    return Call(f, (*(operands or operands_of(problem, direction)), problem.blocks()), HOPPER, name)


def xla_gemm(problem: Problem, direction: Direction, operands: Operands) -> Call:
    """Returns the matmul by XLA, which dequantizes FP8 operands."""

    def forward(x, w, sizes):
        return grouped_matmul_of(x, w, sizes, align=BLOCK, kernels="xla")

    @jax.jit
    def product(left, right, sizes):
        left, right = (dequantize(v, jnp.bfloat16) if operands else v for v in (left, right))
        if direction == "fwd":  # An FP8 weight of forward is transposed, [E, N, K].
            return forward(left, right.swapaxes(1, 2) if operands else right, sizes)
        if direction == "dgrad":
            x = jnp.zeros((left.shape[0], right.shape[1]), left.dtype)
            return jax.vjp(lambda x: forward(x, right, sizes), x)[1](left)[0]
        left, right = (left.T, right.T) if operands else (left, right)
        w = jnp.zeros((sizes.shape[0], left.shape[1], right.shape[1]), left.dtype)
        return jax.vjp(lambda w: forward(left, w, sizes), w)[1](right)[0]

    return Call(
        product,
        (*(operands or operands_of(problem, direction)), problem.group_sizes),
        "xla",
    )
