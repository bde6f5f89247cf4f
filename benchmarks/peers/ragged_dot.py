"""The peer `jax.lax.ragged_dot` and its transposes; on Hopper XLA lowers them to a dense product for each group."""

from __future__ import annotations

import jax
from jax import lax

from benchmarks.cases import Direction
from benchmarks.kernels.ours import Call
from benchmarks.problem import Problem
from moax.checks import Unsupported

# (contracted dims of left and right, whether the right operand has a matrix for each group)
DIMENSIONS = {"fwd": (1, 1, True), "dgrad": (1, 2, True), "wgrad": (0, 0, False)}
MOST_SECONDS, MOST_BYTES, RATE = 0.1, 40e9, 300e12


def calls(problem: Problem, direction: Direction, quick: bool) -> list[Call]:
    """Returns one call, since XLA offers no choice of tiles."""
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
        dot_dimension_numbers=(((left,), (right,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0] if grouped else [],
    )
    a = problem.packed("dy" if direction == "dgrad" else "x")
    b = problem.w if grouped else problem.packed("dy")
    f = jax.jit(lambda a, b, sizes: lax.ragged_dot_general(a, b, sizes, numbers))
    return [Call(f, (a, b, problem.group_sizes), "peer")]
