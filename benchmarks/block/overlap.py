"""How much of the wire of layers' weights hides behind the work: `python -m benchmarks.block.overlap --mesh 1,2`.

A layer is four d x d products by `moax.ops.dense`, norms, and the model's block; L layers run in `jax.lax.scan`,
forward and backward, with remat by `moax.CHECKPOINT_NAMES`. Each device has the same tokens on every mesh of fsdp, so
that a mesh would take the time of one device if its wire were hidden whole. A mesh runs twice, with the options of
`moax.OVERLAP_OPTIONS` and as XLA is installed; both have the same loss and the same norm of all gradients.

Each case has a process of its own. All cases compile side by side, and then run one after another.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import moax
from benchmarks import profiles, report
from benchmarks.block.block import TINY
from benchmarks.timing import Repeats, call_time
from moax.models import MODELS

POLICY = jax.checkpoint_policies.save_only_these_names(*moax.CHECKPOINT_NAMES)
CONFIGS = {name: model.config for name, model in MODELS.items()} | {TINY[0].name: TINY[0].config}
DENSE = 4
REPEATS = Repeats(2, 10)
PROFILED = 2  # the steps of a profile
READY = "ready"


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
      model: the model of the block.
      layers, tokens: the layers of the scan, and the tokens of a device.
      fsdp: the devices of the mesh.
      recipe: the recipe of all products; "none" is bfloat16.
      options: whether XLA compiles with `moax.OVERLAP_OPTIONS`.
    """

    model: str
    layers: int
    tokens: int
    fsdp: int
    recipe: str
    options: bool


def norm(x):
    """Divides each row by its root mean square."""
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-6).astype(x.dtype)


def make_step(config: moax.MoEConfig, recipe: str | None, kernels: str = "auto"):
    """Returns loss and gradients of the layers."""

    def layer(x, weights):
        h = norm(x)
        for w in weights["dense"]:
            h = jax.nn.relu(moax.ops.dense(h, w, recipe=recipe, kernels=kernels))
        x = x + h
        y, stats = moax.moe(norm(x), weights["moe"], config, recipe=recipe, kernels=kernels)
        return x + y, stats.aux_loss

    def loss(stack, x):
        y, aux = jax.lax.scan(jax.checkpoint(layer, policy=POLICY, prevent_cse=False), x, stack)
        return jnp.mean(jnp.square(y.astype(jnp.float32))) + aux.sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def make_arrays(config: moax.MoEConfig, layers: int, rows: int) -> tuple[Any, jax.Array]:
    """Returns the stacked weights in bfloat16, and the tokens."""
    width = config.d_model
    one = moax.init(jax.random.key(1), config, dtype=jnp.bfloat16)
    one = dataclasses.replace(one, router=jax.random.normal(jax.random.key(2), one.router.shape) * width**-0.5)
    moe = jax.tree.map(lambda v: jnp.stack([v] * layers), one)
    keys = jax.random.split(jax.random.key(3), DENSE)
    dense = [jax.random.normal(key, (layers, width, width), jnp.bfloat16) * width**-0.5 for key in keys]
    x = jax.random.normal(jax.random.key(0), (rows, width), jnp.bfloat16)
    return {"dense": dense, "moe": moe}, x


def find_shardings(config: moax.MoEConfig, mesh: Mesh) -> tuple[Any, NamedSharding]:
    """Returns the sharding of each array of `make_arrays`."""
    moe = jax.tree.map(lambda spec: NamedSharding(mesh, PartitionSpec(None, *spec)), moax.param_specs(config))
    dense = [NamedSharding(mesh, PartitionSpec(None, "fsdp"))] * DENSE
    return {"dense": dense, "moe": moe}, NamedSharding(mesh, PartitionSpec("fsdp"))


def measure(case: Case) -> dict[str, Any]:
    """Compiles, waits for a line on stdin, and returns the row of a case."""
    config = CONFIGS[case.model]
    mesh = Mesh(np.array(jax.devices()[: case.fsdp]), ("fsdp",), axis_types=(AxisType.Auto,))
    on_gpu = jax.default_backend() == "gpu"
    with jax.set_mesh(mesh):
        shardings = find_shardings(config, mesh)
        make = functools.partial(make_arrays, config, case.layers, case.tokens * case.fsdp)
        shapes = jax.tree.map(
            lambda v, to: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=to), jax.eval_shape(make), shardings
        )
        lowered = make_step(config, None if case.recipe == "none" else case.recipe).lower(*shapes)
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
        row = dataclasses.asdict(case) | {
            "ms_a_layer": round(us / case.layers * 1e-3, 3),
            "temporary_bytes": getattr(program.memory_analysis(), "temp_size_in_bytes", None),
            "compile_seconds": round(compiled, 1),
            "loss": float(loss),
            "gradient_norm": float(jnp.sqrt(sum(squares))),
        }
        if on_gpu and case.fsdp > 1:
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
        "idle_ms": round(of_gpu.idle_ms / layers, 3),
    }


def run(cases: list[Case]) -> list[dict[str, Any]]:
    """Returns the row of each case that ran, in a process of its own."""
    command = (sys.executable, "-m", "benchmarks.block.overlap", "--case")
    env = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # the processes share the GPUs
    pipes: dict[str, Any] = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    workers = [subprocess.Popen([*command, json.dumps(dataclasses.asdict(case))], **pipes) for case in cases]
    compiled = [cast(IO[str], worker.stdout).readline().strip() == READY for worker in workers]
    rows = []
    for case, worker, is_ready in zip(cases, workers, compiled, strict=True):
        answer, _ = worker.communicate("\n" if is_ready else None)
        if worker.returncode:
            print(f"{case} failed", file=sys.stderr, flush=True)
            continue
        rows.append(json.loads(answer.splitlines()[-1]))
        print(rows[-1], flush=True)
    return rows


def compare(rows: list[dict[str, Any]]) -> None:
    """Gives each row of a mesh its time over that of one device with the same model, tokens, layers and recipe."""
    same = ("model", "layers", "tokens", "recipe")
    alone = {tuple(row[name] for name in same): row["ms_a_layer"] for row in rows if row["fsdp"] == 1}
    for row in rows:
        base = alone.get(tuple(row[name] for name in same))
        if row["fsdp"] > 1 and base is not None:
            row["times_one_device"] = round(row["ms_a_layer"] / base, 3)


def main() -> int:
    """Prints a row for each case, and returns 1 where one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.block.overlap", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=tuple(CONFIGS), default="qwen3-30b", help="the model of the block (default: %(default)s)")
    add("--mesh", default="1,2", metavar="SIZES", help="sizes of fsdp, with commas (default: %(default)s)")
    add("--layers", type=int, default=4, metavar="L", help="layers of a scan (default: %(default)s)")
    add("--tokens", default="8192", metavar="NUMBERS", help="tokens of a device, with commas (default: %(default)s)")
    add("--recipes", default="none,fp8_block", metavar="NAMES", help="recipes, with commas (default: %(default)s)")
    add("--sha", help="the commit, where this machine has no git")
    add("--out", type=Path, metavar="FILE", help="write the rows to this file, as JSON")
    add("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(Case(**json.loads(args.case)))))
        return 0
    sizes, tokens = ([int(n) for n in words.split(",")] for words in (args.mesh, args.tokens))
    cases = [
        Case(args.model, args.layers, count, fsdp, recipe, options)
        for fsdp, count, recipe in itertools.product(sizes, tokens, args.recipes.split(","))
        for options in ((True, False) if fsdp > 1 else (False,))
    ]
    rows = run(cases)
    compare(rows)
    if args.out:
        report.save(args.out, report.header(sys.argv, args.sha, {}) | {"options": moax.OVERLAP_OPTIONS}, rows)
    return int(len(rows) < len(cases))


if __name__ == "__main__":
    sys.exit(main())
