"""`python -m benchmarks`: its options, and the run, which measures the limits, then the rows, and prints a table."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks import cases, limits, report
from benchmarks.block import block, imbalance, train
from benchmarks.kernels import gemm
from benchmarks.report import Row
from benchmarks.timing import Repeats
from benchmarks.wires import scatter, wire
from lm import program
from lm.program import factor_or_auto, mesh_of
from moax.checks import Unsupported
from moax.exchange import EXCHANGES
from moax.kernels import IMPLEMENTATIONS
from moax.kernels.device import find_device
from moax.mesh.axes import ROLES
from moax.text import plural

NAME = "python -m benchmarks"
DESCRIPTION = """\
Measures the parts of moax on the devices of this machine. A row has the time, the physical limit (measured in the same
run), the error of a matmul against float64, and the times of peers.

gemm       grouped matmuls, beside ragged_dot, Pallas kernels and PyTorch
block      the whole block, beside SonicMoE's; with --mesh beside a layer of PyTorch
train      a step of a language model on a mesh
imbalance  the block on a mesh by the load of its busiest rank: time, overflow rounds, memory
scatter    the sum of weight gradients, each grad_reduce_dtype beside the ring in bf16
wire       the bytes of a block's weights on the wire, without time; it must be alone. It compiles blocks for 8
           emulated devices, and writes benchmarks/results/wire.json or --out FILE

The output lists what cannot run on this machine, with the reason. Progress goes to stderr. On a CPU, --cases tiny runs,
and cases that --only names.
"""
IMBALANCE_RECIPE = "fp8_block"


class Benchmark(NamedTuple):
    """One benchmark of a run.

    Attributes:
      rows: yields the rows of cases; its arguments are those of `run_block`.
      cases: the cases of each set; None takes those of `benchmarks.cases`.
      peers: the peers on one device, and on a mesh.
      limits: the limits of the machine that its rows need.
      options: the options that it reads, of those that most benchmarks do not read.
    """

    rows: Callable[..., Iterator[Row]]
    cases: dict[str, tuple] | None
    peers: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    limits: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


def run_gemm(
    args: argparse.Namespace,
    chosen: list,
    peers: tuple[str, ...],
    repeats: Repeats,
    peaks: dict[str, Any],
):
    return gemm.rows(chosen, peers, repeats, peaks, quick=args.quick)


def run_scatter(args, chosen, peers, repeats, peaks):
    return scatter.rows(chosen, repeats)


def run_block(args, chosen, peers, repeats, peaks):
    settings = how_of(args, block.PLAIN if args.mesh else (*block.PLAIN, block.KEPT), peers)
    variants = [
        dataclasses.replace(settings, exchange=name, overlap=args.overlap) for name in args.exchange or ("auto",)
    ]
    return block.rows(chosen, variants, few_warmups(repeats), peaks, args.tokens)


def run_imbalance(args, chosen, peers, repeats, peaks):
    return imbalance.rows(
        chosen,
        how_of(args, (IMBALANCE_RECIPE,)),
        few_warmups(repeats),
        args.tokens,
    )


def run_train(args, chosen, peers, repeats, peaks):
    return train.rows(chosen, how_of(args, block.PLAIN), few_warmups(repeats), peaks)


def how_of(
    args: argparse.Namespace,
    recipes: tuple[str, ...],
    peers: tuple[str, ...] = (),
) -> block.How:
    """Returns how blocks run; `recipes` are those of a run that names none."""
    if args.buffer_factor == math.inf:
        buffer_factor = None
    else:
        buffer_factor = args.buffer_factor
    named = tuple(dict.fromkeys(args.recipe or recipes))
    exchanges = args.exchange or ["auto"]
    return block.How(
        args.mesh or (),
        named,
        args.kernels,
        exchanges[0],
        peers=peers,
        buffer_factor=buffer_factor,
    )


def few_warmups(repeats: Repeats) -> Repeats:
    return dataclasses.replace(repeats, warmups=min(3, repeats.warmups))


BLOCKS: dict[str, tuple] = {"perf": block.PERF, "tiny": block.TINY}
ON_MESH = ("mesh", "recipe", "exchange", "buffer-factor")
BENCHMARKS = {
    "gemm": Benchmark(run_gemm, None, (gemm.PEERS, gemm.PEERS), ("bf16", "fp8", "memory")),
    "block": Benchmark(
        run_block,
        BLOCKS,
        ((block.SONIC,), (block.TORCH,)),
        ("bf16", "fp8"),
        (*ON_MESH, "tokens", "kernels", "overlap"),
    ),
    "train": Benchmark(
        run_train,
        {"perf": train.PERF, "tiny": train.TINY},
        limits=("bf16", "fp8"),
        options=ON_MESH,
    ),
    "imbalance": Benchmark(run_imbalance, BLOCKS, options=(*ON_MESH, "tokens", "kernels")),
    "scatter": Benchmark(run_scatter, BLOCKS),
}


def main(argv: list[str] | None = None) -> int:
    """Runs `python -m benchmarks ARGV`, and returns the exit code; see `lm.program`."""
    if argv is None:
        argv = sys.argv[1:]
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

    def add(name: str, about: str, **details) -> None:
        those = ", ".join(what for what, benchmark in BENCHMARKS.items() if name in benchmark.options)
        default = details.get("default")
        shown = f" (default: {default})" if isinstance(default, str) else ""
        command_line.add_argument(
            f"--{name}",
            help=f"{f'{those}: ' if those else ''}{about}{shown}",
            **details,
        )

    names = f"{', '.join(gemm.PEERS)}; block: {block.SONIC}, and with --mesh {block.TORCH}"
    command_line.add_argument(
        "what",
        nargs="+",
        choices=(*BENCHMARKS, "wire"),
        metavar="WHAT",
        help=f"what to measure, one or several: {', '.join(BENCHMARKS)}; or wire alone",
    )
    add(
        "mesh",
        "run on a mesh of these axis sizes, as fsdp=2,ep=2; axes: "
        f"{', '.join(ROLES)}; without a GPU the devices are emulated",
        type=mesh_of,
        metavar="AXES",
    )
    add(
        "cases",
        f"sets of cases, with commas: {', '.join(cases.NAMES)}; only gemm has more than perf and tiny",
        default="perf",
        metavar="SETS",
    )
    add(
        "only",
        "measure only cases whose name contains WORD; repeatable",
        action="append",
        metavar="WORD",
    )
    add("peers", f"all, none, or names with commas; gemm: {names}", default="all", metavar="NAMES")
    add(
        "recipe",
        f"a recipe; repeatable; {', '.join(block.RECIPES)}; without it {' and '.join(block.PLAIN)}, and on "
        f"one GPU {block.KEPT}; imbalance {IMBALANCE_RECIPE}",
        action="append",
        choices=block.RECIPES,
        metavar="NAME",
    )
    add(
        "tokens",
        "tokens of a device; repeatable; without it 8192 and 16384, imbalance 8192",
        type=int,
        action="append",
        metavar="T",
    )
    add(
        "kernels",
        "the implementation of the kernels",
        choices=("auto", *IMPLEMENTATIONS),
        default="auto",
    )
    add(
        "exchange",
        "how tokens reach the ranks of their experts, auto without it; block: repeatable",
        action="append",
        choices=EXCHANGES,
        metavar="NAME",
    )
    add("overlap", "compile with moax.OVERLAP_OPTIONS", action="store_true")
    add(
        "buffer-factor",
        "the argument of moax.moe, auto without it, with imbalance 1.25; none: the worst case",
        type=factor_or_auto,
        default="auto",
        metavar="X",
    )
    add("quick", "fewer repeats, and fewer tiles of peers", action="store_true")
    add("out", "write the rows as JSON", metavar="FILE")
    add("json", "print the rows as JSON instead of the table", action="store_true")
    add("sha", "the measured commit; without it git tells it")
    add("traceback", "show where an error arose", action="store_true")
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
    names = ", ".join(parts)
    if find_device().platform == "cpu" and args.cases != "tiny" and not args.only:
        raise Unsupported(
            f"{names} on a CPU: --cases {args.cases} has the shapes of large models, and a row takes minutes to hours; "
            "measure --cases tiny, name cases with --only, or run on a GPU"
        )
    needed = tuple(dict.fromkeys(name for what in parts for name in BENCHMARKS[what].limits))
    device = find_device().device_kind
    _say(f"{names} on {device}: measuring the limits of this machine: {', '.join(needed) or 'none'}")
    peaks = limits.measure(needed, repeats)
    rows: list[Row] = []
    head = report.header([*NAME.split(), *argv], args.sha, peaks)
    for what, (chosen, peers) in parts.items():
        _say(f"{what}: {plural(len(chosen), 'case')}; the first row comes when its program has compiled")
        for row in BENCHMARKS[what].rows(args, chosen, peers, repeats, peaks):
            rows.append(row)
            _progress(row)
            if args.out:  # Each row is saved at once, so that a stopped run keeps its rows.
                report.save(args.out, head, rows)
    if args.json:
        print(report.to_json(head, rows))
    else:
        report.show(head, rows)
    return 0


def select(args: argparse.Namespace) -> dict[str, tuple[list, tuple[str, ...]]]:
    """Returns {benchmark: (cases, peers)} of the run, as the options name them."""
    asked = list(dict.fromkeys(args.what))
    plain = vars(parser().parse_args(asked[:1]))
    for option in dict.fromkeys(option for benchmark in BENCHMARKS.values() for option in benchmark.options):
        takes = [what for what, benchmark in BENCHMARKS.items() if option in benchmark.options]
        name = option.replace("-", "_")
        if getattr(args, name) != plain[name] and not set(asked) & set(takes):
            raise ValueError(f"--{option} with {', '.join(asked)}: it is for {' and '.join(takes)} alone")
    if len(args.exchange or ()) > 1 and asked != ["block"]:
        raise ValueError(f"--exchange {' and '.join(args.exchange)} with {', '.join(asked)}: block alone takes several")
    for what in asked:
        if what in ("train", "imbalance") and not args.mesh:
            raise ValueError(f"{what} without --mesh: name the axes of its devices, as fsdp=1,ep=2")
    possible = {what: BENCHMARKS[what].peers[bool(args.mesh)] for what in asked}
    named = tuple(dict.fromkeys(name for names in possible.values() for name in names))
    chosen = {"all": named, "none": ()}.get(
        args.peers,
        tuple(name.strip() for name in args.peers.split(",")),
    )
    if unknown := [name for name in chosen if name not in named]:
        words = ", ".join(("all", "none", *named))
        raise ValueError(f"--peers {args.peers}: unknown {', '.join(unknown)}; give some of {words}")
    parts = {}
    refused = []
    for what in asked:
        try:
            parts[what] = _cases(args, what), tuple(name for name in possible[what] if name in chosen)
        except ValueError as error:
            refused.append(error)
    if refused and not (parts and args.only):  # A word of --only may belong to another benchmark.
        raise refused[0]
    return parts


def _cases(args: argparse.Namespace, what: str) -> list:
    sets = BENCHMARKS[what].cases
    if sets is None:
        return cases.select(args.cases, args.only)
    if args.cases not in ("perf", "tiny", "all"):
        raise ValueError(f"--cases {args.cases}: {what} has perf and tiny")
    return cases.pick(
        sets["tiny" if args.cases == "tiny" else "perf"],
        args.only,
        f"--cases {args.cases}",
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _progress(row: Row) -> None:
    """Prints a row as a line of progress."""
    if row.tflops:
        rate = f"{row.tflops:.0f} TFLOP/s"
    else:
        rate = f"{row.tb_s:.2f} TB/s" if row.tb_s else ""
    result = f"{row.us:.1f} us {rate}" if row.us else row.note
    _say(f"{row.op} {row.case} {row.direction} {row.recipe} {row.impl} {row.tile}: {result}")
