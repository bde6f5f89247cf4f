"""The kernel that writes rows to peers: what it copies on one device, in interpret mode against NumPy, as the
interpreter knows no memory of other devices; and lowered for CUDA over meshes. On GPUs, `test_exchange_gpu.py`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from moax.backend import Unsupported
from moax.kernels.exchange import coordinates, put_rows
from support import interpret

ROWS, ENTRIES, OUT = 10, 40, 64


@pytest.mark.parametrize("count", (0, 1, 7, 23, 40))
@pytest.mark.parametrize("sms", (1, 3))
def test_copies_each_entry_once(count, sms):
    """A share that begins or ends one row off, or a batch whose last rows do not exist: rows that nobody sent, or that
    never arrive."""
    rng = np.random.default_rng(count)
    x, words = rng.normal(size=(ROWS, 32)).astype(np.float32), rng.integers(0, 99, (ROWS, 4)).astype(np.int32)
    source = rng.integers(0, ROWS, ENTRIES).astype(np.int32)
    source[count:] = 10**6  # void
    to = rng.permutation(OUT)[:ENTRIES].astype(np.int32)

    def run(x, words, source, to):
        return put_rows((x, words), source, jnp.zeros_like(to), to, jnp.array([count]), OUT, (), sms=sms)

    got = interpret(run, x, words, source, to)
    for out, given in zip(got, (x, words), strict=True):
        np.testing.assert_array_equal(out[to[:count]], given[source[:count]])


def test_without_a_source_row_i_is_sent():
    """The way back: what is sent is what was received, in place."""
    x, to = np.random.default_rng(0).normal(size=(ENTRIES, 8)).astype(np.float32), np.arange(ENTRIES)[::-1]
    run = lambda x, to: put_rows((x,), None, jnp.zeros_like(to), to, jnp.array([33]), ENTRIES, (), sms=2)  # noqa: E731
    (got,) = interpret(run, jnp.asarray(x, jnp.bfloat16), to.astype(np.int32))
    np.testing.assert_array_equal(got[to[:33]], jnp.asarray(x, jnp.bfloat16)[:33])


def test_coordinates():
    """A rank whose coordinates are another's writes into a stranger's memory."""
    found = [coordinates(jnp.int32(rank), (("a", 2), ("b", 4))) for rank in range(8)]
    assert [(int(c["a"]), int(c["b"])) for c in found] == [(a, b) for a in range(2) for b in range(4)]


MESHES = {
    "ep": ({"ep": 4}, ("ep",)),
    "2x2": ({"fsdp": 2, "ep": 2}, ("ep",)),
    "inner": ({"ep": 2, "tp": 2}, ("ep",)),
    "two": ({"fsdp": 2, "a": 2, "b": 2}, ("a", "b")),
}


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("width, dtype", [(96, jnp.bfloat16), (2880, jnp.uint8), (7168, jnp.float32), (4, jnp.float32)])
def test_lowers_for_cuda(mesh, width, dtype, kind):
    """A width, or a mesh of which ep is a part, that Mosaic refuses; and no program without its replicas, which would
    fail when it runs."""
    sizes, ep = MESHES[mesh]
    on = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))
    axes, at = tuple((name, sizes[name]) for name in ep), P(tuple(sizes))
    one = jax.ShapeDtypeStruct
    shapes = [one((on.size * 16, width), dtype), one((on.size * 16, 24), jnp.int32)]
    shapes += [one((on.size * 32,), jnp.int32)] * 3 + [one((on.size,), jnp.int32)]
    operands = [one(s.shape, s.dtype, sharding=NamedSharding(on, at)) for s in shapes]
    with jax.set_mesh(on):
        put = lambda *a: put_rows(a[:2], *a[2:], 64, axes)  # noqa: E731
        over = jax.jit(jax.shard_map(put, in_specs=at, out_specs=at, check_vma=False))
        text = over.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert set(re.findall(r'xla_replica_ids = "([^"]*)"', text)) == {",".join(map(str, range(on.size)))}
    assert "multimem" not in text and "multicast" not in text


def test_lowering_refuses_devices_out_of_order():
    """JAX's own check of the rule that `why_not_peers` names where it can see the devices."""
    devices = np.array(jax.devices()[:2])[::-1]
    on, one = jax.sharding.Mesh(devices, ("ep",), axis_types=(AxisType.Auto,)), jnp.zeros((2, 16), jnp.int32)
    put = lambda x: put_rows((x,), None, x[0, :1], x[0, :1], x[0, :1], 8, (("ep", 2),))  # noqa: E731
    over = jax.jit(jax.shard_map(put, mesh=on, in_specs=P("ep"), out_specs=P("ep"), check_vma=False))
    with pytest.raises(NotImplementedError, match="row-major device ids"):
        over.trace(one).lower(lowering_platforms=("cuda",))


def test_refuses_rows_that_it_cannot_copy():
    """A bulk copy moves whole 16 bytes; four warpgroups' rows must fit into shared memory."""
    at = jnp.zeros(4, jnp.int32)
    with pytest.raises(Unsupported, match="40 bytes, no multiple of 16"):
        put_rows((jnp.zeros((4, 20), jnp.bfloat16),), None, at, at, at[:1], 4, ())
    with pytest.raises(Unsupported, match="rows of 65536 bytes; the kernel takes 49152"):
        put_rows((jnp.zeros((4, 16384), jnp.float32),), None, at, at, at[:1], 4, ())
