"""What the tests of the exchange share: inputs, NumPy oracles of what arrives, and one_sided without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moax.mesh.partition import View
from moax.ops import combine, dispatch
from moax.ops.exchange import TRANSPORTS, Transport, slots_per_pair
from moax.ops.exchange.one_sided import OneSided
from support import TOKENS, integers, program, size, spec

WIDTH, EXPERTS, TOP_K, LOCAL = 16, 16, 3, 8


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
    return p()


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
    """For each shard the tokens of its ep group that it gets, by their numbers in the whole batch and in order of
    source, as capacity allows; and for each source the number of assignments lost."""
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
    """Each shard's rows, ids, weights, count and dropped are NumPy's; returns how many assignments were dropped."""
    x, experts, weights = args = inputs(mesh, skew)
    ranks = size(mesh, "ep")
    per_rank = EXPERTS // ranks
    slots = slots_per_pair(LOCAL, TOP_K, ranks, capacity_factor) if TRANSPORTS[transport].has_slots else None
    _, received = run(way, mesh, args, exchange=transport, capacity_factor=capacity_factor)
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
    _, received = run(way, mesh, args, exchange=transport, **options)
    per_rank = EXPERTS // size(mesh, "ep")
    rank = np.repeat(np.arange(size(mesh, *TOKENS)) % size(mesh, "ep"), len(received.rows) // size(mesh, *TOKENS))
    factor = np.where(received.experts < per_rank, received.experts + rank[:, None] * per_rank + 1, 0)
    rows = received.rows * (received.weights * factor).sum(1, keepdims=True)  # NaN where one_sided wrote nothing
    y, _ = run_combine(way, mesh, rows.astype(np.float32), received)
    np.testing.assert_array_equal(y, x * (weights * (experts + 1)).sum(1, keepdims=True))


@contextlib.contextmanager
def registered(name: str, transport: Transport) -> Iterator[None]:
    """The transport stands in the table under this name; programs that know it do not outlive the context."""
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


@dataclasses.dataclass(frozen=True)
class EmulatedOneSided(OneSided):
    """one_sided, XLA in the place of its kernels. What no rank wrote is NaN, and ids of experts that exist."""

    def why_not(self, view: View | None, row_bytes: int | None) -> str | None:
        return None

    def put_rows(self, arrays, source, places, way: int, out_rows: int, axes, sms: int | None):
        """out[i + shift[p]] on rank p = x[source[i]] for end[p - 1] <= i < end[p], by an all-gather."""
        names = tuple(name for name, _ in axes)
        shift, end = places[way]
        index = jnp.arange(len(arrays[0] if source is None else source), dtype=jnp.int32)
        peer = (index[:, None] >= end[None]).sum(1)
        everyone = functools.partial(lax.all_gather, axis_name=names, tiled=True)
        mine = everyone(peer) == lax.axis_index(names)
        at = jnp.where(mine, everyone(index + shift[jnp.minimum(peer, len(end) - 1)]), out_rows)
        values = [everyone(x[index if source is None else source]) for x in arrays]
        return tuple(poison((out_rows, x.shape[1]), x.dtype).at[at].set(x, mode="drop") for x in values)

    def gather_sum(self, rows, position):
        there = (position < rows.shape[0])[..., None]
        taken = jnp.where(there, rows[jnp.minimum(position, rows.shape[0] - 1)].astype(jnp.float32), 0.0)
        return taken.sum(1).astype(rows.dtype)


def poison(shape, dtype):
    """What the memory that nobody wrote may hold at its worst: NaN, and words that read as ids of experts."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.full(shape, jnp.nan, dtype)
    if dtype == jnp.uint8:
        return jnp.full(shape, 0x7F, dtype)
    return -1 - lax.broadcasted_iota(dtype, shape, 0) % EXPERTS
