"""The matmul with the activation in its epilogue, in interpret mode and on a Hopper GPU.

Covers: gated and not, columns that end inside a tile, groups at multiples of 64 rows, waves; on a GPU, the bits of a
matmul and of the activation's kernel, gathered and sorted rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moax.checks import Unsupported
from moax.kernels import hopper, implementation
from moax.kernels.groups import find_groups, zero_rows
from moax.kernels.hopper.formats import GatheredRows, make_blocks
from moax.kernels.hopper.pallas import pipeline
from moax.kernels.hopper.pallas.matmul import grouped_matmul_activate
from moax.kernels.hopper.pallas.stages import TileConfig
from moax.ops.activation import activate
from moax.recipe import get_recipe
from support import interpret, mark_rest, random, rel_error, spread
from support.activations import ACTS, GATED

SIZES, ROWS = (130, 0, 1, 128), 384


@pytest.mark.parametrize(
    ("name", "hidden", "tile"),
    mark_rest([("swiglu", 160, TileConfig(256, 2, 1)), ("relu2", 96, TileConfig(64, 2, 2, waves=2))], 1),
    ids=str,
)
def test_matmul_activate(monkeypatch, name, hidden, tile):
    """Breaks if gate and up change places, a tile takes columns of another projection, a consumer activates rows of
    another one, or a is computed from h before h is rounded."""
    monkeypatch.setattr(pipeline, "count_sms", lambda: 2)
    gates = 1 + GATED[name]
    sizes = jnp.array(SIZES, jnp.int32)
    groups = find_groups(sizes, 64, ROWS)
    group = np.asarray(groups.index)
    real = np.asarray(groups.real)
    x = random(0, ROWS, 128)
    w = random(1, len(SIZES), 128, gates, hidden) / 4
    x[~real] = np.nan
    x = jnp.asarray(x, jnp.bfloat16)
    w = jnp.asarray(w, jnp.bfloat16)

    def run(x, w, sizes):
        return grouped_matmul_activate(x, w, make_blocks(sizes, ROWS, 64), tile, ACTS[name])

    h, a = interpret(run, x, w, sizes)
    want = np.einsum("mk,mkgf->mgf", np.float64(x)[real], np.float64(w)[group[real]])
    assert h.shape == (ROWS, gates, hidden) and a.shape == (ROWS, hidden)
    assert rel_error(np.float64(h)[real], want) < 2.0**-8
    wide = jnp.asarray(h[real]).astype(jnp.float32)
    exact = activate(wide, name)
    np.testing.assert_allclose(np.float64(a)[real], np.float64(exact), rtol=2.0**-7, atol=1e-6)


def test_refuses_other_tiles():
    """Breaks if a tile straddles gate and up."""
    x = jnp.zeros((128, 64), jnp.bfloat16)
    w = jnp.zeros((1, 64, 2, 128), jnp.bfloat16)
    blocks = make_blocks(jnp.array([128]), 128)
    with pytest.raises(Unsupported, match="tile_n=192 for 2 projections"):
        grouped_matmul_activate(x, w, blocks, TileConfig(192, 4), ACTS["swiglu"])


def test_without_merged_dims_the_matmul_is_alone(monkeypatch):
    """Breaks if a version of JAX whose Mosaic cannot compile the kernel gets it."""
    local = implementation("hopper")
    sizes = jnp.array([100, 28], jnp.int32)
    groups = local.find_groups(sizes, 64, 192)
    operands = jnp.zeros((192, 128), jnp.bfloat16), jnp.zeros((2, 128, 256), jnp.bfloat16)

    def names():

        def matmul(x, w):
            return local.matmul_activate(x, w, groups, jnp.bfloat16, ACTS["swiglu"], 2)

        return str(jax.make_jaxpr(matmul)(*operands))

    assert hopper.MERGES_DIMS == ("grouped_matmul_activate" in names())
    monkeypatch.setattr(hopper, "MERGES_DIMS", False)
    assert "grouped_matmul_activate" not in names() and "grouped_matmul" in names()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("widths", "name"),
    spread([((256, 192), "swiglu"), ((768, 1408), "relu2")],
           ((2048, 768), (768, 1408), (256, 192), (7168, 2048)), ("swiglu", "swiglu_oai", "relu2")),
    ids=str,
)  # fmt: skip
def test_bits_are_those_of_two_kernels(name, widths):
    """Breaks if the epilogue rounds h or a in another place than the matmul and the activation's kernel do, or a race
    between its stores shows: on rows that lie sorted, on gathered rows, and under vmap."""
    local = implementation("hopper")
    width, hidden = widths
    act = ACTS[name]
    gates = 1 + GATED[name]
    draws = ((300, 0, 1, 129, 257, 64), (0, 0, 0, 0, 0, 900))
    tokens = 512
    rows = max(sum(-(-n // 64) * 64 for n in sizes) for sizes in draws)
    x = random(0, tokens, width).astype(jnp.bfloat16)
    w = (random(1, len(draws[0]), width, gates * hidden) * np.float32(width**-0.5)).astype(
        jnp.bfloat16,
    )

    @jax.jit
    def matmuls(sizes, source, x, w):
        groups = local.find_groups(sizes, 64, rows)
        source = jnp.where(groups.real, source, tokens)

        def fused(x, w, gathers=True):
            rows_in = GatheredRows(x, source) if gathers else local.gather_rows(x, source, groups)
            return local.matmul_activate(rows_in, w, groups, jnp.bfloat16, act, gates)

        h = local.matmul(local.gather_rows(x, source, groups), w, groups, jnp.bfloat16)
        a = local.activate(
            h.reshape(rows, gates, hidden),
            act,
            get_recipe(None),
            groups,
        )
        two = jax.vmap(fused)(jnp.stack([x, -x]), jnp.stack([w, -w]))
        results = (h, a), fused(x, w, gathers=False), fused(x, w), jax.tree.map(lambda v: v[0], two)
        return jax.tree.map(lambda v: zero_rows(v, groups.real), results)

    for sizes in draws:
        source = np.random.default_rng(0).integers(0, tokens, rows).astype(np.int32)
        for _ in range(3):  # a race need not show at once
            want, *results = jax.tree.map(np.float32, matmuls(np.int32(sizes), source, x, w))
            for got in results:
                jax.tree.map(np.testing.assert_array_equal, got, want)
