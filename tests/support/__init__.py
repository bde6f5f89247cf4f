"""This package has what the suites share. No test file imports another one; code of two files is here.

meshes       meshes by name, the ways an op meets one
programs     an op as a program on a mesh
block        the whole block as a program, and what it must give
oracle       the numbers, in NumPy and float64
compare      relative errors
inputs       arrays and parameters
interpreter  kernels without a GPU
ptx          PTX without a GPU
hlo          texts of optimized HLO
gpus         all GPUs, for one test at a time
covering     which pairs of options the rows of a table hold
pages        the programs of the documentation
"""

import os
from pathlib import Path

from support.compare import rel_error, rel_norm
from support.covering import Table, mark_rest, spread
from support.inputs import integers, make_params, random
from support.interpreter import interpret, kernels_of, lower
from support.meshes import ENGINES, MESHES, TOKENS, WAYS, gather_counts, in_user_shard_map, make_mesh, put, size, spec
from support.oracle.formats import fake_operands
from support.programs import Program, program

ROOT = Path(__file__).parents[2]
ON_GPU = os.environ.get("MOAX_TEST_GPU") == "1"

__all__ = [
    "ENGINES",
    "MESHES",
    "ON_GPU",
    "ROOT",
    "TOKENS",
    "WAYS",
    "Program",
    "Table",
    "fake_operands",
    "gather_counts",
    "in_user_shard_map",
    "integers",
    "interpret",
    "kernels_of",
    "lower",
    "make_mesh",
    "make_params",
    "mark_rest",
    "program",
    "put",
    "random",
    "rel_error",
    "rel_norm",
    "size",
    "spec",
    "spread",
]
