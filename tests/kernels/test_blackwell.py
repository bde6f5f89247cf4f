"""The implementation for Blackwell GPUs, without one: the kernel lowers for compute capability 10.0, its table of tiles
covers every row once, and what moax computes around the kernel is right.

Covers: shapes of models x direction; sizes of groups x alignment; a fake of JAX's kernel beside XLA's products; the
table of implementations; what is refused.
"""

import inspect
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moax
from moax import backend, kernels
from moax.groups import find_groups, group_starts
from moax.kernels.blackwell import products as blackwell
from moax.kernels.xla import products

pytest.importorskip("absl")
from jax.experimental.mosaic.gpu import utils  # noqa: E402
from jax.experimental.pallas.ops.gpu import blackwell_ragged_dot_mgpu, ragged_dot_mgpu  # noqa: E402

# rows, d_model and columns of a product of models: mixtral, qwen3-30b, dsv3, one whose widths 256 does not divide
SHAPES = {
    "mixtral": (16384, 4096, 14336, 8),
    "qwen3": (65536, 2048, 1536, 128),
    "dsv3": (32768, 7168, 2048, 32),
    "narrow": (1100, 1408, 384, 4),
}
SIZES = {
    "uneven": [200, 300, 12],
    "empty": [0, 97, 0, 0, 300, 0],
    "one expert": [0, 0, 512],
    "size 1": [1, 255, 1, 255],
    "nothing": [0, 0],
    "many": [7, 0, 31, 64, 1, 1, 90, 256, 3],
}


@pytest.fixture
def b200(monkeypatch):
    """A machine with a B200, as far as lowering asks."""
    monkeypatch.setattr(jax, "local_devices", lambda *_, **__: [types.SimpleNamespace(core_count=148)])
    monkeypatch.setattr(utils, "_infer_arch", lambda: (10, 0))
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.loose
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_lowers(name, transpose, b200):
    """Breaks if JAX's kernel refuses a tile, a shape of a model, or shared memory: found on a user's B200 otherwise."""
    rows, contracted, columns, groups = SHAPES[name]
    x = jax.ShapeDtypeStruct((rows, columns if transpose else contracted), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((groups, contracted, columns), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)

    def product(x, w, sizes):
        return blackwell.matmul(x, w, find_groups(sizes, 128, rows), jnp.bfloat16, transpose=transpose)

    traced = jax.jit(product).trace(x, w, sizes)
    assert traced.out_info.shape == (rows, contracted if transpose else columns)
    assert "mosaic_gpu_v2" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.loose
@pytest.mark.parametrize("align", [1, 128])
@pytest.mark.parametrize("name", SIZES)
def test_tiles_cover_rows(name, align):
    """Breaks if a row of a group is stored by no tile, by two, or with another group's weight."""
    sizes = jnp.asarray(SIZES[name], jnp.int32)
    starts = np.asarray(group_starts(sizes, align))
    rows = max(1, -(-int((starts + np.asarray(sizes)).max()) // blackwell.ROWS)) * blackwell.ROWS
    stored = np.zeros(rows, np.int32)
    owner = np.full(rows, -1)
    spans = list(blackwell.find_spans(sizes, align))
    for tile in range(rows // blackwell.ROWS + len(sizes) - 1):
        found = ragged_dot_mgpu.GroupInfo.create(spans, blackwell.ROWS, jnp.int32(tile))
        part = slice(int(found.actual_start), int(found.actual_start) + max(0, int(found.actual_size)))
        stored[part] += 1
        owner[part] = int(found.group_id)
    for group, (start, size) in enumerate(zip(starts, SIZES[name], strict=True)):
        assert (stored[start : start + size] == 1).all()
        assert (owner[start : start + size] == group).all()
    assert stored.max(initial=0) <= 1


def fake_kernel(x, w, spans, tile):
    """What JAX's kernel computes, by NumPy's rules: rows of no group are never stored, and hold NaN."""
    assert x.shape[0] % (2 * tile.tile_m) == 0 == w.shape[2] % (2 * tile.tile_n)
    ends = jnp.cumsum(spans)
    group = jnp.searchsorted(ends, jnp.arange(x.shape[0]), side="right", method="compare_all")
    y = jnp.einsum("mk,mkn->mn", x, w[jnp.minimum(group, len(spans) - 1)], preferred_element_type=jnp.float32)
    return jnp.where((jnp.arange(x.shape[0]) < ends[-1])[:, None], y, jnp.nan).astype(x.dtype)


@pytest.mark.loose
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("align", [1, 128])
@pytest.mark.parametrize("name", SIZES)
def test_around_the_kernel(name, align, transpose, monkeypatch):
    """Breaks if rows are padded or groups placed otherwise than the kernel takes them, if weights are transposed
    wrongly, or if rows that the kernel does not store reach the caller."""
    monkeypatch.setattr(blackwell_ragged_dot_mgpu, "ragged_dot_kernel", fake_kernel)
    sizes = jnp.asarray(SIZES[name], jnp.int32)
    rows = 3 + int(group_starts(sizes, align)[-1] + sizes[-1])
    groups = find_groups(sizes, align, rows)
    draw = lambda *shape: jnp.asarray(np.random.default_rng(1).standard_normal(shape), jnp.bfloat16)  # noqa: E731
    x, w = draw(rows, 256 if transpose else 128), draw(len(sizes), 128, 256)
    bias = draw(len(sizes), 128 if transpose else 256)
    x = jnp.where(groups.real[:, None], x, jnp.nan)
    for options in ({}, {"bias": bias}):
        got = blackwell.matmul(x, w, groups, jnp.bfloat16, transpose=transpose, **options)
        want = products.matmul(x, w, groups, jnp.bfloat16, transpose=transpose, **options)
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=1e-2, atol=1e-1)
        assert not np.asarray(got)[~np.asarray(groups.real)].any()


def test_one_group():
    """Breaks if rows without groups, as `moax.ops.dense` has them, ask the kernel for their sizes."""
    x, w = jnp.ones((3, 128), jnp.bfloat16), jnp.ones((1, 128, 128), jnp.bfloat16)
    y = blackwell.matmul(x, w, find_groups(None, 1, 3), jnp.bfloat16)
    np.testing.assert_array_equal(y.astype(jnp.float32), 128.0)


def test_spans():
    """Breaks if the last group is padded past the end of the rows, where the kernel would store out of bounds."""
    assert list(blackwell.find_spans(jnp.asarray([3, 0, 5], jnp.int32), 4)) == [4, 0, 5]


@pytest.mark.parametrize("name", kernels.IMPLEMENTATIONS)
def test_protocol(name):
    """Breaks if an implementation lacks a function that the ops call, names arguments otherwise, or asks for more."""
    for method, declared in vars(kernels.Implementation).items():
        if inspect.isfunction(declared) and not method.startswith("_"):
            wanted = [*inspect.signature(declared).parameters][1:]
            found = inspect.signature(getattr(kernels.implementation(name), method)).parameters
            assert [*found][: len(wanted)] == wanted, method
            assert all(found[more].default is not inspect.Parameter.empty for more in [*found][len(wanted) :]), method


def test_by_name_alone(monkeypatch):
    """Breaks if `auto` takes an implementation that no GPU has run, or if its name is refused where it can run."""
    monkeypatch.setattr(backend, "on_blackwell", lambda: True)
    assert kernels.select_kernels("auto", jnp.bfloat16, width=256) == "xla"
    assert kernels.select_kernels("blackwell", jnp.bfloat16, width=256) == "blackwell"


@pytest.mark.parametrize(
    ("blackwell", "dtype", "width", "said"),
    [
        (False, jnp.bfloat16, 128, r"compute capability 10\.0"),
        (True, jnp.float32, 128, "float32"),
        (True, jnp.bfloat16, 2880, "2880"),
        (True, jnp.bfloat16, 96, "96"),
    ],
)
def test_refuses(blackwell, dtype, width, said, monkeypatch):
    """Breaks if a shape that the kernel cannot tile reaches it: JAX's own error names no argument of ours."""
    monkeypatch.setattr(backend, "on_blackwell", lambda: blackwell)
    with pytest.raises(moax.Unsupported, match=said):
        kernels.select_kernels("blackwell", dtype, columns=width)
