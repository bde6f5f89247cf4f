"""Quantize and dequantize: bits and scales against NumPy's own rounding, block by block and shard by shard.

Covers: formats x shapes x blocks; values that are tiny, huge or not finite; ways x meshes x layouts; vmap; errors.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from moax import inspect, recipe
from moax.kernels.scales import dequantize as dequantize_local
from moax.kernels.xla import quantize as quantize_local
from moax.ops import dequantize, grouped_wgrad, quantize
from moax.recipe import Format, Recipe
from moax.types import QArray
from support import TOKENS, WAYS, make_mesh, program, put, random, size, some, spec
from support.oracle.formats import BITS, by_blocks, expand
from support.oracle.formats import quantize as quantize_by_numpy

FORMATS = {
    "fp8_block": recipe.RECIPES["fp8_block"].w,
    "mxfp8": recipe.RECIPES["mxfp8"].w,
    "pow2": Format(block=128, tile=128, scale="pow2"),
    "e5m2": Format(dtype="e5m2", block=64),
}


def shards_of(x, counts):
    """Each shard of x, cut in `counts` along its dims, by index."""
    for index in np.ndindex(*counts):
        sizes = [n // c for n, c in zip(x.shape, counts, strict=True)]
        yield index, x[tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, sizes, strict=True))]


def oracle_by_shard(x, format, block, counts):
    """`quantize_by_numpy` of each shard by itself, laid side by side as a gather does; a dim of one block has one
    scale, the mesh's."""
    values = np.empty(counts, object)
    scales = np.empty(counts, object)
    whole = tuple(1 if b is None else c for b, c in zip(block, counts, strict=True))
    for index, shard in shards_of(x, whole):
        v, s = quantize_by_numpy(shard, format, block)
        for inner, part in shards_of(v, [c // w for c, w in zip(counts, whole, strict=True)]):
            values[tuple(np.add(index, inner))] = part
        scales[index] = s
    scales = scales[tuple(slice(0, w) for w in whole)]
    return np.block(values.tolist()), np.block(scales.tolist())


def values_of(q: QArray):
    """The values that the bits say, float64."""
    return np.asarray(q.data).view(BITS[q.dtype][2]).astype(np.float64)


def scales_of(q: QArray):
    """The scales as float64, exponents as powers of two."""
    scale = np.asarray(q.scale)
    return 2.0 ** (scale.astype(np.float64) - 127) if scale.dtype == np.uint8 else scale.astype(np.float64)


def check(q: QArray, want):
    np.testing.assert_array_equal(values_of(q), want[0])
    np.testing.assert_array_equal(scales_of(q), want[1])


def wide_range(seed, *shape):
    """Normals times powers of two from 2^-20 to 2^20, a zero here and there."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 20, shape)
    return np.where(rng.random(shape) < 0.05, 0.0, x).astype(np.float32)


ROWS = [
    ((5, 2880), "fprop"),
    ((7, 200), "fprop"),
    ((4, 1), "fprop"),
    ((200, 3), "wgrad"),
    ((1, 9), "wgrad"),
]
ROWS += [((6, 2, 96), "fprop"), ((96, 2, 5), "wgrad")]
WEIGHTS = [
    ((2, 200, 96), "fprop"),
    ((2, 200, 96), "dgrad"),
    ((3, 1, 130), "fprop"),
    ((2, 96, 2, 200), "fprop"),
]
WEIGHTS += [((2, 96, 2, 200), "dgrad")]


@pytest.mark.parametrize("name", FORMATS)
def test_matches_numpy(name):
    """Every bit and every scale, rows and weights, blocks along either dim, edge blocks of 2880, 200, 96, 1
    included."""
    format = FORMATS[name]
    for kind, (shape, use) in [
        *(("row", r) for r in ROWS),
        *(("weight", w) for w in WEIGHTS),
    ]:
        block = getattr(format, f"{kind}_block")(len(shape), use)
        x = wide_range(0, *shape)
        q, narrow = jax.jit(lambda x, b=block: (q := quantize(x, format, block=b), dequantize(q)))(x)
        want = quantize_by_numpy(x, format, block)
        check(q, want)
        assert q.data.dtype == jnp.uint8
        assert q.scale.dtype == (jnp.uint8 if format.scale == "e8m0" else jnp.float32)
        back = values_of(q) * expand(want[1], shape, block)
        np.testing.assert_array_equal(narrow, back.astype(np.float32))


@pytest.mark.parametrize("name", FORMATS)
def test_error_bound(name):
    """|x - back| <= half an ulp of the format: 2^-4 |x| (e5m2: 2^-3) or half its least step times the block's scale, so
    at most 2^-4 (2^-3) of the block's amax. A rounding to zero, or a scale too small, breaks it."""
    format = FORMATS[name]
    mantissa, least, _ = BITS[format.dtype]
    for shape in ((5, 2880), (200, 96), (3, 1)):
        x = wide_range(1, *shape)
        q, back = jax.jit(lambda x: (q := quantize(x, format), dequantize(q)))(x)
        off = np.abs(np.asarray(back, np.float64) - x)
        scale = expand(scales_of(q), shape, q.block)
        half = 2.0 ** -(mantissa + 1)
        bound = np.maximum(half * np.abs(x), 2.0 ** (least - mantissa - 1) * scale)
        assert (off <= bound * (1 + 1e-6)).all()
        amax = expand(by_blocks(x, q.block), shape, q.block)
        assert (off <= half * amax * (1 + 1e-6)).all()


@given(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=40, max_size=40))
def test_error_bound_of_any_floats(values):
    """From subnormals to 2^126, in one block: the same bound, but that a block below 448 * 2^-126 becomes zero."""
    x = np.asarray(values, np.float32).reshape(2, 20)
    q = _quantize_blocks_of_8(jnp.asarray(x))
    scale = expand(scales_of(q), x.shape, q.block)
    off = np.abs(np.asarray(dequantize(q), np.float64) - x)
    assert np.isfinite(scale).all() and (scale > 0).all()
    assert (off <= 2.0**-4 * np.abs(x) * (1 + 1e-6) + 2.0**-10 * scale + 2.0**-126).all()


@jax.jit
def _quantize_blocks_of_8(x):
    return quantize(x, Format(block=8))


@pytest.mark.parametrize("name", FORMATS)
def test_values_of_the_format_are_exact(name):
    """Powers of two times the format's own values come back to the bit, as scales are exact there."""
    format = FORMATS[name]
    every = np.arange(256, dtype=np.uint8).view(BITS[format.dtype][2]).astype(np.float32)
    every = every[np.isfinite(every)]
    x = np.stack([every * np.float32(2.0**e) for e in (-40, -1, 0, 30)])
    format = dataclasses.replace(format, block=len(every))
    np.testing.assert_array_equal(
        dequantize(quantize(jnp.asarray(x), format, block=(1, len(every)))),
        x,
    )


def test_mxfp8_is_exact_in_bfloat16():
    """3 bits of mantissa times a power of two: what dequantizes to bfloat16 loses nothing; DESIGN.md relies on it."""
    q = quantize(jnp.asarray(wide_range(2, 32, 200)), FORMATS["mxfp8"])
    narrow = dequantize(q, jnp.bfloat16)
    assert narrow.dtype == jnp.bfloat16
    np.testing.assert_array_equal(narrow.astype(jnp.float32), dequantize(q))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tiny", (0.0, 1e-38, 1e-45, -1e-40))
def test_zero_and_tiny_blocks(name, tiny):
    """They quantize to zero with a finite scale; a scale of 0 would make NaN of 0 / 0."""
    q = quantize(jnp.full((3, 200), tiny, jnp.float32), FORMATS[name])
    np.testing.assert_array_equal(scales_of(q), 1.0)
    np.testing.assert_array_equal(dequantize(q), 0.0)


def test_small_but_normal_blocks():
    """1e-30 is not tiny: it keeps its precision."""
    x = 1e-30 * random(3, 4, 128)
    back = dequantize(quantize(jnp.asarray(x), FORMATS["fp8_block"]))
    assert (np.abs(back - x) <= np.maximum(2.0**-4 * np.abs(x), 2.0**-10 * np.abs(x).max() / 448) * 1.001).all()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf))
def test_not_finite_stays_where_it_is(name, value):
    """NaN in its own element; every other element, and every scale, as if it had been 0. An Inf that set the scale
    would turn its block to zeros, and the loss would look fine."""
    x = wide_range(4, 6, 200)
    holes = np.zeros(x.shape, bool)
    holes[1, 3] = holes[1, 150] = holes[4] = True
    q0 = quantize(jnp.asarray(np.where(holes, 0.0, x).astype(np.float32)), FORMATS[name])
    q1 = quantize(jnp.asarray(np.where(holes, value, x).astype(np.float32)), FORMATS[name])
    np.testing.assert_array_equal(q0.scale, q1.scale)
    np.testing.assert_array_equal(np.isnan(dequantize(q1)), holes)
    np.testing.assert_array_equal(np.asarray(q0.data)[~holes], np.asarray(q1.data)[~holes])


def test_bfloat16_operand():
    """Quantized from its float32 value, as the products of a bfloat16 model need."""
    x = jnp.asarray(wide_range(5, 8, 200)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(quantize(x).data, quantize(x.astype(jnp.float32)).data)


# (shape, spec, block): [E, K, N] weights by expert, by K, by N; and rows. The mesh is 2x4 (fsdp, ep) or tp2x2x2.
LAYOUTS = {
    "experts": ((8, 200, 96), (("ep", "fsdp"),), "weight"),
    "model": ((4, 512, 96), ("ep", "fsdp"), "weight"),
    "columns": ((4, 256, 512), ("ep", "tp", "fsdp"), "weight"),
    "rows": ((64, 200), (("dp", "fsdp", "ep"),), "row"),
}
NAMES = ("fp8_block", "mxfp8")
COVER = [*itertools.product(WAYS, ["2x4"], ["model"], NAMES)]
COVER += [("custom_partitioning", "2x4", layout, name) for layout, name in itertools.product(LAYOUTS, NAMES)]
COVER += [(way, "tp2x2x2", "columns", "fp8_block") for way in WAYS]
COVER += [
    ("custom_partitioning", "4x2", "model", "fp8_block"),
    ("user_vma", "8x1", "rows", "mxfp8"),
]
COVER = sorted(set(COVER))


def shards_on(mesh, layout):
    """In how many shards the mesh cuts each dim of the layout; its spec."""
    shape, entries, _ = LAYOUTS[layout]
    placement = spec(mesh, *entries, *[None] * (len(shape) - len(entries)))
    counts = []
    for entry in placement:
        names = entry if isinstance(entry, tuple) else (entry,)
        counts.append(1 if entry is None else size(mesh, *names))
    return counts, placement


def check_on_mesh(way, mesh, layout, name):
    shape, _, kind = LAYOUTS[layout]
    counts, layout_of_x = shards_on(mesh, layout)
    format = FORMATS[name]
    block = getattr(format, f"{kind}_block")(len(shape), "fprop")
    x = wide_range(6, *shape)

    def forward(x, engine):
        q = quantize(x, format, block=block, x_spec=layout_of_x, engine=engine)
        return (), (q.data, q.scale, dequantize(q, engine=engine))

    of_scale = P(*(None if b is None else e for e, b in zip(layout_of_x, block, strict=True)))
    p = program(way, mesh, forward, (x,), (layout_of_x,), (), (layout_of_x, of_scale, layout_of_x))
    _, (data, scale, back) = p()
    q = QArray(data, scale, format.dtype, block)
    check(q, oracle_by_shard(x, format, block, counts))
    np.testing.assert_array_equal(back, dequantize(jax.tree.map(jnp.asarray, q)))
    if way in WAYS[:3]:
        with jax.set_mesh(p.mesh):
            whole = jax.eval_shape(
                lambda x: quantize(x, format, block=block, x_spec=layout_of_x, engine="auto"),
                *p.args,
            )
        assert whole.scale.shape == scale.shape


@pytest.mark.parametrize(
    "way, mesh, layout, name",
    some([*COVER[::3], *COVER[1::3], *COVER[2::3]], 6),
)
def test_on_mesh(way, mesh, layout, name):
    """Each shard is quantized by itself, with nobody else's amax; the gathered whole dequantizes to the same values."""
    check_on_mesh(way, mesh, layout, name)


@pytest.mark.parametrize(
    ("way", "layout", "name"),
    some([("custom_partitioning", "model", "fp8_block"), ("explicit", "model", "mxfp8"),
          *itertools.product(("explicit",), ("experts", "model"), NAMES)], 4),
)  # fmt: skip
def test_collectives(way, layout, name):
    """A weight's shard is quantized where it lies: nothing moves."""
    shape, entries, _ = LAYOUTS[layout]
    placement = P(*entries)
    format = FORMATS[name]
    block = format.weight_block(3, "fprop")

    def forward(x, engine):
        return ((), quantize(x, format, block=block, x_spec=placement, engine=engine).data)

    p = program(way, "2x4", forward, (wide_range(8, *shape),), (placement,))
    traffic = p.under(lambda x: inspect.collectives(p.fn, x))
    assert traffic == []
    data = p.placed()[1]
    assert data.sharding.shard_shape(shape) == (
        shape[0] // (8 if layout == "experts" else 4),
        shape[1] // (1 if layout == "experts" else 2),
        shape[2],
    )


@pytest.mark.parametrize(
    "way, mesh, size",
    [
        ("custom_partitioning", "2x4", 200),
        ("shard_map", "2x4", 200),
        ("custom_partitioning", "4x2", 256),
    ],
)
def test_without_a_spec_blocks_are_not_cut(way, mesh, size):
    """Breaks if shards of an Auto mesh that cut a block are quantized as blocks of their own."""
    x = wide_range(9, 4, size, 96)
    layout = P("ep", "fsdp")
    format = FORMATS["fp8_block"]
    block = (1, 128, 128)

    def forward(x, engine):
        q = quantize(x, format, block=block, engine=engine)
        return (), (q, dequantize(q, engine=engine))

    _, (q, back) = program(way, mesh, forward, (x,), (layout,))()
    check(q, quantize_by_numpy(x, format, block))
    np.testing.assert_array_equal(back, dequantize(quantize(jnp.asarray(x), format, block=block)))


@pytest.mark.parametrize("way", ("none", "custom_partitioning"))
@pytest.mark.parametrize("name", NAMES)
def test_vmap(way, name):
    """A batch is each of its elements."""
    x = wide_range(10, 3, 64, 96)
    layout = P(None, ("fsdp", "ep"))

    def forward(x, engine):
        def one(x):
            q = quantize(x, FORMATS[name], x_spec=P(("fsdp", "ep")), engine=engine)
            return q, dequantize(q, engine=engine)

        return (), jax.vmap(one)(x)

    _, (q, back) = program(way, "2x4", forward, (x,), (layout,))()
    for i in range(3):
        one = quantize(jnp.asarray(x[i]), FORMATS[name])
        np.testing.assert_array_equal(q.data[i], one.data)
        np.testing.assert_array_equal(q.scale[i], one.scale)
        np.testing.assert_array_equal(back[i], dequantize(one))


@pytest.mark.parametrize("block", ((1,), (1, 0), (1, 8, 8), (None, -1)))
def test_block_errors(block):
    """One positive entry a dim, or the scale would not line up with the data."""
    said = (
        "block=.* must have one positive int .* for each of the 2 dims" if len(block) != 2 else r"block\[1\]=.* an int"
    )
    with pytest.raises(ValueError, match=said):
        quantize(jnp.zeros((4, 8)), block=block)


def test_quantize_refuses_cut_blocks():
    """Breaks if the type that a user wrote is overruled: on Explicit axes no dim is gathered before it is quantized."""
    mesh = make_mesh("2x4", "explicit")
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"dim 1 of size 200 .* cut its blocks of 128"),
    ):
        quantize(jax.device_put(wide_range(11, 4, 200), P("ep", "fsdp")), Format(block=128))


def test_dequantize_refuses_cut_blocks():
    """Data resharded so that two devices share a block, with its one scale: refused by dim, size and axes."""
    mesh = make_mesh("2x4", "explicit")
    q = quantize(jnp.asarray(wide_range(11, 96, 8)), Format(block=128), block=(128, 1))
    with jax.set_mesh(mesh):
        cut = dataclasses.replace(q, data=put(mesh, P("ep"), q.data), scale=put(mesh, P(), q.scale))
        with pytest.raises(ValueError, match=r"dim 0 of size 96 .* mesh axes \('ep',\), which cut"):
            jax.jit(dequantize)(cut)


def test_rounding_is_not_undone():
    """Breaks if a compiler may take the cast to fewer bits and back for no cast: XLA does on GPUs, and a recipe would
    quantize nothing wherever no collective lies between."""

    def round_trip(x):
        return dequantize_local(quantize_local(x, Format(block=128), (1, 128)))

    text = jax.jit(round_trip).lower(jax.ShapeDtypeStruct((4, 256), jnp.float32)).as_text()
    assert "stablehlo.optimization_barrier" in text


GROUPS, ALIGN, PADDED, WIDTH = (7, 0, 9, 4), 8, 48, 24
STARTS = (0, 8, 8, 24)
BY_EIGHT = {
    "float32": Format(block=8),
    "e8m0": Format(block=8, scale="e8m0"),
    "e5m2": Format(dtype="e5m2", block=8),
}


def dirty(seed, sizes=GROUPS, starts=STARTS, rows=PADDED):
    """Rows with NaN in padding, and which of them are real."""
    x = random(seed, rows, WIDTH)
    real = np.zeros(rows, bool)
    for n, start in zip(sizes, starts, strict=True):
        real[start : start + n] = True
    return np.where(real[:, None], x, np.nan).astype(np.float32), real


def check_groups(q, x, real, format, block, sizes=GROUPS, starts=STARTS):
    """Values and scales of each group against NumPy's, of the group alone."""
    data = np.asarray(q.data).view(BITS[format.dtype][2]).astype(np.float64)
    scale = np.asarray(q.scale)
    scale = 2.0 ** (scale.astype(np.float64) - 127) if scale.dtype == np.uint8 else scale
    np.testing.assert_array_equal(data[~real], 0.0)
    for n, start in zip(sizes, starts, strict=True):
        if n:
            values, want = quantize_by_numpy(x[start : start + n], format, block)
            np.testing.assert_array_equal(data[start : start + n], values)
            begin = start // block[0]
            np.testing.assert_array_equal(scale[begin : begin + len(want)], want)


@pytest.mark.parametrize("name", BY_EIGHT)
@pytest.mark.parametrize("block", [(8, 1), (4, 1), (1, 8), (8, 8)], ids=str)
def test_each_group_is_quantized_by_itself(block, name):
    """Breaks if a block has rows of two groups, padding enters a scale, or rows past the last group are read."""
    x, real = dirty(0)
    quantize_groups = jax.jit(
        lambda x, s: quantize(x, BY_EIGHT[name], block=block, group_sizes=s, align=ALIGN),
    )
    q = quantize_groups(x, np.asarray(GROUPS))
    check_groups(q, x, real, BY_EIGHT[name], block)
    assert np.isfinite(dequantize(q)).all()


def test_is_what_a_product_multiplies():
    """Breaks if rows quantized here and multiplied differ from a product that quantizes: the same dw."""
    x, _ = dirty(2)
    sizes = jnp.asarray(GROUPS)
    format = Format(block=8)
    q = dequantize(quantize(jnp.asarray(x), format, block=(8, 1), group_sizes=sizes))
    dy = jnp.asarray(random(3, PADDED, 6))
    want = grouped_wgrad(jnp.asarray(x), dy, sizes, recipe=Recipe(format, None, None))
    got = grouped_wgrad(q, dy, sizes, align=8)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "way, block",
    some(
        [
            ("custom_partitioning", (8, 1)),
            ("explicit", (1, 8)),
            ("user", (8, 8)),
            ("shard_map", (8, 1)),
            ("explicit", (8, 1)),
            ("custom_partitioning", (1, 8)),
        ],
        3,
    ),
)
def test_groups_on_mesh(way, block):
    """Breaks if a shard reads the groups of another, or its rows are not those that its sizes are of."""
    mesh = "2x4"
    format = BY_EIGHT["float32"]
    shards = size(mesh, *TOKENS)
    rng = np.random.default_rng(4)
    xs = []
    reals = []
    sizes = []
    starts = []
    for s in range(shards):
        mine = rng.integers(0, 12, 3)
        start = np.cumsum([0, *(-(-mine // ALIGN) * ALIGN)])[:-1]
        x, real = dirty(s, mine, start)
        xs = [*xs, x]
        reals = [*reals, real]
        sizes = [*sizes, mine]
        starts = [*starts, start]
    layout = spec(mesh, TOKENS)

    def forward(x, s, engine):
        q = quantize(
            x,
            format,
            block=block,
            group_sizes=s,
            align=ALIGN,
            x_spec=layout,
            engine=engine,
        )
        return (), (q.data, q.scale)

    args = np.concatenate(xs), np.concatenate(sizes).astype(np.int32)
    _, (data, scale) = program(way, mesh, forward, args, (layout, layout), (), layout)()
    for s in range(shards):
        parts = (np.split(v, shards)[s] for v in (data, scale))
        q = quantize(jnp.zeros((1, 1)))
        local = type(q)(*parts, format.dtype, block)
        check_groups(local, xs[s], reals[s], format, block, sizes[s], starts[s])


def test_group_errors():
    """Breaks if blocks would go over two groups without a word."""
    x = jnp.zeros((8, 4))
    sizes = jnp.asarray([3, 5])
    with pytest.raises(
        ValueError,
        match=r"align=2 must be a multiple of 4, the rows of a block of block=\(4, 1\)",
    ):
        quantize(x, block=(4, 1), group_sizes=sizes, align=2)
    with pytest.raises(
        ValueError,
        match="align=4 must be None without group_sizes; pass group_sizes too",
    ):
        quantize(x, align=4)
    with pytest.raises(
        ValueError,
        match="group_sizes has dtype float32; it must be an array of integers",
    ):
        quantize(x, group_sizes=jnp.zeros(2))
