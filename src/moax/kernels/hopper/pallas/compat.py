"""What differs between the versions of JAX that moax admits."""

from jax.experimental.pallas import mosaic_gpu as plgpu

# Before jax 0.12 every store of an array to a reference may be unoptimized.
store = getattr(plgpu, "store", lambda to, value, optimized: to.__setitem__(..., value))
