"""`moax info`: what this machine is, which of moax's implementations run on it, and why the others do not."""

from __future__ import annotations

import argparse
import json
import math
import platform as python
import re
from typing import Any, NamedTuple

import jax

from moax import backend, program
from moax.errors import Unsupported
from moax.extras import EXTRAS, version
from moax.kernels import select_kernels, takes_fp8
from moax.ops.exchange import EXCHANGES, TRANSPORTS, select_transport
from moax.recipe import RECIPES, get_recipe

USAGE = "moax info [options]"
DESCRIPTION = "Shows devices, versions, a mesh to begin with, which kernels and exchanges run here, and extras."
EP = 4  # the most devices that `suggest_mesh` gives to experts


class Choice(NamedTuple):
    """A value that an argument of `moax.moe` can take. runs: whether it does here. note: how it runs, or why not."""

    argument: str
    value: str
    runs: bool
    note: str


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `moax info`."""
    parser.add_argument("--cpu-devices", type=int, metavar="N", help="emulate N devices on this machine's CPU")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Prints what this machine is, and what runs on it."""
    program.start(args.cpu_devices)
    found = describe()
    print(json.dumps(found, indent=2) if args.json else render(found))
    return 0


def describe() -> dict[str, Any]:
    """Everything that `moax info` says, for JSON."""
    return {
        "versions": {name: version(name) for name in ("moax", "jax", "jaxlib")} | {"python": python.python_version()},
        "devices": {
            "count": jax.device_count(),
            "kind": backend.device_kind(),
            "platform": backend.platform(),
            "processes": jax.process_count(),
            "memory_bytes": memory(),
        },
        "mesh": suggest_mesh(jax.device_count(), jax.local_device_count()),
        "choices": [choice._asdict() for choice in (*kernels(), *exchanges(), *recipes())],
        "extras": {extra: {name: version(name) for name in modules.values()} for extra, modules in EXTRAS.items()},
    }


def memory() -> int | None:
    """Bytes of one device that JAX may take; None where it does not say (CPUs)."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def suggest_mesh(count: int, local: int) -> str | None:
    """`--mesh` over `count` devices: experts within a process's `local` ones; None for one device, which needs none."""
    ep = next(n for n in range(min(EP, local), 0, -1) if math.gcd(count, local) % n == 0)
    sizes = {"fsdp": count // ep, "ep": ep}
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or None


def why_not(select, value: str) -> str | None:
    """The reason with which `select(value)` refuses; None where it does not."""
    try:
        select(value)
    except Unsupported as error:
        return re.sub(r"^\w+='\w+': ", "", str(error))
    return None


def kernels() -> list[Choice]:
    """Whether the kernels for Hopper GPUs run, and for what they are made."""
    why = why_not(select_kernels, "hopper")
    limits = "for bfloat16, widths that are multiples of 32"
    return [
        Choice("kernels", "auto", True, "xla" if why else f"hopper {limits}; else xla"),
        Choice("kernels", "hopper", why is None, why or limits),
        Choice("kernels", "xla", True, "anywhere, slower than hopper"),
    ]


def exchanges() -> list[Choice]:
    """Which transports run."""
    refused = {name: why_not(select_transport, name) for name in EXCHANGES}
    notes = {"auto": select_transport("auto")} | {name: transport.note for name, transport in TRANSPORTS.items()}
    return [Choice("exchange", name, why is None, why or notes[name]) for name, why in refused.items()]


def recipes() -> list[Choice]:
    """What multiplies under each recipe; weights cross the wire as one byte an element under all of them."""
    fp8 = why_not(select_kernels, "hopper") is None
    notes = {name: fp8 and takes_fp8("hopper", get_recipe(name)) for name in RECIPES}
    said = {True: "FP8 products, where scale blocks fit the shards", False: "dequantized before products"}
    return [Choice("recipe", name, True, said[native]) for name, native in notes.items()]


def render(info: dict[str, Any]) -> str:
    """`describe()`, for people."""
    versions, devices = info["versions"], info["devices"]
    own = versions["moax"] or "(a source tree that is not installed)"
    room = f", {devices['memory_bytes'] / 2**30:.0f} GiB each for JAX" if devices["memory_bytes"] else ""
    many = f", in {devices['processes']} processes" if devices["processes"] > 1 else ""
    lines = [
        f"moax {own}, jax {versions['jax']}, jaxlib {versions['jaxlib']}, Python {versions['python']}",
        f"devices  {devices['count']} x {devices['kind']} (platform {devices['platform']}){room}{many}",
        f"mesh     {'such as --mesh ' + info['mesh'] if info['mesh'] else 'none needed on one device'}",
        "",
        "what runs here, by argument of moax.moe",
    ]
    width = max(len(choice["value"]) for choice in info["choices"])
    for choice in info["choices"]:
        runs = "yes" if choice["runs"] else "no "
        lines.append(f"  {choice['argument']:8}  {choice['value']:{width}}  {runs}  {choice['note']}".rstrip())
    lines += ["", "extras"]
    for extra, found in info["extras"].items():
        missing = [name for name, have in found.items() if have is None]
        there = ", ".join(f"{name} {have}" for name, have in found.items() if have is not None)
        hint = f"{', '.join(missing)} missing: pip install 'moax[{extra}]'" if missing else ""
        lines.append(f"  {extra:8}  {'; '.join(filter(None, [there, hint]))}")
    return "\n".join(lines)
