"""How much of the wire of layers' weights hides behind the work: `python -m benchmarks.block.overlap --mesh 1,2`.

A layer is four d x d products by `moax.ops.dense`, norms, and the model's block; L layers run in `jax.lax.scan`,
forward and backward, with remat by `moax.CHECKPOINT_NAMES`. Each device has the same tokens on every mesh of fsdp, so
that a mesh would take the time of one device if its wire were hidden whole. A mesh runs twice, with the options of
`moax.OVERLAP_OPTIONS` and as XLA is installed; the two differ by the order of sums.

Each case has a process of its own, `overlap_worker`. All cases compile side by side, and then run one after another.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import moax
from benchmarks import report
from benchmarks.block.block import TINY
from benchmarks.block.worker import Worker, answers
from moax.models import MODELS

POLICY = jax.checkpoint_policies.save_only_these_names(*moax.CHECKPOINT_NAMES)
CONFIGS = {name: model.config for name, model in MODELS.items()} | {TINY[0].name: TINY[0].config}
DENSE = 4
WORKER = "benchmarks.block.overlap_worker"


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


def run(cases: list[Case]) -> list[dict[str, Any]]:
    """Returns the row of each case, measured in a process of its own; a row that could not run has a `note`."""
    workers = [(case, Worker(WORKER, dataclasses.asdict(case) | {"tokens": [case.tokens]})) for case in cases]
    rows = []
    for case, answer in answers(workers):
        rows.append(dataclasses.asdict(case) | answer)
        print(rows[-1], flush=True)
    return rows


def compare(rows: list[dict[str, Any]]) -> None:
    """Gives each row of a mesh its time over that of one device with the same model, tokens, layers and recipe."""
    same = ("model", "layers", "tokens", "recipe")
    timed = [row for row in rows if "ms_a_layer" in row]
    alone = {tuple(row[name] for name in same): row["ms_a_layer"] for row in timed if row["fsdp"] == 1}
    for row in timed:
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
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share the GPUs' memory
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
    return int(any("note" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
