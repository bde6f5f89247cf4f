"""This script compiles a scan of layers for H200s that this machine does not have, and reads its schedule.

`make check-overlap` runs it. Layers are four dense products, a norm, and qwen3-30b's block, with remat by
`moax.CHECKPOINT_NAMES`. For `jax.lax.scan` and for `moax.scan`, forward and backward, it prints each collective of
weights in the body of a loop with the products that stand between its start and its done, and the memory of the
program. It exits with 1 where a collective of `moax.scan` has no product beside it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from check_sass import mesh_of_h200s
from jax.sharding import NamedSharding, PartitionSpec

import moax
from moax.models import MODELS

CONFIG, TOKENS, DENSE = MODELS["qwen3-30b"].config, 8192, 4
POLICY = jax.checkpoint_policies.save_only_these_names(*moax.CHECKPOINT_NAMES)
LARGE = 2**20  # bytes: a collective of weights, and no scale, count or loss


def norm(x):
    """Divides each row by its root mean square."""
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-6).astype(x.dtype)


def compiled(ours: bool, gpus: int, layers: int, recipe: str | None, unroll: int):
    """Returns the compiled loss and gradients of a scan of layers over fsdp."""
    mesh = mesh_of_h200s((gpus,), ("fsdp",))

    def place(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    def layer(x, weights):
        h = norm(x)
        for w in weights["dense"]:
            h = jax.nn.relu(moax.ops.dense(h, w, recipe=recipe, kernels="hopper"))
        x = x + h
        y, stats = moax.moe(norm(x), weights["moe"], CONFIG, recipe=recipe, kernels="hopper")
        return x + y, stats.aux_loss

    def loss(stack, x):
        if ours:
            y, aux = moax.scan(layer, x, stack, policy=POLICY, unroll=unroll)
        else:
            y, aux = jax.lax.scan(jax.checkpoint(layer, policy=POLICY, prevent_cse=False), x, stack, unroll=unroll)
        return jnp.mean(jnp.square(y.astype(jnp.float32))) + aux.sum()

    with jax.set_mesh(mesh):
        shapes = jax.eval_shape(lambda: moax.init(jax.random.key(0), CONFIG, dtype=jnp.bfloat16))
        specs = moax.param_specs(CONFIG)
        params = jax.tree.map(lambda p, s: place((layers, *p.shape), p.dtype, None, *s), shapes, specs)
        width = CONFIG.d_model
        dense = [place((layers, width, width), jnp.bfloat16, None, "fsdp") for _ in range(DENSE)]
        x = place((gpus * TOKENS, width), jnp.bfloat16, "fsdp")
        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        return step.lower({"dense": dense, "moe": params}, x).compile()


if __name__ == "__main__":
    import time
    t = time.time()
    ours, gpus, layers, recipe, unroll = eval(sys.argv[1])
    c = compiled(ours, gpus, layers, recipe, unroll)
    m = c.memory_analysis()
    print(sys.argv[1], "seconds", time.time() - t, "temp", m.temp_size_in_bytes / 1e9, "args", m.argument_size_in_bytes / 1e9, "out", m.output_size_in_bytes/1e9)
    Path(sys.argv[2]).write_text(c.as_text())
