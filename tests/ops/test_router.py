"""Router logits against float64 on every mesh: in float32 though x is bfloat16, and the gradients too.

Covers: ways x meshes x dtypes of x and of w, with gradients; precision; errors.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from moax.ops import router_logits
from support import TOKENS, WAYS, program, random, rel_error, spec

TOKENS_N, WIDTH, EXPERTS = 64, 96, 24


def operands(dtype, of_w=jnp.float32):
    """x, w and the cotangent of the logits; w and d over many powers of two, so that each part of them counts."""
    x = jnp.asarray(random(0, TOKENS_N, WIDTH)).astype(dtype)
    w = random(1, WIDTH, EXPERTS) * np.exp2(np.random.default_rng(2).integers(-6, 7, (WIDTH, EXPERTS)))
    return x, jnp.asarray(w.astype(np.float32)).astype(of_w), random(3, TOKENS_N, EXPERTS)


def check(got, x, w, d):
    logits, dx, dw = got
    assert logits.dtype == np.float32 and dw.dtype == w.dtype and dx.dtype == x.dtype
    bound_x = 2e-6 if x.dtype == np.float32 else 2.0**-8
    bound_w = 1e-6 if w.dtype == np.float32 else 2.0**-7  # a user's `shard_map` sums what each device has rounded
    x, w, d = (np.float64(v) for v in (x, w, d))
    assert rel_error(logits, x @ w) < 1e-6
    assert rel_error(dx, d @ w.T) < bound_x
    assert rel_error(dw, x.T @ d) < bound_w


DTYPES = {"bfloat16": (jnp.bfloat16, jnp.float32), "float32": (jnp.float32,) * 2, "weight": (jnp.bfloat16,) * 2}
CASES = [(mesh, name) for name in DTYPES for mesh in ("2x4", "dp2x2x2", "tp2x2x2") if name != "weight" or mesh == "2x4"]


@pytest.mark.parametrize(("mesh", "dtypes"), CASES)
@pytest.mark.parametrize("way", WAYS)
def test_on_mesh(way, mesh, dtypes):
    """Rows stay where they are, and the gradient of the weight is summed over all of them, once."""
    x, w, d = operands(*DTYPES[dtypes])

    def fn(x, w, engine):
        logits = router_logits(x, w, engine=engine)
        return logits, ()

    rows = spec(mesh, TOKENS, None)
    ran = program(way, mesh, fn, (x, w), (rows, P()), rows, cotangents=d, wrt=(0, 1))
    logits, _, (dx, dw) = ran()
    check((logits, dx, dw), x, w, d)


@pytest.mark.parametrize("dtypes", DTYPES)
def test_one_device(dtypes):
    """A router in bfloat16 alone is off by 2^-9, and sends tokens elsewhere; breaks also if the parts of a gradient of
    bfloat16 are fewer than its rounding needs."""
    x, w, d = operands(*DTYPES[dtypes])
    logits, pull = jax.vjp(router_logits, x, w)
    check((logits, *pull(jnp.asarray(d))), x, w, d)


@pytest.mark.parametrize("of_w", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_products_are_of_bfloat16(of_w):
    """A float32 product of these runs 20 times slower on a GPU."""
    x, w, d = operands(jnp.bfloat16, of_w)
    step = jax.jit(lambda x, w, d: jax.vjp(router_logits, x, w)[1](d))
    text = step.lower(x, w, d).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    assert len(dots) >= 2 and all(line.count("bf16>") >= 2 for line in dots), dots


def test_shapes():
    with pytest.raises(ValueError, match=r"x, w have shapes \(2, 3\), \(4, 5\)"):
        router_logits(jnp.zeros((2, 3)), jnp.zeros((4, 5)))
