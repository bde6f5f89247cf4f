"""Balance: the bias moves by the sign of mean - tokens, computed exactly, or to the quantiles of a histogram.

Covers: counts below, at and above the mean, of any size; quantiles against a sort; scores, masks and microbatches;
ways; metrics of the load.
"""

import dataclasses
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
from support.oracle.ops import softmax


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
    with pytest.raises(ValueError, match="rule='mean' must be one of 'sign', 'quantile'"):
        moax.update_router_bias(jnp.zeros(4), tokens(1, 2, 3, 4), rule="mean")
    with pytest.raises(
        ValueError, match=r"bias, tokens_per_expert have shapes \(4,\), \(3,\); they must be \[..., E\]"
    ):
        moax.update_router_bias(jnp.zeros(4), tokens(1, 2, 3))
    with pytest.raises(ValueError, match=r"histogram has shape \(4, 10\); it must be \[..., E, bins=1000\]"):
        moax.update_router_bias(jnp.zeros(4), tokens(1, 2, 3, 4), rule="quantile", histogram=jnp.zeros((4, 10), int))
    for changes in (dict(bias=False), dict(num_groups=2, top_groups=1)):
        with pytest.raises(ValueError, match="histogram=True needs bias=True and num_groups=1"):
            RouterConfig(**{"bias": True, "histogram": True} | changes)


QUANTILE = RouterConfig("sigmoid", bias=True, histogram=True)
SKEW = np.float32(2.0) * (np.arange(8) < 2)[None]
SKEWED = random(5, 512, 8) + SKEW


def quantiles(logits, bias, config, top_k, real=slice(None)):
    """The biases of the paper's equations in float64, by a sort, and the width of a bin."""
    wide = logits[real].astype(np.float64)
    scores = {"sigmoid": lambda: 1 / (1 + np.exp(-wide)), "softmax": lambda: softmax(wide)}[config.score]()
    cutoff = np.sort(scores + bias, axis=1)[:, -top_k - 1]
    needed = np.sort(cutoff[:, None] - scores, axis=0)
    found = needed[-(-len(wide) * top_k // wide.shape[1]) - 1]
    return found - found.mean(), (np.ptp(bias) + 2) / 1000


@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize(("score", "top_k"), [("sigmoid", 2), ("softmax", 3), ("sigmoid", 1)])
def test_quantiles_of_a_sort(score, top_k, masked):
    """Breaks if a bias is another than the quantile that a sort gives, or padding is counted: to the width of a bin."""
    config = dataclasses.replace(QUANTILE, score=score)
    bias, real = random(6, 8) / 4, random(7, 512) > -0.3
    logits = np.where(real[:, None], SKEWED, np.nan) if masked else SKEWED
    r = moax.route(jnp.asarray(logits), config, top_k, jnp.asarray(bias), mask=jnp.asarray(real) if masked else None)
    np.testing.assert_array_equal(r.histogram.sum(1), real.sum() if masked else 512)
    got = moax.update_router_bias(jnp.asarray(bias), r.tokens_per_expert, rule="quantile", histogram=r.histogram)
    want, width = quantiles(logits, bias, config, top_k, real if masked else slice(None))
    np.testing.assert_allclose(got, want, atol=2 * width)  # a bin of the quantile, and one of the mean
    half = moax.update_router_bias(jnp.asarray(bias), r.tokens_per_expert, 0.5, "quantile", histogram=r.histogram)
    np.testing.assert_allclose(half, (bias + got) / 2, atol=1e-6)


@pytest.mark.parametrize(("score", "order", "updates"), [
    ("sigmoid", "score_then_topk", 4), ("softmax", "score_then_topk", 4), ("softmax", "topk_then_score", 12)
])  # fmt: skip
def test_quantiles_balance_a_skewed_router(score, order, updates):
    """Breaks if a few updates, each on new tokens, leave experts overloaded; logits of +-4 need more of them than
    scores in [0, 1], because the end bins hold what exceeds the range."""
    config = dataclasses.replace(QUANTILE, score=score, order=order)

    @jax.jit
    def step(bias, key):
        logits = jax.random.normal(key, (4096, 8)) + jnp.asarray(SKEW)
        r = moax.route(logits, config, 2, bias)
        new = moax.update_router_bias(bias, r.tokens_per_expert, rule="quantile", histogram=r.histogram)
        return new, moax.load_metrics(r.tokens_per_expert).max_violation

    bias, found = jnp.zeros(8), []
    for i in range(updates + 1):
        bias, violation = step(bias, jax.random.key(i))
        found.append(float(violation))
    assert found[0] > 2.0 and found[-1] < 0.1, found
    assert abs(float(bias.mean())) < 1e-5


@pytest.mark.parametrize(("way", "mesh"), [(WAYS[0], "tp2x2x2"), (WAYS[2], "2x4"), ("user_vma", "tp2x2x2")])
def test_histogram_of_the_whole_batch(way, mesh):
    """Breaks if the histogram is that of a shard, tp counts a token twice, or microbatches do not add up."""
    bias = random(3, 8) / 8

    def step(logits, bias, engine):
        r = moax.route(logits, QUANTILE, 2, bias, engine=engine)
        return (), (r.histogram, r.tokens_per_expert)

    at = (spec(mesh, TOKENS, None), P())
    (_, want), (_, got) = (program(w, mesh, step, (SKEWED, bias), at, (), P())() for w in ("none", way))
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])
    parts = [moax.route(part, QUANTILE, 2, bias).histogram for part in jnp.split(SKEWED, 4)]
    np.testing.assert_array_equal(sum(parts), want[0])


def test_quantiles_of_stacked_layers_and_no_tokens():
    """Breaks if layers share a range or a mean, or if a step without tokens moves the bias."""
    bias = jnp.asarray(random(8, 3, 8) / 4)
    runs = [moax.route(SKEWED[i::3], QUANTILE, 2, b) for i, b in enumerate(bias)]
    counts, histograms = (jnp.stack([getattr(r, n) for r in runs]) for n in ("tokens_per_expert", "histogram"))
    got = moax.update_router_bias(bias, counts, rule="quantile", histogram=histograms)
    for layer in range(3):
        one = moax.update_router_bias(bias[layer], counts[layer], rule="quantile", histogram=histograms[layer])
        np.testing.assert_allclose(got[layer], one, atol=1e-6)
    none = moax.route(jnp.zeros((0, 8)), QUANTILE, 2, bias[0])
    same = moax.update_router_bias(bias[0], none.tokens_per_expert, rule="quantile", histogram=none.histogram)
    np.testing.assert_array_equal(same, bias[0])


def test_what_a_token_chooses_by_itself_is_counted():
    """Breaks if replayed experts enter the histogram, whose cutoffs are those of the router's own choice."""
    replayed = moax.route(SKEWED, QUANTILE, 2, jnp.zeros(8), experts=jnp.zeros((512, 2), jnp.int32))
    own = moax.route(SKEWED, QUANTILE, 2, jnp.zeros(8))
    np.testing.assert_array_equal(replayed.histogram, own.histogram)


def test_no_histogram_unless_asked():
    """Breaks if a router that only has a bias pays for a histogram."""
    plain = dataclasses.replace(QUANTILE, histogram=False)
    text = str(jax.make_jaxpr(lambda x: moax.route(x, plain, 2, jnp.zeros(8)))(SKEWED))
    assert "1000" not in text and "scatter" not in text
    assert moax.route(SKEWED, plain, 2, jnp.zeros(8)).histogram is None


def test_load_metrics():
    """Breaks if MaxVio is not (max - mean) / mean, the entropy is not that of the shares, or no token divides by 0."""
    got = moax.load_metrics(jnp.asarray([[4, 4, 4, 4], [10, 2, 4, 0], [0, 0, 0, 0]], jnp.int32))
    share = np.array([10, 2, 4]) / 16
    np.testing.assert_allclose(got.max_violation, [0.0, 1.5, 0.0], atol=1e-6)
    np.testing.assert_allclose(got.entropy, [np.log(4), -(share * np.log(share)).sum(), 0.0], rtol=1e-6)


@pytest.mark.parametrize("kind", ("nnx", "linen"))
def test_layers_take_the_rule(kind):
    """Breaks if a layer drops the rule or the histogram of its stats, or its bias is another than the function's."""
    pytest.importorskip("flax")
    from flax import nnx

    import moax.linen
    import moax.nnx

    config, x = moax.MoEConfig(16, 8, 8, 2, router=QUANTILE), jnp.asarray(random(9, 4, 8, 16))
    if kind == "nnx":
        layer = moax.nnx.MoE(config, rngs=nnx.Rngs(0))
        stats = layer(x)[1]
        layer.update_router_bias(stats, rule="quantile")
        got = layer.params.router_bias
    else:
        block = moax.linen.MoEBlock(config)
        variables = block.init(jax.random.key(0), x)
        stats = block.apply(variables, x)[1]
        how = dict(rule="quantile", method="update_router_bias", mutable="moax_state")
        got = block.apply(variables, stats, **how)[1]["moax_state"]["router_bias"]
    of = jnp.zeros(8), stats.tokens_per_expert
    np.testing.assert_array_equal(got, moax.update_router_bias(*of, rule="quantile", histogram=stats.histogram))
    assert got.any()
