"""The memory of one device: parameters, the arrays that forward keeps for backward, and those of a running layer."""

from __future__ import annotations

import dataclasses
import math

from moax.estimate.block import Shard
from moax.kernels import implementation, takes_fp8
from moax.ops.permutation import capacity_rows, sorted_rows
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
        are gathered one at a time; a compiler that gathers ahead needs more. With chunks: both weights of the experts,
        and the float32 sums of their gradients.
      exchange: the buffers of the rows that the exchange moves in one part.
      workspace: the rows that live between the products of the backward pass of one part. With chunks also the arrays
        that the forward pass of the part keeps for its backward pass.
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
    c, item, chunked = s.config, s.item, s.options.chunks > 1
    count = sum(map(math.prod, s.shapes.values()))
    shared = s.shapes["shared_wo"][0] if c.shared_d_ff else 0
    rows = _rows(s)
    router = s.tokens * (c.num_experts * 4 + c.top_k * 4)
    inputs = s.tokens * c.d_model * item
    part = _plan_bytes(s, rows) + _kept_bytes(s, rows)
    layer = inputs + router + s.tokens * shared * (c.gates + 1) * item
    if chunked:  # A block in chunks keeps the ids of the experts; without chunks they are in the plan.
        layer += s.tokens * c.top_k * 4
    else:
        layer += part
    return Memory(
        weights=layers * count * s.param_item,
        gradients=layers * count * s.param_item,
        optimizer=layers * count * optimizer_bytes,
        activations=layers * inputs + layer if s.options.remat else layers * layer,
        gathered=_gathered(s),
        exchange=_exchange_bytes(s),
        workspace=_workspace(s, rows) + (part if chunked else 0),
        together=chunked,
    )


def _rows(s: Shard) -> int:
    """Returns the number N of expert-sorted rows of one part."""
    c, recipe = s.config, s.options.recipe
    align = implementation(s.options.kernels).align_rows(recipe)
    capacity = capacity_rows(s.part, c.top_k, c.capacity_factor)
    return sorted_rows(s.received, c.top_k, s.whole("wo")[0], align, capacity)


def _kept_bytes(s: Shard, rows: int) -> int:
    """Returns the bytes that forward keeps: the rows as wgrad takes them, and the input of the activation."""
    hidden = s.whole("wo")[1]
    return rows * s.config.gates * hidden * s.item + _rows_bytes(rows, s.config.d_model, s.options.recipe.x, s.item)


def _rows_bytes(rows: int, width: int, format: Format | None, item: int) -> int:
    """Returns the bytes of rows [rows, width] as wgrad takes them: values, and a scale for each block of rows."""
    if format is None:
        return rows * width * item
    scales = 1 if format.block is None else -(-rows // format.block) * width
    return rows * width + scales * (1 if format.scale == "e8m0" else 4)


def _plan_bytes(s: Shard, rows: int) -> int:
    """Returns the bytes of `Plan`, of the ids and weights of the received rows, and of the plan of the exchange."""
    numbers = rows + s.whole("wo")[0] + 1 + 2 * s.received * s.config.top_k
    return 4 * (numbers + s.transport.plan_entries(*s.load))


def _gathered(s: Shard) -> int:
    """Returns the bytes of `Memory.gathered`."""
    options = s.options
    cast = options.dtype != options.param_dtype

    def taken(name: str) -> int:
        copied = options.recipe.w is not None or cast or any(s.layouts[name].gather)
        return math.prod(s.whole(name)) * (1 if options.recipe.w else s.item) * copied

    def unscattered(name: str) -> int:
        return math.prod(s.whole(name)) * s.item * (cast or any(s.layouts[name].gather))

    largest = max(taken(name) + unscattered(name) for name in s.layouts)
    if options.chunks == 1:
        return largest
    sums = sum(math.prod(s.whole(name)) * 4 for name in ("wi", "wo"))
    return max(largest, taken("wi") * (2 if s.gathered_apart else 1) + taken("wo") + sums)


def _exchange_bytes(s: Shard) -> int:
    """Returns the bytes of the rows that the exchange moves in a part, and of the ids and weights of their experts."""
    if not s.roles.ep:
        return 0
    return s.transport.buffer_rows(*s.load) * s.config.d_model * s.item + s.received * 8 * s.config.top_k


def _workspace(s: Shard, rows: int) -> int:
    """Returns the bytes of the widest moment of a part's backward pass.

    In bf16 the arrays are do, da and a; dh takes the place of h. In FP8 they are dh by rows and by columns, after do
    has been used. Dequantized operands live one at a time, and are not the widest.
    """
    width, hidden = s.config.d_model, s.whole("wo")[1]
    if takes_fp8(s.options.kernels, s.options.recipe):
        return rows * (2 * width + (s.item + 1) * hidden)
    return rows * (width + 2 * hidden) * s.item
