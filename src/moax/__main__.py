"""The command `moax` shows this machine, which of moax's implementations run on it, and why the others do not."""

from __future__ import annotations

import importlib.metadata
import platform as python
import re
import sys
from typing import NamedTuple

import jax

from moax.checks import Unsupported
from moax.exchange import TRANSPORTS, select_transport
from moax.kernels import DEFAULT, IMPLEMENTATIONS, select_kernels, supports_fp8
from moax.kernels.device import find_device
from moax.recipe import RECIPES, get_recipe
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
    """Prints what `describe` returns, or in one line why JAX cannot start."""
    try:
        jax.device_count()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that this machine has a platform it was told to use.
        why = str(error).strip() or f"this machine has none of the platforms {jax.config.jax_platforms}"
        sys.exit(f"moax: JAX cannot start: {why}")
    print(describe())


def describe() -> str:
    """Returns the text that the command prints."""
    own = version("moax") or "(a source tree that is not installed)"
    kind, platform = find_device().device_kind, find_device().platform
    memory = jax.local_devices()[0].memory_stats() or {}
    room = f", {memory['bytes_limit'] / 2**30:.0f} GiB each for JAX" if "bytes_limit" in memory else ""  # not of a CPU
    many = f", in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    runs = [(f"  {c.argument}", c.value, "yes" if c.runs else "no", c.note) for c in choices()]
    extras = [(f"  {name}", of, version(of) or f"missing: pip install 'moax[{name}]'") for name, of in EXTRAS.items()]
    return (
        f"moax {own}, jax {version('jax')}, jaxlib {version('jaxlib')}, Python {python.python_version()}\n"
        f"devices  {jax.device_count()} x {kind} (platform {platform}){room}{many}\n\n"
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
    note = best if best == DEFAULT else f"{best} {IMPLEMENTATIONS[best].note}, else {DEFAULT}"
    kernels = {"auto": note} | {name: entry.note for name, entry in IMPLEMENTATIONS.items()}
    exchanges = {"auto": select_transport("auto")} | {name: transport.note for name, transport in TRANSPORTS.items()}
    asked = [("kernels", select_kernels, *of) for of in kernels.items()]
    asked += [("exchange", select_transport, *of) for of in exchanges.items()]
    found = []
    for argument, select, value, note in asked:
        try:
            select(value)
            found.append(Choice(argument, value, True, note))
        except Unsupported as error:
            found.append(Choice(argument, value, False, re.sub(r"^\w+='\w+': ", "", str(error))))
    ready = [c.value for c in found if c.argument == "kernels" and c.runs and c.value != "auto"]
    for name in RECIPES:
        fp8 = any(supports_fp8(ours, get_recipe(name)) for ours in ready)
        note = "FP8 products, where scale blocks fit the shards" if fp8 else "dequantized before products"
        found.append(Choice("recipe", name, True, note))
    return found


if __name__ == "__main__":
    main()
