"""The pytrees that travel between the ops, with the shape and dtype of each field."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.export
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from moax.recipe import Format, Recipe

# What a step does once for the weights of its microbatches: it quantizes them, or it also gathers them over fsdp.
Kept = Literal["kept", "gathered"]
KEPT: tuple[Kept, ...] = get_args(Kept)
# Classes of static fields, which `_to_json` writes as objects with their names.
STATIC_CLASSES: dict[str, type] = {"Format": Format, "Recipe": Recipe}


def exportable[T](cls: type[T], static: Sequence[str] = ()) -> type[T]:
    """Registers a pytree class with the static fields `static` for `jax.export`, and returns the class.

    A serialized function may then take and return values of the class, for example `moax.MoEParams`. The program holds
    static fields as JSON.
    """

    def write(values: Any) -> bytes:
        if not static:
            return b""
        return json.dumps(dict(zip(static, values, strict=True)), default=_to_json).encode()

    def read(data: bytes) -> tuple[Any, ...]:
        if not static:
            return ()
        fields = json.loads(data, object_hook=_from_json)
        values = (fields[name] for name in static)
        return tuple(tuple(value) if isinstance(value, list) else value for value in values)

    return jax.export.register_pytree_node_serialization(
        cls,
        serialized_name=f"moax.{cls.__name__}",
        serialize_auxdata=write,
        deserialize_auxdata=read,
    )


def _to_json(value: Any) -> Any:
    """Returns a recipe or a format as its fields and the name of its class, and a number of NumPy as one of Python."""
    if type(value) in STATIC_CLASSES.values():
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"class": type(value).__name__, **fields}
    if isinstance(value, np.generic):
        return value.item()
    raise ValueError(f"{value!r} is static; a static field of a program must be a number, a name or a moax.Recipe")


def _from_json(fields: dict[str, Any]) -> Any:
    """Returns the recipe or format that `_to_json` wrote; other fields are returned as they are."""
    if "class" not in fields:
        return fields
    return STATIC_CLASSES[fields.pop("class")](**fields)


def pytree(*static: str):
    """Makes a class a frozen dataclass and a pytree, whose children are its fields but those of `static`."""

    @typing.dataclass_transform(frozen_default=True)
    def register[T](cls: type[T]) -> type[T]:
        frozen: Any = dataclasses.dataclass(frozen=True)(cls)
        data = [f.name for f in dataclasses.fields(frozen) if f.name not in static]
        jax.tree_util.register_dataclass(frozen, data_fields=data, meta_fields=list(static))
        return exportable(frozen, static)

    return register


@pytree()
class Routing:
    """The experts and weights of each token, and the balance losses.

    Attributes:
      experts: [T, K] i32, the experts of each token, in [0, E); E means no expert, as padding has.
      weights: [T, K] f32, the weight of each of these experts.
      aux_loss: [] f32, the load-balance loss over the whole mesh, times its coefficient.
      z_loss: [] f32, the z-loss over the whole mesh, times its coefficient.
      tokens_per_expert: [E] i32, the assignments to each expert over the whole mesh.
      histogram: [E, 1000] i32, over the whole mesh, for `moax.update_router_bias`; None unless
        `RouterConfig.histogram` asks for it.
    """

    experts: Int[Array, "*T K"]
    weights: Float[Array, "*T K"]
    aux_loss: Float[Array, ""]
    z_loss: Float[Array, ""]
    tokens_per_expert: Int[Array, " E"]
    histogram: Int[Array, "E 1000"] | None = None


@pytree("transport", "num_tokens")
class Received:
    """What a rank received from its expert-parallel peers.

    Attributes:
      rows: [R, H], in the dtype of the tokens. A row whose experts are all "none" may hold anything.
      experts: [R, K] i32, local expert ids; the number of local experts is the id of every expert of another rank.
      weights: [R, K] f32, 0 where the expert belongs to another rank.
      count: [1] i32, how many rows have an expert of this rank.
      dropped: [1] i32, how many assignments (token, expert) of this rank's own tokens found no slot.
      slots: the way of the rows, by which `combine` returns them. all_gather: None. all_to_all: [ranks * slots] i32,
        the token that this rank sent in each slot, `num_tokens` for an empty slot.
      transport: the name of the transport.
      num_tokens: T, tokens of a shard.
    """

    rows: Float[Array, "R H"]
    experts: Int[Array, "R K"]
    weights: Float[Array, "R K"]
    count: Int[Array, " 1"]
    dropped: Int[Array, " 1"]
    slots: Int[Array, " C"] | None
    transport: str
    num_tokens: int


@pytree()
class Plan:
    """The places of received rows after they are sorted by expert; `moax.ops.permutation` has an example.

    Attributes:
      gather_idx: [N] i32, the received row of each sorted row; R for padding.
      scatter_idx: [R, K] i32, the sorted row of each assignment; N for a dropped assignment and for an expert of
        another rank.
      group_sizes: [E_local] i32, the rows of each expert, without padding.
      dropped: [1] i32, the number of assignments beyond the capacity.
    """

    gather_idx: Int[Array, " N"]
    scatter_idx: Int[Array, "R K"]
    group_sizes: Int[Array, " E"]
    dropped: Int[Array, " 1"]


@pytree("dtype", "block")
class QArray:
    """x ~ data * scale, with one scale for each block.

    Attributes:
      data: u8, the shape of x: the bits of values of `dtype`.
      scale: f32, or u8 exponents whose value is 2**(scale - 127). It has as many dims as x, and ceil(n / block[i])
        entries along dim i of n elements: a dim of 300 in blocks of 128 has 3 scales.
      dtype: "e4m3" or "e5m2".
      block: the block length of each dim.
    """

    data: UInt8[Array, "..."]
    scale: Float[Array, "..."] | UInt8[Array, "..."]
    dtype: str
    block: tuple[int, ...]


class QShard[Leaf](NamedTuple):
    """The shard of a weight [E, K, *C], quantized for one matmul, as it crosses the mesh.

    Attributes:
      data: u8, the bits of the values, in the dims of the weight; (E, *C, K) where the implementation turns it.
      scale: f32, or u8 exponents as in `QArray`: the scales of the blocks, in the same order of dims.
    """

    data: Leaf
    scale: Leaf


jax.export.register_namedtuple_serialization(QShard, serialized_name="moax.QShard")


@pytree("recipe", "kernels", "gathered", "tp")
class QuantizedParams[Leaf]:
    """The weights of the experts as the matmuls of a block take them; see `moax.quantize_params`.

    `Leaf` is an array, or the PartitionSpec of one.

    Attributes:
      wi, wo: each weight twice: for fprop, and for dgrad. A weight that the recipe does not quantize is one array in
        the dtype of matmuls.
      recipe: the recipe that quantized them.
      kernels: the name of the implementation whose form they have.
      gathered: whether each device holds what it multiplies by, split by ep and tp alone; otherwise they are shards.
      tp: the number of devices over which tp splits F. The blocks of each of these parts are counted from its corner,
        so that a call with another number would read other scales.
    """

    wi: tuple[QShard[Leaf] | Leaf, ...]
    wo: tuple[QShard[Leaf] | Leaf, ...]
    recipe: Recipe
    kernels: str
    gathered: bool = False
    tp: int = 1
