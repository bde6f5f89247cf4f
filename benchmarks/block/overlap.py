"""How much of the wire of layers' weights hides behind the work: `python -m benchmarks.block.overlap --mesh 1,2`.

A layer is four d x d matmuls by `moax.ops.dense`, norms, and the model's block; L layers run forward and backward,
with remat by `moax.CHECKPOINT_NAMES`. Each device has the same tokens on every mesh, so that a mesh would take the time
of fsdp 1 if the wire of its weights were hidden whole. Several devices run with `moax.OVERLAP_OPTIONS`, and for the
tokens of `--installed` as XLA is installed too; the two differ by the order of sums. `--ways` tells how the layers run.
`--peer` adds the same layers in PyTorch with FSDP2, on the meshes of fsdp alone.

Each case has a process of its own. All cases compile side by side, and then run one after another.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
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
FSDP2 = "fsdp2"  # the peer in PyTorch
WORKERS = {report.OURS: "benchmarks.block.overlap_worker", FSDP2: "benchmarks.peers.fsdp2"}
SCAN = "scan"  # `jax.lax.scan` over stacked weights
LOOP = "loop"  # a loop of Python, in which each layer has weights of its own
GATHERED = "gathered"  # the loop, with the experts' weights quantized, or cast, and gathered once a step
WAYS = (SCAN, LOOP, GATHERED)
LABELS = {"none": "bf16"}  # of recipes, in the picture


@dataclasses.dataclass(frozen=True)
class Case:
    """What one process measures.

    Attributes:
      model: the model of the block.
      layers: the layers of the scan.
      tokens: the tokens of a device, one number for each row; `overlap_worker` takes one.
      fsdp, ep, dp: the sizes of the mesh.
      recipe: the recipe of all matmuls; "none" is bfloat16.
      options: whether XLA compiles with `moax.OVERLAP_OPTIONS`.
      way: how the layers run, one of `WAYS`.
      impl: "moax", or the name of a peer.
    """

    model: str
    layers: int
    tokens: tuple[int, ...]
    fsdp: int
    ep: int
    recipe: str
    options: bool
    way: str = SCAN
    impl: str = report.OURS
    dp: int = 1

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the mesh by the names of its axes."""
        return {"dp": self.dp, "fsdp": self.fsdp, "ep": self.ep}


def norm(x):
    """Divides each row by its root mean square."""
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-6).astype(x.dtype)


def make_step(config: moax.MoEConfig, recipe: str | None, way: str = SCAN, kernels: str = "auto"):
    """Returns loss and gradients of the layers of `make_arrays`."""
    options = moax.Options(recipe=recipe, kernels=kernels)

    def run_layer(x, weights, quantized=None):
        h = norm(x)
        for w in weights["dense"]:
            h = jax.nn.relu(moax.ops.dense(h, w, recipe=recipe, kernels=kernels))
        x = x + h
        y, stats = moax.moe(norm(x), weights["moe"], config, options, quantized=quantized)
        return x + y, stats.aux_loss

    def run_scan(x, stack):
        return jax.lax.scan(jax.checkpoint(run_layer, policy=POLICY, prevent_cse=False), x, stack)

    def run_loop(x, layers):
        losses = []
        quantized = None
        for weights in layers:
            if way == GATHERED:
                quantized = moax.quantize_params(weights["moe"], config, options, gather=True)
            x, aux_loss = jax.checkpoint(run_layer, policy=POLICY)(x, weights, quantized)
            losses.append(aux_loss)
        return x, jnp.stack(losses)

    def loss(layers, x):
        run = run_scan if way == SCAN else run_loop
        y, aux = run(x, layers)
        return jnp.mean(jnp.square(y.astype(jnp.float32))) + aux.sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


def make_arrays(config: moax.MoEConfig, layers: int, way: str, rows: int) -> tuple[Any, jax.Array]:
    """Returns the weights of the layers in bfloat16, stacked for a scan or in a list for a loop, and the tokens."""
    width = config.d_model
    moe = moax.init(jax.random.key(1), config, dtype=jnp.bfloat16)
    moe = dataclasses.replace(moe, router=jax.random.normal(jax.random.key(2), moe.router.shape) * width**-0.5)
    dense = [
        jax.random.normal(key, (layers, width, width), jnp.bfloat16) * width**-0.5
        for key in jax.random.split(jax.random.key(3), DENSE)
    ]
    x = jax.random.normal(jax.random.key(0), (rows, width), jnp.bfloat16)
    if way == SCAN:
        return {"dense": dense, "moe": jax.tree.map(lambda v: jnp.stack([v] * layers), moe)}, x
    return [{"dense": [w[layer] for w in dense], "moe": jax.tree.map(jnp.copy, moe)} for layer in range(layers)], x


def find_shardings(config: moax.MoEConfig, layers: int, way: str, mesh: Mesh) -> tuple[Any, NamedSharding]:
    """Returns the sharding of each array of `make_arrays`."""
    tokens = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    stacked = (None,) if way == SCAN else ()
    weights = {
        "dense": [NamedSharding(mesh, PartitionSpec(*stacked, "fsdp"))] * DENSE,
        "moe": jax.tree.map(lambda spec: NamedSharding(mesh, PartitionSpec(*stacked, *spec)), moax.param_specs(config)),
    }
    if way == SCAN:
        return weights, tokens
    return [weights] * layers, tokens


def list_cases(args: argparse.Namespace) -> list[Case]:
    """Returns the cases of a command line."""
    cases = []
    tokens = read_numbers(args.tokens)
    installed = read_numbers(args.installed)
    for mesh in args.mesh.split(","):
        fsdp, ep, dp = read_mesh(mesh)
        make = functools.partial(Case, args.model, args.layers, fsdp=fsdp, ep=ep, dp=dp)
        for number, recipe, way in itertools.product(tokens, args.recipes.split(","), args.ways):
            alone = fsdp == ep == dp == 1
            if not alone:
                cases.append(make((number,), recipe=recipe, options=True, way=way))
            if alone or number in installed:
                cases.append(make((number,), recipe=recipe, options=False, way=way))
        if args.peer and ep == dp == 1:
            cases.append(make(tokens, recipe="none", options=False, way=LOOP, impl=FSDP2))
    return cases


def read_numbers(text: str) -> tuple[int, ...]:
    """Returns the numbers of a text with commas."""
    return tuple(int(number) for number in text.split(","))


def read_mesh(text: str) -> tuple[int, int, int]:
    """Returns the sizes of fsdp, ep and dp: "4" is (4, 1, 1), "2x2" is (2, 2, 1), and "1x1x2" is (1, 1, 2)."""
    sizes = [int(size) for size in text.split("x")]
    fsdp, ep, dp = sizes + [1] * (3 - len(sizes))
    return fsdp, ep, dp


def run(cases: list[Case]) -> list[dict[str, Any]]:
    """Returns the rows of each case, measured in a process of its own; a row that could not run has a `note`."""
    workers = [(case, Worker(WORKERS[case.impl], dataclasses.asdict(case))) for case in cases]
    rows = []
    for case, answer in answers(workers):
        rows.append(dataclasses.asdict(case) | answer)
        print(rows[-1], flush=True)
    return rows


def compare(rows: list[dict[str, Any]]) -> None:
    """Gives each row with fsdp its time over that of the row without, all else being equal."""
    same = ("model", "layers", "tokens", "ep", "dp", "recipe", "way", "impl")
    timed = [row for row in rows if "ms_a_layer" in row]
    # One device has no options.
    alone = {(*(row[name] for name in same), row["options"]): row["ms_a_layer"] for row in timed if row["fsdp"] == 1}
    for row in timed:
        key = tuple(row[name] for name in same)
        base = alone.get((*key, row["options"]), alone.get((*key, False)))
        if row["fsdp"] > 1 and base is not None:
            row["times_fsdp_1"] = round(row["ms_a_layer"] / base, 3)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws ms of a layer against the tokens of a device: one device, and the largest fsdp with the options."""
    from matplotlib import pyplot

    largest = max(row["fsdp"] for row in rows)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    shown = [row for row in rows if row["ep"] == row["dp"] == 1 and "ms_a_layer" in row]
    for recipe, way, impl in dict.fromkeys((row["recipe"], row["way"], row["impl"]) for row in shown):
        line = [row for row in shown if (row["recipe"], row["way"], row["impl"]) == (recipe, way, impl)]
        color = None
        for fsdp, style in ((1, "--o"), (largest, "-o")):
            points = [
                row for row in line if row["fsdp"] == fsdp and row["options"] == (fsdp > 1 and impl == report.OURS)
            ]
            where = "one GPU" if fsdp == 1 else f"fsdp {fsdp}"
            label = f"{impl}, {LABELS.get(recipe, recipe)}, {way}, {where}"
            numbers = [row["tokens"] for row in points], [row["ms_a_layer"] for row in points]
            (drawn,) = axes.plot(*numbers, style, label=label, color=color, markersize=4)
            color = drawn.get_color()
    axes.set(xlabel="tokens a GPU", ylabel="ms a layer, forward and backward", ylim=(0, None))
    axes.set_xticks(sorted({row["tokens"] for row in shown}))
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


def main() -> int:
    """Prints a row for each case, and returns 1 where one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.block.overlap", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=tuple(CONFIGS), default="qwen3-30b", help="the model of the block (default: %(default)s)")
    add(
        "--mesh",
        default="1,2",
        metavar="SIZES",
        help="sizes of fsdp, fsdp x ep, or fsdp x ep x dp, as 1,4,1x2,1x1x2 (default: %(default)s)",
    )
    add("--layers", type=int, default=4, metavar="L", help="layers of a scan (default: %(default)s)")
    add("--tokens", default="8192", metavar="NUMBERS", help="tokens of a device, with commas (default: %(default)s)")
    add("--recipes", default="none,fp8_block", metavar="NAMES", help="recipes, with commas (default: %(default)s)")
    add(
        "--ways",
        nargs="+",
        choices=WAYS,
        default=[SCAN],
        help="a scan over the layers, a loop of Python, or the loop with weights gathered once (default: scan)",
    )
    add(
        "--installed",
        default="8192",
        metavar="NUMBERS",
        help="tokens for a run as XLA is installed (default: %(default)s)",
    )
    add("--peer", action="store_true", help="the same layers in PyTorch with FSDP2 too")
    add("--sha", help="the commit, where this machine has no git")
    add("--out", type=Path, metavar="FILE", help="write the rows to this file, as JSON")
    add("--picture", type=Path, metavar="FILE", help="draw ms against tokens in this file")
    args = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share the GPUs' memory
    rows = run(list_cases(args))
    compare(rows)
    if args.picture:
        draw(rows, args.picture)
    if args.out:
        report.save(args.out, report.header(sys.argv, args.sha, {}) | {"options": moax.OVERLAP_OPTIONS}, rows)
    return int(any("note" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
