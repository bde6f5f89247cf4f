"""Two runs of one program on the same GPUs give the same bits, forward and backward (`make test-gpu`).

Covers: transports x recipes x implementations on 1, 2 and 4 GPUs, with skewed routing and several passes. What cannot
promise it is in docs/limits.md, and is left out here: all_to_all between more than two ranks, and the gradients of
biases by the kernels of XLA.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import moax
from support import make_params, random
from support.bits import differing
from support.gpus import alone, dirty

pytestmark = [pytest.mark.gpu, pytest.mark.loose]
MESHES = {"1x1": (1, 1), "2x1": (2, 1), "1x2": (1, 2), "2x2": (2, 2), "1x4": (1, 4)}
WHERE = [
    *[(mesh, "all_gather") for mesh in MESHES],
    *[(mesh, exchange) for mesh in ("1x2", "2x2") for exchange in ("all_to_all", "one_sided")],
    ("1x4", "one_sided"),
]
HOW = [
    ("auto", None, 1.25),
    ("auto", "fp8_block", 1.25),
    ("auto", "fp8_block", 0.5),
    ("auto", "mxfp8", 1.25),
    ("auto", "fp8_tensor", 1.25),
    ("xla", "fp8_block", 0.5),
]
CONFIG = moax.MoEConfig(512, 768, 16, 3, router=moax.RouterConfig(aux_loss=1e-2))


def gradients(x, params, **options):
    def loss(x, params):
        y, stats = moax.moe(x, params, CONFIG, **options)
        return jnp.sum(jnp.sin(y.astype(jnp.float32))) + stats.aux_loss, (y, stats)

    return jax.grad(loss, (0, 1), has_aux=True)(x, params)


@pytest.mark.parametrize(("kernels", "recipe", "buffer_factor"), HOW)
@pytest.mark.parametrize(("mesh", "exchange"), WHERE)
def test_of_the_block(mesh, exchange, kernels, recipe, buffer_factor):
    """Breaks if a sum is taken in the order in which threads, blocks or GPUs arrive, a row is read before it has come,
    or what was in memory before reaches a result."""
    fsdp, ep = MESHES[mesh]
    if jax.device_count() < fsdp * ep:
        pytest.skip(f"{fsdp * ep} GPUs, this machine has {jax.device_count()}")
    if exchange == "one_sided" and kernels == "xla":
        pytest.skip("XLA cannot write to another GPU")
    on = jax.sharding.Mesh(np.array(jax.devices()[: fsdp * ep]).reshape(fsdp, ep), ("fsdp", "ep"))
    with jax.set_mesh(on):
        where = moax.param_specs(CONFIG)
        params = jax.tree.map(
            lambda v, s: jax.device_put(v.astype(jnp.bfloat16), NamedSharding(on, s)), make_params(CONFIG), where
        )
        tokens = random(1, 1024 * on.size, 512) + 0.5 * random(2, 1, 512)  # a common part, so that experts are busier
        x = jax.device_put(jnp.asarray(tokens, jnp.bfloat16), NamedSharding(on, P(("fsdp", "ep"))))
        options = dict(exchange=exchange, recipe=recipe, kernels=kernels, buffer_factor=buffer_factor)
        step = jax.jit(functools.partial(gradients, **options)).lower(x, params).compile()
        with alone():
            assert not differing(lambda: step(x, params), 8, dirty)
