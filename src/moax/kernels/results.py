"""The results of functions of `protocol.Kernels` that return more than two arrays."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from moax.kernels import Operand


class Permutation(NamedTuple):
    """Where the received rows go; N is the number of sorted rows.

    Attributes:
      gather_idx, scatter_idx, group_sizes: see `moax.types.Plan`.
      weights: [N] f32, the weight of each sorted row, 0 in padding; None without weights of the assignments.
    """

    gather_idx: Int[Array, " N"]
    scatter_idx: Int[Array, "R K"]
    group_sizes: Int[Array, " G"]
    weights: Float[Array, " N"] | None


class ActivationGrads(NamedTuple):
    """The backward of a = act(h) for d_a, which is not weighted yet.

    Attributes:
      a: act(h) times the weights.
      d_h: the gradient of h for d_a times the weights.
      inner: <d_a, act(h)> of each row, the gradient of its weight.
    """

    a: Float[Array, "N F"]
    d_h: Float[Array, "N G F"]
    inner: Float[Array, " N"]


class QuantizedActivationGrads(NamedTuple):
    """`ActivationGrads` as operands of matmuls.

    Attributes:
      a: for wgrad of wo.
      d_h: for dgrad.
      d_h_wgrad: for wgrad of wi.
      inner: see `ActivationGrads`.
    """

    a: Operand
    d_h: Operand
    d_h_wgrad: Operand
    inner: Float[Array, " N"]
