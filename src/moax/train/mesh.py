"""This module checks that a batch divides over a mesh."""

from __future__ import annotations

import math

import jax

TOKEN_AXES = ("dp", "fsdp", "ep")


def check_batch(batch: int, seq: int, mesh: jax.sharding.Mesh, microbatches: int = 1) -> None:
    """Checks that `batch` sequences of `seq` bytes divide: each of so many microbatches of sequences over dp, fsdp and
    ep of the mesh, and the bytes over cp.

    Raises:
      ValueError: they do not; the message names the nearest sizes that do.
    """
    for flag, size, names, parts in (("--batch", batch, TOKEN_AXES, microbatches), ("--seq", seq, ("cp",), 1)):
        axes = {name: n for name, n in mesh.shape.items() if name in names}
        devices = math.prod(axes.values())
        over = devices * parts
        if size % over:
            below, above = size // over * over, (size // over + 1) * over
            fits = f"{below} or {above}" if below else f"{above}"
            cut = f" in {parts} microbatches" if parts > 1 else ""
            raise ValueError(
                f"{flag} {size} does not divide{cut} over {' x '.join(axes)} = {devices} devices; {fits} would do"
            )
