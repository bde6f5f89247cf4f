"""Every kernel lowers for CUDA on a machine without a GPU: layouts are inferred, shared memory fits, over the shapes of
models and the tiles that they take. `make check-sass` goes on to SASS, over every tile.

Covers: the kernels x the shapes of models x their tiles; every twelfth case here.
"""

import importlib.util
from pathlib import Path

import jax
import pytest

from support import some

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_sass.py"


def load():
    spec = importlib.util.spec_from_file_location("check_sass", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES = {name: (fn, operands) for name, fn, operands in load().kernels(every_tile=False)}
SHORT = len(CASES) // 12


@pytest.mark.loose
@pytest.mark.parametrize("name", some(sorted(CASES, key=lambda name: list(CASES).index(name) % 12), SHORT))
def test_lowers(name):
    """A kernel that some width or tile breaks fails on the user's GPU, at the first step."""
    fn, operands = CASES[name]
    traced = jax.jit(fn).trace(*(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in operands))
    assert "mosaic_gpu_v2" in traced.lower(lowering_platforms=("cuda",)).as_text()
