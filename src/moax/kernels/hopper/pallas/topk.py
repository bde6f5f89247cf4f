"""The kernel of the router's choice: the K largest of each row of logits.

    chosen[t], experts[t] = lax.top_k(logits[t], K)

With the logits (0.1, 0.4, 0.3, 0.4) and K = 2, the experts are (1, 3): of equal logits the lower expert comes first. A
warpgroup holds 64 rows in registers and takes the largest one K times. Logits compare as unsigned integers in the total
order of XLA: a NaN without a sign is above infinity, and -0.0 is below 0.0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from moax.checks import Unsupported
from moax.kernels.hopper.pallas.compat import store
from moax.mesh.collectives import with_vma_of_inputs

ROWS = 64  # the rows of a warpgroup
MOST = 256  # the most experts: a thread holds half as many logits in registers
STEP = 8  # the experts of a tile of registers


def supports(shape: tuple[int, ...], top_k: int) -> bool:
    """Returns whether the kernel takes logits [T, E] of this shape."""
    rows, experts = shape
    return isinstance(rows, int) and rows >= ROWS and experts % STEP == 0 and top_k <= experts <= MOST


@with_vma_of_inputs
def top_k_rows(logits: Float[Array, "T E"], top_k: int) -> tuple[Float[Array, "T K"], Int[Array, "T K"]]:
    """chosen[t], experts[t] = lax.top_k(logits[t], K).

    Args:
      logits: [T, E] f32, T at least 64, E a multiple of 8 and at most 256.
      top_k: K, at most E.

    Returns:
      chosen [T, K] f32, the largest first, and experts [T, K] i32, which are below E whatever the logits hold.

    Raises:
      Unsupported: the logits have another shape or another dtype.
    """
    rows, experts = logits.shape
    if not supports(logits.shape, top_k) or logits.dtype != jnp.float32:
        raise Unsupported(
            f"logits are {logits.dtype} {logits.shape} with K={top_k}; the kernel takes float32, at least {ROWS} rows, "
            f"and experts in multiples of {STEP} up to {MOST}"
        )

    def top_k_rows(logits, chosen, out):
        # Where 64 does not divide T, the last block repeats rows of the block before, and both write the same.
        first = jnp.minimum(lax.axis_index("i") * ROWS, rows - ROWS)
        values = plgpu.load(logits.at[pl.ds(first, ROWS)], layout=plgpu.Layout.WGMMA, optimized=False)
        bits = lax.bitcast_convert_type(values, jnp.uint32)
        sign = jnp.uint32(1 << 31)
        keys = bits ^ jnp.where(bits >= sign, jnp.uint32(0xFFFFFFFF), sign)
        below = plgpu.layout_cast(lax.broadcasted_iota(jnp.uint32, keys.shape, 1), plgpu.Layout.WGMMA)
        below = jnp.uint32(experts) - below  # it is largest for the lowest expert, and never 0
        for k in range(top_k):
            most = jnp.max(keys, axis=1)
            value = lax.bitcast_convert_type(most ^ jnp.where(most >= sign, sign, jnp.uint32(0xFFFFFFFF)), jnp.float32)
            store(chosen.at[pl.ds(first, ROWS), k], value, optimized=False)
            here = keys == lax.broadcast_in_dim(most, keys.shape, [0])
            best = jnp.max(jnp.where(here, below, jnp.uint32(0)), axis=1)
            store(out.at[pl.ds(first, ROWS), k], (jnp.uint32(experts) - best).astype(jnp.int32), optimized=False)
            if k + 1 < top_k:
                keys = jnp.where(below == lax.broadcast_in_dim(best, keys.shape, [0]), jnp.uint32(0), keys)

    return plgpu.kernel(
        top_k_rows,
        out_type=tuple(jax.ShapeDtypeStruct((rows, top_k), dtype) for dtype in (jnp.float32, jnp.int32)),
        grid=(-(-rows // ROWS),),
        grid_names=("i",),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )(logits)
