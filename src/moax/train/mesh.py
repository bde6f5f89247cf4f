"""This module checks that a batch divides over a mesh."""

from __future__ import annotations

import math

import jax

TOKEN_AXES = ("dp", "fsdp", "ep")


def check_batch(batch: int, mesh: jax.sharding.Mesh, microbatches: int = 1) -> None:
    """Checks that each of so many microbatches of `batch` sequences divides over dp, fsdp and ep of the mesh.

    Raises:
      ValueError: they do not; the message names the nearest batches that do.
    """
    axes = {name: size for name, size in mesh.shape.items() if name in TOKEN_AXES}
    devices = math.prod(axes.values())
    over = devices * microbatches
    if batch % over:
        below, above = batch // over * over, (batch // over + 1) * over
        fits = f"{below} or {above}" if below else f"{above}"
        parts = f" in {microbatches} microbatches" if microbatches > 1 else ""
        raise ValueError(
            f"--batch {batch} does not divide{parts} over {' x '.join(axes)} = {devices} devices; {fits} would do"
        )
