"""`moax inspect` lists the collectives of a compiled MoE block on emulated devices."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math

from moax import program
from moax.arguments import add_execution, mesh_over_devices
from moax.config import MoEConfig
from moax.inspect.block import report

USAGE = "moax inspect [options]"
DESCRIPTION = "Compiles one MoE block, and lists its collectives: kind, dtype, shape, mesh axes, bytes and op."
MESH = (("fsdp", 2), ("ep", 4))
DTYPES = ("float32", "bfloat16")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `moax inspect` to `parser`."""
    add = parser.add_argument
    add_execution(parser, mesh=",".join(f"{name}={size}" for name, size in MESH), dtypes=DTYPES)
    add("--d-model", type=int, default=1024, metavar="H", help="model width (default: %(default)s)")
    add("--d-ff", type=int, default=2048, metavar="F", help="width of an expert (default: %(default)s)")
    add("--experts", type=int, default=8, metavar="E", help="number of experts (default: %(default)s)")
    add("--top-k", type=int, default=2, metavar="K", help="experts of a token (default: %(default)s)")
    add("--tokens", type=int, default=4096, metavar="T", help="tokens of the whole mesh (default: %(default)s)")
    add("--forward-only", action="store_true", help="leave the backward pass out")
    add("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Compiles the block and prints its collectives; it runs nothing. Returns 0.

    It emulates as many devices as the mesh has, unless JAX runs on that many CPU devices already.
    """
    sizes = args.mesh or MESH
    program.emulate(args.cpu_devices or math.prod(size for _, size in sizes))
    block_report = report(
        MoEConfig(d_model=args.d_model, d_ff=args.d_ff, num_experts=args.experts, top_k=args.top_k),
        tokens=args.tokens,
        recipe=None if args.recipe == "none" else args.recipe,
        exchange=args.exchange or "auto",
        engine=args.engine or "auto",
        mesh=mesh_over_devices(sizes),
        dtype=args.dtype or "bfloat16",
        backward=not args.forward_only,
        grad_reduce_dtype=args.grad_reduce_dtype,
    )
    if args.json:
        listed = [
            {**dataclasses.asdict(c), "carries": [v.name for v in c.carries], "reaches": [v.name for v in c.reaches]}
            for c in block_report.found
        ]
        weights = {"gathered": block_report.gathered, "gathered_unquantized": block_report.plain_gathered}
        print(json.dumps({"collectives": listed, "weights": weights}, indent=2))
    else:
        print(block_report)
    return 0
