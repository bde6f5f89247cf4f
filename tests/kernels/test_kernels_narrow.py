"""Copies of narrow arrays by the kernels, lowered for CUDA without a GPU.

A tile may end past the end of an array, where the copy engine writes nothing and reads 0. Mosaic drops the dims in
which the array has one box, and with them the index, so that a copy past their end would reach that box. Pallas'
interpreter has no boxes, and does not show it.

Covers: the matmuls x widths of one box, and of a few; gathers of one row.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import launch_context
from jaxlib.mlir import ir

from moax.kernels.hopper.formats import KMajorFp8, make_blocks
from moax.kernels.hopper.pallas import pipeline
from moax.kernels.hopper.pallas.matmul import grouped_matmul, grouped_matmul_activate
from moax.kernels.hopper.pallas.quantize import quantize_rows
from moax.kernels.hopper.pallas.tiles import pick_tile, with_projections
from moax.kernels.hopper.pallas.wgrad import grouped_wgrad

pytestmark = pytest.mark.loose
M, E = 512, 3
BF16 = jnp.bfloat16
FP8 = jnp.float8_e4m3fn
F32 = jnp.float32


@pytest.fixture
def dropped(monkeypatch):
    """dropped(fn, *operands): {"load" or "store": the shapes of the arrays whose copies drop an index}."""
    results = {}
    way = []
    async_copy = launch_context.LaunchContext.async_copy
    prepare = launch_context.LaunchContext._prepare_async_copy

    def in_range(index) -> bool:
        """Whether the index is 0, or is that inside of a box."""
        name = getattr(index.owner, "name", "")
        return name == "arith.remui" or (
            name == "arith.constant" and ir.IntegerAttr(index.owner.attributes["value"]).value == 0
        )

    def record_way(self, **kwargs):
        way.append(
            "store" if ir.MemRefType(kwargs["dst_ref"].type).memory_space is None else "load",
        )
        return async_copy(self, **kwargs)

    def record(self, gmem_ref, *args):
        result = prepare(self, gmem_ref, *args)
        shape = tuple(ir.MemRefType(gmem_ref.type).shape)
        boxes = shape
        for transform in result[-1]:
            boxes = transform.transform_gmem_shape(boxes)
        # These dims come first, and their indices name a row or an expert that is there.
        squeezed = len(result[3])
        for size, copied, index in list(zip(boxes, result[0], result[2], strict=True))[squeezed:]:
            if size == copied == 1 and not in_range(index):
                results.setdefault(way[-1], set()).add(shape)
        return result

    def run(fn, *operands):
        jax.jit(fn).trace(*operands).lower(lowering_platforms=("cuda",))
        assert way, "the program has no copies"
        return results

    monkeypatch.setattr(pipeline, "count_sms", lambda: 132)
    monkeypatch.setattr(launch_context.LaunchContext, "async_copy", record_way)
    monkeypatch.setattr(launch_context.LaunchContext, "_prepare_async_copy", record)
    return run


def struct(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def k_major(dtype, *shape):
    *experts, rows, contracted = shape
    scales = (-(-contracted // 128), rows) if not experts else (*experts, -(-rows // 128), -(-contracted // 128))
    return KMajorFp8(struct(dtype, *shape), struct(F32, *scales))


SIZES = struct(jnp.int32, E)


def matmuls(k: int, n: int):
    """{name: (function, operands)} of each matmul [M, k] x [E, k, n], and of its gradients."""

    def blocks(sizes, align=64):
        return make_blocks(sizes, M, align)

    def add_wgrad(x, dy, sizes, total):
        return grouped_wgrad(
            x,
            dy,
            blocks(sizes),
            pick_tile("wgrad", k, n, M),
            out_dtype=F32,
            total=total,
        )

    def activate(x, w, sizes):
        tile = with_projections(pick_tile("matmul", k, n, M), w.shape[2], w.shape[3])
        return grouped_matmul_activate(x, w, blocks(sizes), tile, lambda *h: sum(h))

    def matmul(x, w, sizes, op="matmul"):
        return grouped_matmul(x, w, blocks(sizes), pick_tile(op, k, n, M), transpose=op != "matmul")

    def fp8(x, w, sizes):
        return grouped_matmul(x, w, blocks(sizes, 128), pick_tile("matmul_fp8", k, n, M))

    def wgrad_fp8(x, dy, sizes, out_dtype=BF16):
        return grouped_wgrad(
            x,
            dy,
            blocks(sizes, 128),
            pick_tile("wgrad_fp8", k, n, M),
            out_dtype=out_dtype,
        )

    rows = (
        KMajorFp8(struct(FP8, k, M), struct(F32, M // 128, 128)),
        KMajorFp8(struct(FP8, n, M), struct(F32, M // 128, 128)),
    )
    results: dict = {
        "matmul": (matmul, (struct(BF16, M, k), struct(BF16, E, k, n), SIZES)),
        "matmul_transposed": (
            lambda *v: matmul(*v, op="matmul_transposed"),
            (struct(BF16, M, k), struct(BF16, E, n, k), SIZES),
        ),
        "matmul_fp8": (fp8, (k_major(FP8, M, k), k_major(FP8, E, n, k), SIZES)),
        "wgrad_fp8": (wgrad_fp8, (*rows, SIZES)),
        "wgrad to a total": (add_wgrad, (struct(BF16, M, k), struct(BF16, M, n), SIZES, struct(F32, E, k, n))),
    }
    if k % 64 == n % 64 == 0:
        results["matmul_activate"] = (activate, (struct(BF16, M, k), struct(BF16, E, k, 1, n), SIZES))
        results["gated matmul_activate"] = (activate, (struct(BF16, M, k), struct(BF16, E, k, 2, n), SIZES))
    return results


@pytest.mark.parametrize("name", matmuls(64, 64))
def test_stores_past_the_end(dropped, name):
    """Breaks if a tile that is wider than a result overwrites the result: blocks of 64 or 32 columns were zeros."""
    for k, n in ((64, 64), (96, 32), (32, 64)):
        fn, operands = matmuls(k, n).get(name, (None, ()))
        if fn is not None:
            assert not dropped(fn, *operands).get("store"), (k, n)


def test_gather_of_one_row(dropped):
    """Breaks if padding between experts repeats the row of a batch of one token, where it is to be 0."""

    def gather(x, source, sizes):
        return quantize_rows(x, make_blocks(sizes, M), gather_idx=source)

    assert not dropped(gather, struct(BF16, 1, 256), struct(jnp.int32, M), SIZES).get("load")
