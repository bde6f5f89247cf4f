"""Every kernel lowers for CUDA on a machine without a GPU: layouts are inferred, shared memory fits, over the shapes of
models and the tiles that they take. `make check-sass` goes on to SASS, over every tile.

Covers: the kernels x the shapes of models x their tiles; every twelfth case here, and all that add to a total.
"""

import importlib
import sys

import jax
import pytest

from moax.kernels.hopper.pallas.matmul import MERGES_DIMS
from support import ROOT, some

sys.path.append(str(ROOT / "scripts"))
KERNELS = importlib.import_module("h200_kernels").kernels(every_tile=False)
CASES = {name: (fn, operands) for name, fn, operands in KERNELS}
TOTALS = [name for name in CASES if "total" in name]
OTHERS = sorted((name for name in CASES if name not in TOTALS), key=lambda name: list(CASES).index(name) % 12)
SHORT = len(TOTALS) + len(CASES) // 12


@pytest.mark.loose
@pytest.mark.parametrize("name", some([*TOTALS, *OTHERS], SHORT))
def test_lowers(name):
    """A kernel that some width or tile breaks fails on the user's GPU, at the first step."""
    if name.startswith("matmul_activate") and not MERGES_DIMS:
        pytest.skip("products and activations are two kernels on this version of JAX")
    fn, operands = CASES[name]
    traced = jax.jit(fn).trace(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands))
    assert "mosaic_gpu_v2" in traced.lower(lowering_platforms=("cuda",)).as_text()
