"""The one-sided exchange but for its kernel, on emulated devices: the plan against a simulation, and dispatch, combine
and the block with the kernel's one promise emulated. What no rank wrote is NaN, and ids of experts that exist."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import moax
from moax.exchange import select_transport
from moax.exchange.one_sided import plan_sends
from moax.exchange.transport import find_slots
from moax.kernels import device as machine
from moax.kernels.scales import dequantize
from moax.kernels.xla import quantize
from moax.ops import combine, dispatch
from moax.recipe import Format, get_recipe
from support import TOKENS, WAYS, interpret, make_mesh, make_params, program, random, rel_norm, size, some, spec
from support.block import BASE, block
from support.exchange import (
    EXPERTS,
    LOCAL,
    EmulatedOneSided,
    check_delivery,
    check_received,
    check_sums,
    check_transposes,
    choose,
    inputs,
    registered,
    run,
    slots_of,
    wire_kernels,
)
from support.gpus import pretend
from support.oracle.formats import round_trip


@pytest.fixture
def emulated():
    """`one_sided` runs here, XLA in the place of its kernels."""
    with registered("one_sided", EmulatedOneSided()):
        yield


ROUTINGS = {
    "uneven": lambda rng, t, k, ranks: rng.random((t, ranks)) < np.linspace(0.05, 0.95, ranks),
    "all to one": lambda rng, t, k, ranks: np.arange(ranks)[None] == ranks - 1,
    "all to the first": lambda rng, t, k, ranks: np.arange(ranks)[None] == 0,
    "nobody to one": lambda rng, t, k, ranks: np.arange(ranks)[None] != 1,
    "all to all": lambda rng, t, k, ranks: np.ones((t, ranks), bool),
    "none": lambda rng, t, k, ranks: np.zeros((t, ranks), bool),
}


@pytest.mark.parametrize("ranks, top_k, slots", [(2, 3, 13), (4, 4, 13), (4, 4, 5), (8, 8, 1)])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_plan(routing, ranks, top_k, slots):
    """Rows that overlap, are missing, lie past the buffer or come back to another token's place: each is a silent
    corruption of a peer's memory."""
    tokens = 13
    rng = np.random.default_rng(0)
    wanted = np.broadcast_to(ROUTINGS[routing](rng, tokens, top_k, ranks), (tokens, ranks))
    wanted = np.stack(
        [wanted if routing != "uneven" else rng.permuted(wanted, axis=1) for _ in range(ranks)],
    )
    slot = np.cumsum(wanted, 1) - 1
    slot = np.where(wanted & (slot < slots), slot, slots).astype(np.int32)
    counts = (slot < slots).sum(1).astype(np.int32)
    entries = tokens * min(top_k, ranks)

    def plan(s, rank):
        return plan_sends(s, counts[rank], jnp.asarray(counts), rank, entries)

    plans = [jax.tree.map(np.asarray, plan(jnp.asarray(slot[rank]), rank)) for rank in range(ranks)]

    def sends(plan, way):
        """(rank, row there) of each row that is sent."""
        shift, end = plan.places[way]
        return [(p, i + shift[p]) for p in range(ranks) for i in range(end[p - 1] if p else 0, end[p])]

    landed = [{} for _ in range(ranks)]
    for rank, plan in enumerate(plans):
        there = sends(plan, 0)
        assert len(there) == counts[rank].sum() and plan.places[1, 1, -1] == counts[:, rank].sum()
        for token, (peer, row) in zip(plan.token, there, strict=False):
            assert row not in landed[peer] and 0 <= row < ranks * slots
            landed[peer][row] = (rank, token)
    returned = [{} for _ in range(ranks)]
    for rank, plan in enumerate(plans):
        want = [(s, t) for s in range(ranks) for t in range(tokens) if slot[s, t, rank] < slots]
        assert [landed[rank][r] for r in range(plan.places[1, 1, -1])] == want
        for r, (home, back) in enumerate(sends(plan, 1)):
            assert back not in returned[home] and 0 <= back < entries
            returned[home][back] = (rank, landed[rank][r])
    for rank, plan in enumerate(plans):
        assert len(plan.token) == entries and len(returned[rank]) == counts[rank].sum()
        for t in range(tokens):
            for peer in range(ranks):
                if slot[rank, t, peer] < slots:
                    assert returned[rank][plan.position[t, peer]] == (peer, (rank, t))
                else:
                    assert plan.position[t, peer] == entries


def test_the_example_of_the_docstrings():
    """Breaks if the example in `plan_sends` and `SendPlan` is not what the code does."""
    owner = np.array([[0, 1], [1, 2], [0, 2]], np.int32)
    entries = 6
    slot, until = find_slots(jnp.asarray(owner), 2)
    np.testing.assert_array_equal(slot, [[0, 0], [3, 1], [1, 3]])
    np.testing.assert_array_equal(until, [[2], [2]])
    plan = plan_sends(slot, until[:, -1], jnp.array([[2, 2], [1, 0]], jnp.int32), 0, entries)
    np.testing.assert_array_equal(plan.token[:4], [0, 2, 0, 1])
    np.testing.assert_array_equal(plan.position, [[0, 2], [6, 3], [1, 6]])
    np.testing.assert_array_equal(plan.places[0], [[0, -2], [2, 4]])
    assert plan.places[1, 1, -1] == 3


@pytest.mark.parametrize("tokens", (1, 31, 32, 33, 200))
@pytest.mark.parametrize("routing", ROUTINGS)
def test_slots(routing, tokens, ranks=5):
    """A token's number among those of a rank, at and across the ends of words, and however often it names the rank."""
    rng = np.random.default_rng(tokens)
    wanted = np.broadcast_to(ROUTINGS[routing](rng, tokens, ranks, ranks), (tokens, ranks))
    owner = np.where(wanted, np.arange(ranks), ranks)
    owner = rng.permuted(np.concatenate([owner, owner[:, :1]], axis=1), axis=1).astype(np.int32)
    slot, until = find_slots(jnp.asarray(owner), ranks)
    np.testing.assert_array_equal(slot, np.where(wanted, np.cumsum(wanted, 0) - 1, tokens))
    np.testing.assert_array_equal(
        until.T,
        [wanted[: 32 * n].sum(0) for n in range(1, until.shape[1] + 1)],
    )
    assert until.shape[1] * 32 - tokens in range(32)


MESHES = ("2x4", "4x2", "1x8", "dp2x2x2", "tp2x2x2")
ALL = [
    *((way, "2x4") for way in WAYS),
    *(("custom_partitioning", mesh) for mesh in MESHES[1:]),
    ("shard_map", "8x1"),
]
FIRST = [
    ("custom_partitioning", "2x4"),
    ("custom_partitioning", "1x8"),
    ("explicit", "tp2x2x2"),
    ("user_vma", "2x4"),
]
COVER = [*FIRST, *(case for case in ALL if case not in FIRST)]


@pytest.mark.parametrize("way, mesh", some(COVER, 2))
def test_delivery(emulated, way, mesh):
    """As the other transports: every token once on every rank of its experts, sums exact, NaN where nobody wrote."""
    assert check_delivery(way, mesh, "one_sided", skew=0.05) == 0
    check_sums(way, mesh, "one_sided")


@pytest.mark.parametrize("factor, skew", [(0.15, 0.2), (0.7, 0.2), (None, 10.0), (None, -10.0)])
def test_drops_and_degenerate_routings(emulated, factor, skew):
    """Who finds no slot, and the count, are NumPy's; everything to one rank and nothing to the others fits."""
    lost = check_delivery("custom_partitioning", "2x4", "one_sided", skew, factor)
    assert (lost > 0) == (factor == 0.15) or factor == 0.7


@pytest.mark.parametrize(
    "way, factor",
    some([(way, factor) for factor in (0.34, None) for way in WAYS], 2),
)
def test_transposes(emulated, way, factor):
    """Breaks if a gradient comes from another token's row, or from one that nobody wrote, which is NaN."""
    check_transposes(way, "2x4", "one_sided", factor)


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
def test_ep_of_two_axes(emulated, kind):
    """Axes(ep=("a", "b")): ranks count a before b, in the plan as in the kernel's coordinates."""
    mesh = jax.make_mesh((2, 2, 2), ("fsdp", "a", "b"), axis_types=(kind,) * 3)
    axes = moax.Axes(ep=("a", "b"))
    layout = P(("fsdp", "a", "b"))
    x, experts, weights = (jax.device_put(v, jax.NamedSharding(mesh, layout)) for v in inputs("2x4"))
    with jax.set_mesh(mesh):
        send = lambda *args: dispatch(*args, EXPERTS, exchange="one_sided", axes=axes)  # noqa: E731
        received = jax.jit(send)(x, experts, weights)
        scaled = received.rows * received.weights.sum(1, keepdims=True)
        y = jax.jit(lambda rows, r: combine(rows, r, axes=axes))(scaled, received)
    np.testing.assert_array_equal(y, np.asarray(x) * np.asarray(weights).sum(1, keepdims=True))


@pytest.mark.parametrize(
    "wire",
    [Format(block=8), Format(block=128), Format(block=4, scale="e8m0")],
)
def test_wire_format(emulated, wire):
    """Breaks if quantized rows, their scales of 4 bytes or 1, ids or weights unpack otherwise than they were packed."""
    x, experts, weights = inputs("2x4")
    x = random(5, *x.shape)
    _, received = run(
        "custom_partitioning",
        "2x4",
        (x, experts, weights),
        wire=wire,
        exchange="one_sided",
    )
    want = round_trip(x, wire, (1, wire.block))
    check_received(
        "2x4",
        "one_sided",
        received,
        want,
        experts,
        weights,
        slots_of("2x4", "one_sided"),
    )


WIRES = (Format(), Format("e5m2", scale="pow2"), Format(scale="e8m0"), Format(block=32))


EVERY_WIRE = itertools.product(("one_sided", "all_to_all"), WIRES, (None, 0.6))
# Each transport, wire and factor, and the kernels with both transports.
SOME_WIRES = [("one_sided", WIRES[i], (None, 0.6)[i % 2]) for i in range(3)]
SOME_WIRES += [("all_to_all", WIRES[0], 0.6), ("all_to_all", WIRES[3], None)]


@pytest.mark.parametrize(
    "transport, wire, factor",
    some([*SOME_WIRES, *(case for case in EVERY_WIRE if case not in SOME_WIRES)], len(SOME_WIRES)),
)
def test_wire_by_kernels(emulated, monkeypatch, transport, wire, factor):
    """Breaks if the kernels are asked for a wire that they do not take, or are not for one that they do; the rows, ids
    and weights are the same by either."""
    tokens = 128
    _, experts, weights = inputs("2x4", tokens=tokens)
    x = random(5, len(experts), 160).astype(ml_dtypes.bfloat16)
    called = wire_kernels(monkeypatch)
    options = dict(wire=wire, exchange=transport, capacity_factor=factor)
    _, got = run("shard_map", "2x4", (x, experts, weights), **options)
    theirs = wire.block == 128 and wire.scale != "e8m0"
    back = theirs and transport == "one_sided" and got.rows.shape[0] // 8 % 128 == 0
    assert called == {*["quantize_by_row"] * theirs, *["dequantize_rows"] * back}
    want = round_trip(x, wire, (1, wire.block)).astype(x.dtype).astype(np.float32)
    got = dataclasses.replace(got, rows=got.rows.astype(np.float32))
    check_received(
        "2x4",
        transport,
        got,
        want,
        experts,
        weights,
        slots_of("2x4", transport, factor, tokens),
    )


@pytest.mark.parametrize("wire", (Format(), Format("e5m2", scale="pow2")))
def test_wire_of_the_kernels(wire, rows=256, width=160, count=200):
    """The kernels themselves, there and back: scales to an ulp, values to the neighbour that x * (1 / scale) rounds to,
    and from these what XLA makes of them to the bit."""
    by_kernels = pytest.importorskip("moax.kernels.hopper")
    x = jnp.asarray(random(5, rows, width), jnp.bfloat16)
    want = quantize(x, wire, (1, 128))

    def there_and_back(x, others, ends):
        q = by_kernels.quantize(x, wire, (1, 128))
        words = jnp.concatenate([lax.bitcast_convert_type(q.scale, jnp.int32), others], axis=1)
        return q, by_kernels.dequantize_wire(q.data, words, ends, wire, x.dtype)

    q, back = interpret(
        there_and_back,
        x,
        np.full((rows, 3), -1, np.int32),
        np.array([7, count], np.int32),
    )
    np.testing.assert_allclose(q.scale, want.scale, rtol=2e-7)
    assert np.abs(q.data.astype(int) - np.asarray(want.data, int)).max() <= 1
    assert (q.data == want.data).mean() > 0.999
    np.testing.assert_array_equal(
        np.float32(back)[:count],
        np.float32(dequantize(q, x.dtype))[:count],
    )


@pytest.mark.more
@pytest.mark.parametrize("mesh, way", [("2x4", "explicit"), ("2x4", "user_vma")])
def test_block(emulated, mesh, way):
    """Output, statistics and every gradient of the block are those of all_gather, NaN past the last row and all."""
    got, got_grads = block(way, mesh, exchange="one_sided")()
    want, want_grads = block(way, mesh, exchange="all_gather")()
    for g, w in zip(
        jax.tree.leaves((got, got_grads)),
        jax.tree.leaves((want, want_grads)),
        strict=True,
    ):
        assert rel_norm(g, w) < 2e-6


@pytest.mark.more
@pytest.mark.parametrize(
    "recipe",
    some((dataclasses.replace(get_recipe("fp8_block"), wire=Format(block=16)), "mxfp8"), 1),
)
def test_block_quantized(emulated, recipe):
    """No scale is taken of a row that nobody wrote."""
    got, got_grads = block("custom_partitioning", "2x4", exchange="one_sided", recipe=recipe)()
    want, want_grads = block("custom_partitioning", "2x4", exchange="all_gather", recipe=recipe)()
    for g, w in zip(
        jax.tree.leaves((got, got_grads)),
        jax.tree.leaves((want, want_grads)),
        strict=True,
    ):
        assert rel_norm(g, w) < 1e-5


@pytest.mark.more
def test_block_drops_as_all_to_all(emulated):
    """With a capacity the same assignments are dropped, and counted."""
    config = dataclasses.replace(BASE, capacity_factor=0.6)
    got, _ = block("shard_map", "2x4", config, exchange="one_sided")()
    want, _ = block("shard_map", "2x4", config, exchange="all_to_all")()
    assert got[1].dropped == want[1].dropped > 0
    assert rel_norm(got[0], want[0]) < 2e-6


@pytest.mark.more
def test_scan_and_remat(emulated):
    """Layers in a scan, rematerialized: the plan is a value like any other."""
    params = make_params(BASE)

    def loss(x, params, transport):
        layer = jax.checkpoint(
            lambda x, _: (x + moax.moe(x, params, BASE, exchange=transport)[0], None),
        )
        return jnp.sum(lax.scan(layer, x, None, length=2)[0] ** 2)

    x = jnp.asarray(random(0, 64, BASE.d_model))
    with jax.set_mesh(make_mesh("2x4")):
        grad = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
        got, want = (grad(x, params, t) for t in ("one_sided", "all_gather"))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert rel_norm(g, w) < 5e-6


def hopper(monkeypatch):
    pytest.importorskip("moax.kernels.hopper")
    pretend(monkeypatch)


def refused(row_bytes=256, view=None):
    with pytest.raises(
        moax.Unsupported,
        match="exchange='one_sided': .*; use 'all_gather' or 'all_to_all'",
    ) as error:
        select_transport("one_sided", view, row_bytes)
    return str(error.value)


def test_reasons_of_the_machine(monkeypatch):
    """Each precondition that fails is named; `auto` never takes it."""
    pytest.importorskip("moax.kernels.hopper")
    assert "compute capability 9.0, this is 'cpu'" in refused()
    hopper(monkeypatch)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert "within one process, this is one of 2" in refused()
    assert select_transport("auto", None, 256) == "all_gather"
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    assert "rows of 40 bytes are no multiple of 16" in refused(40)
    assert "no jax.set_mesh(mesh) is in force" in refused()
    assert select_transport("auto", None, 256) == "all_gather"


def test_reasons_of_the_mesh(monkeypatch):
    """Devices out of order, or not the first of the machine, would receive another rank's rows; GPUs that cannot reach
    one another would fault."""
    hopper(monkeypatch)
    devices = jax.devices()
    for order, says in (
        ([1, 0, 2, 3], r"not of \[1, 0, 2, 3\]"),
        ([4, 5, 6, 7], r"not of \[4, 5, 6, 7\]"),
    ):
        mesh = Mesh(
            np.array([devices[i] for i in order]).reshape(2, 2),
            ("fsdp", "ep"),
            axis_types=(AxisType.Auto,) * 2,
        )
        with jax.set_mesh(mesh):
            assert "the first 4 devices of the machine in order" in refused()
            with pytest.raises(moax.Unsupported, match=says):
                jax.jit(lambda x: (select_transport("one_sided", None, 256), x)[1])(jnp.ones(8))
    with jax.set_mesh(make_mesh("2x4")):
        assert select_transport("one_sided", None, 256) == "one_sided"
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(machine, "_reach", lambda ordinals: False)
        assert "cannot reach one another's memory" in refused()


@pytest.mark.parametrize("lacking", (None, (1, 0), (0, 2)))
def test_every_pair_of_gpus_is_asked(monkeypatch, lacking):
    """One pair that is not connected, in one direction, faults the kernel."""

    class Driver:
        def cuDeviceGet(self, handle, ordinal):
            handle._obj.value = ordinal
            return 0

        def cuDeviceCanAccessPeer(self, can, a, b):
            can._obj.value = (a.value, b.value) != lacking
            return 0

    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: Driver())
    machine._reach.cache_clear()
    assert machine._reach((0, 1, 2)) == (lacking is None)
    machine._reach.cache_clear()


def test_reason_of_a_nested_shard_map(monkeypatch):
    """Inside a shard_map over other axes the compiled kernel would know no replicas, and fail when it runs."""
    hopper(monkeypatch)
    x, experts, weights = inputs("dp2x2x2")
    send = lambda *args: dispatch(*args, EXPERTS, exchange="one_sided").count  # noqa: E731
    with jax.set_mesh(make_mesh("dp2x2x2")):
        inside = jax.shard_map(
            lambda *args: dispatch(*args, EXPERTS, exchange="one_sided", axes=moax.Axes(dp=())).count,
            in_specs=P("dp"),
            out_specs=P("dp"),
            axis_names={"dp"},
            check_vma=False,
        )
        with pytest.raises(moax.Unsupported, match="inside a shard_map over other axes"):
            jax.jit(inside)(x, experts, weights)
    assert send(*map(jnp.asarray, (x, experts, weights))) == len(x)  # one device: nothing moves


@pytest.mark.more
@pytest.mark.parametrize("way", ("explicit", "user_vma", "shard_map", "user"))
def test_block_lowers(monkeypatch, way):
    """The kernels themselves, forward and backward, in each kind of `shard_map`: a type, an effect or a mesh that one
    of them refuses. `make check-sass` compiles what custom_partitioning lowers later."""
    hopper(monkeypatch)
    jax.clear_caches()
    program = block(way, "2x4", exchange="one_sided", kernels="xla")
    text = program.under(
        lambda *args: program.fn.trace(*args).lower(lowering_platforms=("cuda",)).as_text(),
    )
    assert set(re.findall(r'xla_replica_ids = "([^"]*)"', text)) == {"0,1,2,3,4,5,6,7"}
    # The kernels are those of dispatch, of combine, of dy, and of the gradients of rows and weights in one.
    assert text.count("xla_replica_ids") == 4


def test_vmap(emulated):
    """A batch of dispatches is one after the other, each right."""
    x, experts, weights = inputs("2x4")
    batch = np.stack([x, 2 * x])

    def fn(batch, experts, weights, engine):

        def send(x):
            return dispatch(x, experts, weights, EXPERTS, exchange="one_sided", engine=engine)

        return jax.vmap(lambda x: combine(send(x).rows, send(x), engine=engine))(batch), ()

    layout = spec("2x4", TOKENS)
    y, _ = program(
        "custom_partitioning",
        "2x4",
        fn,
        (batch, experts, weights),
        (P(None, *layout), layout, layout),
        P(None, *layout),
    )()
    ranks = np.array([len(set(row // (EXPERTS // size("2x4", "ep")))) for row in experts])
    np.testing.assert_array_equal(y, batch * ranks[None, :, None])


def test_choose_is_skewed():
    """What the degenerate cases rest on: all experts of a token on one rank, the others without a row."""
    for skew, rank in ((10.0, 0), (-10.0, 3)):
        assert set((choose(1, LOCAL, skew) // 4).reshape(-1)) == {rank}
