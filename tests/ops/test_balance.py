"""Balance: the bias moves by the sign of mean - tokens, computed exactly.

Covers: counts below, at and above the mean, of any size; ways.
"""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import moax
from moax.config import RouterConfig
from support import TOKENS, WAYS, program, random, spec


def tokens(*counts):
    return jnp.asarray(counts, jnp.int32)


def test_by_hand():
    """Too few tokens: up; too many: down; the mean exactly: not at all."""
    bias = moax.update_router_bias(jnp.asarray([0.5, 0.5, 0.5, 0.5]), tokens(1, 9, 5, 5), rate=0.25)
    np.testing.assert_array_equal(bias, [0.75, 0.25, 0.5, 0.5])


def test_mean_that_is_no_integer():
    """10 tokens on 3 experts: 3 is below the mean, 4 above; a mean rounded to 3 would leave the first two alone."""
    bias = moax.update_router_bias(jnp.zeros(3), tokens(3, 3, 4), rate=1.0)
    np.testing.assert_array_equal(bias, [1.0, 1.0, -1.0])


def test_counts_that_float32_cannot_tell_apart():
    """Counts past 2^24 that differ by one, and a product counts * E past 2^31: a float mean would call them equal."""
    n = 2**27 + 1
    bias = moax.update_router_bias(jnp.zeros(8), tokens(n - 1, n + 1, *[n] * 6), rate=1.0)
    np.testing.assert_array_equal(bias, [1.0, -1.0, *[0.0] * 6])


def test_everything_on_one_expert():
    """The busy expert goes down by the rate, however busy; the empty ones go up."""
    bias = moax.update_router_bias(jnp.zeros(4), tokens(0, 0, 4096, 0))
    np.testing.assert_array_equal(bias, jnp.asarray([1e-3, 1e-3, -1e-3, 1e-3]))


def test_stacked_layers():
    """[layers, E] is each layer by itself: one mean over all would move a layer by another's load."""
    counts = np.random.default_rng(0).integers(0, 50, (3, 8)).astype(np.int32)
    bias = random(1, 3, 8)
    got = moax.update_router_bias(jnp.asarray(bias), jnp.asarray(counts))
    for layer in range(3):
        one = moax.update_router_bias(jnp.asarray(bias[layer]), jnp.asarray(counts[layer]))
        np.testing.assert_array_equal(got[layer], one)


@given(st.lists(st.integers(0, 2**24), min_size=6, max_size=6))
def test_sign_of_exact_mean(counts):
    """Against exact fractions, for any counts."""
    mean = Fraction(sum(counts), len(counts))
    want = [(mean > n) - (mean < n) for n in counts]
    np.testing.assert_array_equal(moax.update_router_bias(jnp.zeros(6), tokens(*counts), rate=1.0), want)


@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
def test_dtype_is_the_biases(dtype):
    """Promotion would turn a bfloat16 state into another type, and a jitted step would compile twice."""
    assert moax.update_router_bias(jnp.zeros(4, dtype), tokens(1, 2, 3, 4)).dtype == dtype


@pytest.mark.parametrize("way", WAYS[:3])
def test_eight_devices_agree_with_one(way):
    """The counts are those of the whole batch, so every device updates the bias alike, and like a single one."""
    config = RouterConfig("sigmoid", bias=True)
    logits = random(2, 64, 8) + np.linspace(0, 2, 8, dtype=np.float32)
    bias = random(3, 8) / 8

    def step(logits, bias, engine):
        counts = moax.route(logits, config, 2, bias, engine=engine).tokens_per_expert
        return (), moax.update_router_bias(bias, counts, rate=0.5)

    at = (spec("2x4", TOKENS, None), P())
    (_, want), (_, got) = (program(w, "2x4", step, (logits, bias), at, (), P())() for w in ("none", way))
    np.testing.assert_array_equal(got, want)
    assert (got != bias).any()


def test_balances_a_skewed_router():
    """A hundred updates even out what the router would pile on two experts: what the op is for."""
    config = RouterConfig("sigmoid", bias=True)
    logits = jnp.asarray(random(4, 256, 8) + 3.0 * (np.arange(8) < 2))

    @jax.jit
    def step(bias):
        counts = moax.route(logits, config, 2, bias).tokens_per_expert
        return moax.update_router_bias(bias, counts, rate=0.01), counts

    bias, first = step(jnp.zeros(8))
    for _ in range(100):
        bias, last = step(bias)
    assert int(first.max()) > 3 * 64
    assert int(last.max()) < 1.2 * 64


def test_errors():
    """A rule or shapes that cannot work are named."""
    with pytest.raises(ValueError, match="rule='mean' must be 'sign'"):
        moax.update_router_bias(jnp.zeros(4), tokens(1, 2, 3, 4), rule="mean")
    with pytest.raises(ValueError, match=r"tokens_per_expert has shape \(3,\); it must be that of bias, \(4,\)"):
        moax.update_router_bias(jnp.zeros(4), tokens(1, 2, 3))
