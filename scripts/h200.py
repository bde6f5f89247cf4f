"""This script compiles for H200s that this machine does not have, and reads the programs: h200.py WHAT [options].

sass      compiles the kernels, and the block for 4 H200s, to SASS, and prints the registers of each kernel. It asserts
          that no kernel spills registers, that weights cross as bytes, and that gradients are reduce-scattered.
launches  counts the operations of a layer of qwen3-30b that start a kernel or a copy, forward and backward. It fails
          where they are more than the limit of the case. A card may run a few more: a sort by cub is several kernels.
memory    compiles a scan of qwen3-30b layers for 8 and 64 H200s, and prints its memory beside the word of the estimate:
              saved = (temp(4 layers) - temp(2 layers)) / 2 - x        temporary = temp(4 layers) - 4 (saved + x)
          It fails where the default options keep more than the limits, where the estimate of what a layer saves is off
          by more than a tenth, or where a program runs a kernel twice.
overlap   compiles layers (dense products, norms, the block) in `jax.lax.scan` over fsdp, as XLA is installed and with
          `moax.OVERLAP_OPTIONS`, and prints how many kernels of the products' ops are between the start and the done of
          each collective of the experts' weights. It fails where with the options more than one has none.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import re
import subprocess
import sys
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from described import make_operands, mesh_of_h200s
from h200_kernels import BF16, F32, kernels
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import moax
from benchmarks import report
from benchmarks.block.overlap import DENSE, make_step
from moax import inspect
from moax.estimate import estimate
from moax.models import MODELS

QWEN3 = MODELS["qwen3-30b"].config
TOKENS = 8192
SMALL = moax.MoEConfig(d_model=512, d_ff=256, num_experts=16, top_k=2)
LIMITS = {"bf16": 24, "fp8_block": 32, "fp8_block+kept": 28}  # launches
# These operations name memory, or are part of another one.
FREE = {
    "parameter",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "constant",
    "after-all",
    "partition-id",
}
OPERATION = re.compile(r"^\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
X_BYTES = TOKENS * QWEN3.d_model * 2
SAVED_LIMIT = 0.55e9
TEMPORARY_LIMIT = 1.2e9
MEMORY_CASES = (  # recipe, ep, buffer_factor, save_rows
    ("fp8_block", 8, None, True),
    ("fp8_block", 8, 1.25, True),
    ("fp8_block", 8, 1.25, False),
    ("fp8_block", 64, 1.25, True),
    (None, 1, 1.25, True),
    ("fp8_block", 1, 1.25, None),
    (None, 8, 1.25, True),
    (None, 8, 1.25, False),
)
KERNEL_HASH = re.compile(r'kernel_hash = ("(?:[^"\\]|\\.)*")')
LARGE = 2**24  # bytes: a collective of the experts' weights
KERNEL = re.compile(r"(experts|experts_grad|grouped_matmul|grouped_matmul_grad)\)*/")
BYTES = {"u8": 1, "f8e4m3fn": 1, "bf16": 2, "f32": 4}
COLLECTIVE = re.compile(r"%([\w.\-]+) = (.*?) (all-gather|reduce-scatter|all-to-all)(-start)?\(")


def compile_kernels(only: str) -> None:
    """Compiles each kernel whose name contains `only` for one H200; ptxas prints their registers."""
    place = NamedSharding(mesh_of_h200s((1,), ("x",)), PartitionSpec())
    for name, fn, operands in kernels():
        if only in name:
            print(f"== {name}", flush=True)
            shapes = [jax.ShapeDtypeStruct(s, d, sharding=place) for s, d in operands]
            jax.jit(fn).lower(*shapes).compile()


def compile_small(name: str, mesh: Mesh, **options):
    """Compiles the gradients of a small block on 4 H200s."""
    print(f"== {name}", flush=True)
    with jax.set_mesh(mesh):
        params, x = make_operands(SMALL, 1024, axes=options.get("axes", moax.Axes()), dtype=F32)

        def loss(x, params):
            y, _ = moax.moe(x, params, SMALL, kernels="hopper", **options)
            return jnp.sum(jnp.square(y.astype(F32)))

        return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, params).compile(), params


def compile_blocks() -> None:
    """Compiles the block on 4 H200s as (fsdp 2, ep 2), and checks the collectives of each recipe."""
    mesh = mesh_of_h200s((2, 2), ("fsdp", "ep"))
    for layout, recipe in itertools.product(
        ("experts", "model"),
        (None, "fp8_block", "mxfp8"),
    ):
        name = f"block {recipe} fsdp on {layout}"
        compiled, params = compile_small(name, mesh, recipe=recipe, axes=moax.Axes(fsdp_dim=layout))
        collectives = inspect.collectives(compiled, mesh=mesh)
        gathers = {c.dtype for c in inspect.weight_gathers(collectives) if c.size >= 512 * 256}
        if recipe is not None:
            inspect.assert_no_wide_weight_gather(collectives, weights=(params.wi, params.wo))
        if not gathers or (recipe is None and gathers != {"bfloat16"}):
            sys.exit(f"{name}: weights are gathered as {gathers or 'nothing'}")
        if not inspect.weight_scatters(collectives) or any(
            c.kind == "all-reduce" and c.size >= 512 * 256 for c in collectives
        ):
            sys.exit(f"{name}: gradients are not reduce-scattered:\n{inspect.table(collectives)}")
        print(
            f"{name}: weights gathered as {', '.join(sorted(gathers))}, gradients reduce-scattered",
            flush=True,
        )


def check_sass(args: argparse.Namespace) -> int:
    """Compiles in a process of its own, whose ptxas prints; prints the registers, and returns 1 where any spill."""
    if args.compile:
        compile_kernels(args.only)
        if args.only in ("", "block"):
            compile_blocks()
        return 0
    command = [sys.executable, __file__, "sass", "--compile", "--only", args.only]
    env = os.environ | {"MOSAIC_GPU_DUMP_PTXAS": "1"}
    pipe = subprocess.PIPE
    done = subprocess.run(command, env=env, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(done.stdout[-4000:])
        return done.returncode
    what = ""
    seen = 0
    spilled = []
    for line in done.stdout.splitlines():
        if line.startswith("== "):
            what = line[3:]
        if match := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            seen += 1
            if match.groups() != ("0", "0"):
                spilled.append(f"{what}: {line.strip()}")
        if (match := re.search(r"Used (\d+) registers", line)) or line.startswith("block "):
            print(f"{what}: {match[1]} registers" if match else line)
    print(f"{seen} kernels compiled to SASS for an H200, {len(spilled)} spill registers")
    print(*spilled, sep="\n")
    return int(bool(spilled) or not seen)


def compile_layer(case: str):
    """Returns the compiled forward and backward of one layer on one H200. After "+kept" weights come quantized."""
    options: dict[str, Any] = dict(
        recipe=None if case == "bf16" else case.removesuffix("+kept"),
        kernels="hopper",
    )
    quantize = functools.partial(moax.quantize_params, config=QWEN3, **options)

    def both(x, params, quantized, dy):
        y, pull = jax.vjp(
            lambda x, p: moax.moe(x, p, QWEN3, quantized=quantized, **options)[0],
            x,
            params,
        )
        return y, pull(dy)

    # The mesh says for which device the kernels are.
    with jax.set_mesh(mesh_of_h200s((1,), ("ep",))):
        params, x = make_operands(QWEN3, TOKENS)
        if case.endswith("+kept"):
            quantized_shapes = jax.eval_shape(quantize, params)
        else:
            quantized_shapes = None
        return jax.jit(both).lower(x, params, quantized_shapes, x).compile()


def check_launches(args: argparse.Namespace) -> int:
    """Counts the operations of each program's entry that start a kernel; returns 1 where they are too many."""
    failed = False
    for case, limit in LIMITS.items():
        text = compile_layer(case).as_text()
        count = 0
        for line in text[text.index("\nENTRY ") :].split("\n}")[0].splitlines():
            match = OPERATION.match(line)
            if match and match[3] not in FREE and not match[3].endswith("-done"):
                count += 1
                if args.list:
                    scope = re.search(r'op_name="([^"]*)"', line)
                    scope_end = scope[1][-70:] if scope else ""
                    print(f"  {match[3]:12} {match[1]:45} {match[2][:60]:60} {scope_end}")
        print(f"{case}: {count} launches; the limit is {limit}")
        failed |= count > limit
    return int(failed)


def compile_scan(ep: int, layers: int, **options):
    """Returns the compiled forward and backward of a scan of layers, for one of ep GPUs."""
    with jax.set_mesh(mesh_of_h200s((ep,), ("ep",))):
        params, x = make_operands(QWEN3, ep * TOKENS, layers=layers)

        def loss(params, x):
            def layer(x, params):
                return x + moax.moe(x, params, QWEN3, kernels="hopper", **options)[0], None

            return jnp.sum(jnp.square(jax.lax.scan(layer, x, params)[0].astype(F32)))

        return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x).compile()


def count_repeated(text: str) -> int:
    """Returns how many kernels an optimized program runs twice on the same operands: to use a result, and to store it.

    XLA fuses a kernel with the update that stores its result in the array of a scan, and keeps the kernel too where
    anything else reads the result.
    """
    bodies = dict(re.findall(r"^(?:ENTRY )?%(\S+) .*?\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))
    stored = {}
    for name, body in bodies.items():
        if " dynamic-update-slice(" in body:
            stored[name] = KERNEL_HASH.findall(body)
    repeated = 0
    for body in bodies.values():
        own_kernels = KERNEL_HASH.findall(body)
        for name in re.findall(r"calls=%([^\s,]+)", body):
            repeated += sum(kernel in own_kernels for kernel in stored.get(name, ()))
    return repeated


def check_memory(args: argparse.Namespace) -> int:
    """Prints the memory of each case, and returns 1 where it is too much, or not what the estimate says."""
    rows = []
    failed = False
    for recipe, ep, factor, save_rows in MEMORY_CASES:
        options = dict(
            recipe=recipe,
            exchange="all_to_all",
            buffer_factor=factor,
            save_rows=save_rows,
        )
        programs = [compile_scan(ep, layers, **options) for layers in (2, 4)]
        two, four = (program.memory_analysis().temp_size_in_bytes for program in programs)
        saved = (four - two) / 2 - X_BYTES
        estimated = estimate(QWEN3, {"ep": ep}, TOKENS, layers=1, hardware="h200", **options)
        guess = estimated.memory.saved - X_BYTES
        temporary = four - 4 * (saved + X_BYTES)
        repeated = count_repeated(programs[0].as_text())
        rows.append({
            "case": f"{recipe or 'bf16'}, ep {ep}, buffer_factor {factor}, save_rows {save_rows}",
            "saved_bytes": round(saved),
            "estimated_bytes": guess,
            "temporary_bytes": round(temporary),
            "saved_bytes_of_48_layers": round(48 * (saved + X_BYTES)),
            "kernels_run_twice": repeated,
        })  # fmt: skip
        off = guess / saved - 1
        of_a_layer = f"saved {saved / 1e9:5.2f} GB a layer (estimate {off:+.0%})"
        of_a_program = f"temporary {temporary / 1e9:5.2f} GB"
        of_a_model = f"48 layers {48 * (saved + X_BYTES) / 1e9:5.1f} GB"
        print(f"{rows[-1]['case']:53} {of_a_layer}, {of_a_program}, {of_a_model}", flush=True)
        default = ep > 1 and recipe is not None and factor is not None and save_rows
        failed |= abs(off) > 0.1 or repeated > 0
        failed |= default and (saved > SAVED_LIMIT or temporary > TEMPORARY_LIMIT)
    save(args.out, rows)
    return int(failed)


def lower_scan(gpus: int, layers: int, recipe: str | None):
    """Returns the lowered loss and gradients of a scan of layers over fsdp."""
    with jax.set_mesh(mesh_of_h200s((gpus,), ("fsdp",))):
        params, x = make_operands(QWEN3, gpus * TOKENS, layers=layers)
        split = NamedSharding(x.sharding.mesh, PartitionSpec(None, "fsdp"))
        dense = jax.ShapeDtypeStruct((layers, QWEN3.d_model, QWEN3.d_model), BF16, sharding=split)
        return make_step(QWEN3, recipe, kernels="hopper").lower(
            {"dense": [dense] * DENSE, "moe": params},
            x,
        )


def size(types: str) -> int:
    """Returns the bytes of the largest array in the text of a type."""
    arrays = re.findall(r"(\w+)\[([\d,]+)\]", types)
    return max(
        (BYTES.get(dtype, 0) * math.prod(map(int, dims.split(","))) for dtype, dims in arrays),
        default=0,
    )


def is_kernel(line: str) -> bool:
    """Returns whether an instruction is a kernel of a layer's products, and none of a gather or a scatter."""
    name = re.search(r'op_name="([^"]*)"', line)
    # A kernel that reads a slice is a fusion of it.
    is_call = "custom-call(" in line or line.strip().startswith("%dynamic_slice_fusion")
    return is_call and name is not None and KERNEL.search(name[1]) is not None


def read(text: str) -> list[dict[str, Any]]:
    """Returns a row for each large collective in the bodies of the loops of a scheduled program."""
    bodies = set(re.findall(r"body=%([\w.\-]+)", text))
    rows = []
    for block in re.split(r"\n(?=%|ENTRY)", text):
        name, *lines = block.splitlines()
        if name.split()[0].strip("%") not in bodies:
            continue
        for i, line in enumerate(lines):
            match = COLLECTIVE.search(line)
            if match and size(match[2]) >= LARGE:
                done = i
                if match[4]:  # Otherwise nothing runs beside the collective.
                    ends = re.compile(rf"{match[3]}-done\(.*%{re.escape(match[1])}\)")
                    done = next(j for j, other in enumerate(lines) if ends.search(other))
                beside = [line for line in lines[i:done] if is_kernel(line)]
                rows.append(
                    {
                        "collective": match[3],
                        "bytes": size(match[2]),
                        "kernels_beside": len(beside),
                    }
                )
    return rows


def check_overlap(args: argparse.Namespace) -> int:
    """Prints the kernels beside the collectives of each program; returns 1 where one lacks them."""
    rows = []
    failed = False
    for recipe, options in itertools.product(args.recipes.split(","), (True, False)):
        program = lower_scan(args.gpus, args.layers, None if recipe == "none" else recipe)
        compiled = program.compile(compiler_options=moax.OVERLAP_OPTIONS if options else None)
        collectives = read(compiled.as_text())
        temporary = compiled.memory_analysis().temp_size_in_bytes
        rows.append(
            {
                "recipe": recipe,
                "options": options,
                "temporary_bytes": temporary,
                "collectives": collectives,
            }
        )
        print(
            f"{recipe}, options={options}: {temporary / 1e9:.2f} GB beside arguments and results",
            flush=True,
        )
        for row in collectives:
            print("  " + ", ".join(f"{name} {value}" for name, value in row.items()))
        # Backward begins with the gather of wo.
        waits = sum(not row["kernels_beside"] for row in collectives)
        failed |= options and (not collectives or waits > 1)
    save(args.out, rows, gpus=args.gpus, layers=args.layers, options=moax.OVERLAP_OPTIONS)
    return int(failed)


def save(path: str | None, rows: list[dict[str, Any]], **about) -> None:
    """Writes rows as JSON; None writes nothing."""
    if path:
        head = report.header(["python", *sys.argv], None, {})
        report.save(
            path,
            head | {"device": "compiled for NVIDIA H200s that this machine does not have"} | about,
            rows,
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)
    for name, run in (("sass", check_sass), ("launches", check_launches), ("memory", check_memory),
                      ("overlap", check_overlap)):  # fmt: skip
        command = commands.add_parser(name)
        command.set_defaults(run=run)
        add = command.add_argument
        if name == "sass":
            add("--compile", action="store_true", help="compile here and print what ptxas says")
            about = "kernels with this in their name; `block` means the blocks"
            add("--only", default="", metavar="TEXT", help=about)
        elif name == "launches":
            add("--list", action="store_true", help="print each operation that starts a kernel")
        else:
            add("--out", help="write the rows to this file, as JSON")
        if name == "overlap":
            add("--gpus", type=int, default=8)
            add("--layers", type=int, default=4)
            add("--recipes", default="fp8_block,none")
    args = parser.parse_args()
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
