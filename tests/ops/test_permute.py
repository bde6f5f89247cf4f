"""Permute and unpermute: the order of rows against a NumPy oracle, the sums against one-hot formulas in float64.

Covers: distributions of tokens x alignment; capacities; ways x meshes; gradients; NaN; vmap; every error.
"""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from moax.inspect import collectives
from moax.kernels import xla
from moax.ops import permute, unpermute
from moax.ops.permutation import PermuteSpec, plan_rows, sorted_rows
from moax.types import Plan
from support import MESHES, TOKENS, WAYS, integers, mark_rest, program, random, rel_error, size, spec
from support.oracle import ops as oracle

ROWS, WIDTH, GROUPS, TOP_K = 24, 16, 6, 3


def water_fill(arrived, capacity):
    """Which rows fit: take from the busiest group until the rest fits; of equally busy ones, from the last."""
    remaining = list(map(int, arrived))
    while capacity is not None and sum(remaining) > capacity:
        busiest = max(range(len(remaining)), key=lambda g: (remaining[g], g))
        remaining[busiest] -= 1
    return remaining


def plan_of(experts, groups, align, capacity):
    """source, position, group_sizes, dropped of one shard's experts [R, K]."""
    received, top_k = experts.shape
    rows = sorted_rows(received, top_k, groups, align, capacity)
    room = water_fill([(experts == g).sum() for g in range(groups)], capacity)
    source = np.full(rows, received)
    position = np.full(experts.shape, rows)
    start = dropped = 0
    for g in range(groups):
        arrivals = list(zip(*np.nonzero(experts == g), strict=True))  # in order of arrival
        for i, (r, k) in enumerate(arrivals[: room[g]]):
            source[start + i] = r
            position[r, k] = start + i
        dropped += len(arrivals) - room[g]
        start = math.ceil((start + room[g]) / align) * align
    return source, position, room, dropped


def choose(seed, rows, groups, top_k, none=0.2, skew=0.0):
    """Distinct experts for each row, a fraction `none` of them replaced by none (= groups), low ids likelier by
    skew."""
    rng = np.random.default_rng(seed)
    scores = rng.random((rows, groups)) - skew * np.arange(groups)
    experts = np.argsort(-scores, axis=1)[:, :top_k]
    return np.where(rng.random(experts.shape) < none, groups, experts).astype(np.int32)


CASES = {
    "mixed": choose(0, ROWS, GROUPS, TOP_K),
    "skewed": choose(1, ROWS, GROUPS, TOP_K, skew=0.3),
    "one expert": np.stack([np.full(ROWS, 4), *[np.full(ROWS, GROUPS)] * (TOP_K - 1)], 1).astype(
        np.int32,
    ),
    "nobody": np.full((ROWS, TOP_K), GROUPS, np.int32),
    "empty ends": np.where(choose(2, ROWS, 4, TOP_K) == 4, GROUPS, choose(2, ROWS, 4, TOP_K) + 1),
    "one row": np.where(np.arange(ROWS)[:, None] == 5, np.array([[2, 0, 3]]), GROUPS).astype(
        np.int32,
    ),
}


@pytest.mark.parametrize(
    ("rows", "groups", "top_k", "room"), [(300, 512, 8, None), (700, 3, 2, None), (500, 5, 2, 400)]
)
def test_plan_of_many_assignments(rows, groups, top_k, room):
    """Counts that forget the blocks of assignments before, an expert that a row names twice, or a weight that another
    row or padding has."""
    rng = np.random.default_rng(0)
    experts = rng.integers(0, groups + 1, (rows, top_k)).astype(np.int32)
    weights = random(0, rows, top_k)
    source, position, sizes, _ = plan_of(experts, groups, 4, None)
    static = PermuteSpec(groups, 4, None, "xla", max_rows=room)
    if room is None:
        plan, by_row = jax.jit(lambda e, w: plan_rows(static, e, w))(experts, weights)
        for got, want in zip(
            (plan.gather_idx, plan.scatter_idx, plan.group_sizes),
            (source, position, sizes),
            strict=True,
        ):
            np.testing.assert_array_equal(got, want)
        want = np.zeros(len(source) + 1, np.float32)
        want[position] = weights
        np.testing.assert_array_equal(by_row, want[:-1])
        return
    seen = np.zeros_like(experts)
    for start in range(0, rows * top_k, room):
        plan, _ = jax.jit(lambda e, start: plan_rows(static, e, start=start))(experts, np.int32(start))
        here = np.asarray(plan.scatter_idx) < plan.gather_idx.shape[0]
        np.testing.assert_array_equal(
            np.asarray(plan.gather_idx)[np.asarray(plan.scatter_idx)[here]], np.nonzero(here)[0]
        )
        assert plan.group_sizes.sum() == here.sum() <= room
        seen += here
    np.testing.assert_array_equal(seen, experts < groups)


def test_counts_of_many_blocks(monkeypatch):
    """Breaks if the cumulative sum, which takes the place of comparisons where blocks are many, counts otherwise."""
    experts = jnp.asarray(np.random.default_rng(1).integers(0, 8, (1500, 2)), jnp.int32)
    compared = xla.build_permutation(experts, 7, 1, 3000)
    monkeypatch.setattr(xla, "COMPARED", 0)
    for got, want in zip(xla.build_permutation(experts, 7, 1, 3000)[:3], compared[:3], strict=True):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(compared[2], np.bincount(experts.reshape(-1), minlength=8)[:7])


def check_plan(plan: Plan, experts, groups, align, capacity):
    source, position, room, dropped = plan_of(experts, groups, align, capacity)
    np.testing.assert_array_equal(plan.group_sizes, room)
    np.testing.assert_array_equal(plan.gather_idx, source)
    np.testing.assert_array_equal(plan.scatter_idx, position)
    np.testing.assert_array_equal(plan.dropped, [dropped])


def test_example_of_the_docstring():
    """a, b, c with experts (1, 0), (1, none), (0, none)."""
    x = jnp.asarray([[1.0], [2.0], [3.0]])
    rows, plan = permute(x, jnp.asarray([[1, 0], [1, 2], [0, 2]], jnp.int32), 2)
    n = rows.shape[0]
    np.testing.assert_array_equal(rows[:4, 0], [1, 3, 1, 2])
    np.testing.assert_array_equal(plan.group_sizes, [2, 2])
    np.testing.assert_array_equal(plan.gather_idx[:4], [0, 2, 0, 1])
    np.testing.assert_array_equal(plan.scatter_idx, [[2, 0], [3, n], [1, n]])


@pytest.mark.parametrize("align", (1, 8, 16, 128))
@pytest.mark.parametrize("case", CASES)
def test_plan(case, align):
    """Stable order, aligned starts, padding that no one owns: exactly the oracle's, and rows are copies, 0 in
    padding."""
    x = random(3, ROWS, WIDTH)
    experts = CASES[case]
    rows, plan = permute(jnp.asarray(x), jnp.asarray(experts), GROUPS, align=align)
    check_plan(plan, experts, GROUPS, align, None)
    np.testing.assert_array_equal(
        rows,
        np.concatenate([x, np.zeros((1, WIDTH), np.float32)])[plan.gather_idx],
    )


@pytest.mark.parametrize("capacity", (1, 7, 20, 35, 71, 72, 100))
@pytest.mark.parametrize("case", ("mixed", "skewed", "one expert"))
def test_capacity(case, capacity):
    """Total kept is min(total, capacity), the busiest lose first, the last arrivals of each; the rest is counted."""
    experts = CASES[case]
    _, plan = permute(
        jnp.zeros((ROWS, 1)),
        jnp.asarray(experts),
        GROUPS,
        align=8,
        capacity=capacity,
    )
    check_plan(plan, experts, GROUPS, 8, capacity)
    arrived = np.array([(experts == g).sum() for g in range(GROUPS)])
    rows_of_experts = np.asarray(plan.group_sizes)
    assert rows_of_experts.sum() == min(arrived.sum(), capacity)
    assert plan.dropped[0] == arrived.sum() - rows_of_experts.sum()
    if (short := rows_of_experts < arrived).any():
        assert rows_of_experts.max() <= rows_of_experts[short].min() + 1


def test_negative_ids_are_no_expert():
    """Breaks if the id -1 has the row of another assignment, or is counted as dropped."""
    experts = CASES["mixed"]
    _, plan = permute(jnp.zeros((ROWS, 1)), jnp.where(experts == GROUPS, -1, experts), GROUPS, capacity=20)
    check_plan(plan, experts, GROUPS, 1, 20)


@given(
    st.lists(st.integers(0, 5), min_size=2 * 12, max_size=2 * 12),
    st.sampled_from([(1, None), (1, 1), (1, 9), (4, 9), (4, 23), (4, None)]),
)
def test_any_distribution(flat, settings):
    """Any group sizes, ids of "none" (5) included, aligned or not, dropped or not; the buffer holds every kept row."""
    align, capacity = settings
    experts = np.asarray(flat, np.int32).reshape(12, 2)
    _, plan = _plan_of_twelve(jnp.asarray(experts), align, capacity)
    check_plan(plan, experts, 5, align, capacity)


@jax.jit(static_argnums=(1, 2))
def _plan_of_twelve(experts, align, capacity):
    return permute(jnp.zeros((12, 1)), experts, 5, align=align, capacity=capacity)


@pytest.mark.parametrize("align, capacity", [(1, None), (16, None), (8, 30)])
def test_round_trip(align, capacity):
    """unpermute(permute(x)) with weights 1 is x times the experts it kept; exact on integers."""
    x = integers(4, ROWS, WIDTH)
    experts = CASES["skewed"]
    rows, plan = permute(
        jnp.asarray(x),
        jnp.asarray(experts),
        GROUPS,
        align=align,
        capacity=capacity,
    )
    back = unpermute(rows, plan, jnp.ones(experts.shape))
    copies = (np.asarray(plan.scatter_idx) < rows.shape[0]).sum(1, keepdims=True)
    np.testing.assert_array_equal(back, x * copies)


@pytest.mark.parametrize("tokens, experts, width, top_k", [(128, 5, 128, 3), (1024, 8, 128, 8)])
@pytest.mark.parametrize("align", (1, 16, 128))
def test_shapes_of_transformer_engine(tokens, experts, width, top_k, align):
    """The shapes of Transformer Engine's permutation tests: plan, and round trip weighted by expert."""
    chosen = choose(5, tokens, experts, top_k, none=0.0)
    x = integers(6, tokens, width)
    rows, plan = permute(jnp.asarray(x), jnp.asarray(chosen), experts, align=align)
    check_plan(plan, chosen, experts, align, None)
    weights = integers(7, tokens, top_k)
    np.testing.assert_array_equal(
        unpermute(rows, plan, jnp.asarray(weights)),
        x * weights.sum(1, keepdims=True),
    )


@pytest.mark.parametrize("align, capacity", [(1, None), (8, None), (4, 30)])
def test_vjp_is_that_of_the_dense_formula(align, capacity):
    """Both ops, in x, rows and weights, against one-hot sums in float64; dropped and absent rows have gradient 0."""
    x = random(8, ROWS, WIDTH)
    experts = CASES["skewed"]
    (rows, plan), pull = jax.vjp(
        lambda x: permute(x, jnp.asarray(experts), GROUPS, align=align, capacity=capacity),
        jnp.asarray(x),
    )
    d_rows = random(9, *rows.shape)
    zeros = jax.tree.map(lambda v: np.zeros(v.shape, jax.dtypes.float0), plan)
    d_x = oracle.permute_grad(plan.scatter_idx, d_rows)
    assert rel_error(rows, oracle.permute(x, plan.scatter_idx, len(rows))) == 0
    assert rel_error(pull((jnp.asarray(d_rows), zeros))[0], d_x, per=0) < 1e-6

    values = random(10, *rows.shape)
    weights = random(11, ROWS, TOP_K)
    dy = random(12, ROWS, WIDTH)
    y, pull = jax.vjp(lambda v, w: unpermute(v, plan, w), jnp.asarray(values), jnp.asarray(weights))
    want = oracle.unpermute(values, plan.scatter_idx, weights)
    d_values, d_weights = oracle.unpermute_grad(values, plan.scatter_idx, weights, dy)
    got = pull(jnp.asarray(dy))
    assert rel_error(y, want) < 1e-6
    assert rel_error(got[0], d_values, per=0) < 1e-6
    assert rel_error(got[1], d_weights) < 1e-6


def test_nan_in_padding_reaches_nothing():
    """Rows that no assignment has, NaN: neither sums nor gradients see them; a real NaN is seen by its rows alone."""
    experts = jnp.asarray(CASES["mixed"])
    rows, plan = permute(jnp.asarray(random(13, ROWS, WIDTH)), experts, GROUPS, align=8)
    padding = np.asarray(plan.gather_idx) == ROWS
    assert padding.any()
    weights = jnp.asarray(random(14, ROWS, TOP_K))
    dy = jnp.asarray(random(15, ROWS, WIDTH))

    def run(rows):
        y, pull = jax.vjp(lambda v, w: unpermute(v, plan, w), rows, weights)
        return y, *pull(dy)

    bad = jnp.where(jnp.asarray(padding)[:, None], jnp.nan, rows)
    for clean, dirty in zip(run(rows), run(bad), strict=True):
        np.testing.assert_array_equal(clean, dirty)
    np.testing.assert_array_equal(run(bad)[1][padding], 0.0)
    real = int(np.flatnonzero(~padding)[3])
    seen = np.isnan(run(rows.at[real].set(jnp.nan))[0]).any(1)
    np.testing.assert_array_equal(np.flatnonzero(seen), [plan.gather_idx[real]])


def test_nan_weights_of_absent_experts_reach_nothing():
    """The weight of an assignment that has no row here may hold anything."""
    experts = CASES["mixed"]
    rows, plan = permute(jnp.asarray(random(16, ROWS, WIDTH)), jnp.asarray(experts), GROUPS)
    weights = random(17, ROWS, TOP_K)
    dirty = np.where(experts == GROUPS, np.nan, weights)
    clean = np.where(experts == GROUPS, 0.0, weights)
    y0, y1 = (unpermute(rows, plan, jnp.asarray(w.astype(np.float32))) for w in (clean, dirty))
    np.testing.assert_array_equal(y0, y1)


def test_bfloat16():
    """Rows keep their dtype; sums are float32, rounded once: 256 + 8 ones, added one by one in bfloat16, stay 256."""
    x = jnp.asarray([[256.0], *[[1.0]] * 8], jnp.bfloat16)
    experts = jnp.zeros((9, 1), jnp.int32)
    rows, plan = permute(x, experts, 1)
    many = Plan(
        plan.gather_idx,
        jnp.arange(9, dtype=jnp.int32)[None],
        plan.group_sizes,
        plan.dropped,
    )
    y = unpermute(rows, many, jnp.ones((1, 9)))
    assert rows.dtype == y.dtype == jnp.bfloat16
    assert float(y[0, 0]) == 264.0


# Each way once, each mesh once; nothing of a plan depends on both.
COVER = [
    ("custom_partitioning", "tp2x2x2"),
    ("shard_map", "dp2x2x2"),
    ("explicit", "8x1"),
    ("user", "2x4"),
    ("user_vma", "1x8"),
    ("user_inside", "4x2"),
]
FULL = [c for c in itertools.product(WAYS, MESHES) if c not in COVER]


def check_on_mesh(way, mesh, other=None):
    shards = size(mesh, *TOKENS)
    rows = 12 * shards
    x = random(18, rows, WIDTH)
    experts = choose(19, rows, GROUPS, TOP_K, skew=0.1)
    weights = random(20, rows, TOP_K)
    layout = spec(mesh, TOKENS)
    align, capacity = 4, 20

    def forward(x, experts, weights, engine):
        sorted_, plan = permute(x, experts, GROUPS, align=align, capacity=capacity, engine=engine)
        y = unpermute(sorted_ * sorted_, plan, weights, engine=engine)
        return (sorted_, y), plan

    n = sorted_rows(12, TOP_K, GROUPS, align, capacity)
    cotangents = (random(21, n * shards, WIDTH), random(22, rows, WIDTH))
    run = program(
        way,
        mesh,
        forward,
        (x, experts, weights),
        (layout if other is None else other,) * 3,
        (layout, layout),
        layout,
        cotangents=cotangents,
        wrt=(0, 2),
    )
    (sorted_, y), plan, (d_x, d_weights) = run()
    for s in range(shards):
        mine = slice(12 * s, 12 * (s + 1))
        buffer = slice(n * s, n * (s + 1))
        local = Plan(
            plan.gather_idx[buffer],
            plan.scatter_idx[mine],
            plan.group_sizes[GROUPS * s :][:GROUPS],
            plan.dropped[s : s + 1],
        )
        check_plan(local, experts[mine], GROUPS, align, capacity)
        rows_ = sorted_[buffer].astype(np.float64)
        d_rows = cotangents[0][buffer].astype(np.float64)
        dy = cotangents[1][mine].astype(np.float64)
        want = oracle.permute(x[mine], local.scatter_idx, n)
        assert rel_error(rows_, want) == 0
        assert rel_error(y[mine], oracle.unpermute(want**2, local.scatter_idx, weights[mine])) < 1e-6
        d_squares, want_weights = oracle.unpermute_grad(
            want**2,
            local.scatter_idx,
            weights[mine],
            dy,
        )
        assert rel_error(d_x[mine], oracle.permute_grad(local.scatter_idx, d_rows + 2 * want * d_squares)) < 1e-6
        assert rel_error(d_weights[mine], want_weights) < 1e-6


@pytest.mark.parametrize("way, mesh", mark_rest([*COVER, *FULL], len(COVER)))
def test_each_shard_sorts_its_own(way, mesh):
    """Plans, drops, sums and gradients of a shard are those of its rows alone; row numbers are the shard's."""
    check_on_mesh(way, mesh)


@pytest.mark.parametrize("x_spec", mark_rest([P("ep"), P(), P(("ep", "fsdp"))], 1), ids=str)
def test_operands_of_another_layout(x_spec):
    """Explicit axes: rows that lie otherwise are moved, and gradients come back as they lay."""
    check_on_mesh("explicit", "2x4", x_spec)


@pytest.mark.parametrize("way", mark_rest(WAYS[:3], 2))
def test_nothing_is_communicated(way):
    """Forward and backward compile to no collective at all: a global sort would gather every row."""
    x = random(23, 64, WIDTH)
    experts = choose(24, 64, GROUPS, TOP_K)
    weights = random(25, 64, TOP_K)
    layout = spec("2x4", TOKENS)

    def forward(x, experts, weights, engine):
        rows, plan = permute(x, experts, GROUPS, align=8, engine=engine)
        return unpermute(rows * rows, plan, weights, engine=engine), plan.group_sizes

    run = program(
        way,
        "2x4",
        forward,
        (x, experts, weights),
        (layout,) * 3,
        layout,
        layout,
        cotangents=random(26, 64, WIDTH),
        wrt=(0, 2),
    )
    assert run.under(lambda *args: collectives(run.fn, *args)) == []


@pytest.mark.parametrize("way", ("none", "custom_partitioning"))
def test_vmap(way):
    """A batch is each of its elements, forward and backward."""
    x = random(27, 3, 16, WIDTH)
    experts = np.stack([choose(i, 16, GROUPS, TOP_K) for i in range(3)])
    weights = random(28, 3, 16, TOP_K)
    dy = random(29, 3, 16, WIDTH)
    layout = P(None, ("fsdp", "ep"))

    def forward(x, experts, weights, engine):
        def one(x, experts, weights):
            rows, plan = permute(x, experts, GROUPS, align=2, engine=engine)
            return unpermute(rows * rows, plan, weights, engine=engine)

        return jax.vmap(one)(x, experts, weights), ()

    y, _, grads = program(
        way, "2x4", forward, (x, experts, weights), (layout,) * 3, layout, cotangents=dy, wrt=(0, 2)
    )()  # fmt: skip
    present = (experts != GROUPS).astype(np.float32)
    x = x.astype(np.float64)
    total = (weights * present).sum(-1, keepdims=True)
    assert rel_error(y, total * x**2) < 1e-6
    assert rel_error(grads[0], 2 * total * x * dy) < 1e-6
    assert rel_error(grads[1], present * (dy * x**2).sum(-1, keepdims=True)) < 1e-6


IDS = np.zeros((4, 2), np.int32)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            dict(experts=IDS[[0, *range(4)]]),
            "x, experts have shapes (4, 8), (5, 2); they must be [R, H], [R, K]",
        ),
        (dict(experts=IDS[:, 0]), "experts has shape (4,); it must be [R, K]"),
        (dict(num_groups=0), "num_groups=0 must be an int of at least 1"),
        (dict(align=0), "align=0 must be an int of at least 1"),
        (dict(capacity=0), "capacity=0 must be an int of at least 1"),
        (dict(experts=IDS > 0), "experts has dtype bool; it must be an array of integers [R, K]"),
        (
            dict(weights=np.zeros((4, 3), np.float32)),
            "(4, 2), (4, 3); they must be [R, H], [R, K], [R, K]",
        ),
    ],
)
def test_permute_errors(options, message):
    """Shapes and numbers that cannot work are named; weights of another shape would have no meaning."""
    with pytest.raises(ValueError, match=re.escape(message)):
        permute(jnp.zeros((4, 8)), **dict(experts=IDS, num_groups=3) | options)


@pytest.mark.parametrize("rows, weights", [((7, 8), (4, 2)), ((8, 8), (4, 3)), ((8,), (4, 2))])
def test_unpermute_errors(rows, weights):
    """Rows or weights of another plan would be read where they have no meaning."""
    _, plan = permute(jnp.zeros((4, 8)), jnp.zeros((4, 2), jnp.int32), 3)
    with pytest.raises(ValueError, match=r"it must be \["):
        unpermute(jnp.zeros(rows), plan, jnp.zeros(weights))


@pytest.mark.parametrize("way", mark_rest(("none", "explicit", "custom_partitioning", "user_vma", "shard_map"), 1))
def test_weights_go_with_their_rows(way):
    """Breaks if the weight of a row is that of another, the gradient of a weight without a row is not 0, rows times
    weights sum to another y than weighted sums, or a shard reads a weight of another."""
    shards = 1 if way == "none" else size("2x4", *TOKENS)
    n = sorted_rows(ROWS, TOP_K, GROUPS, 4, None)
    ids = choose(4, ROWS * shards, GROUPS, TOP_K, none=0.5)
    weights = random(1, *ids.shape)
    x = random(0, len(ids), WIDTH)
    layout = spec("2x4", TOKENS)
    cotangents = (random(2, n * shards), random(3, len(ids), WIDTH))

    def forward(x, experts, weights, engine):
        rows, of_rows, plan = permute(x, experts, GROUPS, weights=weights, align=4, engine=engine)
        return (of_rows, unpermute(rows * of_rows[:, None], plan, engine=engine)), (
            plan.gather_idx,
            plan.scatter_idx,
        )

    p = program(
        way,
        "2x4",
        forward,
        (x, ids, weights),
        (layout,) * 3,
        layout,
        layout,
        cotangents=cotangents,
        wrt=(0, 2),
    )
    (of_rows, y), (source, position), (dx, d_weights) = p()
    want, want_y, want_dx, want_d = (np.zeros(v.shape) for v in (of_rows, y, dx, d_weights))
    for r, c in zip(*np.nonzero(ids < GROUPS), strict=True):
        shard = r // ROWS
        row = n * shard + position[r, c]
        assert source[row] == r - ROWS * shard
        want[row] = weights[r, c]
        want_y[r] += weights[r, c] * x[r]
        want_dx[r] += weights[r, c] * cotangents[1][r]
        want_d[r, c] = cotangents[0][row] + cotangents[1][r] @ x[r]
    np.testing.assert_array_equal(of_rows, want)
    assert rel_error(y, want_y) < 1e-6
    assert rel_error(dx, want_dx) < 1e-6
    assert rel_error(d_weights, want_d) < 1e-6
    if way in ("explicit", "custom_partitioning"):
        assert p.under(lambda *args: collectives(p.fn, *args)) == []
