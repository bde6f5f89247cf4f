"""The block and every gradient in float64 NumPy, each product of operands rounded as a recipe says.

    h = q(x) q(wi) + bi     a = act(h)     o = q(a) q(wo) + bo     y = sum over k of weight * o

and backward, with q along the dim that each product contracts:

    d_a  = q(d_o) q(wo)^T         d_wo = q(weight * a)^T q(d_o)         d_h = act'(h) * weight * d_a
    d_x  = q(d_h) q(wi)^T         d_wi = q(x)^T q(d_h)                  d_weight = <d_a, a> + <d_o, bo>

With weights_at="input", a = act(weight h). With d = act'(weight h) d_a, then d_h = weight d and d_weight = <d, h>.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import moax
from moax.recipe import get_recipe
from support.oracle import ops
from support.oracle.formats import round_rows, round_weight


@dataclasses.dataclass(frozen=True)
class Layout:
    """What of a mesh reaches the numbers of a quantized block.

    Attributes:
      groups: token groups, dp * fsdp: a rank sorts and quantizes the rows of one group together.
      shards: token shards, dp * fsdp * ep: the shared expert quantizes the rows of one shard together.
      tp: parts of F, each quantized by itself.
    """

    groups: int = 1
    shards: int = 1
    tp: int = 1


@dataclasses.dataclass
class Result:
    """y, stats, and the gradients of x and of params."""

    y: np.ndarray
    stats: dict[str, Any]
    dx: np.ndarray
    dparams: dict[str, np.ndarray]


def block(
    x,
    params: moax.MoEParams,
    config,
    dy,
    recipe=None,
    *,
    layout=Layout(),
    d_losses=(0.0, 0.0),
    has_room=None,
):
    """Computes the block of x [T, H] for the cotangents dy [T, H] and d_losses (of the aux loss and the z loss).

    has_room [T, K]: which assignments found room; the others add nothing and have no gradient.
    """
    fields = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)}
    p = {n: np.asarray(v, np.float64) for n, v in fields.items() if v is not None}
    x, dy = ops.wide(x, dy)
    logits = x @ p["router"] + (p["logits_bias"][None] if "logits_bias" in p else 0.0)
    experts = ops.choose_experts(logits, config.router, config.top_k, p.get("router_bias"))
    weights, aux, z = ops.route_losses(logits, experts, config.router)
    has_room = np.ones(experts.shape, bool) if has_room is None else np.asarray(has_room)

    scale = p.get("expert_scale", np.ones(config.num_experts))[experts]
    r = get_recipe(recipe)
    rows = x
    d_rows = dy
    down = p.get("latent_down")
    up = p.get("latent_up")
    if down is not None:  # the experts' cotangent needs their sum in no place
        rows = _dense(x, down, r, layout)
        d_rows = _dense_grad(dy, up, r, layout)
    y, dx, grads, d_weights = _experts(
        rows,
        p,
        config,
        d_rows,
        r,
        layout,
        experts,
        scale * weights,
        has_room,
    )
    if down is not None:
        grads |= {
            "latent_up": _dense_wgrad(y, dy, r, layout),
            "latent_down": _dense_wgrad(x, dx, r, layout),
        }
        y = _dense(y, up, r, layout)
        dx = _dense_grad(dx, down, r, layout)
    if "expert_scale" in p:
        grads["expert_scale"] = np.bincount(
            experts.ravel(),
            (d_weights * weights).ravel(),
            config.num_experts,
        )
    d_weights = d_weights * scale
    d_logits = ops.route_losses_grad(logits, experts, config.router, d_weights, *d_losses)
    dx = dx + d_logits @ p["router"].T
    grads |= {"router": x.T @ d_logits}
    if "logits_bias" in p:
        grads["logits_bias"] = d_logits.sum(0)
    if "router_bias" in p:
        grads["router_bias"] = np.zeros(p["router_bias"].shape)
    if "shared_wi" in p:
        gate = ops.sigmoid(x @ p["shared_gate"])[:, None] if "shared_gate" in p else 1.0
        shared_y, shared_dx, shared = _shared(x, p, config, dy * gate, r, layout)
        y = y + gate * shared_y
        dx = dx + shared_dx
        grads = grads | shared
        if "shared_gate" in p:
            d_gate = ((dy * shared_y).sum(-1, keepdims=True) * gate * (1.0 - gate))[:, 0]
            dx = dx + d_gate[:, None] * p["shared_gate"]
            grads["shared_gate"] = x.T @ d_gate
    counts = np.bincount(experts.reshape(-1), minlength=config.num_experts)
    stats = {
        "aux_loss": aux,
        "z_loss": z,
        "tokens_per_expert": counts,
        "dropped": int((~has_room).sum()),
    }
    return Result(y, stats, dx, grads)


def _sorted(experts, has_room, num_experts: int, groups: int):
    """Returns (token, choice) of each sorted row, and (expert, its rows) of each expert in each token group.

    2 experts and 2 groups of 2 tokens: rows of group 0 for expert 0, then for expert 1, then those of group 1.
    """
    size = len(experts) // groups
    rows = []
    segments = []
    for group in range(groups):
        part = slice(group * size, (group + 1) * size)
        for e in range(num_experts):
            positions = np.argwhere((experts[part] == e) & has_room[part]) + [group * size, 0]
            start = sum(map(len, rows))
            rows.append(positions)
            segments.append((e, slice(start, start + len(positions))))
    return np.concatenate(rows), segments


def _experts(x, p, config, dy, r, layout: Layout, experts, weights, has_room):
    """Computes y, dx, gradients of the experts' parameters, and d weights [T, K]."""
    where, segments = _sorted(experts, has_room, config.num_experts, layout.groups)
    token = where[:, 0]
    weight = weights[where[:, 0], where[:, 1]]
    spans = [rows for _, rows in segments]
    tp = layout.tp
    wi = p["wi"]
    wo = p["wo"]
    bi = p.get("bi", np.zeros(wi.shape[:1] + wi.shape[2:]))
    bo = p.get("bo", np.zeros(wo.shape[::2]))
    w = {
        "wi": {over: round_weight(wi, r.w, over, 3, tp) for over in ("rows", "columns")},
        "wo": {over: round_weight(wo, r.w, over, 1, tp) for over in ("rows", "columns")},
    }
    rows = x[token]
    d_o = dy[token]
    weights_at = config.weights_at
    act = (config.activation, config.activation_limit)
    column = weight[:, None]
    before = column if weights_at == "input" else 1.0
    after = column if weights_at == "output" else 1.0
    inside = 1.0 if weights_at == "input" else column  # the weight between h and o

    def multiply(v, name, over, shape):
        out = np.zeros((len(v), *shape))
        for e, span in segments:
            matrix = w[name][over][e].reshape(w[name][over].shape[1], -1)
            out[span] = (
                v[span].reshape(-1, matrix.shape[0 if over == "rows" else 1]) @ (matrix if over == "rows" else matrix.T)
            ).reshape(-1, *shape)
        return out

    def summed(left, right, like):
        out = np.zeros(like.shape)
        for e, span in segments:
            out[e] += np.tensordot(left[span], right[span], (0, 0))
        return out

    def biases(b):
        return np.concatenate(
            [np.broadcast_to(b[e], (s.stop - s.start, *b.shape[1:])) for e, s in segments],
        )

    h = multiply(round_rows(rows, r.x, "columns", spans), "wi", "rows", wi.shape[2:]) + biases(bi)
    weighted = h * np.reshape(before, (-1, 1, 1))
    a = ops.activate(weighted, *act)
    o = multiply(round_rows(a, r.x, "columns", spans, tp), "wo", "rows", wo.shape[2:]) + biases(bo)
    y = np.zeros(x.shape)
    np.add.at(y, token, after * o)

    d_a = multiply(round_rows(d_o, r.dy, "columns", spans), "wo", "columns", wo.shape[1:2])
    d_wo = summed(
        round_rows(inside * a, r.x, "rows", spans, tp),
        round_rows(d_o, r.dy, "rows", spans),
        wo,
    )
    d_weighted = ops.activate_grad(weighted, act[0], inside * d_a, act[1])
    d_h = d_weighted * np.reshape(before, (-1, 1, 1))
    d_wi = summed(
        round_rows(rows, r.x, "rows", spans),
        round_rows(d_h, r.dy, "rows", spans, tp),
        wi,
    )
    d_rows = multiply(
        round_rows(d_h, r.dy, "columns", spans, tp),
        "wi",
        "columns",
        wi.shape[1:2],
    )
    dx = np.zeros(x.shape)
    np.add.at(dx, token, d_rows)
    d_weights = np.zeros(weights.shape)
    inner = (d_weighted * h).sum((-2, -1)) if weights_at == "input" else (d_a * a).sum(-1) + (d_o * biases(bo)).sum(-1)
    d_weights[where[:, 0], where[:, 1]] = inner
    grads = {"wi": d_wi, "wo": d_wo}
    for name, d in (("bi", d_h), ("bo", weight[:, None] * d_o)):
        if name in p:
            grads[name] = np.stack(
                [sum(d[s].sum(0) for g, s in segments if g == e) for e in range(len(wi))],
            )
    return y, dx, grads, d_weights


def _spans(x, layout: Layout):
    n = len(x) // layout.shards
    return [slice(i * n, (i + 1) * n) for i in range(layout.shards)]


def _dense(x, w, r, layout: Layout):
    return round_rows(x, r.x, "columns", _spans(x, layout)) @ round_weight(w[None], r.w, "rows", 1, 1)[0]


def _dense_grad(dy, w, r, layout: Layout):
    return round_rows(dy, r.dy, "columns", _spans(dy, layout)) @ round_weight(w[None], r.w, "columns", 1, 1)[0].T


def _dense_wgrad(x, dy, r, layout: Layout):
    spans = _spans(x, layout)
    return round_rows(x, r.x, "rows", spans).T @ round_rows(dy, r.dy, "rows", spans)


def _shared(x, p, config, dy, r, layout: Layout):
    """Computes y, dx and gradients of the shared expert, whose weights are one matrix each."""
    wi = p["shared_wi"]
    wo = p["shared_wo"]
    tp = layout.tp
    spans = _spans(x, layout)
    by = {
        over: (
            round_weight(wi[None], r.w, over, 3, tp)[0].reshape(len(wi), -1),
            round_weight(wo[None], r.w, over, 1, tp)[0],
        )
        for over in ("rows", "columns")
    }
    h = (round_rows(x, r.x, "columns", spans) @ by["rows"][0]).reshape(-1, *wi.shape[1:])
    a = ops.activate(h, config.activation, config.activation_limit)
    y = round_rows(a, r.x, "columns", spans, tp) @ by["rows"][1]
    d_a = round_rows(dy, r.dy, "columns", spans) @ by["columns"][1].T
    d_wo = round_rows(a, r.x, "rows", spans, tp).T @ round_rows(dy, r.dy, "rows", spans)
    d_h = ops.activate_grad(h, config.activation, d_a, config.activation_limit)
    d_wi = np.tensordot(
        round_rows(x, r.x, "rows", spans),
        round_rows(d_h, r.dy, "rows", spans, tp),
        (0, 0),
    )
    dx = round_rows(d_h, r.dy, "columns", spans, tp).reshape(len(x), -1) @ by["columns"][0].T
    return y, dx, {"shared_wi": d_wi, "shared_wo": d_wo}
