"""The functions of `moax.kernels.Implementation` by XLA."""

# ruff: noqa: F401

from __future__ import annotations

from moax.groups import find_groups
from moax.kernels.xla.permutation import build_permutation
from moax.kernels.xla.products import bias_grad, matmul, matmul_activate, wgrad
from moax.kernels.xla.quantization import (
    dequantize_wire,
    gather_shard,
    quantize,
    quantize_for_matmul,
    quantize_shard,
)
from moax.kernels.xla.rows import Packing as pack_rows
from moax.kernels.xla.rows import (
    activate,
    activate_grad,
    activate_grad_quantize,
    gather_and_quantize,
    gather_rows,
    gather_sum,
    matmul_gathers_rows,
    put_rows,
    top_k,
)
from moax.recipe import Contracted, Recipe


def supports_fp8(recipe: Recipe) -> bool:
    """Returns False, because operands are dequantized before the product."""
    return False


def stores_weight_transposed(recipe: Recipe, contracted: Contracted) -> bool:
    """Returns False: a quantized shard has the dims of the weight."""
    return False


def align_rows(recipe: Recipe) -> int:
    """Returns the rows of the recipe's blocks, so that no block of rows holds rows of two groups."""
    return recipe.row_alignment
