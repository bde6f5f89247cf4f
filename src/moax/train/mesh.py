"""This module checks that a batch divides over a mesh."""

from __future__ import annotations

import math

import jax

TOKEN_AXES = ("dp", "fsdp", "ep")


def check_batch(batch: int, mesh: jax.sharding.Mesh) -> None:
    """Checks that `batch` sequences divide over the token axes of the mesh, dp, fsdp and ep.

    Raises:
      ValueError: they do not; the message names the nearest batches that do.
    """
    axes = {name: size for name, size in mesh.shape.items() if name in TOKEN_AXES}
    over = math.prod(axes.values())
    if batch % over:
        below, above = batch // over * over, (batch // over + 1) * over
        fits = f"{below} or {above}" if below else f"{above}"
        raise ValueError(f"--batch {batch} does not divide over {' x '.join(axes)} = {over} devices; {fits} would do")
