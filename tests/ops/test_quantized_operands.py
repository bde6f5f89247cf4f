"""Products of operands that were quantized before, their output dtype, and rows over ep alone, against float64.

Covers: which operand is a QArray x the gradients that are left; ways x layouts of a kept weight, and its bytes on the
wire; dtypes of y; ways x recipes with rows over ep alone; every error.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import moax
from moax import inspect
from moax.ops import dense, dequantize, grouped_matmul, quantize
from moax.recipe import RECIPES, Format
from support import TOKENS, make_mesh, program, put, random, rel_error, size, some, spec
from support.oracle.ops import dense_vjp, grouped_matmul_vjp
from support.products import problem

SIZES = (7, 0, 30, 1)
BLOCK = {name: RECIPES[name].w for name in RECIPES}


def keep(w, format):
    """w, quantized for products over its rows."""
    return quantize(jnp.asarray(w), format, block=format.weight_block(w.ndim, "rows"))


def values(q):
    return np.asarray(dequantize(q), np.float64)


@pytest.mark.parametrize("name", some(("fp8_block", "mxfp8", "fp8_tensor"), 1))
@pytest.mark.parametrize("which", ("x", "w", "both", "kept"))
def test_products_take_what_was_quantized(which, name):
    """Breaks if a QArray is quantized again, its edge blocks (K = 200, C = 2 x 70) or its padding are read wrongly, a
    gradient that there should be is missing, or `quantized=` keeps the gradient from w."""
    args, real = problem(SIZES, 1, 48, 200, (2, 70))
    x, w, sizes, bias, dy = args
    xq, wq = quantize(jnp.asarray(np.where(real[:, None], x, 0)), Format(block=64)), keep(w, BLOCK[name])
    wide = values(xq) if which in ("x", "both") else x, w if which == "x" else values(wq)
    want = grouped_matmul_vjp(*wide[:1], wide[1], sizes, bias, dy, 1)
    floats = {"x": {"w": w}, "w": {"x": x}, "both": {}, "kept": {"x": x, "w": w}}[which] | {"bias": bias}
    given = {"x": xq} if which in ("x", "both") else {}
    given |= {"w": wq} if which in ("w", "both") else {"quantized": wq} if which == "kept" else {}

    @jax.jit
    def run(floats, given, dy):
        call = lambda floats: grouped_matmul(**floats, **given, group_sizes=sizes, preferred_element_type=jnp.float32)  # noqa: E731
        y, pull = jax.vjp(call, floats)
        return y, pull(dy)[0]

    y, grads = run(floats, given, dy)
    assert rel_error(y, want[0]) < 2e-6
    for key, expected in zip(("x", "w", "bias"), want[1:], strict=True):
        if key in floats:
            assert rel_error(grads[key], expected, per=None if key == "x" else 0) < 2e-6, key


def test_other_operands_follow_the_recipe():
    """Breaks if x is not quantized beside a QArray w: with the recipe's own blocks the product is that of the recipe,
    and so are the gradients (square blocks read the same by rows and by columns)."""
    args, real = problem((130, 0, 40), 128, 384, 256, (128,))
    x, w, sizes, bias, dy = args

    @jax.jit
    def run(x, w, dy, q):
        plain = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, recipe="fp8_block"), x, w)
        kept = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, recipe="fp8_block", quantized=q), x, w)
        return [(y, *pull(dy)) for y, pull in (plain, kept)]

    plain, kept = run(x, w, dy, keep(w, BLOCK["fp8_block"]))
    for one, other in zip(kept, plain, strict=True):
        assert rel_error(one, other) < 1e-6


LAYOUTS = {
    "experts": P(("ep", "fsdp")),
    "model": P("ep", "fsdp"),
    "columns": P("ep", None, None, "fsdp"),
    "tp columns": P("ep", "fsdp", None, "tp"),
    "tp rows": P("ep", ("tp", "fsdp")),
}
CASES = [("explicit", "experts", "fp8_block"), ("custom_partitioning", "model", "mxfp8"),
         ("shard_map", "tp columns", "fp8_block"), ("custom_partitioning", "tp rows", "fp8_tensor"),
         ("explicit", "columns", "mxfp8"), ("shard_map", "model", "fp8_tensor"), ("user", "model", "fp8_block"),
         ("user_vma", "experts", "mxfp8"), ("custom_partitioning", "columns", "fp8_block")]  # fmt: skip


@pytest.mark.parametrize("way, layout, name", some(CASES, 3))
def test_kept_weights_on_mesh(way, layout, name, fresh_compile):
    """Breaks if a kept weight is gathered in more than bytes, is quantized again, or its pieces are lost: 64 rows of a
    shard end inside a block of 128, so that each shard has scales of its own. Gradients flow to w and lie as it
    lies."""
    mesh = "tp2x2x2" if layout.startswith("tp") else "2x4"
    experts, ep = 8, size(mesh, "ep")
    shards, width, columns = 8 // (2 if "tp" in mesh else 1), 128, (2, 64)
    local = tuple([3, 0, 5, 1, 2, 0, 0, 4][: experts // ep])
    sizes, rows = np.tile(np.array(local, np.int32), shards), 16
    x, w = random(0, rows * shards, width), random(1, experts, width, *columns)
    dy = random(2, rows * shards, *columns)
    of_w, format = spec(mesh, *LAYOUTS[layout]), BLOCK[name]
    tp = ["tp" if "tp" in (e or ()) else None for e in (*of_w, *[None] * (4 - len(of_w)))]
    at, out = spec(mesh, TOKENS, tp[1]), spec(mesh, TOKENS, *tp[2:])
    declared = None if way in ("custom_partitioning", "explicit") else of_w
    block = format.weight_block(4, "rows")

    def forward(x, w, sizes, engine):
        q = quantize(jax.lax.stop_gradient(w), format, block=block, x_spec=of_w, engine=engine)
        y = grouped_matmul(x, w, sizes, quantized=q, w_spec=declared, engine=engine)
        return (jax.lax.psum(y, "tp") if tp[1] and way.startswith("user") else y), dequantize(q, engine=engine)

    p = program(way, mesh, forward, (x, w, sizes), (at, of_w, spec(mesh, TOKENS)), out, of_w, cotangents=dy, wrt=(0, 1))
    y, kept, (dx, dw) = p()
    total_w = np.zeros_like(w, np.float64)
    for s in range(shards):
        first = (s % ep) * len(local)
        mine, these = slice(rows * s, rows * (s + 1)), slice(first, first + len(local))
        args = (x[mine], kept[these], np.array(local), np.zeros((len(local), *columns)), dy[mine])
        want_y, want_dx, want_dw, _ = grouped_matmul_vjp(*args, 1)
        assert rel_error(y[mine], want_y) < 5e-6
        assert rel_error(dx[mine], want_dx) < 5e-6
        total_w[these] += want_dw
    assert rel_error(dw, total_w) < 5e-6
    found = p.under(lambda *args: inspect.collectives(p.fn, *args))
    gathers = [c for c in found if c.kind == "all-gather"]
    assert gathers and all(c.dtype == "uint8" for c in gathers if c.size >= w.size // (2 * experts))


@pytest.mark.parametrize("way", some(("custom_partitioning", "explicit", "none"), 2))
def test_dense(way):
    """Breaks if `dense` reads the blocks of a QArray x [B, L, K] or w [K, *C] by other dims than they have."""
    x, w, b, dy = random(0, 8, 4, 256), random(1, 256, 48), random(2, 48), random(3, 8, 4, 48)
    at, of_w = spec("2x4", TOKENS), spec("2x4", ("fsdp", "ep"))

    def forward(x, w, b, engine):
        xq = quantize(x, Format(block=32), x_spec=spec("2x4", TOKENS) if way != "none" else None, engine=engine)
        wq = quantize(jax.lax.stop_gradient(w), Format(block=32), block=(32, 1), engine=engine)
        both = dense(xq, wq, b, engine=engine, preferred_element_type=jnp.float32)
        return dense(x, w, b, quantized=wq, engine=engine), (both, dequantize(xq), dequantize(wq))

    p = program(
        way, "2x4", forward, (x, w, b), (at, of_w, P()), at, (at, at, of_w), cotangents=dy, wrt=(0, 1, 2)
    )  # fmt: skip
    y, (both, xv, wv), (dx, dw, db) = p()
    want, (want_dx, _, want_db) = dense_vjp(x, wv, b, dy)
    _, (_, want_dw, _) = dense_vjp(x, w, b, dy)
    for got, expected in ((y, want), (dx, want_dx), (dw, want_dw), (db, want_db), (both, dense_vjp(xv, wv, b, dy)[0])):
        assert rel_error(got, expected) < 5e-6


@pytest.mark.parametrize("dtype, out", [("bfloat16", "float32"), ("float32", "bfloat16")])
def test_output_dtype(dtype, out):
    """Breaks if a float32 y of bfloat16 operands was rounded to bfloat16 on the way, if operands are rounded to a
    narrow y's dtype before their product, or a gradient has another dtype than its array."""
    (x, w, sizes, bias, dy), _ = problem((7, 0, 30, 1), 1, 48, 64, (24,))
    x = np.nan_to_num(x)
    x, w = (jnp.asarray(v).astype(dtype) for v in (x, w))
    call = functools.partial(grouped_matmul, group_sizes=sizes, preferred_element_type=out)
    y, pull = jax.vjp(lambda x, w: call(x, w), x, w)
    dx, dw = pull(jnp.asarray(dy).astype(out))
    assert y.dtype == jnp.dtype(out) and dx.dtype == dw.dtype == jnp.dtype(dtype)
    wide = [np.asarray(v.astype(jnp.float32)) for v in (x, w)]
    want = grouped_matmul_vjp(*wide, sizes, np.zeros((4, 24)), dy, 1)
    assert rel_error(y.astype(jnp.float32), want[0]) < (2e-6 if out == "float32" else 2.0**-8)
    assert rel_error(dx.astype(jnp.float32), want[1]) < 2e-2
    flat = dense(x[:7], w[0], preferred_element_type=out)
    assert flat.dtype == jnp.dtype(out) and rel_error(flat.astype(jnp.float32), wide[0][:7] @ wide[1][0]) < 2.0**-8


ALONE = [("explicit", "experts", None), ("custom_partitioning", "columns", None), ("shard_map", "experts", None),
         ("custom_partitioning", "model", "fp8_block"), ("explicit", "model", "fp8_tensor")]  # fmt: skip


@pytest.mark.parametrize("way, layout, recipe", some(ALONE, 2))
def test_rows_over_ep_alone(way, layout, recipe):
    """Breaks if rows that all devices along fsdp share are summed once for each of them in the gradients of w and bias,
    or if w is not gathered there."""
    ep, experts, align = 4, 8, 128 if recipe == "fp8_block" else 1
    rows, width, columns = 2 * align if align > 1 else 16, 128, (2, 64)
    sizes = np.tile(np.array([5, 3], np.int32), ep)
    x, w, bias = random(0, rows * ep, width), random(1, experts, width, *columns), random(3, experts, *columns)
    dy, of_w, at = random(2, rows * ep, *columns), LAYOUTS[layout], P("ep")
    declared = of_w if way == "shard_map" else None

    def forward(x, w, bias, sizes, engine):
        return grouped_matmul(x, w, sizes, bias, recipe=recipe, w_spec=declared, engine=engine), ()

    p = program(
        way, "2x4", forward, (x, w, bias, sizes), (at, of_w, at, at), at, cotangents=dy, wrt=(0, 1, 2)
    )  # fmt: skip
    y, _, grads = p()

    @jax.jit
    def alone(x, w, bias, dy):
        call = lambda x, w, bias: grouped_matmul(x, w, jnp.asarray(sizes[:2]), bias, recipe=recipe)  # noqa: E731
        y, pull = jax.vjp(call, x, w, bias)
        return y, pull(dy)

    for s in range(ep):
        mine, these = slice(rows * s, rows * (s + 1)), slice(2 * s, 2 * s + 2)
        want, expected_grads = alone(x[mine], w[these], bias[these], dy[mine])
        tolerance = 0.2 if recipe == "fp8_tensor" else 5e-6  # the one scale of rows is that of all shards
        assert rel_error(y[mine], want) < tolerance
        for got, expected, at in zip(grads, expected_grads, (mine, these, these), strict=True):
            assert rel_error(got[at], expected) < tolerance


def test_errors():
    """Breaks if a QArray that cannot be an operand is not named."""
    x, w, sizes = jnp.zeros((4, 8)), jnp.zeros((2, 8, 6)), jnp.asarray([2, 2])
    q = keep(w, Format(block=4))
    with pytest.raises(ValueError, match="preferred_element_type=None, and x is a QArray"):
        grouped_matmul(quantize(x), w, sizes)
    with pytest.raises(ValueError, match="quantized was given with a QArray w"):
        grouped_matmul(x, q, sizes, quantized=q)
    with pytest.raises(ValueError, match=r"quantized has shape \(8, 6\); it must be that of w, \(2, 8, 6\)"):
        grouped_matmul(x, w, sizes, quantized=quantize(w[0]))
    with pytest.raises(ValueError, match="preferred_element_type has dtype int32"):
        grouped_matmul(x, w, sizes, preferred_element_type=jnp.int32)
    with pytest.raises(ValueError, match=r"x is a QArray with block=\(1, 2, 4\); its blocks must have one row"):
        dense(quantize(x[None], block=(1, 2, 4)), w[0], preferred_element_type=jnp.float32)
    with pytest.raises(moax.Unsupported, match="kernels='(hopper|blackwell)'"):
        grouped_matmul(x, q, sizes, kernels="blackwell")
    mesh = make_mesh("2x4", "explicit")
    with jax.set_mesh(mesh):
        data, w = put(mesh, (P("ep"), P("ep", "fsdp")), (np.zeros((16, 128)), np.zeros((8, 128, 4))))
        whole = keep(np.zeros((8, 128, 4), np.float32), Format(block=128))
        with pytest.raises(ValueError, match="quantized: dim 1 of size 128 .*'fsdp'.* cut its blocks of 128"):
            grouped_matmul(data, w, put(mesh, (spec("2x4", TOKENS),), (np.zeros(16, np.int32),))[0], quantized=whole)
