"""The rows of docs/how-to/maxtext-megatron.md and transformer-engine.md that say which router computes the same.

The formulas are those of the sources of Megatron-Core 0.19.2 (`topk_routing_with_score_function`) and of Transformer
Engine 2.20.2, written anew in NumPy. `make framework-parity` holds the rows of MaxText against MaxText itself. It also
looks up every name of the other columns in the packages.
"""

import jax
import numpy as np
import pytest

import moax

E, K, GROUPS, TOP_GROUPS, SCALE = 16, 4, 4, 2, 2.5
LOGITS = np.asarray(jax.random.normal(jax.random.key(0), (64, E)), np.float64)
BIAS = np.asarray(jax.random.normal(jax.random.key(1), (E,)), np.float64)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def best(scores):
    """Returns the K best experts, best first."""
    return np.argsort(-scores, axis=-1, kind="stable")[:, :K]


def of_groups(scores):
    """Returns the scores of the experts of the best groups, whose score is the sum of K / TOP_GROUPS experts."""
    grouped = np.sort(scores.reshape(-1, GROUPS, E // GROUPS), -1)[..., -(K // TOP_GROUPS) :].sum(-1)
    best_groups = np.argsort(-grouped, axis=-1)[:, :TOP_GROUPS]
    mask = np.zeros((len(scores), GROUPS), bool)
    np.put_along_axis(mask, best_groups, True, -1)
    return np.where(np.repeat(mask, E // GROUPS, -1), scores, -np.inf)


def chosen(scores, by):
    """Returns the experts that `by` chooses, and their scores."""
    experts = best(by)
    return experts, np.take_along_axis(scores, experts, -1)


def post_softmax():
    experts, logits = chosen(LOGITS, LOGITS)
    return experts, softmax(logits)


def pre_softmax():
    return chosen(softmax(LOGITS), LOGITS)


def sigmoid_bias_groups():
    scores = sigmoid(LOGITS)
    experts, weights = chosen(scores, of_groups(scores + BIAS))
    return experts, weights / weights.sum(-1, keepdims=True) * SCALE


GROUPED = dict(num_groups=GROUPS, top_groups=TOP_GROUPS, group_score="sum_topk")
ROWS = {
    "Megatron-Core, moe_router_pre_softmax=False": (post_softmax, dict(order="topk_then_score")),
    "Megatron-Core, moe_router_pre_softmax=True": (pre_softmax, dict(order="score_then_topk", normalize=False)),
    "Transformer Engine, use_pre_softmax=False": (post_softmax, dict(order="topk_then_score")),
    "Transformer Engine, use_pre_softmax=True": (pre_softmax, dict(normalize=False)),
    "both, sigmoid, expert bias, groups, scale": (
        sigmoid_bias_groups,
        dict(score="sigmoid", bias=True, scale=SCALE, **GROUPED),
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_router_of_the_row_computes_the_same(row):
    """Breaks if a migration page tells a user of another library to write a router with other experts or weights."""
    formula, fields = ROWS[row]
    experts, weights = formula()
    config = moax.RouterConfig(**fields)
    got = moax.route(LOGITS.astype(np.float32), config, K, BIAS.astype(np.float32) if config.bias else None)
    order = np.argsort(experts, -1), np.argsort(got.experts, -1)
    pairs = [(experts, weights), (np.asarray(got.experts), np.asarray(got.weights))]
    want, have = ([np.take_along_axis(v, o, -1) for v in pair] for pair, o in zip(pairs, order, strict=True))
    np.testing.assert_array_equal(have[0], want[0])
    np.testing.assert_allclose(have[1], want[1], rtol=2e-6)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_balance_loss_of_megatron_and_transformer_engine(score):
    """Breaks if `moe_aux_loss_coeff` or `aux_loss_coeff`, taken over as `aux_loss`, is another loss."""
    scores = softmax(LOGITS) if score == "softmax" else sigmoid(LOGITS)
    p = scores / scores.sum(-1, keepdims=True)
    tokens = np.bincount(best(LOGITS).ravel(), minlength=E)
    want = 0.01 * E / (K * len(LOGITS) ** 2) * (p.sum(0) * tokens).sum()
    got = moax.route(LOGITS.astype(np.float32), moax.RouterConfig(score=score, aux_loss=0.01), K).aux_loss
    np.testing.assert_allclose(got, want, rtol=1e-5)
