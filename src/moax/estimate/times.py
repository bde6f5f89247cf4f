"""The times of the stages of a block.

A stage on a device takes max(flops / rate of products, bytes / rate of device memory). A transfer takes bytes / rate of
its wire. The load is balanced, no stages overlap, and a launch costs nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Literal

from moax.estimate.block import Shard
from moax.estimate.hardware import Hardware
from moax.estimate.wires import Transfer
from moax.kernels import takes_fp8

Bound = Literal["compute", "memory", "nvlink", "network"]


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of one layer's step on one device.

    Attributes:
      name: the name of the stage, such as "product wi".
      direction: `forward`, `backward` or `recompute`.
      seconds: the time by the larger of its bounds.
      bound: the larger bound.
      flops: floating-point operations of its products.
      memory_bytes: bytes that it reads and writes in device memory.
      wire_bytes: bytes that the device sends.
    """

    name: str
    direction: str
    seconds: float
    bound: Bound
    flops: float = 0.0
    memory_bytes: float = 0.0
    wire_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Wires:
    """The wires of a mesh: which collectives leave a host, and how long they take.

    Attributes:
      on: the GPUs of the mesh.
      sizes: (axis, size) pairs of the mesh, in the order of the devices.
    """

    on: Hardware
    sizes: tuple[tuple[str, int], ...]

    def stages(self, moved: Iterable[Transfer], merge: bool = False) -> Iterator[Stage]:
        """Yields one stage for each kind of transfer (`Transfer.what`) and direction.

        Args:
          moved: the transfers of one layer.
          merge: yield one stage for each kind of transfer, all directions together.
        """
        groups: dict[tuple[str, str], list[Transfer]] = {}
        for t in moved:
            groups.setdefault((t.what, "backward" if merge else t.direction), []).append(t)
        for (what, direction), members in groups.items():
            times = [self.seconds(t) for t in members]
            slowest = max(times)[1]
            sent = sum(t.bytes for t in members)
            yield Stage(what, direction, sum(seconds for seconds, _ in times), slowest, wire_bytes=sent)

    def seconds(self, t: Transfer) -> tuple[float, Bound]:
        """Returns the seconds of a transfer, and what bounds them.

        A ring runs at the slower of two rates: that of NVLink, and the sum of the NICs of its GPUs on one host. An
        all-to-all sends the part for other hosts through the network, and the rest over NVLink.
        """
        near, local = self.on.nvlink[t.kind], _on_host(self.sizes, t.axes, self.on.host)
        if local == t.group_size:
            return t.bytes / near, "nvlink"
        if t.kind != "all-to-all":
            far = local * self.on.network
            return t.bytes / min(near, far), "nvlink" if near < far else "network"
        peers, remote = t.group_size - 1, t.group_size - local
        inside, outside = t.bytes * (local - 1) / peers / near, t.bytes * remote / peers / self.on.network
        return max(inside, outside), "nvlink" if inside > outside else "network"


@functools.cache
def _on_host(sizes: tuple[tuple[str, int], ...], axes: tuple[str, ...], host: int) -> int:
    """Returns how many devices of a group along `axes` are on one host of `host` devices.

    Example: sizes (("fsdp", 4), ("ep", 4)) and hosts of 8 devices: a group along fsdp is the devices 0, 4, 8, 12, of
    which 2 are on the first host.
    """
    strides, stride = [], 1
    for name, size in reversed(sizes):
        strides += [(stride, size)] if name in axes else []
        stride *= size
    places = itertools.product(*(range(0, step * size, step) for step, size in strides))
    return sum(sum(place) < host for place in places)


def work(s: Shard, on: Hardware) -> Iterator[Stage]:
    """Yields the stages that one device computes of one layer at a balanced load.

    Args:
      s: the share of the device in the block.
      on: the GPU.
    """
    c, item, options = s.config, s.item, s.options
    products, both = on.products[options.kernels], ("wi", "wo")
    fp8 = {w: takes_fp8(options.kernels, options.recipe_of(w)) for w in both}
    rates = {w: products.fp8 if fp8[w] and products.fp8 is not None else products.bf16 for w in both}
    dense = {w: rates[w] if fp8[w] else on.dense for w in both}
    byte = {w: 1 if fp8[w] else item for w in both}
    rows, received = s.tokens * c.top_k, s.received
    experts, hidden = s.whole("wo")[:2]
    shared = s.shapes["shared_wo"][0] if c.shared_d_ff else 0

    def stage(name, direction, moved, flops=0.0, rate=1.0):
        """Returns a stage that moves `moved` bytes of device memory and does `flops` at `rate` FLOP/s."""
        times = (flops / rate, moved / on.hbm)
        return Stage(name, direction, max(times), "compute" if times[0] > times[1] else "memory", flops, moved)

    def product(name, direction, kind, width, out):
        """Returns the product of all rows with matrices [width, out]; kind 0 is forward, 1 dgrad, 2 wgrad.

        The name ends in that of the weight.
        """
        w = name[-2:]
        moved = byte[w] * (rows * width + experts * width * out) + item * rows * out
        if kind == 2:
            moved = byte[w] * rows * (width + out) + item * experts * width * out
        return stage(name, direction, moved, 2.0 * rows * width * out, rates[w][kind])

    def shared_products(direction, kind):
        """Returns both products of the shared expert; `kind` as of `product`."""
        one = 2.0 * s.tokens * c.d_model * shared  # wi has `gates` of these, and wo one
        flops, seconds = one * (c.gates + 1), one * (c.gates / dense["wi"][kind] + 1 / dense["wo"][kind])
        moved = s.tokens * (c.d_model + 3 * shared) * item
        return stage("shared expert", direction, moved, flops, flops / seconds)

    def enter(direction, form, w, kept, made=2):
        """Yields the stages that sort rows by expert and quantize them.

        Where the product with the weight `w` is FP8 and scales are of blocks, one read sorts the rows and quantizes
        them by rows and by columns. Products may also gather rows without a format. Otherwise, and where `kept` says
        that a bias needs the plain rows too, a stage of its own sorts them. Rows are dequantized where products are not
        FP8. `made` counts the directions.
        """
        width, fused = c.d_model, form is not None and fp8[w] and form.block is not None
        if kept or not (fused or s.block.gathers_rows(form)):
            yield stage("permute", direction, 2 * rows * width * item)
        if form is not None:
            moved = item + made * (1 if fp8[w] else 2 + item)
            yield stage("permute, quantize" if fused else "quantize rows", direction, rows * width * moved)

    route = 2.0 * s.tokens * c.d_model * c.num_experts * 3
    quantized = {name: options.recipe_of(name).w is not None for name in s.layouts}
    taken = sum(
        math.prod(s.shapes[name]) * (s.param_item + (1 if q else item))
        for name, q in quantized.items()
        if q or item != s.param_item
    )
    take = "quantize weights" if any(quantized.values()) else "cast weights"
    for direction in ("forward", "recompute") if options.remat else ("forward",):
        yield stage("route", direction, s.tokens * (c.d_model * item + 12 * c.num_experts), route, on.dense[0])
        yield from enter(direction, options.recipe.wi.x, "wi", False, 2 if s.block.keeps_rows else 1)
        if taken:
            yield stage(take, direction, taken)
        yield product("product wi", direction, 0, c.d_model, c.gates * hidden)
        if direction == "forward":
            yield stage("activate", direction, rows * hidden * (c.gates * item + byte["wo"]))
            yield product("product wo", direction, 0, hidden, c.d_model)
            yield stage("unpermute", direction, (rows + received) * c.d_model * item)
        if shared:
            yield shared_products(direction, 0)
    if not s.block.keeps_rows:
        yield from enter("recompute", options.recipe.wi.x, "wi", False, 1)
    yield from enter("backward", options.recipe.wo.dy, "wo", c.use_bias)
    if taken:
        yield stage(take, "backward", taken)
    yield product("dgrad wo", "backward", 1, c.d_model, hidden)
    made = (2 if fp8["wo"] else item) + c.gates * (2 if fp8["wi"] else item)
    yield stage("activate", "backward", rows * hidden * (item * (c.gates + 1) + made))
    yield product("wgrad wo", "backward", 2, hidden, c.d_model)
    yield product("dgrad wi", "backward", 1, c.gates * hidden, c.d_model)
    yield product("wgrad wi", "backward", 2, c.d_model, c.gates * hidden)
    yield stage("unpermute", "backward", (rows + received) * c.d_model * item)
    if shared:
        yield shared_products("backward", 1)
        yield shared_products("backward", 2)
    moved = s.tokens * (2 * c.d_model * item + 12 * c.num_experts)
    yield stage("route", "backward", moved, 2 * route, on.dense[1])
