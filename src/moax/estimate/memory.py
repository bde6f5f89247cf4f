"""The memory of one device: parameters, the arrays that forward keeps for backward, and those of a running layer."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from moax.estimate.block import Shard
from moax.kernels import takes_fp8
from moax.ops.exchange import ExchangeSpec
from moax.recipe import Format


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, all layers together.

    Attributes:
      weights: the parameters, in their dtype.
      gradients: their gradients, in the same dtype.
      optimizer: the state of the optimizer.
      activations: the arrays that forward keeps for backward. With remat: the inputs of all layers, and the other
        arrays of one layer.
      gathered: the largest weight of a layer as products take it, and its gradient before the reduce-scatter. Weights
        are gathered one at a time; a compiler that gathers ahead needs more. Where a loop of passes needs more than the
        first pass: both weights of the experts and their gradients, to which a pass adds in place.
      exchange: the buffers of the rows that the exchange moves in one pass.
      workspace: the rows that live between the products of the backward pass. Where a loop of passes needs more than
        the first pass: those of a pass of the loop, the arrays that it computes again, and the gradient of the first
        pass that waits for the loop. A program holds the memory of its loop in every step.
      together: whether `gathered` and `workspace` live at the same time.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int
    exchange: int
    workspace: int
    together: bool = False

    @property
    def total(self) -> int:
        """The sum of all; only the larger of `gathered` and `workspace` counts, unless both live at the same time."""
        lasting = self.weights + self.gradients + self.optimizer + self.activations + self.exchange
        passing = (self.gathered, self.workspace)
        return lasting + (sum(passing) if self.together else max(passing))


def measure_memory(s: Shard, layers: int, optimizer_bytes: int) -> Memory:
    """Returns the memory of `layers` blocks.

    Args:
      s: the share of a device in one block.
      layers: number of blocks.
      optimizer_bytes: bytes of the optimizer's state for each parameter.
    """
    c, item = s.config, s.item
    count = sum(map(math.prod, s.shapes.values()))
    shared = s.shapes["shared_wo"][0] if c.shared_d_ff else 0
    router = s.tokens * 4 * (c.num_experts + 2 * c.top_k)
    inputs = s.tokens * c.d_model * item
    layer = inputs + router + s.tokens * shared * (c.gates + 1) * item + kept_bytes(s)
    if s.block.needs_inputs:
        layer += s.tokens * c.top_k * 4  # the ids of the experts
    exchange, gathered, workspace = _exchange_bytes(s, s.exchange), _gathered(s), _workspace(s, s.sorted)
    loop = _exchange_bytes(s, s.block.exchange_more), _gathered_by_loop(s), _workspace_of_loop(s)
    together = s.block.repeats and sum(loop) > exchange + max(gathered, workspace)
    exchange, gathered, workspace = loop if together else (exchange, gathered, workspace)
    return Memory(
        weights=layers * count * s.param_item,
        gradients=layers * count * s.param_item,
        optimizer=layers * count * optimizer_bytes,
        activations=layers * inputs + layer if s.options.remat else layers * layer,
        gathered=gathered,
        exchange=exchange,
        workspace=workspace,
        together=together,
    )


def kept_bytes(s: Shard) -> int:
    """Returns the bytes that the experts of one layer leave to backward: the input of the activation, the plan, and the
    rows as wgrad takes them where they are kept.
    """
    rows = _sorted_bytes(s, s.sorted, s.received) if s.block.keeps_rows else 0
    return _hidden_bytes(s, s.sorted) + _plan_bytes(s) + rows


def _hidden_bytes(s: Shard, rows: int) -> int:
    """Returns the bytes of the input of the activation of so many rows."""
    return rows * s.config.gates * s.whole("wo")[1] * s.item


def _sorted_bytes(s: Shard, rows: int, received: int) -> int:
    """Returns the bytes of so many sorted rows as wgrad takes them: of the rows that arrived, where it gathers them."""
    rows = received if s.block.gathers_rows(s.options.recipe.wi.x) else rows
    return _rows_bytes(rows, s.config.d_model, s.options.recipe.wi.x, s.item)


def _rows_bytes(rows: int, width: int, format: Format | None, item: int) -> int:
    """Returns the bytes of rows [rows, width] as wgrad takes them: values, and a scale for each block of rows."""
    if format is None:
        return rows * width * item
    scales = rows if format.by_group else 1 if format.block is None else -(-rows // format.block) * width
    return rows * width + scales * (1 if format.scale == "e8m0" else 4)


def _plan_bytes(s: Shard) -> int:
    """Returns the bytes of `Plan`, of the weights of the sorted rows, and of the plan of the exchange."""
    numbers = 2 * s.sorted + s.whole("wo")[0] + 1 + s.received * s.config.top_k
    return 4 * (numbers + s.transport.plan_entries(*s.load))


def _gathered(s: Shard) -> int:
    """Returns the bytes of `Memory.gathered` in the first pass."""
    cast = s.options.grad_dtype != s.options.param_dtype

    def unscattered(name: str) -> int:
        return math.prod(s.whole(name)) * _gradient_item(s) * (cast or any(s.layouts[name].gather))

    return max(_taken(s, name) + unscattered(name) for name in s.layouts)


def _gathered_by_loop(s: Shard) -> int:
    """Returns the bytes of `Memory.gathered` in a pass of the loop."""
    gradients = [math.prod(s.whole(name)) * _gradient_item(s) for name in ("wi", "wo")]
    return _taken(s, "wi") * (2 if s.gathered_apart else 1) + _taken(s, "wo") + sum(gradients)


def _gradient_item(s: Shard) -> int:
    """Returns the bytes of an element of the gradient of a weight before it is summed."""
    return np.dtype(s.options.grad_dtype).itemsize


def _taken(s: Shard, name: str) -> int:
    """Returns the bytes of the copy of a weight that products take; 0 where they take the weight itself."""
    quantized = s.options.recipe_of(name).w is not None
    copied = quantized or s.options.dtype != s.options.param_dtype or any(s.layouts[name].gather)
    return math.prod(s.whole(name)) * (1 if quantized else s.item) * copied


def _exchange_bytes(s: Shard, exchange: ExchangeSpec) -> int:
    """Returns the bytes of the rows that a pass with this spec moves, and of the ids and weights of their experts."""
    if not s.roles.ep:
        return 0
    load = s.tokens, s.config.top_k, exchange.ranks, exchange.slots
    received = s.transport.received_rows(s.tokens, exchange.ranks, exchange.slots)
    return s.transport.buffer_rows(*load) * s.config.d_model * s.item + received * 8 * s.config.top_k


def _workspace(s: Shard, rows: int) -> int:
    """Returns the bytes of the widest moment of backward, of a pass of so many rows.

    In bf16 the arrays are do, da and a; dh takes the place of h. Where products gather do, they are da and a, or dx by
    rows. In FP8 they are dh by rows and by columns, after do has been used. Dequantized operands live one at a time,
    and are not the widest.
    """
    width, hidden = s.config.d_model, s.whole("wo")[1]
    if all(takes_fp8(s.options.kernels, recipe) for recipe in s.options.recipe.both):
        return rows * (2 * width + (s.item + 1) * hidden)
    gathers = s.block.gathers_rows(s.options.recipe.wo.dy)
    return rows * (max(width, 2 * hidden) if gathers else width + 2 * hidden) * s.item


def _workspace_of_loop(s: Shard) -> int:
    """Returns the bytes of `Memory.workspace` in a pass of the loop."""
    if not s.block.repeats:
        return 0
    again = _hidden_bytes(s, s.sorted_more) + _sorted_bytes(s, s.sorted_more, s.received_more)
    width = s.config.gates * s.whole("wo")[1]
    return again + _workspace(s, s.sorted_more) + _rows_bytes(s.sorted, width, s.options.recipe.wi.dy, s.item)
