"""Peers of the grouped matmuls in JAX: a function (problem, direction, quick) returns a call for each tile of a peer.

The fastest call counts. The calls take rows without padding between groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax import lax

from benchmarks.cases import Direction
from benchmarks.kernels.ours import Call
from benchmarks.problem import Problem
from moax.checks import Unsupported

# Of ragged_dot: (contracted dims of left and right, whether the right operand has a matrix for each group).
DIMENSIONS = {"fwd": (1, 1, True), "dgrad": (1, 2, True), "wgrad": (0, 0, False)}
MOST_SECONDS = 0.1
MOST_BYTES = 40e9
RATE = 300e12
# Tiles of pallas.ops.gpu: (block_m, block_n, block_k, max_concurrent_steps), the likely best first.
PRODUCT = (
    (128, 128, 64, 4),
    (128, 192, 64, 4),
    (128, 128, 64, 6),
    (192, 128, 64, 4),
    (64, 256, 64, 4),
)
GRADIENT = (
    (128, 128, 64, 4),
    (128, 128, 64, 6),
    (128, 128, 128, 2),
    (64, 128, 64, 6),
    (64, 64, 64, 6),
)
WIDTHS = (16, 8, 4, 2, 1)


def ragged_dot(problem: Problem, direction: Direction, quick: bool) -> list[Call]:
    """Returns `jax.lax.ragged_dot` or a transpose of it; on Hopper XLA makes a dense matmul for each group of it."""
    del quick
    case = problem.case
    expanded = 2 * case.groups * case.rows * max(case.contracted, case.columns if direction == "dgrad" else 0)
    seconds = case.groups * case.flops / RATE
    if seconds > MOST_SECONDS or expanded > MOST_BYTES:
        raise Unsupported(
            f"not run: XLA expands it to {case.groups} times the work, about {1e3 * seconds:.0f} ms a call, "
            f"and up to {expanded / 1e9:.0f} GB"
        )
    left, right, grouped = DIMENSIONS[direction]
    numbers = lax.RaggedDotDimensionNumbers(
        (((left,), (right,)), ((), ())),
        [0],
        [0] if grouped else [],
    )
    a = problem.packed("dy" if direction == "dgrad" else "x")
    b = problem.w if grouped else problem.packed("dy")
    f = jax.jit(lambda a, b, sizes: lax.ragged_dot_general(a, b, sizes, numbers))
    return [Call(f, (a, b, problem.group_sizes), "peer")]


def pallas_mgpu(problem: Problem, direction: Direction, quick: bool) -> list[Call]:
    """Returns JAX's own Mosaic GPU kernels: `ragged_dot` for fwd and dgrad, `transposed_ragged_dot` for wgrad."""
    case = problem.case
    if direction == "wgrad":
        from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot as kernel

        operands = (problem.packed("x"), problem.packed("dy"))
        tiles = [t for t in GRADIENT if case.contracted % t[0] == 0 and case.columns % t[1] == 0]
        columns = case.columns
        options = {}
    else:
        from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot as kernel

        forward = direction == "fwd"
        operands = (problem.packed("x" if forward else "dy"), problem.w)
        contracted, columns = (case.contracted, case.columns)[:: 1 if forward else -1]
        tiles = [t for t in PRODUCT if contracted % t[2] == 0 and columns % t[1] == 0]
        options = {"transpose_rhs": not forward}
    if not tiles:
        raise Unsupported(f"none of its tiles divides K={case.contracted}, N={case.columns}")
    timings = []
    for m, n, k, steps in tiles[: 2 if quick else None]:
        width = next(w for w in WIDTHS if columns % (w * n) == 0)
        sizes = dict(
            block_m=m,
            block_n=n,
            block_k=k,
            max_concurrent_steps=steps,
            grid_block_n=width,
        )
        product = functools.partial(kernel, **sizes, **options)
        f = jax.jit(lambda left, right, group_sizes, product=product: product(left, right, group_sizes=group_sizes))
        timings.append(
            Call(
                f,
                (*operands, problem.group_sizes),
                "peer",
                f"{m}x{n}x{k} s{steps} w{width}",
            )
        )
    return timings


CALLS: dict[str, Callable[[Problem, Direction, bool], list[Call]]] = {
    "ragged_dot": ragged_dot,
    "pallas_mgpu": pallas_mgpu,
}
