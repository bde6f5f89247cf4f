"""`moax compare` draws the losses of several runs of `moax train` on one plot, and prints how far apart they end."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

USAGE = "moax compare RUN RUN [...] [--out FILE]"
DESCRIPTION = "Draws the losses of runs of `moax train` on one plot, and prints how far apart they end."


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `moax compare` to `parser`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, as runs/tiny")
    parser.add_argument("--out", default="compare.png", metavar="FILE", help="file of the plot (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Draws the plot, and prints the held-out loss and the speed of each run. Returns 0."""
    from moax.train.plot import compare
    from moax.train.run import Run

    results = compare([Run(Path(path)) for path in args.runs], Path(args.out))
    if args.json:
        runs = [{"name": name, "held_out_loss": loss, "tokens_per_s": rate} for name, loss, rate in results]
        print(json.dumps({"runs": runs, "plot": args.out}, indent=2))
        return 0
    first_loss = results[0][1]
    for name, loss, rate in results:
        print(f"{name:24} held-out loss {loss:.4f} ({loss - first_loss:+.4f})   {rate:,.0f} tokens/s")
    print(f"the curves are in {args.out}")
    return 0
