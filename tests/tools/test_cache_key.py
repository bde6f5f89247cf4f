"""Compilation-cache keys: two processes that are started apart must find each other's programs.

`custom_partitioning` has XLA call a Python object, whose address is in the program, and so in the key (jax issue
21159), unless `jax_remove_custom_partitioning_ptr_from_cache_key` is set; `engine="shard_map"` has no such address.

Covers: both engines, with the flag and without.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import some

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
import jax, moax
from moax.mesh.place import named

padding = [bytearray(4096) for _ in range({padding})]  # so that addresses differ, as they do between two real programs
config = moax.MoEConfig(16, 16, 4, 2)
mesh = jax.make_mesh((2, 2), ("fsdp", "ep"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
with jax.set_mesh(mesh):
    shapes = jax.eval_shape(lambda key: moax.init(key, config), jax.random.key(0))
    specs = named(mesh, moax.param_specs(config))
    params = jax.tree.map(lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s), shapes, specs)
    tokens = named(mesh, moax.sharding.token_spec(moax.Axes()))
    x = jax.ShapeDtypeStruct((16, 16), "float32", sharding=tokens)

    def the_program(x, params):
        block = lambda x, params: moax.moe(x, params, config, recipe="fp8_block", engine="{engine}")[0].sum()
        return jax.grad(block, (0, 1))(x, params)

    jax.jit(the_program).lower(x, params).compile()
"""


def key_of(cache: Path, engine: str, removed: bool, padding: int) -> str:
    """The name that a new process gives its program in a new cache."""
    flags = dict(
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
        PYTHONPATH=str(ROOT / "src"),
        JAX_COMPILATION_CACHE_DIR=str(cache),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
        JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY=str(removed).lower(),
    )
    code = PROGRAM.format(engine=engine, padding=padding)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | flags, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names = [path.name for path in cache.glob("jit_the_program-*-cache")]
    assert len(names) == 1, f"one program was compiled; the cache holds {names}"
    return names[0]


@pytest.mark.parametrize(
    "engine, removed, same",
    some([("shard_map", False, True), ("custom_partitioning", True, True), ("custom_partitioning", False, False)], 1),
)
def test_two_processes(tmp_path, engine, removed, same):
    """Breaks if every start of a program compiles everything again: with shard_map, or with the flag. Without the flag
    custom_partitioning does, as documented; where it no longer did, the documentation would be wrong."""
    first, second = (key_of(tmp_path / str(n), engine, removed, n) for n in (1, 1000))
    assert (first == second) is same
