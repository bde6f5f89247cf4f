"""The copies of gathered rows: their PTX, run in NumPy against a gather, since the interpreter knows no PTX.

Covers: stages of 64 and 128 rows x widths; on a Hopper GPU, matmuls x groups x widths, with a total, under vmap.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moax.checks import Unsupported
from moax.kernels import implementation
from moax.kernels.groups import zero_rows
from moax.kernels.hopper.formats import HALF, GatheredRows
from moax.kernels.hopper.pallas import gather
from moax.kernels.hopper.pallas.stages import TileConfig
from support import mark_rest, random
from support.oracle.ops import first_rows
from support.ptx import run_ptx


@pytest.mark.parametrize(
    ("rows", "columns", "width", "column", "dtype"),
    [(128, 64, 192, 64, np.uint16), (64, 256, 320, 256, np.uint16), (128, 128, 384, 128, np.uint8)],
)
def test_copies(rows, columns, width, column, dtype):
    """Breaks if a chunk of a row is copied from or to another place than its own in the swizzle, if a row without a
    source, a column past the end, or a row past the real ones or past the last source is not 0, or if a warp takes the
    sources of another."""
    x = np.random.default_rng(0).integers(1, 1 << 7 * dtype(0).nbytes, (9, width)).astype(dtype)
    size = dtype(0).nbytes
    source = np.random.default_rng(1).integers(0, 9, 3 * rows).astype(np.int32)
    source[[rows, rows + 5]] = (9, 1000)

    def load(address):
        return source[address // 4]

    real = rows - 9
    code = gather._SOURCE.format(each=rows // 4, end=2 * rows - 5)
    taken = run_ptx(code, (0, 0, rows, real), on_load=load)["$0"]
    stage = np.full(size * rows * columns, 255, np.uint8)
    source_bytes = x.view(np.uint8).ravel()

    def copy(to, start, chunk, size):
        for to_, start_, size_ in zip(to, start, size, strict=True):
            stage[to_ : to_ + chunk] = 0
            stage[to_ : to_ + size_] = source_bytes[start_ : start_ + size_]

    lines = columns * size // 128
    run_ptx(gather._copies(rows // 4, lines, x.shape, size), (0, taken, 0, column), on_copy=copy)
    tiles = stage.reshape(rows // 8, lines, 8, 8, 16)
    inside = np.arange(8)
    # Chunk c of row r lies at c ^ (r % 8).
    plain = tiles[:, :, inside[:, None], inside[None] ^ inside[:, None]]
    got = plain.transpose(0, 2, 1, 3, 4).reshape(rows, size * columns).view(dtype)
    taken_rows = np.where(np.arange(rows) < real, np.minimum(source[rows : 2 * rows], 9), 9)
    whole = np.pad(x, ((0, 1), (0, columns)))[taken_rows]
    np.testing.assert_array_equal(got, whole[:, column : column + columns])


@pytest.mark.parametrize(("swizzle", "stages"), [(64, 4), (128, 2)])
def test_stages_that_hold_no_gathered_rows(swizzle, stages):
    """Breaks if a matmul waits forever for its stages, or reads another swizzle, rather than that it refuses."""
    with pytest.raises(Unsupported, match="a gather has"):
        gather.check_gather(swizzle, TileConfig(256, stages))


FEW = {"some": (300, 0, 1, 129, 257, 0), "one": (0, 0, 1500, 0, 0, 0), "none": (0,) * 6}
MANY = {"many": tuple(int(n) for n in np.random.default_rng(0).integers(0, 5, 160) ** 4)}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("draws", "widths"),
    mark_rest(
        [
            (FEW, (2880, 192)),
            (MANY, (192, 960)),
            (FEW, (64, 64)),
            (FEW, (768, 1408)),
            (FEW, (2048, 1536)),
        ],
        3,
    ),
    ids=lambda value: str(value) if isinstance(value, tuple) else "-".join(value),
)
def test_matmuls_that_gather(draws, widths):
    """Breaks if a matmul that gathers has other bits than one of rows that lie sorted: a source of another step, tile
    or group, a stage that is read before its rows are there or written before they are used, padding or rows without a
    source that are not 0, or a token that no row refers to, which is NaN here. The last group ends where the rows
    end."""
    local = implementation("hopper")
    width, columns = widths
    tokens = 500
    experts = len(next(iter(draws.values())))
    num_rows = max(sum(-(-n // HALF) * HALF for n in sizes) for sizes in draws.values())
    x = random(0, tokens, width).astype(jnp.bfloat16)
    beside = random(2, num_rows, columns).astype(jnp.bfloat16)
    x[0] = np.nan
    w = random(1, experts, width, columns).astype(jnp.bfloat16)
    turned = random(1, experts, columns, width).astype(jnp.bfloat16)
    total = random(3, experts, width, columns)

    @jax.jit
    def matmuls(sizes, source, *operands):
        groups = local.find_groups(sizes, HALF, num_rows)

        def multiply(rows, w, turned, beside, total):
            beside = zero_rows(beside, groups.real)

            def wgrad(x, dy, **options):
                return local.wgrad(x, dy, groups, jnp.bfloat16, **options)

            forward = local.matmul(rows, w, groups, jnp.bfloat16)
            dgrad = local.matmul(rows, turned, groups, jnp.bfloat16, transpose=True)
            return (
                zero_rows(forward, groups.real),
                zero_rows(dgrad, groups.real),
                wgrad(rows, beside),
                wgrad(beside, rows),
                wgrad(rows, beside, total=total),
            )

        def gather(x, *others):
            return multiply(GatheredRows(x, source), *others)

        x, *others = operands
        two = jax.vmap(gather)(*(jnp.stack([v, -v]) for v in operands))
        sorted_first = multiply(local.gather_rows(x, source, groups), *others)
        return sorted_first, gather(*operands), [v[0] for v in two]

    for sizes in draws.values():
        source = np.full(num_rows, tokens, np.int32)
        for start, n in zip(first_rows(sizes, HALF)[0], sizes, strict=True):
            source[start : start + n] = np.random.default_rng(n).integers(1, tokens, n)
        source[np.flatnonzero(source < tokens)[:1]] = tokens + 7  # a real row without a source
        for _ in range(3):  # a race need not show at once
            results = matmuls(np.int32(sizes), source, x, w, turned, beside, total)
            for want, *got in zip(*results, strict=True):
                for value in got:
                    np.testing.assert_array_equal(np.float32(value), np.float32(want))
