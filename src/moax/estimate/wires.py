"""What one block puts on the wires in a training step: the collectives of `moax.moe`, foretold.

bytes a device sends, b those of the result in a group of g:
all-gather, all-to-all b (g-1)/g;  all-reduce 2 b (g-1)/g;  reduce-scatter b (g-1)       as `moax.inspect` counts
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax.numpy as jnp

from moax.config import MoEConfig
from moax.mesh.axes import Axes, Names, Roles
from moax.mesh.specs import Layout, local_shape, spec, weight_layout
from moax.ops.exchange import slots_per_pair
from moax.params import param_shapes
from moax.recipe import Contracted, Format, Recipe
from moax.sharding import dense_spec_on, expert_specs

Direction = Literal["forward", "recompute", "backward"]
DIRECTIONS = ("forward", "recompute", "backward")
WIRES = ("weight gather", "gradient scatter", "gradient reduce", "dispatch", "combine", "tp reduce", "statistics")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One array that a collective makes, once a layer and step.

    Attributes:
      what: which of `WIRES` it is. direction: the pass it belongs to.
      kind, dtype, shape, axes, group_size, bytes: as of `moax.inspect.Collective`.
    """

    what: str
    direction: Direction
    kind: str
    dtype: str
    shape: tuple[int, ...]
    axes: Names
    group_size: int

    @property
    def bytes(self) -> int:
        b, g = math.prod(self.shape) * jnp.dtype(self.dtype).itemsize, self.group_size
        if self.kind == "reduce-scatter":
            return b * (g - 1)
        return -(-b * (g - 1) * (2 if self.kind == "all-reduce" else 1) // g)


@dataclasses.dataclass(frozen=True)
class Shard:
    """A block on a mesh, as one device has it.

    Attributes:
      tokens: T of a device: of one shard over (dp, fsdp, ep), the same on all ranks of tp.
      shapes: of each parameter's shard, by name; of parameters that `init` makes.
      layouts: of `wi` and `wo`, and of `shared_wi` and `shared_wo` where there are such.
    """

    config: MoEConfig
    roles: Roles
    recipe: Recipe
    transport: Literal["all_gather", "all_to_all"]
    tokens: int
    dtype: str
    param_dtype: str
    shapes: dict[str, tuple[int, ...]]
    layouts: dict[str, Layout]

    @classmethod
    def make(cls, config, sizes, tokens, recipe, transport, dtype, param_dtype, axes: Axes) -> Shard:
        """The block on a mesh of these axis sizes.

        Raises:
          ValueError: a parameter does not divide over the mesh.
        """
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
            whole = dataclasses.replace(roles, fsdp=roles.fsdp + roles.ep, ep=())
            wi, wo = spec(None, over, None, roles.tp), spec(None, roles.tp, over)
            layouts["shared_wi"] = weight_layout("params.shared_wi", wi, ((), (), (), roles.tp), whole)
            layouts["shared_wo"] = weight_layout("params.shared_wo", wo, ((), roles.tp, ()), whole)
        return cls(config, roles, recipe, transport, tokens, dtype, param_dtype, shapes, layouts)

    @property
    def ranks(self) -> int:
        """Devices along ep."""
        return self.roles.size(self.roles.ep)

    @property
    def received(self) -> int:
        """R: rows that a device receives, empty slots included."""
        if self.transport == "all_gather":
            return self.tokens * self.ranks
        return self.ranks * slots_per_pair(self.tokens, self.config.top_k, self.ranks, self.config.capacity_factor)

    def weight(self, name: str) -> tuple[int, ...]:
        """The shape of a weight's shard as products take it, [E, K, *C]."""
        shape = self.shapes[name]
        return (1, *shape) if name.startswith("shared") else shape

    def whole(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, gathered."""
        gather = self.layouts[name].gather
        return tuple(n * self.roles.size(names) for n, names in zip(self.weight(name), gather, strict=True))


def transfers(shard: Shard, *, remat: bool = False) -> tuple[Transfer, ...]:
    """What one layer moves in a step, forward and backward.

    Args:
      shard: the block.
      remat: the forward pass is done again before backward, but for what nothing of backward reads: the gather of wo,
        the second product, the combine.

    Left out: the amax of recipes that have one scale a tensor, a few bytes each.
    """
    again = _forward(shard, "recompute") if remat else ()
    return (*_forward(shard, "forward"), *again, *_backward(shard))


def _forward(s: Shard, direction: Direction) -> Iterator[Transfer]:
    c, r, move, full = s.config, s.roles, _mover(s.roles, direction), direction == "forward"
    for name in s.layouts:
        if full or name.endswith("wi"):
            yield from gathers(s, name, s.recipe.w, "rows", direction)
    yield from _dispatch_rows(s, direction)
    if r.ep:
        kind = _dispatch_kind(s)
        yield from move("dispatch", kind, "int32", (s.received, c.top_k), r.ep)
        yield from move("dispatch", kind, "float32", (s.received, c.top_k), r.ep)
    if full:
        yield from _combine(s, direction, s.dtype, c.d_model)
        for _ in range(2 if c.shared_d_ff else 1):
            yield from move("tp reduce", "all-reduce", s.dtype, (s.tokens, c.d_model), r.tp)
        yield from move("statistics", "all-reduce", "float32", (c.num_experts,), r.tokens)
        yield from move("statistics", "all-reduce", "float32", (1,), r.tokens)
    yield from move("statistics", "all-reduce", "int32", (c.num_experts,), r.tokens)


def _backward(s: Shard) -> Iterator[Transfer]:
    c, r, move = s.config, s.roles, _mover(s.roles, "backward")
    for name in s.layouts:
        yield from gathers(s, name, s.recipe.w, "columns", "backward")
        yield from _scatters(s, name)
    yield from _dispatch_rows(s, "backward")
    yield from _combine(s, "backward", s.dtype, c.d_model)
    yield from _combine(s, "backward", "float32", c.top_k)
    for _ in range(2 if c.shared_d_ff else 1):
        yield from move("tp reduce", "all-reduce", s.dtype, (s.tokens, c.d_model), r.tp)
    yield from move("tp reduce", "all-reduce", "float32", (s.tokens, c.top_k), r.tp)
    reduced = {"router": r.tokens, "logits_bias": r.tokens, "bi": r.dp + r.fsdp, "bo": r.dp + r.fsdp + r.tp}
    for name, names in reduced.items():
        if name in s.shapes:
            dtype = s.param_dtype if name == "router" else "float32"
            yield from move("gradient reduce", "all-reduce", dtype, s.shapes[name], names)


def gathers(
    s: Shard, name: str, format: Format | None, contracted: Contracted, direction: Direction
) -> Iterator[Transfer]:
    """The gathers of a weight's shard: of its values, and of their scales where it has a format."""
    shape, move = s.weight(name), _mover(s.roles, direction)
    arrays = [(shape, s.dtype if format is None else "uint8")]
    if format is not None:
        block = format.weight_block(len(shape), contracted)
        scale = tuple(1 if b is None else -(-n // b) for n, b in zip(shape, block, strict=True))
        arrays.append((scale, "uint8" if format.scale == "e8m0" else "float32"))
    for local, dtype in arrays:
        sizes = list(local)
        for dim, names in enumerate(s.layouts[name].gather):
            sizes[dim] *= s.roles.size(names)
            yield from move("weight gather", "all-gather", dtype, tuple(sizes), names)


def _scatters(s: Shard, name: str) -> Iterator[Transfer]:
    gather, sizes, move = s.layouts[name].gather, list(s.whole(name)), _mover(s.roles, "backward")
    for dim, names in reversed(tuple(enumerate(gather))):
        sizes[dim] //= s.roles.size(names)
        yield from move("gradient scatter", "reduce-scatter", s.dtype, tuple(sizes), names)
    shared = name.startswith("shared")
    done = {n for names in gather for n in names}
    left = tuple(n for n in s.roles.dp + s.roles.fsdp + (s.roles.ep if shared else ()) if n not in done)
    yield from move("gradient reduce", "all-reduce", s.param_dtype if shared else s.dtype, tuple(sizes), left)


def _dispatch_kind(s: Shard) -> str:
    return "all-gather" if s.transport == "all_gather" else "all-to-all"


def _dispatch_rows(s: Shard, direction: Direction) -> Iterator[Transfer]:
    kind, move, width, wire = _dispatch_kind(s), _mover(s.roles, direction), s.config.d_model, s.recipe.wire
    dtype = s.dtype if wire is None else "uint8"
    yield from move("dispatch", kind, dtype, (s.received, width), s.roles.ep)
    if wire is not None and wire.block is not None:
        scale = "uint8" if wire.scale == "e8m0" else "float32"
        yield from move("dispatch", kind, scale, (s.received, -(-width // wire.block)), s.roles.ep)


def _combine(s: Shard, direction: Direction, dtype: str, width: int) -> Iterator[Transfer]:
    gathered = s.transport == "all_gather"
    kind, rows = ("reduce-scatter", s.tokens) if gathered else ("all-to-all", s.received)
    yield from _mover(s.roles, direction)("combine", kind, dtype, (rows, width), s.roles.ep)


def _mover(roles: Roles, direction: Direction) -> Any:
    def move(what: str, kind: str, dtype: str, shape: Sequence[int], names: Names) -> Iterator[Transfer]:
        if names:
            yield Transfer(what, direction, kind, dtype, tuple(shape), names, roles.size(names))

    return move
