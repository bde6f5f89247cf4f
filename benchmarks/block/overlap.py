"""How much of the wire of layers' weights hides behind the work: `python -m benchmarks.block.overlap --fsdp 1,2`.

A layer is four d x d products by `moax.ops.dense`, norms, and the model's block; L layers run in a scan, forward and
backward, with remat by `moax.CHECKPOINT_NAMES`. Each device has the same tokens on every mesh, so that a mesh of fsdp
would take the time of one device if its wire were hidden whole. Both scans start from the same numbers; the greatest
difference of their gradients, relative to the largest gradient, stands beside the times.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import moax
from benchmarks import report
from benchmarks.timing import Repeats, call_time
from moax.models import MODELS

POLICY = jax.checkpoint_policies.save_only_these_names(*moax.CHECKPOINT_NAMES)
OPTIONS = {"xla_gpu_experimental_parallel_collective_overlap_limit": 8}
DENSE, REPEATS = 4, Repeats(2, 5)


def norm(x):
    """Divides each row by its root mean square."""
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-6).astype(x.dtype)


def make_step(config: moax.MoEConfig, recipe: str | None, unroll: int | None, kernels: str = "auto"):
    """Returns loss and gradients of the layers: of `moax.scan` with `unroll`, or of `jax.lax.scan` with None."""

    def layer(x, weights):
        h = norm(x)
        for w in weights["dense"]:
            h = jax.nn.relu(moax.ops.dense(h, w, recipe=recipe, kernels=kernels))
        x = x + h
        y, stats = moax.moe(norm(x), weights["moe"], config, recipe=recipe, kernels=kernels)
        return x + y, stats.aux_loss

    def loss(stack, x):
        if unroll is None:
            y, aux = jax.lax.scan(jax.checkpoint(layer, policy=POLICY, prevent_cse=False), x, stack)
        else:
            y, aux = moax.scan(layer, x, stack, policy=POLICY, unroll=unroll)
        return jnp.mean(jnp.square(y.astype(jnp.float32))) + aux.sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def make_arrays(config: moax.MoEConfig, mesh: Mesh, layers: int, tokens: int) -> tuple[Any, jax.Array]:
    """Returns the stacked weights in bfloat16 and the tokens, on the mesh."""
    width = config.d_model
    one = moax.init(jax.random.key(1), config, dtype=jnp.bfloat16)
    one = dataclasses.replace(one, router=jax.random.normal(jax.random.key(2), one.router.shape) * width**-0.5)
    specs = jax.tree.map(lambda s: NamedSharding(mesh, PartitionSpec(None, *s)), moax.param_specs(config))
    moe = jax.jit(lambda p: jax.tree.map(lambda v: jnp.stack([v] * layers), p), out_shardings=specs)(one)
    split, rows = NamedSharding(mesh, PartitionSpec(None, "fsdp")), NamedSharding(mesh, PartitionSpec("fsdp"))
    keys, shape = jax.random.split(jax.random.key(3), DENSE), (layers, width, width)
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16) * width**-0.5, out_shardings=split)
    x = jax.random.normal(jax.random.key(0), (tokens * mesh.size, width), jnp.bfloat16)
    return {"dense": [make(key) for key in keys], "moe": moe}, jax.device_put(x, rows)


def difference(got, want) -> float:
    """Returns the greatest difference of two trees, relative to the largest value of its array."""

    def one(a, b):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-30)

    return max(map(float, jax.tree.leaves(jax.jit(lambda a, b: jax.tree.map(one, a, b))(got, want))))


def run(model: str, fsdp: int, layers: int, tokens: int, recipes, unrolls) -> list[dict]:
    """Returns a row for each recipe and each scan on a mesh of `fsdp` devices."""
    config, rows = MODELS[model].config, []
    mesh = Mesh(np.array(jax.devices()[:fsdp]), ("fsdp",), axis_types=(AxisType.Auto,))
    options = OPTIONS if jax.default_backend() == "gpu" else None
    with jax.set_mesh(mesh):
        arrays = make_arrays(config, mesh, layers, tokens)
        for recipe in recipes:
            plain = None
            for unroll in (None, *(unrolls if fsdp > 1 else ())):  # on one device both scans are one program
                start = time.perf_counter()
                lowered = make_step(config, None if recipe == "none" else recipe, unroll).lower(*arrays)
                program = lowered.compile(compiler_options=options)
                compiled = time.perf_counter() - start
                us, result = call_time(program, arrays, REPEATS).us, program(*arrays)
                rows.append({
                    "fsdp": fsdp,
                    "recipe": recipe,
                    "scan": "jax.lax.scan" if unroll is None else f"moax.scan, unroll {unroll}",
                    "ms_a_layer": round(us / layers * 1e-3, 3),
                    "temporary_bytes": getattr(program.memory_analysis(), "temp_size_in_bytes", None),
                    "compile_seconds": round(compiled, 1),
                    "difference": None if plain is None else difference(result, plain),
                })  # fmt: skip
                print(rows[-1], flush=True)
                plain = result if plain is None else plain
                del result
    return rows


def main() -> int:
    """Prints a row for each mesh, recipe and scan, and returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.block.overlap", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=tuple(MODELS), default="qwen3-30b", help="the model of the block (default: %(default)s)")
    add("--fsdp", default="1,2", metavar="SIZES", help="sizes of the mesh, with commas (default: %(default)s)")
    add("--layers", type=int, default=4, metavar="L", help="layers of a scan (default: %(default)s)")
    add("--tokens", type=int, default=8192, metavar="T", help="tokens of a device (default: %(default)s)")
    add("--recipes", default="none,fp8_block", metavar="NAMES", help="recipes, with commas (default: %(default)s)")
    add("--unrolls", default="1,2", metavar="NUMBERS", help="`unroll` of moax.scan, with commas (default: %(default)s)")
    add("--out", type=Path, metavar="FILE", help="write the rows to this file, as JSON")
    args = parser.parse_args()
    unrolls, rows = [int(n) for n in args.unrolls.split(",")], []
    for fsdp in map(int, args.fsdp.split(",")):
        rows += run(args.model, fsdp, args.layers, args.tokens, args.recipes.split(","), unrolls)
    if args.out:
        report.save(args.out, report.header(sys.argv, None, {}) | {"options": OPTIONS}, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
