"""The weights of the experts, and what biases and adapters add to the steps of the chain.

    h = rows wi + bi + (rows wi_a) wi_b        o = a wo + bo + (a wo_a) wo_b

A usual block has neither biases nor adapters: each function of this file that it calls returns None to it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moax.block.plan import BlockPlan
from moax.kernels import DEFAULT, implementation
from moax.kernels.groups import Groups, scale_rows
from moax.mesh.collectives import mask_to_first_rank


class Weights[Leaf](NamedTuple):
    """The weights of the experts: wi [E, H, G, F], wo [E, F, H], and the biases bi [E, G, F] and bo [E, H] or None.

    The other fields come from `moax.lora.Adapters`, or are None. Gradients of frozen wi and wo are None.
    """

    wi: Leaf
    wo: Leaf
    bi: Leaf | None = None
    bo: Leaf | None = None
    wi_a: Any = None
    wi_b: Any = None
    wo_a: Any = None
    wo_b: Any = None

    @property
    def has_up_terms(self) -> bool:
        """Whether h has more terms than rows wi."""
        return self.bi is not None or self.wi_a is not None

    @property
    def has_down_terms(self) -> bool:
        """Whether o has more terms than a wo."""
        return self.bo is not None or self.wo_a is not None


class TermGrads(NamedTuple):
    """The gradients of the small terms of a step, None where the step has no such term.

    Attributes:
      d_input: the gradient of the step's input by the adapter.
      d_bias, d_low_a, d_low_b: the gradients of the bias and of both matrices of the adapter.
      d_row_weights: [N] f32, the part of the gradient of each row's routing weight that comes from the bias.
    """

    d_input: Array | None = None
    d_bias: Array | None = None
    d_low_a: Array | None = None
    d_low_b: Array | None = None
    d_row_weights: Array | None = None


def find_down_bias(p: BlockPlan, w: Weights[Array]) -> Float[Array, "E H"] | None:
    """Returns bo on the first rank of tp, and 0 on the others: o is a partial sum."""
    return None if w.bo is None else mask_to_first_rank(w.bo, p.axes.tp)


def grad_up(p: BlockPlan, rows: Any, d_h: Any, w: Weights[Array], groups: Groups) -> TermGrads:
    """Returns the gradients of bi and of wi's adapter, whose matmul reads the unquantized `rows`."""
    grads = TermGrads()
    if w.wi_a is not None:
        grads = low_rank_grad(p, rows, w.wi_a, w.wi_b, d_h, groups)
    if w.bi is not None:
        grads = grads._replace(d_bias=implementation(p.kernels).bias_grad(d_h, groups))
    return grads


def grad_down(
    p: BlockPlan,
    d_o: Any,
    a: Any,
    row_weights: Float[Array, " N"],
    w: Weights[Array],
    groups: Groups,
):
    """Returns the gradients of bo and of wo's adapter, whose matmul reads the unquantized a."""
    grads = TermGrads()
    with jax.named_scope("expert_down"):
        if w.wo_a is not None:
            grads = low_rank_grad(p, a, w.wo_a, w.wo_b, d_o, groups)
        bo = find_down_bias(p, w)
        if bo is not None:
            bias = bo.astype(p.dtype)[groups.index]
            d_row_weights = jnp.sum(d_o.astype(jnp.float32) * bias.astype(jnp.float32), axis=-1)
            d_o = mask_to_first_rank(scale_rows(d_o, row_weights, groups), p.axes.tp)
            d_bias = implementation(p.kernels).bias_grad(d_o, groups)
            grads = grads._replace(d_bias=d_bias, d_row_weights=d_row_weights)
    return grads


def low_rank(p: BlockPlan, x: Float[Array, "N K"], a: Array, b: Array, groups: Groups) -> Float[Array, "N C"]:
    """Returns (x a) b of an adapter, a partial sum where mesh axes split K; a rank is small, so XLA multiplies."""
    local = implementation(DEFAULT)
    low = local.matmul(x, a, groups, p.dtype)
    return local.matmul(low, b.reshape(*b.shape[:2], -1), groups, p.dtype)


def low_rank_grad(
    p: BlockPlan,
    x: Any,
    a: Array,
    b: Array,
    dy: Any,
    groups: Groups,
) -> TermGrads:
    """Returns the gradients of x, a and b of an adapter: (dy b^T) a^T, x^T (dy b^T) and (x a)^T dy."""
    local = implementation(DEFAULT)
    matrices = b.reshape(*b.shape[:2], -1)
    dy = dy.reshape(dy.shape[0], -1)
    low = local.matmul(x, a, groups, p.dtype)
    d_low = local.matmul(dy, matrices, groups, p.dtype, transpose=True)
    d_b = local.wgrad(low, dy, groups, p.dtype).reshape(b.shape)
    dx = local.matmul(d_low, a, groups, p.dtype, transpose=True)
    d_a = local.wgrad(x, d_low, groups, p.dtype)
    return TermGrads(d_input=dx, d_low_a=d_a, d_low_b=d_b)


def add(total: Array | None, term: Array | None) -> Array | None:
    """Returns the sum of gradients; without a sum so far the term itself."""
    if total is None or term is None:
        return term
    return total + term.astype(total.dtype)
