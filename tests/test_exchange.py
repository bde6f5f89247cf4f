"""Exchange: what each rank receives, against NumPy; both transports alike; dispatch and combine transposes."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import moax
from moax.inspect import collectives
from moax.ops import combine, dequantize, dispatch, quantize
from moax.ops.exchange import slots_per_pair
from moax.recipe import Format
from support import MESHES, TOKENS, WAYS, integers, program, put, random, size, spec

WIDTH, EXPERTS, TOP_K, LOCAL = 16, 16, 3, 8
TRANSPORTS = ("all_gather", "all_to_all")
ON = ("2x4", "4x2", "1x8", "dp2x2x2")


def choose(seed, tokens, skew=0.0):
    """Distinct experts of each token, low ids likelier by skew."""
    scores = np.random.default_rng(seed).random((tokens, EXPERTS)) - skew * np.arange(EXPERTS)
    return np.argsort(-scores, axis=1)[:, :TOP_K].astype(np.int32)


def inputs(mesh, skew=0.0, tokens=LOCAL):
    """x (integers: any sum is exact), experts, and weights that are all different."""
    rows = tokens * size(mesh, *TOKENS)
    weights = 1.0 + np.arange(rows * TOP_K, dtype=np.float32).reshape(rows, TOP_K)
    return integers(0, rows, WIDTH), choose(1, rows, skew), weights


def run(way, mesh, args, cotangents=None, **options):
    """`dispatch` on the mesh: ((rows, weights), Received) and, with cotangents of those, gradients of x and weights."""
    at = spec(mesh, TOKENS)

    def forward(x, experts, weights, engine):
        r = dispatch(x, experts, weights, EXPERTS, engine=engine, **options)
        return (r.rows, r.weights), r

    p = program(way, mesh, forward, args, (at,) * 3, (at, at), at, cotangents=cotangents, wrt=(0, 2))
    return p, p()


def run_combine(way, mesh, rows, received, cotangents=None):
    """`combine` on the mesh: y, and with a cotangent of it the gradient of rows."""
    at = spec(mesh, TOKENS)
    p = program(
        way, mesh, lambda rows, r, engine: (combine(rows, r, engine=engine), ()), (rows, received), (at, at), at,
        cotangents=cotangents,
    )  # fmt: skip
    return p()


def by_shard(mesh, tree, shard):
    """The leading-dim slice that one shard holds of each array."""
    shards = size(mesh, *TOKENS)
    return jax.tree.map(lambda v: v[len(v) // shards * shard :][: len(v) // shards], tree)


def sent_tokens(mesh, experts, rank_experts, slots):
    """For each shard: the tokens of its ep group that it gets (global numbers, by source), as capacity allows, and for
    each source the assignments lost."""
    ranks, shards = size(mesh, "ep"), size(mesh, *TOKENS)
    local = len(experts) // shards
    got, lost = [[] for _ in range(shards)], np.zeros(shards, int)
    for source, rank in itertools.product(range(shards), range(ranks)):
        here = experts[source * local :][:local] // rank_experts == rank
        wanting = np.flatnonzero(here.any(1))
        kept = wanting if slots is None else wanting[:slots]
        got[source // ranks * ranks + rank] += [source * local + t for t in kept]
        lost[source] += here[np.setdiff1d(wanting, kept)].sum()
    return got, lost


def check_delivery(way, mesh, transport, skew=0.0, capacity_factor=None):
    x, experts, weights = args = inputs(mesh, skew)
    ranks = size(mesh, "ep")
    per_rank = EXPERTS // ranks
    slots = None
    if transport != "all_gather":
        slots = slots_per_pair(LOCAL, TOP_K, ranks, capacity_factor)
    _, (_, received) = run(way, mesh, args, exchange=transport, capacity_factor=capacity_factor)
    got, lost = sent_tokens(mesh, experts, per_rank, slots)
    for shard, tokens in enumerate(got):
        r = by_shard(mesh, received, shard)
        real = (r.experts < per_rank).any(1)
        assert r.count == real.sum() == len(tokens)
        first = shard % ranks * per_rank
        for row, token in zip(np.flatnonzero(real), tokens, strict=True):
            np.testing.assert_array_equal(r.rows[row], x[token])
            mine = experts[token] // per_rank == shard % ranks
            np.testing.assert_array_equal(r.experts[row], np.where(mine, experts[token] - first, per_rank))
            np.testing.assert_array_equal(r.weights[row], np.where(mine, weights[token], 0.0))
        assert not r.weights[~real].any()
        assert (r.experts[~real] == per_rank).all()
        assert r.dropped == lost[shard]
    assert received.dropped.dtype == received.count.dtype == received.experts.dtype == np.int32
    return lost.sum()


def check_sums(way, mesh, transport, **options):
    """y[t] = sum_k w[t, k] (expert + 1) x[t], through dispatch and combine: exact on integers."""
    x, experts, weights = args = inputs(mesh)
    _, (_, received) = run(way, mesh, args, exchange=transport, **options)
    per_rank = EXPERTS // size(mesh, "ep")
    rank = np.repeat(np.arange(size(mesh, *TOKENS)) % size(mesh, "ep"), len(received.rows) // size(mesh, *TOKENS))
    factor = np.where(received.experts < per_rank, received.experts + rank[:, None] * per_rank + 1, 0)
    rows = received.rows * (received.weights * factor).sum(1, keepdims=True)  # NaN where one_sided wrote nothing
    y, _ = run_combine(way, mesh, rows.astype(np.float32), received)
    np.testing.assert_array_equal(y, x * (weights * (experts + 1)).sum(1, keepdims=True))


COVER = [*itertools.product(WAYS, ["2x4"], TRANSPORTS)]
COVER += [("custom_partitioning", mesh, t) for mesh, t in zip(ON[1:], TRANSPORTS * 2, strict=False)]
COVER += [("shard_map", "dp2x2x2", "all_to_all"), ("explicit", "4x2", "all_gather"), ("shard_map", "8x1", "all_to_all")]
COVER += [("explicit", "tp2x2x2", "all_to_all"), ("explicit", "8x1", "all_gather")]
FULL = [c for c in itertools.product(WAYS, MESHES, TRANSPORTS) if c not in COVER]


@pytest.mark.parametrize("way, mesh, transport", COVER)
def test_delivery(way, mesh, transport):
    """Every token once on every rank that owns one of its experts, with those ids and weights; sums come back exact."""
    assert check_delivery(way, mesh, transport) == 0
    check_sums(way, mesh, transport)


@pytest.mark.more
@pytest.mark.parametrize("way, mesh, transport", FULL)
def test_delivery_full(way, mesh, transport):
    """The rest of ways x meshes x transports."""
    check_delivery(way, mesh, transport, skew=0.05)
    check_sums(way, mesh, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_device(transport):
    """Without a mesh nothing moves: the token's own rows, all experts local."""
    x, experts, weights = map(jnp.asarray, inputs("8x1"))
    r = dispatch(x, experts, weights, EXPERTS, exchange=transport)
    np.testing.assert_array_equal(r.rows, x)
    np.testing.assert_array_equal(r.experts, experts)
    np.testing.assert_array_equal(r.weights, weights)
    assert r.count == len(x) and r.dropped == 0
    np.testing.assert_array_equal(combine(r.rows, r), x)


@pytest.mark.parametrize("factor", (0.15, 0.34, 0.7, 1.0))
@pytest.mark.parametrize("way, mesh", [("custom_partitioning", "2x4"), ("shard_map", "4x2"), ("explicit", "1x8")])
def test_drops_are_counted(way, mesh, factor):
    """Skewed routing and few slots: who is lost, and the count by source, are NumPy's."""
    lost = check_delivery(way, mesh, "all_to_all", skew=0.2, capacity_factor=factor)
    assert factor > 0.5 or lost > 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_no_factor_drops_nothing(transport):
    """Also when every token picks the experts of one rank."""
    assert check_delivery("shard_map", "2x4", transport, skew=10.0) == 0


def test_all_gather_ignores_the_factor():
    """It has room for every token by construction."""
    assert check_delivery("shard_map", "2x4", "all_gather", skew=0.2, capacity_factor=0.1) == 0


@pytest.mark.parametrize("transport, factor", [("all_gather", None), ("all_to_all", None), ("all_to_all", 0.34)])
@pytest.mark.parametrize("way", WAYS)
def test_transposes(way, transport, factor):
    """<dispatch(x), r> = <x, combine(r)>, their vjps are each other, and each assignment's weight gradient is what its
    own rank sent back: a gradient summed over ranks, or read from a row that is not there, would be seen."""
    mesh = "2x4"
    x, experts, weights = args = inputs(mesh, skew=0.1)
    options = dict(exchange=transport, capacity_factor=factor)
    _, (_, received) = run(way, mesh, args, **options)
    per_rank, ranks = EXPERTS // 4, 4
    d_rows, d_weights = integers(3, *received.rows.shape), integers(4, *received.weights.shape)
    _, (_, _, (d_x, d_w)) = run(way, mesh, args, (d_rows, d_weights), **options)
    y, _, (back,) = run_combine(way, mesh, d_rows, received, cotangents=x)
    assert (received.rows.astype(np.float64) * d_rows).sum() == (x.astype(np.float64) * y).sum()
    np.testing.assert_array_equal(d_x, y)
    np.testing.assert_array_equal(back, received.rows)

    want = np.zeros_like(weights)
    slots = slots_per_pair(LOCAL, TOP_K, ranks, factor) if transport == "all_to_all" else None
    got, _ = sent_tokens(mesh, experts, per_rank, slots)
    for shard, tokens in enumerate(got):
        r, d = by_shard(mesh, received, shard), by_shard(mesh, d_weights, shard)
        for row, token in zip(np.flatnonzero((r.experts < per_rank).any(1)), tokens, strict=True):
            mine = r.experts[row] < per_rank
            want[token, mine] = d[row, mine]
    np.testing.assert_array_equal(d_w, want)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("at", [P(), P("fsdp"), P(None, "ep")], ids=str)
def test_tokens_of_another_layout(at, transport):
    """Explicit axes: tokens that lie otherwise are moved, and gradients come back as they lay."""
    x, experts, weights = args = inputs("2x4")

    def forward(x, experts, weights, engine):
        r = dispatch(x, experts, weights, EXPERTS, exchange=transport)
        return combine(r.rows * r.weights.sum(1, keepdims=True), r), ()

    out, dy = spec("2x4", TOKENS), integers(7, *x.shape)
    specs = (at, out, at if at == P("fsdp") else P())
    y, _, (d_x, d_w) = program("explicit", "2x4", forward, args, specs, out, cotangents=dy, wrt=(0, 2))()
    np.testing.assert_array_equal(y, x * weights.sum(1, keepdims=True))
    np.testing.assert_array_equal(d_x, dy * weights.sum(1, keepdims=True))
    np.testing.assert_array_equal(d_w, np.broadcast_to((x * dy).sum(1, keepdims=True), weights.shape))


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ep_of_two_axes(transport, kind):
    """Axes(ep=("a", "b")): ranks count a before b, as P(("a", "b")) does; otherwise tokens meet another rank's
    experts."""
    mesh = jax.make_mesh((2, 2, 2), ("fsdp", "a", "b"), axis_types=(kind,) * 3)
    axes, at = moax.Axes(ep=("a", "b")), P(("fsdp", "a", "b"))
    x, experts, weights = args = inputs("2x4")

    def send(*args):
        return dispatch(*args, EXPERTS, exchange=transport, axes=axes)

    with jax.set_mesh(mesh):
        received = jax.jit(send)(*put(mesh, (at,) * 3, args))
        rows = np.asarray(received.rows) * np.asarray(received.weights).sum(1, keepdims=True)
        y = jax.jit(lambda rows, r: combine(rows, r, axes=axes))(put(mesh, at, rows), received)
    np.testing.assert_array_equal(y, x * weights.sum(1, keepdims=True))
    assert np.asarray(received.count).sum() == len(np.unique(np.stack([
        np.repeat(np.arange(len(x)), TOP_K), experts.reshape(-1) // 4]), axis=1).T)  # fmt: skip


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("wire", [Format(block=8), Format(block=128), Format(block=4, scale="e8m0")])
def test_wire_format(transport, wire):
    """Rows arrive as `quantize` would make them, to the bit, ids and weights untouched; sums are not quantized."""
    mesh = "2x4"
    x, experts, weights = inputs(mesh)
    args = (random(5, *x.shape), experts, weights)
    rounded = dequantize(quantize(jnp.asarray(args[0]), wire))
    options = dict(exchange=transport)
    _, (_, plain) = run("custom_partitioning", mesh, args, **options)
    _, (_, received) = run("custom_partitioning", mesh, args, wire=wire, **options)
    _, (_, want) = run("custom_partitioning", mesh, (np.asarray(rounded), experts, weights), **options)
    np.testing.assert_array_equal(received.experts, plain.experts)
    np.testing.assert_array_equal(received.weights, plain.weights)
    np.testing.assert_array_equal(received.rows, want.rows)
    assert (received.rows != plain.rows).any()
    assert np.abs(received.rows - plain.rows).max() <= 2.0**-4 * np.abs(args[0]).max()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bfloat16_rows(transport):
    """Rows travel in their dtype, weights in float32; small integers stay exact."""
    x, experts, weights = map(jnp.asarray, inputs("2x4"))
    _, (_, received) = run("shard_map", "2x4", (x.astype(jnp.bfloat16), experts, weights), exchange=transport)
    assert received.rows.dtype == jnp.bfloat16 and received.weights.dtype == jnp.float32
    _, (_, wide) = run("shard_map", "2x4", (x, experts, weights), exchange=transport)
    np.testing.assert_array_equal(received.rows.astype(np.float32), wide.rows)


@pytest.mark.parametrize("wire", (None, Format(block=8)))
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("way", WAYS[:3])
def test_collectives(way, transport, wire, fresh_compile):
    """Over ep alone: rows, ids and weights out, one sum back, each the other's transpose; quantized rows as bytes with
    their scales. Anything over fsdp, or wider than asked, would be a bill paid each layer."""
    x, experts, weights = inputs("2x4")
    at = spec("2x4", TOKENS)

    def forward(x, experts, weights, engine):
        r = dispatch(x, experts, weights, EXPERTS, exchange=transport, wire=wire, engine=engine)
        return combine(r.rows * r.rows, r, engine=engine), ()

    args = (x.astype(jnp.bfloat16), experts, weights)
    p = program(way, "2x4", forward, args, (at,) * 3, at, cotangents=random(6, *x.shape).astype(jnp.bfloat16))
    found = p.under(lambda *args: collectives(p.fn, *args))
    assert {c.axes for c in found} == {("ep",)}
    gathers = {"all-gather", "reduce-scatter"}
    assert {c.kind for c in found} == ({"all-to-all"} if transport == "all_to_all" else gathers)
    rows = sorted(c.dtype for c in found if c.size in (4 * LOCAL * WIDTH, LOCAL * WIDTH))
    assert rows == ["bfloat16"] * (4 - (wire is not None)) + ["uint8"] * (wire is not None)


def test_one_sided_is_refused():
    """A transport chosen by name that cannot run says so, and what to use."""
    args = map(jnp.asarray, inputs("8x1"))
    with pytest.raises(moax.Unsupported, match="exchange='one_sided'.*use 'all_gather' or 'all_to_all'"):
        dispatch(*args, EXPERTS, exchange="one_sided")


def test_errors():
    """Names, shapes and experts that cannot work are named."""
    x, experts, weights = map(jnp.asarray, inputs("8x1"))
    with pytest.raises(ValueError, match="exchange='nccl' must be one of 'auto', 'all_gather', 'all_to_all'"):
        dispatch(x, experts, weights, EXPERTS, exchange="nccl")
    with pytest.raises(ValueError, match=r"x, experts, weights have shapes \(64, 16\), \(64, 3\), \(64, 2\)"):
        dispatch(x, experts, weights[:, :2], EXPERTS)
    with pytest.raises(ValueError, match=r"they must be \[T, H\], \[T, K\], \[T, K\]"):
        dispatch(x[:32], experts, weights, EXPERTS)
    at = spec("2x4", TOKENS)
    send = lambda *args, engine: (dispatch(*args, 10, engine=engine), ())  # noqa: E731
    p = program("shard_map", "2x4", send, inputs("2x4"), (at,) * 3)
    with pytest.raises(ValueError, match=r"num_experts=10 does not divide by mesh axes \('ep',\) of 4 devices"):
        p()


def test_slots():
    """The balanced load times the factor, rounded up; never more than there are tokens."""
    assert slots_per_pair(64, 2, 4, None) == 64
    assert slots_per_pair(64, 2, 4, 1.0) == 32
    assert slots_per_pair(64, 2, 4, 1.01) == 33
    assert slots_per_pair(64, 2, 4, 100.0) == 64


def test_received_is_a_value():
    """It crosses jit and scan with its static fields, so that any number of layers may hold one."""
    x, experts, weights = map(jnp.asarray, inputs("8x1"))
    received = jax.jit(lambda *args: dispatch(*args, EXPERTS))(x, experts, weights)
    assert (received.transport, received.num_tokens) == ("all_gather", len(x))
    other = dataclasses.replace(received, rows=2 * received.rows)
    np.testing.assert_array_equal(jax.jit(lambda r: combine(r.rows, r))(other), 2 * x)
