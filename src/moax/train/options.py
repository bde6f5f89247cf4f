"""Options of `moax train`, and those of how a block runs, which `moax inspect` has too."""

from __future__ import annotations

import argparse
import math

from moax.mesh.partition import ENGINES
from moax.ops.exchange import EXCHANGES
from moax.recipe import RECIPES
from moax.train import processes
from moax.train.mesh import parse_mesh
from moax.train.presets import BALANCE, DTYPES, PRESETS, REMAT

DESCRIPTION = """\
Trains a decoder-only language model on bytes: attention and an MoE in every layer.

The text is the source of Python's own standard library, or yours (--text). OUT/NAME/ gets config.json,
metrics.jsonl, checkpoints/ and curves.png. Ctrl-C saves, and prints how to resume. Settings that are not given
are the preset's; with --resume, the run's own.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `moax train`."""
    presets = ", ".join(PRESETS)
    run = parser.add_argument_group("the run")
    add = run.add_argument
    add("--preset", choices=PRESETS, metavar="NAME", help=f"sizes and settings: {presets} (default: tiny)")
    add("--name", help="folder of the run inside OUT (default: the preset's name; NAME-2 where that is taken)")
    add("--out", default="runs", help="folder of all runs (default: %(default)s)")
    add("--resume", action="store_true", help="continue the run NAME (default: the newest) from its last checkpoint")
    add("--text", metavar="PATH", help="a file or folder to train on (default: Python's standard library)")
    add("--steps", type=int, help="updates in all")
    add("--batch", type=int, help="sequences a step, over the whole mesh")
    add("--seq", type=int, help="bytes of a sequence")
    add("--lr", type=float, help="peak learning rate")
    add("--seed", type=int, help="of the weights and of the data's order")
    add("--eval-every", type=int, metavar="STEPS", help="held-out loss every so many steps")
    add("--json", action="store_true", help="print JSON at the end; progress goes to stderr")
    add("--save-every", type=int, metavar="STEPS", help="checkpoint every so many steps; 0: at the end alone")
    how = parser.add_argument_group("how it runs")
    add_execution(how, mesh="all devices on fsdp")
    how.add_argument("--chunks", type=int, metavar="N", help="take a device's tokens through an MoE in N parts")
    how.add_argument("--remat", choices=REMAT, help="recompute in the backward pass: nothing, all, all but the MoE's")
    processes.add_options(parser.add_argument_group("one of several processes, each started with the same options"))
    model = parser.add_argument_group("the model (default: the preset's)")
    add = model.add_argument
    add("--d-model", type=int, metavar="H", help="width of the residual stream")
    add("--d-ff", type=int, metavar="F", help="width of an expert")
    add("--layers", type=int, dest="num_layers", metavar="L", help="layers")
    add("--heads", type=int, dest="num_heads", metavar="N", help="attention heads")
    add("--experts", type=int, dest="num_experts", metavar="E", help="experts of a layer")
    add("--top-k", type=int, metavar="K", help="experts of a token")
    add("--shared-d-ff", type=int, metavar="S", help="width of an expert that every token takes; 0: none")
    add("--capacity-factor", type=capacity, metavar="X", help="bound a rank's rows at X times the even load, dropping "
        "and counting the rest; none: drop nothing")  # fmt: skip
    add("--tied", action=argparse.BooleanOptionalAction, help="one matrix embeds and predicts bytes")
    add("--balance", choices=BALANCE, help="keep experts busy by a selection bias, by a loss, or not at all")


def add_execution(group, mesh: str) -> None:
    """The options of how a block runs; `mesh`: what the default is."""
    add = group.add_argument
    add("--mesh", type=mesh_of, metavar="AXES", help=f"as fsdp=2,ep=4, of dp, fsdp, ep, tp (default: {mesh})")
    add("--cpu-devices", type=int, metavar="N", help="emulate N devices on this machine's CPU")
    add("--recipe", choices=("none", *RECIPES), help="how products are quantized (default: none)")
    add("--exchange", choices=EXCHANGES, help="how tokens reach the ranks of their experts (default: auto)")
    add("--engine", choices=ENGINES, help="how ops are partitioned (default: auto)")
    add("--dtype", choices=DTYPES, help="of activations")


def mesh_of(text: str) -> tuple[tuple[str, int], ...]:
    """(axis, size) of each axis of --mesh."""
    try:
        return parse_mesh(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def capacity(text: str) -> float:
    """--capacity-factor; infinite where there is none."""
    return math.inf if text == "none" else float(text)
