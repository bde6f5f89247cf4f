"""Whether calls of one program with the same operands have the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

RUNS = 8


@jax.jit
def _same(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns whether two arrays of a float or an integer dtype have the same bits."""
    first, second = (lax.bitcast_convert_type(v, f"uint{8 * v.dtype.itemsize}") for v in (a, b))
    return jnp.array_equal(first, second)


def compare_runs(f: Callable, args: tuple) -> dict[str, Any]:
    """Returns how often f(*args) ran after its first run, and which of its results then had other bits in any run."""
    first, found = f(*args), set()
    for _ in range(RUNS):
        again = jax.tree.map(_same, first, f(*args))
        found |= {jax.tree_util.keystr(path) for path, same in jax.tree_util.tree_leaves_with_path(again) if not same}
    return {"runs": RUNS, "differing": sorted(found)}
