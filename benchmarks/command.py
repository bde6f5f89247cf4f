"""`python -m benchmarks`: its options, and the run, which measures the limits, then the rows, and prints a table."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks import cases, limits, peers, report, tokens
from benchmarks.block import block, errors, imbalance, mesh_block, train
from benchmarks.kernels import gemm
from benchmarks.report import Row
from benchmarks.timing import Repeats
from benchmarks.wires import exchange, gather, scatter, wire
from moax import backend, program
from moax.checks import Unsupported
from moax.exchange import EXCHANGES
from moax.kernels import IMPLEMENTATIONS
from moax.mesh.axes import ROLES
from moax.program import factor, mesh_of, plural

NAME = "python -m benchmarks"
DESCRIPTION = """\
Measures the parts of moax on the devices of this machine. A row has the time, the physical limit (measured in the same
run), the error against float64, and the times of peers.

gemm       grouped matmuls, beside ragged_dot, Pallas kernels and PyTorch
block      the whole block, beside SonicMoE's; with --mesh beside layers of JAX alone and of PyTorch
train      a step of a language model on a mesh, beside the same layers of JAX
imbalance  the block on a mesh by the load of its busiest rank: time, overflow rounds, memory
exchange   the exchange between devices, beside NCCL
gather     the gather of weights, each recipe beside bf16
scatter    the sum of weight gradients, each grad_reduce_dtype beside the ring in bf16
wire       the bytes of a block's weights on the wire, without time; it must be alone. It compiles blocks for 8
           emulated devices, and writes benchmarks/results/wire.json or --out FILE

The output lists what cannot run on this machine, with the reason. Progress goes to stderr. On a CPU, --cases tiny runs,
and cases that --only names.
"""
WHAT = ("gemm", "block", "train", "imbalance", "exchange", "gather", "scatter")
NEEDED = {"gemm": ("bf16", "fp8", "memory"), "block": ("bf16", "fp8"), "train": ("bf16", "fp8")}
OTHERS: dict[str, tuple] = {"exchange": (tokens.PERF, tokens.TINY), "train": (train.PERF, train.TINY)}
IMBALANCE_RECIPE = "fp8_block"
# {option: the benchmarks that read it}, for options that most benchmarks do not read
MEANT_FOR = {
    "mesh": ("block", "train", "imbalance"),
    "tokens": ("block", "imbalance"),
    "kernels": ("block", "imbalance"),
    "recipe": ("block", "train", "imbalance"),
    "errors": ("block",),
    "devices": ("exchange",),
}


@dataclasses.dataclass(frozen=True)
class Part:
    """One benchmark of a run: one of `WHAT`, its cases and its peers, and the rows of PyTorch, measured before."""

    what: str
    cases: list
    peers: tuple[str, ...]
    torch: tuple[Row, ...] = ()


def main(argv: list[str] | None = None) -> int:
    """Runs `python -m benchmarks ARGV`, and returns the exit code; see `moax.program`."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    return program.run("benchmarks", lambda: run(args, argv), traceback=args.traceback)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    command_line = argparse.ArgumentParser(
        prog="benchmarks",
        usage=f"{NAME} WHAT [WHAT ...] [options]",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # fmt: off
    add = command_line.add_argument
    add("what", nargs="+", choices=(*WHAT, "wire"), metavar="WHAT", help=f"what to measure, one or several: "
        f"{', '.join(WHAT)}; or wire alone")
    add("--mesh", type=mesh_of, metavar="AXES", help="block, train, imbalance: run on a mesh of these axis "
        f"sizes, as fsdp=2,ep=2; axes: {', '.join(ROLES)}; without a GPU the devices are emulated")
    add("--cases", default="perf", metavar="SETS", help=f"sets of cases, with commas: {', '.join(cases.NAMES)}; only "
        "gemm has more than perf and tiny (default: %(default)s)")
    add("--only", action="append", metavar="WORD", help="measure only cases whose name contains WORD; repeatable")
    add("--peers", default="all", metavar="NAMES", help="all, none, or names with commas; gemm: "
        f"{', '.join(peers.NAMES)}; block: {', '.join(block.PEERS)}, and with --mesh {', '.join(mesh_block.PEERS)}; "
        f"train: {', '.join(train.PEERS)}; the others know all and none (default: %(default)s)")
    add("--recipe", action="append", choices=block.RECIPES, metavar="NAME", help="block, train, imbalance: a recipe; "
        f"repeatable; {', '.join(block.RECIPES)} (default: {' and '.join(block.PLAIN)}, and on one GPU {block.KEPT}; "
        f"imbalance: {IMBALANCE_RECIPE})")
    add("--errors", action="store_true", help="block: the errors of y and of each gradient against float32 too, of "
        f"{errors.TOKENS} tokens")
    add("--tokens", type=int, action="append", metavar="T", help="block, imbalance: tokens of a device; repeatable "
        "(default: 8192 and 16384; imbalance: 8192)")
    add("--kernels", choices=("auto", *IMPLEMENTATIONS), default="auto", help="block, imbalance: the implementation "
        "of the kernels (default: %(default)s)")
    add("--exchange", choices=EXCHANGES, default="auto", help="block --mesh, train, imbalance: how tokens reach "
        "the ranks of their experts (default: %(default)s)")
    add("--devices", type=int, metavar="N", help="exchange: the first N devices of the machine (default: all)")
    add("--buffer-factor", type=factor, default=1.25, metavar="X", help="block, train, imbalance: the argument of "
        "moax.moe; none: the worst case (default: %(default)s)")
    # fmt: on
    add("--quick", action="store_true", help="fewer repeats, and fewer tiles of peers")
    add("--out", metavar="FILE", help="write the rows as JSON")
    add("--json", action="store_true", help="print the rows as JSON instead of the table")
    add("--sha", help="the measured commit (default: git tells it)")
    add("--traceback", action="store_true", help="show where an error arose")
    return command_line


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Runs the benchmarks that `args` name, and prints their rows. Returns 0."""
    if args.what == ["wire"]:
        return wire.run(args.out, args.sha, as_json=args.json)
    if "wire" in args.what:
        raise ValueError("wire compiles for emulated devices and measures no time: give it alone")
    # Peers and blocks have processes of their own, so that JAX must leave them memory of the GPU.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    repeats = Repeats.quick() if args.quick else Repeats()
    parts = select(args)
    names = ", ".join(part.what for part in parts)
    check_fits(args, names)
    _say(f"{names}: first come the peers in processes of their own, then the limits; this can take minutes")
    parts = [dataclasses.replace(part, torch=_torch_rows(part, repeats)) for part in parts]
    needed = tuple(dict.fromkeys(name for part in parts for name in NEEDED.get(part.what, ())))
    _say(f"{names} on {backend.device_kind()}: measuring the limits of this machine: {', '.join(needed) or 'none'}")
    found = limits.measure(needed, repeats)
    rows: list[Row] = []
    head = report.header([*NAME.split(), *argv], args.sha, found)
    for part in parts:
        _say(f"{part.what}: {plural(len(part.cases), 'case')}; the first row comes when its program has compiled")
        for row in _rows(args, part, repeats, found):
            rows.append(row)
            _progress(row)
            if args.out:  # Each row is saved at once, so that a stopped run keeps its rows.
                report.save(args.out, head, rows)
    if args.json:
        print(report.to_json(head, rows))
    else:
        report.show(head, rows)
    return 0


def select(args: argparse.Namespace) -> list[Part]:
    """Returns the benchmarks of the run, each with the cases and peers that the options name."""
    asked = list(dict.fromkeys(args.what))
    plain = vars(parser().parse_args(asked[:1]))
    for option, takes in MEANT_FOR.items():
        if getattr(args, option) != plain[option] and not set(asked) & set(takes):
            raise ValueError(f"--{option} with {', '.join(asked)}: it is for {' and '.join(takes)} alone")
    if args.mesh and (args.errors or block.KEPT in (args.recipe or ())):
        raise ValueError(f"{'--errors' if args.errors else f'--recipe {block.KEPT}'} with --mesh: it is for one device")
    for what in asked:
        if what in ("train", "imbalance") and not args.mesh:
            raise ValueError(f"{what} without --mesh: name the axes of its devices, as fsdp=1,ep=2")
    possible = {what: _possible_peers(what, args.mesh) for what in asked}
    chosen = peers.parse(args.peers, tuple(dict.fromkeys(itertools.chain(*possible.values()))))
    parts, refused = [], []
    for what in asked:
        try:
            kept = _cases(args, what)
        except ValueError as error:
            refused.append(error)
            continue
        parts.append(Part(what, kept, tuple(name for name in chosen if name in possible[what])))
    if refused and not (parts and args.only):  # A word of --only may belong to another benchmark.
        raise refused[0]
    return parts


def check_fits(args: argparse.Namespace, names: str) -> None:
    """Raises Unsupported on a CPU for a whole set of cases with the shapes of models, unless --only names a few."""
    if backend.platform() == "cpu" and args.cases != "tiny" and not args.only:
        raise Unsupported(
            f"{names} on a CPU: --cases {args.cases} has the shapes of large models, and a row takes minutes to hours; "
            "measure --cases tiny, name cases with --only, or run on a GPU"
        )


def _cases(args: argparse.Namespace, what: str) -> list:
    if what == "gemm":
        return cases.select(args.cases, args.only)
    perf, tiny = OTHERS.get(what, (mesh_block.PERF if args.mesh else block.PERF, block.TINY))
    if args.cases not in ("perf", "tiny", "all"):
        raise ValueError(f"--cases {args.cases}: {what} has perf and tiny")
    return cases.pick(tiny if args.cases == "tiny" else perf, args.only, f"--cases {args.cases}")


def _possible_peers(what: str, mesh) -> tuple[str, ...]:
    if what == "train":
        return train.PEERS
    if what == "block":
        return mesh_block.PEERS if mesh else block.PEERS
    return peers.NAMES


def _torch_rows(part: Part, repeats: Repeats) -> tuple[Row, ...]:
    """Returns the rows of PyTorch's grouped matmuls, measured before this process takes memory of the GPU."""
    return tuple(gemm.torch_rows(part.cases, part.peers, repeats)) if part.what == "gemm" else ()


def _rows(args: argparse.Namespace, part: Part, repeats: Repeats, found: dict[str, Any]) -> Iterator[Row]:
    """Yields the rows of one benchmark; `found` are the limits."""
    what, chosen = part.what, part.cases
    if what == "gemm":
        return gemm.rows(chosen, part.peers, repeats, found, part.torch, quick=args.quick)
    if what == "exchange":
        return exchange.rows(chosen, args.devices, bool(part.peers), repeats)
    if what in ("gather", "scatter"):
        return (gather if what == "gather" else scatter).rows(chosen, repeats)
    repeats = dataclasses.replace(repeats, warmups=min(3, repeats.warmups))
    recipes = tuple(dict.fromkeys(args.recipe or (block.PLAIN if args.mesh else (*block.PLAIN, block.KEPT))))
    sizes = tuple(args.tokens) if args.tokens else None
    how: dict[str, Any] = dict(recipes=recipes, kernels=args.kernels, peers=part.peers)
    how["buffer_factor"] = None if math.isinf(args.buffer_factor) else args.buffer_factor
    if not args.mesh:
        return block.rows(chosen, repeats, found, tokens=sizes, errors=args.errors, **how)
    over = mesh_block.How(mesh=args.mesh, exchange=args.exchange, **how)
    if what == "imbalance":
        over = dataclasses.replace(over, recipes=recipes if args.recipe else (IMBALANCE_RECIPE,), peers=())
        return imbalance.rows(chosen, over, repeats, sizes)
    if what == "train":
        return train.rows(chosen, over, repeats, found)
    return mesh_block.rows(chosen, over, repeats, found, sizes)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _progress(row: Row) -> None:
    """Prints a row as a line of progress."""
    rate = f"{row.tflops:.0f} TFLOP/s" if row.op in ("gemm", "block", "train") and row.tflops else ""
    rate = f"{row.tb_s:.2f} TB/s" if not rate and row.tb_s else rate
    result = f"{row.us:.1f} us {rate}" if row.us else row.note
    _say(f"{row.op} {row.case} {row.direction} {row.recipe} {row.impl} {row.tile}: {result}")
