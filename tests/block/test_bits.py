"""Two runs of one program on one mesh give the same bits, forward and backward.

Covers: transports x recipes x kinds of meshes, with biases, a shared expert, losses and several passes; adapters beside
kept weights. tests/kernels/test_bits_gpu.py does the same on GPUs.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import moax
from moax import lora
from support import make_mesh, make_params, put, random
from support.bits import differing
from support.block import BASE, block, make_x

CASES = [
    ("custom_partitioning", "2x4", "all_gather", "fp8_block", 1.25),
    ("custom_partitioning", "2x4", "all_to_all", None, 0.3),
    ("explicit", "dp2x2x2", "all_to_all", "mxfp8", 1.25),
    ("shard_map", "tp2x2x2", "all_gather", "fp8_tensor", 1.25),
    ("none", "", "auto", "fp8_block", 0.5),
]


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
