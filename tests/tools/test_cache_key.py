"""The compilation cache: a program of one process is found by another process, and by no other program.

XLA asks a Python object for the layout of each op on Auto axes. JAX would name the object by its address, which differs
in each process (jax issue 21159); moax names it by what it does.

Covers: three processes and one cache; the texts of static values.
"""

import dataclasses
import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import processes
import pytest
from jax.sharding import PartitionSpec as P

import moax
from moax.mesh import lowering as cache_key
from moax.mesh.lowering import UNSTABLE
from moax.mesh.op import Op
from moax.mesh.specs import find_mesh_view

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
import jax, moax
from moax.mesh.specs import named

padding = [bytearray(4096) for _ in range({padding})]  # so that addresses differ, as they do between two real programs
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event.endswith("cache_hits")))
config = moax.MoEConfig(16, 16, 4, 2)
mesh = jax.make_mesh((2, 2), ("fsdp", "ep"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
with jax.set_mesh(mesh):
    params = moax.init(jax.random.key(0), config)
    x = jax.device_put(jax.numpy.ones((16, 16)), named(mesh, moax.params.token_spec(moax.Axes())))
    hits.clear()

    def the_program(x, params):
        return abs(moax.moe(x, params, config, recipe="fp8_block", exchange="{exchange}")[0]).sum()

    y = jax.jit(the_program)(x, params)
    print(sum(hits), y)
"""


def run_process(cache: Path, exchange: str, padding: int) -> tuple[int, str]:
    """Runs the program in a new process with this cache; returns how often the cache hit, and what the program gave."""
    flags = dict(
        JAX_PLATFORMS="cpu",
        XLA_FLAGS=f"--xla_force_host_platform_device_count=4 {processes.FLAGS}",
        PYTHONPATH=str(ROOT / "src"),
        JAX_COMPILATION_CACHE_DIR=str(cache),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )
    code = PROGRAM.format(exchange=exchange, padding=padding)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | flags,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "anew" not in done.stderr, f"a key was not stable: {done.stderr}"
    hits, value = done.stdout.split()
    return int(hits), value


def test_three_processes(tmp_path):
    """Breaks if a start of a program compiles everything again, or if a program takes the one of another transport,
    which the rest of the key does not show."""
    one_process = run_process(tmp_path, *("all_gather", 1))
    second = run_process(tmp_path, *("all_gather", 1000))
    other = run_process(tmp_path, *("all_to_all", 500))
    assert one_process[0] == 0 and second[0] >= 1, f"cache hits: {one_process[0]}, then {second[0]}"
    assert second[1] == one_process[1], "the program from the cache computes something else"
    names = [path.name for path in tmp_path.glob("jit_the_program-*-cache")]
    assert len(names) == 2, f"two programs were compiled; the cache holds {names}"
    assert abs(float(other[1]) / float(one_process[1]) - 1) < 1e-5


@dataclasses.dataclass(frozen=True)
class Value:
    a: object


DIFFERENT = (
    1,
    1.0,
    "1",
    None,
    True,
    (1,),
    (1, 2),
    ((1,), 2),
    np.dtype("float32"),
    P("a"),
    P(("a", "b")),
    P("a", "b"),
    P(None, "a"),
    P(P.UNCONSTRAINED, "a"),
    Value(1),
    Value("1"),
    moax.Axes(),
    moax.Axes(dp="x"),
    moax.MoEConfig(16, 16, 4, 2),
    moax.MoEConfig(16, 16, 4, 1),
    jax.make_mesh((1, 1), ("a", "b")),
    jax.make_mesh((1, 1), ("a", "c")),
)


def test_texts_of_static_values():
    """Breaks if two static values have one text, so that a program takes the other's compiled code, or if the text of a
    value differs from process to process and no key refuses it."""
    texts = [repr(value) for value in DIFFERENT]
    assert len(set(texts)) == len(texts)
    assert not any(" at 0x" in text or UNSTABLE.search(text) for text in texts)
    for value in (
        moax.moe,
        lambda x: x,
        object(),
        jax.numpy.sum,
        Value(lambda: 0),
        frozenset("ab"),
    ):
        assert UNSTABLE.search(repr(value)), value


def double(static, x):
    return 2 * x


DOUBLE = Op("double", double, "t h -> t h")


@pytest.mark.parametrize("name", ["experts", "double"])
def test_a_call_without_a_stable_text_has_a_name_of_its_own(name, caplog):
    """Breaks if the name of a call holds an address, or says nothing of a function outside of moax: the program of a
    later process, whose function has changed, may then be the one from the cache."""
    config = moax.MoEConfig(16, 16, 8, 2, activation=lambda gate, up: gate * up)
    params = moax.init(jax.random.key(0), config)
    x = jax.numpy.ones((16, 16))

    def names():
        view = find_mesh_view(moax.Axes(), "auto", x)
        run = {"experts": lambda x: moax.moe(x, params, config)[0], "double": lambda x: DOUBLE(view, view, x)[0]}[name]
        text = jax.jit(run).lower(x).as_text()
        return {
            name_of_call for name_of_call in re.findall(r'backend_config = "([^"]*)"', text) if "@" not in name_of_call
        }

    with jax.set_mesh(jax.make_mesh((8,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))):
        names_before = names()
        second = names()
    assert f"{name}: its program will compile anew in each process" in caplog.text
    assert "no stable text" in caplog.text
    assert names_before
    assert all(name_of_call.startswith("moax:") for name_of_call in names_before | second)
    assert len(names_before - second) == 1, "one call has another name each time"


def test_every_op_of_moax_has_a_stable_text():
    """Breaks if a program with some op of moax compiles anew in each process."""
    assert moax.moe and moax.ops  # imported by their names
    ops = [op for op in gc.get_objects() if isinstance(op, Op) and op.local.__module__.startswith("moax.")]
    assert {"experts_grad", "grouped_matmul_grad", "gather_weight"} <= {op.name for op in ops}
    assert not [op for op in ops if UNSTABLE.search(repr(op))]


def test_a_change_of_moax_or_of_its_tiles_changes_the_key(monkeypatch, tmp_path):
    """Breaks if a program that was compiled from other code, or with other tiles, is taken from the cache."""
    monkeypatch.setattr(cache_key, "PACKAGE", tmp_path)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    digests = set()
    for name, text in (("a.py", "1"), ("a.py", "2"), ("home/.cache/moax/tiles.json", "{}")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        digests.add(cache_key.source.__wrapped__())
    assert len(digests) == 3
