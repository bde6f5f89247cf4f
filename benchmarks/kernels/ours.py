"""Moax's own kernels as the benchmarks call them. No other file of the benchmarks knows their names and arguments.

`gemm` returns a `Call`, which runs the Hopper kernels on a GPU, and the XLA implementation elsewhere. The `Blocks` of
rows are made before the clock starts, since a layer makes them once for all six matmuls.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.cases import Direction
from benchmarks.problem import Problem, dequantize
from benchmarks.report import HOPPER
from moax import backend
from moax.checks import Unsupported
from moax.kernels.hopper.formats import BLOCK, KMajorFp8
from moax.ops import grouped_matmul

KERNELS = "moax.kernels.hopper.pallas"


class Call(NamedTuple):
    """A call to time.

    Attributes:
      f, args: the call is f(*args).
      path: `hopper`, `xla` or `peer`.
      tile: the chosen tile, as text.
    """

    f: Callable
    args: tuple
    path: str
    tile: str = ""


def gemm(problem: Problem, direction: Direction, operands: tuple[KMajorFp8, KMajorFp8] | None) -> Call:
    """Returns the matmul of a direction in bf16, or in FP8 where `operands` are given."""
    left, right = (
        operands
        or {
            "fwd": (problem.x, problem.w),
            "dgrad": (problem.dy, problem.w),
            "wgrad": (problem.x, problem.dy),
        }[direction]
    )
    if backend.platform() != "gpu":
        return _xla_gemm(problem, direction, left, right)
    op = ("wgrad" if direction == "wgrad" else "matmul") + ("_fp8" if operands else "")
    kernel, pick = _kernel(op, f"grouped_{op}"), _kernel("tiles", "pick_tile")
    options: dict[str, Any] = {"out_dtype": jnp.bfloat16}
    if direction == "dgrad" and operands is None:
        options["transpose"], op = True, "matmul_transposed"
    case, rows = problem.case, problem.num_rows // problem.case.groups
    contracted, columns = (case.contracted, case.columns)[:: -1 if direction == "dgrad" else 1]
    tile = pick(op, contracted, columns, rows, backend.device_kind())

    @jax.jit
    def product(left, right, blocks):
        return kernel(left, right, blocks, tile, **options)

    name = " ".join(f"{field.name[0]}{getattr(tile, field.name)}" for field in dataclasses.fields(tile))
    return Call(product, (left, right, problem.blocks()), HOPPER, name)


def _xla_gemm(problem, direction, left, right) -> Call:
    """Returns the product by XLA, which dequantizes FP8 operands."""
    fp8 = isinstance(left, KMajorFp8)

    def forward(x, w, sizes):
        return grouped_matmul(x, w, sizes, align=BLOCK, kernels="xla")

    @jax.jit
    def product(left, right, sizes):
        left, right = (dequantize(v, jnp.bfloat16) if fp8 else v for v in (left, right))
        if direction == "fwd":  # An FP8 weight of forward is transposed, [E, N, K].
            return forward(left, right.swapaxes(1, 2) if fp8 else right, sizes)
        if direction == "dgrad":
            x = jnp.zeros((left.shape[0], right.shape[1]), left.dtype)
            return jax.vjp(lambda x: forward(x, right, sizes), x)[1](left)[0]
        left, right = (left.T, right.T) if fp8 else (left, right)
        w = jnp.zeros((sizes.shape[0], left.shape[1], right.shape[1]), left.dtype)
        return jax.vjp(lambda w: forward(left, w, sizes), w)[1](right)[0]

    return Call(product, (left, right, problem.group_sizes), "xla")


def _kernel(module: str, name: str) -> Callable:
    """Returns the kernel `name` of the module `module`."""
    if backend.platform() != "gpu":
        raise Unsupported(f"{name}: kernels for Hopper need a GPU; this is {backend.platform()}")
    try:
        return getattr(importlib.import_module(f"{KERNELS}.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"no kernel {KERNELS}.{module}.{name}: {error}") from error
