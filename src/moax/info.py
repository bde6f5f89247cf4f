"""`moax info` shows this machine, which of moax's implementations run on it, and why the others do not."""

from __future__ import annotations

import argparse
import platform as python
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from moax import backend, program
from moax.checks import Unsupported
from moax.exchange import EXCHANGES, TRANSPORTS, select_transport
from moax.extras import EXTRAS, version
from moax.kernels import DEFAULT, IMPLEMENTATIONS, select_kernels, supports_fp8
from moax.program import align
from moax.recipe import RECIPES, get_recipe

DESCRIPTION = "Shows versions, devices, the kernels and exchanges that run on this machine, and the extras."


class Choice(NamedTuple):
    """A value that an argument of `moax.moe` can take: whether it runs on this machine, and how, or why it does not."""

    argument: str
    value: str
    runs: bool
    note: str


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `moax info` to `parser`."""
    parser.add_argument("--cpu-devices", type=int, metavar="N", help="emulate N devices on this machine's CPU")


def run(args: argparse.Namespace) -> int:
    """Prints what `describe` returns. Returns 0."""
    program.start(args.cpu_devices)
    print(describe())
    return 0


def describe() -> str:
    """Returns the text that `moax info` prints."""
    own, memory = (
        version("moax") or "(a source tree that is not installed)",
        jax.local_devices()[0].memory_stats() or {},
    )
    room = f", {memory['bytes_limit'] / 2**30:.0f} GiB each for JAX" if "bytes_limit" in memory else ""  # not of a CPU
    many = f", in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    choices = [(f"  {c.argument}", c.value, "yes" if c.runs else "no", c.note)
               for c in (*kernels(), *exchanges(), *recipes())]  # fmt: skip
    extras = [
        (f"  {extra}", of, version(of) or f"missing: pip install 'moax[{extra}]'") for extra, of in EXTRAS.items()
    ]
    return (
        f"moax {own}, jax {version('jax')}, jaxlib {version('jaxlib')}, Python {python.python_version()}\n"
        f"devices  {jax.device_count()} x {backend.device_kind()} (platform {backend.platform()}){room}{many}\n\n"
        f"what runs here, by argument of moax.moe\n{align(choices)}\n\nextras\n{align(extras)}"
    )


def kernels() -> list[Choice]:
    """Returns a `Choice` for each value of `kernels`."""
    chosen = select_kernels("auto")
    note = chosen if chosen == DEFAULT else f"{chosen} {IMPLEMENTATIONS[chosen].note}, else {DEFAULT}"
    notes = {name: entry.note for name, entry in IMPLEMENTATIONS.items()}
    return [Choice("kernels", "auto", True, note), *_choices("kernels", select_kernels, notes)]


def exchanges() -> list[Choice]:
    """Returns a `Choice` for each value of `exchange`."""
    notes = {"auto": select_transport("auto")} | {name: transport.note for name, transport in TRANSPORTS.items()}
    return _choices("exchange", select_transport, {name: notes[name] for name in EXCHANGES})


def recipes() -> list[Choice]:
    """Returns a `Choice` for each recipe: its note says in which dtype products multiply."""
    ready = [choice.value for choice in kernels()[1:] if choice.runs]
    notes = {True: "FP8 products, where scale blocks fit the shards", False: "dequantized before products"}
    fp8 = {name: any(supports_fp8(ours, get_recipe(name)) for ours in ready) for name in RECIPES}
    return [Choice("recipe", name, True, notes[multiplies]) for name, multiplies in fp8.items()]


def _choices(argument: str, select: Callable[[str], Any], notes: dict[str, str]) -> list[Choice]:
    """Returns a `Choice` for each value, with its note, or the reason with which `select(value)` refuses it."""
    found = []
    for value, note in notes.items():
        try:
            select(value)
            found.append(Choice(argument, value, True, note))
        except Unsupported as error:
            found.append(Choice(argument, value, False, re.sub(r"^\w+='\w+': ", "", str(error))))
    return found
