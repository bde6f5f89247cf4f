"""The rows that the block makes with the kernels, read from its traced program: in which directions it quantizes them,
and whether it sorts them.

Covers: forward alone, with a gradient, with rows that backward makes again, frozen weights; narrow and wide experts.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import moax
from support import kernels_of, mark_rest
from support.gpus import pretend

CONFIG = moax.MoEConfig(256, 384, 4, 2)
# These are 512 assignments, and the padding of 4 experts to multiples of 128.
TOKENS = 256
SORTED = 1024
SORTED_BF16 = 768  # to multiples of 64
HOW = {"recipe": "fp8_block", "kernels": "hopper"}


def results(jaxpr):
    """The shapes of the FP8 results of all kernels of a jaxpr."""
    return [v.aval.shape for eqn in kernels_of(jaxpr) for v in eqn.outvars if v.aval.dtype == jnp.float8_e4m3fn]


@pytest.mark.parametrize(
    ("what", "want"),
    mark_rest([("forward", (1, 0)), ("again", (2, 2)), ("gradient", (2, 2)), ("kept", (2, 2)), ("frozen", (2, 0))], 1),
)
def test_makes_what_is_taken(monkeypatch, what, want):
    """Breaks if the rows of x or dy are quantized in a direction that no matmul takes: that is a third to a half of
    the time of their kernel."""
    pretend(monkeypatch)
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
        "kept": jax.grad(lambda x, params: forward(x, params, save_rows=True), (0, 1)),
        "frozen": jax.grad(frozen),
    }[what]
    shapes = results(jax.make_jaxpr(run)(x, params).jaxpr)
    assert (shapes.count((SORTED, CONFIG.d_model)), shapes.count((CONFIG.d_model, SORTED))) == want


@pytest.mark.parametrize(("d_ff", "sorts"), [(1536, False), (1600, True), (96, True)])
def test_sorts_rows_where_matmuls_do_not_gather(monkeypatch, d_ff, sorts):
    """Breaks if the matmuls of narrow experts get rows that lie sorted, which is slower, or if forward keeps sorted
    rows for backward; or if those of wide experts, or of a width that is no multiple of 64, gather."""
    pretend(monkeypatch)
    config = dataclasses.replace(CONFIG, d_ff=d_ff)
    params = jax.eval_shape(lambda: moax.init(jax.random.key(0), config, dtype=jnp.bfloat16))
    x = jax.ShapeDtypeStruct((TOKENS, config.d_model), jnp.bfloat16)
    rows = (SORTED_BF16, config.d_model)

    def run(x, params):
        return jnp.sum(moax.moe(x, params, config, kernels="hopper")[0].astype(jnp.float32))

    shapes = [v.aval.shape for eqn in kernels_of(jax.make_jaxpr(jax.grad(run))(x, params).jaxpr) for v in eqn.outvars]
    # The results of matmuls are o, and the gradient of the sorted rows.
    assert shapes.count(rows) == 2 + 2 * sorts
    saved = jax.tree.leaves(jax.eval_shape(lambda x, params: jax.vjp(run, x, params)[1], x, params))
    assert [v.shape for v in saved].count(rows) == sorts


def test_keeps_no_rows_that_a_kernel_makes_again(monkeypatch):
    """Breaks if forward keeps rows that backward makes by the kernel that quantizes them; `save_rows` decides by itself
    where it is a bool."""
    pretend(monkeypatch)
    params = jax.eval_shape(lambda: moax.init(jax.random.key(0), CONFIG, dtype=jnp.bfloat16))
    x = jax.ShapeDtypeStruct((TOKENS, CONFIG.d_model), jnp.bfloat16)

    def counted(save_rows):
        def run(x, params):
            options = dict(recipe="fp8_block", kernels="hopper", save_rows=save_rows)
            return moax.moe(x, params, CONFIG, **options)[0]

        saved = jax.tree.leaves(jax.eval_shape(lambda x, params: jax.vjp(run, x, params)[1], x, params))
        return [(v.shape, v.dtype) for v in saved].count(((CONFIG.d_model, SORTED), jnp.float8_e4m3fn))

    assert [counted(save_rows) for save_rows in (None, True, False)] == [False, True, False]
