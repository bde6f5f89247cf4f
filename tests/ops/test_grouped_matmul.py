"""Grouped matmul: forward and every gradient against float64 loops over groups.

Covers: sizes of groups x alignment x columns; recipes x columns; ways x meshes x layouts x recipes by pairs (`COVER`);
the collectives of the compiled program; vmap.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import moax
from moax import inspect
from moax.ops import grouped_matmul
from moax.recipe import RECIPES, Format, Recipe, get_recipe
from support import (
    TOKENS,
    WAYS,
    Table,
    fake_operands,
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
from support.matmuls import PATTERNS, problem
from support.oracle.ops import grouped_matmul_vjp


def vjp(x, w, sizes, bias, dy, **options):
    """y and the gradients of x, w and, where there is one, bias."""
    fn = lambda x, w, *bias: grouped_matmul(x, w, sizes, *bias, **options)  # noqa: E731
    y, pull = jax.vjp(fn, x, w, *(() if bias is None else (bias,)))
    return y, *pull(dy)


def check(got, want, real, tolerance=2e-6):
    """Each result per expert (y and dx: whole), and rows of padding exactly 0."""
    for v in got[:2]:
        np.testing.assert_array_equal(np.asarray(v, np.float64)[~real], 0.0)
    assert rel_error(got[0], want[0]) < tolerance, "y"
    assert rel_error(got[1], want[1]) < tolerance, "dx"
    for name, g, w in zip(("dw", "dbias"), got[2:], want[2:], strict=False):
        assert rel_error(g, w, per=0) < tolerance, name


@pytest.mark.parametrize("columns", [(24,), (2, 12)], ids=str)
@pytest.mark.parametrize("align", (1, 8))
@pytest.mark.parametrize("pattern", PATTERNS)
def test_group_sizes(pattern, align, columns):
    """Every degenerate size, rows of padding between groups and behind the last full of NaN; an empty group's gradient
    is 0."""
    sizes = PATTERNS[pattern]
    num_rows = 88 if align == 8 else 48
    args, real = problem(sizes, align, num_rows, 20, columns)
    got = jax.jit(functools.partial(vjp, align=align))(*args)
    check(got, grouped_matmul_vjp(*args, align), real)


@pytest.mark.parametrize("recipe", (None, "fp8_block"))
def test_bfloat16(recipe):
    """Computed and returned in bfloat16, summed in float32: within half an ulp, 2^-9 of the largest, of the exact sums
    of rounded operands, for each of matmul, bias and their sum; gradients of float32 weights and biases are
    float32."""
    sizes = (7, 130, 0, 40)
    align = get_recipe(recipe).row_alignment
    (x, w, sizes, bias, dy), real = problem(sizes, align, 640 if recipe else 192, 256, (2, 64))
    narrow = lambda v: jnp.asarray(v).astype(jnp.bfloat16)  # noqa: E731
    wide = lambda v: np.asarray(v.astype(jnp.float32))  # noqa: E731
    got = jax.jit(functools.partial(vjp, recipe=recipe))(
        narrow(x), jnp.asarray(w), sizes, jnp.asarray(bias), narrow(dy)
    )
    assert [v.dtype for v in got] == [jnp.bfloat16, jnp.bfloat16, jnp.float32, jnp.float32]
    x = wide(narrow(x))
    dy = wide(narrow(dy))
    w = w if recipe else wide(narrow(w))
    operands = [wide(narrow(v)) for v in fake_operands(x, w, dy, get_recipe(recipe), real)]
    want = grouped_matmul_vjp(x, w, sizes, bias, dy, align, quantized=operands)
    check([np.asarray(v.astype(jnp.float32)) for v in got], want, real, tolerance=3 * 2.0**-9)


@given(st.lists(st.integers(0, 9), min_size=6, max_size=6), st.sampled_from((1, 4)))
def test_any_group_sizes(sizes, align):
    """Of any sizes, with the buffer full or nearly empty."""
    args, real = problem(sizes, align, 72, 8, (6,))
    check(_jitted(*args, align), grouped_matmul_vjp(*args, align), real)


@functools.partial(jax.jit, static_argnums=5)
def _jitted(x, w, sizes, bias, dy, align):
    return vjp(x, w, sizes, bias, dy, align=align)


# With scales that are powers of two rounding is the same in any block, but for the smallest values; these tell blocks
# along rows from blocks along columns.
ORIENTED = Recipe(*[Format(block=32)] * 3)


@pytest.mark.parametrize("columns", [(96,), (2, 40)], ids=str)
@pytest.mark.parametrize("recipe", [*RECIPES, "oriented"])
def test_recipes_against_fake_quantized_operands(recipe, columns):
    """Each matmul is the exact one of operands quantized along its own contracted dim, to float32's sums: edge blocks
    (K = 200), groups whose last block of rows is half padding, empty groups. NaN in padding reaches no scale."""
    recipe = RECIPES.get(recipe, ORIENTED)
    sizes = (70, 0, 128, 1)
    align = recipe.row_alignment
    args, real = problem(sizes, align, 512, 200, columns)
    x, w, _, _, dy = args
    got = jax.jit(functools.partial(vjp, recipe=recipe))(*args)
    want = grouped_matmul_vjp(*args, align, quantized=fake_operands(x, w, dy, recipe, real))
    check(got, want, real)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_against_full_precision(recipe):
    """What the method costs: each operand is off by at most 2^-4 of its block's amax, most by far less; the
    errors of a sum are independent, so that y is within 6% of its largest, and gradients within 10%."""
    sizes = (70, 0, 128, 1)
    align = RECIPES[recipe].row_alignment
    args, real = problem(sizes, align, 512, 200, (96,))
    got = jax.jit(functools.partial(vjp, recipe=recipe))(*args)
    want = grouped_matmul_vjp(*args, align)
    for g, v, bound in zip(got, want, (0.06, 0.1, 0.1, 1e-6), strict=True):
        assert rel_error(g, v, per=None if len(v) == len(real) else 0) < bound


# w [E, K, 2, F] or, where K is over tp, [E, K, H]; E = 8.
LAYOUTS = {
    "experts": P(("ep", "fsdp")),
    "model": P("ep", "fsdp"),
    "columns": P("ep", None, None, "fsdp"),
    "whole": P("ep"),
    "tp columns": P("ep", "fsdp", None, "tp"),
    "tp columns and fsdp": P("ep", None, None, ("tp", "fsdp")),
    "tp rows": P("ep", "tp", "fsdp"),
    "tp rows and fsdp": P("ep", ("tp", "fsdp")),
}
COVER = Table(
    "grouped matmul",
    {
        "way": WAYS,
        "mesh": ("8x1", "2x4", "dp2x2x2", "tp2x2x2"),
        "layout": tuple(LAYOUTS),
        "recipe": (None, *RECIPES),
    },
    [
        ("explicit", "2x4", "experts", "mxfp8"),
        ("explicit", "dp2x2x2", "model", None),
        ("custom_partitioning", "tp2x2x2", "tp columns and fsdp", "mxfp8"),
        ("shard_map", "8x1", "columns", "mxfp8"),
        ("user_vma", "tp2x2x2", "tp columns", "fp8_block"),
        ("user", "tp2x2x2", "tp rows", "mxfp8"),
        ("shard_map", "2x4", "whole", "fp8_block"),
        ("shard_map", "tp2x2x2", "tp rows and fsdp", None),
        ("user_inside", "2x4", "model", "mxfp8"),
        ("custom_partitioning", "8x1", "experts", None),
        ("user", "8x1", "model", "fp8_block"),
        ("user_inside", "dp2x2x2", "experts", "fp8_block"),
        ("custom_partitioning", "2x4", "columns", None),
        ("custom_partitioning", "dp2x2x2", "model", "fp8_block"),
    ],
    # In a shard_map of the user's, weights lie as `param_specs` says.
    possible=lambda way, mesh, layout, **_: (
        (mesh == "tp2x2x2") == layout.startswith("tp")
        and (not way.startswith("user") or layout in ("experts", "model", "tp columns", "tp rows"))
    ),
)


def group_sizes_on(shards, experts, largest):
    """Sizes of each shard's groups: random, and of the first two shards all on one and none."""
    sizes = np.random.default_rng(5).integers(0, largest + 1, (shards, experts))
    sizes[0] = 0
    sizes[0, -1] = largest
    sizes[1 % shards] = 0
    return tuple(sizes.reshape(-1))


def place_on_mesh(way, mesh, layout, recipe=None, width=32, columns=None, largest=9, align=4):
    """`grouped_matmul` and its gradients as a program on the mesh; its operands, and which rows are real."""
    columns = columns or ((24,) if layout.startswith("tp rows") else (2, 24))
    shards = size(mesh, *TOKENS)
    ranks = size(mesh, "ep")
    local = 8 // ranks
    num_rows = local * (-(-largest // align) * align) + align
    sizes = group_sizes_on(shards, local, largest)
    (x, w, sizes, bias, dy), real = problem(
        sizes,
        align,
        num_rows,
        width,
        columns,
        shards,
        experts=8,
    )
    of_w = spec(mesh, *LAYOUTS[layout])
    tp = tuple("tp" if "tp" in (e or ()) else None for e in (*of_w, *[None] * (w.ndim - len(of_w))))
    placement = spec(mesh, TOKENS, tp[1])
    ep = spec(mesh, TOKENS, *tp[2:])
    of_bias = spec(mesh, "ep", *tp[2:])
    declared = None if way in ("custom_partitioning", "explicit") else of_w

    def forward(x, w, sizes, bias, engine):
        y = grouped_matmul(
            x,
            w,
            sizes,
            bias,
            recipe=recipe,
            align=align,
            w_spec=declared,
            engine=engine,
        )
        return jax.lax.psum(y, "tp") if tp[1] and in_user_shard_map() else y, ()

    p = program(
        way,
        mesh,
        forward,
        (x, w, sizes, bias),
        (placement, of_w, spec(mesh, TOKENS), of_bias),
        ep,
        cotangents=dy,
        wrt=(0, 1, 3),
    )
    return p, (x, w, sizes, bias, dy), real


def run_on_mesh(way, mesh, layout, recipe=None, align=4, **extra):
    """y, dx, dw, dbias on the mesh, the oracle's, and which rows are real."""
    p, (x, w, sizes, bias, dy), real = place_on_mesh(
        way,
        mesh,
        layout,
        recipe,
        align=align,
        **extra,
    )
    y, _, grads = p()
    tp_dim = None
    if layout.startswith("tp"):
        tp_dim = 1 if layout.startswith("tp rows") else w.ndim - 1
    operands = fake_operands(x, w, dy, get_recipe(recipe), real, tp_dim=tp_dim, tp=size(mesh, "tp"))
    shards = size(mesh, *TOKENS)
    ranks = size(mesh, "ep")
    return (y, *grads), grouped_matmul_vjp(x, w, sizes, bias, dy, align, shards, ranks, operands), real


@pytest.mark.parametrize(tuple(COVER.options), COVER.parameters(0, short=14))
def test_on_mesh(way, mesh, layout, recipe):
    """Experts over ep, width over tp on either side, fsdp on any dim: the rows are each shard's own, a weight's
    gradient the sum over every shard that used it. Blocks of a weight are those of the whole matrix (K = 256 over 8
    lies in two blocks), a tensor's scale is the mesh's, and padding reaches neither."""
    extra = {}
    if recipe is not None:
        columns = (64,) if layout.startswith("tp rows") else (2, 64)
        extra = dict(
            width=256,
            columns=columns,
            largest=40,
            align=max(RECIPES[recipe].row_alignment, 8),
        )
    got, want, real = run_on_mesh(way, mesh, layout, recipe, **extra)
    check(got, want, real)


COLLECTIVES = [
    ("shard_map", "experts", "fp8_block"),
    ("custom_partitioning", "columns", None),
    ("explicit", "columns", "fp8_block"),
    ("custom_partitioning", "model", "mxfp8"),
    ("shard_map", "model", None),
    ("explicit", "model", "mxfp8"),
]


@pytest.mark.parametrize("way, layout, recipe", mark_rest(COLLECTIVES, 2))
def test_collectives(way, recipe, layout):
    """Weights cross fsdp as bytes, twice (forward, dgrad), in whatever order; the gradient leaves by one reduce-scatter
    and lies like the weight; no row of an activation moves, nor does the layout of a weight propagate to one."""
    # Without a recipe there are few rows, so that the layout of w is the larger one.
    align = get_recipe(recipe).row_alignment
    p, *_ = place_on_mesh(
        way,
        "2x4",
        layout,
        recipe,
        width=64,
        columns=(2, 64),
        largest=3,
        align=align,
    )
    traffic = p.under(lambda *args: inspect.collectives(p.fn, *args))
    whole = 2 * 64 * 2 * 64  # elements of a rank's experts
    gathers = [c for c in traffic if c.kind == "all-gather"]
    assert {c.axes for c in gathers} == {("fsdp",)}
    weights = [c for c in gathers if c.size == whole]
    assert {c.dtype for c in weights} == {"uint8" if recipe else "float32"}
    assert len(weights) in gather_counts(way)
    assert sum(c.size for c in gathers if c not in weights) <= whole // 8
    scattered = [c for c in traffic if c.kind == "reduce-scatter"]
    assert [(c.axes, c.size) for c in scattered] == [(("fsdp",), whole // 2)]
    assert all(c.size <= 2 * 2 * 64 for c in traffic if c.kind == "all-reduce")
    assert {c.kind for c in traffic} <= {"all-gather", "reduce-scatter", "all-reduce"}
    y, _, (dx, dw, _) = p.placed()
    assert dw.sharding.shard_shape(dw.shape) == p.args[0][1].sharding.shard_shape(dw.shape)
    for v in (y, dx):
        assert v.sharding.shard_shape(v.shape) == (v.shape[0] // 8, *v.shape[1:])


@pytest.mark.parametrize(
    ("way", "layout"),
    mark_rest([("custom_partitioning", "tp columns and fsdp"), ("explicit", "tp rows and fsdp"),
          *itertools.product(("shard_map",), ("tp columns and fsdp", "tp rows and fsdp"))], 2),
)  # fmt: skip
def test_width_stays_split(way, layout):
    """Over tp nothing is gathered: the matmul that contracts the split dim sums its rows over tp, the other needs
    none."""
    columns = (2, 64) if layout.startswith("tp columns") else (64,)
    p, *_ = place_on_mesh(way, "tp2x2x2", layout, width=32, columns=columns, largest=3)
    traffic = p.under(lambda *args: inspect.collectives(p.fn, *args))
    assert {c.axes for c in traffic if c.kind in ("all-gather", "reduce-scatter")} == {("fsdp",)}
    rows = [c for c in traffic if c.axes == ("tp",) and c.size > 4 * 64]
    assert [c.kind for c in rows] == ["all-reduce"]
    y, _, (dx, dw, _) = p.placed()
    split = y if layout.startswith("tp columns") else dx
    assert split.sharding.shard_shape(split.shape)[-1] * 2 == split.shape[-1]
    assert dw.sharding.shard_shape(dw.shape) == p.args[0][1].sharding.shard_shape(dw.shape)


@pytest.mark.parametrize("way", ("none", "custom_partitioning"))
def test_vmap(way):
    """A batch is each of its elements, forward and backward."""
    sizes = np.asarray([group_sizes_on(8, 2, 5), group_sizes_on(8, 2, 5)[::-1]], np.int32)
    x = random(6, 2, 96, 8)
    w = random(7, 2, 8, 8, 6)
    dy = random(8, 2, 96, 6)
    tokens = P(None, ("fsdp", "ep"))

    def forward(x, w, sizes, engine):
        return jax.vmap(lambda x, w, sizes: grouped_matmul(x, w, sizes, engine=engine))(x, w, sizes), ()

    if way == "none":
        x = x[:, :12]
        dy = dy[:, :12]
        sizes = sizes[:, :2]
        w = w[:, :2]
    y, _, (dx, dw) = program(
        way, "2x4", forward, (x, w, sizes), (tokens, P(None, "ep"), tokens), tokens, cotangents=dy, wrt=(0, 1)
    )()
    for i in range(2):
        shards, ranks = (1, 1) if way == "none" else (8, 4)
        want = grouped_matmul_vjp(x[i], w[i], sizes[i], None, dy[i], 1, shards, ranks)
        for got, v in zip((y[i], dx[i], dw[i]), want, strict=False):
            assert rel_error(got, v) < 2e-6


def test_under_scan_and_remat():
    """A loop of layers, rematerialized, computes what the layers do one by one: plans and sizes are values."""
    args, _ = problem((7, 0, 9), 1, 16, 8, (8,))
    x, w, sizes, *_ = map(jnp.asarray, args)
    x = jnp.where(jnp.isnan(x), 0.0, x)
    layers = jnp.stack([w, 2 * w, -w])
    step = jax.checkpoint(lambda x, w: (grouped_matmul(x, w, sizes), None))
    scanned = jax.value_and_grad(lambda ws: (jax.lax.scan(step, x, ws)[0] ** 2).sum())
    plain = jax.value_and_grad(
        lambda ws: (functools.reduce(lambda x, w: step(x, w)[0], ws, x) ** 2).sum(),
    )
    a, da = jax.jit(scanned)(layers)
    b, db = jax.jit(plain)(layers)
    assert rel_error(a, b) < 1e-6
    assert rel_error(da, db, per=0) < 1e-6


@pytest.mark.parametrize("x_spec", [P(), P("ep"), P(None, ("fsdp", "ep"))], ids=str)
def test_operands_of_another_layout(x_spec):
    """Explicit axes: rows that lie otherwise are moved, and their gradient comes back as they lay."""
    (x, w, sizes, bias, dy), real = problem(
        group_sizes_on(8, 2, 5),
        1,
        12,
        8,
        (8,),
        shards=8,
        experts=8,
    )
    out = P(("fsdp", "ep"))
    fn = lambda x, w, sizes, bias, engine: (grouped_matmul(x, w, sizes, bias), ())  # noqa: E731
    specs = (x_spec, P("ep", None, "fsdp"), P(), P())
    p = program(
        "explicit",
        "2x4",
        fn,
        (x, w, sizes, bias),
        specs,
        out,
        cotangents=dy,
        wrt=(0, 1, 3),
    )
    y, _, grads = p()
    check((y, *grads), grouped_matmul_vjp(x, w, sizes, bias, dy, 1, 8, 4), real)


@pytest.mark.parametrize("of_w", [P("fsdp"), P(None, "ep"), P(("fsdp", "ep"))], ids=str)
def test_conflicting_layouts(of_w):
    """Explicit axes: a weight whose experts are not over ep is refused by dim and axes; on Auto axes, where propagation
    may have chosen it, it is laid out anew, and the numbers are right."""
    args, real = problem(group_sizes_on(8, 2, 5), 1, 12, 8, (8,), shards=8, experts=8)
    layout = P(("fsdp", "ep"))
    (x, w, sizes, _, dy) = args
    fn = lambda x, w, sizes, engine: (grouped_matmul(x, w, sizes, engine=engine), ())  # noqa: E731
    explicit = program("explicit", "2x4", fn, (x, w, sizes), (layout, of_w, layout))
    has = "is not sharded; "
    if of_w[0]:
        entry = of_w[0] if isinstance(of_w[0], tuple) else (of_w[0],)
        has = f"is sharded over mesh ax[ei]s {', '.join(map(repr, entry))}; "
    with pytest.raises(ValueError, match=f"w: dim 0 {has}"):
        explicit()
    auto = program(
        "custom_partitioning",
        "2x4",
        fn,
        (x, w, sizes),
        (layout, of_w, layout),
        layout,
        cotangents=dy,
        wrt=(0, 1),
    )
    y, _, grads = auto()
    check((y, *grads), grouped_matmul_vjp(x, w, sizes, None, dy, 1, 8, 4), real)


def test_refuses_axes_that_are_no_weights():
    """dp splits tokens, never weights: gathering over it silently would hide a mistaken layout."""
    mesh = make_mesh("dp2x2x2", "explicit")
    layout = P(("dp", "fsdp", "ep"))
    with jax.set_mesh(mesh):
        x, w, sizes = put(
            mesh,
            (layout, P("ep", "dp"), layout),
            (np.zeros((16, 8)), np.zeros((4, 8, 8)), np.zeros(16, np.int32)),
        )
        with pytest.raises(
            ValueError,
            match="w: dim 1 is sharded over mesh axis 'dp'; .* over mesh axis 'fsdp' alone",
        ):
            grouped_matmul(x, w, sizes)


@pytest.mark.parametrize(
    "shapes, options, message",
    [
        (
            ((8, 4), (2, 4, 6), (2,)),
            dict(recipe="fp8_block", align=64),
            "align=64 must be a multiple of 128",
        ),
        (((8, 4), (2, 4, 6), (2,)), dict(align=0), "align=0 must be an int of at least 1"),
        (
            ((8, 4), (2, 4, 6), (2,)),
            dict(recipe="int8"),
            "recipe='int8' must be None, a Recipe, or one of 'fp8_block'",
        ),
        (
            ((8, 4), (2, 4, 6), (2,)),
            dict(kernels="triton"),
            "kernels='triton' must be one of 'auto', 'hopper', 'xla'",
        ),
        (
            ((8, 5), (2, 4, 6), (2,)),
            {},
            r"x, w, group_sizes have shapes \(8, 5\), \(2, 4, 6\), \(2,\); they must",
        ),
        (((8, 4), (2, 4, 6), (3,)), {}, r"group_sizes has shape \(3,\); it must be \[groups=2\]"),
        (((8, 4), (4, 6), (2,)), {}, r"w has shape \(4, 6\); it must be \[E, K, \*D, C\]"),
        (((2, 8, 4), (2, 4, 6), (2,)), {}, r"x has shape \(2, 8, 4\); it must be \[M, K\]"),
        (
            ((8, 4), (2, 4, 6), (2,), (2, 5)),
            {},
            r"bias have shapes .*, \(2, 5\); they must be .*, \[E, \*D, C\]",
        ),
    ],
)
def test_errors(shapes, options, message):
    """Shapes and options that cannot work are named before anything is compiled."""
    x, w, sizes, *bias = shapes
    with pytest.raises(ValueError, match=message):
        grouped_matmul(
            jnp.zeros(x),
            jnp.zeros(w),
            jnp.zeros(sizes, jnp.int32),
            *map(jnp.zeros, bias),
            **options,
        )


def test_kernels_by_name():
    """A choice by name that cannot run is refused, not replaced."""
    with pytest.raises(moax.Unsupported, match="kernels='hopper': .*use 'auto' or 'xla'"):
        grouped_matmul(
            jnp.zeros((8, 4)),
            jnp.zeros((2, 4, 6)),
            jnp.zeros(2, jnp.int32),
            kernels="hopper",
        )
