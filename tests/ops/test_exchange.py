"""Exchange: what each rank receives and what comes back, against NumPy, by each transport."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import moax
from moax.estimate import estimate
from moax.exchange import AllGather
from moax.exchange.transport import allot_slots, balanced_rows, find_slots
from moax.inspect import collectives
from moax.ops import combine, dispatch
from support import MESHES, TOKENS, WAYS, integers, mark_rest, program, put, random, spec
from support.exchange import (
    EXPERTS,
    LOCAL,
    TOP_K,
    WIDTH,
    check_delivery,
    check_received,
    check_sums,
    check_transposes,
    choose,
    inputs,
    registered,
    run,
    slots_of,
)

TRANSPORTS = ("all_gather", "all_to_all")
ON = ("2x4", "4x2", "1x8", "dp2x2x2")


COVER = [*itertools.product(WAYS, ["2x4"], TRANSPORTS)]
COVER += [("custom_partitioning", mesh, t) for mesh, t in zip(ON[1:], TRANSPORTS * 2, strict=False)]
COVER += [
    ("shard_map", "dp2x2x2", "all_to_all"),
    ("explicit", "4x2", "all_gather"),
    ("shard_map", "8x1", "all_to_all"),
]
COVER += [("explicit", "tp2x2x2", "all_to_all"), ("explicit", "8x1", "all_gather")]
FULL = [c for c in itertools.product(WAYS, MESHES, TRANSPORTS) if c not in COVER][::2]


@pytest.mark.parametrize("way, mesh, transport", mark_rest([*COVER, *FULL], len(COVER)))
def test_delivery(way, mesh, transport):
    """Every token once on every rank that owns one of its experts, with those ids and weights; sums come back exact."""
    assert check_delivery(way, mesh, transport, skew=0.05 if (way, mesh, transport) in FULL else 0.0) == 0
    check_sums(way, mesh, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_device(transport):
    """Without a mesh nothing moves: the token's own rows, all experts local."""
    x, experts, weights = inputs("8x1")

    @jax.jit
    def there_and_back(*args):
        r = dispatch(*args, EXPERTS, exchange=transport)
        return r, combine(r.rows, r)

    r, y = there_and_back(x, experts, weights)
    np.testing.assert_array_equal(r.rows, x)
    np.testing.assert_array_equal(r.experts, experts)
    np.testing.assert_array_equal(r.weights, weights)
    assert r.count == len(x) and r.dropped == 0
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("factor", (0.15, 0.34, 0.7, 1.0))
@pytest.mark.parametrize(
    "way, mesh",
    [("custom_partitioning", "2x4"), ("shard_map", "4x2"), ("explicit", "1x8")],
)
def test_drops_are_counted(way, mesh, factor):
    """Skewed routing and few slots: who is lost, and the count by source, are NumPy's."""
    lost = check_delivery(way, mesh, "all_to_all", skew=0.2, capacity_factor=factor)
    assert factor > 0.5 or lost > 0


def test_negative_ids_have_no_slot():
    """Breaks if a token whose ids are all -1 takes a slot of rank 0, and a real token is dropped for it."""
    x, experts, weights = inputs("1x8", skew=0.2)
    padded = np.arange(len(x))[:, None] % 2 > 0

    def dispatch_with(none):
        args = (x, np.where(padded, none, experts), weights)
        return run("shard_map", "1x8", args, exchange="all_to_all", capacity_factor=0.7)[1]

    got, want = dispatch_with(-1), dispatch_with(EXPERTS)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize(
    "transport, skew, factor",
    [*((t, 10.0, None) for t in TRANSPORTS), ("all_gather", 0.2, 0.1)],
)
def test_nothing_is_dropped(transport, skew, factor):
    """Without a factor, also when every token picks the experts of one rank; all_gather has room by construction."""
    assert check_delivery("shard_map", "2x4", transport, skew, factor) == 0


@pytest.mark.parametrize(
    "transport, factor",
    [("all_gather", None), ("all_to_all", None), ("all_to_all", 0.34)],
)
@pytest.mark.parametrize("way", WAYS)
def test_transposes(way, transport, factor):
    """Breaks if a gradient is summed over ranks that it does not belong to, or read from a row that is not there."""
    check_transposes(way, "2x4", transport, factor)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("x_spec", [P(), P("fsdp"), P(None, "ep")], ids=str)
def test_tokens_of_another_layout(x_spec, transport):
    """Explicit axes: tokens that lie otherwise are moved, and gradients come back as they lay."""
    x, experts, weights = args = inputs("2x4")

    def forward(x, experts, weights, engine):
        r = dispatch(x, experts, weights, EXPERTS, exchange=transport)
        return combine(r.rows * r.weights.sum(1, keepdims=True), r), ()

    out = spec("2x4", TOKENS)
    dy = integers(7, *x.shape)
    specs = (x_spec, out, x_spec if x_spec == P("fsdp") else P())
    y, _, (d_x, d_w) = program("explicit", "2x4", forward, args, specs, out, cotangents=dy, wrt=(0, 2))()
    np.testing.assert_array_equal(y, x * weights.sum(1, keepdims=True))
    np.testing.assert_array_equal(d_x, dy * weights.sum(1, keepdims=True))
    np.testing.assert_array_equal(
        d_w,
        np.broadcast_to((x * dy).sum(1, keepdims=True), weights.shape),
    )


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ep_of_two_axes(transport, kind):
    """Axes(ep=("a", "b")): ranks count a before b, as P(("a", "b")) does; otherwise tokens meet another rank's
    experts."""
    mesh = jax.make_mesh((2, 2, 2), ("fsdp", "a", "b"), axis_types=(kind,) * 3)
    axes = moax.Axes(ep=("a", "b"))
    layout = P(("fsdp", "a", "b"))
    x, experts, weights = args = inputs("2x4")

    def send(*args):
        return dispatch(*args, EXPERTS, exchange=transport, axes=axes)

    with jax.set_mesh(mesh):
        received = jax.jit(send)(*put(mesh, (layout,) * 3, args))
        rows = np.asarray(received.rows) * np.asarray(received.weights).sum(1, keepdims=True)
        y = jax.jit(lambda rows, r: combine(rows, r, axes=axes))(put(mesh, layout, rows), received)
    np.testing.assert_array_equal(y, x * weights.sum(1, keepdims=True))
    assert np.asarray(received.count).sum() == len(np.unique(np.stack([
        np.repeat(np.arange(len(x)), TOP_K), experts.reshape(-1) // 4]), axis=1).T)  # fmt: skip


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bfloat16_rows(transport):
    """Breaks if rows travel in another dtype than their own, or weights in another than float32."""
    x, experts, weights = inputs("2x4")
    args = (x.astype(ml_dtypes.bfloat16), experts, weights)
    _, received = run("shard_map", "2x4", args, exchange=transport)
    assert received.rows.dtype == ml_dtypes.bfloat16 and received.weights.dtype == np.float32
    wide = dataclasses.replace(received, rows=received.rows.astype(np.float32))
    check_received("2x4", transport, wide, x, experts, weights, slots_of("2x4", transport))


@dataclasses.dataclass(frozen=True)
class Summed(AllGather):
    """A further transport: its combine is an all-reduce, of which each rank keeps its own tokens."""

    def combine(self, static, arrays, sent):
        ep = static.axes.ep
        tokens = static.tokens
        start = lax.axis_index(ep) * tokens
        return [lax.dynamic_slice_in_dim(lax.psum(rows, ep), start, tokens) for rows in arrays]


def test_a_further_transport():
    """Breaks if anything beyond its own class and its line in the table must know of a transport."""
    with registered("summed", Summed()):
        check_delivery("shard_map", "2x4", "summed")
        check_sums("custom_partitioning", "2x4", "summed")
        moved = estimate("qwen3-30b", {"ep": 4}, 64, exchange="summed")
    assert (moved.plan.first.exchange.transport, moved.wire_bytes("dispatch") > 0) == ("summed", True)


def routed(experts, ranks):
    """Slots by the definition: how many earlier tokens want the rank; T where the token does not."""
    wanted = np.stack(
        [(experts // (EXPERTS // ranks) == rank).any(1) for rank in range(ranks)],
        axis=1,
    )
    return np.where(wanted, np.cumsum(wanted, 0) - 1, len(experts))


@pytest.mark.parametrize("ranks", (2, 4))
def test_balanced_rows(ranks):
    """Breaks if the load that costs are computed for is not the one where every choice of K experts is as likely."""
    every = np.array(list(itertools.combinations(range(EXPERTS), TOP_K)))
    slot = routed(every, ranks)
    np.testing.assert_array_equal(
        (slot < len(every)).sum(0),
        balanced_rows(len(every), TOP_K, ranks, EXPERTS),
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("way", WAYS[:3])
def test_collectives(way, transport):
    """Over ep alone: rows, ids and weights out, one sum back, each the other's transpose. Anything over fsdp, or wider
    than asked, would be a bill paid each layer."""
    x, experts, weights = inputs("2x4")
    layout = spec("2x4", TOKENS)

    def forward(x, experts, weights, engine):
        r = dispatch(x, experts, weights, EXPERTS, exchange=transport, engine=engine)
        return combine(r.rows * r.rows, r, engine=engine), ()

    args = (x.astype(ml_dtypes.bfloat16), experts, weights)
    p = program(
        way,
        "2x4",
        forward,
        args,
        (layout,) * 3,
        layout,
        cotangents=random(6, *x.shape).astype(ml_dtypes.bfloat16),
    )
    traffic = p.under(lambda *args: collectives(p.fn, *args))
    assert {c.axes for c in traffic} == {("ep",)}
    gathers = {"all-gather", "reduce-scatter"}
    assert {c.kind for c in traffic} == ({"all-to-all"} if transport == "all_to_all" else gathers)
    rows = sorted(c.dtype for c in traffic if c.size in (4 * LOCAL * WIDTH, LOCAL * WIDTH))
    assert rows == ["bfloat16"] * 4


def test_errors():
    """Names, shapes and experts that cannot work are named."""
    x, experts, weights = map(jnp.asarray, inputs("8x1"))
    with pytest.raises(
        ValueError,
        match="exchange='nccl' must be one of 'auto', 'all_gather', 'all_to_all'",
    ):
        dispatch(x, experts, weights, EXPERTS, exchange="nccl")
    with pytest.raises(
        ValueError,
        match=r"x, experts, weights have shapes \(64, 16\), \(64, 3\), \(64, 2\)",
    ):
        dispatch(x, experts, weights[:, :2], EXPERTS)
    with pytest.raises(ValueError, match=r"they must be \[T, H\], \[T, K\], \[T, K\]"):
        dispatch(x[:32], experts, weights, EXPERTS)
    layout = spec("2x4", TOKENS)
    send = lambda *args, engine: (dispatch(*args, 10, engine=engine), ())  # noqa: E731
    p = program("shard_map", "2x4", send, inputs("2x4"), (layout,) * 3)
    with pytest.raises(
        ValueError,
        match=r"num_experts=10 is not divisible by mesh axes \('ep',\) of 4 devices",
    ):
        p()


ROUTINGS = {
    "uneven": lambda rng, t, ranks: rng.random((t, ranks)) < np.linspace(0.05, 0.95, ranks),
    "all to one": lambda rng, t, ranks: np.arange(ranks)[None] == ranks - 1,
    "nobody to one": lambda rng, t, ranks: np.arange(ranks)[None] != 1,
    "all to all": lambda rng, t, ranks: np.ones((t, ranks), bool),
    "none": lambda rng, t, ranks: np.zeros((t, ranks), bool),
}


@pytest.mark.parametrize("tokens", (1, 31, 32, 33, 200))
@pytest.mark.parametrize("routing", ROUTINGS)
def test_slots_of_tokens(routing, tokens, ranks=5):
    """A token's number among those of a rank, at and across the ends of words, and however often it names the rank."""
    rng = np.random.default_rng(tokens)
    wanted = np.broadcast_to(ROUTINGS[routing](rng, tokens, ranks), (tokens, ranks))
    owner = np.where(wanted, np.arange(ranks), ranks)
    owner = rng.permuted(np.concatenate([owner, owner[:, :1]], axis=1), axis=1).astype(np.int32)
    slot, counts = find_slots(jnp.asarray(owner), ranks)
    np.testing.assert_array_equal(slot, np.where(wanted, np.cumsum(wanted, 0) - 1, tokens))
    np.testing.assert_array_equal(counts, wanted.sum(0))


def test_the_example_of_the_docstring():
    """Breaks if the example in `find_slots` is not what the code does."""
    slot, counts = find_slots(jnp.array([[0, 1], [1, 2], [0, 2]], jnp.int32), 2)
    np.testing.assert_array_equal(slot, [[0, 0], [3, 1], [1, 3]])
    np.testing.assert_array_equal(counts, [2, 2])


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_vmap(transport):
    """Breaks if a batch of dispatches is not one after the other, each right."""
    x, experts, weights = inputs("2x4")
    batch = np.stack([x, 2 * x])

    def fn(batch, experts, weights, engine):
        def send(x):
            return dispatch(x, experts, weights, EXPERTS, exchange=transport, engine=engine)

        def there_and_back(x):
            r = send(x)
            mine = (r.experts < EXPERTS // 4).any(1, keepdims=True)
            return combine(jnp.where(mine, r.rows, 0), r, engine=engine)

        return jax.vmap(there_and_back)(batch), ()

    layout = spec("2x4", TOKENS)
    specs = (P(None, *layout), layout, layout)
    y, _ = program("custom_partitioning", "2x4", fn, (batch, experts, weights), specs, P(None, *layout))()
    ranks = np.array([len(set(row // (EXPERTS // 4))) for row in experts])
    np.testing.assert_array_equal(y, batch * ranks[None, :, None])


def test_choose_is_skewed():
    """What the degenerate cases rest on: all experts of a token on one rank, the others without a row."""
    for skew, rank in ((10.0, 0), (-10.0, 3)):
        assert set((choose(1, LOCAL, skew) // 4).reshape(-1)) == {rank}


def test_slots():
    """The balanced load times the factor, rounded up; never more than there are tokens."""
    for factor, slots in {None: 64, 1.0: 32, 1.01: 33, 100.0: 64}.items():
        assert allot_slots(64, 2, 4, 8, factor, None) == (slots, slots)


def test_received_is_a_value():
    """It crosses jit and scan with its static fields, so that any number of layers may hold one."""
    x, experts, weights = map(jnp.asarray, inputs("8x1"))
    received = jax.jit(lambda *args: dispatch(*args, EXPERTS))(x, experts, weights)
    assert (received.transport, received.num_tokens) == ("all_gather", len(x))
    other = dataclasses.replace(received, rows=2 * received.rows)
    np.testing.assert_array_equal(jax.jit(lambda r: combine(r.rows, r))(other), 2 * x)
