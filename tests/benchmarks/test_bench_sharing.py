"""benchmarks.kernels.sharing: what it reads from a profile of its program."""

import pytest

from benchmarks.kernels import sharing
from moax.inspect import Kernel

PRODUCT = "grouped_matmul_mosaic_gpu"


def profile(waves: int, alone: int, beside: int) -> list[Kernel]:
    """One call of the program with two products beside a collective, the second of which ends after it."""
    kernels, at = [], 0

    def add(name, us, start=None):
        kernels.append(Kernel("GPU:0", name, "", 1e3 * (at if start is None else start), 1e3 * (at + us)))
        return at + us

    for name in ("ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"):
        at = add(name, 500)
    for _ in range(waves):
        at = add(PRODUCT, alone)
        at = add("loop_add_fusion", 2)
        at = add(PRODUCT, alone)
        for name in ("ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL"):
            add(name, 1.5 * beside, start=at + 7)
            at += 10
            at = add(PRODUCT, beside)
            at = add(PRODUCT, beside)
    return kernels


def test_read():
    """Breaks if a product alone counts as one beside a collective, or one that ends after the collective counts."""
    for row, waves in zip(sharing.read(profile(2, 100, 150), (1, 4), 2), (1, 4), strict=True):
        assert (row["waves"], row["alone_us"], row["late_us"]) == (waves, 100, 7)
        assert row["beside_us"] == {"all-gather": 150, "reduce-scatter": 150}
        assert row["wire_alone_ms"] == {"all-gather": 0.5, "reduce-scatter": 0.5}
        assert row["wire_ms"]["all-gather"] == pytest.approx(0.218)


def test_read_of_another_program():
    """Breaks if times are read from a profile that lacks a product."""
    with pytest.raises(ValueError, match="the profile has 12 products"):
        sharing.read(profile(2, 100, 150), (1, 4), 3)


@pytest.mark.parametrize("dtype", sharing.FLOPS)
@pytest.mark.parametrize("case", sharing.CASES, ids=lambda case: case.name)
def test_plan(case, dtype):
    """Breaks if the arrays of a collective do not fit beside the operands on a GPU of 80 GB."""
    count, elements = sharing.plan(case, dtype)
    assert 2 <= count <= 12 and 0 < 3 * 2 * 4 * elements < 60e9
