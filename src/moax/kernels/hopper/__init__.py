"""The implementation for Hopper GPUs: Pallas Mosaic kernels for the functions of `moax.kernels.Implementation`.

Each file of the folder `pallas` has the kernels of one op, which take arrays and a TileConfig and know neither meshes
nor configs. Every product works on blocks of 128 expert-sorted rows (`formats.Blocks`), and FP8 operands are K-major
(`formats.KMajorFp8`). Where the kernels do not take a recipe, XLA quantizes the operands, and the products multiply
them in bfloat16. The first call of a kernel imports its file, so that `import moax` is fast and needs no Pallas.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from moax import backend
from moax.kernels.hopper.between import activate as activate
from moax.kernels.hopper.between import activate_grad as activate_grad
from moax.kernels.hopper.formats import BLOCK, HALF, KERNEL_WIDTH
from moax.kernels.hopper.formats import find_groups as find_groups
from moax.kernels.hopper.formats import gathers_rows as gathers_rows
from moax.kernels.hopper.formats import takes_fp8 as takes_fp8
from moax.kernels.hopper.products import bias_grad as bias_grad
from moax.kernels.hopper.products import matmul as matmul
from moax.kernels.hopper.products import matmul_activate as matmul_activate
from moax.kernels.hopper.products import wgrad as wgrad
from moax.kernels.hopper.quantization import dequantize_wire as dequantize_wire
from moax.kernels.hopper.quantization import gather_and_quantize as gather_and_quantize
from moax.kernels.hopper.quantization import gather_shard as gather_shard
from moax.kernels.hopper.quantization import quantize as quantize
from moax.kernels.hopper.quantization import quantize_and_gather as quantize_and_gather
from moax.kernels.hopper.quantization import quantize_for_matmul as quantize_for_matmul
from moax.kernels.hopper.quantization import quantize_shard as quantize_shard
from moax.kernels.hopper.quantization import turns_weight as turns_weight
from moax.kernels.hopper.rows import Packing as pack_rows
from moax.kernels.hopper.rows import gather_rows as gather_rows
from moax.kernels.hopper.rows import gather_sum as gather_sum
from moax.kernels.hopper.rows import place_rows as place_rows
from moax.kernels.hopper.rows import put_rows as put_rows
from moax.kernels.hopper.rows import top_k as top_k
from moax.recipe import Recipe

__all__ = ["pack_rows"]

NOTE = "for bfloat16 and widths that are multiples of 32"


def why_not(dtype: Any, widths: dict[str, int]) -> str | None:
    """Returns why the kernels cannot run here with this dtype and these widths; None where they can.

    They need a GPU of compute capability 9.0, bfloat16, and widths that are multiples of 32.
    """
    if not backend.on_hopper():
        return f"the kernels are for NVIDIA GPUs of compute capability 9.0, this is {backend.device_kind()!r}"
    if dtype is not None and dtype != jnp.bfloat16:
        return f"the kernels compute in bfloat16, not {jnp.dtype(dtype).name}"
    for name, size in widths.items():
        if size % KERNEL_WIDTH or not size:
            return f"{name} of {size} elements a device is no multiple of {KERNEL_WIDTH}, which the copy engine needs"
    return None


def align_rows(recipe: Recipe) -> int:
    """Returns the least common multiple of the rows of the recipe's blocks and of the kernels' rows.

    These are 128 where products multiply in FP8, since 128 rows share a scale, and else 64.
    """
    return math.lcm(recipe.row_alignment, BLOCK if takes_fp8(recipe) else HALF)
