"""Every kernel lowers for CUDA on a machine without a GPU: layouts are inferred, shared memory fits, over the shapes of
models and the tiles that they take. `make check-sass` goes on to SASS, over every tile.

Covers: the kernels x the shapes of models x their tiles; every twelfth case here, and all that add to a total; then
formats, dtypes, numbers of terms and of assignments that no model has. `test_kernels_activation.py` has the activation.
"""

import functools
import importlib
import itertools
import sys

import jax
import jax.numpy as jnp
import pytest

from moax.kernels.hopper.formats import KMajorFp8, make_blocks
from moax.kernels.hopper.pallas import permute, plan, quantize
from moax.kernels.hopper.pallas.matmul import MERGES_DIMS
from moax.kernels.hopper.pallas.tiles import HEURISTIC
from moax.kernels.hopper.pallas.wgrad import grouped_wgrad
from moax.recipe import Format
from support import ROOT, lower, mark_rest

sys.path.append(str(ROOT / "scripts"))
MODELS = importlib.import_module("h200_kernels")
BF16 = jnp.bfloat16
F32 = jnp.float32
I32 = jnp.int32
F8 = jnp.float8_e4m3fn


def wgrad(sizes, x, dy, scales, total, *, tile, dtype):
    """A gradient in `dtype`, or the sum with a total, which may leave room for fewer stages of the tile."""
    x, dy = (KMajorFp8(v, s) if scales else v for v, s in zip((x, dy), scales or (0, 0), strict=True))
    return grouped_wgrad(x, dy, make_blocks(sizes, 1024), tile, out_dtype=dtype, total=total)


def others():
    """Yields (name, function, operands as a tree of (shape, dtype)) of cases that no model of `h200_kernels` has."""
    rows = lambda x, s, **options: quantize.quantize_rows(x, make_blocks(s, 512), **options)  # noqa: E731
    fewer = (
        {},
        dict(fprop_or_dgrad=False, format=Format(scale="pow2")),
        dict(wgrad=False, format=Format("e5m2")),
    )
    weight = [
        dict(transposed=False, format=Format(scale="pow2")),
        dict(transposed=True, format=Format("e5m2")),
    ]
    for width, dtype in itertools.product((2880, 96, 1408, 7168), (BF16, F32)):
        for i in range(3):
            x = ((512, width), dtype)
            yield f"quantize_rows {x} {i}", functools.partial(rows, **fewer[i]), (x, ((3,), I32))
            if i < 2:
                fn = functools.partial(quantize.quantize_weight, **weight[i])
                yield f"quantize_weight {width} {dtype.__name__} {i}", fn, (((2, width, 2880), dtype),)
    for width, dtype in itertools.product((96, 4096, 7168), (F32, jnp.uint8)):

        def gather(x, source, sizes):
            return permute.gather_rows(x, source, make_blocks(sizes, 1024))

        yield f"gather_rows {width} {dtype.__name__}", gather, (((640, width), dtype), ((1024,), I32), ((3,), I32))
        for terms in (1, 16) if dtype == F32 else ():
            operands = ((640, width), BF16), ((300, terms), I32), ((300, terms), F32)
            yield f"gather_sum {width} {terms}", permute.gather_sum, operands
            yield f"gather_sum {width} {terms} alike", permute.gather_sum, (((640, width), F32), *operands[1:2])
    for experts, top_k in ((64, 6), (32, 4), (128, 8)):
        yield f"top_k_rows {experts} odd", functools.partial(plan.top_k_rows, top_k=top_k), (((8191, experts), F32),)
    for (tokens, top_k, groups), parted in itertools.product(
        ((8191, 8, 128), (65536, 8, 16), (64, 2, 8)),
        (0, 1),
    ):
        fn = functools.partial(MODELS.place_assignments, groups=groups)
        operands = [
            ((tokens, top_k), I32),
            ((tokens, top_k), F32) if parted else None,
            *[((groups,), I32)] * 2 * parted,
        ]
        yield f"build_permutation {tokens} {parted}", fn, operands
    for op, total, dtype in itertools.product(("wgrad", "wgrad_fp8"), (False, True), (F32, BF16)):
        fp8 = op == "wgrad_fp8"
        k = 2880
        n = 1536
        x, dy = ((((w, 1024), F8) if fp8 else ((1024, w), BF16)) for w in (k, n))
        scales = [((8, -(-w // 128) * 128), F32) for w in (k, n)] if fp8 else None
        for tile in HEURISTIC[op] if total or dtype == F32 else ():
            name = f"{op} {tile} {dtype.__name__}{' sum' * total}"
            to = ((4, k, n), dtype) if total else None
            yield name, functools.partial(wgrad, tile=tile, dtype=dtype), (((4,), I32), x, dy, scales, to)


CASES = {name: (fn, operands) for name, fn, operands in (*MODELS.kernels(every_tile=False), *others())}
TOTALS = [name for name in CASES if "total" in name]
OTHERS = sorted(
    (name for name in CASES if name not in TOTALS),
    key=lambda name: list(CASES).index(name) % 12,
)
SHORT = len(TOTALS) + len(CASES) // 12


@pytest.mark.loose
@pytest.mark.parametrize("name", mark_rest([*TOTALS, *OTHERS], SHORT))
def test_lowers(name):
    """A kernel that some width or tile breaks fails on the user's GPU, at the first step."""
    if name.startswith("matmul_activate") and not MERGES_DIMS:
        pytest.skip("matmuls and activations are two kernels on this version of JAX")
    fn, operands = CASES[name]

    def is_shape(v) -> bool:
        return isinstance(v, tuple) and len(v) == 2 and isinstance(v[0], tuple) and all(type(n) is int for n in v[0])

    lower(fn, *jax.tree.map(lambda v: jax.ShapeDtypeStruct(*v), tuple(operands), is_leaf=is_shape))
