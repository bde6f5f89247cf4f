"""This module is the command `moax`, which `python -m moax` runs too.

A command is a module that has `DESCRIPTION`, `add_options(parser)` and `run(args)`, which returns the exit code. We
import the module of the command that runs, and no other, so that `moax --help` imports no JAX.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterable

from moax import __version__

# {command: (its module, the sentence that `moax --help` prints for it)}
COMMANDS = {
    "info": ("moax.info", "show this machine's devices, and which of moax's implementations run on them"),
    "estimate": ("moax.estimate.command", "estimate memory, bytes and time of a model's blocks on any mesh"),
}
EPILOG = """\
examples:
  moax info
  moax estimate --model deepseek-v3 --mesh fsdp=32,ep=8 --recipe fp8_block

`moax COMMAND --help` lists the options of a command. A command prints its result to stdout. An error is one line on
stderr; --traceback shows where the error arose.
exit codes: 0 success, 1 the command cannot run on this machine, 2 an argument is wrong, 130 Ctrl-C stopped it,
141 the reader of its output is gone
"""


def main(argv: list[str] | None = None) -> int:
    """Runs `moax ARGV`, or with None the arguments of this process. Returns the exit code; see `moax.program`."""
    argv = sys.argv[1:] if argv is None else argv
    args = parsers(argv[:1])[0].parse_args(argv)
    from moax import program

    return program.run(f"moax {args.command}", lambda: args.run(args), traceback=args.traceback)


def parsers(
    loaded: Iterable[str] = tuple(COMMANDS),
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Returns the parser of the command line, and of each command; those in `loaded` have their options."""
    raw = argparse.RawDescriptionHelpFormatter
    what = "Mixture-of-Experts layers for JAX that quantize before they gather. The library is `import moax`."
    top = argparse.ArgumentParser("moax", "moax COMMAND [options]", what, EPILOG, formatter_class=raw)
    top.add_argument("--version", action="version", version=f"moax {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands", prog="moax")
    by_name = {}
    for name, (module, what) in COMMANDS.items():
        by_name[name] = parser = commands.add_parser(name, help=what, formatter_class=raw)
        if name in loaded:
            command = importlib.import_module(module)
            parser.usage, parser.description = f"moax {name} [options]", command.DESCRIPTION
            command.add_options(parser)
            parser.add_argument("--traceback", action="store_true", help="show where an error arose")
            parser.set_defaults(run=command.run)
    return top, by_name


if __name__ == "__main__":
    sys.exit(main())
