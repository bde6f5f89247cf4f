"""Dense: x w + bias and its gradients against float64, quantized before the gather.

Covers: leading dims x columns; ways x meshes x layouts x recipes by pairs (`COVER`); batches x layouts of rows; the
collectives of the compiled program; NaN; vmap.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import moax
from moax import inspect
from moax.ops import dense
from moax.params import dense_spec
from moax.recipe import RECIPES, get_recipe
from support import (
    TOKENS,
    WAYS,
    Table,
    gather_counts,
    in_user_shard_map,
    make_mesh,
    mark_rest,
    program,
    put,
    random,
    rel_error,
    size,
    spec,
)
from support.oracle.formats import round_rows, round_weight
from support.oracle.ops import dense_vjp

ROWS, WIDTH, COLUMNS = 64, 32, 48
BOTH = ("fsdp", "ep")
LAYOUTS = {
    "dim 0": P(BOTH),
    "dim 1": P(None, BOTH),
    "fsdp alone": P("fsdp"),
    "one each": P("fsdp", "ep"),
    "whole": P(),
    "tp columns": P(BOTH, "tp"),
    "tp columns and fsdp": P(None, ("tp", *BOTH)),
    "tp rows": P("tp", BOTH),
    "tp rows and fsdp": P(("tp", *BOTH)),
}


def operands(width=WIDTH, columns=(COLUMNS,), rows=(ROWS,)):
    """x, w, b and the cotangent of y."""
    w = random(1, width, *columns) / np.float32(width**0.5)
    return random(0, *rows, width), w, random(2, *columns), random(3, *rows, *columns)


def on_mesh(way, mesh, layout, recipe=None, of_x=None, **sizes):
    """`dense` and its gradients as a program on the mesh, and its operands."""
    x, w, b, dy = operands(**sizes)
    of_w = spec(mesh, *LAYOUTS[layout])
    tp = ["tp" if "tp" in (e or ()) else None for e in (*of_w, *[None] * (w.ndim - len(of_w)))]
    leading = of_x or (TOKENS, *[None] * (x.ndim - 2))
    placement = spec(mesh, *leading, tp[0])
    out = spec(mesh, *leading, *tp[1:])
    declared = None if way in ("custom_partitioning", "explicit") else of_w

    def forward(x, w, b, engine):
        y = dense(x, w, b, recipe=recipe, w_spec=declared, engine=engine)
        return jax.lax.psum(y, "tp") if tp[0] and in_user_shard_map() else y, ()

    p = program(
        way,
        mesh,
        forward,
        (x, w, b),
        (placement, of_w, spec(mesh, *tp[1:])),
        out,
        cotangents=dy,
        wrt=(0, 1, 2),
    )
    return p, (x, w, b, dy)


def check(got, args):
    """y and the gradients of x, w and, where there is one, b."""
    y, _, grads = got
    want, expected = dense_vjp(*args)
    for got, v in zip((y, *grads), (want, *expected), strict=False):
        assert rel_error(got, v) < 2e-6


@pytest.mark.parametrize("columns", [(COLUMNS,), (2, 24)], ids=str)
@pytest.mark.parametrize("rows", [(ROWS,), (4, 16), (2, 2, 16), (1,), (4, 1)], ids=str)
def test_shapes(rows, columns):
    """Any leading dims, weights of two dims or three: those of tensordot; with a bias and without."""
    x, w, b, dy = operands(columns=columns, rows=rows)
    p = program(
        "none",
        "",
        lambda *a, engine: (dense(*a), ()),
        (x, w, b),
        cotangents=dy,
        wrt=(0, 1, 2),
    )
    check(p(), (x, w, b, dy))
    assert rel_error(dense(jnp.asarray(x), jnp.asarray(w)), np.tensordot(x.astype(np.float64), w, 1)) < 2e-6


COVER = Table(
    "dense",
    {
        "way": WAYS,
        "mesh": ("8x1", "2x4", "dp2x2x2", "tp2x2x2"),
        "layout": tuple(LAYOUTS),
        "recipe": (None, *RECIPES),
    },
    [
        ("custom_partitioning", "8x1", "dim 0", "fp8_block"),
        ("shard_map", "2x4", "one each", None),
        ("explicit", "dp2x2x2", "fsdp alone", "mxfp8"),
        ("user", "tp2x2x2", "tp columns", "fp8_block"),
        ("user_vma", "tp2x2x2", "tp rows", "mxfp8"),
        ("custom_partitioning", "tp2x2x2", "tp columns and fsdp", None),
        ("shard_map", "8x1", "whole", "mxfp8"),
        ("shard_map", "dp2x2x2", "dim 1", "fp8_block"),
        ("shard_map", "tp2x2x2", "tp rows and fsdp", "mxfp8"),
        ("user_inside", "2x4", "dim 0", "mxfp8"),
        ("explicit", "2x4", "dim 1", "mxfp8"),
        ("custom_partitioning", "2x4", "one each", "fp8_block"),
    ],
    # In a shard_map of the user's, weights lie as `param_specs` says.
    possible=lambda way, mesh, layout, **_: (
        (mesh == "tp2x2x2") == layout.startswith("tp")
        and (not way.startswith("user") or layout in ("dim 0", "tp columns", "tp rows"))
    ),
)


@pytest.mark.parametrize(tuple(COVER.options), COVER.parameters(0, short=12))
def test_on_mesh(way, mesh, layout, recipe):
    """To a dense layer ep is one more axis of fsdp: weights over both, on either dim, width over tp on either side.
    Matmuls are those of operands rounded along each contracted dim: blocks of rows are a device's own, blocks of a
    weight those of the whole matrix (K = 256 over 8 cuts every block of 128)."""
    sizes = {} if recipe is None else dict(width=256, columns=(256,))
    p, (x, w, b, dy) = on_mesh(way, mesh, layout, recipe, **sizes)
    if recipe is None:
        return check(p(), (x, w, b, dy))
    of_w = LAYOUTS[layout]
    split = ["tp" in (e or ()) for e in (*of_w, None, None)]
    tp = size(mesh, "tp")

    def rows(v, format, over, cut, s=None):
        return round_rows(v, format, over, s, tp if cut else 1)

    r = get_recipe(recipe)
    n = ROWS // size(mesh, *TOKENS)
    segments = [slice(i, i + n) for i in range(0, ROWS, n)]
    weight = {
        over: round_weight(w[None], r.w, over, 1 if split[0] else 2, tp if any(split) else 1)[0]
        for over in ("rows", "columns")
    }
    y, _, (dx, dw, db) = p()
    assert rel_error(y, rows(x, r.x, "columns", split[0]) @ weight["rows"] + b.astype(np.float64)) < 2e-6
    assert rel_error(dx, rows(dy, r.dy, "columns", split[1]) @ weight["columns"].T) < 2e-6
    want = rows(x, r.x, "rows", False, segments).T @ rows(dy, r.dy, "rows", False, segments)
    assert rel_error(dw, want) < 2e-6
    assert rel_error(db, dy.astype(np.float64).sum(0)) < 2e-6


BATCHES = [
    ((8, 8), (TOKENS, None)),
    ((2, 32), ("fsdp", "ep")),
    ((2, 32), (None, None)),
    ((1, 64), (None, BOTH)),
]


@pytest.mark.parametrize(
    ("way", "rows", "of_x"),
    mark_rest(
        [
            ("explicit", *BATCHES[0]),
            ("custom_partitioning", *BATCHES[1]),
            ("explicit", *BATCHES[2]),
            ("shard_map", *BATCHES[3]),
            *((way, *b) for way in ("custom_partitioning", "explicit") for b in BATCHES),
        ],
        4,
    ),
)
def test_batches(way, rows, of_x):
    """[B, L, K] with B over the mesh, in part, or not at all (B does not divide): the same numbers, and y as x lay."""
    p, args = on_mesh(way, "2x4", "dim 0", rows=rows, columns=(2, 24), of_x=of_x)
    check(p(), args)
    if way == "explicit":
        x = p.args[0][0]
        y = p.placed()[0]
        assert y.sharding.shard_shape(y.shape)[:2] == x.sharding.shard_shape(x.shape)[:2]


@pytest.mark.parametrize("recipe", mark_rest(("fp8_block", None, "mxfp8"), 1))
def test_bfloat16(recipe):
    """y and dx in bfloat16, gradients of float32 weights in float32; within 1% of float32's (operands are rounded once
    to bfloat16 and quantized from there), each term of it half an ulp of 2^-8."""
    x, w, b, dy = operands(width=128)
    x, dy = (jnp.asarray(v).astype(jnp.bfloat16) for v in (x, dy))

    def run(x, dy):
        y, pull = jax.vjp(lambda *a: dense(*a, recipe=recipe), x, jnp.asarray(w), jnp.asarray(b))
        return y, *pull(dy)

    narrow = run(x, dy)
    wide = run(x.astype(jnp.float32), dy.astype(jnp.float32))
    assert [v.dtype for v in narrow] == [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32]
    for a, v in zip(narrow, wide, strict=True):
        assert rel_error(a.astype(jnp.float32), v) < 1e-2


EVERY = [
    ("custom_partitioning", "fp8_block", "dim 0"),
    ("explicit", "mxfp8", "dim 1"),
    ("shard_map", None, "dim 0"),
]
EVERY += [
    ("custom_partitioning", None, "dim 1"),
    ("shard_map", "mxfp8", "dim 0"),
    ("explicit", "fp8_block", "dim 0"),
]


@pytest.mark.parametrize("way, recipe, layout", mark_rest(EVERY, 2))
def test_collectives(way, recipe, layout):
    """The weight crosses (fsdp, ep) as bytes, forward and again backward; its gradient leaves by reduce-scatter and
    lies like it; nothing else of its size moves, and no activation, however much smaller than the weight."""
    width, columns = 64, 512
    p, _ = on_mesh(way, "2x4", layout, recipe, width=width, columns=(columns,), rows=(16,))
    traffic = p.under(lambda *args: inspect.collectives(p.fn, *args))
    assert {c.axes for c in traffic} == {BOTH}
    whole = width * columns
    gathers = [c for c in traffic if c.kind == "all-gather"]
    weights = [c.dtype for c in gathers if c.size == whole]
    assert set(weights) == {"uint8" if recipe else "float32"} and len(weights) in gather_counts(way)
    assert sum(c.bytes for c in gathers if c.size != whole) <= whole // 4
    assert [c.size for c in traffic if c.kind == "reduce-scatter"] == [whole // 8]
    # The bias's gradient, and the maxima of the blocks that 8 rows or 64 columns of a shard share with other shards.
    shared = {"fp8_block": 4, "mxfp8": 2 * columns if layout == "dim 0" else 0}.get(recipe or "", 0)
    assert {c.size for c in traffic if c.kind == "all-reduce"} <= {columns, shared}
    y, _, (dx, dw, _) = p.placed()
    assert dw.sharding.shard_shape(dw.shape) == p.args[0][1].sharding.shard_shape(dw.shape)
    assert y.sharding.shard_shape(y.shape) == (2, columns)
    assert dx.sharding.shard_shape(dx.shape) == (2, width)


@pytest.mark.parametrize("way", mark_rest(WAYS[:3], 1))
def test_quantizing_halves_what_is_gathered(way):
    """Bytes of the bfloat16 program's gathers against fp8_block's: at most 0.53, the scales included."""
    sent = {}
    for recipe in (None, "fp8_block"):
        x, w, _, dy = operands(width=256, columns=(256,), rows=(16,))
        layout = spec("2x4", TOKENS)
        of_w = P(BOTH)
        x, dy = (v.astype(jnp.bfloat16) for v in (x, dy))

        def fn(x, w, engine, recipe=recipe):
            return (dense(x, w, recipe=recipe, engine=engine), ())

        p = program(way, "2x4", fn, (x, w), (layout, of_w), layout, cotangents=dy, wrt=(0, 1))
        traffic = p.under(lambda *args, p=p: inspect.collectives(p.fn, *args))
        sent[recipe] = inspect.total_bytes(traffic, kind="all-gather")
    assert sent["fp8_block"] <= 0.53 * sent[None]


@pytest.mark.parametrize("shape", mark_rest([((12, 64),), ((7, 9),), ((32, 48),), ((12, 20),)], 1))
def test_default_layout(shape):
    """Without `w_spec`, on the shard_map engine: what `dense_spec` says, on whichever dim divides, or whole."""
    with jax.set_mesh(make_mesh("2x4")):
        of_w = dense_spec(moax.Axes(), shape)
    x = random(4, 16, shape[0])
    w = random(5, *shape)
    dy = random(6, 16, shape[1])
    layout = spec("2x4", TOKENS)
    fn = lambda x, w, engine: (dense(x, w, engine=engine), ())  # noqa: E731
    p = program("shard_map", "2x4", fn, (x, w), (layout, of_w), layout, cotangents=dy, wrt=(0, 1))
    check(p(), (x, w, np.zeros(shape[1]), dy))
    gathered = inspect.weight_gathers(
        p.under(lambda *args: inspect.collectives(p.fn, *args)),
        ("fsdp", "ep"),
    )
    assert bool(gathered) == any(of_w)


@pytest.mark.parametrize("recipe", (None, *RECIPES))
def test_nan_stays_in_its_row(recipe):
    """A NaN in one row of x is seen in that row of y, and no other: no scale carries it along."""
    x, w, *_ = operands(width=128)
    clean = dense(jnp.asarray(x), jnp.asarray(w), recipe=recipe)
    x[5, 3] = np.nan
    bad = dense(jnp.asarray(x), jnp.asarray(w), recipe=recipe)
    others = np.arange(ROWS) != 5
    assert np.isnan(bad[5]).all()
    assert np.isfinite(np.asarray(bad)[others]).all()
    np.testing.assert_array_equal(np.asarray(bad)[others], np.asarray(clean)[others])


@pytest.mark.parametrize("way", ("none", "custom_partitioning"))
def test_vmap(way):
    """A batch of layers is each of them."""
    x = random(7, 3, ROWS, WIDTH)
    w = random(8, 3, WIDTH, COLUMNS)
    dy = random(9, 3, ROWS, COLUMNS)

    def fn(x, w, engine):
        return (jax.vmap(lambda x, w: dense(x, w, engine=engine))(x, w), ())

    rows = P(None, BOTH)
    p = program(way, "2x4", fn, (x, w), (rows, rows), rows, cotangents=dy, wrt=(0, 1))
    got = p()
    for i in range(3):
        check(jax.tree.map(lambda v, i=i: v[i], got), (x[i], w[i], np.zeros(COLUMNS), dy[i]))


@pytest.mark.parametrize(
    "shapes, options, message",
    [
        (
            ((4, 8), (9, 6)),
            {},
            r"x, w have shapes \(4, 8\), \(9, 6\); they must be \[\*batch, T, K\], \[K, \*D, C\]",
        ),
        (((8,), (8, 6)), {}, r"x has shape \(8,\); it must be \[\*batch, T, K\]"),
        (((4, 8), (8,)), {}, r"w has shape \(8,\); it must be \[K, \*D, C\]"),
        (
            ((4, 8), (8, 6), (8,)),
            {},
            r"bias have shapes \(4, 8\), \(8, 6\), \(8,\); they must be .*, \[K, \*D, C\], \[\*D, C\]",
        ),
        (
            ((4, 8), (8, 6)),
            dict(recipe="fp4"),
            "recipe='fp4' must be None, a Recipe, or one of 'fp8_block'",
        ),
        (((4, 8), (8, 6)), dict(engine="pjit"), "engine='pjit' must be one of"),
        (((4, 8), (8, 6)), dict(kernels="triton"), "kernels='triton' must be one of"),
    ],
)
def test_errors(shapes, options, message):
    """Shapes and names that cannot work are named."""
    with pytest.raises(ValueError, match=message):
        dense(*map(jnp.zeros, shapes), **options)


def test_vmap_over_a_dim_that_an_explicit_axis_splits():
    """Breaks if JAX's own error, about a `shard_map` that the caller never wrote, is all that is said."""
    mesh = make_mesh("2x4", "explicit")
    x = put(mesh, P("fsdp"), jnp.ones((8, 16, 8)))
    with (
        jax.set_mesh(mesh),
        pytest.raises(moax.Unsupported, match=r"vmap over a dim that .*\['fsdp'\] split: .*reshard"),
    ):
        jax.vmap(lambda x: dense(x, jnp.ones((8, 4))))(x)


@pytest.mark.parametrize("way", ("shard_map", "explicit"))
def test_rows_that_do_not_divide(way):
    """12 rows on 8 devices: the error names dim, size and axes."""
    fn = lambda x, w, engine: (dense(x, w, engine=engine), ())  # noqa: E731
    p = program(way, "2x4", fn, (np.zeros((12, 8)), np.zeros((8, 8))), (P(), P(BOTH)))
    with pytest.raises(
        ValueError,
        match=r"dim 0 of size 12 is not divisible by mesh axes \('fsdp', 'ep'\) of 8 devices",
    ):
        p()


def test_refuses_axes_that_are_no_weights():
    """A weight over dp is no layout of ours: refused by dim and axes, on Explicit axes where it is certain."""
    mesh = make_mesh("dp2x2x2", "explicit")
    with jax.set_mesh(mesh):
        x, w = put(mesh, (P(TOKENS), P("dp")), (np.zeros((16, 8)), np.zeros((8, 8))))
        with pytest.raises(
            ValueError,
            match="w: dim 0 is sharded over mesh axis 'dp'; .*'fsdp', 'ep' alone",
        ):
            dense(x, w)
