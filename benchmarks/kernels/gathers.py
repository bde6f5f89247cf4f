"""`python -m benchmarks.kernels.gathers`: products that gather their rows, beside a kernel that sorts rows first.

A block of bf16 has four products that may gather: forward and the gradient of wi gather x, dgrad and the gradient of wo
gather dy. For each block a row has the us of one call, the median over repeats:

    sort_us      the kernel that writes sorted rows, once
    sorted_us    the products of rows that lie sorted, by name
    gather_us    the products that gather, by name
    saved_us     what a step saves: two sorts and the products of sorted rows, less the products that gather
    equal        whether the bits of both are equal
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import report
from moax import MoEConfig, ops
from moax.groups import zero_rows
from moax.kernels import implementation
from moax.kernels.hopper.formats import HALF, GatheredRows
from moax.models import MODELS
from moax.tune.timing import Repeats, kernel_time

TOKENS = 8192
CASES: dict[str, tuple[MoEConfig, int]] = {
    "sonic-7b": (MoEConfig(1536, 256, 128, 8), 3 * TOKENS),
    "qwen3-30b": (MODELS["qwen3-30b"].config, TOKENS),
    "olmoe": (MODELS["olmoe"].config, TOKENS),
    "qwen3-next": (MODELS["qwen3-next"].config, TOKENS),
    "qwen3-235b": (MODELS["qwen3-235b"].config, TOKENS),
    "dsv3-slice": (MODELS["deepseek-v3"].slice(8), TOKENS),
    "gpt-oss-120b": (MODELS["gpt-oss-120b"].config, TOKENS),
    "mixtral-8x7b": (MODELS["mixtral-8x7b"].config, TOKENS),
}
PRODUCTS = ("forward", "dgrad", "wgrad wi", "wgrad wo")


def measure(name: str) -> dict[str, Any]:
    """Returns the row of one block, with a uniform routing."""
    (config, tokens), local = CASES[name], implementation("hopper")
    width, hidden, experts = config.d_model, config.d_ff, config.num_experts
    keys = iter(jax.random.split(jax.random.key(0), 7))

    @functools.partial(jax.jit, static_argnums=1)
    def normal(key, shape):
        return jax.random.normal(key, shape, jnp.bfloat16)

    x, dy = normal(next(keys), (tokens, width)), normal(next(keys), (tokens, width))
    chosen = jax.lax.top_k(jax.random.uniform(next(keys), (tokens, experts)), config.top_k)[1]
    plan = jax.jit(lambda x, chosen: ops.permute(x, chosen, experts, align=HALF)[1])(x, chosen)
    source, sizes = plan.source, plan.group_sizes
    groups_of = lambda sizes: local.find_groups(sizes, HALF, len(source))  # noqa: E731
    real = groups_of(sizes).real[:, None]
    d_h = jnp.where(real, normal(next(keys), (len(source), 2 * hidden)), 0)
    a = jnp.where(real, normal(next(keys), (len(source), hidden)), 0)
    wi, wo = normal(next(keys), (experts, width, 2 * hidden)), normal(next(keys), (experts, hidden, width))

    def product(kind: str, rows, other, sizes):
        groups = groups_of(sizes)
        match kind:
            case "forward" | "dgrad":
                return local.matmul(rows, other, groups, jnp.bfloat16, transpose=kind == "dgrad")
            case "wgrad wi":
                return local.wgrad(rows, other, groups, jnp.bfloat16)
        return local.wgrad(other, rows, groups, jnp.bfloat16)

    def gather(kind: str, x, source, other, sizes):
        return product(kind, GatheredRows(x, source), other, sizes)

    def sort(x, source, sizes):
        return local.gather_rows(x, source, groups_of(sizes))

    sort_us, _ = _time(sort, x, source, sizes)
    row: dict[str, Any] = {"case": name, "tokens": tokens, "sort_us": sort_us, "sorted_us": {}, "gather_us": {}}
    equal = True
    for kind, rows, other in zip(PRODUCTS, (x, dy, x, dy), (wi, wo, d_h, a), strict=True):
        lie = jax.jit(sort)(rows, source, sizes)
        row["sorted_us"][kind], want = _time(functools.partial(product, kind), lie, other, sizes)
        row["gather_us"][kind], got = _time(functools.partial(gather, kind), rows, source, other, sizes)
        if "wgrad" not in kind:
            got, want = (zero_rows(v, groups_of(sizes).real) for v in (got, want))
        equal = equal and bool(jnp.array_equal(got, want))
    saved = 2 * sort_us + sum(row["sorted_us"].values()) - sum(row["gather_us"].values())
    return row | {"saved_us": saved, "equal": equal}


def _time(fn: Callable, *args) -> tuple[float, jax.Array]:
    """Returns the us of the longest kernel of a call, which is the one measured, and its result."""
    compiled = jax.jit(fn)
    return max(us for _, us in kernel_time(compiled, args, Repeats.quick()).kernels), compiled(*args)


def main() -> int:
    """Measures every block, and prints a line for each; returns 0."""
    parser = argparse.ArgumentParser(prog="benchmarks.kernels.gathers", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--sha", help="the measured commit (default: git tells it)")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in (name for name in CASES if args.only in name):
        rows.append(row := measure(name))
        print(json.dumps(row), flush=True)
    if args.out:
        head = report.header(["benchmarks.kernels.gathers", *sys.argv[1:]], args.sha, {})
        args.out.write_text(json.dumps({"header": head, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
