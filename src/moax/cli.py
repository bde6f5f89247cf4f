"""The command `moax`: the table of its commands. Each command's options and work are in a module of its own.

A command's module is imported when the command is parsed, so that `moax --help` imports no JAX. Such a module has
`USAGE`, `DESCRIPTION`, `add_options(parser)` and `run(args)`, which returns the exit code (`moax.program` lists them).
"""

from __future__ import annotations

import argparse
import importlib

from moax import extras, program

# {command: (module, what it is for)}
COMMANDS = {
    "info": ("moax.info", "show this machine's devices, and what of moax runs on them, or why not"),
    "train": ("moax.train.command", "train a byte-level language model with an MoE in every layer"),
    "inspect": ("moax.inspect.command", "show which collectives an MoE block compiles to"),
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
      what this machine is, and which kernels and exchanges run on it
  moax train --preset tiny --mesh fsdp=2,ep=4 --recipe fp8_block --cpu-devices 8
      train for two minutes on eight emulated devices; needs no GPU
  moax train --preset small --mesh fsdp=2,ep=4 --recipe fp8_block --text my_project/
      train on your own files on eight GPUs
  moax train --resume --name tiny
      continue a run; another --mesh will do
  moax inspect --mesh fsdp=2,ep=4 --recipe fp8_block
      which collectives an MoE block runs, and how many bytes each moves
  moax estimate --model deepseek-v3 --gpus 256 --recipe fp8_block --sweep
      memory, bytes on the wires and time of every mesh of 256 GPUs, fastest first; runs nothing
  moax tune --only qwen3
      measure the tiles of a model's products on this GPU, and keep the fastest for later runs

`moax COMMAND --help` has each command's options. What a command found goes to stdout (with --json, nothing else does),
errors to stderr, in one line; --traceback shows where they arose.
exit codes: 0 done, 1 it cannot run here, 2 wrong arguments, 130 stopped by Ctrl-C, 141 nobody reads what it prints
"""


def main(argv: list[str] | None = None) -> int:
    """Runs `moax ARGV`; returns the exit code."""
    top, commands = parsers()
    args, unknown = top.parse_known_args(argv)
    if unknown:
        commands[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    return program.run(f"moax {args.command}", lambda: args.run(args), traceback=args.traceback)


def parsers() -> tuple[argparse.ArgumentParser, dict[str, CommandParser]]:
    """(the whole command line, the parser of each command)."""
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
    found = {name: commands.add_parser(name, help=what, module=module) for name, (module, what) in COMMANDS.items()}
    return top, found


class CommandParser(argparse.ArgumentParser):
    """The parser of one command: its module is imported, and its options are added, when it is first used."""

    def __init__(self, *, module: str, **options):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.module, self.loaded = module, False

    def parse_known_args(self, args=None, namespace=None):  # pyrefly: ignore[bad-override]
        """Parses `args` once the options are there."""
        self.load()
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        """The help, with the options."""
        self.load()
        return super().format_help()

    def load(self) -> None:
        """Imports the command's module and adds its options."""
        if self.loaded:
            return
        self.loaded, command = True, importlib.import_module(self.module)
        self.usage, self.description = command.USAGE, command.DESCRIPTION
        command.add_options(self)
        self.add_argument("--traceback", action="store_true", help="on an error, show where it arose")
        self.set_defaults(run=command.run)
