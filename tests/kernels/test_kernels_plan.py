"""The kernels of the plan and of top-k: interpreted against NumPy and `lax.top_k`, their PTX in NumPy, and on a card
against XLA.

Covers: groups that are empty, one, many; assignments that divide nothing, of no group, all of one group; parts of the
arrivals of each group; several steps and rounds; on a Hopper GPU, the shapes of models, skewed, in passes, under vmap.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from moax.checks import Unsupported
from moax.kernels import implementation
from moax.kernels.groups import align_up
from moax.kernels.hopper.pallas import plan, ptx
from moax.ops.permutation import PermuteSpec, plan_rows
from support import interpret, mark_rest, random, spread
from support.ptx import run_ptx


def place(experts, weights, part=None, *, groups, align, num_rows):
    """The plan by both kernels."""
    return plan.build_permutation(
        experts,
        plan.count_groups(experts, groups),
        groups,
        align,
        num_rows,
        weights,
        part,
    )


def oracle(experts, weights, part=None, *, groups, align, num_rows):
    """source, position, sizes and by_row, one assignment after the other."""
    received, top_k = experts.shape
    begin = np.zeros(groups, int)
    sizes = np.bincount(experts.ravel(), minlength=groups)[:groups]
    begin, sizes = (begin, sizes) if part is None else part
    padded = align_up(np.asarray(sizes), align)
    starts = np.cumsum(padded) - padded
    arrived = np.zeros(groups, int)
    source = np.full(num_rows, received)
    position = np.full(experts.size, num_rows)
    by_row = np.zeros(num_rows)
    for a, g in enumerate(experts.ravel()):
        if g < groups:
            if 0 <= arrived[g] - begin[g] < sizes[g]:
                position[a] = starts[g] + arrived[g] - begin[g]
                source[position[a]] = a // top_k
                by_row[position[a]] = weights.ravel()[a]
            arrived[g] += 1
    return source, position.reshape(experts.shape), sizes, by_row


def choose(kind, rows, top_k, groups):
    """Experts [R, K] in [0, groups], of a kind."""
    rng = np.random.default_rng(0)
    if kind == "one group":
        return np.full((rows, top_k), groups - 1, np.int32)
    if kind == "nobody":
        return np.full((rows, top_k), groups, np.int32)
    experts = rng.integers(0, groups + 1, (2, rows, top_k)).astype(np.int32)
    return experts.min(0) if kind == "skewed" else experts[0]


CASES = [
    ("skewed", 117, 5, 7, 4, True),  # 585 assignments in two blocks of six steps
    ("one group", 33, 2, 3, 16, False),
    ("random", 70, 1, 130, 2, False),
    ("random", 150, 2, 300, 1, True),
    ("nobody", 50, 3, 5, 8, False),
    ("skewed", 64, 8, 64, 2, False),
    ("one group", 300, 1, 1, 1, True),
]


@pytest.mark.parametrize(("kind", "rows", "top_k", "groups", "align", "parted"), mark_rest(CASES, 1))
def test_each_assignment_has_its_row(monkeypatch, kind, rows, top_k, groups, align, parted):
    """Breaks if counts of another block, step or group are added, if rows of a group leave their order of arrival, if
    an assignment without a group is counted, if a row has the weight of another one, or if padding is left
    unwritten."""
    monkeypatch.setattr(plan, "BLOCKS", 2)
    monkeypatch.setattr(plan, "AHEAD", 1)
    experts = choose(kind, rows, top_k, groups)
    weights = random(0, rows, top_k)
    arrived = np.bincount(experts.ravel(), minlength=groups)[:groups]
    part = (arrived // 3, arrived // 2) if parted else None
    sizes = arrived if part is None else part[1]
    sizes_of = dict(groups=groups, align=align, num_rows=int(align_up(sizes, align).sum()) + 21)
    part = part if part is None else tuple(jnp.asarray(v, jnp.int32) for v in part)
    got = interpret(functools.partial(place, **sizes_of), experts, weights, part)
    for value, want in zip(got, oracle(experts, weights, part, **sizes_of), strict=True):
        np.testing.assert_array_equal(value, want)


def test_take_and_put():
    """Breaks if a thread loads or stores another element than its own, or stores outside of the array."""
    rng = np.random.default_rng(0)
    held = rng.integers(0, 99, 300)
    index = rng.integers(0, 300, 128)
    taken = run_ptx(ptx.TAKE, (0, 64, index), on_load=lambda address: held[(address - 64) // 4])["$0"]
    np.testing.assert_array_equal(taken, held[index])

    index = np.concatenate([rng.permutation(300)[:124], [-1, -(2**31), 300, 2**31 - 1]])
    written = np.zeros(300, int)
    values = rng.integers(1, 99, 128)

    def store(address, value, stored):
        written[(address[stored] - 64) // 4] = value[stored]

    run_ptx(ptx.PUT.format(size=300), (64, index, values), on_store=store)
    want = np.zeros(300, int)
    want[index[:124]] = values[:124]
    np.testing.assert_array_equal(written, want)


def test_refuses():
    """A kernel that has more groups or steps than shared memory holds; XLA takes those."""
    assert plan.supports((1 << 20, 1), 64)
    assert not plan.supports((1 << 23, 8), 128)
    assert not plan.supports((64, 1), 1025)
    with pytest.raises(Unsupported, match="more than the kernels hold"):
        plan.count_groups(jnp.zeros((64, 1), jnp.int32), 1025)
    sizes = implementation("hopper").build_permutation(jnp.zeros((64, 1), jnp.int32), 1025, 1, 64)[2]
    np.testing.assert_array_equal(sizes, np.eye(1, 1025, dtype=int)[0] * 64)


SHAPES = [
    (8192, 8, 128, 1),
    (16384, 8, 128, 128),
    (8192, 8, 256, 128),
    (24576, 8, 128, 64),
    (8192, 2, 8, 128),
    (32768, 10, 512, 128),
    (65536, 8, 16, 128),
    (777, 3, 5, 1),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "parted"),
    spread([((65536, 8, 16, 128), False), ((777, 3, 5, 1), True)], SHAPES, (False, True)),
    ids=str,
)
def test_plans_on_a_card(shape, parted):
    """Breaks if a count is read before it is written, or where the hardware does otherwise than the interpreter: plans
    have the bits of XLA's, alone and under vmap, also with a capacity and in each pass."""
    rows, top_k, groups, align = shape
    load = rows * top_k
    capacity, room = (load // 2, load // 5) if parted else (None, None)
    weights = np.sin(1.0 + np.arange(load, dtype=np.float32)).reshape(rows, top_k)

    @jax.jit
    def plans(experts, start):
        def by(kernels, experts):
            return plan_rows(
                PermuteSpec(groups, align, capacity, kernels, max_rows=room),
                experts,
                weights,
                start,
            )

        two = jnp.stack([groups - experts, experts])
        return by("hopper", experts), *(jax.vmap(functools.partial(by, kernels))(two) for kernels in ("hopper", "xla"))

    for kind in ("random", "skewed", "one group", "nobody"):
        experts = choose(kind, rows, top_k, groups)
        for start in range(0, load // 2, load // 5) if parted else (0,):
            for one, value, bits in zip(*map(jax.tree.leaves, plans(experts, start)), strict=True):
                np.testing.assert_array_equal(value, bits)
                np.testing.assert_array_equal(one, bits[1])


def logits_of(kind, rows, experts):
    """Logits [T, E] of a kind."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, experts)).astype(np.float32)
    if kind == "tied":
        return np.round(x)
    if kind == "odd":
        odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 3.0], np.float32)
        return odd[rng.integers(0, len(odd), x.shape)]
    return x


def assert_bits(got, want):
    np.testing.assert_array_equal(np.asarray(got).view(np.int32), np.asarray(want).view(np.int32))


@pytest.mark.parametrize(
    ("kind", "rows", "experts", "top_k"),
    [
        ("odd", 64, 16, 16),
        ("tied", 100, 32, 4),
        *mark_rest([("random", 128, 128, 8), ("tied", 64, 256, 8)], 0),
    ],
)
def test_top_k_is_that_of_lax(kind, rows, experts, top_k):
    """Ties that go to the higher expert, a NaN that sorts elsewhere, an expert taken twice, or rows left out."""
    x = logits_of(kind, rows, experts)
    # Where 64 does not divide the rows, two blocks write the same to some of them, which the interpreter calls a race.
    got = interpret(functools.partial(plan.top_k_rows, top_k=top_k), x, races=rows % 64 == 0)
    jax.tree.map(assert_bits, tuple(got), tuple(lax.top_k(x, top_k)))


@pytest.mark.parametrize(
    ("shape", "top_k"),
    [((63, 64), 2), ((64, 60), 2), ((64, 512), 2), ((64, 8), 9)],
)
def test_top_k_refuses(shape, top_k):
    """A kernel that reads logits past the end of the array, or more than its registers hold."""
    with pytest.raises(Unsupported, match="logits are float32"):
        plan.top_k_rows(jnp.zeros(shape, jnp.float32), top_k)


def test_values_have_a_derivative():
    """Breaks if a second derivative of the routing fails where kernels run, or leaves out what chose the weights."""
    x, dx = (jnp.asarray(np.random.default_rng(i).normal(size=(5, 9)), jnp.float32) for i in range(2))
    got, want = (
        jax.jvp(lambda x, top=top: top(x, 3)[0], (x,), (dx,)) for top in (implementation("hopper").top_k, lax.top_k)
    )
    np.testing.assert_array_equal(np.stack(got), np.stack(want))


@pytest.mark.gpu
def test_top_k_on_a_card():
    """A row that two warpgroups write apart, or a comparison that only the hardware does otherwise."""
    shapes = ((8192, 128, 8), (4000, 256, 8), (65, 64, 6), (8192, 8, 2))

    @jax.jit
    def choose(*xs):
        pairs = list(zip(xs, (top_k for *_, top_k in shapes), strict=True))
        return [[top(x, k) for x, k in pairs] for top in (plan.top_k_rows, lax.top_k)]

    for kind in ("random", "tied", "odd"):
        got, want = choose(*(logits_of(kind, rows, experts) for rows, experts, _ in shapes))
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert_bits(ours, theirs)
