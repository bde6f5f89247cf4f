"""The machine's limits, measured in the same run as what is compared with them.

bf16, fp8   a dense product of 8192^3, operands and result in device memory
memory      the faster of a negation and a copy of several GB, read plus written
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.report import why
from moax import backend
from moax.tune.timing import STANDARD, Repeats, kernel_time

SIZE = 8192
COPY_ELEMENTS = 3 << 28  # float32: 3.2 GB read, as much written


def measure(names: tuple[str, ...] = ("bf16", "fp8", "memory"), repeats: Repeats = STANDARD) -> dict[str, Any]:
    """{name: {value, unit, how, us}}; off the GPU sizes are small, and only say that it runs."""
    on_gpu = backend.platform() == "gpu"
    size, copied = (SIZE, COPY_ELEMENTS) if on_gpu else (256, 1 << 16)
    found = {}
    for name in names:
        how = f"copy of {copied * 4 / 1e9:.2g} GB" if name == "memory" else f"dense {size}^3"
        entry: dict[str, Any] = {"value": None, "unit": "TB/s" if name == "memory" else "TFLOP/s", "how": how}
        try:
            fs, args, work = _copies(copied) if name == "memory" else _product(size, name)
            timing = min((kernel_time(f, args, repeats) for f in fs), key=lambda timing: timing.us)
            entry |= {"value": work / timing.us * 1e-6, "us": timing.us, "method": timing.method}
        except Exception as error:  # a limit that cannot be measured is none; the rows are still worth having
            entry["note"] = why(error)
        found[name] = entry
    return found


def fraction(limits: dict[str, Any], us: float, flops: float, nbytes: float, product: str) -> tuple[str, float | None]:
    """(the limit that binds, least time by it over `us`) of work that does `flops` and moves `nbytes` at least."""
    rates = {product: flops, "memory": nbytes}
    known = {n: work / limits[n]["value"] * 1e-6 for n, work in rates.items() if n in limits and limits[n]["value"]}
    if not known:
        return "", None
    binding = max(known, key=lambda name: known[name])
    return binding, known[binding] / us


def _product(size: int, name: str):
    dtype = jnp.float8_e4m3fn if name == "fp8" else jnp.bfloat16
    a, b = (jax.random.normal(key, (size, size)).astype(dtype) for key in jax.random.split(jax.random.key(0)))

    @jax.jit
    def product(a, b):  # b as FP8 tensor cores want it: the contracted dim contiguous
        return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)

    return (product,), (a, b), 2 * size**3


def _copies(elements: int):
    x = jax.random.normal(jax.random.key(0), (elements,), jnp.float32)
    return (jax.jit(jnp.negative), jax.jit(jnp.copy)), (x,), 2 * x.nbytes
