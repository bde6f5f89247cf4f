"""`python -m benchmarks.xla_products`: the grouped matmul of `kernels="xla"`, beside `lax.ragged_dot`, in bf16.

    moax                 `moax.ops.grouped_matmul(kernels="xla")`: for each group the smallest of a few static sizes
    ragged_dot           `lax.ragged_dot_general` as XLA compiles it by default
    ragged_dot_fusion    the same with XLA's flag for a fusion of cuDNN

A row has the wall clock of back-to-back calls, and the largest relative error of a group against float64 on a sample.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import cases, error, report
from benchmarks.problem import Problem
from benchmarks.timing import Repeats, call_time
from moax import ops

NUMBERS = {"fwd": ((1,), (1,)), "dgrad": ((1,), (2,)), "wgrad": ((0,), (0,))}  # the contracted dims of both operands


def own(left, right, sizes, *, direction: cases.Direction):
    """Computes the matmul, or one of its gradients: XLA drops the other one as dead code."""
    product = functools.partial(ops.grouped_matmul, kernels="xla")
    if direction == "fwd":
        return product(left, right, sizes)
    if direction == "dgrad":
        x = jnp.zeros((left.shape[0], right.shape[1]), left.dtype)
        return jax.vjp(lambda x: product(x, right, sizes), x)[1](left)[0]
    w = jnp.zeros((sizes.shape[0], left.shape[1], right.shape[1]), left.dtype)
    return jax.vjp(lambda w: product(left, w, sizes), w)[1](right)[0]


def ragged_dot(left, right, sizes, *, direction: cases.Direction):
    """Computes the same by `lax.ragged_dot_general`."""
    groups = [] if direction == "wgrad" else [0]
    numbers = lax.RaggedDotDimensionNumbers((NUMBERS[direction], ((), ())), [0], groups)
    return lax.ragged_dot_general(left, right, sizes, numbers, preferred_element_type=left.dtype)


ALGORITHMS: dict[str, tuple[Callable, dict]] = {  # the function, and options of the compiler
    "moax": (own, {}),
    "ragged_dot": (ragged_dot, {}),
    "ragged_dot_fusion": (ragged_dot, {"xla_gpu_experimental_use_ragged_dot_fusion": True}),
}


def measure(problem: Problem, direction: cases.Direction, algorithm: str) -> dict[str, Any]:
    """Returns the row of one algorithm, or the reason why it does not run."""
    case, (f, options) = problem.case, ALGORITHMS[algorithm]
    row: dict[str, Any] = {"case": case.name, "direction": direction, "algorithm": algorithm, "us": None}
    row |= {"M": case.rows, "K": case.contracted, "N": case.columns, "G": case.groups}
    x, dy = (problem.packed(name) for name in ("x", "dy"))
    operands = {"fwd": (x, problem.w), "dgrad": (dy, problem.w), "wgrad": (x, dy)}[direction]
    args = (*operands, problem.group_sizes)
    try:
        compiled = jax.jit(functools.partial(f, direction=direction)).lower(*args).compile(options or None)
        found = error.sample(problem, direction)
        row["error"] = error.measure(compiled(*args), found, direction, problem, packed=True).worst
        row["us"] = call_time(compiled, args, Repeats()).us
        row["tflops"] = case.flops / row["us"] * 1e-6
        row["temp_gb"] = getattr(compiled.memory_analysis(), "temp_size_in_bytes", 0) / 1e9
    except Exception as failure:  # The other algorithms may run.
        row["note"] = report.why(failure)
    return row


def main(argv: list[str] | None = None) -> int:
    """Prints a row for each case, direction and algorithm, and writes them to a file. Returns 0."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.xla_products", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--cases", default="perf", metavar="SETS", help="perf or tiny (default: %(default)s)")
    parser.add_argument("--out", metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--sha", help="the measured commit (default: git tells it)")
    args = parser.parse_args(argv)
    rows, head = [], report.header(["python", "-m", "benchmarks.xla_products", *argv], args.sha, {})
    for case in cases.select(args.cases):
        problem = Problem(case)
        for direction in cases.DIRECTIONS:
            for algorithm in ALGORITHMS:
                rows.append(measure(problem, direction, algorithm))
                print(rows[-1], flush=True)
        if args.out:
            report.save(args.out, head, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
