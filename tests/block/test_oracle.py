"""The NumPy oracle of the tests against autodiff of `moax.reference`.

Covers: the block of tests/support/oracle/block.py with every gradient, for routers of both scores and both orders,
group limits, biases, a shared expert and dropped assignments.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moax
from moax import reference
from support import make_params, rel_norm, some
from support.block import BASE, BY_EXPERT, loss_of, make_x
from support.oracle.block import block

LOSSES = dict(aux_loss=1e-1, z_loss=1e-2)
CASES = {
    "groups": dict(
        router=moax.RouterConfig(score="sigmoid", num_groups=4, top_groups=2, bias=True, scale=2.5, **LOSSES)
    ),
    "dropped": dict(activation="swiglu_oai", shared_d_ff=0,
                    router=moax.RouterConfig(order="topk_then_score", logits_bias=True, **LOSSES)),
    "sigmoid late": dict(activation="geglu",
                         router=moax.RouterConfig(score="sigmoid", order="topk_then_score", **LOSSES)),
    "not normalized": dict(activation="gelu", router=moax.RouterConfig(normalize=False, **LOSSES)),
}  # fmt: skip


@pytest.mark.parametrize("name", some(CASES, 2))
def test_block(name):
    """Breaks if the oracle is wrong: tests of the block, of its gradients and of its drops believe it."""
    config = dataclasses.replace(BASE, **CASES[name])
    x, params = make_x(config).reshape(-1, config.d_model), make_params(config)
    kept = np.random.default_rng(0).random((len(x), config.top_k)) < 0.7 if name == "dropped" else None

    def total(x, params):
        y, stats = reference.moe(x, params, config, kept)
        return sum(loss_of(y, stats)), (y, stats)

    (dx, dparams), (y, stats) = jax.jit(jax.grad(total, (0, 1), has_aux=True))(x, params)
    dy = np.cos(np.arange(x.size, dtype=np.float64)).reshape(x.shape)
    want = block(x, params, config, dy, d_losses=(1, 1), kept=kept)
    assert rel_norm(y, want.y) < 1e-6 and rel_norm(dx, want.dx) < 2e-6
    assert set(want.dparams) == {f.name for f in dataclasses.fields(params) if getattr(params, f.name) is not None}
    for field, value in want.dparams.items():
        assert rel_norm(getattr(dparams, field), value, per=0 if field in BY_EXPERT else None) < 2e-6, field
    np.testing.assert_allclose(
        [stats.aux_loss, stats.z_loss], [want.stats[n] for n in ("aux_loss", "z_loss")], rtol=2e-6
    )
    np.testing.assert_array_equal(stats.tokens_per_expert, want.stats["tokens_per_expert"])
    assert int(stats.dropped) == want.stats["dropped"]


def test_a_comparison_passes_no_nan():
    """Breaks if a NaN, or a result of another shape, is near to anything."""
    for compare in (rel_norm,):
        assert not compare(np.array([np.nan]), np.ones(1)) < 1
        with pytest.raises(AssertionError, match="shape"):
            compare(jnp.ones(2), np.ones(3))
