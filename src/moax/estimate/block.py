"""The share of a block that one device of a mesh has. Memory, wires and times are computed from it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from moax.block.spec import BlockSpec
from moax.config import MoEConfig
from moax.errors import Unsupported
from moax.estimate.hardware import Hardware
from moax.kernels import IMPLEMENTATIONS, is_installed, takes_fp8
from moax.mesh.axes import Axes, Roles
from moax.mesh.collectives import GradReduce, sum_dtype
from moax.mesh.specs import Layout, local_shape, spec, weight_layout
from moax.ops.exchange import TRANSPORTS, ExchangeSpec, Transport, find_transport, refuse
from moax.ops.exchange.plan import balanced_rows
from moax.ops.permutation import PermuteSpec, sorted_rows
from moax.params import param_shapes
from moax.recipe import Recipe, Recipes
from moax.sharding import dense_spec_on, expert_specs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """How a block runs, and in which dtypes.

    Attributes:
      recipe: the formats of its products with wi and with wo.
      exchange: `auto`, or the name of a transport.
      kernels: the implementation of its products.
      buffer_factor, save_rows: see `moax.Options`.
      grad_reduce: how gradients of weights are summed; see `moax.Options.grad_reduce_dtype`.
      remat: whether backward recomputes the forward pass.
      dtype: dtype of activations.
      param_dtype: dtype of parameters and their gradients.
      axes: the roles of the mesh axes.
    """

    recipe: Recipes
    exchange: str
    kernels: str
    buffer_factor: float | None
    save_rows: bool
    grad_reduce: GradReduce | None
    remat: bool
    dtype: str
    param_dtype: str
    axes: Axes

    @property
    def grad_dtype(self) -> str:
        """The dtype in which gradients of weights are computed and summed."""
        return sum_dtype(self.grad_reduce, self.dtype).name

    def recipe_of(self, name: str) -> Recipe:
        """Returns the recipe of the weight `name`, such as "wi" or "shared_wi"."""
        return self.recipe.wi if name.endswith("wi") else self.recipe.wo


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """The share of a block that one device of a mesh has.

    Attributes:
      config: the block.
      roles: the mesh axes of each role.
      options: how the block runs.
      tokens: tokens T of a device, that is of one shard over (dp, fsdp, ep, cp). The ranks of tp have the same tokens.
      block: the spec of the experts' part, as `moax.moe` makes it.
      shapes: the shape of each parameter's shard, by the parameter's name.
      layouts: the layouts of `wi` and `wo`, and of `shared_wi` and `shared_wo` where the block has a shared expert.
    """

    config: MoEConfig
    roles: Roles
    options: Execution
    tokens: int
    block: BlockSpec
    shapes: dict[str, tuple[int, ...]]
    layouts: dict[str, Layout]

    @property
    def exchange(self) -> ExchangeSpec:
        """The spec of the exchange."""
        return self.block.exchange

    @property
    def transport(self) -> Transport:
        """The transport of the exchange."""
        return TRANSPORTS[self.exchange.transport]

    @property
    def load(self) -> tuple[int, int, int, int]:
        """(tokens, K, ranks, slots), the arguments of a transport's methods."""
        return self.tokens, self.config.top_k, self.exchange.ranks, self.exchange.slots

    @property
    def received(self) -> int:
        """Rows R that a device receives in one pass, empty slots included."""
        return self._received(self.exchange)

    @property
    def received_more(self) -> int:
        """The same in a pass of the loop."""
        return self._received(self.block.exchange_more)

    @property
    def sorted(self) -> int:
        """Expert-sorted rows N of the first pass, padding included."""
        return self._sorted(self.received, self.block.permute)

    @property
    def sorted_more(self) -> int:
        """Expert-sorted rows of a pass of the loop, padding included; 0 without a loop."""
        return self._sorted(self.received_more, self.block.permute_more) if self.block.repeats else 0

    def _received(self, exchange: ExchangeSpec) -> int:
        """Returns the rows that a device receives in a pass with this spec."""
        return self.transport.received_rows(self.tokens, exchange.ranks, exchange.slots)

    def _sorted(self, received: int, permute: PermuteSpec) -> int:
        """Returns the expert-sorted rows of a pass with this spec."""
        room = permute.capacity if permute.room is None else permute.room
        return sorted_rows(received, self.config.top_k, permute.num_groups, permute.align, room)

    def passes_at(self, imbalance: float) -> int:
        """Returns the passes of a step whose busiest rank of ep has `imbalance` times the balanced assignments.

        A token makes K independent choices, each of which is the busiest rank with the probability imbalance / ranks.
        The busiest rank has fewer rows than that many times the balanced ones, since a token travels there once. A
        token is left if one of its assignments is: with 2 of them and a quarter of the rows left, 7 tokens of 16 are.
        """
        ranks, slots, room = self.exchange.ranks, self.exchange.slots, self.block.permute.room
        top_k, share = self.config.top_k, min(imbalance / ranks, 1.0)
        balanced = balanced_rows(self.tokens, top_k, ranks, self.config.num_experts)
        chosen = (1 - (1 - share) ** top_k) / (1 - (1 - 1 / ranks) ** top_k)
        pair = max(1, min(self.exchange.capacity, math.ceil(balanced * chosen)))
        load, more = share * ranks * self.tokens * top_k, self.block.permute_more.room
        first = load * min(slots, pair) / pair
        left = 0.0 if room is None else max(0.0, 1 - room / first)
        if not self.block.repeats or more is None or (pair <= slots and not left):
            return 1
        rows = load - first * (1 - left)
        again = pair - min(slots, pair) * (1 - left) ** (load / (ranks * pair))
        window = self.block.exchange_more.slots if self.transport.has_slots else pair
        parts = (min(window, again - p * window) / again for p in range(math.ceil(again / window)))
        return 1 + sum(max(1, math.ceil(rows * part / more)) for part in parts)

    @property
    def item(self) -> int:
        """Bytes of an element of activations."""
        return jnp.dtype(self.options.dtype).itemsize

    @property
    def param_item(self) -> int:
        """Bytes of an element of parameters."""
        return jnp.dtype(self.options.param_dtype).itemsize

    @property
    def gathered_apart(self) -> bool:
        """Whether a product over the rows of a weight gathers another array than a product over its columns.

        A pass after the first one needs wi for both in backward.
        """
        options, w = self.options, self.options.recipe.wi.w
        if w is None:
            return False
        fp8 = takes_fp8(options.kernels, options.recipe.wi)
        return fp8 or w.weight_block(4, "rows") != w.weight_block(4, "columns")

    def weight(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a weight's shard as products take it, [E, K, *C]; E is 1 for the shared expert."""
        shape = self.shapes[name]
        return (1, *shape) if name.startswith("shared") else shape

    def whole(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a weight after its gathers: each dim times the ranks that it is gathered from."""
        gather = self.layouts[name].gather
        return tuple(n * self.roles.size(names) for n, names in zip(self.weight(name), gather, strict=True))


def make_shard(config: MoEConfig, sizes: dict[str, int], tokens: int, options: Execution, on: Hardware) -> Shard:
    """Returns the share of a block that one device has on a mesh of these axis sizes.

    Args:
      config: the block.
      sizes: number of devices along each mesh axis.
      tokens: tokens T of a device.
      options: how the block runs.
      on: the GPUs of the mesh.

    Raises:
      ValueError: a parameter does not divide over the mesh, or no transport has the name.
      Unsupported: the transport cannot run on this mesh of these GPUs.
    """
    axes = options.axes
    roles = axes.on(sizes)
    if config.d_ff % roles.size(roles.tp):
        raise ValueError(f"d_ff={config.d_ff} does not divide by mesh axes {roles.tp}")
    specs, made = expert_specs(config, axes, roles), param_shapes(config)
    names = [field.name for field in dataclasses.fields(made) if getattr(made, field.name) is not None]
    shapes = {name: local_shape(getattr(made, name), getattr(specs, name), roles) for name in names}
    layouts = {
        "wi": weight_layout("params.wi", specs.wi, (roles.ep, (), (), roles.tp), roles),
        "wo": weight_layout("params.wo", specs.wo, (roles.ep, roles.tp, ()), roles),
    }
    if config.shared_d_ff:
        (over,) = dense_spec_on(roles, (config.d_model,))
        everyone = dataclasses.replace(roles, fsdp=roles.fsdp + roles.ep, ep=())
        wi, wo = spec(None, over, None, roles.tp), spec(None, roles.tp, over)
        layouts["shared_wi"] = weight_layout("params.shared_wi", wi, ((), (), (), roles.tp), everyone)
        layouts["shared_wo"] = weight_layout("params.shared_wo", wo, ((), roles.tp, ()), everyone)
    return Shard(
        config=config,
        roles=roles,
        options=options,
        tokens=tokens,
        block=_block(config, sizes, roles, specs, tokens, options, on),
        shapes=shapes,
        layouts=layouts,
    )


def find_kernels(kernels: str, on: Hardware) -> str:
    """Returns the implementation that `kernels` means on this hardware; `auto` means the first that runs there.

    Raises:
      ValueError: there is no implementation of this name.
      Unsupported: the implementation does not run on this hardware.
    """
    if kernels not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"kernels={kernels!r} must be one of {', '.join(map(repr, ('auto', *IMPLEMENTATIONS)))}")
    there = [name for name in IMPLEMENTATIONS if name in on.products and is_installed(name)]
    if kernels != "auto" and kernels not in there:
        others = " or ".join(map(repr, ("auto", *there)))
        raise Unsupported(f"kernels={kernels!r}: moax has no such kernels for {on.name}; use {others}")
    return there[0] if kernels == "auto" else kernels


def _block(config, sizes, roles: Roles, declared, tokens: int, options: Execution, on: Hardware) -> BlockSpec:
    """Returns the spec of the experts' part, or raises as `make_shard`."""
    arguments: dict[str, Any] = dict(
        recipe=options.recipe,
        roles=roles,
        declared=declared,
        tokens=tokens,
        dtype=options.dtype,
        kernels=options.kernels,
        buffer_factor=options.buffer_factor,
        save_rows=options.save_rows,
    )
    gpus = math.prod(sizes.values())

    def why_not(name: str) -> str | None:
        return TRANSPORTS[name].why_not_on(gpus, on.host, options.kernels)

    if options.exchange == "auto":
        return BlockSpec.choose(config, [name for name in TRANSPORTS if why_not(name) is None], **arguments)
    name = find_transport(options.exchange, roles)
    refuse(name, why_not(name))
    return BlockSpec.make(config, transport=name, **arguments)
