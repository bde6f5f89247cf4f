"""The implementation for Hopper GPUs: Pallas Mosaic kernels for the functions of `moax.kernels.Implementation`.

Each file of the folder `pallas` has the kernels of one op, which take arrays and a TileConfig and know neither meshes
nor configs. Every product works on blocks of 128 expert-sorted rows (`formats.Blocks`), and FP8 operands are K-major
(`formats.KMajorFp8`). Where the kernels do not take a recipe, XLA quantizes the operands, and the products multiply
them in bfloat16. `functions` is imported where a call runs, so that `import moax` is fast and needs no Pallas.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from moax import backend

NOTE = "for bfloat16 and widths that are multiples of 32"
PUTS_ROWS = True
WIDTH = 32  # the copy engine swizzles boxes of at least so many FP8 elements


def why_not(dtype: Any, widths: dict[str, int]) -> str | None:
    """Returns why the kernels cannot run here with this dtype and these widths; None where they can."""
    if not backend.on_hopper():
        return f"the kernels are for NVIDIA GPUs of compute capability 9.0, this is {backend.device_kind()!r}"
    if dtype is not None and dtype != jnp.bfloat16:
        return f"the kernels compute in bfloat16, not {jnp.dtype(dtype).name}"
    for name, size in widths.items():
        if size % WIDTH or not size:
            return f"{name} of {size} elements a device is no multiple of {WIDTH}, which the copy engine needs"
    return None
