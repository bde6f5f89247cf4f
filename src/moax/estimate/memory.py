"""The memory of one device: parameters, what forward leaves to backward, and what a layer needs while it runs."""

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
      weights, gradients: in the dtype of the parameters.
      optimizer: the state of the optimizer.
      activations: what forward leaves to backward; with remat the inputs of all layers, and the rest of one layer.
      gathered: the largest weight of a layer as products take it, with its gradient before that is scattered. One
        weight at a time: a compiler that gathers ahead needs more. With chunks, both weights of the experts, and the
        float32 sums of their gradients.
      exchange: buffers of rows on their way, of one part.
      workspace: rows alive between the products of a backward pass, of one part. With chunks also what the part's
        forward leaves to its backward.
      together: gathered and workspace are alive at the same time.
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
        """The sum. Of `gathered` and `workspace` the larger counts, unless they are alive together."""
        lasting = self.weights + self.gradients + self.optimizer + self.activations + self.exchange
        passing = (self.gathered, self.workspace)
        return lasting + (sum(passing) if self.together else max(passing))


def measure_memory(s: Shard, layers: int, optimizer_bytes: int) -> Memory:
    """The Memory of `layers` blocks. optimizer_bytes: of the optimizer's state, for each parameter."""
    c, item, chunked = s.config, s.item, s.options.chunks > 1
    count = sum(map(math.prod, s.shapes.values()))
    shared = s.shapes["shared_wo"][0] if c.shared_d_ff else 0
    rows = _rows(s)
    router = s.tokens * (c.num_experts * 4 + c.top_k * 4)
    inputs = s.tokens * c.d_model * item
    part = _plan_bytes(s, rows) + _kept_bytes(s, rows)
    layer = inputs + router + s.tokens * shared * (c.gates + 1) * item
    if chunked:  # the ids of the experts too: without chunks they are in the plan
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
    """N: the expert-sorted rows of one part."""
    c, recipe = s.config, s.options.recipe
    align = implementation(s.options.kernels).align_rows(recipe)
    capacity = capacity_rows(s.part, c.top_k, c.capacity_factor)
    return sorted_rows(s.received, c.top_k, s.whole("wo")[0], align, capacity)


def _kept_bytes(s: Shard, rows: int) -> int:
    """The rows as wgrad takes them, and the input of the activation."""
    hidden = s.whole("wo")[1]
    return rows * s.config.gates * hidden * s.item + _rows_bytes(rows, s.config.d_model, s.options.recipe.x, s.item)


def _rows_bytes(rows: int, width: int, format: Format | None, item: int) -> int:
    """Rows as wgrad takes them: values, and a scale for each block of rows."""
    if format is None:
        return rows * width * item
    scales = 1 if format.block is None else -(-rows // format.block) * width
    return rows * width + scales * (1 if format.scale == "e8m0" else 4)


def _plan_bytes(s: Shard, rows: int) -> int:
    """Where rows lie: `Plan`, the ids and weights of the rows received, and the plan of the exchange."""
    numbers = rows + s.whole("wo")[0] + 1 + 2 * s.received * s.config.top_k
    return 4 * (numbers + s.transport.plan_entries(*s.load))


def _gathered(s: Shard) -> int:
    """The weights as products take them, and their gradients before those are scattered."""
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
    """Rows on their way, with the ids and weights of their experts."""
    if not s.roles.ep:
        return 0
    return s.transport.buffer_rows(*s.load) * s.config.d_model * s.item + s.received * 8 * s.config.top_k


def _workspace(s: Shard, rows: int) -> int:
    """d o, d a and a in bf16, d h in the place of h; or d h by rows and by columns in FP8, once d o is not needed any
    more. Dequantized operands of products that are not FP8 live one at a time, and are not the widest."""
    width, hidden = s.config.d_model, s.whole("wo")[1]
    if takes_fp8(s.options.kernels, s.options.recipe):
        return rows * (2 * width + (s.item + 1) * hidden)
    return rows * (width + 2 * hidden) * s.item
