"""How long the stages of a block take: the larger of flops and bytes of device memory over their rates, and bytes sent
over the rate of the wire they take. The load is balanced, nothing overlaps, a launch costs nothing."""

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
      name; direction: `forward`, `backward` or `recompute`.
      seconds: of the larger of its bounds. bound: which that is.
      flops: of its products. memory_bytes: read and written on the device. wire_bytes: sent.
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
    """The wires of a mesh: which collectives leave a host, and how long they take."""

    on: Hardware
    sizes: tuple[tuple[str, int], ...]

    def stages(self, moved: Iterable[Transfer], merge: bool = False) -> Iterator[Stage]:
        """One stage for each thing moved and direction; `merge`: for each thing."""
        groups: dict[tuple[str, str], list[Transfer]] = {}
        for t in moved:
            groups.setdefault((t.what, "backward" if merge else t.direction), []).append(t)
        for (what, direction), of in groups.items():
            times = [self.seconds(t) for t in of]
            slowest = max(times)[1]
            sent = sum(t.bytes * t.times for t in of)
            yield Stage(what, direction, sum(seconds for seconds, _ in times), slowest, wire_bytes=sent)

    def seconds(self, t: Transfer) -> tuple[float, Bound]:
        """The seconds of all times that it is moved, and what bounds them."""
        once, bound = self._once(t)
        return once * t.times, bound

    def _once(self, t: Transfer) -> tuple[float, Bound]:
        """A ring runs at NVLink's rate, or at that of the NICs of its GPUs of a host where those together are slower;
        of an all-to-all the part for other hosts takes the network."""
        near, here = self.on.nvlink[t.kind], _on_host(self.sizes, t.axes, self.on.host)
        if here == t.group_size:
            return t.bytes / near, "nvlink"
        if t.kind != "all-to-all":
            far = here * self.on.network
            return t.bytes / min(near, far), "nvlink" if near < far else "network"
        peers = t.group_size - 1
        inside, outside = t.bytes * (here - 1) / peers / near, t.bytes * (t.group_size - here) / peers / self.on.network
        return max(inside, outside), "nvlink" if inside > outside else "network"


@functools.cache
def _on_host(sizes: tuple[tuple[str, int], ...], axes: tuple[str, ...], host: int) -> int:
    """How many of the first device's group along `axes` are among the first `host` devices."""
    strides, stride = [], 1
    for name, size in reversed(sizes):
        strides += [(stride, size)] if name in axes else []
        stride *= size
    places = itertools.product(*(range(0, step * size, step) for step, size in strides))
    return sum(sum(place) < host for place in places)


def work(s: Shard, on: Hardware) -> Iterator[Stage]:
    """What one device computes of one layer, the load balanced.

    Args:
      s: the block.
      on: the GPU.
    """
    c, item, options = s.config, s.item, s.options
    products = on.products[options.kernels]
    fp8 = takes_fp8(options.kernels, options.recipe)
    rates = products.fp8 if fp8 and products.fp8 is not None else products.bf16
    dense = rates if fp8 else on.dense
    byte = 1 if fp8 else item
    rows, received = s.tokens * c.top_k, s.received * options.chunks
    experts, hidden = s.whole("wo")[:2]
    shared = s.shapes["shared_wo"][0] if c.shared_d_ff else 0
    local = sum(math.prod(s.shapes[n]) for n in s.layouts)

    def stage(name, direction, moved, flops=0.0, rate=1.0):
        times = (flops / rate, moved / on.hbm)
        return Stage(name, direction, max(times), "compute" if times[0] > times[1] else "memory", flops, moved)

    def product(name, direction, kind, width, out):
        """Of all rows with the experts' [width, out] matrices; kind 0 is forward, 1 dgrad, 2 wgrad."""
        moved = byte * (rows * width + experts * width * out) + item * rows * out
        if kind == 2:
            moved = byte * rows * (width + out) + item * experts * width * out
        return stage(name, direction, moved, 2.0 * rows * width * out, rates[kind])

    def shared_products(direction, kind):
        flops = 2.0 * s.tokens * c.d_model * (c.gates + 1) * shared
        return stage("shared expert", direction, s.tokens * (c.d_model + 3 * shared) * item, flops, dense[kind])

    def enter(direction, form, kept):
        """Rows sorted by expert and quantized in one read, by rows and by columns, where products are FP8 and scales
        are of blocks. Otherwise rows are gathered first, as where a bias wants them too; and they are dequantized where
        products are not FP8."""
        width, fused = c.d_model, form is not None and fp8 and form.block is not None
        if kept or not fused:
            yield stage("permute", direction, 2 * rows * width * item)
        if form is not None:
            moved = item + 2 + (0 if fp8 else 2 * (1 + item))
            yield stage("permute, quantize" if fused else "quantize rows", direction, rows * width * moved)

    route = 2.0 * s.tokens * c.d_model * c.num_experts * 3
    quantized = options.recipe.w is not None
    taken = local * (s.param_item + (1 if quantized else item)) if quantized or item != s.param_item else 0
    take = "quantize weights" if quantized else "cast weights"
    for direction in ("forward", "recompute") if s.again else ("forward",):
        around = direction == "forward" or options.remat  # the router and the shared expert run
        if around:
            yield stage("route", direction, s.tokens * (c.d_model * item + 12 * c.num_experts), route, on.dense[0])
        yield from enter(direction, options.recipe.x, False)
        if taken:
            yield stage(take, direction, taken)
        yield product("product wi", direction, 0, c.d_model, c.gates * hidden)
        if direction == "forward":
            yield stage("activate", direction, rows * hidden * (c.gates * item + byte))
            yield product("product wo", direction, 0, hidden, c.d_model)
            yield stage("unpermute", direction, (rows + received) * c.d_model * item)
        if shared and around:
            yield shared_products(direction, 0)
    yield from enter("backward", options.recipe.dy, c.use_bias)
    if taken:
        yield stage(take, "backward", taken)
    yield product("dgrad wo", "backward", 1, c.d_model, hidden)
    yield stage("activate", "backward", rows * hidden * (item * (c.gates + 1) + (1 + c.gates) * (2 if fp8 else item)))
    yield product("wgrad wo", "backward", 2, hidden, c.d_model)
    yield product("dgrad wi", "backward", 1, c.gates * hidden, c.d_model)
    yield product("wgrad wi", "backward", 2, c.d_model, c.gates * hidden)
    yield stage("unpermute", "backward", (rows + received) * c.d_model * item)
    if shared:
        yield shared_products("backward", 1)
        yield shared_products("backward", 2)
    moved = s.tokens * (2 * c.d_model * item + 12 * c.num_experts)
    yield stage("route", "backward", moved, 2 * route, on.dense[1])
