"""`fsdp=2,ep=4` -> a mesh, with errors that list what would do."""

from __future__ import annotations

import math

import jax

import moax

AXES = ("dp", "fsdp", "ep", "tp")
TOKEN_AXES = ("dp", "fsdp", "ep")


def parse_mesh(text: str) -> tuple[tuple[str, int], ...]:
    """`"fsdp=2,ep=4"` -> (("fsdp", 2), ("ep", 4)), in the order dp, fsdp, ep, tp: neighbours in ep are nearest."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if name not in AXES:
            raise ValueError(f"--mesh {text}: unknown axis {name!r}; the axes are {', '.join(AXES)}, as in fsdp=2,ep=4")
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f"--mesh {text}: the size of {name} must be an int of at least 1, as in {name}=2")
        if name in sizes:
            raise ValueError(f"--mesh {text}: {name} is given twice")
        sizes[name] = int(size)
    return tuple((name, sizes[name]) for name in AXES if name in sizes)


def make_mesh(sizes: tuple[tuple[str, int], ...]) -> jax.sharding.Mesh:
    """The mesh of these axes over all devices; empty puts them all on fsdp."""
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
    return moax.make_mesh(dict(sizes))


def check_batch(batch: int, mesh: jax.sharding.Mesh) -> None:
    """Raises ValueError where `batch` sequences do not divide over the mesh's token axes."""
    axes = {name: size for name, size in mesh.shape.items() if name in TOKEN_AXES}
    over = math.prod(axes.values())
    if batch % over:
        below, above = batch // over * over, (batch // over + 1) * over
        fits = f"{below} or {above}" if below else f"{above}"
        raise ValueError(f"--batch {batch} does not divide over {' x '.join(axes)} = {over} devices; {fits} would do")


def _fitting(names: list[str], count: int, most: int = 4) -> str:
    """A few ways to give `count` devices to these axes, the even ones first."""
    ways: list[tuple[int, ...]] = [()]
    for _ in names[1:]:
        ways = [(*way, size) for way in ways for size in range(1, count + 1) if count % (math.prod(way) * size) == 0]
    full = sorted(((*way, count // math.prod(way)) for way in ways), key=lambda way: max(way) - min(way))
    return " or ".join(",".join(f"{n}={s}" for n, s in zip(names, way, strict=True)) for way in full[:most])
