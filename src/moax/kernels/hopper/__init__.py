"""The implementation for Hopper GPUs: the local functions of `moax.kernels.Implementation` by Pallas Mosaic kernels.

A kernel is a file of this folder: arrays and a TileConfig in, arrays out, no sharding and no config. Every kernel works
on blocks of 128 expert-sorted rows (`formats.Blocks`), and FP8 operands are K-major (`formats.KMajorFp8`). What the
kernels do not take (recipes of other blocks, for example) is quantized by XLA and multiplied in bfloat16. The kernels'
files are imported when they are first called, so that `moax` imports fast and without Pallas.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from moax import backend
from moax.kernels.hopper.between import activate as activate
from moax.kernels.hopper.between import activate_grad as activate_grad
from moax.kernels.hopper.formats import BLOCK, KERNEL_WIDTH
from moax.kernels.hopper.formats import find_groups as find_groups
from moax.kernels.hopper.formats import takes_fp8 as takes_fp8
from moax.kernels.hopper.products import bias_grad as bias_grad
from moax.kernels.hopper.products import matmul as matmul
from moax.kernels.hopper.products import wgrad as wgrad
from moax.kernels.hopper.quantization import dequantize_wire as dequantize_wire
from moax.kernels.hopper.quantization import gather_and_quantize as gather_and_quantize
from moax.kernels.hopper.quantization import quantize as quantize
from moax.kernels.hopper.quantization import quantize_and_gather as quantize_and_gather
from moax.kernels.hopper.quantization import quantize_for_matmul as quantize_for_matmul
from moax.kernels.hopper.rows import Packing as pack_rows
from moax.kernels.hopper.rows import gather_rows as gather_rows
from moax.kernels.hopper.rows import gather_sum as gather_sum
from moax.kernels.hopper.rows import put_rows as put_rows
from moax.recipe import Recipe

__all__ = ["pack_rows"]


def why_not(dtype: Any, widths: dict[str, int]) -> str | None:
    """Why the kernels cannot run: another GPU, another dtype than bfloat16, or a width that is no multiple of 32."""
    if not backend.on_hopper():
        return f"the kernels are for NVIDIA GPUs of compute capability 9.0, this is {backend.device_kind()!r}"
    if dtype is not None and dtype != jnp.bfloat16:
        return f"the kernels compute in bfloat16, not {jnp.dtype(dtype).name}"
    for name, size in widths.items():
        if size % KERNEL_WIDTH or not size:
            return f"{name} of {size} elements a device is no multiple of {KERNEL_WIDTH}, which the copy engine needs"
    return None


def align_rows(recipe: Recipe) -> int:
    """A multiple of the kernels' 128 rows and of the recipe's blocks of rows."""
    return math.lcm(recipe.row_alignment, BLOCK)
