"""The copies of gathered rows: their PTX, run in NumPy against a gather, since the interpreter knows no PTX.

Covers: stages of 64 and 128 rows x widths; on a Hopper GPU, products x groups x widths, with a total, under vmap.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moax.checks import Unsupported
from moax.groups import group_starts, zero_rows
from moax.kernels import implementation
from moax.kernels.hopper.formats import HALF, GatheredRows
from moax.kernels.hopper.pallas import gather
from moax.kernels.hopper.pallas.pipeline import TileConfig
from support import random, some
from support.ptx import run_ptx


@pytest.mark.parametrize(
    ("rows", "columns", "width", "column", "dtype"),
    [(128, 64, 192, 64, np.uint16), (64, 256, 320, 256, np.uint16), (128, 128, 384, 128, np.uint8)],
)
def test_copies(rows, columns, width, column, dtype):
    """Breaks if a chunk of a row is copied from or to another place than its own in the swizzle, if a row without a
    source, a column past the end, or a row past the real ones or past the last source is not 0, or if a warp takes the
    sources of another."""
    x, size = np.random.default_rng(0).integers(1, 1 << 7 * dtype(0).nbytes, (9, width)).astype(dtype), dtype(0).nbytes
    source = np.random.default_rng(1).integers(0, 9, 3 * rows).astype(np.int32)
    source[[rows, rows + 5]] = (9, 1000)

    def load(at):
        return source[at // 4]

    real, code = rows - 9, gather._SOURCE.format(each=rows // 4, end=2 * rows - 5)
    taken = run_ptx(code, (0, 0, rows, real), on_load=load)["$0"]
    stage, given = np.full(size * rows * columns, 255, np.uint8), x.view(np.uint8).ravel()

    def copy(to, start, chunk, size):
        for to_, start_, size_ in zip(to, start, size, strict=True):
            stage[to_ : to_ + chunk] = 0
            stage[to_ : to_ + size_] = given[start_ : start_ + size_]

    lines = columns * size // 128
    run_ptx(gather._copies(rows // 4, lines, x.shape, size), (0, taken, 0, column), on_copy=copy)
    tiles = stage.reshape(rows // 8, lines, 8, 8, 16)
    inside = np.arange(8)
    plain = tiles[:, :, inside[:, None], inside[None] ^ inside[:, None]]  # chunk c of row r lies at c ^ (r % 8)
    got = plain.transpose(0, 2, 1, 3, 4).reshape(rows, size * columns).view(dtype)
    taken_rows = np.where(np.arange(rows) < real, np.minimum(source[rows : 2 * rows], 9), 9)
    whole = np.pad(x, ((0, 1), (0, columns)))[taken_rows]
    np.testing.assert_array_equal(got, whole[:, column : column + columns])


@pytest.mark.parametrize(("swizzle", "cluster"), [(64, 1), (128, 2)])
def test_stages_that_hold_no_gathered_rows(swizzle, cluster):
    """Breaks if a product waits forever for its stages, or reads another swizzle, rather than that it refuses."""
    with pytest.raises(Unsupported, match="a gather has"):
        gather.check_gather(swizzle, TileConfig(256, 4, cluster=cluster))


def sorted_rows(sizes, tokens, align=HALF):
    """The groups of these sizes, and the source of each of their rows among so many tokens.

    Token 0 is in no group, and one real row of the first group that has rows has no source. The last group ends where
    the rows end.
    """
    local, rows = implementation("hopper"), max(align, sum(-(-n // align) * align for n in sizes))
    groups = local.find_groups(jnp.asarray(sizes, jnp.int32), align, rows)
    source = np.full(rows, tokens, np.int32)
    for first, n in zip(np.asarray(group_starts(jnp.asarray(sizes), align)), sizes, strict=True):
        source[first : first + n] = np.random.default_rng(n).integers(1, tokens, n)
    source[np.flatnonzero(source < tokens)[:1]] = tokens + 7
    return groups, jnp.asarray(source)


GROUPS = {
    "some": (300, 0, 1, 129, 257, 0),
    "one": (0, 0, 1500, 0),
    "none": (0, 0, 0),
    "many": tuple(int(n) for n in np.random.default_rng(0).integers(0, 5, 160) ** 4),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "widths"),
    some(
        [
            ("some", (2880, 192)),
            ("one", (64, 64)),
            ("none", (64, 64)),
            ("many", (192, 960)),
            ("some", (768, 1408)),
            ("one", (2048, 1536)),
        ],
        4,
    ),
    ids=str,
)
def test_products_that_gather(name, widths):
    """Breaks if a product that gathers has other bits than one of rows that lie sorted: a source of another step, tile
    or group, a stage that is read before its rows are there or written before they are used, padding or rows without a
    source that are not 0, or a token that no row refers to, which is NaN here."""
    local, (width, columns), tokens = implementation("hopper"), widths, 500
    groups, source = sorted_rows(GROUPS[name], tokens)
    experts, real = len(GROUPS[name]), groups.real
    x = jnp.asarray(random(0, tokens, width), jnp.bfloat16).at[0].set(jnp.nan)
    w, turned = (jnp.asarray(random(1, experts, *dims), jnp.bfloat16) for dims in ((width, columns), (columns, width)))
    beside = zero_rows(jnp.asarray(random(2, len(source), columns), jnp.bfloat16), real)
    total = jnp.asarray(random(3, experts, width, columns), jnp.float32)

    def products(rows, w, turned, beside, total):
        wgrad = lambda x, dy, **how: local.wgrad(x, dy, groups, jnp.bfloat16, **how)  # noqa: E731
        forward = local.matmul(rows, w, groups, jnp.bfloat16)
        dgrad = local.matmul(rows, turned, groups, jnp.bfloat16, transpose=True)
        return (
            zero_rows(forward, real),
            zero_rows(dgrad, real),
            wgrad(rows, beside),
            wgrad(beside, rows),
            wgrad(rows, beside, total=total),
        )

    def gather(x, *others):
        return products(GatheredRows(x, source), *others)

    others = w, turned, beside, total
    want = jax.jit(products)(local.gather_rows(x, source, groups), *others)
    for _ in range(3):  # a race need not show at once
        for got, bits in zip(jax.jit(gather)(x, *others), want, strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(bits, np.float32))
    two = [jnp.stack([v, -v]) for v in (x, *others)]
    for got, bits in zip(jax.jit(jax.vmap(gather))(*two), want, strict=True):
        np.testing.assert_array_equal(np.asarray(got[0], np.float32), np.asarray(bits, np.float32))
