"""The layer of JAX alone on docs/tutorial/layer.md, beside which it times `moax.moe`: checked against reference.py."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jaxtyping import Array, Float, Int

import moax
from moax import reference
from support import make_params, pages, put, random, rel_norm
from support.benchmarks import by_gather

pytestmark = pytest.mark.more

PAGE = pages.ROOT / "docs" / "tutorial" / "layer.md"
LAYER = {"jax": jax, "jnp": jnp, "lax": lax, "Array": Array, "Float": Float, "Int": Int}
for block in pages.programs(PAGE):
    if "def starts(" in block.text or "def layer(" in block.text:
        exec(compile(block.text, str(block), "exec"), LAYER)

CONFIG = moax.MoEConfig(32, 48, 8, 2)
FLOAT32, BF16 = 5e-6, 2e-2  # sums in another order; products and weights rounded to 8 bits


def make_mesh(fsdp: int, ep: int) -> jax.sharding.Mesh:
    return moax.make_mesh({"fsdp": fsdp, "ep": ep}, devices=jax.devices()[: fsdp * ep])


@functools.cache
def problem(routing: str = "random", top_k: int = 2, d_model: int = 32, d_ff: int = 48):
    """(config, x, dy, params); `one`: every token goes to the same experts."""
    config = dataclasses.replace(CONFIG, top_k=top_k, d_model=d_model, d_ff=d_ff)
    x, dy = (jnp.asarray(random(i, 64, d_model)) for i in (1, 2))
    params = make_params(config)
    if routing == "one":
        x = jnp.abs(x)
        params = dataclasses.replace(params, router=jnp.zeros((d_model, 8)).at[:, 5].set(0.05).at[:, 6].set(0.02))
    return config, x, dy, params


def graded(layer, x, dy, params):
    y, pull = jax.vjp(layer, x, params)
    dx, d = pull(dy)
    return y, dx, d.router, d.wi, d.wo


@functools.cache
def expected(*of):
    config, x, dy, params = problem(*of)
    return jax.jit(lambda *args: graded(lambda x, p: reference.moe(x, p, config)[0], *args))(x, dy, params)


def native(mesh, config, ragged: bool):
    """Returns the layer of the page as a function (x, params) -> y of global arrays."""
    tokens, experts = jax.P(("fsdp", "ep")), jax.P(("ep", "fsdp"))
    specs = dict(in_specs=(tokens, jax.P(), experts, experts), out_specs=tokens, check_vma=False)
    local = functools.partial(LAYER["layer"], top_k=config.top_k, ragged=ragged)
    mapped = jax.shard_map(local, mesh=mesh, **specs)
    return lambda x, params: mapped(x, params.router, params.wi, params.wo)


def on_mesh(mesh, config, x, dy, params, ragged=False):
    layer, tokens = native(mesh, config, ragged), jax.P(("fsdp", "ep"))
    placed = put(mesh, (tokens, tokens, moax.param_specs(config, mesh=mesh)), (x, dy, params))
    return jax.jit(lambda *args: graded(layer, *args))(*placed)


def check(got, want, limit):
    for name, g, w in zip(("y", "dx", "router", "wi", "wo"), got, want, strict=True):
        error = rel_norm(g, w, per=0 if name in ("wi", "wo") else None)
        assert error <= limit, f"{name}: {error:.2e} > {limit:.0e}"


@pytest.mark.parametrize(("mesh", "of"), [((2, 2), ()), ((4, 1), ()), ((2, 4), ("one", 5))])
def test_native_is_the_reference(mesh, of):
    """Breaks if the layer beside moax has other gradients, or if its buffers do not hold all tokens on one rank."""
    check(on_mesh(make_mesh(*mesh), *problem(*of)), expected(*of), FLOAT32)


@pytest.mark.gpu
def test_layer_on_gpus():
    """Breaks if what is timed on GPUs, by their own collectives and kernels, is not what was checked without them."""
    if jax.device_count() < 4:
        pytest.skip("needs four GPUs")
    config, x, dy, params = problem("random", 2, 128, 128)
    x, dy = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
    got = on_mesh(make_mesh(2, 2), config, x, dy, params, ragged=True)
    check(got, expected("random", 2, 128, 128), BF16)


def test_native_in_bf16():
    """Breaks if the layer loses more than bf16 does, or returns gradients of another dtype than their primals."""
    config, x, dy, params = problem()
    got = on_mesh(make_mesh(2, 2), config, x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16), params)
    assert [v.dtype for v in got] == [jnp.bfloat16] * 2 + [jnp.float32] * 3
    check(got, expected(), BF16)


def test_ragged_exchange(monkeypatch):
    """Breaks if a GPU, where the exchange is ragged, were told to send other rows, or to put them elsewhere."""
    monkeypatch.setattr(lax, "ragged_all_to_all", by_gather)
    check(on_mesh(make_mesh(2, 4), *problem(), ragged=True), expected(), FLOAT32)


def test_layer_lowers_for_gpus():
    """Breaks if the layer on GPUs is not made of the parts that its name says, forward and backward."""
    config = dataclasses.replace(CONFIG, d_model=128, d_ff=128)
    layer = native(make_mesh(2, 2), config, ragged=True)
    x = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    params = jax.eval_shape(functools.partial(moax.init, config=config), jax.random.key(0))
    text = jax.jit(lambda *a: graded(layer, *a)).trace(x, x, params).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@ragged_all_to_all") == 4
