"""Router logits against float64 on every mesh: in float32 though x is bfloat16, and the gradients too.

Covers: ways x meshes x dtypes, with gradients; precision; errors.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moax.ops import router_logits
from support import TOKENS, WAYS, program, random, rel_error, spec

TOKENS_N, WIDTH, EXPERTS = 64, 96, 24


def operands(dtype):
    """x, w and the cotangent of the logits; w and d over many powers of two, so that each part of them counts."""
    x = jnp.asarray(random(0, TOKENS_N, WIDTH)).astype(dtype)
    w = random(1, WIDTH, EXPERTS) * np.exp2(np.random.default_rng(2).integers(-6, 7, (WIDTH, EXPERTS)))
    return x, w.astype(np.float32), random(3, TOKENS_N, EXPERTS)


def check(got, x, w, d, dtype):
    logits, dx, dw = got
    x, w, d = (np.float64(v) for v in (x, w, d))
    assert logits.dtype == np.float32 and dw.dtype == np.float32 and dx.dtype == dtype
    assert rel_error(logits, x @ w) < 1e-6
    assert rel_error(dx, d @ w.T) < (2e-6 if dtype == jnp.float32 else 2.0**-8)
    assert rel_error(dw, x.T @ d) < 1e-6


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32), ids=("bfloat16", "float32"))
@pytest.mark.parametrize("mesh", ("2x4", "dp2x2x2", "tp2x2x2"))
@pytest.mark.parametrize("way", WAYS)
def test_on_mesh(way, mesh, dtype):
    """Rows stay where they are, and the gradient of the weight is summed over all of them, once."""
    x, w, d = operands(dtype)

    def fn(x, w, engine):
        logits = router_logits(x, w, engine=engine)
        return logits, ()

    rows = spec(mesh, TOKENS, None)
    ran = program(way, mesh, fn, (x, w), (rows, P()), rows, cotangents=d, wrt=(0, 1))
    logits, _, (dx, dw) = ran()
    check((logits, dx, dw), x, w, d, dtype)


def test_one_device():
    """A router in bfloat16 alone is off by 2^-9, and sends tokens elsewhere."""
    x, w, d = operands(jnp.bfloat16)
    logits, pull = jax.vjp(router_logits, x, jnp.asarray(w))
    check((logits, *pull(jnp.asarray(d))), x, w, d, jnp.bfloat16)


def test_products_are_of_bfloat16():
    """A float32 product of these runs 20 times slower on a GPU."""
    x, w, d = operands(jnp.bfloat16)
    step = jax.jit(lambda x, w, d: jax.vjp(router_logits, x, w)[1](d))
    text = step.lower(x, w, d).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    assert len(dots) >= 2 and all(line.count("bf16>") >= 2 for line in dots), dots


def test_shapes():
    with pytest.raises(ValueError, match=r"x and w have shapes \(2, 3\), \(4, 5\)"):
        router_logits(jnp.zeros((2, 3)), jnp.zeros((4, 5)))
