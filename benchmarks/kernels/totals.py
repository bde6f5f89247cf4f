"""`python -m benchmarks.kernels.totals`: the gradient of a weight, added to the total of earlier passes, on a GPU.

For each product, operands in bf16 and FP8, and totals in bf16 and float32, a program adds a wgrad n times to a total.
JAX's profiler tells the us of one addition:

    in_kernel_us   the kernel of wgrad adds to the total in its memory
    apart_us       the kernel writes a gradient and XLA adds it: {"wgrad": us, "add": us}
    equal          whether both totals agree to the rounding of n sums
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import report
from benchmarks.kernels import ours
from moax.inspect import Kernel
from moax.inspect.profiles import COPY, profile_kernels
from moax.tune.cases import Case, both_products
from moax.tune.problem import Problem

CASES: tuple[Case, ...] = (
    *both_products("qwen3", "qwen3-30b", tokens=8192),
    *both_products("mixtral", "mixtral-8x7b", tokens=8192),
)
OPERANDS, TOTALS = ("bf16", "fp8"), ("bfloat16", "float32")
TIMES, STEPS = 8, 3  # additions of one call, and profiled calls


def split(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Returns the us of one addition in the kernel of wgrad, and in all others; the first copy of the total is none."""
    us = {"wgrad": 0.0, "add": 0.0}
    for kernel in kernels:
        if kernel.kind != COPY and "copy" not in kernel.name:
            us["wgrad" if "grouped_wgrad" in kernel.name else "add"] += (kernel.end - kernel.start) / 1e3
    return {name: value / (TIMES * STEPS) for name, value in us.items()}


def measure(problem: Problem, operands: str, total: str) -> dict[str, Any]:
    """Returns the row of one product."""
    case, quantized = problem.case, problem.quantized("wgrad") if operands == "fp8" else None
    start = jnp.ones((case.groups, case.contracted, case.columns), total)
    calls = [ours.add_wgrad(problem, quantized, TIMES, in_kernel) for in_kernel in (True, False)]
    inside, apart = (split(profile_kernels(call.f, *call.args, start, steps=STEPS)) for call in calls)
    rounding = TIMES * float(jnp.finfo(total).eps)
    equal = jax.jit(_equal, static_argnums=2)(*(call.f(*call.args, start) for call in calls), rounding)
    row = {"case": case.name, "operands": operands, "total": total}
    return row | {"in_kernel_us": inside["wgrad"] + inside["add"], "apart_us": apart, "equal": bool(equal)}


def _equal(a: jax.Array, b: jax.Array, rounding: float) -> jax.Array:
    """Returns whether a and b differ by at most `rounding` of the largest value."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.abs(a - b).max() <= rounding * jnp.abs(b).max()


def main() -> int:
    """Measures every product, and prints a line for each; returns 0."""
    parser = argparse.ArgumentParser(prog="benchmarks.kernels.totals", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--sha", help="the measured commit (default: git tells it)")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in (case for case in CASES if args.only in case.name):
        problem = Problem(case)
        for kind, total in itertools.product(OPERANDS, TOTALS):
            rows.append(row := measure(problem, kind, total))
            print(json.dumps(row), flush=True)
        del problem
    if args.out:
        head = report.header(["benchmarks.kernels.totals", *sys.argv[1:]], args.sha, {})
        args.out.write_text(json.dumps({"header": head, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
