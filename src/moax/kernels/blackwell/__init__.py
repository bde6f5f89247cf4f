"""The implementation for Blackwell GPUs: forward and dgrad by the Pallas kernel that JAX ships, the rest by XLA.

No Blackwell GPU has run this implementation: the tests of moax lower and compile the kernel for one. JAX's kernel may
have a race, which `products.py` describes. The table in `moax.kernels` therefore lists this implementation after `xla`,
where `auto` never arrives, and only `kernels="blackwell"` takes it.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import jax.numpy as jnp

from moax import backend
from moax.kernels.blackwell.products import DTYPES, WIDTH
from moax.kernels.blackwell.products import matmul as matmul
from moax.kernels.blackwell.products import matmul_activate as matmul_activate
from moax.kernels.xla import activate as activate
from moax.kernels.xla import activate_grad as activate_grad
from moax.kernels.xla import align_rows as align_rows
from moax.kernels.xla import bias_grad as bias_grad
from moax.kernels.xla import dequantize_wire as dequantize_wire
from moax.kernels.xla import find_groups as find_groups
from moax.kernels.xla import gather_and_quantize as gather_and_quantize
from moax.kernels.xla import gather_rows as gather_rows
from moax.kernels.xla import gather_shard as gather_shard
from moax.kernels.xla import gather_sum as gather_sum
from moax.kernels.xla import gathers_rows as gathers_rows
from moax.kernels.xla import pack_rows as pack_rows
from moax.kernels.xla import place_rows as place_rows
from moax.kernels.xla import put_rows as put_rows
from moax.kernels.xla import quantize as quantize
from moax.kernels.xla import quantize_and_gather as quantize_and_gather
from moax.kernels.xla import quantize_for_matmul as quantize_for_matmul
from moax.kernels.xla import quantize_shard as quantize_shard
from moax.kernels.xla import takes_fp8 as takes_fp8
from moax.kernels.xla import top_k as top_k
from moax.kernels.xla import turns_weight as turns_weight
from moax.kernels.xla import wgrad as wgrad

NOTE = "JAX's own product forward and for dgrad, else XLA; no card has run it"


def why_not(dtype: Any, widths: dict[str, int]) -> str | None:
    """Returns why the kernel cannot run here with this dtype and these widths; None where it can.

    It needs a GPU of compute capability 10.0, absl, a dtype of 16 bits, and widths that are multiples of 128.
    """
    if not backend.on_blackwell():
        return f"the kernel is for NVIDIA GPUs of compute capability 10.0, this is {backend.device_kind()!r}"
    if importlib.util.find_spec("absl") is None:
        return "the kernel that JAX ships imports absl, and absl-py is not installed"
    if dtype is not None and jnp.dtype(dtype) not in DTYPES:
        return f"the kernel multiplies bfloat16 or float16, not {jnp.dtype(dtype).name}"
    for name, size in widths.items():
        if size % WIDTH or not size:
            return f"{name} of {size} elements a device is no multiple of {WIDTH}, the columns of a tile"
    return None
