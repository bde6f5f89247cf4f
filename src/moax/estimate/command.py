"""`moax estimate` prints the cost of a model's MoE blocks on a mesh, and how the parameters are sharded."""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import Any

from moax import hf, program
from moax.config import MoEConfig
from moax.estimate import HARDWARE, Estimate, estimate
from moax.hf.config import read_config
from moax.mesh.axes import Axes
from moax.mesh.specs import local_shape
from moax.models import MODELS, find_model
from moax.params import param_shapes
from moax.program import align, plural
from moax.sharding import expert_specs

DESCRIPTION = """\
Estimates the MoE blocks of a model on a mesh: the layout of each parameter, the memory of a device, and the bytes and
the time of each collective in a training step. The command traces the block, needs no GPU, and compiles nothing.

Times assume a balanced load and no overlap: compare meshes by them. Attention and the rest of the model are left out.
"""
SIZES = {
    "d-model": (2048, "H", "model width"),
    "d-ff": (768, "F", "width of an expert"),
    "experts": (128, "E", "number of experts"),
    "top-k": (8, "K", "experts of a token"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `moax estimate` to `parser`."""
    add = parser.add_argument
    add("--model", metavar="NAME", help=f"a model: {', '.join(MODELS)} (default: the sizes below)")
    add("--hf", metavar="FOLDER", help="a Hugging Face checkpoint, or its config.json")
    for name, (default, metavar, what) in SIZES.items():
        add(f"--{name}", type=int, default=default, metavar=metavar, help=f"{what} (default: {default})")
    add("--layers", type=int, metavar="L", help="number of MoE blocks (default: that of the model; 1 for sizes)")
    add("--tokens", type=int, default=4096, metavar="T", help="tokens of a GPU in a step (default: %(default)s)")
    add("--hardware", choices=tuple(HARDWARE), default="h200", help="the GPU (default: %(default)s)")
    program.add_block_options(parser, mesh="one GPU")
    add("--capacity-factor", type=program.factor, default=math.inf, metavar="X",
        help="bound the rows of a rank at X times the even load")  # fmt: skip
    add("--buffer-factor", type=program.factor, default=1.25, metavar="X", help="buffers for X times the balanced "
        "load; none: for the worst case (default: %(default)s)")  # fmt: skip
    add("--save-rows", action=argparse.BooleanOptionalAction, default=True, help="keep the sorted rows for backward")
    add("--kernels", choices=("auto", "hopper", "xla"), default="auto", help="implementation (default: %(default)s)")
    add("--remat", action="store_true", help="keep only the input of a layer, and recompute the rest")


def run(args: argparse.Namespace) -> int:
    """Prints the estimate of one mesh. Returns 0."""
    if args.model and args.hf:
        raise ValueError("--model and --hf name one model each; give one of them")
    if args.hf:
        name, layers = read_config(args.hf)["model_type"], len(hf.moe_layers(args.hf))
        config = hf.config_from_hf(args.hf)
    elif args.model:
        name, config, layers = args.model, find_model(args.model).config, find_model(args.model).layers
    else:
        name, config, layers = "a block", MoEConfig(args.d_model, args.d_ff, args.experts, args.top_k), 1
    capacity, buffer = (None if math.isinf(x) else x for x in (args.capacity_factor, args.buffer_factor))
    config = dataclasses.replace(config, capacity_factor=capacity)
    given: dict[str, Any] = {
        of: getattr(args, of) for of in ("hardware", "remat", "kernels", "save_rows", "grad_reduce_dtype")
    }
    given |= {"recipe": None if args.recipe == "none" else args.recipe, "exchange": args.exchange or "auto"}
    layers = layers if args.layers is None else args.layers
    found = estimate(config, dict(args.mesh or ()), args.tokens, layers=layers, buffer_factor=buffer, **given)
    print(as_text(name, found))
    return 0


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
    params, axes = [("parameter", "shape", "mesh axes", "shard"), None], e.plan.axes
    specs = expert_specs(c, Axes(), axes)
    for of, shape in vars(param_shapes(c)).items():
        if shape is not None:
            spec = getattr(specs, of)
            params.append((of, str(shape), str(tuple(spec)), str(local_shape(shape, spec, axes))))
    sizes = e.memory._asdict() | {"total": e.memory.total, "of a GPU" if e.fits else "TOO MUCH for": e.hardware.memory}
    memory = [("memory of a device", "GB"), None, *((of, f"{size / 1e9:.2f}") for of, size in sizes.items())]
    steps = [("in a step", "MB sent", "ms"), None]
    for of, seconds in e.times.items():
        steps.append((of, f"{e.wire_bytes(of) / 1e6:,.1f}" if of in e.transfers else "", f"{seconds * 1e3:,.2f}"))
    steps.append(("total", f"{e.wire_bytes() / 1e6:,.1f}", f"{e.seconds * 1e3:,.2f}"))
    return "\n\n".join([head, align(params), align(memory, right=(1,)), align(steps, right=(1, 2))])
