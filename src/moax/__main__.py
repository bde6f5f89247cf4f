"""The command `moax` shows this machine, which of moax's implementations run on it, and why the others do not."""

from __future__ import annotations

import importlib.metadata
import platform as python
import re
import sys
from collections.abc import Callable
from typing import NamedTuple

import jax

from moax import __version__
from moax.checks import Unsupported
from moax.exchange import TRANSPORTS, select_transport
from moax.kernels import DEFAULT, IMPLEMENTATIONS, select_kernels, supports_fp8
from moax.kernels.device import find_device
from moax.recipe import RECIPES
from moax.text import align

# {extra of `pip install 'moax[EXTRA]'`: the distribution that it brings}
EXTRAS = {"flax": "flax", "cuda12": "jax-cuda12-plugin", "cuda13": "jax-cuda13-plugin"}


class Choice(NamedTuple):
    """A value that an argument of `moax.moe` can take: whether it runs on this machine, and how, or why it does not."""

    argument: str
    value: str
    runs: bool
    note: str


def main() -> None:
    """Prints the text of `describe`, or one line with the reason why JAX cannot start."""
    try:
        jax.device_count()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that this machine has a platform of `jax_platforms`.
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
    kernel_choices = [_try("kernels", select_kernels, "auto", note)]
    for name, entry in IMPLEMENTATIONS.items():
        kernel_choices.append(_try("kernels", select_kernels, name, entry.note))
    exchange_choices = [_try("exchange", select_transport, "auto", select_transport("auto"))]
    for name, transport in TRANSPORTS.items():
        exchange_choices.append(_try("exchange", select_transport, name, transport.note))
    running_kernels = [c.value for c in kernel_choices if c.runs and c.value != "auto"]
    recipe_choices = []
    for name, recipe in RECIPES.items():
        note = "dequantized before products"
        if any(supports_fp8(kernels, recipe) for kernels in running_kernels):
            note = "FP8 products, where scale blocks fit the shards"
        recipe_choices.append(Choice("recipe", name, True, note))
    return kernel_choices + exchange_choices + recipe_choices


def _try(argument: str, select: Callable[[str], object], value: str, note: str) -> Choice:
    """Returns the `Choice` of a value that `select` takes, or refuses on this machine."""
    try:
        select(value)
    except Unsupported as error:
        return Choice(argument, value, False, re.sub(r"^\w+='\w+': ", "", str(error)))
    return Choice(argument, value, True, note)


if __name__ == "__main__":
    main()
