"""`estimate` of one mesh, and `sweep` over all meshes of so many GPUs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from moax.config import MoEConfig
from moax.estimate.block import Execution, find_kernels, make_shard
from moax.estimate.hardware import Hardware, find_hardware
from moax.estimate.memory import Memory, measure_memory
from moax.estimate.times import Stage, Wires, work
from moax.estimate.wires import DIRECTIONS, Transfer, transfers
from moax.kernels import IMPLEMENTATIONS, takes_fp8
from moax.mesh.axes import ROLES, Axes
from moax.models import find_model
from moax.ops.exchange import TRANSPORTS, Exchange
from moax.recipe import Recipe, get_recipe

DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What `estimate` found. Bytes and seconds are of one device and one step (forward and backward).

    Attributes:
      model: its name, or "config".
      config: of the block.
      mesh: axis sizes.
      tokens: of a GPU, in one step.
      recipe: its name, "custom", or "none".
      hardware: its name.
      kernels: the implementation whose rates the times have.
      rates: what the times rest on, as a sentence.
      layers: MoE blocks.
      exchange: the name of the transport.
      chunks: parts that a device takes its tokens in.
      remat: forward is done again before backward.
      memory: see `Memory`.
      capacity: bytes of a device that a program can have.
      stages, transfers: of one layer.
      plain_gather: stages and bytes of its weight gathers if nothing was quantized.
    """

    model: str
    config: MoEConfig
    mesh: tuple[tuple[str, int], ...]
    tokens: int
    recipe: str
    hardware: str
    kernels: str
    rates: str
    layers: int
    exchange: str
    chunks: int
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
        """Seconds of all layers' blocks in a step; attention and the rest of a model are not in them."""
        return self.layers * sum(stage.seconds for stage in self.stages)

    @property
    def tflops(self) -> float:
        """TFLOP/s of a GPU over the whole step, of the experts' products alone."""
        c = self.config
        flops = 6 * self.tokens * c.d_model * (c.gates + 1) * (c.top_k * c.d_ff + c.shared_d_ff)
        return self.layers * flops / self.seconds / 1e12

    def wire_bytes(self, what: str | None = None) -> int:
        """Bytes that a device sends in a step over all layers, on one of `moax.estimate.wires.WIRES` or on all."""
        return self.layers * sum(t.bytes * t.times for t in self.transfers if what in (None, t.what))

    @property
    def gather_saved(self) -> tuple[int, float]:
        """(bytes, seconds) of a step that quantizing before the gather saves, the time to quantize not taken off."""
        now = [stage for stage in self.stages if stage.name == "weight gather"]
        spared = self.plain_gather.seconds - sum(stage.seconds for stage in now)
        return self.layers * self.plain_gather.wire_bytes - self.wire_bytes("weight gather"), self.layers * spared

    def as_dict(self) -> dict[str, Any]:
        """The estimate as JSON has it, in bytes and seconds."""
        plain = (
            "model", "tokens", "recipe", "hardware", "kernels", "rates", "layers", "exchange", "chunks", "remat",
            "capacity",
        )  # fmt: skip
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
    exchange: str = "auto",
    capacity_factor: float | None = None,
    remat: bool = False,
    dtype: str = "bfloat16",
    param_dtype: str = "float32",
    optimizer_bytes: int = 8,
    kernels: Literal["auto", "hopper", "xla"] = "auto",
    chunks: int = 1,
    axes: Axes = Axes(),
) -> Estimate:
    """Memory, bytes and time of a training step of MoE blocks on a mesh.

    Args:
      config_or_name: a MoEConfig, or a name of `moax.estimate.MODELS`.
      mesh_shape: axis sizes in the order of the devices, neighbours along the last one; {} for one GPU.
      tokens: of a GPU in a step: the tokens of the whole mesh over its GPUs. (The ranks of tp share theirs.)
      recipe: as of `moax.moe`.
      hardware: a name of `moax.estimate.HARDWARE`, or a Hardware.
      layers: MoE blocks of the model. None: the layers of the named model, 1 for a config.
      exchange: as of `moax.moe`. Nothing is asked of this machine; the mesh and the hardware decide whether it can run.
      capacity_factor: takes the place of the config's, where given.
      remat: a layer keeps its input alone, and does its forward again before its backward.
      dtype: of activations.
      param_dtype: of parameters and their gradients.
      optimizer_bytes: of state for each parameter; 8 is two float32 moments.
      kernels: the implementation that computes. `auto` is the fastest that moax has for the hardware. The Hopper
        kernels start each expert at a multiple of 128 rows.
      chunks: as of `moax.moe`: memory is that of one part at a time, and backward walks each part forward again.
      axes: roles of the mesh axes.

    Raises:
      ValueError: an unknown name, an axis without a role, or sizes that do not divide over the mesh.
      Unsupported: the transport or the kernels cannot run on this hardware and mesh.
    """
    model = find_model(config_or_name) if isinstance(config_or_name, str) else None
    config = model.config if model else config_or_name
    if not isinstance(config, MoEConfig):
        raise ValueError(f"config_or_name={config_or_name!r} must be a MoEConfig or the name of a model")
    if capacity_factor is not None:
        config = dataclasses.replace(config, capacity_factor=capacity_factor)
    layers = (model.layers if model else 1) if layers is None else layers
    sizes = dict(mesh_shape)
    _check(sizes, axes, tokens=tokens, layers=layers, chunks=chunks)
    if optimizer_bytes < 0:
        raise ValueError(f"optimizer_bytes={optimizer_bytes} must be at least 0")
    for name, value, choices in (
        ("dtype", dtype, DTYPES), ("param_dtype", param_dtype, DTYPES), ("kernels", kernels, ("auto", "hopper", "xla")),
    ):  # fmt: skip
        if value not in choices:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")
    on = find_hardware(hardware)
    options = Execution(
        recipe=get_recipe(recipe),
        exchange=exchange,
        kernels=find_kernels(kernels, on),
        chunks=chunks,
        remat=remat,
        dtype=dtype,
        param_dtype=param_dtype,
        axes=axes,
    )
    of_shard = tokens * math.prod(sizes.get(name, 1) for name in axes.tp)
    shard = make_shard(config, sizes, of_shard, options, on)
    plain = dataclasses.replace(shard, options=dataclasses.replace(options, recipe=get_recipe(None)))
    moved, wires = transfers(shard), Wires(on, tuple(sizes.items()))
    stages = [*work(shard, on), *wires.stages(moved)]
    gathers = [t for t in transfers(plain) if t.what == "weight gather"]
    return Estimate(
        model=config_or_name if isinstance(config_or_name, str) else "config",
        config=config,
        mesh=tuple(sizes.items()),
        tokens=tokens,
        recipe=recipe if isinstance(recipe, str) else "none" if recipe is None else "custom",
        hardware=on.name,
        kernels=options.kernels,
        rates=_rates(options, on),
        layers=layers,
        exchange=shard.exchange.transport,
        chunks=chunks,
        remat=remat,
        memory=measure_memory(shard, layers, optimizer_bytes),
        capacity=int(on.memory * on.usable),
        stages=tuple(sorted(stages, key=lambda stage: DIRECTIONS.index(stage.direction))),
        transfers=moved,
        plain_gather=next(iter(wires.stages(gathers, merge=True)), Stage("weight gather", "backward", 0.0, "nvlink")),
    )


def _rates(options: Execution, on: Hardware) -> str:
    """What the times rest on."""
    recipe, name = options.recipe, options.kernels
    fp8, quantized = takes_fp8(name, recipe), any(f is not None for f in (recipe.x, recipe.w, recipe.dy))
    text = f"Products run on kernels {name!r}, in {'FP8' if fp8 else 'bf16'}; their rates are {on.basis}."
    if not quantized or fp8:
        return text
    text += " Operands of this recipe are dequantized before products"
    others = [other for other in IMPLEMENTATIONS if takes_fp8(other, recipe)]
    missing = others and not any(other in on.products for other in others)
    return text + (f": moax has no FP8 kernels for {on.name}." if missing else ".")


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
    """Every mesh (dp, fsdp, ep, tp) of `gpus` GPUs that the sizes divide over: the ones that fit first, fastest first.

    Args:
      gpus: of the mesh.
      exchange: None tries every transport that runs on any mesh, and keeps the fastest that fits, of each mesh.
      remat: None tries both, likewise.
      config_or_name, tokens, recipe, hardware, layers, options: as of `estimate`.

    Returns:
      One Estimate a mesh; the meshes that do not fit come last, by memory. Ties go by memory, then by sizes.

    Raises:
      ValueError: as `estimate`; no mesh of so many GPUs divides the sizes.
      Unsupported: as `estimate`.
    """
    if isinstance(gpus, bool) or not isinstance(gpus, int) or gpus < 1:
        raise ValueError(f"gpus={gpus!r} must be an int of at least 1")
    estimate(config_or_name, {}, tokens, recipe, hardware, layers, exchange=exchange or "auto", **options)
    portable = [name for name, transport in TRANSPORTS.items() if transport.portable]
    transports: list[Any] = portable if exchange is None else [exchange]
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
