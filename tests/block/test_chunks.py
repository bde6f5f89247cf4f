"""`moax.moe(chunks=n)`: what all tokens at once give, in less memory.

Covers: parts of one token, drops, remat and scan, memory and gathers of the compiled program. Parts on meshes are rows
of tests/block/test_moe.py, quantized parts of tests/block/test_moe_quantized.py.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import moax
from moax import inspect
from support import TOKENS, make_mesh, make_params, put, rel_norm, spec
from support.block import BASE, ONE_DEVICE, B, L, block, check, expected, make_x


def test_every_token_alone():
    """Breaks if tokens of one part take another's place, or a part's gradient of the weights is lost."""
    check(block("none", "", chunks=96)(), expected(BASE), ONE_DEVICE)


@pytest.mark.more
def test_without_biases_weighted_early():
    """Breaks if what a config leaves out has a gradient to sum."""
    config = dataclasses.replace(BASE, use_bias=False, weights_at="hidden")
    check(block("none", "", config, chunks=4)(), expected(config), ONE_DEVICE)


@pytest.mark.more
def test_bias_gradients_are_not_rounded():
    """Breaks if sums in float32 of a bias's gradient pass the dtype of the activations on their way to its own."""
    x, params = make_x(BASE).astype(jnp.bfloat16), make_params(BASE)

    def loss(params, chunks):
        return jnp.sum(moax.moe(x, params, BASE, chunks=chunks)[0].astype(jnp.float32) ** 2)

    got, want = (jax.jit(jax.grad(loss), static_argnums=1)(params, chunks) for chunks in (2, 1))
    assert rel_norm(got.bi, want.bi) < 2.0**-12 and rel_norm(got.bo, want.bo) < 2.0**-12


def test_capacity_is_that_of_a_part():
    """Breaks if drops of a part are not counted: each part keeps the even load of its own tokens and no more."""
    config = dataclasses.replace(BASE, capacity_factor=0.5, top_k=1, router=moax.RouterConfig())
    x, params = make_x(config), make_params(config)
    parts = [moax.moe(v, params, config)[1].dropped for v in jnp.split(x.reshape(-1, x.shape[-1]), 4)]
    _, stats = moax.moe(x, params, config, chunks=4)
    assert int(stats.dropped) == sum(map(int, parts)) > 0


@pytest.mark.more
def test_in_a_rematerialized_scan():
    """Breaks if parts, whose backward computes forward again, do not nest in a user's own remat and scan."""
    x, params = make_x(BASE), make_params(BASE)

    def loss(x, chunks):
        layer = jax.checkpoint(lambda x, _: (x + moax.moe(x, params, BASE, chunks=chunks)[0], None))
        return jnp.sum(jax.lax.scan(layer, x, None, length=2)[0] ** 2)

    got, want = (jax.jit(jax.grad(loss), static_argnums=1)(x, chunks) for chunks in (4, 1))
    assert rel_norm(got, want) < ONE_DEVICE


@pytest.mark.more
def test_memory_is_that_of_a_part():
    """Breaks if what a part leaves is kept: eight parts take a fifth of the memory at most, where tokens are what fills
    it; or if weights are gathered anew for each: data and scales of both in each direction, and of wi once more."""
    config = moax.MoEConfig(64, 64, 8, 4)
    mesh = make_mesh("2x4")
    x, params = jax.random.normal(jax.random.key(0), (8192, 64)), moax.init(jax.random.key(1), config)

    def loss(x, params, chunks):
        return jnp.sum(moax.moe(x, params, config, recipe="mxfp8", chunks=chunks)[0] ** 2)

    with jax.set_mesh(mesh):
        args = put(mesh, (spec("2x4", TOKENS), moax.param_specs(config)), (x, params))
        step = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
        found = {chunks: step.lower(*args, chunks).compile() for chunks in (1, 8)}
    used = {chunks: program.memory_analysis().temp_size_in_bytes for chunks, program in found.items()}
    assert used[8] < used[1] / 5
    gathers = {chunks: inspect.weight_gathers(inspect.collectives(program)) for chunks, program in found.items()}
    assert {chunks: len([c for c in of if c.times == 1]) for chunks, of in gathers.items()} == {1: 8, 8: 10}


@pytest.mark.parametrize("chunks", (5, 97))
def test_refuses_parts_that_do_not_divide(chunks):
    """Breaks if tokens would be lost or padded in silence."""
    with pytest.raises(ValueError, match=f"chunks={chunks} must divide the {B * L} tokens of a device"):
        moax.moe(make_x(BASE), make_params(BASE), BASE, chunks=chunks)
