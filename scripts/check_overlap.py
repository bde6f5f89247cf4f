"""This script compiles layers for H200s that this machine does not have, and reads which kernels run beside the wire.

`make check-overlap` runs it. A layer is a norm, a dense product, and qwen3-30b's block; remat is by
`moax.CHECKPOINT_NAMES`. For each collective of the experts' weights in the loops of forward and backward it prints how
many kernels of the layer are between its start and its done, and the memory of the program beside that of
`jax.lax.scan`. It exits with 1 where a collective of `moax.scan` has no kernel beside it.

With `--exchange all_to_all,all_gather` it compiles one layer over ep, forward and backward, with one chunk and with
two. It prints the kernels beside each collective of dispatch and combine, and exits with 1 where two chunks have none.
"""

from __future__ import annotations

import argparse
import itertools
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
STEP = re.compile(r"(dispatch|combine|combine_grad|dispatch_grad)\)*/")
PRODUCT = re.compile(r"(expert_up|expert_down)\)*/")
BYTES = {"u8": 1, "f8e4m3fn": 1, "bf16": 2, "f32": 4}
COLLECTIVE = re.compile(r"%([\w.\-]+) = (.*?) (all-gather|reduce-scatter|all-to-all)(-start)?\(")


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


def lower_exchange(gpus: int, options: dict):
    """Returns the lowered loss and gradients of one layer over ep, on the engine whose programs keep all scopes."""

    def loss(params, x):
        y, stats = moax.moe(norm(x), params, CONFIG, kernels="hopper", engine="shard_map", **options)
        return jnp.mean(jnp.square((x + y).astype(jnp.float32))) + stats.aux_loss

    with jax.set_mesh(mesh_of_h200s((gpus,), ("ep",))):
        params, x = make_operands(CONFIG, gpus * TOKENS)
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(params, x)


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


def read(text: str, loops: bool = True) -> list[dict]:
    """Returns a row for each large collective of a scheduled program, in the bodies of its loops or outside of them."""
    bodies, rows = set(re.findall(r"body=%([\w.\-]+)", text)), []
    for block in re.split(r"\n(?=%|ENTRY)", text):
        name, *lines = block.splitlines()
        if (name.split()[0].strip("%") in bodies) != loops:
            continue
        for i, line in enumerate(lines):
            found = COLLECTIVE.search(line)
            if found and size(found[2]) >= LARGE:
                done = i
                if found[4]:  # otherwise nothing runs beside it
                    ends = re.compile(rf"{found[3]}-done\(.*%{re.escape(found[1])}\)")
                    done = next(j for j, other in enumerate(lines) if ends.search(other))
                beside = [line for line in lines[i:done] if is_kernel(line)]
                row = {"collective": found[3], "bytes": size(found[2]), "kernels_beside": len(beside)}
                step = STEP.search(line)
                products = sum(PRODUCT.search(line) is not None for line in beside)
                rows.append(row if loops else {"step": step and step[1]} | row | {"products_beside": products})
    return rows


def compare_scans(args: argparse.Namespace) -> tuple[list[dict], int]:
    """Prints and returns the programs of both scans, and how many of `moax.scan` have a collective alone."""
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
    return report, failed


def compare_chunks(args: argparse.Namespace) -> tuple[list[dict], int]:
    """Prints and returns the programs of one chunk and of two, and how many of two chunks have no kernel beside."""
    report, failed = [], 0
    given = (words.split(",") for words in (args.exchange, args.recipes, args.buffer_factors))
    for exchange, recipe, factor, chunks in itertools.product(*given, (1, 2)):
        options = dict(exchange=exchange, recipe=None if recipe == "none" else recipe, chunks=chunks)
        program = lower_exchange(args.gpus, options | dict(buffer_factor=None if factor == "none" else float(factor)))
        compiled = program.compile(compiler_options=OPTIONS)
        rows, temporary = read(compiled.as_text(), loops=False), compiled.memory_analysis().temp_size_in_bytes
        about = {"exchange": exchange, "recipe": recipe, "buffer_factor": factor, "chunks": chunks}
        report.append(about | {"temporary_bytes": temporary, "collectives": rows})
        named = ", ".join(f"{name}={value}" for name, value in about.items())
        print(f"{named}: {temporary / 1e9:.2f} GB beside arguments and results", flush=True)
        for row in rows:
            print("  {step!s:13} {collective:14} of {bytes:>11,} bytes: {kernels_beside} kernels beside it, "
                  "{products_beside} of them products".format(**row))  # fmt: skip
        failed += chunks == 2 and not any(row["kernels_beside"] for row in rows)
    return report, failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--recipes", default="fp8_block,none")
    parser.add_argument("--unroll", type=int, default=1)
    parser.add_argument("--exchange", help="transports of one layer over ep, in place of the scans")
    parser.add_argument("--buffer-factors", default="1.25,none", help="of the layer over ep; none: the worst case")
    parser.add_argument("--out", type=Path, help="write the rows to this file, as JSON")
    args = parser.parse_args()
    report, failed = compare_chunks(args) if args.exchange else compare_scans(args)
    layers = 1 if args.exchange else args.layers
    save(args.out, report, gpus=args.gpus, layers=layers, options=OPTIONS)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
