"""Two runs of one program on one mesh give the same bits, forward and backward, and so does each `save_rows`.

Covers: recipes with rows that forward keeps, or that backward makes again; transports x recipes x kinds of meshes, with
biases, a shared expert, losses and several passes; adapters beside kept weights. tests/kernels/test_bits_gpu.py does
the same on GPUs.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moax
from moax import lora
from support import make_mesh, make_params, mark_rest, put, random
from support.bits import differing
from support.block import BASE, block, make_x

CASES = [
    ("custom_partitioning", "2x4", "all_gather", "fp8_block", 1.25),
    ("custom_partitioning", "2x4", "all_to_all", None, 0.3),
    ("explicit", "dp2x2x2", "all_to_all", "mxfp8", 1.25),
    ("shard_map", "tp2x2x2", "all_gather", "fp8_block", 1.25),
    ("none", "", "auto", "fp8_block", 0.5),
]


@pytest.mark.parametrize("recipe", mark_rest(["fp8_block", None, "mxfp8"], 1))
def test_of_rows_made_again(recipe):
    """Breaks if rows that backward makes again are rounded otherwise than those that forward keeps."""
    config = moax.MoEConfig(d_model=128, d_ff=128, num_experts=4, top_k=2)
    params = moax.init(jax.random.key(0), config, dtype=jnp.bfloat16)
    x = jnp.asarray(random(0, 96, 128), jnp.bfloat16)

    def run(save_rows):
        def loss(x, params):
            y, _ = moax.moe(x, params, config, recipe=recipe, save_rows=save_rows)
            return jnp.square(y.astype(jnp.float32)).sum()

        return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, (0, 1)))(x, params))

    saved_gradients = run(True)
    for save_rows in (None, False):
        for got, want in zip(run(save_rows), saved_gradients, strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.more
@pytest.mark.parametrize(("way", "mesh", "exchange", "recipe", "buffer_factor"), CASES)
def test_of_the_block(way, mesh, exchange, recipe, buffer_factor):
    """Breaks if a sum is taken in the order in which devices or threads arrive, or a value of padding reaches a result:
    a run could not be repeated, and a difference of two runs would tell nothing."""
    step = block(way, mesh, BASE, exchange=exchange, recipe=recipe, buffer_factor=buffer_factor)
    other = jax.tree.map(lambda v: v * jnp.nan, step.args[0])
    results = differing(
        step.placed, 3, lambda: jax.block_until_ready(dataclasses.replace(step, args=(other, *step.args[1:])).placed())
    )
    assert not results


@pytest.mark.more
def test_of_adapters():
    """Breaks if the products of adapters, or kept weights, are summed in an order that varies."""
    config = dataclasses.replace(BASE, shared_d_ff=0)
    mesh = make_mesh("2x4")
    params = make_params(config)
    adapters = lora.init(jax.random.key(0), config, 3)
    adapters = dataclasses.replace(adapters, wi_b=jnp.asarray(random(1, *adapters.wi_b.shape)))

    def loss(adapters, x, params, quantized):
        y, _ = moax.moe(
            x,
            params,
            config,
            recipe="fp8_block",
            quantized=quantized,
            adapters=adapters,
        )
        return jnp.sum(jnp.sin(y))

    with jax.set_mesh(mesh):
        params = put(mesh, moax.param_specs(config), params)
        quantized = moax.quantize_params(params, config, recipe="fp8_block", dtype=jnp.float32)
        frozen = dataclasses.replace(params, wi=None, wo=None)
        step = jax.jit(jax.grad(loss, (0, 1)))
        assert not differing(lambda: step(adapters, make_x(config), frozen, quantized), 3)
