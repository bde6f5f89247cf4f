"""The native JAX layer that `moax.moe` is measured beside: checked against reference.py before anyone times it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import moax
from moax import reference
from moax.backend import Unsupported
from moax.bench.peers import native
from support import put, rel_norm

CONFIG = moax.MoEConfig(32, 48, 8, 2)
MESHES = ((2, 2), (1, 4), (4, 1))
FLOAT32, BF16 = 5e-6, 2e-2  # sums in another order; products and weights rounded to 8 bits


def make_mesh(fsdp: int, ep: int) -> jax.sharding.Mesh:
    return moax.make_mesh({"fsdp": fsdp, "ep": ep}, devices=jax.devices()[: fsdp * ep])


@functools.cache
def problem(routing: str = "random", top_k: int = 2):
    """(config, x, dy, params); `one`: every token goes to the same experts."""
    config = dataclasses.replace(CONFIG, top_k=top_k)
    x, dy = (jax.random.normal(jax.random.key(i), (64, 32)) for i in (1, 2))
    params = moax.init(jax.random.key(0), config)
    if routing == "one":
        x = jnp.abs(x)
        params = dataclasses.replace(params, router=jnp.zeros((32, 8)).at[:, 5].set(0.05).at[:, 6].set(0.02))
    return config, x, dy, params


def graded(layer, x, dy, params):
    y, pull = jax.vjp(layer, x, params)
    dx, d = pull(dy)
    return y, dx, d.router, d.wi, d.wo


@functools.cache
def expected(routing: str = "random", top_k: int = 2):
    config, x, dy, params = problem(routing, top_k)
    return jax.jit(lambda *args: graded(lambda x, p: reference.moe(x, p, config)[0], *args))(x, dy, params)


def on_mesh(mesh, config, x, dy, params, note=native.NO_RAGGED):
    layer, said = native.block(config, mesh)
    assert said == (note if mesh.shape["ep"] > 1 else ""), (
        "where the exchange is not the one of the name, the layer must say so"
    )
    tokens = jax.P(("fsdp", "ep"))
    placed = put(mesh, (tokens, tokens, moax.param_specs(config, mesh=mesh)), (x, dy, params))
    return jax.jit(lambda *args: graded(layer, *args))(*placed)


def check(got, want, limit):
    for name, g, w in zip(("y", "dx", "router", "wi", "wo"), got, want, strict=True):
        error = rel_norm(g, w, per=0 if name in ("wi", "wo") else None)
        assert error <= limit, f"{name}: {error:.2e} > {limit:.0e}"


@pytest.mark.parametrize(("fsdp", "ep"), MESHES)
def test_native_is_the_reference(fsdp, ep):
    """Breaks if what moax is timed beside computes something else, or has other gradients."""
    check(on_mesh(make_mesh(fsdp, ep), *problem()), expected(), FLOAT32)


def test_native_drops_nothing():
    """Breaks if buffers do not hold all tokens on one rank, or if a token has more experts than a rank."""
    check(on_mesh(make_mesh(2, 4), *problem("one", 5)), expected("one", 5), FLOAT32)


def test_native_in_bf16():
    """Breaks if the layer loses more than bf16 does, or returns gradients of another dtype than their primals."""
    config, x, dy, params = problem()
    got = on_mesh(make_mesh(2, 2), config, x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16), params)
    assert [v.dtype for v in got] == [jnp.bfloat16] * 2 + [jnp.float32] * 3
    check(got, expected(), BF16)


def by_gather(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """What `lax.ragged_all_to_all` is documented to return, by gathering everything: a CPU has no other."""
    me, row = lax.axis_index(axis_name), jnp.arange(output.shape[0])
    rows, begin, size, there = (
        lax.all_gather(v, axis_name) for v in (operand, input_offsets, send_sizes, output_offsets)
    )
    for source in range(rows.shape[0]):
        slot = row - there[source, me]
        mine = (slot >= 0) & (slot < size[source, me])
        taken = rows[source][jnp.clip(begin[source, me] + slot, 0, operand.shape[0] - 1)]
        output = jnp.where(mine[:, None], taken, output)
    return output


def test_ragged_exchange(monkeypatch):
    """Breaks if a GPU, where the exchange is ragged, were told to send other rows, or to put them elsewhere."""
    monkeypatch.setattr(lax, "ragged_all_to_all", by_gather)
    monkeypatch.setattr(native, "platform", lambda: "gpu")
    check(on_mesh(make_mesh(2, 4), *problem(), note=""), expected(), FLOAT32)


def test_native_lowers_for_gpus(monkeypatch):
    """Breaks if the baseline on a GPU is not the one that its name says: ragged all-to-all, and one weight gather."""
    monkeypatch.setattr(native, "platform", lambda: "gpu")
    config, x, dy, params = problem()
    mesh = make_mesh(2, 2)
    layer, _ = native.block(config, mesh)
    args = put(mesh, (jax.P(("fsdp", "ep")), moax.param_specs(config, mesh=mesh)), (x.astype(jnp.bfloat16), params))
    text = jax.jit(layer).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@ragged_all_to_all") == 2
    assert "stablehlo.all_to_all" not in text


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
