"""Quantized blocks against two oracles: the same products in float64 on fake-quantized operands, which isolates the
implementation, and the plain float32 block, which bounds the method.

The plain bound: rounding to e4m3 is off by at most 2^-4 of a value and by 2.6% in the root mean square (uniform
mantissas); a product of two such operands with random signs is off by sqrt(2) times that, 3.7%. y passes two products
in a row, gradients of x up to four, those of weights as many with one operand fresh; e5m2 (fp8_tensor's dy) doubles
the rounding of a gradient. Hence 8% for y, 14% for gradients, 20% where dy is e5m2.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moax
from moax import reference
from moax.kernels.xla.quantization import dequantize as dequantize_local
from moax.kernels.xla.quantization import quantize as quantize_local
from moax.recipe import RECIPES, Format
from support import TOKENS, make_mesh, make_params, put, random, rel_norm, some, spec

CONFIG = moax.MoEConfig(d_model=160, d_ff=192, num_experts=4, top_k=2, use_bias=True)
T = 96
FAKE, PLAIN_Y = 1e-2, 0.08
PLAIN_GRAD = {"fp8_block": 0.14, "mxfp8": 0.14, "fp8_tensor": 0.20}


@functools.cache
def operands():
    # Rows of very different size: a scale for the wrong row or block would show.
    x = random(3, T, CONFIG.d_model) * np.exp2(np.arange(-4.0, 4.0, dtype=np.float32)).repeat(T // 8)[:, None]
    return jnp.asarray(x), make_params(CONFIG, bias=0.1), jnp.asarray(random(4, *x.shape))


def run(recipe, mesh=None, way="custom_partitioning", **options):
    """y, dx, dparams of the block for the cotangent of `operands`."""
    x, params, dy = operands()
    engine = way if way == "shard_map" else "auto"

    def both(x, params, dy):
        f = lambda x, p: moax.moe(x, p, CONFIG, recipe=recipe, engine=engine, **options)[0]  # noqa: E731
        y, pull = jax.vjp(f, x, params)
        return y, *pull(dy)

    if mesh is None:
        return jax.tree.map(np.asarray, jax.jit(both)(x, params, dy))
    on = make_mesh(mesh, way)
    with jax.set_mesh(on):
        specs = moax.param_specs(CONFIG, options.get("axes", moax.Axes()))
        placed = put(on, (spec(mesh, TOKENS), specs, spec(mesh, TOKENS)), (x, params, dy))
        return jax.tree.map(np.asarray, jax.jit(both)(*placed))


def fake(x, form: Format, block):
    """x rounded to the format and back, float64."""
    return np.float64(dequantize_local(quantize_local(jnp.asarray(x, jnp.float32), form, block)))


def fake_rows(by_expert, form, contracted):
    """Rows of each expert: a scale of columns is a row's own; one of rows starts anew with each expert; one of a tensor
    is common to all of them."""
    if form.block is not None:
        return [fake(v, form, form.row_block(v.ndim, contracted)) for v in by_expert]
    cuts = np.cumsum([len(v) for v in by_expert])[:-1]
    return np.split(fake(np.concatenate(by_expert), form, (None,) * by_expert[0].ndim), cuts)


def oracle(recipe: str):
    """y, dx and the gradients of wi, wo, bi, bo: each product in float64, of fake-quantized operands."""
    r, (x, params, dy) = RECIPES[recipe], jax.tree.map(np.asarray, operands())
    logits = x @ params.router
    routing = jax.tree.map(np.asarray, reference.route(jnp.asarray(logits), CONFIG.router, CONFIG.top_k))
    where = [np.nonzero((routing.experts == e).any(-1))[0] for e in range(CONFIG.num_experts)]
    weight = [np.where(routing.experts == e, routing.weights, 0).sum(-1)[at] for e, at in enumerate(where)]
    weights = {
        (name, contracted): fake(w, r.w, r.w.weight_block(w.ndim, contracted)).reshape(
            CONFIG.num_experts, w.shape[1], -1
        )
        for name, w in (("wi", params.wi), ("wo", params.wo))
        for contracted in ("rows", "columns")
    }
    act = lambda h: np.float64(reference.activate(jnp.asarray(h, jnp.float32), CONFIG.activation))  # noqa: E731
    gates = (-1, CONFIG.gates, CONFIG.d_ff)

    rows = [x[at] for at in where]
    h = [v @ w for v, w in zip(fake_rows(rows, r.x, "columns"), weights["wi", "rows"], strict=True)]
    h = [v.reshape(gates) + b for v, b in zip(h, params.bi, strict=True)]
    a = [act(v) for v in h]
    o = [v @ w + b for v, w, b in zip(fake_rows(a, r.x, "columns"), weights["wo", "rows"], params.bo, strict=True)]
    y, dx = np.zeros(x.shape), np.zeros(x.shape)
    for at, w, v in zip(where, weight, o, strict=True):
        y[at] += w[:, None] * v

    d_o = [dy[at] for at in where]
    d_a = [v @ w.T for v, w in zip(fake_rows(d_o, r.dy, "columns"), weights["wo", "columns"], strict=True)]
    scaled = [w[:, None] * v for w, v in zip(weight, a, strict=True)]
    d_wo = [p.T @ q for p, q in zip(fake_rows(scaled, r.x, "rows"), fake_rows(d_o, r.dy, "rows"), strict=True)]
    pull = lambda h, d: np.float64(  # noqa: E731
        jax.vjp(lambda h: reference.activate(h, CONFIG.activation), jnp.asarray(h, jnp.float32))[1](
            jnp.asarray(d, jnp.float32)
        )[0]
    )
    d_h = [pull(v, w[:, None] * d) for v, w, d in zip(h, weight, d_a, strict=True)]
    d_wi = [
        np.einsum("mk,mgf->kgf", p, q)
        for p, q in zip(fake_rows(rows, r.x, "rows"), fake_rows(d_h, r.dy, "rows"), strict=True)
    ]
    for at, v, w in zip(where, fake_rows(d_h, r.dy, "columns"), weights["wi", "columns"], strict=True):
        dx[at] += v.reshape(len(v), -1) @ w.T
    d_bi = np.stack([v.sum(0) for v in d_h])
    d_bo = np.stack([(w[:, None] * v).sum(0) for w, v in zip(weight, d_o, strict=True)])
    inner = [np.sum(d * v, -1) + v2 @ b for d, v, v2, b in zip(d_a, a, d_o, params.bo, strict=True)]
    d_weight = np.zeros((T, CONFIG.num_experts))
    for e, (at, v) in enumerate(zip(where, inner, strict=True)):
        d_weight[at, e] = v

    # The router's share of dx, and d router: plain float32 by autodiff, given the weights' gradients.
    def router(x, w):
        routed = reference.route(x @ w, CONFIG.router, CONFIG.top_k)
        return jnp.sum(routed.weights * jnp.take_along_axis(jnp.asarray(d_weight, jnp.float32), routed.experts, 1))

    router_dx, d_router = jax.grad(router, (0, 1))(jnp.asarray(x), jnp.asarray(params.router))
    return y, dx + np.float64(router_dx), dict(wi=np.stack(d_wi), wo=np.stack(d_wo), bi=d_bi, bo=d_bo, router=d_router)


def compare(got, want, limit_y, limit):
    y, dx, dparams = got
    want_y, want_dx, want_dparams = want
    assert rel_norm(y, want_y) < limit_y, rel_norm(y, want_y)
    assert rel_norm(dx, want_dx) < limit, rel_norm(dx, want_dx)
    for name, value in want_dparams.items():
        error = rel_norm(getattr(dparams, name), value, per=None if name == "router" else 0)
        assert error < limit, f"{name}: {error}"


@pytest.mark.parametrize("recipe", RECIPES)
def test_against_fake_quantized_operands(recipe):
    """Breaks if an operand is quantized along the wrong dim, in the wrong format, or not at all."""
    compare(run(recipe), oracle(recipe), FAKE, FAKE)


@pytest.mark.parametrize("recipe", RECIPES)
def test_against_full_precision(recipe):
    """Breaks if the method loses more than the rounding of its operands."""
    y, dx, dparams = run(None)
    plain = (y, dx, {n: getattr(dparams, n) for n in ("router", "wi", "wo", "bi", "bo")})
    compare(run(recipe), plain, PLAIN_Y, PLAIN_GRAD[recipe])


CASES = [
    ("fp8_block", "2x4", "custom_partitioning", "model"),
    ("fp8_block", "tp2x2x2", "shard_map", "model"),
    ("mxfp8", "2x4", "explicit", "model"),
    ("fp8_tensor", "dp2x2x2", "custom_partitioning", "model"),
    ("fp8_tensor", "tp2x2x2", "explicit", "experts"),
]


@pytest.mark.parametrize(("recipe", "mesh", "way", "fsdp_dim"), some(CASES[1:] + CASES[:1], 3))
def test_meshes_agree_with_full_precision(recipe, mesh, way, fsdp_dim):
    """Breaks if a shard that cuts blocks (160 and 192 over 2) mixes up scales, or an amax stays on its device."""
    axes = moax.Axes(fsdp_dim=fsdp_dim)
    y, dx, dparams = run(None)
    plain = (y, dx, {n: getattr(dparams, n) for n in ("router", "wi", "wo", "bi", "bo")})
    compare(run(recipe, mesh, way, axes=axes), plain, PLAIN_Y, PLAIN_GRAD[recipe])


@pytest.mark.parametrize("recipe", RECIPES)
def test_mesh_equals_one_device_where_no_block_is_cut(recipe):
    """Breaks if scales depend on the mesh: whole experts on each shard are quantized as on one device. Backward's
    blocks of rows do depend on which tokens a rank has, so only y is compared."""
    got, want = (run(recipe, *at)[0] for at in (("dp2x2x2",), ()))
    assert rel_norm(got, want) < 1e-6 if recipe != "fp8_tensor" else rel_norm(got, want) < FAKE


@pytest.mark.parametrize("way", ["custom_partitioning", "explicit"])
@pytest.mark.parametrize("exchange", ["all_gather", "all_to_all"])
def test_quantized_wire(way, exchange):
    """Breaks if rows that travel quantized lose more than one rounding to e4m3, or their ids or weights are touched."""
    recipe = moax.Recipe(None, None, None, wire=Format(block=32, scale="pow2"))
    y, dx, dparams = run(None)
    plain = (y, dx, {n: getattr(dparams, n) for n in ("router", "wi", "wo", "bi", "bo")})
    got = run(recipe, "2x4", way, exchange=exchange)
    assert rel_norm(got[0], y) > 1e-3, "nothing was quantized"
    compare(got, plain, 0.04, PLAIN_GRAD["fp8_block"])
