"""This script runs each quantizing kernel once, at the sizes of one of 4 ranks of Qwen3-30B. ncu reads their counters:

ncu --clock-control none --kernel-name regex:quantize --metrics NAMES python3 scripts/counters.py

The order is: rows, columns, both, both of gathered rows, the gradient of SwiGLU. The NAMES and the values that were
read are in benchmarks/results/h200_counters.json.
"""

import jax
import jax.numpy as jnp

from moax.kernels.hopper.formats import make_blocks
from moax.kernels.hopper.pallas import activation, quantize
from moax.models import MODELS

QWEN3 = MODELS["qwen3-30b"]
SHAPE = QWEN3.on_rank(4, tokens=8192)
ROWS, WIDTH, HIDDEN, GROUPS, TOP_K = SHAPE.rows, SHAPE.d_model, SHAPE.d_ff, SHAPE.groups, QWEN3.config.top_k


def main() -> None:
    """Runs the kernels."""
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (ROWS, WIDTH), jnp.bfloat16)
    tokens = jax.random.normal(keys[1], (ROWS // TOP_K, WIDTH), jnp.bfloat16)
    source = jax.random.randint(keys[2], (ROWS,), 0, ROWS // TOP_K)
    h = jax.random.normal(keys[3], (ROWS, 2 * HIDDEN), jnp.bfloat16)
    d_a = jax.random.normal(keys[4], (ROWS, HIDDEN), jnp.bfloat16)
    weights = jnp.ones((ROWS,), jnp.float32)

    def blocks():
        return make_blocks(jnp.full((GROUPS,), ROWS // GROUPS, jnp.int32), ROWS)

    def act(gate, up):
        return jax.nn.silu(gate) * up

    for rows, columns in ((True, False), (False, True), (True, True)):
        one = jax.jit(lambda x, on=(rows, columns): quantize.quantize_rows(x, blocks(), rows=on[0], columns=on[1]))
        jax.block_until_ready(one(x))
    gathered = jax.jit(lambda x, at: quantize.quantize_rows(x, blocks(), source=at))
    jax.block_until_ready(gathered(tokens, source))
    grad = jax.jit(lambda h, d: activation.activate_grad_quantize(h, d, blocks(), act, weights=weights))
    jax.block_until_ready(grad(h, d_a))


if __name__ == "__main__":
    main()
