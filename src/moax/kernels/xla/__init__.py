"""The implementation that runs everywhere: XLA, on every backend of JAX and in any dtype."""

from __future__ import annotations

from jax.typing import DTypeLike

from moax.groups import find_groups as find_groups
from moax.kernels.xla.plan import place_rows as place_rows
from moax.kernels.xla.products import bias_grad as bias_grad
from moax.kernels.xla.products import matmul as matmul
from moax.kernels.xla.products import matmul_activate as matmul_activate
from moax.kernels.xla.products import wgrad as wgrad
from moax.kernels.xla.quantization import dequantize_wire as dequantize_wire
from moax.kernels.xla.quantization import gather_shard as gather_shard
from moax.kernels.xla.quantization import quantize as quantize
from moax.kernels.xla.quantization import quantize_and_gather as quantize_and_gather
from moax.kernels.xla.quantization import quantize_for_matmul as quantize_for_matmul
from moax.kernels.xla.quantization import quantize_shard as quantize_shard
from moax.kernels.xla.rows import Packing as pack_rows
from moax.kernels.xla.rows import activate as activate
from moax.kernels.xla.rows import activate_grad as activate_grad
from moax.kernels.xla.rows import gather_and_quantize as gather_and_quantize
from moax.kernels.xla.rows import gather_rows as gather_rows
from moax.kernels.xla.rows import gather_sum as gather_sum
from moax.kernels.xla.rows import gathers_rows as gathers_rows
from moax.kernels.xla.rows import put_rows as put_rows
from moax.kernels.xla.rows import top_k as top_k
from moax.recipe import Contracted, Recipe

__all__ = ["pack_rows"]

NOTE = "runs on every device, slower than hopper on a Hopper GPU"


def why_not(dtype: DTypeLike | None, widths: dict[str, int]) -> str | None:
    """Returns None, because XLA runs everywhere."""
    del dtype, widths
    return None


def takes_fp8(recipe: Recipe) -> bool:
    """Returns False, because operands are dequantized before the product."""
    del recipe
    return False


def turns_weight(recipe: Recipe, contracted: Contracted) -> bool:
    """Returns False: a quantized shard has the dims of the weight."""
    del recipe, contracted
    return False


def align_rows(recipe: Recipe) -> int:
    """Returns the rows of the recipe's blocks, so that no block of rows holds rows of two groups."""
    return recipe.row_alignment
