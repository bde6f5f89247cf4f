"""The router's own input, against the reference. Covers: every gradient on a mesh; a wrong shape."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moax
from support import TOKENS, make_mesh, make_params, put, random, rel_norm, spec
from support.block import BASE, loss_of, make_x


@pytest.mark.more
def test_router_input():
    """Breaks if the router reads x where it has an input of its own (Gemma 4), or either gradient goes astray."""
    config = dataclasses.replace(BASE, use_bias=False)
    x, params = make_x(config), make_params(config)
    other = jnp.asarray(random(3, *x.shape))

    def graded(layer, *operands):
        loss = lambda x, other, params: sum(loss_of(*layer(x, params, config, router_input=other)))  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*operands)

    want = graded(moax.reference.moe, x, other, params)
    mesh, tokens = make_mesh("2x4"), spec("2x4", TOKENS)
    with jax.set_mesh(mesh):
        got = graded(moax.moe, *put(mesh, (tokens, tokens, moax.param_specs(config)), (x, other, params)))
    for have, need in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert rel_norm(have, np.asarray(need)) < 5e-6


def test_router_input_must_fit():
    """Breaks if an input of another shape is broadcast, or fails without its name."""
    x = make_x(BASE)
    with pytest.raises(ValueError, match=r"router_input has shape \(16, 6, 31\)"):
        moax.moe(x, make_params(BASE), BASE, router_input=x[..., :-1])
