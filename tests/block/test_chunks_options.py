"""`chunks` of the layers, of the language model and of the benchmark gets to the block.

Covers: nnx, linen, the language model and the benchmark, each given a number of parts that must be refused.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("flax")
pytest.importorskip("optax")
pytest.importorskip("rich")

import flax.nnx

import moax.linen
import moax.nnx
from moax.train import model as lm
from moax.train.presets import ModelConfig, TrainConfig
from moax.train.step import execution
from moax.tune.timing import Repeats
from support import make_params
from support.block import BASE, B, L, make_x


def by_nnx(config, x, chunks):
    return moax.nnx.MoE(config, chunks=chunks, rngs=flax.nnx.Rngs(0))(x)


def by_linen(config, x, chunks):
    return moax.linen.MoEBlock(config, chunks=chunks).init_with_output(jax.random.key(0), x)


def by_model(config, x, chunks):
    sizes = dict(d_model=config.d_model, d_ff=config.d_ff, num_experts=config.num_experts, top_k=config.top_k)
    run = TrainConfig(ModelConfig(**sizes, num_layers=1, num_heads=2, balance="none"), chunks=chunks)
    return lm.forward(
        lm.init(jax.random.key(0), run.model), None, jnp.zeros((B, L), jnp.int32), run.model, execution(run)
    )


def by_bench(config, x, chunks):
    pytest.importorskip("moax.kernels.hopper")  # the benchmarks measure its kernels
    from benchmarks.block import block as block_bench
    from benchmarks.block import mesh_worker
    from benchmarks.report import OURS

    asked = block_bench.request(block_bench.TINY[0], "none", [B * L], Repeats(), "xla", chunks)
    layer, _ = mesh_worker.layer_of(asked | {"exchange": "auto", "impl": OURS}, config, None)
    return layer(x, make_params(config))


@pytest.mark.loose
@pytest.mark.parametrize("way", (by_nnx, by_linen, by_model, by_bench))
def test_chunks_reach_the_block(way):
    """Breaks if a layer, the model or the benchmark takes `chunks` and leaves it, so that 97 parts are not refused."""
    with pytest.raises(ValueError, match=f"chunks=97 must divide the {B * L} tokens of a device"):
        jax.eval_shape(lambda x: way(BASE, x, 97), make_x(BASE))
