"""This script compiles a scan of layers for H200s that this machine does not have, and reads the schedule of its loops.

`make check-overlap` runs it. A layer is a norm, a dense product, and qwen3-30b's block; remat is by
`moax.CHECKPOINT_NAMES`. For each collective of the experts' weights in the loops of forward and backward it prints how
many kernels of the layer stand between its start and its done, and the memory of the program beside that of
`jax.lax.scan`. It exits with 1 where a collective of `moax.scan` has no kernel beside it.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from h200 import make_operands, mesh_of_h200s, save
from jax.sharding import NamedSharding, PartitionSpec

import moax
from benchmarks.block.overlap import OPTIONS, POLICY, norm
from moax.models import MODELS

CONFIG, TOKENS = MODELS["qwen3-30b"].config, 8192
LARGE = 2**24  # bytes: a collective of the experts' weights
KERNEL = re.compile(r"(experts|experts_grad|grouped_matmul|grouped_matmul_grad)\)*/")
BYTES = {"u8": 1, "f8e4m3fn": 1, "bf16": 2, "f32": 4}
COLLECTIVE = re.compile(r"%([\w.\-]+) = (.*?) (all-gather|reduce-scatter)(-start)?\(")


def lower(ours: bool, gpus: int, layers: int, recipe: str | None, unroll: int):
    """Returns the lowered loss and gradients of a scan of layers over fsdp."""

    def layer(x, weights):
        x = x + jax.nn.relu(moax.ops.dense(norm(x), weights["dense"], recipe=recipe, kernels="hopper"))
        y, stats = moax.moe(norm(x), weights["moe"], CONFIG, recipe=recipe, kernels="hopper")
        return x + y, stats.aux_loss

    def loss(stack, x):
        if ours:
            y, aux = moax.scan(layer, x, stack, policy=POLICY, unroll=unroll)
        else:
            y, aux = jax.lax.scan(jax.checkpoint(layer, policy=POLICY, prevent_cse=False), x, stack, unroll=unroll)
        return jnp.mean(jnp.square(y.astype(jnp.float32))) + aux.sum()

    with jax.set_mesh(mesh_of_h200s((gpus,), ("fsdp",))):
        params, x = make_operands(CONFIG, gpus * TOKENS, layers=layers)
        split = NamedSharding(x.sharding.mesh, PartitionSpec(None, "fsdp"))
        dense = jax.ShapeDtypeStruct((layers, CONFIG.d_model, CONFIG.d_model), jnp.bfloat16, sharding=split)
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower({"dense": dense, "moe": params}, x)


def size(types: str) -> int:
    """Returns the bytes of the largest array in the text of a type."""
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", types)
    sizes = [BYTES.get(dtype, 0) * math.prod(map(int, dims.split(","))) for dtype, dims in arrays if dims]
    return max(sizes, default=0)


def is_kernel(line: str) -> bool:
    """Returns whether an instruction is a kernel of a layer's products, and none of a gather or a scatter."""
    name = re.search(r'op_name="([^"]*)"', line)
    is_call = "custom-call(" in line or line.strip().startswith("%dynamic_slice_fusion")  # a kernel that reads a slice
    return is_call and name is not None and KERNEL.search(name[1]) is not None


def read(text: str) -> list[dict]:
    """Returns a row for each collective of the experts' weights in the body of a loop of a scheduled program."""
    bodies, rows = set(re.findall(r"body=%([\w.\-]+)", text)), []
    for block in re.split(r"\n(?=%|ENTRY)", text):
        name, *lines = block.splitlines()
        if name.split()[0].strip("%") not in bodies:
            continue
        for i, line in enumerate(lines):
            found = COLLECTIVE.search(line)
            if found and size(found[2]) >= LARGE:
                done = i
                if found[4]:  # otherwise nothing runs beside it
                    ends = re.compile(rf"{found[3]}-done\(.*%{re.escape(found[1])}\)")
                    done = next(j for j, other in enumerate(lines) if ends.search(other))
                beside = sum(map(is_kernel, lines[i:done]))
                rows.append({"collective": found[3], "bytes": size(found[2]), "kernels_beside": beside})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--recipes", default="fp8_block,none")
    parser.add_argument("--unroll", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the rows to this file, as JSON")
    args = parser.parse_args()
    report, failed = [], 0
    for recipe in args.recipes.split(","):
        for ours in (True, False):
            program = lower(
                ours, args.gpus, args.layers, None if recipe == "none" else recipe, args.unroll if ours else 1
            )
            compiled = program.compile(compiler_options=OPTIONS)
            rows, temporary = read(compiled.as_text()), compiled.memory_analysis().temp_size_in_bytes
            scan = "moax.scan" if ours else "jax.lax.scan"
            report.append({"scan": scan, "recipe": recipe, "temporary_bytes": temporary, "collectives": rows})
            print(f"{scan}, {recipe}: {temporary / 1e9:.2f} GB beside arguments and results", flush=True)
            for row in rows:
                print("  {collective:14} of {bytes:>11,} bytes: {kernels_beside} kernels beside it".format(**row))
            failed += ours and (not rows or any(row["kernels_beside"] == 0 for row in rows))
    save(args.out, report, gpus=args.gpus, layers=args.layers, options=OPTIONS)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
