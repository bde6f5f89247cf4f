"""`estimate` computes the cost of one mesh; `sweep` ranks all meshes of a number of GPUs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jax.typing import DTypeLike

from moax.config import MoEConfig
from moax.estimate.block import Execution, find_kernels, make_shard
from moax.estimate.hardware import Hardware, find_hardware
from moax.estimate.memory import Memory, measure_memory
from moax.estimate.times import Stage, Wires, work
from moax.estimate.wires import DIRECTIONS, Transfer, transfers
from moax.kernels import IMPLEMENTATIONS, takes_fp8
from moax.mesh.axes import Axes
from moax.mesh.collectives import get_grad_reduce
from moax.models import find_model
from moax.ops.exchange import TRANSPORTS, Exchange
from moax.options import check_buffer_factor
from moax.recipe import Recipe, Recipes, get_recipes

DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The cost of blocks on a mesh. Bytes and seconds are of one device and one step (forward and backward).

    Attributes:
      model: the name of the model, or "config".
      config: the block.
      mesh: (axis, size) pairs.
      tokens: tokens of a GPU in one step.
      recipe: the name of the recipe, "custom", or "none".
      hardware: the name of the GPU.
      kernels: the implementation whose rates the times have.
      rates: sentences that say which rates the times have.
      layers: number of MoE blocks.
      exchange: the name of the transport.
      buffer_factor: the buffers' size in balanced loads; None is the worst case.
      imbalance: the assignments of the busiest rank of ep, as a multiple of the balanced load.
      passes: the passes over the buffers that a step of this imbalance takes.
      remat: whether backward recomputes the forward pass.
      memory: see `Memory`.
      capacity: bytes of a device that a program can have.
      stages: the stages of one layer.
      transfers: the arrays that one layer moves.
      plain_gather: the weight gathers of one layer without quantization, as one stage.
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
    buffer_factor: float | None
    imbalance: float
    passes: int
    remat: bool
    memory: Memory
    capacity: int
    stages: tuple[Stage, ...]
    transfers: tuple[Transfer, ...]
    plain_gather: Stage

    @property
    def gpus(self) -> int:
        """Number of GPUs of the mesh."""
        return math.prod(size for _, size in self.mesh)

    @property
    def fits(self) -> bool:
        """Whether the memory of a device suffices."""
        return self.memory.total <= self.capacity

    @property
    def seconds(self) -> float:
        """Seconds of the blocks of all layers in a step, without attention and the rest of the model."""
        return self.layers * sum(stage.seconds for stage in self.stages)

    @property
    def tflops(self) -> float:
        """TFLOP/s of a GPU over the whole step; only the products of experts count as work."""
        c = self.config
        flops = 6 * self.tokens * c.d_model * (c.gates + 1) * (c.top_k * c.d_ff + c.shared_d_ff)
        return self.layers * flops / self.seconds / 1e12

    def wire_bytes(self, what: str | None = None) -> int:
        """Returns the bytes that a device sends in a step over all layers.

        Args:
          what: one of `moax.estimate.wires.WIRES`; None counts all of them.
        """
        return self.layers * sum(t.bytes for t in self.transfers if what in (None, t.what))

    @property
    def gather_saved(self) -> tuple[int, float]:
        """(bytes, seconds) on the wire that quantizing before the gather saves in a step.

        The seconds do not include the time to quantize.
        """
        gathers = [stage for stage in self.stages if stage.name == "weight gather"]
        spared = self.plain_gather.seconds - sum(stage.seconds for stage in gathers)
        return self.layers * self.plain_gather.wire_bytes - self.wire_bytes("weight gather"), self.layers * spared

    def as_dict(self) -> dict[str, Any]:
        """Returns the estimate as values that JSON can hold, in bytes and seconds."""
        plain = (
            "model", "tokens", "recipe", "hardware", "kernels", "rates", "layers", "exchange", "buffer_factor",
            "imbalance", "passes", "remat", "capacity",
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
    recipe: str | Recipe | Recipes | None = None,
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
    buffer_factor: float | None = 1.25,
    save_rows: bool = True,
    grad_reduce_dtype: DTypeLike | None = None,
    imbalance: float = 1.0,
    axes: Axes = Axes(),
) -> Estimate:
    """Estimates memory, bytes on wires and time of a training step of MoE blocks on a mesh.

    Args:
      config_or_name: a MoEConfig, or a name of `moax.estimate.MODELS`.
      mesh_shape: axis sizes in the order of the devices: neighbours along the last axis are neighbouring devices. {}
        is one GPU.
      tokens: tokens of a GPU in a step, that is the tokens of the whole mesh divided by its GPUs. A rank of tp works on
        the tokens of all ranks of tp.
      recipe: the argument of `moax.moe`.
      hardware: a name of `moax.estimate.HARDWARE`, or a Hardware.
      layers: number of MoE blocks. None takes the layers of the named model, and 1 for a config.
      exchange: the argument of `moax.moe`. The mesh and the hardware decide whether it can run, not this machine.
      capacity_factor: replaces that of the config; None keeps that of the config.
      remat: a layer keeps only its input, and backward recomputes its forward pass.
      dtype: dtype of activations.
      param_dtype: dtype of parameters and their gradients.
      optimizer_bytes: bytes of the optimizer's state for each parameter; two float32 moments have 8.
      kernels: the implementation of the products. `auto` takes the fastest that moax has for the hardware. The Hopper
        kernels start each expert at a multiple of 64 rows, in FP8 of 128.
      buffer_factor, save_rows, grad_reduce_dtype: the arguments of `moax.moe`. The memory holds the loop of passes, and
        the times and bytes are those of one pass.
      imbalance: the assignments of the busiest rank of ep, as a multiple of the balanced load, for `Estimate.passes`.
      axes: roles of the mesh axes.

    Returns:
      The estimate of one device and one step.

    Raises:
      ValueError: a name is unknown, an axis has no role, or the sizes do not divide over the mesh.
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
    _check(sizes, axes, tokens=tokens, layers=layers)
    check_buffer_factor(buffer_factor)
    if not imbalance >= 1:
        raise ValueError(f"imbalance={imbalance!r} must be at least 1, which is the balanced load")
    if optimizer_bytes < 0:
        raise ValueError(f"optimizer_bytes={optimizer_bytes} must be at least 0")
    for name, value, choices in (
        ("dtype", dtype, DTYPES), ("param_dtype", param_dtype, DTYPES), ("kernels", kernels, ("auto", "hopper", "xla")),
    ):  # fmt: skip
        if value not in choices:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")
    on = find_hardware(hardware)
    options = Execution(
        recipe=get_recipes(recipe),
        exchange=exchange,
        kernels=find_kernels(kernels, on),
        buffer_factor=buffer_factor,
        save_rows=save_rows,
        grad_reduce=get_grad_reduce(grad_reduce_dtype),
        remat=remat,
        dtype=dtype,
        param_dtype=param_dtype,
        axes=axes,
    )
    of_shard = tokens * math.prod(sizes.get(name, 1) for name in axes.tp)
    shard = make_shard(config, sizes, of_shard, options, on)
    plain = dataclasses.replace(shard, options=dataclasses.replace(options, recipe=get_recipes(None)))
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
        buffer_factor=buffer_factor,
        imbalance=imbalance,
        passes=shard.passes_at(imbalance),
        remat=remat,
        memory=measure_memory(shard, layers, optimizer_bytes),
        capacity=int(on.memory * on.usable),
        stages=tuple(sorted(stages, key=lambda stage: DIRECTIONS.index(stage.direction))),
        transfers=moved,
        plain_gather=next(iter(wires.stages(gathers, merge=True)), Stage("weight gather", "backward", 0.0, "nvlink")),
    )


def _rates(options: Execution, on: Hardware) -> str:
    """Returns the sentences that say which rates the times have."""
    recipe, name = options.recipe, options.kernels
    fast = [takes_fp8(name, one) for one in recipe.both]
    slow = [one for one in recipe.both if any((one.x, one.w, one.dy)) and not takes_fp8(name, one)]
    of_wi, of_wo = ("FP8" if one else "bf16" for one in fast)
    dtypes = of_wi if of_wi == of_wo else f"{of_wi} with wi and {of_wo} with wo"
    text = f"Products run on kernels {name!r}, in {dtypes}; their rates are {on.basis}."
    if not slow:
        return text
    text += " Operands of this recipe are dequantized before products"
    others = [other for other in IMPLEMENTATIONS if all(takes_fp8(other, one) for one in slow)]
    missing = others and not any(other in on.products for other in others)
    return text + (f": moax has no FP8 kernels for {on.name}." if missing else ".")


def sweep(
    config_or_name: MoEConfig | str,
    gpus: int,
    tokens: int,
    recipe: str | Recipe | Recipes | None = None,
    hardware: str | Hardware = "h200",
    layers: int | None = None,
    *,
    exchange: Exchange | None = None,
    remat: bool | None = None,
    **options: Any,
) -> list[Estimate]:
    """Ranks every mesh (dp, fsdp, ep, tp) of `gpus` GPUs over which the sizes divide; to the blocks cp is as dp.

    Args:
      gpus: number of GPUs.
      exchange: None tries every transport that runs on any mesh, and keeps the fastest that fits for each mesh.
      remat: None tries both values, and keeps the faster that fits for each mesh.
      config_or_name, tokens, recipe, hardware, layers, options: the arguments of `estimate`.

    Returns:
      One Estimate for each mesh. The meshes that fit come first, the fastest first. The meshes that do not fit follow,
      the one of least memory first. Ties go by memory, then by axis sizes.

    Raises:
      ValueError: `estimate` raises it, or the sizes divide over no mesh of `gpus` GPUs.
      Unsupported: `estimate` raises it.
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
            tried = [
                estimate(config_or_name, shape, tokens, recipe, hardware, layers, exchange=way, remat=again, **options)
                for way, again in ways
            ]
        except ValueError as error:
            refused = str(error)
            continue
        best.append(min(tried, key=_rank))
    if not best:
        raise ValueError(f"gpus={gpus}: no mesh of (dp, fsdp, ep, tp) divides these sizes; the last refusal: {refused}")
    return sorted(best, key=_rank)


def _rank(e: Estimate) -> tuple:
    """Returns the key that sorts estimates; see `sweep`."""
    sizes = tuple(size for _, size in e.mesh)
    return (not e.fits, e.seconds if e.fits else 0.0, e.memory.total, sizes, e.exchange, e.remat)


def _factored(gpus: int) -> Iterator[dict[str, int]]:
    """Yields every mesh of `gpus` GPUs, as {"dp": 1, "fsdp": 2, "ep": 4, "tp": 1} for 8."""
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    for first in itertools.product(divisors, repeat=3):
        if gpus % math.prod(first) == 0:
            yield dict(zip(("dp", "fsdp", "ep", "tp"), (*first, gpus // math.prod(first)), strict=True))


def _check(sizes: Mapping[str, int], axes: Axes, **counts) -> None:
    """Raises ValueError for a size or a count below 1, and for a mesh axis without a role."""
    for name, size in {**sizes, **counts}.items():
        what = f"mesh_shape: {name}" if name in sizes else name
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{what}={size!r} must be an int of at least 1")
    for name in sizes:
        if name not in axes.names:
            raise ValueError(f"mesh_shape: axis {name!r} has no role; the axes are {', '.join(axes.names)}")
