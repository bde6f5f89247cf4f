"""What a block would cost on a mesh: memory of a device, bytes on each wire, time of each stage; nothing is compiled.

    seconds = layers * sum over stages of max(flops / rate, bytes of device memory / rate), or of bytes / rate of a wire

The bytes on wires are those of the compiled program (`moax.inspect`). The times are of the balanced load at achievable
rates, nothing overlapped and no launch latency: compare meshes by them, and measure the one you choose.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax.numpy as jnp

from moax.config import MoEConfig
from moax.estimate.hardware import Hardware, find_hardware, find_model
from moax.estimate.times import Stage, Wires, work
from moax.estimate.wires import DIRECTIONS, Shard, Transfer, transfers
from moax.groups import BLOCK
from moax.mesh.axes import ROLES, Axes
from moax.ops.exchange import Exchange, select_transport
from moax.ops.permutation import capacity_rows, sorted_rows
from moax.recipe import Format, Recipe, get_recipe

DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device, all layers together.

    Attributes:
      weights, gradients: in the dtype of the parameters. optimizer: its state.
      activations: what forward leaves to backward; with remat the inputs of all layers, and one layer's.
      gathered: the largest weight of a layer as products take it, with its gradient before that is scattered. One at a
        time: a compiler that gathers ahead needs more.
      exchange: buffers of rows on their way. workspace: rows alive between the products of a backward pass.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int
    exchange: int
    workspace: int

    @property
    def total(self) -> int:
        """Their sum, of `gathered` and `workspace` the larger: they are widest at different times."""
        return sum(dataclasses.astuple(self)) - min(self.gathered, self.workspace)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What `estimate` found. Bytes and seconds are of one device and one step (forward and backward).

    Attributes:
      model: its name, or "config". mesh: axis sizes. tokens: of a GPU, in one step.
      recipe: its name, "custom", or "none". hardware: its name. layers: MoE blocks.
      exchange: `all_gather` or `all_to_all`. remat: forward is done again before backward.
      memory: see `Memory`. capacity: bytes of a device that a program can have.
      stages, transfers: of one layer. plain_gather: stages and bytes of its weight gathers if nothing was quantized.
    """

    model: str
    config: MoEConfig
    mesh: tuple[tuple[str, int], ...]
    tokens: int
    recipe: str
    hardware: str
    layers: int
    exchange: str
    remat: bool
    memory: Memory
    capacity: int
    stages: tuple[Stage, ...]
    transfers: tuple[Transfer, ...]
    plain_gather: Stage

    @property
    def gpus(self) -> int:
        return math.prod(size for _, size in self.mesh)

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.capacity

    @property
    def seconds(self) -> float:
        """Of all layers' blocks; attention and the rest of a model are not in it."""
        return self.layers * sum(stage.seconds for stage in self.stages)

    @property
    def tflops(self) -> float:
        """TFLOP/s of a GPU over the whole step, of the experts' products alone."""
        c = self.config
        flops = 6 * self.tokens * c.d_model * (c.gates + 1) * (c.top_k * c.d_ff + c.shared_d_ff)
        return self.layers * flops / self.seconds / 1e12

    def wire_bytes(self, what: str | None = None) -> int:
        """Bytes that a device sends in a step over all layers: of one of `estimate_wires.WIRES`, or of all."""
        return self.layers * sum(t.bytes for t in self.transfers if what in (None, t.what))

    @property
    def gather_saved(self) -> tuple[int, float]:
        """(bytes, seconds) of a step that quantizing before the gather saves; the time to quantize is not taken off."""
        now = [stage for stage in self.stages if stage.name == "weight gather"]
        spared = self.plain_gather.seconds - sum(stage.seconds for stage in now)
        return self.layers * self.plain_gather.wire_bytes - self.wire_bytes("weight gather"), self.layers * spared

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON has it; bytes, seconds."""
        plain = ("model", "tokens", "recipe", "hardware", "layers", "exchange", "remat", "capacity")
        return {name: getattr(self, name) for name in plain} | {
            "config": dataclasses.asdict(self.config),
            "mesh": dict(self.mesh),
            "gpus": self.gpus,
            "fits": self.fits,
            "seconds": self.seconds,
            "tflops": self.tflops,
            "memory": dataclasses.asdict(self.memory) | {"total": self.memory.total},
            "wires": {what: self.wire_bytes(what) for what in sorted({t.what for t in self.transfers})},
            "stages_of_a_layer": [dataclasses.asdict(stage) for stage in self.stages],
            "gather_saved": dict(zip(("bytes", "seconds"), self.gather_saved, strict=True)),
        }


def estimate(
    config_or_name: MoEConfig | str,
    mesh_shape: Mapping[str, int],
    tokens: int,
    recipe: str | Recipe | None = None,
    hardware: str | Hardware = "h200",
    layers: int | None = None,
    *,
    exchange: Exchange = "auto",
    capacity_factor: float | None = None,
    remat: bool = False,
    dtype: str = "bfloat16",
    param_dtype: str = "float32",
    optimizer_bytes: int = 8,
    kernels: Literal["mosaic", "xla"] = "mosaic",
    axes: Axes = Axes(),
) -> Estimate:
    """Memory, bytes and time of a training step of MoE blocks on a mesh.

    Args:
      config_or_name: a MoEConfig, or a name of `estimate_data.MODELS`.
      mesh_shape: axis sizes in the order of the devices, neighbours along the last one; {} for one GPU.
      tokens: of a GPU in a step: those of the whole mesh, over its GPUs. (The ranks of tp share theirs.)
      recipe: as of `moax.moe`.
      hardware: a name of `estimate_data.HARDWARE`, or a Hardware.
      layers: MoE blocks of the model; None: the named model's, 1 for a config.
      exchange: as of `moax.moe`.
      capacity_factor: that of the config, where given.
      remat: a layer keeps its input alone, and does its forward again before its backward.
      dtype, param_dtype: of activations; of parameters and their gradients.
      optimizer_bytes: of state for each parameter; 8: two float32 moments.
      kernels: which lay rows out: `mosaic` starts each expert at a multiple of 128 rows.
      axes: roles of the mesh axes.

    Raises:
      ValueError: an unknown name, an axis without a role, or sizes that do not divide over the mesh.
    """
    named = isinstance(config_or_name, str)
    model = find_model(config_or_name) if isinstance(config_or_name, str) else None
    config = model.config if model else config_or_name
    if not isinstance(config, MoEConfig):
        raise ValueError(f"config_or_name={config_or_name!r} must be a MoEConfig or the name of a model")
    if capacity_factor is not None:
        config = dataclasses.replace(config, capacity_factor=capacity_factor)
    layers = (model.layers if model else 1) if layers is None else layers
    sizes = dict(mesh_shape)
    _check(sizes, axes, tokens=tokens, layers=layers)
    if optimizer_bytes < 0:
        raise ValueError(f"optimizer_bytes={optimizer_bytes} must be at least 0")
    for name, value, choices in (
        ("dtype", dtype, DTYPES), ("param_dtype", param_dtype, DTYPES), ("kernels", kernels, ("mosaic", "xla")),
    ):  # fmt: skip
        if value not in choices:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")
    on, parts = find_hardware(hardware), get_recipe(recipe)
    ranks_of_tp = math.prod(sizes.get(name, 1) for name in axes.tp)
    make = functools.partial(Shard.make, config, sizes, tokens * ranks_of_tp)
    options = (select_transport(exchange), dtype, param_dtype, axes)
    shard, plain = make(parts, *options), make(get_recipe(None), *options)
    moved = transfers(shard, remat=remat)
    wires = Wires(on, tuple(sizes.items()))
    stages = [*work(shard, on, remat), *wires.stages(moved)]
    gathers = [t for t in transfers(plain, remat=remat) if t.what == "weight gather"]
    return Estimate(
        config_or_name if named else "config",
        config,
        tuple(sizes.items()),
        tokens,
        recipe if isinstance(recipe, str) else "none" if recipe is None else "custom",
        on.name,
        layers,
        options[0],
        remat,
        _memory(shard, layers, remat, optimizer_bytes, kernels),
        int(on.memory * on.usable),
        tuple(sorted(stages, key=lambda stage: DIRECTIONS.index(stage.direction))),
        moved,
        next(iter(wires.stages(gathers, merge=True)), Stage("weight gather", "backward", 0.0, "nvlink")),
    )


def sweep(
    config_or_name: MoEConfig | str,
    gpus: int,
    tokens: int,
    recipe: str | Recipe | None = None,
    hardware: str | Hardware = "h200",
    layers: int | None = None,
    *,
    exchange: Exchange | None = None,
    remat: bool | None = None,
    **options,
) -> list[Estimate]:
    """Every mesh (dp, fsdp, ep, tp) of `gpus` GPUs that the sizes divide over: those that fit first, fastest first.

    Args:
      gpus: of the mesh.
      exchange, remat: None tries them all, and keeps the fastest that fits, of each mesh.
      config_or_name, tokens, recipe, hardware, layers, options: as of `estimate`.

    Returns:
      One Estimate a mesh; those that do not fit last, by memory. Ties go by memory, then by sizes.

    Raises:
      ValueError: as `estimate`; no mesh of so many GPUs divides the sizes.
    """
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
        raise ValueError(f"gpus={gpus!r} must be an int of at least 1")
    estimate(config_or_name, {}, tokens, recipe, hardware, layers, exchange=exchange or "auto", **options)
    transports: tuple[Exchange, ...] = ("all_gather", "all_to_all") if exchange is None else (exchange,)
    ways = list(itertools.product(transports, (False, True) if remat is None else (remat,)))
    best, refused = [], ""
    for shape in _factored(gpus):
        try:
            found = [
                estimate(config_or_name, shape, tokens, recipe, hardware, layers, exchange=way, remat=again, **options)
                for way, again in ways
            ]
        except ValueError as error:
            refused = str(error)
            continue
        best.append(min(found, key=_rank))
    if not best:
        raise ValueError(f"gpus={gpus}: no mesh of (dp, fsdp, ep, tp) divides these sizes; the last refusal: {refused}")
    return sorted(best, key=_rank)


def _rank(e: Estimate) -> tuple:
    sizes = tuple(size for _, size in e.mesh)
    return (not e.fits, e.seconds if e.fits else 0.0, e.memory.total, sizes, e.exchange, e.remat)


def _factored(gpus: int) -> Iterator[dict[str, int]]:
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    for first in itertools.product(divisors, repeat=3):
        if gpus % math.prod(first) == 0:
            yield dict(zip(ROLES, (*first, gpus // math.prod(first)), strict=True))


def _check(sizes: Mapping[str, int], axes: Axes, **counts) -> None:
    for name, size in {**sizes, **counts}.items():
        what = f"mesh_shape: {name}" if name in sizes else name
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{what}={size!r} must be an int of at least 1")
    for name in sizes:
        if name not in axes.names:
            raise ValueError(f"mesh_shape: axis {name!r} has no role; the axes are {', '.join(axes.names)}")


# Memory.


def _memory(s: Shard, layers: int, remat: bool, optimizer_bytes: int, kernels: str) -> Memory:
    c, item, param = s.config, jnp.dtype(s.dtype).itemsize, jnp.dtype(s.param_dtype).itemsize
    count = sum(map(math.prod, s.shapes.values()))
    experts, hidden = s.whole("wo")[:2]
    shared = s.shapes["shared_wo"][0] if c.shared_d_ff else 0
    align = math.lcm(s.recipe.row_alignment, BLOCK) if kernels == "mosaic" else s.recipe.row_alignment
    capacity = capacity_rows(s.tokens, c.top_k, c.capacity_factor)
    rows = sorted_rows(s.received, c.top_k, experts, align, capacity)
    kept = rows * c.gates * hidden * item + _rows_bytes(rows, c.d_model, s.recipe.x, item)
    plan = 4 * (rows + experts + 1 + 2 * s.received * c.top_k + (s.received if s.transport == "all_to_all" else 0))
    router = s.tokens * (c.num_experts * 4 + c.top_k * 4)
    inputs = s.tokens * c.d_model * item
    layer = inputs + router + plan + kept + s.tokens * shared * (c.gates + 1) * item
    products = [name for name in ("wi", "wo", "shared_wi", "shared_wo") if name in s.shapes]
    copied = [n for n in products if s.recipe.w or s.dtype != s.param_dtype or any(s.layouts[n].gather)]
    wide = 1 if s.recipe.w else item
    unscattered = [n for n in products if s.dtype != s.param_dtype or any(s.layouts[n].gather)]
    return Memory(
        weights=layers * count * param,
        gradients=layers * count * param,
        optimizer=layers * count * optimizer_bytes,
        activations=layers * inputs + layer if remat else layers * layer,
        gathered=max(math.prod(s.whole(n)) * (wide * (n in copied) + item * (n in unscattered)) for n in products),
        exchange=_exchange_bytes(s, item),
        workspace=_workspace(s.recipe, rows, c.d_model, hidden, c.gates, item, kernels),
    )


def _rows_bytes(rows: int, width: int, format: Format | None, item: int) -> int:
    """Rows as wgrad takes them: values, and a scale for each block of rows."""
    if format is None:
        return rows * width * item
    scales = 1 if format.block is None else -(-rows // format.block) * width
    return rows * width + scales * (1 if format.scale == "e8m0" else 4)


def _exchange_bytes(s: Shard, item: int) -> int:
    """Rows received, and with all_to_all as many laid out to be sent; ids and weights of experts with them."""
    if not s.roles.ep:
        return 0
    return s.received * ((2 if s.transport == "all_to_all" else 1) * s.config.d_model * item + 8 * s.config.top_k)


def _workspace(recipe: Recipe, rows: int, width: int, hidden: int, gates: int, item: int, kernels: str) -> int:
    """d o, d a and a in bf16, d h in the place of h; or d h by rows and by columns in FP8, which d o has left by then.
    Dequantized operands of products that are not FP8 live one at a time, and are not the widest."""
    if kernels == "mosaic" and recipe.hopper_fp8:
        return rows * (2 * width + (item + 1) * hidden)
    return rows * (width + 2 * hidden) * item
