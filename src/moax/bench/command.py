"""Options of `moax bench`, and the run: limits, rows as they come, the table, the file."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Iterator
from typing import Any

from moax.bench import (
    block,
    cases,
    exchange,
    fused,
    gather,
    gathered,
    gemm,
    limits,
    mesh_block,
    peers,
    permute,
    quantize,
    report,
    tokens,
    train,
)
from moax.bench.peers import ragged_peer
from moax.bench.report import Row
from moax.bench.timing import Repeats
from moax.ops.exchange import EXCHANGES
from moax.recipe import RECIPES

DESCRIPTION = """\
Measures grouped products, quantization, permutation and whole blocks on this device, each beside its physical limit
(measured in the same run), its peers and its error against float64; the block on a mesh beside layers of JAX alone
and of PyTorch, and a step of a language model with each; and over devices of the machine the exchange beside NCCL and
ragged_all_to_all, and the gather of weights, each recipe beside bf16. What cannot run here is listed with the reason.
"""
WHAT = ("gemm", "quantize", "permute", "block", "train", "exchange", "gather")
PRODUCTS, MEMORY = ("bf16", "fp8"), ("memory",)
NEEDED = {
    "gemm": PRODUCTS + MEMORY, "quantize": MEMORY, "permute": MEMORY, "block": PRODUCTS, "train": PRODUCTS,
}  # fmt: skip
OTHERS: dict[str, tuple] = {
    "quantize": (quantize.PERF + fused.PERF, quantize.TINY + fused.TINY),
    "permute": (permute.PERF, permute.TINY),
    "exchange": (tokens.PERF, tokens.TINY),
    "train": (train.PERF, train.TINY),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `moax bench`."""
    add = parser.add_argument
    add("what", choices=WHAT, help="what to measure: products, quantization, permutation, the whole block, the "
        "exchange of tokens, or the gather of weights")  # fmt: skip
    add("--cases", default="perf", metavar="SETS", help=f"of {', '.join(cases.NAMES)}, with commas; all but gemm have "
        "perf and tiny (default: %(default)s)")  # fmt: skip
    add("--only", action="append", metavar="WORD", help="of these, the cases whose name has WORD in it; repeatable")
    add("--peers", default="all", metavar="NAMES", help=f"all, none, or some of {', '.join(peers.NAMES)}, with commas; "
        f"block --mesh: of {', '.join(mesh_block.PEERS)}; train: of {', '.join(train.PEERS)}; quantize, permute: plain "
        "jnp, exchange: NCCL and others, unless none (default: %(default)s)")  # fmt: skip
    add("--directions", default=",".join(cases.DIRECTIONS), metavar="NAMES", help="gemm: of fwd, dgrad, wgrad")
    add("--recipe", choices=("none", *RECIPES), help="block, train: one recipe (default: "
        f"{' and '.join(block.RECIPES)})")  # fmt: skip
    add("--tokens", type=int, action="append", metavar="T", help="block: tokens of a device; repeatable (default: 8192 "
        "and 16384)")  # fmt: skip
    add("--kernels", default="auto", help="block: auto, xla or mosaic (default: %(default)s)")
    add("--exchange", choices=EXCHANGES, default="auto", help="block --mesh, train: how tokens reach the ranks of "
        "their experts (default: %(default)s)")  # fmt: skip
    add("--devices", type=int, metavar="N", help="exchange: the first N devices of the machine (default: all)")
    add("--sms", metavar="NUMBERS", help="exchange: multiprocessors that our kernel takes, with commas, a row for each "
        "(default: the kernel's own choice)")  # fmt: skip
    add("--chunks", type=int, default=1, metavar="N", help="block, train: parts that a device takes its tokens in")
    add("--quick", action="store_true", help="fewer repeats, and fewer tiles of peers")
    add("--out", metavar="FILE", help="write the rows as JSON")
    add("--json", action="store_true", help="print the rows as JSON, for programs, in the place of the table")
    add("--sha", help="the commit that is measured (default: asked of git)")


def run(args: argparse.Namespace, argv: list[str] | None = None) -> int:
    """`moax bench`; `argv`: the command as typed, for the file.

    Raises:
      ValueError: an option that names nothing. ModuleNotFoundError: rich, of the extra `train`, is missing.
    """
    import rich  # noqa: F401  (before anything is measured)

    repeats = Repeats.quick() if args.quick else Repeats()
    chosen = select(args)
    wanted = peers.parse(args.peers, _peers(args))
    directions = _directions(args.directions)
    apart = _apart(args, chosen, wanted, repeats)
    found = limits.measure(NEEDED.get(args.what, ()), repeats)
    rows: list[Row] = []
    head = report.header(["moax", *(argv or sys.argv[1:])], args.sha, found)
    for row in _rows(args, chosen, wanted, directions, repeats, found, apart):
        rows.append(row)
        _progress(row)
        if args.out:  # now, so that a run that is stopped keeps what it has
            report.save(args.out, head, rows)
    if args.json:
        print(report.to_json(head, rows))
    else:
        report.show(f"moax bench {args.what}", head, rows)
    return 0


def select(args: argparse.Namespace) -> list:
    """The cases that the options name."""
    if args.mesh and args.what not in ("block", "train"):
        raise ValueError(f"--mesh with {args.what}: of what is measured, a mesh is for block and train alone")
    if args.what == "train" and not args.mesh:
        raise ValueError("train without --mesh: name the axes of its devices, as fsdp=1,ep=2")
    if args.what == "train" and (args.tokens or args.kernels != "auto"):
        raise ValueError(
            "train with --tokens or --kernels: its models have their own tokens, and take the best kernels"
        )
    if (args.devices or args.sms) and args.what != "exchange":
        raise ValueError(f"--devices, --sms with {args.what}: they are for exchange alone")
    if args.what == "gemm":
        return cases.select(args.cases, args.only)
    perf, tiny = OTHERS.get(args.what, (mesh_block.PERF if args.mesh else block.PERF, block.TINY))
    if args.cases not in ("perf", "tiny", "all"):
        raise ValueError(f"--cases {args.cases}: {args.what} has perf and tiny")
    return cases.pick(tiny if args.cases == "tiny" else perf, args.only, f"--cases {args.cases}")


def _peers(args: argparse.Namespace) -> tuple[str, ...]:
    """What may stand beside ours."""
    if args.what == "train":
        return train.PEERS
    return mesh_block.PEERS if args.mesh else peers.NAMES


def _apart(args, chosen, wanted, repeats) -> Any:
    """What processes of their own measure, before this one takes memory of the GPU, as the rows want it."""
    if args.what == "gemm":
        return gemm.torch_rows(chosen, wanted, repeats)
    if args.what == "exchange":
        sms = exchange.parse_sms(args.sms)
        ragged = ragged_peer.answers(chosen, args.devices, repeats) if wanted else {}
        return exchange.How(args.devices, sms, bool(wanted), ragged)
    return None


def _rows(args, chosen, wanted, directions, repeats, found, apart) -> Iterator[Row]:
    if args.what == "gemm":
        return gemm.rows(chosen, wanted, repeats, found, apart, quick=args.quick, directions=directions)
    if args.what in ("block", "train"):
        recipes = (args.recipe,) if args.recipe else block.RECIPES
        few = dataclasses.replace(repeats, warmups=min(3, repeats.warmups))
        tokens = tuple(args.tokens) if args.tokens else None
        over = mesh_block.How(args.mesh or (), recipes, args.kernels, args.exchange, wanted, args.chunks)
        if args.what == "train":
            return train.rows(chosen, over, few, found)
        if args.mesh:
            return mesh_block.rows(chosen, over, few, found, tokens)
        how = dict(kernels=args.kernels, chunks=args.chunks)
        return block.rows(chosen, few, found, recipes=recipes, tokens=tokens, **how)
    if args.what == "gather":
        return gather.rows(chosen, repeats)
    if args.what == "permute":
        moved = permute.rows(chosen, bool(wanted), repeats, found)
        return itertools.chain(moved, gathered.rows(chosen, bool(wanted), repeats, found))
    if args.what == "exchange":
        return exchange.rows(chosen, apart, repeats)
    plain = [case for case in chosen if isinstance(case, quantize.Source)]
    hidden = [case for case in chosen if isinstance(case, fused.Hidden)]
    common = bool(wanted), repeats, found
    return itertools.chain(quantize.rows(plain, *common), fused.rows(hidden, *common))


def _directions(text: str) -> tuple:
    names = tuple(name.strip() for name in text.split(","))
    unknown = [name for name in names if name not in cases.DIRECTIONS]
    if unknown:
        raise ValueError(f"--directions {text}: unknown {', '.join(unknown)}; of {', '.join(cases.DIRECTIONS)}")
    return names


def _progress(row: Row) -> None:
    """A line for those who wait, and for a log that is cut short."""
    rate = f"{row.tflops:.0f} TFLOP/s" if row.op in ("gemm", "block", "train") and row.tflops else ""
    rate = f"{row.tb_s:.2f} TB/s" if not rate and row.tb_s else rate
    said = f"{row.us:.1f} us {rate}" if row.us else row.note
    print(
        f"{row.op} {row.case} {row.direction} {row.recipe} {row.impl} {row.tile}: {said}", file=sys.stderr, flush=True
    )
