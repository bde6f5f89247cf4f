"""The functions of `moax.kernels.Implementation` by kernels for Hopper GPUs."""

# ruff: noqa: F401

from __future__ import annotations

import math

from moax.kernels.hopper.activation import activate, activate_grad, activate_grad_quantize
from moax.kernels.hopper.formats import BLOCK, HALF, find_groups, matmul_gathers_rows, supports_fp8
from moax.kernels.hopper.pallas.exchange import put_rows
from moax.kernels.hopper.pallas.permute import gather_sum
from moax.kernels.hopper.products import bias_grad, matmul, matmul_activate, wgrad
from moax.kernels.hopper.quantization import (
    dequantize_wire,
    gather_and_quantize,
    gather_shard,
    quantize,
    quantize_for_matmul,
    quantize_shard,
    stores_weight_transposed,
)
from moax.kernels.hopper.rows import Packing as pack_rows
from moax.kernels.hopper.rows import build_permutation, gather_rows, top_k
from moax.recipe import Recipe


def align_rows(recipe: Recipe) -> int:
    """Returns the alignment of the recipe and of the kernels: 128 rows share a scale in FP8, and 64 else suffice."""
    return math.lcm(recipe.row_alignment, BLOCK if supports_fp8(recipe) else HALF)
