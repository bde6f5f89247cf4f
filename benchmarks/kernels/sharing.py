"""`python -m benchmarks.kernels.sharing`: products beside collectives of NCCL, on the first two GPUs of this machine.

For each product and each number of waves of its kernel, one program runs the product n times alone, n times beside a
large all-gather and n times beside a large reduce-scatter. JAX's profiler tells the times:

    alone_us     a product while no collective runs; the median
    beside_us    a product that lies within a collective: {kind: the median, or null where none does}
    late_us      from the end of the last product alone to the first block of the all-gather
    wire_ms      the collective beside products: {kind: ms}; `wire_alone_ms` is the collective without products
    same_bits    whether the result has the bits of that of the first number of waves
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.kernels import ours
from benchmarks.report import why
from moax.inspect import Kernel
from moax.inspect.profiles import profile_kernels
from moax.tune.cases import DIRECTIONS, Case, Direction, both_products
from moax.tune.problem import Problem

CASES = (*both_products("qwen3", "qwen3-30b", tokens=8192), both_products("mixtral", "mixtral-8x7b", tokens=8192)[1])
WIRES = ("all-gather", "reduce-scatter")
FLOPS = {"bf16": 600e12, "fp8": 1000e12}  # estimates, for the numbers of products and of bytes
WIRE = 370e9  # bytes a second of a GPU, an estimate
LEAST, MOST = 2, 12  # the products beside one collective


def plan(case: Case, dtype: str) -> tuple[int, int]:
    """Returns (n, the float32 elements of a GPU's shard), so that a collective lasts longer than n products alone."""
    seconds = case.flops / FLOPS[dtype]
    count = max(LEAST, min(MOST, int(3e-3 / seconds)))
    return count, int(1.5 * count * seconds * WIRE) // 4 // 1024 * 1024


def program(products: Sequence[Callable], count: int, mesh: Mesh) -> jax.stages.Wrapped:
    """Returns the jitted program: (left, right, blocks, wire) -> (a result of each product, mark, wire).

    Barriers put the products into one chain, so that their order is known. A collective depends on the products before
    it and on none beside it. XLA drops what a barrier ties to nothing, so the chain is a sum, `mark`, of an element of
    each result, and the program returns it.
    """

    def repeat(product, left, right, blocks, mark):
        result = None
        for _ in range(count):
            left, mark = lax.optimization_barrier((left, mark))
            result = product(left, right, blocks)
            mark = mark + result[(0,) * result.ndim]
        return left, mark, result

    def local(left, right, blocks, wire):
        results, mark = [], jnp.zeros((), jnp.bfloat16)
        wire = lax.psum_scatter(lax.all_gather(wire, "x", tiled=True), "x", tiled=True)
        for product in products:
            left, mark, wire = lax.optimization_barrier((left, mark, wire))
            left, mark, result = repeat(product, left, right, blocks, mark)
            results.append(result)
            left, mark, wire = lax.optimization_barrier((left, mark, wire))
            whole = lax.all_gather(wire, "x", tiled=True)
            left, mark, _ = repeat(product, left, right, blocks, mark)
            left, mark, whole = lax.optimization_barrier((left, mark, whole))
            wire = lax.psum_scatter(whole, "x", tiled=True)
            left, mark, _ = repeat(product, left, right, blocks, mark)
        return tuple(results), mark, wire

    whole, split = PartitionSpec(), PartitionSpec("x")
    specs = dict(in_specs=(whole, whole, whole, split), out_specs=(whole, whole, split))
    return jax.jit(jax.shard_map(local, mesh=mesh, check_vma=False, **specs))


def read(kernels: Sequence[Kernel], waves: Sequence[int], count: int) -> list[dict[str, Any]]:
    """Returns the times of each number of waves, from what one GPU did in one call of `program`.

    Raises:
      ValueError: the profile does not hold the products and collectives of one call.
    """
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    products = [kernel for kernel in ordered if "grouped_" in kernel.name]
    parts = itertools.groupby((k for k in ordered if k.kind in WIRES), key=lambda kernel: kernel.kind)
    # A collective may be several kernels or copies, one after another.
    wires = [max(group, key=lambda k: k.end)._replace(start=group[0].start) for _, (*group,) in parts]
    if len(products) != 3 * count * len(waves) or [w.kind for w in wires] != [*WIRES] * (1 + len(waves)):
        names = sorted({kernel.name[:30] for kernel in kernels})
        raise ValueError(f"the profile has {len(products)} products, {len(wires)} collectives, and in all {names}")
    rows = []
    for i, wave in enumerate(waves):
        mine = products[3 * count * i : 3 * count * (i + 1)]
        alone, beside, ms = mine[:count], {}, {}
        for wire, chain in zip(wires[2 * i + 2 :], itertools.batched(mine[count:], count), strict=False):
            inside = [k.end - k.start for k in chain if wire.start <= k.start and k.end <= wire.end]
            beside[wire.kind] = statistics.median(inside) / 1e3 if inside else None
            ms[wire.kind] = (wire.end - wire.start) / 1e6
        row = {"waves": wave, "alone_us": statistics.median(k.end - k.start for k in alone) / 1e3, "beside_us": beside}
        late = (wires[2 * i + 2].start - alone[-1].end) / 1e3
        first = {wire.kind: (wire.end - wire.start) / 1e6 for wire in wires[:2]}
        rows.append({**row, "late_us": late, "wire_ms": ms, "wire_alone_ms": first})
    return rows


class Prepared(NamedTuple):
    """The program of one product, lowered and not yet compiled, and its operands on the GPUs of `mesh`."""

    direction: Direction
    dtype: str
    count: int
    elements: int
    args: tuple
    lowered: jax.stages.Lowered


def prepare(problem: Problem, direction: Direction, dtype: str, waves: Sequence[int], mesh: Mesh) -> Prepared:
    """Returns the program of one product with kernels of so many waves."""
    count, elements = plan(problem.case, dtype)
    operands = problem.quantized(direction) if dtype == "fp8" else None
    calls = [ours.gemm(problem, direction, operands, wave) for wave in waves]
    args = jax.device_put(calls[0].args, NamedSharding(mesh, PartitionSpec()))
    place = NamedSharding(mesh, PartitionSpec("x"))
    wire = jax.ShapeDtypeStruct((mesh.size * elements,), jnp.float32, sharding=place)
    lowered = program([call.f for call in calls], count, mesh).lower(*args, wire)
    return Prepared(direction, dtype, count, elements, args, lowered)


def measure(problem: Problem, made: Prepared, compiled: Callable, waves: Sequence[int], mesh: Mesh) -> list[dict]:
    """Runs the program of one product three times, and returns the rows of the last run on the first GPU."""
    ones = functools.partial(jnp.ones, mesh.size * made.elements, jnp.float32)
    wire = jax.jit(ones, out_shardings=NamedSharding(mesh, PartitionSpec("x")))()
    results, *_ = jax.block_until_ready(compiled(*made.args, wire))
    same = _same_bits([result.addressable_data(0) for result in results], problem, made.direction)
    del results
    kernels = profile_kernels(compiled, *made.args, wire, steps=1)
    name = min(kernel.device for kernel in kernels)
    found = read([kernel for kernel in kernels if kernel.device == name], waves, made.count)
    shape = {"case": problem.case.name, "direction": made.direction, "dtype": made.dtype, "count": made.count}
    return [{**shape, **row, "same_bits": bits} for row, bits in zip(found, same, strict=True)]


def _same_bits(results: Sequence[jax.Array], problem: Problem, direction: Direction) -> list[bool]:
    """Returns whether each result equals the first one in all real rows."""
    index = slice(None) if direction == "wgrad" else np.asarray(problem.index)
    equal = jax.jit(lambda a, b: jnp.array_equal(a[index].view(jnp.uint16), b[index].view(jnp.uint16)))
    return [bool(equal(results[0], result)) for result in results]


def main() -> int:
    """Measures every product, until the time is over, and prints a line for each; returns 0."""
    parser = argparse.ArgumentParser(prog="benchmarks.kernels.sharing", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--waves", default="1,2,4,6", help="numbers of waves (default: %(default)s)")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=105, help="begin no product after this (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    waves, began = [int(number) for number in args.waves.split(",")], time.perf_counter()
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    rows: list[dict[str, Any]] = []
    for case in (case for case in CASES if args.only in case.name):
        problem = Problem(case)
        products = [prepare(problem, *product, waves, mesh) for product in itertools.product(DIRECTIONS, FLOPS)]
        with ThreadPoolExecutor() as pool:
            compiling = [pool.submit(made.lowered.compile) for made in products]
        for made, compiled in zip(products, compiling, strict=True):
            what = f"{case.name} {made.direction} {made.dtype}"
            if time.perf_counter() - began > args.seconds:
                print(f"{what}: no time left", file=sys.stderr)
                continue
            try:
                rows += (found := measure(problem, made, compiled.result(), waves, mesh))
            except Exception as error:  # The other products are measured all the same.
                print(f"{what}: {why(error)}", flush=True)
                continue
            for row in found:
                print(json.dumps(row), flush=True)
            if args.out:
                args.out.write_text(json.dumps({"device": jax.devices()[0].device_kind, "rows": rows}, indent=1))
        del problem, products, compiling
    return 0


if __name__ == "__main__":
    sys.exit(main())
