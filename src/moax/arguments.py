"""This module has the arguments that several commands share: the mesh, and how a block runs on it."""

from __future__ import annotations

import argparse
import math

import jax

from moax.mesh.axes import ROLES
from moax.mesh.collectives import GRAD_REDUCE
from moax.mesh.devices import make_mesh
from moax.mesh.partition import ENGINES
from moax.ops.exchange import EXCHANGES
from moax.recipe import RECIPES, get_recipes

GRAD_REDUCE_HELP = (
    "the dtype in which gradients of weights are summed; bfloat16_sum_float32 sends 2 bytes and sums in float32"
)
Sizes = tuple[tuple[str, int], ...]
RECIPE_NAMES = f"none, {', '.join(RECIPES)}, or one for each projection, as wi=fp8_block,wo=none"


def add_execution(group, *, mesh: str, dtypes: tuple[str, ...]) -> None:
    """Adds the options that say how a block runs.

    Args:
      group: the parser, or one of its groups.
      mesh: the default mesh, in the words of the help text.
      dtypes: the choices of --dtype.
    """
    add = group.add_argument
    add(
        "--mesh",
        type=mesh_of,
        metavar="AXES",
        help=f"axis sizes, as fsdp=2,ep=4; axes: {', '.join(ROLES)} (default: {mesh})",
    )
    add("--cpu-devices", type=int, metavar="N", help="emulate N devices on this machine's CPU")
    add("--recipe", type=recipe_of, metavar="NAME", help=f"how products are quantized: {RECIPE_NAMES} (default: none)")
    add("--exchange", choices=EXCHANGES, help="how tokens reach the ranks of their experts (default: auto)")
    add("--engine", choices=ENGINES, help="how ops are partitioned (default: auto)")
    add("--dtype", choices=dtypes, help="dtype of activations")
    add("--grad-reduce-dtype", choices=GRAD_REDUCE, help=f"{GRAD_REDUCE_HELP} (default: that of activations)")


def factor(text: str) -> float:
    """Parses the value of --capacity-factor and --buffer-factor for argparse: `none` is infinite."""
    return math.inf if text == "none" else float(text)


def mesh_of(text: str) -> Sizes:
    """Parses the value of --mesh for argparse, which prints the error of an `ArgumentTypeError`."""
    try:
        return parse_mesh(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def recipe_of(text: str) -> str:
    """Checks the value of --recipe for argparse, which prints the error of an `ArgumentTypeError`."""
    try:
        get_recipes(None if text == "none" else text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be {RECIPE_NAMES}") from None
    return text


def parse_mesh(text: str) -> Sizes:
    """Parses axis sizes: `"ep=4,fsdp=2"` -> (("fsdp", 2), ("ep", 4)).

    The axes come out in the order dp, fsdp, cp, ep, tp, so that neighbours along tp and ep are neighbouring devices.

    Raises:
      ValueError: an axis has no role, is given twice, or has no size of at least 1.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if name not in ROLES:
            raise ValueError(
                f"--mesh {text}: unknown axis {name!r}; the axes are {', '.join(ROLES)}, as in fsdp=2,ep=4"
            )
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f"--mesh {text}: the size of {name} must be an int of at least 1, as in {name}=2")
        if name in sizes:
            raise ValueError(f"--mesh {text}: {name} is given twice")
        sizes[name] = int(size)
    return tuple((name, sizes[name]) for name in ROLES if name in sizes)


def mesh_over_devices(sizes: Sizes) -> jax.sharding.Mesh:
    """Returns the mesh of these axes over all devices; empty sizes put all devices on fsdp.

    Args:
      sizes: (axis, devices along it) pairs, as `parse_mesh` returns them.

    Raises:
      ValueError: the mesh has another number of devices than JAX; the message names meshes that would fit.
    """
    count = jax.device_count()
    sizes = sizes or (("fsdp", count),)
    total = math.prod(size for _, size in sizes)
    if total != count:
        given = ",".join(f"{name}={size}" for name, size in sizes)
        raise ValueError(
            f"--mesh {given} is a mesh of {total} devices, but JAX has {count}; "
            f"a mesh of the same axes that fits is {_fitting([name for name, _ in sizes], count)}"
            f" (or emulate {total} devices on this machine's CPU: --cpu-devices {total})"
        )
    return make_mesh(dict(sizes))


def _fitting(names: list[str], count: int, most: int = 4) -> str:
    """Returns a few ways to give `count` devices to these axes, the most even one first.

    Example: names ["fsdp", "ep"] and 4 devices give "fsdp=2,ep=2 or fsdp=1,ep=4 or fsdp=4,ep=1".
    """
    ways: list[tuple[int, ...]] = [()]
    for _ in names[1:]:
        ways = [(*way, size) for way in ways for size in range(1, count + 1) if count % (math.prod(way) * size) == 0]
    full = sorted(((*way, count // math.prod(way)) for way in ways), key=lambda way: max(way) - min(way))
    return " or ".join(",".join(f"{n}={s}" for n, s in zip(names, way, strict=True)) for way in full[:most])
