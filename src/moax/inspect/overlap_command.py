"""`moax overlap` tells how much of the time of collectives a profile shows beside computation."""

from __future__ import annotations

import argparse
import json

from moax.inspect.overlap import overlap_table, overlaps
from moax.inspect.profiles import read_profile

USAGE = "moax overlap PROFILE [options]"
DESCRIPTION = """\
Reads a profile of JAX, and tells how much of each collective's time has computation beside it on the same GPU, as the
intersection of intervals. Times are milliseconds of a step: ms is while a collective of the kind runs, hidden the part
with computation beside it, exposed the rest.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `moax overlap` to `parser`."""
    add = parser.add_argument
    add("profile", metavar="PROFILE", help="a folder that jax.profiler.trace wrote, or a file *.xplane.pb")
    add("--steps", type=int, default=1, metavar="N", help="steps in the profile (default: %(default)s)")
    add("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Prints the overlap of each GPU of the profile. Returns 0."""
    found = overlaps(read_profile(args.profile), args.steps)
    print(json.dumps([one.as_dict() for one in found], indent=2) if args.json else overlap_table(found))
    return 0
