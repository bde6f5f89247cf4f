"""What one block puts on the wires in a training step: the transfers of `moax.moe`, foretold.

The exchange says what it moves (`moax.ops.exchange`). This file says what the weights, the gradients and the statistics
move.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from moax.estimate.block import Shard
from moax.mesh.axes import Names
from moax.ops import exchange
from moax.recipe import Contracted, Format

Direction = Literal["forward", "recompute", "backward"]
DIRECTIONS = ("forward", "recompute", "backward")
WIRES = ("weight gather", "gradient scatter", "gradient reduce", "dispatch", "combine", "tp reduce", "statistics")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One array that is moved in a layer's step.

    Attributes:
      what: which of `WIRES` it is. direction: the pass it belongs to.
      kind, dtype, shape, axes, group_size: as of `moax.inspect.Collective`. A kernel that writes to peers is a "put".
      bytes: what one device sends, each time.
      times: how often in a step: once for each part of a block in chunks.
    """

    what: str
    direction: Direction
    kind: str
    dtype: str
    shape: tuple[int, ...]
    axes: Names
    group_size: int
    bytes: int
    times: int = 1


def transfers(s: Shard) -> tuple[Transfer, ...]:
    """What one layer moves in a step, forward and backward.

    With remat the forward pass is done again before backward, but for what nothing of backward reads: the gather of wo,
    the second product, the combine. With chunks each part does this by itself, from weights that were gathered once,
    and the router and the shared expert do not.

    The amax of recipes that have one scale a tensor is left out: a few bytes each.
    """
    again = _forward(s, "recompute") if s.again else ()
    return (*_forward(s, "forward"), *again, *_backward(s))


def _forward(s: Shard, direction: Direction) -> Iterator[Transfer]:
    c, r, options, full = s.config, s.roles, s.options, direction == "forward"
    around = full or options.remat  # the router and the shared expert run
    for name in s.layouts:
        shared = name.startswith("shared")
        needed = full or (name.endswith("wi") and (shared or options.chunks == 1 or s.gathered_apart))
        if needed and (around or not shared):
            yield from gathers(s, name, options.recipe.w, "rows", direction)
    yield from _exchanged(s, "dispatch", direction, exchange.dispatch_cost)
    if full:
        yield from _exchanged(s, "combine", direction, exchange.combine_cost)
        for _ in range(2 if c.shared_d_ff else 1):
            yield from _move(s, "tp reduce", direction, "all-reduce", options.dtype, (s.tokens, c.d_model), r.tp)
        yield from _move(s, "statistics", direction, "all-reduce", "float32", (c.num_experts,), r.tokens)
        yield from _move(s, "statistics", direction, "all-reduce", "float32", (1,), r.tokens)
    if around:
        yield from _move(s, "statistics", direction, "all-reduce", "int32", (c.num_experts,), r.tokens)


def _backward(s: Shard) -> Iterator[Transfer]:
    c, r, options = s.config, s.roles, s.options
    for name in s.layouts:
        yield from gathers(s, name, options.recipe.w, "columns", "backward")
        yield from _scatters(s, name)
    yield from _exchanged(s, "dispatch", "backward", exchange.combine_backward_cost)
    yield from _exchanged(s, "combine", "backward", exchange.dispatch_backward_cost)
    for _ in range(2 if c.shared_d_ff else 1):
        yield from _move(s, "tp reduce", "backward", "all-reduce", options.dtype, (s.tokens, c.d_model), r.tp)
    yield from _move(s, "tp reduce", "backward", "all-reduce", "float32", (s.tokens, c.top_k), r.tp)
    reduced = {"router": r.tokens, "logits_bias": r.tokens, "bi": r.dp + r.fsdp, "bo": r.dp + r.fsdp + r.tp}
    for name, names in reduced.items():
        if name in s.shapes:
            dtype = options.param_dtype if name == "router" else "float32"
            yield from _move(s, "gradient reduce", "backward", "all-reduce", dtype, s.shapes[name], names)


def gathers(
    s: Shard, name: str, format: Format | None, contracted: Contracted, direction: Direction
) -> Iterator[Transfer]:
    """The gathers of a weight's shard: of its values, and of their scales where it has a format.

    Args:
      s: the block. name: of the weight. format: of its values, None for the dtype of the activations.
      contracted: the dim of the weight that the product contracts. direction: the pass.
    """
    shape = s.weight(name)
    arrays = [(shape, s.options.dtype if format is None else "uint8")]
    if format is not None:
        block = format.weight_block(len(shape), contracted)
        scale = tuple(1 if b is None else -(-n // b) for n, b in zip(shape, block, strict=True))
        arrays.append((scale, "uint8" if format.scale == "e8m0" else "float32"))
    for local, dtype in arrays:
        sizes = list(local)
        for dim, names in enumerate(s.layouts[name].gather):
            sizes[dim] *= s.roles.size(names)
            yield from _move(s, "weight gather", direction, "all-gather", dtype, sizes, names)


def _scatters(s: Shard, name: str) -> Iterator[Transfer]:
    gather, sizes, options = s.layouts[name].gather, list(s.whole(name)), s.options
    for dim, names in reversed(tuple(enumerate(gather))):
        sizes[dim] //= s.roles.size(names)
        yield from _move(s, "gradient scatter", "backward", "reduce-scatter", options.dtype, sizes, names)
    shared = name.startswith("shared")
    done = {n for names in gather for n in names}
    left = tuple(n for n in s.roles.dp + s.roles.fsdp + (s.roles.ep if shared else ()) if n not in done)
    dtype = options.param_dtype if shared else options.dtype
    yield from _move(s, "gradient reduce", "backward", "all-reduce", dtype, sizes, left)


def _exchanged(
    s: Shard, what: str, direction: Direction, cost: Callable[..., list[exchange.Transfer]]
) -> Iterator[Transfer]:
    """What one function of the exchange moves, once for each part."""
    if s.roles.ep:
        for moved in cost(s.exchange, s.part, s.config.top_k, s.config.d_model, s.options.dtype):
            yield _named(moved, what, direction, s.options.chunks)


def _move(
    s: Shard, what: str, direction: Direction, kind: str, dtype: str, shape: Sequence[int], names: Names
) -> Iterator[Transfer]:
    """One collective over `names`; none where they have one device."""
    if names:
        yield _named(exchange.collective(kind, dtype, shape, s.roles, names), what, direction)


def _named(moved: exchange.Transfer, what: str, direction: Direction, times: int = 1) -> Transfer:
    return Transfer(what, direction, **dataclasses.asdict(moved), times=times)
