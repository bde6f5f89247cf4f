"""The layer of JAX alone that `moax.moe` is measured beside: checked against reference.py before it is timed."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import moax
from benchmarks.peers import native
from moax import reference
from moax.checks import Unsupported
from support import make_params, put, random, rel_norm
from support.benchmarks import by_gather

pytestmark = pytest.mark.more

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


def on_mesh(mesh, config, x, dy, params, note=native.NO_RAGGED):
    layer, said = native.block(config, mesh)
    assert said == note, "where a part is not the one of the name, the layer must say so"
    tokens = jax.P(("fsdp", "ep"))
    placed = put(mesh, (tokens, tokens, moax.param_specs(config, mesh=mesh)), (x, dy, params))
    return jax.jit(lambda *args: graded(layer, *args))(*placed)


def check(got, want, limit):
    for name, g, w in zip(("y", "dx", "router", "wi", "wo"), got, want, strict=True):
        error = rel_norm(g, w, per=0 if name in ("wi", "wo") else None)
        assert error <= limit, f"{name}: {error:.2e} > {limit:.0e}"


@pytest.mark.parametrize(("mesh", "of"), [((2, 2), ()), ((4, 1), ()), ((2, 4), ("one", 5))])
def test_native_is_the_reference(mesh, of):
    """Breaks if the layer beside moax has other gradients, or if its buffers do not hold all tokens on one rank."""
    note = native.NO_RAGGED if mesh[1] > 1 else ""
    check(on_mesh(make_mesh(*mesh), *problem(*of), note=note), expected(*of), FLOAT32)


@pytest.mark.gpu
def test_layer_on_gpus():
    """Breaks if what is timed on GPUs, by their own collectives and kernels, is not what was checked without them."""
    if jax.device_count() < 4:
        pytest.skip("needs four GPUs")
    config, x, dy, params = problem("random", 2, 128, 128)
    x, dy = x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16)
    got = on_mesh(make_mesh(2, 2), config, x, dy, params, note="")
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
    monkeypatch.setattr(native, "platform", lambda: "gpu")
    check(on_mesh(make_mesh(2, 4), *problem(), note=""), expected(), FLOAT32)


def test_layer_lowers_for_gpus(monkeypatch):
    """Breaks if the layer on GPUs is not made of the parts that its name says, forward and backward."""
    monkeypatch.setattr(native, "platform", lambda: "gpu")
    config = dataclasses.replace(CONFIG, d_model=128, d_ff=128)
    layer, _ = native.block(config, make_mesh(2, 2))
    x = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    params = jax.eval_shape(functools.partial(moax.init, config=config), jax.random.key(0))
    text = jax.jit(lambda *a: graded(layer, *a)).trace(x, x, params).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@ragged_all_to_all") == 4


@pytest.mark.parametrize(
    ("changes", "sizes", "why"),
    [
        (dict(activation="silu"), (2, 2), "activation='silu'"),
        (dict(use_bias=True), (2, 2), "use_bias"),
        (dict(router=moax.RouterConfig(score="sigmoid")), (2, 2), "normalized softmax"),
        (dict(top_k=1), (2, 2), "normalized softmax"),
        (dict(router=moax.RouterConfig(num_groups=2, top_groups=1)), (2, 2), "groups"),
        (dict(num_experts=6), (2, 2), "6 experts on 4 devices"),
    ],
)
def test_native_refuses_what_it_does_not_compute(changes, sizes, why):
    """Breaks if a row of the benchmark compares two different layers."""
    with pytest.raises(Unsupported, match=why):
        native.block(dataclasses.replace(CONFIG, **changes), make_mesh(*sizes))
    with pytest.raises(Unsupported, match="a mesh of"):
        native.block(CONFIG, moax.make_mesh({"dp": 8}))
