"""What the tests of the exchange share: inputs, and NumPy oracles of what arrives."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import jax
import numpy as np

from moax.exchange import TRANSPORTS, Transport
from moax.exchange.transport import allot_slots
from moax.ops import combine, dispatch
from support import TOKENS, integers, program, size, spec

WIDTH, EXPERTS, TOP_K, LOCAL = 16, 16, 3, 8


def choose(seed, tokens, skew=0.0):
    """Returns distinct experts of each token; low ids are likelier by skew."""
    scores = np.random.default_rng(seed).random((tokens, EXPERTS)) - skew * np.arange(EXPERTS)
    return np.argsort(-scores, axis=1)[:, :TOP_K].astype(np.int32)


def inputs(mesh, skew=0.0, tokens=LOCAL):
    """Returns x (integers: any sum is exact), experts, and weights that are all different."""
    rows = tokens * size(mesh, *TOKENS)
    weights = 1.0 + np.arange(rows * TOP_K, dtype=np.float32).reshape(rows, TOP_K)
    return integers(0, rows, WIDTH), choose(1, rows, skew), weights


def run(way, mesh, args, cotangents=None, **options):
    """Runs `dispatch` on the mesh: ((rows, weights), Received) and, with cotangents, gradients of x and weights."""
    layout = spec(mesh, TOKENS)

    def forward(x, experts, weights, engine):
        r = dispatch(x, experts, weights, EXPERTS, engine=engine, **options)
        return (r.rows, r.weights), r

    p = program(
        way,
        mesh,
        forward,
        args,
        (layout,) * 3,
        (layout, layout),
        layout,
        cotangents=cotangents,
        wrt=(0, 2),
    )
    return p()


def run_combine(way, mesh, rows, received, cotangents=None):
    """Runs `combine` on the mesh: y, and with a cotangent of it the gradient of rows."""
    layout = spec(mesh, TOKENS)
    p = program(
        way,
        mesh,
        lambda rows, r, engine: (combine(rows, r, engine=engine), ()),
        (rows, received),
        (layout, layout),
        layout,
        cotangents=cotangents,
    )
    return p()


def slots_of(mesh, transport, factor=None, tokens=LOCAL):
    """Returns the slots for each pair of ranks; None where the transport has none."""
    has = TRANSPORTS[transport].has_slots
    return allot_slots(tokens, TOP_K, size(mesh, "ep"), EXPERTS, factor, None)[0] if has else None


def arrivals(mesh, transport, experts, slots):
    """Returns NumPy's word on who gets what: for each shard the token of each row it receives, by its number in the
    whole batch and -1 for a row without a token; and for each source how many assignments find no slot.

    all_gather: every token of the ep group. all_to_all: `slots` rows of each source.
    """
    ranks = size(mesh, "ep")
    shards = size(mesh, *TOKENS)
    local = len(experts) // shards
    got = [[] for _ in range(shards)]
    lost = np.zeros(shards, int)
    for source, rank in itertools.product(range(shards), range(ranks)):
        here = experts[source * local :][:local] // (EXPERTS // ranks) == rank
        wanting = np.flatnonzero(here.any(1))
        travelling = np.arange(local) if slots is None else wanting[:slots]
        lost[source] += here[np.setdiff1d(wanting, travelling)].sum()
        empty = 0 if slots is None else slots - len(travelling)
        got[source // ranks * ranks + rank] += [*(source * local + travelling), *[-1] * empty]
    rows = ranks * (local if slots is None else slots)
    return np.array([[*tokens, *[-1] * (rows - len(tokens))] for tokens in got]).reshape(-1), lost


def expected(mesh, token, experts, weights):
    """Returns (local ids, weights) of rows that hold these tokens, shard by shard."""
    ranks = size(mesh, "ep")
    shards = size(mesh, *TOKENS)
    per_rank = EXPERTS // ranks
    rank = (np.arange(shards) % ranks).repeat(len(token) // shards)[:, None]
    mine = (experts[token] // per_rank == rank) & (token >= 0)[:, None]
    return np.where(mine, experts[token] - rank * per_rank, per_rank), np.where(
        mine,
        weights[token],
        0.0,
    )


def check_received(mesh, transport, received, x, experts, weights, slots):
    """Checks that rows, ids, weights and counts of each shard are NumPy's; returns how many assignments were
    dropped."""
    token, lost = arrivals(mesh, transport, experts, slots)
    ids, factors = expected(mesh, token, experts, weights)
    real = (ids < EXPERTS // size(mesh, "ep")).any(1)
    filled = token >= 0
    np.testing.assert_array_equal(received.experts, ids)
    np.testing.assert_array_equal(received.weights, factors)
    np.testing.assert_array_equal(received.rows[filled], x[token[filled]])
    np.testing.assert_array_equal(received.count, real.reshape(len(lost), -1).sum(1))
    np.testing.assert_array_equal(received.dropped, lost)
    assert received.dropped.dtype == received.count.dtype == received.experts.dtype == np.int32
    return lost.sum()


def check_delivery(way, mesh, transport, skew=0.0, capacity_factor=None):
    """Runs `check_received` on what `dispatch` delivers."""
    args = inputs(mesh, skew)
    _, received = run(way, mesh, args, exchange=transport, capacity_factor=capacity_factor)
    return check_received(
        mesh,
        transport,
        received,
        *args,
        slots_of(mesh, transport, capacity_factor),
    )


def check_sums(way, mesh, transport, **options):
    """Checks y[t] = sum_k w[t, k] (expert + 1) x[t], through dispatch and combine: exact on integers."""
    x, experts, weights = args = inputs(mesh)
    _, received = run(way, mesh, args, exchange=transport, **options)
    per_rank = EXPERTS // size(mesh, "ep")
    rank = np.repeat(
        np.arange(size(mesh, *TOKENS)) % size(mesh, "ep"),
        len(received.rows) // size(mesh, *TOKENS),
    )
    factor = np.where(
        received.experts < per_rank,
        received.experts + rank[:, None] * per_rank + 1,
        0,
    )
    rows = received.rows * (received.weights * factor).sum(1, keepdims=True)
    y, _ = run_combine(way, mesh, rows.astype(np.float32), received)
    np.testing.assert_array_equal(y, x * (weights * (experts + 1)).sum(1, keepdims=True))


def check_transposes(way, mesh, transport, factor):
    """Checks that gradients of dispatch and combine are NumPy's sums and rows, whatever empty slots hold."""
    x, experts, weights = args = inputs(mesh, skew=0.1)
    token, _ = arrivals(mesh, transport, experts, slots_of(mesh, transport, factor))
    ids, _ = expected(mesh, token, experts, weights)
    d_rows = integers(3, len(token), WIDTH)
    d_weights = integers(4, len(token), TOP_K)
    mine = ids < EXPERTS // size(mesh, "ep")
    filled = token >= 0
    _, received, (d_x, d_w) = run(
        way,
        mesh,
        args,
        (d_rows, d_weights),
        exchange=transport,
        capacity_factor=factor,
    )
    y, _, (back,) = run_combine(way, mesh, d_rows, received, cotangents=x)
    want = np.zeros_like(x)
    want_w = np.zeros_like(weights)
    np.add.at(want, token[filled], d_rows[filled])
    np.add.at(want_w, token[filled], np.where(mine, d_weights, 0.0)[filled])
    np.testing.assert_array_equal(d_x, want)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(d_w, want_w)
    np.testing.assert_array_equal(back[filled], x[token[filled]])


@contextlib.contextmanager
def registered(name: str, transport: Transport) -> Iterator[None]:
    """Puts the transport into the table under this name; programs that know it do not outlive the context."""
    before = TRANSPORTS.get(name)
    jax.clear_caches()
    TRANSPORTS[name] = transport
    try:
        yield
    finally:
        jax.clear_caches()
        del TRANSPORTS[name]
        if before is not None:
            TRANSPORTS[name] = before
