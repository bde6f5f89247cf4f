"""Each op and its gradient in float64 NumPy. A function named `*_grad` takes the cotangents of its op's results."""

from __future__ import annotations

import numpy as np

from moax.config import RouterConfig


def wide(*arrays):
    """Returns each array in float64."""
    return [np.asarray(a, np.float64) for a in arrays]


def sigmoid(z):
    return 1.0 / (1.0 + np.exp(-z))


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# Activation: h [..., G, F] -> a [..., F].

ROOT = np.sqrt(2.0 / np.pi)


def gelu(z):
    return 0.5 * z * (1.0 + np.tanh(ROOT * (z + 0.044715 * z**3)))


def gelu_grad(z):
    t = np.tanh(ROOT * (z + 0.044715 * z**3))
    return 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t**2) * ROOT * (1.0 + 3 * 0.044715 * z**2)


def silu_grad(z, slope=1.0):
    """Computes the derivative of z * sigmoid(slope * z)."""
    s = sigmoid(slope * z)
    return s + slope * z * s * (1.0 - s)


def limit_of(activation: str, limit):
    """Returns the limit of gate and up; infinity where there is none."""
    return limit or (7.0 if activation == "swiglu_oai" else np.inf)


def activate(h, activation: str, limit=None):
    """Computes act(gate) * up, or act(up)."""
    (h,) = wide(h)
    limit = limit_of(activation, limit)
    gate = np.minimum(h[..., 0, :], limit)
    up = np.clip(h[..., -1, :], -limit, limit)
    if activation == "swiglu":
        return gate * sigmoid(gate) * up
    if activation == "geglu":
        return gelu(gate) * up
    if activation == "swiglu_oai":
        return gate * sigmoid(1.702 * gate) * (up + 1.0)
    return {"silu": lambda: up * sigmoid(up), "gelu": lambda: gelu(up), "relu2": lambda: np.maximum(up, 0) ** 2}[
        activation
    ]()


def activate_grad(h, activation: str, d_a, limit=None):
    """Computes d h [..., G, F] from d a [..., F]; a value beyond the limit has no gradient."""
    h, d_a = wide(h, d_a)
    limit = limit_of(activation, limit)
    gate = np.minimum(h[..., 0, :], limit)
    up = np.clip(h[..., -1, :], -limit, limit)
    if activation == "swiglu":
        parts = [d_a * up * silu_grad(gate), d_a * gate * sigmoid(gate)]
    elif activation == "geglu":
        parts = [d_a * up * gelu_grad(gate), d_a * gelu(gate)]
    elif activation == "swiglu_oai":
        parts = [d_a * silu_grad(gate, 1.702) * (up + 1.0), d_a * gate * sigmoid(1.702 * gate)]
    else:
        one = {"silu": silu_grad, "gelu": gelu_grad, "relu2": lambda z: 2 * np.maximum(z, 0)}[activation]
        parts = [d_a * one(up)]
    if len(parts) == 2:
        parts = [parts[0] * (h[..., 0, :] < limit), parts[1] * (np.abs(h[..., 1, :]) < limit)]
    return np.stack(parts, axis=-2)


# Route: logits [T, E] -> experts [T, K], weights [T, K], aux loss, z loss.


def score(logits, config: RouterConfig):
    if config.score == "sqrt_softplus":
        return np.sqrt(np.logaddexp(0.0, logits))
    return softmax(logits) if config.score == "softmax" else sigmoid(logits)


def score_grad(s, config: RouterConfig, d_s):
    """Computes d logits from d s, where s = score(logits)."""
    if config.score == "softmax":
        return s * (d_s - (d_s * s).sum(-1, keepdims=True))
    # s^2 = log(1 + exp(l)), so that 1 - exp(-s^2) is sigmoid(l)
    if config.score == "sqrt_softplus":
        return d_s * -np.expm1(-(s**2)) / (2.0 * s)
    return d_s * s * (1.0 - s)


def choose_experts(logits, config: RouterConfig, top_k: int, bias=None):
    """Returns the experts [T, K] of each token, the best first; of equal scores the lower expert comes first."""
    (logits,) = wide(logits)
    selection = score(logits, config) if config.order == "score_then_topk" else logits
    if bias is not None:
        selection = selection + np.asarray(bias, np.float64)[None]
    if config.num_groups > 1:
        tokens, experts = selection.shape
        by_group = -np.sort(-selection.reshape(tokens, config.num_groups, -1), axis=-1)
        best = {"max": 1, "top2": 2, "sum_topk": top_k // config.top_groups}[config.group_score]
        order = np.argsort(-by_group[..., :best].sum(-1), axis=-1, kind="stable")
        rank = np.argsort(order, axis=-1, kind="stable")
        eligible = np.repeat(rank < config.top_groups, experts // config.num_groups, axis=-1)
        selection = np.where(eligible, selection, -np.inf)
    return np.argsort(-selection, axis=-1, kind="stable")[:, :top_k]


def _raw_weights(logits, experts, config: RouterConfig):
    chosen = np.take_along_axis(logits, experts, axis=1)
    if config.order == "topk_then_score":
        return score(chosen, config)
    return np.take_along_axis(score(logits, config), experts, axis=1)


def _counts(experts, num_experts):
    return np.bincount(experts.reshape(-1), minlength=num_experts)


def route_losses(logits, experts, config: RouterConfig):
    """Returns (weights [T, K], aux loss, z loss) of experts that are chosen."""
    (logits,) = wide(logits)
    tokens, top_k = experts.shape
    num_experts = logits.shape[1]
    weights = _raw_weights(logits, experts, config)
    if config.normalize and top_k > 1:
        weights = weights / weights.sum(1, keepdims=True)
    shares = score(logits, config)
    shares = shares / shares.sum(1, keepdims=True)
    counts = _counts(experts, num_experts)
    aux = config.aux_loss * num_experts / (top_k * tokens**2) * np.sum(shares.sum(0) * counts)
    return config.scale * weights, aux, config.z_loss * np.mean(logsumexp(logits) ** 2)


def sequence_loss(logits, config: RouterConfig, top_k: int, rows):
    """Computes DeepSeek-V3's loss of a sequence: c sum_e f_e P_e, f_e = E / (K T) tokens[e], P_e = mean of the
    shares; the mean over the sequences `rows` [T] of tokens."""
    shares = softmax(logits)
    experts = choose_experts(logits, config, top_k)
    losses = []
    for row in np.unique(rows):
        mine = rows == row
        factor = logits.shape[1] / (top_k * mine.sum())
        losses.append(
            factor * np.sum(_counts(experts[mine], logits.shape[1]) * shares[mine].mean(0)),
        )
    return config.sequence_aux_loss * np.mean(losses)


def logsumexp(logits):
    top = logits.max(1)
    return top + np.log(np.exp(logits - top[:, None]).sum(1))


def route_losses_grad(logits, experts, config: RouterConfig, d_weights, d_aux=0.0, d_z=0.0):
    """Computes d logits [T, E] of the cotangents of weights, aux loss and z loss."""
    logits, d_weights, d_aux, d_z = wide(logits, d_weights, d_aux, d_z)
    tokens, top_k = experts.shape
    num_experts = logits.shape[1]
    raw = _raw_weights(logits, experts, config)
    d_raw = config.scale * d_weights
    if config.normalize and top_k > 1:
        total = raw.sum(1, keepdims=True)
        d_raw = (d_raw - (d_raw * raw).sum(1, keepdims=True) / total) / total
    d_logits = np.zeros(logits.shape)
    s = score(logits, config)
    if config.order == "topk_then_score":
        np.put_along_axis(d_logits, experts, score_grad(raw, config, d_raw), axis=1)
    else:
        d_s = np.zeros(logits.shape)
        np.put_along_axis(d_s, experts, d_raw, axis=1)
        d_logits = score_grad(s, config, d_s)

    total = s.sum(1, keepdims=True)
    factor = config.aux_loss * num_experts / (top_k * tokens**2)
    d_shares = np.broadcast_to(d_aux * factor * _counts(experts, num_experts), logits.shape)
    d_s = (d_shares - (d_shares * s).sum(1, keepdims=True) / total) / total
    d_logits = d_logits + score_grad(s, config, d_s)
    return d_logits + d_z * config.z_loss * 2.0 / tokens * logsumexp(logits)[:, None] * softmax(logits)


# Permute and unpermute, by position [R, K]: the sorted row of each assignment, N and above where it has none.


def one_hot(position, rows: int):
    """Returns [R, K, N]: 1 where assignment (r, k) has the sorted row n, else 0."""
    return (np.asarray(position)[:, :, None] == np.arange(rows)).astype(np.float64)


def permute(x, position, rows: int):
    """Computes rows [N, H] from x [R, H]."""
    return np.einsum("rkn,rh->nh", one_hot(position, rows), np.asarray(x, np.float64))


def permute_grad(position, d_rows):
    """Computes d x [R, H] from d rows [N, H]."""
    return np.einsum("rkn,nh->rh", one_hot(position, len(d_rows)), np.asarray(d_rows, np.float64))


def unpermute(rows, position, weights):
    """Computes y [R, H] from rows [N, H] and weights [R, K]."""
    rows, weights = wide(rows, weights)
    return np.einsum("rkn,rk,nh->rh", one_hot(position, len(rows)), weights, rows)


def unpermute_grad(rows, position, weights, dy):
    """Computes d rows [N, H] and d weights [R, K] from dy [R, H]."""
    rows, weights, dy = wide(rows, weights, dy)
    which = one_hot(position, len(rows))
    return np.einsum("rkn,rk,rh->nh", which, weights, dy), np.einsum(
        "rkn,rh,nh->rk",
        which,
        dy,
        rows,
    )


# Products.


def dense_vjp(x, w, b, dy):
    """Computes y of x [..., K], w [K, *C], b [*C]; then d x, d w, d b of dy [..., *C]."""
    x, w, b, dy = wide(x, w, b, dy)
    columns = tuple(range(1, w.ndim))
    leading = tuple(range(x.ndim - 1))
    of_dy = tuple(range(x.ndim - 1, dy.ndim))
    y = np.tensordot(x, w, 1) + b
    return y, (
        np.tensordot(dy, w, (of_dy, columns)),
        np.tensordot(x, dy, (leading, leading)),
        dy.sum(leading),
    )


def first_rows(sizes, align: int):
    """Returns the first row of each group, as `moax.kernels.groups` says, and how many rows hold all of them.

    sizes (3, 0, 5) with align 4: first rows 0, 4, 4, and 12 rows in all.
    """
    starts = np.concatenate([[0], np.cumsum([-(-s // align) * align for s in sizes])])
    return starts[:-1], int(starts[-1])


def grouped_matmul_vjp(x, w, sizes, bias, dy, align: int, shards=1, ranks=1, quantized=None):
    """Computes y, d x, d w, d bias of rows [M, K] and weights [E, K, *C], group by group, shard by shard.

    ranks: rank r of `ranks` has the r-th part of the experts, and shard s is on rank s % ranks. quantized: the six
    operands of `formats.fake_operands` in place of x, w and dy.
    """
    x, w, dy = wide(x, w, dy)
    xf, wf, xw, wd, dd, dw_ = quantized or (x, w, x, w, dy, dy)
    y = np.zeros(dy.shape)
    dx = np.zeros(x.shape)
    dw = np.zeros(w.shape)
    d_bias = np.zeros(w.shape[:1] + w.shape[2:])
    columns = tuple(range(1, dy.ndim))
    local = len(x) // shards
    experts = len(w) // ranks
    for shard in range(shards):
        mine = sizes[shard * experts :][:experts]
        for g, (start, n) in enumerate(zip(first_rows(mine, align)[0], mine, strict=True)):
            e = shard % ranks * experts + g
            span = slice(shard * local + start, shard * local + start + n)
            y[span] = np.tensordot(xf[span], wf[e], 1) + (0 if bias is None else np.asarray(bias, np.float64)[e])
            dx[span] = np.tensordot(dd[span], wd[e], (columns, columns))
            dw[e] += np.tensordot(xw[span], dw_[span], (0, 0))
            d_bias[e] += dy[span].sum(0)
    return y, dx, dw, d_bias
