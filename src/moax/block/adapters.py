"""The low-rank products of adapters on one device: y[n] = (x[n] a[e]) b[e] for row n of expert e, and its gradients.

Rows are sorted by expert and not quantized. A rank is small, so the products are those of the implementation that runs
everywhere, whichever one computes the products of the experts.
"""

from __future__ import annotations

from jaxtyping import Array, Float

from moax.block.spec import BlockSpec
from moax.groups import Groups
from moax.kernels import DEFAULT, implementation
from moax.recipe import FULL


def low_rank(
    static: BlockSpec, x: Float[Array, "N K"], a: Float[Array, "E K r"], b: Float[Array, "E r *C"], groups: Groups
) -> Float[Array, "N C"]:
    """Returns (x a) b, a partial sum where mesh axes split K."""
    local, dtype = implementation(DEFAULT), static.dtype
    return local.matmul(local.matmul(x, a, groups, dtype), b.reshape(*b.shape[:2], -1), groups, dtype)


def low_rank_gradients(
    static: BlockSpec,
    x: Float[Array, "N K"],
    a: Float[Array, "E K r"],
    b: Float[Array, "E r *C"],
    dy: Float[Array, "N C"],
    groups: Groups,
) -> tuple[Float[Array, "N K"], Float[Array, "E K r"], Float[Array, "E r *C"]]:
    """Returns dx, d_a and d_b: (dy b^T) a^T, x^T (dy b^T) and (x a)^T dy."""
    local, dtype, flat = implementation(DEFAULT), static.dtype, b.reshape(*b.shape[:2], -1)
    inner, d_inner = local.matmul(x, a, groups, dtype), local.matmul(dy, flat, groups, dtype, transpose=True)
    d_b = local.wgrad(inner, dy, groups, dtype).reshape(b.shape)
    return local.matmul(d_inner, a, groups, dtype, transpose=True), local.wgrad(x, d_inner, groups, dtype), d_b


def plain_hidden(
    static: BlockSpec, h: Float[Array, "N G F"], groups: Groups, weights: Float[Array, " N"] | None
) -> Float[Array, "N F"]:
    """Returns act(h), times the weight of each row where there are weights, in the dtype of h."""
    return implementation(DEFAULT).activate(h, static.act, FULL, groups, weights=weights, amax_over=())
