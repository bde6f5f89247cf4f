"""The implementation for Hopper GPUs: the functions of `moax.kernels.xla` by Pallas Mosaic kernels.

Each file of the folder `pallas` has the kernels of one op, which take arrays and a TileConfig and know neither meshes
nor configs. Every product works on blocks of 128 expert-sorted rows (`formats.Blocks`), and FP8 operands are K-major
(`formats.KMajorFp8`). Where the kernels do not take a recipe, XLA quantizes the operands, and the products multiply
them in bfloat16.
"""

from moax.kernels.hopper.formats import align_rows, find_groups, matmul_gathers_rows, supports_fp8
from moax.kernels.hopper.operands import (
    build_permutation,
    dequantize_wire,
    gather_and_quantize,
    gather_rows,
    gather_shard,
    pack_rows,
    quantize,
    quantize_for_matmul,
    quantize_shard,
    stores_weight_transposed,
    top_k,
)
from moax.kernels.hopper.pallas.exchange import put_rows
from moax.kernels.hopper.pallas.permute import gather_sum
from moax.kernels.hopper.products import (
    activate,
    activate_grad,
    activate_grad_quantize,
    bias_grad,
    matmul,
    matmul_activate,
    wgrad,
)

__all__ = [
    "activate", "activate_grad", "activate_grad_quantize", "align_rows", "bias_grad", "build_permutation",
    "dequantize_wire", "find_groups", "gather_and_quantize", "gather_rows", "gather_shard", "gather_sum", "matmul",
    "matmul_activate", "matmul_gathers_rows", "pack_rows", "put_rows", "quantize", "quantize_for_matmul",
    "quantize_shard", "stores_weight_transposed", "supports_fp8", "top_k", "wgrad",
]  # fmt: skip
