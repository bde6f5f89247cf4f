"""The grouped matmul for Blackwell, without one: it lowers for compute capability 10.0, and its table of tiles covers
every row once."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moax.errors import Unsupported
from moax.groups import group_starts
from moax.kernels import blackwell

pytest.importorskip("absl")
from jax.experimental.mosaic.gpu import utils  # noqa: E402
from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu  # noqa: E402

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
    traced = jax.jit(lambda *a: blackwell.matmul(*a, 128, transpose=transpose)).trace(x, w, sizes)
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
    spans = list(blackwell.spans(sizes, align))
    for tile in range(rows // blackwell.ROWS + len(sizes) - 1):
        found = ragged_dot_mgpu.GroupInfo.create(spans, blackwell.ROWS, jnp.int32(tile))
        part = slice(int(found.actual_start), int(found.actual_start) + max(0, int(found.actual_size)))
        stored[part] += 1
        owner[part] = int(found.group_id)
    for group, (start, size) in enumerate(zip(starts, SIZES[name], strict=True)):
        assert (stored[start : start + size] == 1).all()
        assert (owner[start : start + size] == group).all()
    assert stored.max(initial=0) <= 1


def test_spans():
    """Breaks if the last group is padded past the end of the rows, where the kernel would store out of bounds."""
    assert list(blackwell.spans(jnp.asarray([3, 0, 5], jnp.int32), 4)) == [4, 0, 5]


@pytest.mark.parametrize(
    ("dtype", "columns", "said"),
    [(jnp.float32, 128, "float32"), (jnp.bfloat16, 2880, "2880"), (jnp.bfloat16, 96, "96")],
)
def test_refuses(dtype, columns, said):
    """Breaks if a shape that the kernel cannot tile reaches it: JAX's own error names no argument of ours."""
    x, w = jnp.zeros((256, 128), dtype), jnp.zeros((2, 128, columns), dtype)
    with pytest.raises(Unsupported, match=said):
        blackwell.matmul(x, w, jnp.asarray([100, 156], jnp.int32))
