"""Permute by a routing map, and with weights, against loops over assignments in NumPy.

Covers: maps x top_k x capacity; weights beside ids and beside a map, with gradients; ways; every error.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moax.inspect import collectives
from moax.ops import permute, unpermute
from moax.ops.permutation import sorted_rows
from support import TOKENS, program, random, rel_error, size, some, spec

ROWS, WIDTH, GROUPS = 12, 8, 6


def a_map(seed, rows=ROWS, share=0.4):
    """Whether each expert has each row: some rows have none, some have all."""
    rng = np.random.default_rng(seed)
    chosen = rng.random((rows, GROUPS)) < share
    chosen[1], chosen[2] = False, True
    return chosen


def by_hand(chosen, top_k):
    """ids [R, K] of the first K experts of each row, and how many are left out."""
    ids = np.full((len(chosen), top_k), GROUPS, np.int32)
    for r, row in enumerate(chosen):
        first = np.flatnonzero(row)[:top_k]
        ids[r, : len(first)] = first
    return ids, int(np.maximum(chosen.sum(1) - top_k, 0).sum())


@pytest.mark.parametrize("top_k, capacity", some([(2, 7), (None, None), (3, None), (9, None)], 1))
def test_map_is_its_ids(top_k, capacity):
    """Breaks if a map sorts other rows than the ids that it lists, or an expert beyond K is dropped without a count."""
    x, chosen = random(0, ROWS, WIDTH), a_map(1)
    k = min(top_k or GROUPS, GROUPS)
    ids, left_out = by_hand(chosen, k)
    rows, plan = permute(jnp.asarray(x), jnp.asarray(chosen), GROUPS, top_k=top_k, align=4, capacity=capacity)
    want, of_ids = permute(jnp.asarray(x), jnp.asarray(ids), GROUPS, align=4, capacity=capacity)
    np.testing.assert_array_equal(rows, want)
    for one, other in zip(jax.tree.leaves(plan)[:3], jax.tree.leaves(of_ids)[:3], strict=True):
        np.testing.assert_array_equal(one, other)
    assert plan.dropped[0] == of_ids.dropped[0] + left_out
    total = unpermute(rows, plan)
    kept = (np.asarray(plan.scatter_idx) < len(rows)).sum(1, keepdims=True)
    assert rel_error(total, x * kept) < 1e-6


CASES = [("none", False), ("explicit", True), ("custom_partitioning", False), ("none", True), ("user_vma", True),
         ("custom_partitioning", True), ("shard_map", True), ("explicit", False)]  # fmt: skip


@pytest.mark.parametrize("way, mapped", some(CASES, 1))
def test_weights_go_with_their_rows(way, mapped, fresh_compile):
    """Breaks if the weight of a row is that of another, the gradient of a weight without a row is not 0, rows times
    weights sum to another y than weighted sums, or a shard reads a weight of another."""
    shards = 1 if way == "none" else size("2x4", *TOKENS)
    k, n = 3, sorted_rows(ROWS, 3, GROUPS, 4, None)
    chosen = np.concatenate([a_map(s) for s in range(shards)])
    ids = by_hand(chosen, k)[0]
    weights = random(1, *(chosen if mapped else ids).shape)
    x, at = random(0, len(chosen), WIDTH), spec("2x4", TOKENS)
    cotangents = (random(2, n * shards), random(3, len(chosen), WIDTH))

    def forward(x, experts, weights, engine):
        options = dict(top_k=k) if mapped else {}
        rows, of_rows, plan = permute(x, experts, GROUPS, weights=weights, align=4, engine=engine, **options)
        return (of_rows, unpermute(rows * of_rows[:, None], plan, engine=engine)), (plan.gather_idx, plan.scatter_idx)

    args = x, chosen if mapped else ids, weights
    p = program(way, "2x4", forward, args, (at,) * 3, at, at, cotangents=cotangents, wrt=(0, 2))
    (of_rows, y), (source, position), (dx, d_weights) = p()
    # Each assignment (row r, expert e) has one row n; its weight is one entry of `weights`.
    want, want_y, want_dx, want_d = (np.zeros(v.shape) for v in (of_rows, y, dx, d_weights))
    for r, c in zip(*np.nonzero(ids < GROUPS), strict=True):
        shard, at_weight = r // ROWS, (r, ids[r, c] if mapped else c)
        row = n * shard + position[r, c]
        assert source[row] == r - ROWS * shard
        want[row] = weights[at_weight]
        want_y[r] += weights[at_weight] * x[r]
        want_dx[r] += weights[at_weight] * cotangents[1][r]
        want_d[at_weight] = cotangents[0][row] + cotangents[1][r] @ x[r]
    np.testing.assert_array_equal(of_rows, want)
    assert rel_error(y, want_y) < 1e-6
    assert rel_error(dx, want_dx) < 1e-6
    assert rel_error(d_weights, want_d) < 1e-6
    if way in ("explicit", "custom_partitioning"):
        assert p.under(lambda *args: collectives(p.fn, *args)) == []


def test_errors():
    """Breaks if a map or weights of another shape are read where they have no meaning."""
    x, ids = jnp.zeros((4, 8)), jnp.zeros((4, 2), jnp.int32)
    with pytest.raises(ValueError, match=r"experts has shape \(4, 2\); it must be \[R, E=3\]"):
        permute(x, ids > 0, 3)
    with pytest.raises(ValueError, match="top_k=2 must be None beside ids; experts is no map of bool, but int32"):
        permute(x, ids, 3, top_k=2)
    with pytest.raises(
        ValueError, match=r"weights have shapes .*, \(4, 2\), \(4, 3\); they must be \[R, H\], \[R, K\], \[R, K\]"
    ):
        permute(x, ids, 3, weights=jnp.zeros((4, 3)))
