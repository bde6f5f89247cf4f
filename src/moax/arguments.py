"""Arguments that several commands share: the mesh, and how a block runs on it."""

from __future__ import annotations

import argparse
import math

import jax

from moax.mesh.axes import ROLES
from moax.mesh.devices import make_mesh
from moax.mesh.partition import ENGINES
from moax.ops.exchange import EXCHANGES
from moax.recipe import RECIPES

Sizes = tuple[tuple[str, int], ...]


def add_execution(group, *, mesh: str, dtypes: tuple[str, ...]) -> None:
    """The options of how a block runs.

    Args:
      group: the parser, or one of its groups.
      mesh: what the help says of the default mesh.
      dtypes: the choices of --dtype.
    """
    add = group.add_argument
    add("--mesh", type=mesh_of, metavar="AXES", help=f"as fsdp=2,ep=4, of {', '.join(ROLES)} (default: {mesh})")
    add("--cpu-devices", type=int, metavar="N", help="emulate N devices on this machine's CPU")
    add("--recipe", choices=("none", *RECIPES), help="how products are quantized (default: none)")
    add("--exchange", choices=EXCHANGES, help="how tokens reach the ranks of their experts (default: auto)")
    add("--engine", choices=ENGINES, help="how ops are partitioned (default: auto)")
    add("--dtype", choices=dtypes, help="of activations")


def mesh_of(text: str) -> Sizes:
    """`parse_mesh` as the type of an argument."""
    try:
        return parse_mesh(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_mesh(text: str) -> Sizes:
    """`"fsdp=2,ep=4"` -> (("fsdp", 2), ("ep", 4)), in the order dp, fsdp, ep, tp: neighbours in ep are nearest.

    Raises:
      ValueError: an axis that has no role, is given twice, or has no size.
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
    """The mesh of these axes over all devices; empty sizes put all devices on fsdp.

    Raises:
      ValueError: the mesh has another number of devices; the message names meshes that would fit.
    """
    count = jax.device_count()
    sizes = sizes or (("fsdp", count),)
    total = math.prod(size for _, size in sizes)
    if total != count:
        given = ",".join(f"{name}={size}" for name, size in sizes)
        raise ValueError(
            f"--mesh {given} is a mesh of {total} devices, but {count} are here; "
            f"of the same axes, {_fitting([name for name, _ in sizes], count)} would do"
            f" (or emulate {total} on this machine's CPU: --cpu-devices {total})"
        )
    return make_mesh(dict(sizes))


def _fitting(names: list[str], count: int, most: int = 4) -> str:
    """A few ways to give `count` devices to these axes, the even ones first."""
    ways: list[tuple[int, ...]] = [()]
    for _ in names[1:]:
        ways = [(*way, size) for way in ways for size in range(1, count + 1) if count % (math.prod(way) * size) == 0]
    full = sorted(((*way, count // math.prod(way)) for way in ways), key=lambda way: max(way) - min(way))
    return " or ".join(",".join(f"{n}={s}" for n, s in zip(names, way, strict=True)) for way in full[:most])
