"""This program measures one case of `overlap` in a process of its own: python3 -m benchmarks.block.overlap_worker CASE

CASE is JSON, the fields of `overlap.Case` with one number of tokens. The program compiles, prints READY,
waits for a line on stdin, and prints the rest of the row of the case as a line of JSON.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

import moax
from benchmarks import profiles
from benchmarks.block.overlap import CONFIGS, Case, find_shardings, make_arrays, make_step
from benchmarks.block.worker import READY
from benchmarks.timing import Repeats, call_time

REPEATS = Repeats(2, 10)
PROFILED = 2  # the steps of a profile


def main(argv: list[str]) -> int:
    """Measures the case `argv[0]`, and prints the answer. Returns 0."""
    case = Case(**json.loads(argv[0]))
    (tokens,) = case.tokens
    print(json.dumps({"tokens": tokens} | measure(case, tokens)), flush=True)
    return 0


def measure(case: Case, tokens: int) -> dict[str, Any]:
    """Compiles, waits for a line on stdin, and returns the row of a case."""
    config = CONFIGS[case.model]
    sizes = tuple(case.mesh.values())
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    mesh = Mesh(devices, tuple(case.mesh), axis_types=(AxisType.Auto,) * len(sizes))
    on_gpu = jax.default_backend() == "gpu"
    with jax.set_mesh(mesh):
        shardings = find_shardings(config, case.layers, case.way, mesh)
        make = functools.partial(make_arrays, config, case.layers, case.way, tokens * devices.size)
        shapes = jax.tree.map(
            lambda v, to: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=to), jax.eval_shape(make), shardings
        )
        lowered = make_step(config, None if case.recipe == "none" else case.recipe, case.way).lower(*shapes)
        start = time.perf_counter()
        program = lowered.compile(compiler_options=moax.OVERLAP_OPTIONS if case.options else None)
        compiled = time.perf_counter() - start
        maker = jax.jit(make, out_shardings=shardings).lower().compile()
        print(READY, flush=True)
        sys.stdin.readline()
        arrays = maker()
        us = call_time(program, arrays, REPEATS).us
        loss, gradients = program(*arrays)
        squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(gradients)]
        row = {
            "ms_a_layer": round(us / case.layers * 1e-3, 3),
            "temporary_bytes": getattr(program.memory_analysis(), "temp_size_in_bytes", None),
            "compile_seconds": round(compiled, 1),
            "loss": float(loss),
            "gradient_norm": float(jnp.sqrt(sum(squares))),
        }
        if on_gpu and devices.size > 1:
            row |= profile(program, arrays, case.layers)
    return row


def profile(program: Any, arrays: tuple, layers: int) -> dict[str, Any]:
    """Returns what the collectives of one GPU took, in ms a layer, and how much of them no computation hid."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            results = [program(*arrays) for _ in range(PROFILED)]
            jax.block_until_ready(results)
        of_gpu = profiles.overlaps(profiles.read_profile(folder), PROFILED)[0]
    whole = of_gpu.kinds[0]
    return {
        "wire_ms": round(whole.ms / layers, 3),
        "exposed_ms": round(whole.exposed_ms / layers, 3),
        "compute_ms": round(of_gpu.compute_ms / layers, 3),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
