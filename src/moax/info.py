"""`moax info` shows this machine, which of moax's implementations run on it, and why the others do not."""

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
from moax.exchange import EXCHANGES, TRANSPORTS, select_transport
from moax.extras import EXTRAS, version
from moax.kernels import DEFAULT, IMPLEMENTATIONS, find_note, select_kernels, supports_fp8
from moax.recipe import RECIPES, get_recipe

DESCRIPTION = (
    "Shows versions, devices, a mesh to begin with, the kernels and exchanges that run on this machine, and the extras."
)
EP = 4  # `suggest_mesh` gives at most this many devices to experts


class Choice(NamedTuple):
    """A value that an argument of `moax.moe` can take: whether it runs on this machine, and how, or why it does not."""

    argument: str
    value: str
    runs: bool
    note: str


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `moax info` to `parser`."""
    parser.add_argument("--cpu-devices", type=int, metavar="N", help="emulate N devices on this machine's CPU")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Prints what `describe` returns: as JSON with --json, else as text. Returns 0."""
    program.start(args.cpu_devices)
    info = describe()
    print(json.dumps(info, indent=2) if args.json else render(info))
    return 0


def describe() -> dict[str, Any]:
    """Returns everything that `moax info` prints, as values that JSON can hold."""
    return {
        "versions": {name: version(name) for name in ("moax", "jax", "jaxlib")} | {"python": python.python_version()},
        "devices": {
            "count": jax.device_count(),
            "kind": backend.device_kind(),
            "platform": backend.platform(),
            "processes": jax.process_count(),
            "memory_bytes": (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit"),  # None on a CPU
        },
        "mesh": suggest_mesh(jax.device_count(), jax.local_device_count()),
        "choices": [choice._asdict() for choice in (*kernels(), *exchanges(), *recipes())],
        "extras": {extra: {name: version(name) for name in modules.values()} for extra, modules in EXTRAS.items()},
    }


def suggest_mesh(count: int, local: int) -> str | None:
    """Returns a `--mesh` whose `ep` axis stays within one process: "fsdp=4,ep=4" for 16 devices in processes of 8.

    One device needs no mesh: None.
    """
    ep = next(n for n in range(min(EP, local), 0, -1) if math.gcd(count, local) % n == 0)
    sizes = {"fsdp": count // ep, "ep": ep}
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or None


def why_not(select, value: str) -> str | None:
    """Returns the reason with which `select(value)` refuses, without "kernels='hopper': "; None where it accepts."""
    try:
        select(value)
    except Unsupported as error:
        return re.sub(r"^\w+='\w+': ", "", str(error))
    return None


def kernels() -> list[Choice]:
    """Returns a `Choice` for each value of `kernels`."""
    refused = {name: why_not(select_kernels, name) for name in IMPLEMENTATIONS}
    chosen = select_kernels("auto")
    note = chosen if chosen == DEFAULT else f"{chosen} {find_note(chosen)}, else {DEFAULT}"
    by_name = [Choice("kernels", name, why is None, why or find_note(name)) for name, why in refused.items()]
    return [Choice("kernels", "auto", True, note), *by_name]


def exchanges() -> list[Choice]:
    """Returns a `Choice` for each value of `exchange`."""
    refused = {name: why_not(select_transport, name) for name in EXCHANGES}
    notes = {"auto": select_transport("auto")} | {name: transport.note for name, transport in TRANSPORTS.items()}
    return [Choice("exchange", name, why is None, why or notes[name]) for name, why in refused.items()]


def recipes() -> list[Choice]:
    """Returns a `Choice` for each recipe: its note says in which dtype products multiply."""
    ready = [name for name in IMPLEMENTATIONS if why_not(select_kernels, name) is None]
    notes = {True: "FP8 products, where scale blocks fit the shards", False: "dequantized before products"}
    fp8 = {name: any(supports_fp8(kernels, get_recipe(name)) for kernels in ready) for name in RECIPES}
    return [Choice("recipe", name, True, notes[multiplies]) for name, multiplies in fp8.items()]


def render(info: dict[str, Any]) -> str:
    """Returns the text that `moax info` prints for what `describe` returned."""
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
    for extra, installed in info["extras"].items():
        missing = [name for name, number in installed.items() if number is None]
        present = ", ".join(f"{name} {number}" for name, number in installed.items() if number is not None)
        hint = f"{', '.join(missing)} missing: pip install 'moax[{extra}]'" if missing else ""
        lines.append(f"  {extra:8}  {'; '.join(filter(None, [present, hint]))}")
    return "\n".join(lines)
