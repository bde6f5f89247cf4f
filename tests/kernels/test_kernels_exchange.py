"""The kernel that writes rows to peers: what it copies on one device, in interpret mode against NumPy, as the
interpreter knows no memory of other devices; and lowered for CUDA over meshes. On GPUs, `test_exchange_gpu.py`."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from moax.checks import Unsupported
from moax.kernels.hopper.pallas.exchange import coordinates, place, put_rows
from support import interpret

ROWS, ENTRIES, OUT = 10, 40, 64


@pytest.mark.parametrize("count", (0, 1, 7, 23, 40))
@pytest.mark.parametrize("sms", (1, 3))
def test_copies_each_entry_once(count, sms):
    """A share that begins or ends one row off, or a batch whose last rows do not exist: rows that nobody sent, or that
    never arrive."""
    rng = np.random.default_rng(count)
    x = rng.normal(size=(ROWS, 32)).astype(np.float32)
    words = rng.integers(0, 99, (ROWS, 4)).astype(np.int32)
    source = rng.integers(0, ROWS, ENTRIES).astype(np.int32)
    source[count:] = 10**6  # void
    places = np.array([[[99], [99]], [[5], [count]]], np.int32)

    def run(x, words, source, places):
        return put_rows((x, words), source, places, 1, OUT, (), sms=sms)

    got = interpret(run, x, words, source, places)
    for out, entries in zip(got, (x, words), strict=True):
        np.testing.assert_array_equal(out[5 : 5 + count], entries[source[:count]])


def test_without_a_source_row_i_is_sent():
    """The way back: what is sent is what was received, in place."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(ENTRIES, 8)), jnp.bfloat16)
    run = lambda x, places: put_rows((x,), None, places, 0, ENTRIES, (), sms=2)  # noqa: E731
    (got,) = interpret(run, x, np.array([[[0], [33]]], np.int32))
    np.testing.assert_array_equal(got[:33], x[:33])


@pytest.mark.parametrize("ends", [(4, 4, 9, 9), (0, 0, 0, 0), (0, 3, 3, 7), (1, 2, 3, 4)])
def test_place(ends):
    """A rank that gets nothing among those that do: its neighbour's rows would go to it."""
    shifts = (10, 20, 30, 40)
    want = [(p, i + shifts[p]) for p in range(4) for i in range(ends[p - 1] if p else 0, ends[p])]
    assert [tuple(map(int, place(jnp.int32(i), ends, shifts))) for i in range(ends[-1])] == want


def test_coordinates():
    """A rank whose coordinates are another's writes into a stranger's memory."""
    results = [coordinates(jnp.int32(rank), (("a", 2), ("b", 4))) for rank in range(8)]
    expected = [(a, b) for a in range(2) for b in range(4)]
    assert [(int(c["a"]), int(c["b"])) for c in results] == expected


MESHES = {
    "ep": ({"ep": 4}, ("ep",)),
    "2x2": ({"fsdp": 2, "ep": 2}, ("ep",)),
    "inner": ({"ep": 2, "tp": 2}, ("ep",)),
    "two": ({"fsdp": 2, "a": 2, "b": 2}, ("a", "b")),
}


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
    "width, dtype",
    [(96, jnp.bfloat16), (2880, jnp.uint8), (7168, jnp.float32), (4, jnp.float32)],
)
def test_lowers_for_cuda(mesh, width, dtype, kind):
    """A width, or a mesh of which ep is a part, that Mosaic refuses; and no program without its replicas, which would
    fail when it runs."""
    sizes, ep = MESHES[mesh]
    on = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))
    axes = tuple((name, sizes[name]) for name in ep)
    layout = P(tuple(sizes))
    one = jax.ShapeDtypeStruct
    shapes = [one((on.size * 16, width), dtype), one((on.size * 16, 24), jnp.int32)]
    ranks = np.prod([sizes[name] for name in ep])
    shapes += [one((on.size * 32,), jnp.int32), one((on.size * 2, 2, ranks), jnp.int32)]
    operands = [one(s.shape, s.dtype, sharding=NamedSharding(on, layout)) for s in shapes]
    with jax.set_mesh(on):
        put = lambda *a: put_rows(a[:2], *a[2:], 0, 64, axes)  # noqa: E731
        over = jax.jit(jax.shard_map(put, in_specs=layout, out_specs=layout, check_vma=False))
        text = over.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    expected = {",".join(map(str, range(on.size)))}
    assert set(re.findall(r'xla_replica_ids = "([^"]*)"', text)) == expected
    assert "multimem" not in text and "multicast" not in text


def test_lowering_refuses_devices_out_of_order():
    """JAX's own check of the rule that `why_not_peers` names where it can see the devices."""
    devices = np.array(jax.devices()[:2])[::-1]
    on = jax.sharding.Mesh(devices, ("ep",), axis_types=(AxisType.Auto,))
    one = jnp.zeros((2, 16), jnp.int32)

    def put(x):
        return put_rows((x,), None, x[:, :4].reshape(1, 2, 2), 0, 8, (("ep", 2),))

    over = jax.jit(
        jax.shard_map(
            put,
            mesh=on,
            in_specs=P("ep"),
            out_specs=P("ep"),
            check_vma=False,
        )
    )
    with pytest.raises(NotImplementedError, match="row-major device ids"):
        over.trace(one).lower(lowering_platforms=("cuda",))


def test_refuses_rows_that_it_cannot_copy():
    """A bulk copy moves whole 16 bytes; four warpgroups' rows must fit into shared memory."""
    places = jnp.zeros((1, 2, 1), jnp.int32)
    with pytest.raises(Unsupported, match="40 bytes, no multiple of 16"):
        put_rows((jnp.zeros((4, 20), jnp.bfloat16),), None, places, 0, 4, ())
    with pytest.raises(Unsupported, match="rows of 65536 bytes; the kernel takes at most 49152"):
        put_rows((jnp.zeros((4, 16384), jnp.float32),), None, places, 0, 4, ())
    with pytest.raises(ValueError, match=r"places has shape \(1, 2, 1\).*must be \(ways, 2, 4\)"):
        put_rows((jnp.zeros((4, 8), jnp.float32),), None, places, 0, 4, (("ep", 4),))
