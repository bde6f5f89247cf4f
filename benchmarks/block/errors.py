"""The errors of a block: y and every gradient against `moax.reference`, which computes in float32.

    error = |v - v32| / |v32|        v: y, dx, or the gradient of router, wi or wo; v32: the same in float32
    worst = the largest error of one expert        of its column of router, and of its matrices

`moax.reference` runs every expert on every token, so only a part of the tokens takes part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import moax
from benchmarks.report import why
from moax import reference

TOKENS = 2048  # of the comparison
NAMES = ("y", "dx", "router", "wi", "wo")
EXPERTS = {"router": 1, "wi": 0, "wo": 0}  # the dim of the experts
# The program runs once. XLA would compile and time many kernels of its own for each product in float32; cuBLAS has one.
ONCE = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def build(block: Callable, config: moax.MoEConfig, shapes, quantized) -> Callable[..., dict[str, Any]]:
    """Compiles the comparison, and returns it as a function (x, dy, params, quantized) -> {name: {error, worst}}.

    `block` returns (y, stats). Where it does not compile, or does not fit, the function returns {"note": the reason}.
    """

    def gradients(f, x, params, dy):
        y, pull = jax.vjp(lambda *args: f(*args)[0], x, params)
        dx, d = pull(dy.astype(y.dtype))
        return dict(zip(NAMES, (y, dx, d.router, d.wi, d.wo), strict=True))

    @jax.jit
    def ours(x, dy, params, quantized):
        return gradients(partial(block, quantized=quantized), x, params, dy)

    @partial(jax.jit, compiler_options=ONCE)
    def against_float32(got, x, dy, params):
        x, dy, params = jax.tree.map(lambda v: v.astype(jnp.float32), (x, dy, params))
        want = gradients(partial(reference.moe, config=config), x, params, dy)
        return {name: squares(name, got[name], want[name]) for name in NAMES}

    x = jax.ShapeDtypeStruct((TOKENS, config.d_model), jnp.bfloat16)
    try:
        first = ours.lower(x, x, shapes, quantized).compile()
        then = against_float32.lower(jax.eval_shape(ours, x, x, shapes, quantized), x, x, shapes).compile()
    except Exception as error:
        reason = why(error)
        return lambda *_: {"note": reason}

    def run(x, dy, params, quantized) -> dict[str, Any]:
        try:
            found = jax.device_get(then(first(x, dy, params, quantized), x, dy, params))
        except Exception as error:
            return {"note": why(error)}
        return {name: summary(*found[name]) for name in NAMES}

    return run


def squares(name: str, got: jax.Array, want: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of squares of the difference and of `want`, over all dims but that of the experts."""
    others = tuple(dim for dim in range(want.ndim) if dim != EXPERTS.get(name))
    off = got.astype(jnp.float32) - want
    return jnp.square(off).sum(others), jnp.square(want).sum(others)


def summary(off: np.ndarray, norm: np.ndarray) -> dict[str, float]:
    """Returns {error, worst} of sums of squares [E], and {error} of sums []."""
    by_expert = [root(*pair) for pair in zip(np.ravel(off), np.ravel(norm), strict=True)]
    return {"error": root(off.sum(), norm.sum())} | ({"worst": max(by_expert)} if off.ndim else {})


def root(off: float, norm: float) -> float:
    """Returns the error of a difference and a norm that are squared. A result that should be 0 and is not is infinitely
    wrong."""
    return float(np.sqrt(off / norm)) if norm > 0 else float("inf" if off > 0 else 0.0)
