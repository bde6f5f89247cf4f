"""The peer `tokamax.ragged_dot` in its Mosaic implementation, with heuristic tiles and gradients by autodiff."""

from __future__ import annotations

import jax

from benchmarks.kernels.ours import Call
from moax.tune.cases import Direction
from moax.tune.problem import Problem


def calls(problem: Problem, direction: Direction, quick: bool) -> list[Call]:
    """Returns one call, with the tile that tokamax's heuristics choose.

    Raises:
      ImportError: tokamax is not installed.
    """
    import tokamax  # pyrefly: ignore[missing-import]

    def forward(x, w, sizes):
        return tokamax.ragged_dot(x, w, sizes, implementation="mosaic")

    def gradient(x, w, sizes, dy):
        # XLA drops the forward product and the other gradient as dead code.
        return jax.vjp(lambda x, w: forward(x, w, sizes), x, w)[1](dy)[0 if direction == "dgrad" else 1]

    x, dy = problem.packed("x"), problem.packed("dy")
    if direction == "fwd":
        return [Call(jax.jit(forward), (x, problem.w, problem.group_sizes), "peer", "heuristic")]
    return [Call(jax.jit(gradient), (x, problem.w, problem.group_sizes, dy), "peer", "heuristic")]
