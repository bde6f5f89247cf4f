"""`moax estimate` prints the cost of a model's blocks on a mesh, or ranks all meshes; it compiles nothing."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from moax.arguments import GRAD_REDUCE_HELP, RECIPE_NAMES, factor, mesh_of, recipe_of
from moax.config import MoEConfig
from moax.estimate import Estimate, estimate, sweep
from moax.estimate.hardware import HARDWARE
from moax.estimate.wires import WIRES
from moax.mesh.axes import ROLES
from moax.mesh.collectives import GRAD_REDUCE
from moax.models import MODELS
from moax.ops.exchange import EXCHANGES
from moax.text import align, plural

USAGE = "moax estimate [--model NAME] (--mesh AXES | --gpus N [--sweep]) [options]"
DESCRIPTION = """\
Estimates the MoE blocks of a model on a mesh: the memory of a device, the bytes on each wire in a training step, the
time of each stage and its bound, and what quantizing before the gather saves. The command needs no GPU, and compiles
nothing.

The bytes equal those of the compiled program. The times assume a balanced load and the rates that kernels reach, and no
stages overlap: compare meshes by them. The output says which kernels have these rates. Attention and the rest of the
model are not counted.

--mesh estimates one mesh. --gpus finds the fastest mesh that fits. --gpus with --sweep ranks all meshes.
"""
GB = 1e9


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `moax estimate` to `parser`."""
    add = parser.add_argument
    models, gpus = ", ".join(MODELS), ", ".join(HARDWARE)
    add("--mesh", type=mesh_of, metavar="AXES", help=f"axis sizes, as fsdp=32,ep=8; axes: {', '.join(ROLES)}")
    add("--model", metavar="NAME", help=f"a model: {models} (default: the sizes below)")
    add("--d-model", type=int, default=2048, metavar="H", help="model width (default: %(default)s)")
    add("--d-ff", type=int, default=768, metavar="F", help="width of an expert (default: %(default)s)")
    add("--experts", type=int, default=128, metavar="E", help="number of experts (default: %(default)s)")
    add("--top-k", type=int, default=8, metavar="K", help="experts of a token (default: %(default)s)")
    add("--layers", type=int, metavar="L", help="number of MoE blocks (default: the model's; 1 without --model)")
    add("--gpus", type=int, metavar="N", help="number of GPUs (default: 1)")
    add("--sweep", action="store_true", help="rank every mesh of --gpus GPUs")
    add("--top", type=int, default=10, metavar="N", help="length of the ranking (default: %(default)s)")
    add("--tokens", type=int, default=4096, metavar="T", help="tokens of a GPU in a step (default: %(default)s)")
    add("--hardware", default="h200", metavar="NAME", help=f"the GPU: {gpus} (default: %(default)s)")
    add("--recipe", type=recipe_of, default="none", metavar="NAME", help=f"how products are quantized: {RECIPE_NAMES} "
        "(default: none)")  # fmt: skip
    add("--exchange", choices=EXCHANGES, help="how tokens reach their experts (default: the fastest that fits)")
    add("--capacity-factor", type=float, metavar="X", help="bound the rows of a rank at X times the even load")
    add("--buffer-factor", type=factor, default=1.25, metavar="X", help="buffers for X times the balanced load; none: "
        "for the worst case (default: %(default)s)")  # fmt: skip
    add("--imbalance", type=float, default=1.0, metavar="X", help="say the passes of a step whose busiest rank has X "
        "times the balanced load (default: %(default)s)")  # fmt: skip
    add(
        "--save-rows",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the sorted rows for backward (default: keep them)",
    )
    add("--grad-reduce-dtype", choices=GRAD_REDUCE, help=f"{GRAD_REDUCE_HELP} (default: that of activations)")
    add(
        "--kernels",
        choices=("auto", "hopper", "xla"),
        default="auto",
        help="implementation of the products (default: the fastest)",
    )
    add(
        "--remat",
        action=argparse.BooleanOptionalAction,
        help="keep only the input of a layer, and recompute the rest (default: where the memory needs it)",
    )
    add("--json", action="store_true", help="print JSON, for programs")
    add("--plot", metavar="FILE", help="draw the time of each mesh")


def run(args: argparse.Namespace) -> int:
    """Prints the estimate of one mesh, or the ranking of all meshes. Returns 0.

    Raises:
      ValueError: two options exclude each other, or an option has no such value.
    """
    mesh = args.mesh
    config = args.model or MoEConfig(d_model=args.d_model, d_ff=args.d_ff, num_experts=args.experts, top_k=args.top_k)
    recipe = None if args.recipe == "none" else args.recipe
    given = (args.tokens, recipe, args.hardware, args.layers)
    if mesh and (args.gpus or args.sweep):
        raise ValueError("--mesh gives one mesh; leave --gpus and --sweep out")
    if args.top < 1:
        raise ValueError(f"--top {args.top} must be at least 1")
    options = dict(
        capacity_factor=args.capacity_factor,
        buffer_factor=None if math.isinf(args.buffer_factor) else args.buffer_factor,
        imbalance=args.imbalance,
        save_rows=args.save_rows,
        grad_reduce_dtype=args.grad_reduce_dtype,
        kernels=args.kernels,
    )
    if mesh:
        found = [
            estimate(config, dict(mesh), *given, exchange=args.exchange or "auto", remat=bool(args.remat), **options)
        ]
    else:
        gpus = 1 if args.gpus is None else args.gpus
        found = sweep(config, gpus, *given, exchange=args.exchange, remat=args.remat, **options)
    shown = found[: args.top] if args.sweep else found[:1]
    if args.plot:
        draw(shown, Path(args.plot))
    if args.json:
        print(json.dumps([e.as_dict() for e in shown] if args.sweep else shown[0].as_dict(), indent=2))
        return 0
    if args.sweep:
        print(f"{ranking(shown)}\n{sum(e.fits for e in found)} of {len(found)} meshes fit; the first one in full:\n")
    print(details(shown[0]))
    if args.plot:
        print(f"\nthe plot is in {args.plot}")
    return 0


def ranking(found: list[Estimate]) -> str:
    """Returns the ranking as text, one line for each mesh."""
    rows = [("mesh", "exchange", "remat", "fits", "memory GB", "wire GB", "ms", "TFLOP/s", "longest stage")]
    for e in found:
        slow = max(e.stages, key=lambda stage: stage.seconds)
        rows.append((
            name(e), e.exchange, "yes" if e.remat else "no", "yes" if e.fits else "NO", f"{e.memory.total / GB:.1f}",
            f"{e.wire_bytes() / GB:.2f}", f"{e.seconds * 1e3:.1f}", f"{e.tflops:.0f}",
            f"{slow.name}, {slow.direction} ({slow.bound})",
        ))  # fmt: skip
    return align(rows, right=(4, 5, 6, 7))


def details(e: Estimate) -> str:
    """Returns the estimate of one mesh as text: memory, bytes on wires, and stages."""
    bounded = "of the worst case" if e.buffer_factor is None else f"of {e.buffer_factor:g} balanced loads"
    ways = f", buffers {bounded}" + (", remat" if e.remat else "")
    head = (
        f"{e.model} on {e.gpus} x {e.hardware}, mesh {name(e)}: {plural(e.layers, 'MoE layer')}, "
        f"{e.tokens} tokens a GPU, recipe {e.recipe}, exchange {e.exchange}{ways}\n{e.rates}"
    )
    if e.imbalance > 1:
        head += (
            f"\nA step whose busiest rank has {e.imbalance:g} times the balanced load takes "
            f"{'one pass' if e.passes == 1 else f'{e.passes} passes'}; times and bytes are those of one pass."
        )
    m, verdict = e.memory, "fits" if e.fits else "DOES NOT FIT"
    parts = ("weights", "gradients", "optimizer", "activations", "gathered", "exchange", "workspace")
    memory = [("memory of a device", "GB"), None, *((part, f"{getattr(m, part) / GB:.2f}") for part in parts)]
    total = "total" if m.together else "total, the larger of gathered and workspace"
    memory += [
        None,
        (total, f"{m.total / GB:.2f}"),
        (f"capacity of a GPU ({verdict})", f"{e.capacity / GB:.2f}"),
    ]
    wires = [("wire, in a step", "MB sent"), None]
    wires += [(what, f"{e.wire_bytes(what) / 1e6:,.1f}") for what in WIRES if e.wire_bytes(what)]
    wires += [None, ("total", f"{e.wire_bytes() / 1e6:,.1f}")]
    stages = [("stage of a layer", "pass", "us", "bound by"), None]
    stages += [(s.name, s.direction, f"{s.seconds * 1e6:,.1f}", s.bound) for s in e.stages]
    stages += [None, (f"all, x {e.layers}", "", f"{e.seconds * 1e6:,.1f}", f"{e.tflops:.0f} TFLOP/s a GPU")]
    sent = [align(wires, right=(1,))] if e.transfers else []
    tables = [align(memory, right=(1,)), *sent, align(stages, right=(2,))]
    spared, seconds = e.gather_saved
    if e.recipe != "none" and e.plain_gather.wire_bytes:
        plain = e.layers * e.plain_gather.wire_bytes
        tables.append(
            f"quantized before the gather: {plain / 1e6:,.1f} MB of weights become {(plain - spared) / 1e6:,.1f} MB "
            f"(a ratio of {(plain - spared) / plain:.3f}), which saves {seconds * 1e3:.2f} ms on the wire in a step"
        )
    return "\n\n".join([head, *tables])


def name(e: Estimate) -> str:
    """Returns the mesh as --mesh takes it, without axes of one device: "fsdp=8,ep=4"."""
    return ",".join(f"{axis}={size}" for axis, size in e.mesh if size > 1) or "one GPU"


def draw(found: list[Estimate], path: Path) -> None:
    """Draws one bar for each mesh: its length is the time of a step, and its parts are the bounds of the stages."""
    from moax.figures import BLUE, ORANGE, PALE, PURPLE, make_figure, style

    figure = make_figure(9, 1.6 + 0.36 * len(found))
    plot, labels = figure.add_subplot(), [name(e) + ("" if e.fits else " (does not fit)") for e in found]
    places = list(range(len(found)))
    left = [0.0] * len(found)
    colors = {"compute": BLUE, "memory": PALE, "nvlink": PURPLE, "network": ORANGE}
    for bound, color in colors.items():
        times = [1e3 * e.layers * sum(s.seconds for s in e.stages if s.bound == bound) for e in found]
        plot.barh(places, times, left=left, height=0.7, color=color, label=bound)
        left = [a + b for a, b in zip(left, times, strict=True)]
    plot.set_yticks(places, labels)
    plot.invert_yaxis()
    first = found[0]
    title = f"{first.model}, {first.gpus} x {first.hardware}, recipe {first.recipe}, {first.tokens} tokens each"
    style(plot, title, "ms a step in MoE blocks, by what bounds the time", grid="x")
    plot.tick_params(axis="y", length=0)
    figure.legend(frameon=False, ncols=4, loc="outside lower center", fontsize=9)
    figure.savefig(path)
