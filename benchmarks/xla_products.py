"""Grouped products in plain JAX, by several algorithms, beside `lax.ragged_dot`: what `kernels="xla"` should be.

    PYTHONPATH=src python3 -m benchmarks.xla_products --sha SHA --out benchmarks/results/h200_xla_products.json

The algorithms are in `xla_algorithms.py`. An error is that of the worst group, relative, against float64 on a sample
of the result.
"""

import argparse
import concurrent.futures
import datetime
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moax
from benchmarks import xla_algorithms as algorithms

CASES = {  # M, K, N, G
    "mixtral": (16384, 4096, 14336, 4),
    "qwen3": (65536, 2048, 768, 32),
    "dsv3": (32768, 7168, 2048, 16),
    "tiny": (200, 32, 48, 5),
}
WARMUPS, REPEATS = 10, 20
BF16, F32 = jnp.bfloat16, jnp.float32


def candidates(direction: str, rows: int) -> dict[str, tuple[Callable, dict]]:
    """Name -> (function of (x or dy, w or dy, sizes), options of the compiler)."""
    fusion = {"xla_gpu_experimental_use_ragged_dot_fusion": True}
    found: dict[str, tuple[Callable, dict]] = {
        "moax": (functools.partial(algorithms.own, direction=direction), {}),
        "ragged_dot": (functools.partial(algorithms.ragged_dot, direction=direction), {}),
        "ragged_dot_fusion": (functools.partial(algorithms.ragged_dot, direction=direction), fusion),
    }

    def add(name: str, f: Callable, **options) -> None:
        found[name] = (functools.partial(f, **options), {})

    if direction == "wgrad":
        add("switch", algorithms.switch_wgrad)
        for size in (s for s in (1024, 4096) if s <= rows):
            add(f"nested {size}", algorithms.nested_wgrad, size=size)
            add(f"static {size}", algorithms.loop_wgrad, size=size, static=True)
        for size in (s for s in (512, 1024, 2048) if s <= rows):
            add(f"batched {size} x8", algorithms.batched_wgrad, size=size, chunk=8)
        if rows < 1024:
            add("nested 16", algorithms.nested_wgrad, size=16)
            add("loop 16", algorithms.loop_wgrad, size=16, static=False)
            add("static 16", algorithms.loop_wgrad, size=16, static=True)
            add("batched 16 x4", algorithms.batched_wgrad, size=16, chunk=4)
        return found
    options = {"transpose": direction == "dgrad"}
    add("switch", algorithms.switch, **options)
    for size in (s for s in (256, 512, 1024, 2048) if s <= rows):
        add(f"batched {size}", algorithms.batched, size=size, **options)
    for size in (s for s in (512, 1024) if s <= rows):
        add(f"batched {size} x8", algorithms.batched, size=size, chunk=8, **options)
    for size in (s for s in (1024, 4096) if s <= rows):
        add(f"nested {size}", algorithms.nested, size=size, **options)
        add(f"static {size}", algorithms.loop, size=size, static=True, **options)
    if direction == "fwd" and rows >= 2048:
        add("loop 2048", algorithms.loop, size=2048, static=False, **options)
    if rows < 1024:
        add("nested 16", algorithms.nested, size=16, **options)
        add("loop 16", algorithms.loop, size=16, static=False, **options)
        add("static 16", algorithms.loop, size=16, static=True, **options)
        add("batched 16", algorithms.batched, size=16, **options)
        add("batched 16 x4", algorithms.batched, size=16, chunk=4, **options)
    return found


def draw_sizes(rows: int, groups: int) -> np.ndarray:
    """[G] sizes that sum to `rows`, from Dirichlet(8), the same in every run."""
    exact = np.random.default_rng([8, rows, groups]).dirichlet(np.full(groups, 8.0)) * rows
    sizes = np.floor(exact).astype(np.int32)
    sizes[np.argsort(sizes - exact)[: rows - int(sizes.sum())]] += 1
    return sizes


def operands(case: str):
    """x, w, dy, sizes on the device."""
    rows, contracted, columns, groups = CASES[case]
    sizes = draw_sizes(rows, groups)
    if case == "tiny":
        sizes = np.asarray([0, 97, 0, 1, 102], np.int32)
    keys = jax.random.split(jax.random.key(0), 3)
    draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
    x, dy = draw(keys[0], (rows, contracted), BF16), draw(keys[1], (rows, columns), BF16)
    return x, draw(keys[2], (groups, contracted, columns), BF16), dy, sizes


def make_check(direction: str, x, w, dy, sizes) -> Callable:
    """A function result -> worst relative error of a group: 16 rows of each group, with its first and its last, by 64
    columns; of wgrad 64 rows by 64 columns of every group's matrix."""
    starts = np.cumsum(sizes) - sizes
    some = np.random.default_rng(1)
    pick = lambda n, k: np.sort(some.choice(n, min(n, k), replace=False))  # noqa: E731
    host = lambda v: np.asarray(v.astype(F32)).astype(np.float64)  # noqa: E731
    if direction == "wgrad":
        ks, ns = pick(x.shape[1], 64), pick(dy.shape[1], 64)
        a, b = host(x[:, ks]), host(dy[:, ns])
        exact = [a[s : s + n].T @ b[s : s + n] for s, n in zip(starts, sizes, strict=True)]
        read = lambda y, g: host(y[g][ks][:, ns])  # noqa: E731
    else:
        a = x if direction == "fwd" else dy
        matrices = w if direction == "fwd" else jnp.swapaxes(w, 1, 2)
        ns = pick(matrices.shape[2], 64)
        at = [
            np.unique([s, *(s + pick(n, 14)), s + n - 1]) if n else s + pick(0, 0)
            for s, n in zip(starts, sizes, strict=True)
        ]
        exact = [host(a[r]) @ host(matrices[g][:, ns]) for g, r in enumerate(at)]
        read = lambda y, g: host(y[at[g]][:, ns])  # noqa: E731

    def check(y) -> float:
        worst = 0.0
        for g, want in enumerate(exact):
            off = float(np.linalg.norm(read(y, g) - want))
            scale = float(np.linalg.norm(want))
            worst = max(worst, off / scale if scale else off)
        return worst

    return check


def measure(f: Callable, args: tuple) -> float:
    """us of a call: the median of REPEATS runs of back-to-back calls, each of about 10 ms."""
    jax.block_until_ready(f(*args))
    begin = time.perf_counter()
    jax.block_until_ready([f(*args) for _ in range(2)])
    calls = max(1, min(20, int(0.02 / (time.perf_counter() - begin))))
    for _ in range(WARMUPS - 3):
        jax.block_until_ready(f(*args))
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        y = f(*args)
        for _ in range(calls - 1):
            y = f(*args)
        jax.block_until_ready(y)
        times.append((time.perf_counter() - begin) / calls)
    return statistics.median(times) * 1e6


def compile_all(found: dict, args: tuple) -> dict:
    """Name -> compiled program, or the failure."""

    def one(item):
        f, options = item
        return jax.jit(f).lower(*args).compile(options or None)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        futures = {name: pool.submit(one, item) for name, item in found.items()}
    return {name: future.exception() or future.result() for name, future in futures.items()}


def bench(case: str, direction: str, arrays: tuple, only: list[str], deadline: float) -> list[dict]:
    """Rows of one case and direction."""
    rows, contracted, columns, groups = CASES[case]
    x, w, dy, host_sizes = arrays
    args = {"fwd": (x, w), "dgrad": (dy, w), "wgrad": (x, dy)}[direction] + (jnp.asarray(host_sizes),)
    found = {k: v for k, v in candidates(direction, rows).items() if not only or any(o in k for o in only)}
    base = {"case": case, "direction": direction, "M": rows, "K": contracted, "N": columns, "G": groups}
    if time.monotonic() > deadline:
        return [base | {"algorithm": name, "us": None, "note": "no time left"} for name in found]
    begin = time.monotonic()
    compiled = compile_all(found, args)
    print(f"{case} {direction}: {len(found)} programs compiled in {time.monotonic() - begin:.0f} s", flush=True)
    check = make_check(direction, *arrays)
    result = []
    for name, program in compiled.items():
        row: dict[str, Any] = base | {"algorithm": name, "us": None, "note": ""}
        result.append(row)
        if isinstance(program, BaseException):
            row["note"] = f"{type(program).__name__}: {str(program)[:200]}"
        elif time.monotonic() > deadline:
            row["note"] = "no time left"
        else:
            try:
                row["error"] = check(program(*args))
                row["us"] = measure(program, args)
                row["tflops"] = 2 * rows * contracted * columns / row["us"] * 1e-6
                row["temp_gb"] = program.memory_analysis().temp_size_in_bytes / 1e9
            except Exception as failure:  # one algorithm that does not run: the others may
                row["note"] = f"{type(failure).__name__}: {str(failure)[:200]}"
        said = row["note"]
        if row["us"]:
            said = "{us:9.0f} us {tflops:6.1f} TFLOP/s {temp_gb:6.2f} GB error {error:.1e}".format(**row)
        print(f"{case:8} {direction:6} {name:18} {said}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "h200_xla_products.json")
    parser.add_argument("--sha", default="", help="the commit that the result is of")
    parser.add_argument("--cases", nargs="+", default=[c for c in CASES if c != "tiny"], choices=CASES)
    parser.add_argument("--directions", nargs="+", default=["fwd", "wgrad", "dgrad"])
    parser.add_argument("--only", nargs="*", default=[], help="parts of algorithms' names")
    parser.add_argument("--seconds", type=float, default=225, help="start nothing after so many")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    header = {
        "what": "grouped products in plain JAX, one device, bf16",
        "device": jax.devices()[0].device_kind,
        "versions": {"moax": moax.__version__, "jax": jax.__version__, "jaxlib": jax.lib.__version__},
        "git_sha": options.sha,
        "date": datetime.date.today().isoformat(),
        "command": f"python3 -m benchmarks.xla_products --sha {options.sha} --seconds {options.seconds:.0f}",
        "method": f"wall clock of back-to-back calls, the median of {REPEATS} after {WARMUPS} warm-ups",
        "rows": [],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for case in options.cases:
        arrays = operands(case)
        for direction in options.directions:
            header["rows"] += bench(case, direction, arrays, options.only, deadline)
            options.out.write_text(json.dumps(header, indent=1) + "\n")
        del arrays


if __name__ == "__main__":
    main()
