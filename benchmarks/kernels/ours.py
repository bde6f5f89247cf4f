"""Moax's own kernels as the benchmarks call them. No other file of the benchmarks knows their names and arguments.

`gemm` returns a `Call`, which runs the Hopper kernels on a GPU, and the XLA implementation elsewhere. The other
functions return a jitted function, and raise Unsupported without a GPU. The `Blocks` of rows are made before the clock
starts, since a layer makes them once for all six products.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.report import HOPPER
from moax import backend
from moax.errors import Unsupported
from moax.kernels.hopper.formats import BLOCK, Blocks, KMajorFp8
from moax.ops import grouped_matmul
from moax.tune.cases import Direction
from moax.tune.problem import Problem, dequantize

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


def gemm(
    problem: Problem, direction: Direction, operands: tuple[KMajorFp8, KMajorFp8] | None, waves: int | None = None
) -> Call:
    """Returns the product of a direction in bf16, or in FP8 where `operands` are given.

    `waves` replaces those of the kernel's tile.
    """
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
    tile = tile if waves is None else dataclasses.replace(tile, waves=waves)

    @jax.jit
    def product(left, right, blocks):
        return kernel(left, right, blocks, tile, **options)

    name = " ".join(f"{field.name[0]}{getattr(tile, field.name)}" for field in dataclasses.fields(tile))
    return Call(product, (left, right, problem.blocks()), HOPPER, name)


def add_wgrad(problem: Problem, operands: tuple[KMajorFp8, KMajorFp8] | None, times: int, in_kernel: bool) -> Call:
    """Returns `times` additions of the wgrad of bf16 operands, or of `operands` in FP8, to a total.

    The kernel of wgrad adds, or XLA adds what the kernel returns. The last argument is the total.
    """
    if backend.platform() != "gpu":
        raise Unsupported("the kernels run on a GPU")
    op = "wgrad_fp8" if operands else "wgrad"
    kernel, case = _kernel(op, f"grouped_{op}"), problem.case
    rows = problem.num_rows // case.groups
    tile = _kernel("tiles", "pick_tile")(op, case.contracted, case.columns, rows, backend.device_kind())

    @jax.jit
    def added(left, right, blocks, total):
        def once(_, total):
            some, total = jax.lax.optimization_barrier((left, total))  # else XLA takes wgrad out of the loop
            if in_kernel:
                return kernel(some, right, blocks, tile, out_dtype=total.dtype, total=total)
            return total + kernel(some, right, blocks, tile, out_dtype=total.dtype)

        return jax.lax.fori_loop(0, times, once, total)

    return Call(added, (*(operands or (problem.x, problem.dy)), problem.blocks()), HOPPER)


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


def quantize(blocks: Blocks | None, rows: bool, columns: bool) -> Callable:
    """Returns x -> (x quantized by rows or None, x quantized by columns or None).

    Forward and dgrad read the first result, wgrad the second one.
    """
    kernel = _kernel("quantize", "quantize_rows")
    return jax.jit(lambda x: kernel(x, blocks, rows=rows, columns=columns))


def quantize_weight(native: bool, transposed: bool) -> Callable:
    """Returns w -> (w in 128 x 128 blocks or None, the transposed w in 128 x 128 blocks or None)."""
    kernel = _kernel("quantize", "quantize_weight")
    return jax.jit(lambda w: kernel(w, native=native, transposed=transposed))


def activate(blocks: Blocks) -> Callable:
    """Returns h [M, 2 F] -> silu(gate) up [M, F], quantized by rows."""
    kernel = _kernel("activation", "activate_quantize")
    fp8 = jnp.float8_e4m3fn
    return jax.jit(lambda h: kernel(h, blocks, _swiglu, gated=True, weights=None, dtype=fp8))


def activate_grad(blocks: Blocks) -> Callable:
    """Returns (h [M, 2 F], d_a [M, F], weights [M]) -> (a by columns, d_h by rows and columns, parts of <d_a, a>)."""
    kernel = _kernel("activation", "activate_grad_quantize")
    formats = dict(dtype_x=jnp.float8_e4m3fn, dtype_dy=jnp.float8_e4m3fn)
    return jax.jit(lambda h, d_a, weights: kernel(h, d_a, blocks, _swiglu, weights=weights, **formats))


def _swiglu(gate, up):
    return jax.nn.silu(gate) * up


def gather_rows() -> Callable:
    """Returns (x [T, H], source [N], blocks) -> rows [N, H] with rows[n] = x[source[n]], up to the last group's."""
    return jax.jit(_kernel("permute", "gather_rows"))


def gather_quantize(rows: bool = True, columns: bool = True) -> Callable:
    """Returns (x, source, blocks) -> x[source] quantized by rows and by columns, as asked for, by one kernel."""
    kernel = _kernel("quantize", "quantize_rows")
    return jax.jit(lambda x, source, blocks: kernel(x, blocks, source=source, rows=rows, columns=columns))


def gather_then_quantize(rows: bool = True, columns: bool = True) -> Callable:
    """Returns the function of `gather_quantize` as two kernels, with the rows in memory between them."""
    gather, quantize = _kernel("permute", "gather_rows"), _kernel("quantize", "quantize_rows")
    options = {"rows": rows, "columns": columns}
    return jax.jit(lambda x, source, blocks: quantize(gather(x, source, blocks), blocks, **options))


def gather_sum() -> Callable:
    """Returns (rows, position [T, K], weights [T, K] or None) -> y[t] = sum_k weights[t, k] rows[position[t, k]]."""
    return jax.jit(_kernel("permute", "gather_sum"))


def exchange_sms() -> int:
    """Returns the number of multiprocessors that the one-sided exchange takes."""
    sms: Any = _kernel("exchange", "SMS")
    return sms


def _kernel(module: str, name: str) -> Callable:
    """Returns the kernel `name` of the module `module`.

    Raises:
      Unsupported: this machine has no GPU, or this version of moax has no such kernel.
    """
    if backend.platform() != "gpu":
        raise Unsupported(f"{name}: kernels for Hopper need a GPU; this is {backend.platform()}")
    try:
        return getattr(importlib.import_module(f"{KERNELS}.{module}"), name)
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"no kernel {KERNELS}.{module}.{name}: {error}") from error
