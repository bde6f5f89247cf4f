"""The cost of MoE blocks on a mesh: the memory of a device, the bytes of each collective, and the time.

    seconds = operations / rate of products + bytes of device memory / its rate + bytes of collectives / rate of a link

`estimate` traces `moax.moe` and its gradient on a mesh of described GPUs. It needs no GPU, and compiles nothing. The
bytes are those of the block itself. The times assume a balanced load and no overlap: compare meshes by them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Unpack

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from moax.block.layer import moe
from moax.block.moe import BlockPlan, make_plan
from moax.checks import Unsupported, check_value
from moax.config import MoEConfig, OptionKeywords, Options, replace_options
from moax.estimate.tracing import trace
from moax.exchange import TRANSPORTS, find_transport, select_transport
from moax.exchange.transport import Transfer
from moax.kernels import supports_fp8
from moax.mesh.axes import Axes, Names, ResolvedAxes
from moax.mesh.specs import local_shape
from moax.models import find_model
from moax.ops.dispatch_combine import STEPS
from moax.params import expert_specs, operand_shapes, param_shapes, trainable_mask
from moax.text import align, plural


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A GPU and its links, with the rates that programs reach on it.

    Attributes:
      kind: its name in JAX, by which moax chooses its kernels.
      memory: the bytes of a GPU.
      bf16, fp8: operations/s of grouped products.
      xla: operations/s of the grouped products of `kernels="xla"`.
      hbm: bytes/s of device memory, reads plus writes.
      nvlink, network: bytes/s that a GPU sends to GPUs of its host, and through its NIC.
      host: the GPUs of one host.
      cores: the multiprocessors of a GPU.
    """

    kind: str
    memory: float
    bf16: float
    fp8: float
    xla: float
    hbm: float
    nvlink: float
    network: float
    host: int = 8
    cores: int = 132


# H200: means over forward, dgrad and wgrad of the medians in benchmarks/results/h200_gemm.json and
# h200_xla_products.json; a copy; NCCL between four. H100: its memory is slower by the data sheets. A NIC has 400 Gb/s.
HARDWARE: dict[str, Hardware] = {
    "h100": Hardware("NVIDIA H100", 80e9, 760e12, 1130e12, 257e12, 2.99e12, 280e9, 45e9),
    "h200": Hardware("NVIDIA H200", 141e9, 760e12, 1130e12, 257e12, 4.29e12, 280e9, 45e9),
}


class Memory(NamedTuple):
    """Bytes on one device, all layers together.

    Attributes:
      weights, gradients: the parameters and their gradients, in the dtype of the parameters.
      optimizer: the state of the optimizer.
      saved: the arrays that forward keeps for backward, with the input of each layer.
      temporary: the most bytes of other arrays that live at once in one layer. XLA's schedule may need a third more.
    """

    weights: int
    gradients: int
    optimizer: int
    saved: int
    temporary: int

    @property
    def total(self) -> int:
        """The sum of all."""
        return sum(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The cost of blocks on a mesh. Bytes, operations and seconds are of one device and one step, forward and backward.

    Attributes:
      config, mesh, tokens, layers, hardware: the arguments of `estimate`.
      plan: how the experts run: transport, implementation, and the sizes of all buffers.
      memory: see `Memory`.
      transfers: the arrays that one layer sends, by the name of their scope in a profile; `sum` has those of none.
      operations: (wi, wo), the operations of one layer's products with each, with the shared expert and latent experts.
      traffic: the bytes of device memory that one layer reads and writes.
    """

    config: MoEConfig
    mesh: Mapping[str, int]
    tokens: int
    layers: int
    hardware: Hardware
    plan: BlockPlan
    memory: Memory
    transfers: Mapping[str, list[Transfer]]
    operations: tuple[int, int]
    traffic: int

    @property
    def fits(self) -> bool:
        """Whether the blocks alone fit into the memory of a GPU."""
        return self.memory.total <= self.hardware.memory

    @property
    def seconds(self) -> float:
        """The seconds of all layers."""
        return sum(self.times.values())

    @property
    def times(self) -> dict[str, float]:
        """The seconds of the products, of device memory, and of the collectives of each scope, all layers together."""
        kernels, recipe, on = self.plan.kernels, self.plan.recipe, self.hardware
        both = recipe.wi, recipe.wo
        rates = [on.xla if kernels == "xla" else on.fp8 if supports_fp8(kernels, of) else on.bf16 for of in both]
        products = sum(n / rate for n, rate in zip(self.operations, rates, strict=True))
        times = {"products": products, "device memory": self.traffic / on.hbm}
        times |= {scope: sum(t.bytes / self.link(t.axes) for t in moved) for scope, moved in self.transfers.items()}
        return {name: self.layers * seconds for name, seconds in times.items()}

    def link(self, axes: Names) -> float:
        """Returns the bytes/s of a device in a ring along `axes`: of NVLink, or of all NICs of the ring on one host."""
        stride, local, group = 1, 1, 1
        for name, size in reversed(tuple(self.mesh.items())):
            if name in axes:
                group *= size
                local *= min(size, max(1, self.hardware.host // stride))
            stride *= size
        on = self.hardware
        return on.nvlink if local == group else min(on.nvlink, local * on.network)

    def __str__(self) -> str:
        """The layout of parameters, the memory, and the bytes and times of a step, as text."""
        c, mesh = self.config, ",".join(f"{axis}={size}" for axis, size in self.mesh.items()) or "one GPU"
        shared = f", a shared expert of {c.shared_d_ff}" if c.shared_d_ff else ""
        shared += f", latent experts of rows of {c.d_latent}" if c.d_latent else ""
        head = (
            f"{plural(self.layers, 'MoE layer')} of {c.num_experts} experts, {c.top_k} a token; width {c.d_model}, "
            f"experts of {c.d_ff}, {c.activation}{shared}\n{self.hardware.kind}, mesh {mesh}: {self.tokens} tokens a "
            f"GPU, exchange {self.plan.first.exchange.transport}, kernels {self.plan.kernels}"
        )
        params, axes = [("parameter", "shape", "mesh axes", "shard"), None], self.plan.axes
        specs = expert_specs(c, Axes(), axes)
        for of, shape in vars(param_shapes(c)).items():
            if shape is not None:
                spec = getattr(specs, of)
                params.append((of, str(shape), str(tuple(spec)), str(local_shape(shape, spec, axes))))
        sizes = self.memory._asdict() | {"total": self.memory.total}
        sizes |= {"of a GPU" if self.fits else "TOO MUCH for": self.hardware.memory}
        memory = [("memory of a device", "GB"), None, *((of, f"{size / 1e9:.2f}") for of, size in sizes.items())]
        times, sent = self.times | {"total": self.seconds}, {of: self.wire_bytes(of) for of in self.transfers}
        sent["total"] = self.wire_bytes()
        steps = [("in a step", "MB sent", "ms"), None]
        steps += [(of, f"{sent[of] / 1e6:,.1f}" if of in sent else "", f"{s * 1e3:,.2f}") for of, s in times.items()]
        return "\n\n".join([head, align(params), align(memory, right=(1,)), align(steps, right=(1, 2))])

    def wire_bytes(self, scope: str | None = None) -> int:
        """Returns the bytes that a device sends in a step over all layers, of one scope of `transfers` or of all."""
        return self.layers * sum(t.bytes for at, moved in self.transfers.items() if scope in (None, at) for t in moved)


def estimate(
    model: MoEConfig | str,
    mesh: Mapping[str, int],
    tokens: int,
    options: Options = Options(),
    *,
    hardware: Hardware | str = "h200",
    layers: int | None = None,
    dtype: str = "bfloat16",
    param_dtype: str = "float32",
    optimizer_bytes: int = 8,
    remat: bool = False,
    **keywords: Unpack[OptionKeywords],
) -> Estimate:
    """Computes the cost of a model's MoE blocks on a mesh.

    Args:
      model: the sizes of a block, or the name of a model in `moax.models.MODELS`.
      mesh: the number of devices along each mesh axis, {"fsdp": 4, "ep": 8}. Neighbours along the last axis are
        neighbouring devices.
      tokens: the tokens of a GPU in a step.
      options: how a block runs.
      hardware: the GPU: a name in `HARDWARE`, or a `Hardware` with rates of your own.
      layers: the number of blocks; None means that of the model, and 1 for a config.
      dtype, param_dtype: the dtypes of activations and of parameters; `router_bias` is float32.
      optimizer_bytes: the bytes of the optimizer's state for each parameter that it trains.
      remat: whether `jax.checkpoint` is around each block.
      **keywords: fields of `Options` that replace those of `options`.

    Raises:
      ValueError: a name is unknown, or the mesh axes of a dim do not divide its size.
      Unsupported: the transport or the kernels cannot run on this hardware and mesh.
    """
    config = find_model(model).config if isinstance(model, str) else model
    check_value("model", config, MoEConfig)
    if layers is None:
        layers = find_model(model).layers if isinstance(model, str) else 1
    options = replace_options("estimate", options, keywords)
    if isinstance(hardware, str) and hardware not in HARDWARE:
        raise ValueError(f"hardware={hardware!r} must be one of {', '.join(map(repr, HARDWARE))}, or a Hardware")
    on = HARDWARE[hardware] if isinstance(hardware, str) else hardware
    for name, value in {**mesh, "tokens": tokens, "layers": layers}.items():
        check_value(name, value, int)

    sizes = dict(mesh) or {"dp": 1}
    kinds, device = (AxisType.Explicit,) * len(sizes), AbstractDevice(on.kind, on.cores, "gpu")
    whole = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds, abstract_device=device)
    axes = options.axes.resolve(whole)
    tokens_of_shard = tokens * axes.size(axes.tp)

    with jax.sharding.use_abstract_mesh(whole):
        plan = _plan(config, axes, tokens_of_shard, options, np.dtype(dtype), on)
        transport = plan.first.exchange.transport
        runs = transport if TRANSPORTS[transport].portable else "all_to_all"  # which has the same buffers
        options = dataclasses.replace(options, exchange=runs)
        rows = tokens_of_shard * axes.size(axes.tokens)
        params, x = operand_shapes(config, rows, options.axes, whole, np.dtype(dtype), np.dtype(param_dtype))
        saved: list[Any] = []

        def block(params, x):
            y, stats = moe(x, params, config, options)
            return y, stats.aux_loss + stats.z_loss

        def step(params, x, dy):
            (y, loss), pull = jax.vjp(jax.checkpoint(block) if remat else block, params, x)
            saved[:] = jax.tree.leaves(pull)
            return saved, y, loss, pull((dy, jax.numpy.ones_like(loss)))

        steps = trace(step, params, x, x)
    kept = {array for array in steps.outputs[: len(saved)] if array not in steps.inputs}
    *of_params, of_x, _ = steps.inputs
    weights = layers * steps.total(of_params)
    trained = [array for array, of in zip(of_params, jax.tree.leaves(trainable_mask(params)), strict=True) if of]
    optimizer = layers * steps.total(trained) // np.dtype(param_dtype).itemsize * optimizer_bytes
    saved_bytes = layers * (steps.bytes[of_x] + steps.total(kept))
    memory = Memory(weights, weights, optimizer, saved=saved_bytes, temporary=steps.peak(kept))
    transfers = steps.transfers(axes)
    if runs != transport:
        transfers |= _puts(plan, config, transfers)
    tp, latent = axes.size(axes.tp), 2 * tokens_of_shard * config.d_model * (config.d_latent or 0)
    width = config.d_rows * config.top_k * (config.d_ff // tp) + config.d_model * (config.shared_d_ff // tp)
    once, again = 2 * tokens_of_shard * width, remat and latent > 0  # backward reads the second product for latent_up
    operations = (3 + remat) * (config.gates * once + latent), (3 + again) * once + 3 * latent
    return Estimate(
        config=config, mesh=dict(mesh), tokens=tokens, layers=layers, hardware=on, plan=plan, memory=memory,
        transfers=transfers, operations=operations, traffic=steps.traffic(),
    )  # fmt: skip


def _plan(
    config: MoEConfig, axes: ResolvedAxes, tokens: int, options: Options, dtype: np.dtype, on: Hardware
) -> BlockPlan:
    """Returns the plan of the experts on the mesh in force."""
    name, gpus = find_transport(options.exchange, axes), axes.size(axes.all)
    if gpus > on.host and not TRANSPORTS[name].portable:
        raise Unsupported(f"exchange={name!r} runs on the {on.host} GPUs of one host, and the mesh has {gpus}")
    select_transport(name)
    declared, chosen = expert_specs(config, options.axes, axes), None if options.exchange == "auto" else name
    return make_plan(config, options, chosen, axes=axes, declared=declared, tokens=tokens, dtype=dtype)


def _puts(plan: BlockPlan, config: MoEConfig, traced: Mapping[str, list[Transfer]]) -> dict[str, list[Transfer]]:
    """Returns the transfers of the plan's transport, whose kernels are no collectives, in the place of all_to_all's."""
    own, made = plan.first.exchange, {}
    for scope in traced.keys() & {*STEPS}:
        moved = traced[scope]
        times = moved.count(moved[0])  # a chunk sends rows once, and twice with remat
        puts = TRANSPORTS[own.transport].cost(own, config.top_k, scope, moved[: len(moved) // times])
        made[scope] = puts * times
    return made
