"""Any activation in the Hopper kernels: they take its jaxpr, and XLA computes the operations that Mosaic does not know.

Covers: every name, lowered for CUDA; one activation that falls back, forward and backward, and what the log says.
"""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moax.backend import log_once
from moax.config import GATED, UNGATED, gates_of
from moax.kernels.groups import zero_rows
from moax.kernels.hopper import activate, activate_grad_quantize
from moax.kernels.hopper.formats import find_groups, make_blocks
from moax.kernels.hopper.pallas.activation import activate_grad_rows, why_not_in_kernels
from moax.ops.activation import activation_of
from moax.recipe import FULL, Recipes
from support import lower, some

FALLS_BACK = {"elu", "selu", "celu", "mish"}
NAMES = [name for name in GATED + UNGATED if name not in FALLS_BACK]


def test_which_fall_back():
    """Breaks if an activation leaves the kernels, or if one that they cannot compute is taken for one that they can."""
    found = {n for n in GATED + UNGATED if why_not_in_kernels(activation_of(n), gates_of(n) == 2) is not None}
    assert found == FALLS_BACK


@pytest.mark.parametrize("name", some(NAMES[::-1], 1))
def test_lowers_for_cuda(name):
    """Breaks if Mosaic does not lower an operation that `KNOWN` says it knows."""
    gated = gates_of(name) == 2
    h, d_a = (jax.ShapeDtypeStruct((256, 128 * n), jnp.bfloat16) for n in (1 + gated, 1))
    sizes, weights = jax.ShapeDtypeStruct((2,), jnp.int32), jax.ShapeDtypeStruct((256,), jnp.float32)
    act = activation_of(name)
    lower(lambda h, d, s, w: activate_grad_rows(h, d, make_blocks(s, 256), act, weights=w), h, d_a, sizes, weights)


def test_fall_back_to_xla(caplog):
    """Breaks if an activation that the kernels do not know fails, is silently slow, or lets NaN of padding through."""
    act, groups = activation_of("mish"), find_groups(jnp.array([70, 128], jnp.int32), 128, 256)
    real = np.asarray(groups.real)
    rng = np.random.default_rng(0)
    h = np.where(real[:, None, None], rng.normal(size=(256, 1, 64)), np.nan)
    d_a = np.where(real[:, None], rng.normal(size=(256, 64)), np.nan)
    h, d_a, weights = jnp.asarray(h, jnp.bfloat16), jnp.asarray(d_a, jnp.bfloat16), jnp.asarray(real, jnp.float32) / 2
    log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        a = activate(h, act, FULL, groups, weights=weights, amax_over=())
        back, d_h, _, inner = activate_grad_quantize(h, d_a, act, Recipes(), groups, weights=weights, amax_over=())
    wide, d_wide = (zero_rows(v, groups.real).astype(jnp.float32) for v in (h[:, 0], d_a))
    want, pull = jax.vjp(jax.nn.mish, wide)
    for got, wanted in ((a, want / 2), (back, want / 2), (d_h.reshape(256, -1), pull(d_wide / 2)[0])):
        np.testing.assert_allclose(np.asarray(got, np.float32), wanted, rtol=2e-2, atol=1e-3)
    np.testing.assert_allclose(inner[real], (want * d_wide).sum(1)[real], rtol=2e-2, atol=2e-2)
    assert any("do not know" in r.getMessage() and "XLA computes it" in r.getMessage() for r in caplog.records)
