"""The kernel of top-k: in interpret mode against `lax.top_k`, its derivative, and lowered for CUDA.

Covers: random logits, ties, NaN, infinities and signed zeros; rows that 64 does not divide; what is refused.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from moax.checks import Unsupported
from moax.kernels import implementation
from moax.kernels.hopper.pallas.plan import top_k_rows
from support import interpret, lower, some


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
    [("odd", 64, 16, 16), ("tied", 100, 32, 4), *some([("random", 128, 128, 8), ("tied", 64, 256, 8)], 0)],
)
def test_top_k_is_that_of_lax(kind, rows, experts, top_k):
    """Ties that go to the higher expert, a NaN that sorts elsewhere, an expert taken twice, or rows left out."""
    x = logits_of(kind, rows, experts)
    # Where 64 does not divide the rows, two blocks write the same to some of them, which the interpreter calls a race.
    got = interpret(functools.partial(top_k_rows, top_k=top_k), x, races=rows % 64 == 0)
    jax.tree.map(assert_bits, tuple(got), tuple(lax.top_k(x, top_k)))


@pytest.mark.parametrize(("experts", "top_k"), some([(128, 8), (256, 8), (8, 2), (64, 6), (32, 4)], 2))
def test_lowers_for_cuda(experts, top_k):
    """A number of experts whose tile Mosaic refuses."""
    lower(functools.partial(top_k_rows, top_k=top_k), jax.ShapeDtypeStruct((8191, experts), jnp.float32))


@pytest.mark.parametrize(("shape", "top_k"), [((63, 64), 2), ((64, 60), 2), ((64, 512), 2), ((64, 8), 9)])
def test_refuses(shape, top_k):
    """A kernel that reads logits past the end of the array, or more than its registers hold."""
    with pytest.raises(Unsupported, match="logits are float32"):
        top_k_rows(jnp.zeros(shape, jnp.float32), top_k)


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
        return [[top(x, k) for x, k in pairs] for top in (top_k_rows, lax.top_k)]

    for kind in ("random", "tied", "odd"):
        got, want = choose(*(logits_of(kind, rows, experts) for rows, experts, _ in shapes))
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert_bits(ours, theirs)
