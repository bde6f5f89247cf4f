"""The nouns: pytrees that travel between the ops, each field with shape and dtype."""

from __future__ import annotations

import dataclasses
import typing
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from moax.config import MoEConfig


def pytree(*static: str):
    """Registers a frozen dataclass as a pytree whose fields are children, but for the `static` ones."""

    @typing.dataclass_transform(frozen_default=True)
    def register[T](cls: type[T]) -> type[T]:
        frozen: Any = dataclasses.dataclass(frozen=True)(cls)
        data = [f.name for f in dataclasses.fields(frozen) if f.name not in static]
        return jax.tree_util.register_dataclass(frozen, data_fields=data, meta_fields=list(static))

    return register


@pytree()
class Routing:
    """Where tokens go. experts: [T, K] i32. weights: [T, K] f32. aux_loss, z_loss: [] f32, coefficients included, over
    the whole mesh. tokens_per_expert: [E] i32 over the whole mesh."""

    experts: Int[Array, "T K"]
    weights: Float[Array, "T K"]
    aux_loss: Float[Array, ""]
    z_loss: Float[Array, ""]
    tokens_per_expert: Int[Array, " E"]


class SendPlan(NamedTuple):
    """Which rows a rank writes into the memory of its peers, C = T min(K, ranks) at most, and where their sums return.

    Attributes:
      token: [C] i32: which token each row is that is sent, in order of the ranks they go to, then of tokens; void past
        the rows that are sent.
      position: [T, ranks] i32: which of the rows sent is the token's to each rank; C for none.
      places: [2, 2, ranks] i32: of the rows sent to each rank, how much further on they lie there, and where they end;
        and the same of the rows received from each rank, on their way back.
    """

    token: Int[Array, " C"]
    position: Int[Array, "T ranks"]
    places: Int[Array, "2 2 ranks"]

    @property
    def received(self) -> Int[Array, ""]:
        """How many rows this rank receives."""
        return self.places[1, 1, -1]


@pytree("transport", "num_tokens")
class Received:
    """What a rank got from its expert-parallel peers.

    Attributes:
      rows: [R, H], like the tokens in dtype. Rows whose experts are all "none" may hold anything.
      experts: [R, K] i32, local expert ids; one past the last = none of this rank's.
      weights: [R, K] f32; 0 where the expert is none of this rank's.
      count: [1] i32, rows that have an expert here.
      dropped: [1] i32, assignments (token, expert) of this rank's own tokens that found no slot.
      slots: [ranks * slots a pair] i32: which of its tokens this rank sent in each slot, `num_tokens` for an empty
        one; None where every token goes to every rank.
      transport: how it travelled. num_tokens: tokens of a shard, T.
    """

    rows: Float[Array, "R H"]
    experts: Int[Array, "R K"]
    weights: Float[Array, "R K"]
    count: Int[Array, " 1"]
    dropped: Int[Array, " 1"]
    slots: Int[Array, " C"] | SendPlan | None
    transport: Literal["all_gather", "all_to_all", "one_sided"]
    num_tokens: int


@pytree()
class Plan:
    """Where received rows lie once sorted by expert.

    Attributes:
      source: [N] i32, the received row of each sorted row; R for padding.
      position: [R, K] i32, the sorted row of each assignment; N for none and for dropped ones.
      group_sizes: [E_local] i32, rows of each expert, without the padding between groups.
      dropped: [1] i32, assignments that exceeded the capacity.
    """

    source: Int[Array, " N"]
    position: Int[Array, "R K"]
    group_sizes: Int[Array, " E"]
    dropped: Int[Array, " 1"]


@pytree("dtype", "block", "pieces")
class QArray:
    """x ~ dequantize(data) * scale, a scale a block.

    Attributes:
      data: u8, the shape of x: the bits of `dtype`.
      scale: rank of x; f32, or u8 exponents (value 2**(scale - 127)). Dim i has `pieces[i] * ceil(n / block[i])`
        entries where n = x.shape[i] // pieces[i]: each piece (a shard that was quantized by itself) may end in an edge
        block of its own.
      dtype: "e4m3" or "e5m2".
      block: block length of each dim; None: one block holds the dim.
      pieces: how many shards each dim was gathered from.
    """

    data: UInt8[Array, ...]
    scale: Float[Array, ...] | UInt8[Array, ...]
    dtype: str
    block: tuple[int | None, ...]
    pieces: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def ndim(self) -> int:
        return self.data.ndim


@pytree()
class MoEStats:
    """What a training loop watches; over the whole mesh.

    Attributes:
      aux_loss, z_loss: [] f32, coefficients included: add them to the loss.
      tokens_per_expert: [E] i32, assignments the router made.
      dropped: [] i32, assignments that did not fit.
    """

    aux_loss: Float[Array, ""]
    z_loss: Float[Array, ""]
    tokens_per_expert: Int[Array, " E"]
    dropped: Int[Array, ""]


def check_tokens(x: Any, config: MoEConfig) -> None:
    """Raises ValueError unless x is [..., H] of a floating dtype with at least two dims."""
    if x.ndim < 2 or x.shape[-1] != config.d_model:
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [..., d_model={config.d_model}], at least 2-D")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x has dtype {x.dtype}; it must be floating point")
