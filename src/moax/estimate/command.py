"""`moax estimate` prints the cost of a model's MoE blocks on a mesh, and how the parameters are sharded."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from typing import Any

from moax import program
from moax.config import MoEConfig
from moax.estimate import HARDWARE, Estimate, estimate
from moax.mesh.axes import Axes
from moax.mesh.specs import local_shape
from moax.models import MODELS, find_model
from moax.params import param_shapes
from moax.sharding import expert_specs
from moax.text import align, plural

DESCRIPTION = """\
Estimates the MoE blocks of a model on a mesh: the layout of each parameter, the memory of a device, and the bytes and
the time of each collective in a training step. The command traces the block, needs no GPU, and compiles nothing.

Times assume a balanced load and no overlap: compare meshes by them. Attention and the rest of the model are left out.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `moax estimate` to `parser`."""
    add = parser.add_argument
    add("--model", metavar="NAME", help=f"a model: {', '.join(MODELS)} (default: the sizes below)")
    add("--hf", metavar="FOLDER", help="a Hugging Face checkpoint, or its config.json")
    program.add_sizes(parser, d_model=2048, d_ff=768, experts=128, top_k=8)
    add("--layers", type=int, metavar="L", help="number of MoE blocks (default: that of the model; 1 for sizes)")
    add("--tokens", type=int, default=4096, metavar="T", help="tokens of a GPU in a step (default: %(default)s)")
    add("--hardware", choices=tuple(HARDWARE), default="h200", help="the GPU (default: %(default)s)")
    program.add_block_options(parser, mesh="one GPU")
    add("--capacity-factor", type=program.factor, metavar="X", help="bound the rows of a rank at X times the even load")
    add("--buffer-factor", type=program.factor, default=1.25, metavar="X", help="buffers for X times the balanced "
        "load; none: for the worst case (default: %(default)s)")  # fmt: skip
    add("--save-rows", action=argparse.BooleanOptionalAction, default=True, help="keep the sorted rows for backward")
    add("--kernels", choices=("auto", "hopper", "xla"), default="auto", help="implementation (default: %(default)s)")
    add("--remat", action="store_true", help="keep only the input of a layer, and recompute the rest")
    add("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Prints the estimate of one mesh. Returns 0."""
    name, config, layers = _model(args)
    if args.capacity_factor is not None:
        finite = None if math.isinf(args.capacity_factor) else args.capacity_factor
        config = dataclasses.replace(config, capacity_factor=finite)
    found = estimate(
        config,
        dict(args.mesh or ()),
        args.tokens,
        hardware=args.hardware,
        layers=layers if args.layers is None else args.layers,
        remat=args.remat,
        recipe=None if args.recipe == "none" else args.recipe,
        exchange=args.exchange or "auto",
        kernels=args.kernels,
        buffer_factor=None if math.isinf(args.buffer_factor) else args.buffer_factor,
        save_rows=args.save_rows,
        grad_reduce_dtype=args.grad_reduce_dtype,
    )
    print(json.dumps(as_dict(name, found), indent=2) if args.json else as_text(name, found))
    return 0


def _model(args: argparse.Namespace) -> tuple[str, MoEConfig, int]:
    """Returns the name, the block and the layers of the model that the arguments name."""
    if args.model and args.hf:
        raise ValueError("--model and --hf name one model each; give one of them")
    if args.hf:
        from moax import hf
        from moax.hf.config import read_config

        return read_config(args.hf)["model_type"], hf.config_from_hf(args.hf), len(hf.moe_layers(args.hf))
    if args.model:
        return args.model, find_model(args.model).config, find_model(args.model).layers
    return "a block", program.read_sizes(args), 1


def layouts(e: Estimate) -> list[tuple[str, tuple[int, ...], str, tuple[int, ...]]]:
    """Returns (name, shape, spec, shape of a shard) of each parameter of a block."""
    shapes, axes = param_shapes(e.config), e.plan.axes
    specs, names = expert_specs(e.config, Axes(), axes), [field.name for field in dataclasses.fields(shapes)]
    made = [(n, getattr(shapes, n), getattr(specs, n)) for n in names if getattr(shapes, n) is not None]
    return [(name, shape, str(tuple(spec)), local_shape(shape, spec, axes)) for name, shape, spec in made]


def as_dict(name: str, e: Estimate) -> dict[str, Any]:
    """Returns the estimate as values that JSON can hold."""
    return {
        "model": name,
        "config": dataclasses.asdict(e.config),
        "layers": e.layers,
        "mesh": e.mesh,
        "tokens": e.tokens,
        "hardware": e.hardware.kind,
        "exchange": e.plan.first.exchange.transport,
        "kernels": e.plan.kernels,
        "params": {of: {"shape": shape, "spec": spec, "shard": shard} for of, shape, spec, shard in layouts(e)},
        "memory": e.memory._asdict() | {"total": e.memory.total, "fits": e.fits},
        "bytes": {scope: e.wire_bytes(scope) for scope in e.transfers},
        "seconds": e.times,
    }


def as_text(name: str, e: Estimate) -> str:
    """Returns the estimate as text: the layout of parameters, the memory, and the bytes and times of a step."""
    c, mesh = e.config, ",".join(f"{axis}={size}" for axis, size in e.mesh.items()) or "one GPU"
    shared = f", a shared expert of {c.shared_d_ff}" if c.shared_d_ff else ""
    shared += f", latent experts of rows of {c.d_latent}" if c.d_latent else ""
    head = (
        f"{name}: {plural(e.layers, 'MoE layer')} of {c.num_experts} experts, {c.top_k} a token; width {c.d_model}, "
        f"experts of {c.d_ff}, {c.activation}{shared}\n{e.hardware.kind}, mesh {mesh}: {e.tokens} tokens a GPU, "
        f"exchange {e.plan.first.exchange.transport}, kernels {e.plan.kernels}"
    )
    params = [("parameter", "shape", "mesh axes", "shard"), None, *(tuple(map(str, row)) for row in layouts(e))]
    sizes = e.memory._asdict() | {"total": e.memory.total, "of a GPU" if e.fits else "TOO MUCH for": e.hardware.memory}
    memory = [("memory of a device", "GB"), None, *((of, f"{size / 1e9:.2f}") for of, size in sizes.items())]
    steps = [("in a step", "MB sent", "ms"), None]
    for of, seconds in e.times.items():
        steps.append((of, f"{e.wire_bytes(of) / 1e6:,.1f}" if of in e.transfers else "", f"{seconds * 1e3:,.2f}"))
    steps.append(("total", f"{e.wire_bytes() / 1e6:,.1f}", f"{e.seconds * 1e3:,.2f}"))
    return "\n\n".join([head, align(params), align(memory, right=(1,)), align(steps, right=(1, 2))])
