"""This module checks that a batch divides over a mesh."""

from __future__ import annotations

import math

import jax

TOKEN_AXES = ("dp", "fsdp", "ep")


def check_batch(batch: int, seq: int, mesh: jax.sharding.Mesh) -> None:
    """Checks that `batch` sequences of `seq` bytes divide over the mesh: sequences over dp, fsdp and ep, bytes over cp.

    Raises:
      ValueError: they do not; the message names the nearest sizes that do.
    """
    for flag, size, names in (("--batch", batch, TOKEN_AXES), ("--seq", seq, ("cp",))):
        axes = {name: n for name, n in mesh.shape.items() if name in names}
        over = math.prod(axes.values())
        if size % over:
            below, above = size // over * over, (size // over + 1) * over
            fits = f"{below} or {above}" if below else f"{above}"
            raise ValueError(f"{flag} {size} does not divide over {' x '.join(axes)} = {over} devices; {fits} would do")
