"""The limits of the machine, which every run measures before its rows.

bf16, fp8   a dense matmul of 8192^3, operands and result in device memory
memory      the faster of a negation and a copy of several GB, read plus written
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.report import Row, why
from benchmarks.timing import STANDARD, Repeats, kernel_time
from moax.kernels.device import find_device

SIZE = 8192
COPY_ELEMENTS = 3 << 28  # float32 elements: 3.2 GB are read and 3.2 GB written


def measure(
    names: tuple[str, ...] = ("bf16", "fp8", "memory"),
    repeats: Repeats = STANDARD,
) -> dict[str, Any]:
    """Measures limits; without a GPU the sizes are small, and the values mean nothing."""
    on_gpu = find_device().platform == "gpu"
    size, copied = (SIZE, COPY_ELEMENTS) if on_gpu else (256, 1 << 16)
    limits = {}
    for name in names:
        if name == "memory":
            method = f"copy of {copied * 4 / 1e9:.2g} GB"
        else:
            method = f"dense {size}^3"
        entry: dict[str, Any] = {
            "value": None,
            "unit": "TB/s" if name == "memory" else "TFLOP/s",
            "how": method,
        }
        try:
            if name == "memory":
                fs, args, work = _copies(copied)
            else:
                fs, args, work = _product(size, name)
            timing = min((kernel_time(f, args, repeats) for f in fs), key=lambda timing: timing.us)
            entry |= {"value": work / timing.us * 1e-6, "us": timing.us, "method": timing.method}
        except Exception as error:  # The rows are useful without this limit.
            entry["note"] = why(error)
        limits[name] = entry
    return limits


def rate(row: Row, limits: dict[str, Any], flops: float, nbytes: float = 0.0) -> None:
    """Fills the rates of a measured row, the limit that binds it, and the fraction of that limit that it reaches."""
    if row.us is None:
        return
    row.tflops = flops / row.us * 1e-6
    row.tb_s = nbytes / row.us * 1e-6 or None
    # mxfp8 dequantizes before matmuls.
    product = "bf16" if row.recipe in ("none", "mxfp8") else "fp8"
    rates = {product: flops, "memory": nbytes}
    known = {n: work / limits[n]["value"] * 1e-6 for n, work in rates.items() if n in limits and limits[n]["value"]}
    if known:
        row.limit = max(known, key=lambda name: known[name])
        row.fraction = known[row.limit] / row.us


def _product(size: int, name: str):
    """Returns (functions, arguments, flops) of a dense matmul."""
    dtype = jnp.float8_e4m3fn if name == "fp8" else jnp.bfloat16
    a, b = (jax.random.normal(key, (size, size)).astype(dtype) for key in jax.random.split(jax.random.key(0)))

    @jax.jit
    def product(a, b):  # FP8 tensor cores need the contracted dim of b contiguous.
        return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)

    return (product,), (a, b), 2 * size**3


def _copies(elements: int):
    """Returns (functions, arguments, bytes) of a negation and a copy; the faster one counts."""
    x = jax.random.normal(jax.random.key(0), (elements,), jnp.float32)
    return (jax.jit(jnp.negative), jax.jit(jnp.copy)), (x,), 2 * x.nbytes
