"""benchmarks.kernels.totals: what it reads from a profile of its program."""

from benchmarks.kernels import totals
from moax.inspect import Kernel


def test_split():
    """Breaks if the copy of the total before the loop counts as an addition, or the addition of XLA as a wgrad."""
    names = ["loop_copy_fusion", "MemcpyD2D"] + ["grouped_wgrad_fp8_mosaic_gpu", "loop_add_fusion"] * totals.TIMES
    kernels = [Kernel("GPU:0", name, "", 1e6 * i, 1e6 * i + 5e3) for i, name in enumerate(names * totals.STEPS)]
    assert totals.split(kernels) == {"wgrad": 5.0, "add": 5.0}
