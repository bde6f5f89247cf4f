"""The kernels of matmuls, in interpret mode on small cases.

Covers: matmuls and both gradients, bf16 and FP8, x tiles.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moax.kernels.groups import find_groups
from moax.kernels.hopper.formats import BLOCK, KMajorFp8, make_blocks
from moax.kernels.hopper.pallas import pipeline
from moax.kernels.hopper.pallas.matmul import grouped_matmul
from moax.kernels.hopper.pallas.stages import TileConfig
from moax.kernels.hopper.pallas.wgrad import grouped_wgrad
from moax.mesh.collectives import varying
from support import interpret, lower, mark_rest, random, rel_error
from support.interpreter import KERNEL

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2
# The groups have two blocks, none, one of one row, and a full one: 512 rows and a block past the end.
SIZES = (130, 0, 1, 128)
ROWS = 5 * BLOCK


@pytest.fixture(autouse=True)
def few_sms(monkeypatch):
    """Several tiles for each thread block, so that stages and slots come around."""
    monkeypatch.setattr(pipeline, "count_sms", lambda: 2)


def layout(align=BLOCK):
    """The blocks, the group of each row, and whether it is real. Rows are as few as groups at multiples of 64 need."""
    rows = ROWS if align == BLOCK else 192 + 64 + 128
    groups = find_groups(jnp.array(SIZES, jnp.int32), align, rows)
    return make_blocks(groups.sizes, rows, align), np.asarray(groups.index), np.asarray(groups.real)


@pytest.mark.parametrize(
    "align, start, first",
    [(64, [0, 2, 3, 4], [0, 3, 3, 4, 6]), (128, [0, 2, 4, 6], [0, 4, 4, 6, 8])],
)
def test_blocks(align, start, first):
    """A block of the wrong group multiplies rows by another expert's weight, and one of a wrong start other rows."""
    blocks = layout(align)[0]
    assert blocks.group.tolist()[:4] == [0, 0, 2, 3]
    assert blocks.start.tolist()[:4] == start
    assert blocks.rows.tolist() == [128, 2, 1, 128, 0]
    assert blocks.first_half.tolist() == first
    assert blocks.before.tolist() == [0, 2, 2, 3, 4]


@pytest.mark.parametrize("sizes", [(1, 1, 1), (65, 129, 0, 192), (0, 0), (64,), (128, 63, 127)])
@pytest.mark.parametrize("align", [64, 128, 256])
def test_blocks_hold_every_row_once(sizes, align):
    """Breaks if a row is in no block or in two, in a buffer as small as the groups need, or blocks end early."""
    rows = sum(-(-n // align) * align for n in sizes)
    blocks = make_blocks(jnp.array(sizes, jnp.int32), rows, align)
    groups = find_groups(jnp.array(sizes, jnp.int32), align, rows)
    group = np.asarray(groups.index)
    real = np.asarray(groups.real)
    held = np.zeros(rows, int)
    for i in range(int(blocks.before[-1])):
        part = slice(int(blocks.start[i]) * 64, int(blocks.start[i]) * 64 + int(blocks.rows[i]))
        assert 0 < blocks.rows[i] <= BLOCK and (group[part] == int(blocks.group[i])).all()
        held[part] += 1
    np.testing.assert_array_equal(held, real)


def test_a_program_has_a_kernel_once():
    """Breaks if matmuls of one shape are lowered each for itself: eight layers then take twice the time to compile."""
    blocks = layout()[0]
    w = jnp.zeros((len(SIZES), 256, 256), jnp.bfloat16)

    def layers(x, *weights):
        for w in weights:
            x = grouped_matmul(x, w, blocks, TileConfig(64, 2, 2))
        return x

    x = jnp.zeros((ROWS, 256), jnp.bfloat16)
    program = lower(layers, x, w, w, w)
    assert program.count(KERNEL) == 1
    assert program.count("call @grouped_matmul") == 3


def test_results_vary_as_operands_do():
    """Breaks if the type of a kernel's result says that the result is equal on every device: a `shard_map` with
    `check_vma` would believe it, and give every device the rows of one."""
    blocks = layout()[0]

    def multiply(x, w):
        y = grouped_matmul(x, w, blocks, TileConfig(64, 2, 2))
        assert varying(y) == {"fsdp"}
        return y

    x = jax.ShapeDtypeStruct((2 * ROWS, 256), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((len(SIZES), 256, 256), jnp.bfloat16)
    mesh = jax.make_mesh((2,), ("fsdp",), (AxisType.Auto,))
    y = jax.eval_shape(jax.shard_map(multiply, mesh=mesh, in_specs=(P("fsdp"), P()), out_specs=P("fsdp")), x, w)
    assert y.shape == x.shape


@pytest.mark.parametrize(
    "transpose, align",
    mark_rest([(False, 64), (True, 128), (True, 64), (False, 128)], 2),
)
def test_grouped_matmul(transpose, align):
    """Forward and dgrad of 16-bit operands, NaN in padding, a contracted dim of several trips around the stages, a bias
    whose columns end inside a tile; groups at multiples of 64, whose last blocks reach into the next group, or of 128.
    A consumer without rows stores nothing."""
    blocks, group, real = layout(align)
    x = random(0, len(real), 192)
    w = random(1, len(SIZES), *((160, 192) if transpose else (192, 160)))
    x[~real] = np.nan
    x = jnp.asarray(x, jnp.bfloat16)
    w = jnp.asarray(w, jnp.bfloat16)
    tile = TileConfig(64, 2, 2)
    bias = random(2, len(SIZES), 160)
    options = dict(transpose=transpose, out_dtype=jnp.float32)
    got = interpret(
        lambda x, w, b: grouped_matmul(x, w, blocks, tile, bias=b, **options),
        x,
        w,
        bias,
    )
    want = np.einsum(
        "mk,mnk->mn" if transpose else "mk,mkn->mn",
        np.float64(x)[real],
        np.float64(w)[group[real]],
    )
    assert rel_error(got[real], want + bias[group[real]]) < 1e-6


@pytest.mark.parametrize("waves", [1, 2, 3, 4, 8])
def test_waves_take_each_round_once(waves):
    """Breaks if two waves compute one tile or none does, or if a later wave has more tiles than an earlier one."""
    for rounds in (*range(20), 54, 1000):
        edges = [int(pipeline.first_round(jnp.int32(wave), waves, jnp.int32(rounds))) for wave in range(waves + 1)]
        shares = np.diff(edges)
        assert edges[0] == 0 and edges[-1] == rounds
        # A difference of 1 is that of rounding.
        assert (shares >= 0).all() and (np.diff(shares) <= 1).all(), (rounds, shares)


@pytest.mark.parametrize(
    "op, waves",
    mark_rest([("wgrad", 3), ("matmul", 3), ("wgrad_fp8", 2)], 1),
)
def test_waves_leave_the_bits(op, waves):
    """Breaks if a matmul differs in a bit, or a tile is left out, where its tiles are handed out in several waves."""
    blocks, _, real = layout()

    def multiply(waves):
        tile = TileConfig(64, 2, 2, waves=waves)
        if op == "matmul":
            x = jnp.asarray(random(0, ROWS, 64), jnp.bfloat16)
            w = jnp.asarray(random(1, 4, 64, 384), jnp.bfloat16)
            return interpret(lambda x, w: grouped_matmul(x, w, blocks, tile), x, w)[real]
        if op == "wgrad":
            x = jnp.asarray(np.where(real[:, None], random(0, ROWS, 128), 0), jnp.bfloat16)
            dy = jnp.asarray(np.where(real[:, None], random(1, ROWS, 128), 0), jnp.bfloat16)
            return interpret(lambda x, dy: grouped_wgrad(x, dy, blocks, tile), x, dy)
        x, dy = (KMajorFp8(quantized(i, 128, ROWS), scales(i, ROWS // BLOCK, 128)) for i in (0, 1))
        return interpret(lambda x, dy: grouped_wgrad(x, dy, blocks, tile), x, dy, races=False)

    np.testing.assert_array_equal(multiply(waves), multiply(1))


def test_odd_chunks():
    """A tile of three chunks of columns ends with the slot that the next begins with, which may still be on its way."""
    blocks, group, real = layout()
    x, w = (jnp.asarray(random(i, *s), jnp.bfloat16) for i, s in enumerate([(ROWS, 64), (len(SIZES), 64, 384)]))
    tile = TileConfig(192, 2, 2)
    got = interpret(lambda x, w: grouped_matmul(x, w, blocks, tile), x, w)
    want = np.einsum("mk,mkn->mn", np.float64(x)[real], np.float64(w)[group[real]])
    assert rel_error(got[real].astype(np.float64), want) < 2**-8


def total_of(add: bool, rows: int = 128):
    """The array to which a wgrad of [rows, 128] matrices adds, or None. The last consumer of a tile lacks rows."""
    return random(7, len(SIZES), rows, 128) if add else None


@pytest.mark.parametrize(
    ("tile", "add", "align"),
    mark_rest(
        [
            (TileConfig(64, 2, 2), False, 64),
            (TileConfig(64, 2, 2), True, 128),
            (TileConfig(64, 2, 2, products=2), True, 128),
            (TileConfig(64, 2, 2, products=2), False, 64),
        ],
        2,
    ),
    ids=str,
)
def test_grouped_wgrad(tile, add, align):
    """An empty group's gradient is exactly 0, the others' the sum over their rows alone, added to a total. Halves of
    blocks without a real row, and blocks past the last group, hold NaN, and nothing reads them."""
    blocks, group, real = layout(align)
    x, dy = (np.where(real[:, None], random(i, len(real), width), 0) for i, width in enumerate((192, 128)))
    x[~real.reshape(-1, 64).any(1).repeat(64)] = np.nan
    x = jnp.asarray(x, jnp.bfloat16)
    dy = jnp.asarray(dy, jnp.bfloat16)
    total = total_of(add, 192)

    def fn(x, dy, total):
        return grouped_wgrad(x, dy, blocks, tile, out_dtype=jnp.float32, total=total)

    got = interpret(fn, x, dy, total)
    want = [np.float64(x)[real & (group == g)].T @ np.float64(dy)[real & (group == g)] for g in range(len(SIZES))]
    assert rel_error(got, np.stack(want) + (total if add else 0), per=0) < 1e-6


def quantized(seed, *shape, dtype=E4M3):
    return jnp.asarray(random(seed, *shape) * 8).astype(dtype)


def scales(seed, *shape):
    return jnp.asarray(
        np.exp2(np.random.default_rng(seed).integers(-3, 4, shape)).astype(np.float32),
    )


def expand(scale, *along):
    for dim, n in along:
        scale = np.repeat(scale, BLOCK, axis=dim)
        scale = np.take(scale, np.arange(n), axis=dim)
    return np.float64(scale)


@pytest.mark.parametrize(
    ("tile_n", "dtype"),
    mark_rest([(192, E5M2), (128, E4M3)], 1),
)
def test_grouped_matmul_fp8(tile_n, dtype):
    """Each 128 x 128 block of the weight and each 1 x 128 block of a row has a scale of its own: none is mixed up."""
    blocks, group, real = layout()
    k, n = 256, 384
    x = quantized(0, ROWS, k, dtype=dtype)
    sx = scales(1, k // BLOCK, ROWS)
    w = quantized(2, len(SIZES), n, k)
    sw = scales(3, len(SIZES), n // BLOCK, k // BLOCK)
    tile = TileConfig(tile_n, 2, 2)
    options = dict(bias=random(4, len(SIZES), n) * 1e3, out_dtype=jnp.float32)
    bias = random(4, len(SIZES), n) * 1e3

    def fn(x, sx, w, sw):
        return grouped_matmul(KMajorFp8(x, sx), KMajorFp8(w, sw), blocks, tile, **options)

    got = interpret(fn, x, sx, w, sw, races=False)
    wide_x = np.float64(x) * expand(np.asarray(sx).T, (1, k))
    wide_w = np.float64(w) * expand(np.asarray(sw), (1, n), (2, k))
    want = np.einsum("mk,mnk->mn", wide_x[real], wide_w[group[real]])
    assert rel_error(got[real], want + bias[group[real]]) < 1e-6


@pytest.mark.parametrize(
    ("consumers", "add"),
    mark_rest([(3, True), (2, False), (2, True), (3, False)], 1),
)
def test_grouped_wgrad_fp8(consumers, add):
    """Each 128 rows of each column have a scale of their own, in both operands; the sum is added to a total."""
    blocks, group, real = layout()
    x = quantized(0, 128, ROWS, dtype=E4M3) * jnp.asarray(real[None], E4M3)
    dy = quantized(1, 128, ROWS, dtype=E5M2) * jnp.asarray(real[None], E5M2)
    sx = scales(2, ROWS // BLOCK, 128)
    sdy = scales(3, ROWS // BLOCK, 128)
    tile = TileConfig(64, 2, 2, consumers)
    total = total_of(add)
    options = dict(out_dtype=jnp.float32)

    def fn(x, sx, y, sy, t):
        return grouped_wgrad(KMajorFp8(x, sx), KMajorFp8(y, sy), blocks, tile, **options, total=t)

    got = interpret(fn, x, sx, dy, sdy, total, races=False)
    x, dy = (np.float64(v).T * expand(np.asarray(s), (0, ROWS)) for v, s in ((x, sx), (dy, sdy)))
    want = [x[real & (group == g)].T @ dy[real & (group == g)] for g in range(len(SIZES))]
    assert rel_error(got, np.stack(want) + (total if add else 0), per=0) < 1e-6
