"""Latent experts: what crosses the mesh, and their adapters. tests/block/test_moe.py has their numbers.

Covers: weight gathers of fp8_block; the width of dispatched rows; adapters and kept weights.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moax
from moax import inspect, lora
from moax.mesh.specs import named
from moax.params import param_shapes
from support import make_mesh, make_params, mark_rest, random, rel_norm
from support.block import BASE, make_x

LATENT = dataclasses.replace(
    BASE,
    d_model=256,
    d_ff=256,
    d_latent=128,
    use_bias=False,
    shared_d_ff=64,
)


@pytest.mark.parametrize("backward", mark_rest([False, True], 1))
def test_weights_cross_as_bytes_and_rows_in_the_latent_width(backward):
    """Breaks if a projection is gathered unquantized, or whole rows of x travel to the experts."""
    mesh = make_mesh("2x4")
    settings = dict(recipe="fp8_block", exchange="all_gather", backward=backward)
    traffic = inspect.inspect_block(LATENT, tokens=256, mesh=mesh, **settings)
    sharding = named(mesh, moax.param_specs(LATENT, mesh=mesh))
    weights = jax.tree.map(
        lambda shape, to: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=to),
        param_shapes(LATENT),
        sharding,
        is_leaf=lambda shape: isinstance(shape, tuple),
    )
    weights = {name: getattr(weights, name) for name in ("wi", "wo", "latent_down", "latent_up")}
    inspect.assert_no_wide_weight_gather(traffic, axes="fsdp", weights=weights, mesh=mesh)
    shapes = {c.shape for c in traffic if c.kind == "all-gather" and c.axes == ("ep",) and c.dtype == "bfloat16"}
    assert (128, 128) in shapes and not {shape for shape in shapes if shape[-1] == 256}
    carried = [v.name for c in inspect.weight_gathers(traffic) if c.dtype == "uint8" for v in c.carries]
    assert {"latent_down", "latent_up"} <= {name.rpartition(".")[2] for name in carried}


@pytest.mark.more
def test_adapters_and_kept_weights():
    """Breaks if adapters of latent experts do not have the latent width, or kept weights are other weights."""
    x = make_x(LATENT)
    params = make_params(LATENT)
    adapters = lora.init(jax.random.key(0), LATENT, 4)
    adapters = dataclasses.replace(adapters, wi_b=jnp.asarray(random(1, *adapters.wi_b.shape)))
    assert adapters.wi_a.shape == (8, 128, 4) and adapters.wo_b.shape == (8, 4, 128)
    y, _ = moax.moe(x, params, LATENT, adapters=adapters)
    merged, _ = moax.moe(x, lora.merge(params, adapters), LATENT)
    assert rel_norm(y, merged) < 2e-6
    quantized = moax.quantize_params(params, LATENT, recipe="fp8_block", dtype=x.dtype)
    np.testing.assert_array_equal(
        moax.moe(x, params, LATENT, recipe="fp8_block", quantized=quantized)[0],
        moax.moe(x, params, LATENT, recipe="fp8_block")[0],
    )
