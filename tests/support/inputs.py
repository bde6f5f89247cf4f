"""Arrays and parameters drawn by NumPy: each shape that jax.random draws would cost a compilation."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

import moax
from moax.params import param_shapes


def random(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Returns a standard normal array."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def integers(seed: int, *shape: int, bound: int = 8) -> np.ndarray:
    """Returns small integers as float32: their sums and products are exact in any order."""
    return np.random.default_rng(seed).integers(-bound, bound + 1, shape).astype(np.float32)


def make_params(config: moax.MoEConfig, seed: int = 0, bias: float = 0.3) -> moax.MoEParams:
    """Returns weights of the size that `moax.init` gives them, and biases that are not 0, by NumPy: each shape that
    jax.random draws costs a compilation."""
    contracted = {"router": 0, "wi": 1, "wo": 1, "shared_wi": 0, "shared_wo": 0, "shared_gate": 0}
    contracted |= {"latent_down": 0, "latent_up": 0}

    def draw(index, name, shape):
        scale = shape[contracted[name]] ** -0.5 if name in contracted else bias
        return jnp.asarray(scale * random(100 * seed + index, *shape))

    shapes = dataclasses.asdict(param_shapes(config))
    return moax.MoEParams(**{n: s and draw(i, n, s) for i, (n, s) in enumerate(shapes.items())})
