"""This module is the command `moax` and the table of its subcommands. Each subcommand has a module of its own.

A subcommand's module is imported when the subcommand is parsed, so that `moax --help` imports no JAX. Such a module
has `USAGE`, `DESCRIPTION`, `add_options(parser)` and `run(args)`. `run` returns the exit code; `moax.program` lists
the exit codes.
"""

from __future__ import annotations

import argparse
import importlib

from moax import extras, program

# {command: (its module, the sentence that `moax --help` prints for it)}
COMMANDS = {
    "info": ("moax.info", "show this machine's devices, and which of moax's implementations run on them"),
    "train": ("moax.train.command", "train a byte-level language model with an MoE in every layer"),
    "inspect": ("moax.inspect.command", "show which collectives an MoE block compiles to"),
    "overlap": (
        "moax.inspect.overlap_command",
        "show how much of each collective's time is hidden",
    ),
    "estimate": (
        "moax.estimate.command",
        "estimate memory, bytes on the wires and time of a model's blocks on any mesh",
    ),
    "tune": ("moax.tune.command", "measure the tiles of products on this GPU and keep the fastest"),
    "compare": ("moax.train.compare", "draw the losses of several training runs on one plot"),
}
EXAMPLES = """\
examples:
  moax info
      show this machine's devices, and which kernels and exchanges run on them
  moax train --preset tiny --mesh fsdp=2,ep=4 --recipe fp8_block --cpu-devices 8
      train for two minutes on eight emulated devices; needs no GPU
  moax train --preset small --mesh fsdp=2,ep=4 --recipe fp8_block --text my_project/
      train on your own files on eight GPUs
  moax train --resume --name tiny
      continue a run; the --mesh may be another one
  moax inspect --mesh fsdp=2,ep=4 --recipe fp8_block
      list the collectives that an MoE block runs, and the bytes that each of them moves
  moax overlap profile/ --steps 5
      read a profile of five steps on GPUs, and list how long collectives run with nothing computing beside them
  moax estimate --model deepseek-v3 --gpus 256 --recipe fp8_block --sweep
      rank every mesh of 256 GPUs by the estimated time, with memory and bytes on the wires; runs nothing
  moax tune --only qwen3
      measure the tiles of a model's products on this GPU, and keep the fastest for later runs

`moax COMMAND --help` lists the options of a command. A command prints its result to stdout; with --json, stdout has
nothing but the JSON. An error is one line on stderr; --traceback shows where the error arose.
exit codes: 0 success, 1 the command cannot run on this machine, 2 an argument is wrong, 130 Ctrl-C stopped it,
141 the reader of its output is gone
"""


def main(argv: list[str] | None = None) -> int:
    """Runs `moax ARGV`.

    Args:
      argv: the arguments behind `moax`; None takes those of this process.

    Returns:
      The exit code; see `moax.program`.
    """
    top, commands = parsers()
    args, unknown = top.parse_known_args(argv)
    if unknown:
        commands[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return program.run(f"moax {args.command}", lambda: args.run(args), traceback=args.traceback)


def parsers() -> tuple[argparse.ArgumentParser, dict[str, CommandParser]]:
    """Returns the parser of the whole command line, and the parser of each command by the command's name."""
    top = argparse.ArgumentParser(
        prog="moax",
        usage="moax COMMAND [options]",
        description="Mixture-of-Experts layers for JAX that quantize before they gather.\n"
        "The commands try them out on this machine, with or without a GPU; the library is `import moax`.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = extras.version("moax") or "of an uninstalled source tree"
    top.add_argument("--version", action="version", version=f"moax {version}")
    commands = top.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands", prog="moax", parser_class=CommandParser
    )
    by_name = {name: commands.add_parser(name, help=what, module=module) for name, (module, what) in COMMANDS.items()}
    return top, by_name


class CommandParser(argparse.ArgumentParser):
    """The parser of one command. Its first use imports the command's module and adds the command's options."""

    def __init__(self, *, module: str, **options):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.module, self.loaded = module, False

    def parse_known_args(self, args=None, namespace=None):  # pyrefly: ignore[bad-override]
        """Adds the options, then parses `args`."""
        self.load()
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """Adds the options, then returns the help text."""
        self.load()
        return super().format_help()

    def load(self) -> None:
        """Imports the command's module and adds its options, once."""
        if self.loaded:
            return
        self.loaded, command = True, importlib.import_module(self.module)
        self.usage, self.description = command.USAGE, command.DESCRIPTION
        command.add_options(self)
        self.add_argument("--traceback", action="store_true", help="show where an error arose")
        self.set_defaults(run=command.run)
