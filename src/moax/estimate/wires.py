"""The arrays that one block of `moax.moe` moves between devices in a training step.

`moax.ops.exchange` knows the transfers of the exchange. This module knows those of the weights, the gradients and the
statistics.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from moax.block import passes
from moax.estimate.block import Shard
from moax.kernels.scales import cuts_blocks, weight_block
from moax.mesh.axes import Names
from moax.ops import exchange
from moax.recipe import Contracted, Format

Direction = Literal["forward", "recompute", "backward"]
DIRECTIONS = ("forward", "recompute", "backward")
WIRES = (
    "weight gather",
    "scale maxima",
    "gradient scatter",
    "gradient reduce",
    "dispatch",
    "combine",
    "tp reduce",
    "statistics",
)


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One array that a layer moves in a step.

    Attributes:
      what: one of `WIRES`.
      direction: the pass that moves the array.
      kind, dtype, shape, axes, group_size: see `moax.inspect.Collective`. A kernel that writes to peers is a "put".
      bytes: the bytes that one device sends.
    """

    what: str
    direction: Direction
    kind: str
    dtype: str
    shape: tuple[int, ...]
    axes: Names
    group_size: int
    bytes: int


def transfers(s: Shard) -> tuple[Transfer, ...]:
    """Returns the transfers of one layer in a step, forward and backward.

    With remat, backward recomputes the forward pass, without the steps whose results it does not read: the gather of
    wo, the second product, and the combine. Where the sorted rows are not saved, backward receives the rows again. All
    transfers are those of one pass.

    A recipe of one scale a tensor also reduces the maxima, a few bytes, which are left out.
    """
    again = _forward(s, "recompute") if s.options.remat else ()
    return (*_forward(s, "forward"), *again, *_backward(s))


def _forward(s: Shard, direction: Direction) -> Iterator[Transfer]:
    """Yields the transfers of the forward pass, or of its recomputation in backward."""
    c, r, options, full = s.config, s.roles, s.options, direction == "forward"
    for name in s.layouts:
        if full or name.endswith("wi"):
            yield from gathers(s, name, options.recipe_of(name).w, "rows", direction)
    yield from _exchanged(s, "dispatch", direction, exchange.dispatch_cost)
    if full:
        yield from _exchanged(s, "combine", direction, exchange.combine_cost)
        for _ in range(2 if c.shared_d_ff else 1):
            yield from _move(s, "tp reduce", direction, "all-reduce", options.dtype, (s.tokens, c.d_model), r.tp)
        sums = {c.num_experts: c.router.aux_loss, 1: c.router.z_loss}  # a loss without a coefficient sums nothing
        for size in (size for size, coefficient in sums.items() if coefficient):
            yield from _move(s, "statistics", direction, "all-reduce", "float32", (size,), r.tokens)
    wi, wo = (s.layouts[name] for name in ("wi", "wo"))
    together = passes.find_together(s.block, (wi, wo)) if s.block.repeats else ()
    yield from _move(s, "statistics", direction, "all-reduce", "int32", (3,), together)  # where the loop begins
    yield from _move(s, "statistics", direction, "all-reduce", "int32", (c.num_experts,), r.tokens)


def _backward(s: Shard) -> Iterator[Transfer]:
    """Yields the transfers of the backward pass, without the recomputation."""
    c, r, options = s.config, s.roles, s.options
    for name in s.layouts:
        yield from gathers(s, name, options.recipe_of(name).w, "columns", "backward")
        yield from _scatters(s, name)
    if not s.block.keeps_rows:
        yield from _exchanged(s, "dispatch", "recompute", exchange.combine_backward_cost)
    yield from _exchanged(s, "dispatch", "backward", exchange.combine_backward_cost)
    yield from _exchanged(s, "combine", "backward", exchange.dispatch_backward_cost)
    for _ in range(2 if c.shared_d_ff else 1):
        yield from _move(s, "tp reduce", "backward", "all-reduce", options.dtype, (s.tokens, c.d_model), r.tp)
    yield from _move(s, "tp reduce", "backward", "all-reduce", "float32", (s.tokens, c.top_k), r.tp)
    reduced = {"router": r.tokens, "logits_bias": r.tokens, "bi": r.same_experts, "bo": r.same_experts + r.tp}
    for name, names in reduced.items():
        if name in s.shapes:
            dtype = options.param_dtype if name == "router" else "float32"
            yield from _move(s, "gradient reduce", "backward", "all-reduce", dtype, s.shapes[name], names)


def gathers(
    s: Shard, name: str, format: Format | None, contracted: Contracted, direction: Direction
) -> Iterator[Transfer]:
    """Yields the gathers of a weight: those of its values, and those of its scales where the weight has a format.

    Args:
      s: the share of a device in the block.
      name: the name of the weight.
      format: the format of its values; None gathers them in the dtype of the activations.
      contracted: the dim of the weight that the product contracts.
      direction: the pass of the product.
    """
    shape, gather = s.weight(name), s.layouts[name].gather
    arrays = [(shape, gather, s.options.dtype if format is None else "uint8")]
    if format is not None:
        scale, along = _scales(s, name, format, contracted)
        arrays.append((scale, along, "uint8" if format.scale == "e8m0" else "float32"))
        if format.block is not None and cuts_blocks(shape, gather, weight_block(format, contracted)):
            names = tuple(name for axes in gather[1:] for name in axes)  # shards agree on the maxima of their blocks
            yield from _move(s, "scale maxima", direction, "all-reduce", "float32", scale, names)
    for local, along, dtype in arrays:
        sizes = list(local)
        for dim, names in enumerate(along):
            sizes[dim] *= s.roles.size(names)
            yield from _move(s, "weight gather", direction, "all-gather", dtype, sizes, names)


def _scales(s: Shard, name: str, format: Format, contracted: Contracted) -> tuple[tuple[int, ...], tuple[Names, ...]]:
    """Returns the shape of the scales of a weight's shard, and the axes that gather each of their dims.

    A shard that ends inside a block has the scales of the whole matrix.
    """
    shape, gather = s.weight(name), s.layouts[name].gather
    if format.block is None:
        return (shape[0], 1, 1), (gather[0], (), ())
    rows, columns = weight_block(format, contracted)
    if cuts_blocks(shape, gather, (rows, columns)):
        _, width, *rest = s.whole(name)
        return (shape[0], -(-width // rows), -(-math.prod(rest) // columns)), (gather[0], (), ())
    if any(gather[2:]):
        return (shape[0], -(-shape[1] // rows), *shape[2:-1], shape[-1] // columns), gather
    return (shape[0], -(-shape[1] // rows), -(-math.prod(shape[2:]) // columns)), (gather[0], gather[1], ())


def _scatters(s: Shard, name: str) -> Iterator[Transfer]:
    """Yields the reduce-scatters of the gradient of the weight `name`, and its all-reduce over the other axes."""
    gather, sizes, options = s.layouts[name].gather, list(s.whole(name)), s.options
    scattered = tuple(n for names in gather for n in names)
    in_pieces = options.grad_reduce == "bfloat16_sum_float32"
    for dim, names in reversed(tuple(enumerate(gather))):
        sizes[dim] //= s.roles.size(names)
        if not in_pieces:
            yield from _move(s, "gradient scatter", "backward", "reduce-scatter", options.grad_dtype, sizes, names)
    if in_pieces:
        pieces = (s.roles.size(scattered), *sizes)
        yield from _move(s, "gradient scatter", "backward", "all-to-all", "uint16", pieces, scattered)
    shared = name.startswith("shared")
    left = tuple(n for n in (s.roles.tokens if shared else s.roles.same_experts) if n not in scattered)
    dtype = options.param_dtype if shared and options.grad_reduce is None else options.grad_dtype
    yield from _move(s, "gradient reduce", "backward", "all-reduce", dtype, sizes, left)


def _exchanged(
    s: Shard, what: str, direction: Direction, cost: Callable[..., list[exchange.Transfer]]
) -> Iterator[Transfer]:
    """Yields the transfers that `cost`, a function of the exchange, lists."""
    if s.roles.ep:
        for moved in cost(s.exchange, s.tokens, s.config.top_k, s.config.d_model, s.options.dtype):
            yield _named(moved, what, direction)


def _move(
    s: Shard, what: str, direction: Direction, kind: str, dtype: str, shape: Sequence[int], names: Names
) -> Iterator[Transfer]:
    """Yields one collective over the mesh axes `names`; () has one device, and yields none."""
    if names:
        yield _named(exchange.collective(kind, dtype, shape, s.roles, names), what, direction)


def _named(moved: exchange.Transfer, what: str, direction: Direction) -> Transfer:
    """Returns a transfer of the exchange as a `Transfer` of this module."""
    return Transfer(what, direction, **dataclasses.asdict(moved))
