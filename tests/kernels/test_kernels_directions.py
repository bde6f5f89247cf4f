"""The directions in which the block quantizes rows with the kernels, read from its traced program.

Covers: forward alone, with a gradient, with rows that backward makes again, and frozen weights.
"""

import jax
import jax.numpy as jnp
import pytest

import moax
from moax import backend
from support import kernels_of, some

CONFIG = moax.MoEConfig(256, 384, 4, 2)
TOKENS, SORTED = 256, 1024  # 512 assignments, and the padding of 4 experts to multiples of 128
HOW = {"recipe": "fp8_block", "kernels": "hopper"}


def results(jaxpr):
    """The shapes of the FP8 results of all kernels of a jaxpr."""
    return [v.aval.shape for eqn in kernels_of(jaxpr) for v in eqn.outvars if v.aval.dtype == jnp.float8_e4m3fn]


@pytest.mark.parametrize(
    ("what", "want"),
    some([("forward", (1, 0)), ("again", (2, 2)), ("gradient", (2, 2)), ("frozen", (2, 0))], 1),
)
def test_makes_what_is_taken(monkeypatch, what, want):
    """Breaks if the rows of x or dy are quantized in a direction that no product takes: that is a third to a half of
    the time of their kernel."""
    monkeypatch.setattr(backend, "on_hopper", lambda: True)
    params = jax.eval_shape(lambda: moax.init(jax.random.key(0), CONFIG, dtype=jnp.bfloat16))
    x = jax.ShapeDtypeStruct((TOKENS, CONFIG.d_model), jnp.bfloat16)

    def forward(x, params, **options):
        return jnp.sum(moax.moe(x, params, CONFIG, **HOW, **options)[0].astype(jnp.float32))

    def frozen(x, params):
        adapters = moax.lora.init(jax.random.key(0), CONFIG, 4)
        return forward(x, params, adapters=adapters)

    run = {
        "forward": forward,
        "gradient": jax.grad(forward, (0, 1)),
        "again": jax.grad(lambda x, params: forward(x, params, save_rows=False), (0, 1)),
        "frozen": jax.grad(frozen),
    }[what]
    shapes = results(jax.make_jaxpr(run)(x, params).jaxpr)
    assert (shapes.count((SORTED, CONFIG.d_model)), shapes.count((CONFIG.d_model, SORTED))) == want
