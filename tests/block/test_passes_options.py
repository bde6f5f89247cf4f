"""`buffer_factor` of the layers, of the language model and of the benchmark gets to the block.

Covers: nnx, linen, the language model and the benchmark, each with a factor that needs loops of passes and with None.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")
import flax.nnx

import moax.linen
import moax.nnx
from benchmarks.timing import Repeats
from lm import model as lm
from lm.config import ModelConfig, TrainConfig
from support import make_params
from support.block import BASE, B, L, make_x


def by_nnx(config, x, buffer_factor):
    return moax.nnx.MoE(config, buffer_factor=buffer_factor, rngs=flax.nnx.Rngs(0))(x)


def by_linen(config, x, buffer_factor):
    return moax.linen.MoEBlock(config, buffer_factor=buffer_factor).init_with_output(jax.random.key(0), x)


def by_model(config, x, buffer_factor):
    sizes = dict(d_model=config.d_model, d_ff=config.d_ff, num_experts=config.num_experts, top_k=config.top_k)
    run = TrainConfig(ModelConfig(**sizes, num_layers=1, num_heads=2, balance="none"), buffer_factor=buffer_factor)
    return lm.forward(lm.init(jax.random.key(0), run.model), None, jnp.zeros((B, L), jnp.int32), run)


def by_bench(config, x, buffer_factor):
    pytest.importorskip("moax.kernels.hopper")  # the benchmarks measure its kernels
    from benchmarks.block import block as block_bench
    from benchmarks.block import block_worker
    from benchmarks.report import OURS

    asked = block_bench.request(block_bench.TINY[0], "none", [B * L], Repeats(), "xla", buffer_factor)
    layer, _ = block_worker.layer_of(asked | {"exchange": "auto", "impl": OURS}, config, None)
    return layer(x, make_params(config), None)


@pytest.mark.loose
@pytest.mark.parametrize("way", (by_nnx, by_linen, by_model, by_bench))
def test_buffer_factor_reaches_the_block(way):
    """Breaks if a layer, the model or the benchmark takes `buffer_factor` and leaves it, so that the program of a small
    factor has no loop of passes, or the program of the worst case has one."""
    programs = {f: str(jax.make_jaxpr(lambda x, f=f: way(BASE, x, f))(make_x(BASE))) for f in (0.05, None)}
    assert "while[" in programs[0.05] and "while[" not in programs[None]
