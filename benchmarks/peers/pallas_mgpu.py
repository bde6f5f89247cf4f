"""The peer `jax.experimental.pallas.ops.gpu`, JAX's own Mosaic GPU kernels, with a few of their tiles."""

from __future__ import annotations

import functools

import jax

from benchmarks.cases import Direction
from benchmarks.kernels.ours import Call
from benchmarks.problem import Problem
from moax.checks import Unsupported

# (block_m, block_n, block_k, max_concurrent_steps), the likely best first
PRODUCT = ((128, 128, 64, 4), (128, 192, 64, 4), (128, 128, 64, 6), (192, 128, 64, 4), (64, 256, 64, 4))
GRADIENT = ((128, 128, 64, 4), (128, 128, 64, 6), (128, 128, 128, 2), (64, 128, 64, 6), (64, 64, 64, 6))
WIDTHS = (16, 8, 4, 2, 1)


def calls(problem: Problem, direction: Direction, quick: bool) -> list[Call]:
    """Returns a call for each tile: `ragged_dot` for forward and dgrad, `transposed_ragged_dot` for wgrad."""
    case = problem.case
    if direction == "wgrad":
        from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot as kernel

        operands = (problem.packed("x"), problem.packed("dy"))
        tiles = [t for t in GRADIENT if case.contracted % t[0] == 0 and case.columns % t[1] == 0]
        columns, options = case.columns, {}
    else:
        from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot as kernel

        forward = direction == "fwd"
        operands = (problem.packed("x" if forward else "dy"), problem.w)
        contracted, columns = (case.contracted, case.columns)[:: 1 if forward else -1]
        tiles = [t for t in PRODUCT if contracted % t[2] == 0 and columns % t[1] == 0]
        options = {"transpose_rhs": not forward}
    if not tiles:
        raise Unsupported(f"none of its tiles divides K={case.contracted}, N={case.columns}")
    found = []
    for m, n, k, steps in tiles[: 2 if quick else None]:
        width = next(w for w in WIDTHS if columns % (w * n) == 0)
        sizes = dict(block_m=m, block_n=n, block_k=k, max_concurrent_steps=steps, grid_block_n=width)
        product = jax.jit(_positional(functools.partial(kernel, **sizes, **options)))
        found.append(Call(product, (*operands, problem.group_sizes), "peer", f"{m}x{n}x{k} s{steps} w{width}"))
    return found


def _positional(kernel):
    return lambda left, right, group_sizes: kernel(left, right, group_sizes=group_sizes)
