"""What differs between the versions of JAX that moax admits."""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

# Before jax 0.12 every store of an array to a reference may be unoptimized.
store = getattr(plgpu, "store", lambda to, value, optimized: to.__setitem__(..., value))

# Before jax 0.11.2 Mosaic finds no layout for a stage of three dims that a product reads as two.
MERGES_DIMS = jax.__version_info__ >= (0, 11, 2)
