"""Router logits against float64 on every mesh: in float32 though x is bfloat16, and the gradients too.

Covers: ways x meshes x dtypes of x and of w, with gradients; precision; errors.
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
from moax.ops import router_logits
from support import TOKENS, WAYS, program, random, rel_error, spec
from support.oracle.ops import softmax

TOKENS_N, WIDTH, EXPERTS = 64, 96, 24


def operands(dtype, of_w=jnp.float32):
    """x, w and the cotangent of the logits; w and d over many powers of two, so that each part of them counts."""
    x = jnp.asarray(random(0, TOKENS_N, WIDTH)).astype(dtype)
    w = random(1, WIDTH, EXPERTS) * np.exp2(np.random.default_rng(2).integers(-6, 7, (WIDTH, EXPERTS)))
    return x, jnp.asarray(w.astype(np.float32)).astype(of_w), random(3, TOKENS_N, EXPERTS)


def check(got, x, w, d):
    logits, dx, dw = got
    assert logits.dtype == np.float32 and dw.dtype == w.dtype and dx.dtype == x.dtype
    bound_x = 2e-6 if x.dtype == np.float32 else 2.0**-8
    # A user's `shard_map` sums what each device has rounded.
    bound_w = 1e-6 if w.dtype == np.float32 else 2.0**-7
    x, w, d = (np.float64(v) for v in (x, w, d))
    assert rel_error(logits, x @ w) < 1e-6
    assert rel_error(dx, d @ w.T) < bound_x
    assert rel_error(dw, x.T @ d) < bound_w


DTYPES = {
    "bfloat16": (jnp.bfloat16, jnp.float32),
    "float32": (jnp.float32,) * 2,
    "weight": (jnp.bfloat16,) * 2,
}
CASES = [(mesh, name) for name in DTYPES for mesh in ("2x4", "dp2x2x2", "tp2x2x2") if name != "weight" or mesh == "2x4"]


@pytest.mark.parametrize(("mesh", "dtypes"), CASES)
@pytest.mark.parametrize("way", WAYS)
def test_on_mesh(way, mesh, dtypes):
    """Rows stay where they are, and the gradient of the weight is summed over all of them, once."""
    x, w, d = operands(*DTYPES[dtypes])

    def fn(x, w, engine):
        logits = router_logits(x, w, engine=engine)
        return logits, ()

    rows = spec(mesh, TOKENS, None)
    ran = program(way, mesh, fn, (x, w), (rows, P()), rows, cotangents=d, wrt=(0, 1))
    logits, _, (dx, dw) = ran()
    check((logits, dx, dw), x, w, d)


@pytest.mark.parametrize("dtypes", DTYPES)
def test_one_device(dtypes):
    """A router in bfloat16 alone is off by 2^-9, and sends tokens elsewhere; breaks also if the parts of a gradient of
    bfloat16 are fewer than its rounding needs."""
    x, w, d = operands(*DTYPES[dtypes])
    logits, pull = jax.vjp(router_logits, x, w)
    check((logits, *pull(jnp.asarray(d))), x, w, d)


@pytest.mark.parametrize("of_w", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_matmuls_are_of_bfloat16(of_w):
    """A float32 matmul of these runs 20 times slower on a GPU."""
    x, w, d = operands(jnp.bfloat16, of_w)
    step = jax.jit(lambda x, w, d: jax.vjp(router_logits, x, w)[1](d))
    text = step.lower(x, w, d).as_text()
    dots = [line for line in text.splitlines() if "dot_general" in line]
    assert len(dots) >= 2 and all(line.count("bf16>") >= 2 for line in dots), dots


def test_shapes():
    with pytest.raises(ValueError, match=r"x, w have shapes \(2, 3\), \(4, 5\)"):
        router_logits(jnp.zeros((2, 3)), jnp.zeros((4, 5)))


def tokens(*counts):
    return jnp.asarray(counts, jnp.int32)


MANY = 2**27 + 1
BY_HAND = {
    "below, above and at the mean": ((1, 9, 5, 5), 0.25, (1, -1, 0, 0)),
    # Rounded to 3 it would leave the first two alone.
    "a mean that is no integer": ((3, 3, 4), 1.0, (1, 1, -1)),
    "counts that float32 cannot tell apart": (
        (MANY - 1, MANY + 1, *[MANY] * 6),
        1.0,
        (1, -1, *[0] * 6),
    ),
    "everything on one expert": ((0, 0, 4096, 0), None, (1, 1, -1, 1)),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    """Breaks if too few tokens do not raise a bias by the rate, or too many do not lower it, however many they are."""
    counts, rate, signs = BY_HAND[name]
    bias = moax.update_router_bias(jnp.full(len(counts), 0.5), tokens(*counts), rate)
    np.testing.assert_array_equal(
        bias,
        np.float32(0.5) + np.float32(rate or 1e-3) * np.float32(signs),
    )


def test_stacked_layers():
    """[layers, E] is each layer by itself: one mean over all would move a layer by another's load."""
    counts = np.random.default_rng(0).integers(0, 50, (3, 8)).astype(np.int32)
    bias = random(1, 3, 8)
    got = moax.update_router_bias(jnp.asarray(bias), jnp.asarray(counts))
    for layer in range(3):
        one = moax.update_router_bias(jnp.asarray(bias[layer]), jnp.asarray(counts[layer]))
        np.testing.assert_array_equal(got[layer], one)


@given(st.lists(st.integers(0, 2**24) | st.integers(0, 2**31 - 1), min_size=6, max_size=6))
def test_sign_of_exact_mean(counts):
    """Against exact fractions, for any counts; breaks if their sum, of more than 2^31 in a large step, overflows."""
    mean = Fraction(sum(counts), len(counts))
    want = [(mean > n) - (mean < n) for n in counts]
    np.testing.assert_array_equal(
        moax.update_router_bias(jnp.zeros(6), tokens(*counts), rate=1.0),
        want,
    )


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_narrow_biases_are_refused(dtype):
    """Breaks if a bias has a dtype that rounds the steps of an update away: bfloat16 stops at 0.5 for steps of 1e-3."""
    with pytest.raises(ValueError, match=f"bias has dtype {jnp.dtype(dtype)}; it must be float32"):
        moax.update_router_bias(jnp.zeros(4, dtype), tokens(1, 2, 3, 4))


OFF = np.float32([0.1, -np.inf, 0.2, np.inf, -0.3, 0.0])


def test_sign_leaves_biases_that_are_not_finite():
    """Breaks if an expert that is switched off draws the mean of the others down, or its bias moves."""
    got = moax.update_router_bias(OFF, tokens(6, 0, 4, 90, 5, 5), rate=0.5)
    np.testing.assert_array_equal(got, OFF + np.float32([-0.5, 0, 0.5, 0, 0, 0]))


@pytest.mark.parametrize("off", [[1], [1, 4]])
def test_quantiles_leave_biases_that_are_not_finite(off):
    """Breaks if one bias of -inf makes others NaN, or changes the biases that the other experts would have alone."""
    on = np.setdiff1d(np.arange(8), off)
    bias = np.full(8, -np.inf, np.float32)
    bias[on] = random(6, len(on)) / 4

    def update(logits, bias):
        r = moax.route(logits, QUANTILE, 2, bias)
        return moax.update_router_bias(
            bias,
            r.tokens_per_expert,
            rule="quantile",
            histogram=r.histogram,
        )

    got = np.asarray(update(SKEWED, bias))
    np.testing.assert_array_equal(got[off], -np.inf)
    np.testing.assert_allclose(got[on], update(SKEWED[:, on], bias[on]), atol=1e-6)


@pytest.mark.parametrize("way", WAYS[:3])
def test_eight_devices_agree_with_one(way):
    """The counts are those of the whole batch, so every device updates the bias alike, and like a single one."""
    config = RouterConfig("sigmoid", bias=True)
    logits = random(2, 64, 8) + np.linspace(0, 2, 8, dtype=np.float32)
    bias = random(3, 8) / 8

    def step(logits, bias, engine):
        counts = moax.route(logits, config, 2, bias, engine=engine).tokens_per_expert
        return (), moax.update_router_bias(bias, counts, rate=0.5)

    layout = (spec("2x4", TOKENS, None), P())
    _, want = program("none", "2x4", step, (logits, bias), layout, (), P())()
    _, got = program(way, "2x4", step, (logits, bias), layout, (), P())()
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

    bias, counts_before = step(jnp.zeros(8))
    for _ in range(100):
        bias, last = step(bias)
    assert int(counts_before.max()) > 3 * 64
    assert int(last.max()) < 1.2 * 64


def test_errors():
    """A rule or shapes that cannot work are named."""
    with pytest.raises(ValueError, match="rule='mean' must be one of 'sign', 'quantile'"):
        moax.update_router_bias(jnp.zeros(4), tokens(1, 2, 3, 4), rule="mean")
    with pytest.raises(
        ValueError,
        match=r"bias, tokens_per_expert have shapes \(4,\), \(3,\); they must be \[..., E\]",
    ):
        moax.update_router_bias(jnp.zeros(4), tokens(1, 2, 3))
    with pytest.raises(
        ValueError,
        match=r"histogram has shape \(4, 10\); it must be \[..., E, bins=1000\]",
    ):
        moax.update_router_bias(
            jnp.zeros(4),
            tokens(1, 2, 3, 4),
            rule="quantile",
            histogram=jnp.zeros((4, 10), int),
        )
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
    quantile = needed[-(-len(wide) * top_k // wide.shape[1]) - 1]
    return quantile - quantile.mean(), (np.ptp(bias) + 2) / 1000


@pytest.mark.parametrize("masked", (False, True))
@pytest.mark.parametrize(("score", "top_k"), [("sigmoid", 2), ("softmax", 3), ("sigmoid", 1)])
def test_quantiles_of_a_sort(score, top_k, masked):
    """Breaks if a bias is another than the quantile that a sort gives, or padding is counted: to the width of a bin."""
    config = dataclasses.replace(QUANTILE, score=score)
    bias = random(6, 8) / 4
    real = random(7, 512) > -0.3
    logits = np.where(real[:, None], SKEWED, np.nan) if masked else SKEWED
    r = moax.route(
        jnp.asarray(logits),
        config,
        top_k,
        jnp.asarray(bias),
        mask=jnp.asarray(real) if masked else None,
    )
    np.testing.assert_array_equal(r.histogram.sum(1), real.sum() if masked else 512)
    got = moax.update_router_bias(
        jnp.asarray(bias),
        r.tokens_per_expert,
        rule="quantile",
        histogram=r.histogram,
    )
    want, width = quantiles(logits, bias, config, top_k, real if masked else slice(None))
    # The two widths are a bin of the quantile, and one of the mean.
    np.testing.assert_allclose(got, want, atol=2 * width)
    half = moax.update_router_bias(
        jnp.asarray(bias),
        r.tokens_per_expert,
        0.5,
        "quantile",
        histogram=r.histogram,
    )
    np.testing.assert_allclose(half, (bias + got) / 2, atol=1e-6)


@pytest.mark.parametrize(
    ("score", "order", "updates"),
    [
        ("sigmoid", "score_then_topk", 4),
        ("softmax", "score_then_topk", 4),
        ("softmax", "topk_then_score", 12),
    ],
)
def test_quantiles_balance_a_skewed_router(score, order, updates):
    """Breaks if a few updates, each on new tokens, leave experts overloaded; logits of +-4 need more of them than
    scores in [0, 1], because the end bins hold what exceeds the range."""
    config = dataclasses.replace(QUANTILE, score=score, order=order)

    @jax.jit
    def step(bias, key):
        logits = jax.random.normal(key, (4096, 8)) + jnp.asarray(SKEW)
        r = moax.route(logits, config, 2, bias)
        new = moax.update_router_bias(
            bias,
            r.tokens_per_expert,
            rule="quantile",
            histogram=r.histogram,
        )
        return new, moax.load_metrics(r.tokens_per_expert).max_violation

    bias = jnp.zeros(8)
    results = []
    for i in range(updates + 1):
        bias, violation = step(bias, jax.random.key(i))
        results.append(float(violation))
    assert results[0] > 2.0 and results[-1] < 0.1, results
    assert abs(float(bias.mean())) < 1e-5


@pytest.mark.parametrize(
    ("way", "mesh"),
    [(WAYS[0], "tp2x2x2"), (WAYS[2], "2x4"), ("user_vma", "tp2x2x2")],
)
def test_histogram_of_the_whole_batch(way, mesh):
    """Breaks if the histogram is that of a shard, tp counts a token twice, or microbatches do not add up."""
    bias = random(3, 8) / 8

    def step(logits, bias, engine):
        r = moax.route(logits, QUANTILE, 2, bias, engine=engine)
        return (), (r.histogram, r.tokens_per_expert)

    layout = (spec(mesh, TOKENS, None), P())
    _, want = program("none", mesh, step, (SKEWED, bias), layout, (), P())()
    _, got = program(way, mesh, step, (SKEWED, bias), layout, (), P())()
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])
    parts = [moax.route(part, QUANTILE, 2, bias).histogram for part in jnp.split(SKEWED, 4)]
    np.testing.assert_array_equal(sum(parts), want[0])


def test_quantiles_of_stacked_layers_and_no_tokens():
    """Breaks if layers share a range or a mean, or if a step without tokens moves the bias."""
    bias = jnp.asarray(random(8, 3, 8) / 4)
    runs = [moax.route(SKEWED[i::3], QUANTILE, 2, b) for i, b in enumerate(bias)]
    counts = jnp.stack([r.tokens_per_expert for r in runs])
    histograms = jnp.stack([r.histogram for r in runs])
    got = moax.update_router_bias(bias, counts, rule="quantile", histogram=histograms)
    for layer in range(3):
        one = moax.update_router_bias(
            bias[layer],
            counts[layer],
            rule="quantile",
            histogram=histograms[layer],
        )
        np.testing.assert_allclose(got[layer], one, atol=1e-6)
    none = moax.route(jnp.zeros((0, 8)), QUANTILE, 2, bias[0])
    same = moax.update_router_bias(
        bias[0],
        none.tokens_per_expert,
        rule="quantile",
        histogram=none.histogram,
    )
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
    np.testing.assert_allclose(
        got.entropy,
        [np.log(4), -(share * np.log(share)).sum(), 0.0],
        rtol=1e-6,
    )


@pytest.mark.parametrize("kind", ("nnx", "linen"))
def test_layers_take_the_rule(kind):
    """Breaks if a layer drops the rule or the histogram of its stats, or its bias is another than the function's."""
    pytest.importorskip("flax")
    from flax import nnx

    import moax.linen
    import moax.nnx

    config = moax.MoEConfig(16, 8, 8, 2, router=QUANTILE)
    x = jnp.asarray(random(9, 4, 8, 16))
    if kind == "nnx":
        layer = moax.nnx.MoE(config, rngs=nnx.Rngs(0))
        stats = layer(x)[1]
        layer.update_router_bias(stats, rule="quantile")
        got = layer.params.router_bias
    else:
        block = moax.linen.MoEBlock(config)
        variables = block.init(jax.random.key(0), x)
        stats = block.apply(variables, x)[1]
        settings = dict(rule="quantile", method="update_router_bias", mutable="moax_state")
        got = block.apply(variables, stats, **settings)[1]["moax_state"]["router_bias"]
    operands = jnp.zeros(8), stats.tokens_per_expert
    np.testing.assert_array_equal(
        got,
        moax.update_router_bias(*operands, rule="quantile", histogram=stats.histogram),
    )
    assert got.any()
