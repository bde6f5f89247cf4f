"""The command `moax` shows this machine, which of moax's implementations run on it, and why the others do not.

`moax estimate MODEL` prints what the MoE layers of a model cost on a mesh, and whether they fit.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import platform as python
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from moax import __version__
from moax.checks import Unsupported
from moax.config import MoEConfig
from moax.estimate import HARDWARE, Estimate, estimate
from moax.exchange import AUTO, EXCHANGES, TRANSPORTS
from moax.hf import config_from_hf, moe_layers
from moax.kernels import DEFAULT, IMPLEMENTATIONS, select_kernels, supports_fp8
from moax.kernels.device import find_device
from moax.models import MODELS
from moax.recipe import RECIPES
from moax.text import align
from moax.types import KEPT

# {extra of `pip install 'moax[EXTRA]'`: the distribution that it brings}
EXTRAS = {"flax": "flax", "cuda12": "jax-cuda12-plugin", "cuda13": "jax-cuda13-plugin"}


class Choice(NamedTuple):
    """A value that an argument of `moax.moe` can take: whether it runs on this machine, and how, or why it does not."""

    argument: str
    value: str
    runs: bool
    note: str


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the text of `describe`, or one line with the reason why JAX cannot start; with words an estimate."""
    words = sys.argv[1:] if argv is None else argv
    if words:
        sys.exit(print_estimate(words))
    try:
        jax.device_count()
    # JAX asserts that this machine has a platform of `jax_platforms`.
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip()
        if not reason:
            reason = f"this machine has none of the platforms {jax.config.jax_platforms}"
        sys.exit(f"moax: JAX cannot start: {reason}")
    print(describe())


def describe() -> str:
    """Returns the text that the command prints."""
    own_version = __version__ if version("moax") else f"{__version__} (a source tree that is not installed)"
    kind = find_device().device_kind
    platform = find_device().platform
    memory = jax.local_devices()[0].memory_stats() or {}
    room = ""
    if "bytes_limit" in memory:  # not of a CPU
        room = f", {memory['bytes_limit'] / 2**30:.0f} GiB each for JAX"
    processes = ""
    if jax.process_count() > 1:
        processes = f", in {jax.process_count()} processes"
    runs = []
    for choice in choices():
        answer = "yes" if choice.runs else "no"
        runs.append((f"  {choice.argument}", choice.value, answer, choice.note))
    extras = []
    for name, distribution in EXTRAS.items():
        state = version(distribution) or f"missing: pip install 'moax[{name}]'"
        extras.append((f"  {name}", distribution, state))
    return (
        f"moax {own_version}, jax {version('jax')}, jaxlib {version('jaxlib')}, "
        f"Python {python.python_version()}\n"
        f"devices  {jax.device_count()} x {kind} (platform {platform})"
        f"{room}{processes}\n\n"
        f"what runs here, by argument of moax.moe\n{align(runs)}\n\nextras\n{align(extras)}"
    )


def estimate_parser() -> argparse.ArgumentParser:
    """Returns the parser of `moax estimate`."""
    parser = argparse.ArgumentParser(
        prog="python -m moax",
        usage="python -m moax [estimate MODEL --mesh SIZES --tokens T [options]]",
        description="Prints what the MoE layers of a model cost on a mesh, and whether they fit. The exit status is 1 "
        "where they do not fit. Without words the command prints what runs on this machine.",
    )
    add = parser.add_argument
    known = ", ".join(MODELS)
    add("command", choices=("estimate",), help=argparse.SUPPRESS)
    add("model", metavar="MODEL", help=f"{known}, or a folder with the config.json of a Hugging Face model")
    add("--mesh", required=True, type=read_mesh, metavar="SIZES", help="the devices along each axis: fsdp=32,ep=8")
    add("--tokens", required=True, type=int, metavar="T", help="the tokens of a GPU in a step")
    add("--hardware", choices=HARDWARE, default="h200", help="the GPU (default: %(default)s)")
    add("--recipe", choices=RECIPES, help="the recipe of the matmuls (default: none)")
    add("--exchange", choices=EXCHANGES, default="auto", help="how tokens reach their experts (default: %(default)s)")
    add("--layers", type=int, metavar="N", help="the MoE layers (default: those of the model)")
    add("--microbatches", type=int, default=1, metavar="N", help="the parts of a step (default: %(default)s)")
    add("--kept", choices=KEPT, help="weights are quantized once a step, or also gathered (default: neither)")
    add("--remat", action="store_true", help="jax.checkpoint is around each block")
    add("--optimizer-bytes", type=int, default=8, metavar="B", help="the optimizer state of a parameter (default: 8)")
    add("--other-gb", type=read_gb, default=0.0, metavar="GB", help="GB of a GPU for the rest of a model (default: 0)")
    return parser


def read_mesh(text: str) -> dict[str, int]:
    """Returns the sizes of a mesh: {"fsdp": 32, "ep": 8} of "fsdp=32,ep=8"."""
    entries = [entry.strip().partition("=") for entry in text.split(",")]
    sizes = {axis: int(size) for axis, _, size in entries if axis and size.isdecimal()}
    if len(sizes) < len(entries):
        raise argparse.ArgumentTypeError(f"{text!r} must have the devices along each axis, each once: fsdp=32,ep=8")
    return sizes


def read_gb(text: str) -> float:
    """Returns a finite number of GB."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number * 1e9):
        raise argparse.ArgumentTypeError(f"{text!r} must be a finite number of GB, such as 4.5")
    return number


def print_estimate(words: Sequence[str]) -> int | str:
    """Prints the estimate for the words of the command; returns the exit status, or the line of an error."""
    args = estimate_parser().parse_args(words)
    try:
        result = _estimate(args)
    except (ValueError, Unsupported, OSError) as error:
        return f"python -m moax: error: {error}"
    print(result)
    return int(not result.fits)


def _estimate(args: argparse.Namespace) -> Estimate:
    """Returns the estimate for the arguments; a model of no known name may be a folder."""
    model: str | MoEConfig = args.model
    layers = args.layers
    if args.model not in MODELS and Path(args.model).exists():
        model = config_from_hf(args.model)
        if layers is None:
            layers = len(moe_layers(args.model))
    return estimate(
        model,
        args.mesh,
        args.tokens,
        hardware=args.hardware,
        layers=layers,
        remat=args.remat,
        optimizer_bytes=args.optimizer_bytes,
        other_bytes=round(args.other_gb * 1e9),
        microbatches=args.microbatches,
        kept=args.kept,
        recipe=args.recipe,
        exchange=args.exchange,
    )


def version(distribution: str) -> str | None:
    """Returns the installed version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def choices() -> list[Choice]:
    """Returns a `Choice` for each value of `kernels` and `exchange`, and for each recipe."""
    best = select_kernels("auto")
    note = best
    if best != DEFAULT:
        note = f"{best} {IMPLEMENTATIONS[best].note}, else {DEFAULT}"
    kernel_choices = [_try_kernels("auto", note)]
    for name, entry in IMPLEMENTATIONS.items():
        kernel_choices.append(_try_kernels(name, entry.note))
    exchange_choices = [Choice("exchange", "auto", True, AUTO)]
    for name, transport in TRANSPORTS.items():
        exchange_choices.append(Choice("exchange", name, True, transport.note))
    running_kernels = [c.value for c in kernel_choices if c.runs and c.value != "auto"]
    recipe_choices = []
    for name, recipe in RECIPES.items():
        note = "dequantized before matmuls"
        if any(supports_fp8(kernels, recipe) for kernels in running_kernels):
            note = "FP8 matmuls, where scale blocks fit the shards"
        recipe_choices.append(Choice("recipe", name, True, note))
    return kernel_choices + exchange_choices + recipe_choices


def _try_kernels(name: str, note: str) -> Choice:
    """Returns the `Choice` of an implementation, with the reason where it cannot run on this machine."""
    try:
        select_kernels(name)
    except Unsupported as error:
        return Choice("kernels", name, False, re.sub(r"^\w+='\w+': ", "", str(error)))
    return Choice("kernels", name, True, note)


if __name__ == "__main__":
    main()
