"""The cost of MoE blocks on a mesh: the memory of a device, the bytes of each collective, and the time.

    seconds = operations / rate of matmuls + bytes of device memory / its rate + bytes of collectives / rate of a link

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

from moax.block.moe import moe
from moax.block.plan import BlockPlan, make_plan
from moax.checks import Unsupported, check_value
from moax.config import MoEConfig, OptionKeywords, Options, replace_options
from moax.estimate.kept import Once as Once
from moax.estimate.kept import trace_once
from moax.estimate.tracing import trace
from moax.exchange import TRANSPORTS, find_transport, select_transport
from moax.exchange.transport import Transfer
from moax.kernels import supports_fp8
from moax.mesh.axes import Axes, Names, ResolvedAxes
from moax.mesh.specs import local_shape
from moax.models import find_model
from moax.ops.dispatch_combine import STEPS
from moax.params import expert_specs, operand_shapes, param_shapes, trainable_mask
from moax.recipe import Recipe
from moax.text import align, plural
from moax.types import KEPT, Kept


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
RESERVE = 0.1  # of a GPU's memory, for XLA, NCCL and the pieces between arrays


class Memory(NamedTuple):
    """Bytes on one device, all layers together.

    Attributes:
      weights, gradients: the parameters and their gradients, in the dtype of the parameters.
      quantized: the weights of the experts as `moax.quantize_params` makes them; 0 where each call quantizes them.
      gradient_sum: the sum of the gradients over microbatches, in the dtype of the parameters; 0 for one microbatch.
        It counts beside the whole gradients of one microbatch.
      optimizer: the state of the optimizer.
      saved: the arrays that forward keeps for backward, with the input of each layer.
      temporary: the most bytes of other arrays that live at once in one layer. XLA's schedule may need a third more.
      other: the bytes that the caller adds for the rest of the model.
    """

    weights: int
    quantized: int
    gradients: int
    gradient_sum: int
    optimizer: int
    saved: int
    temporary: int
    other: int = 0

    @property
    def total(self) -> int:
        """The sum of all."""
        return sum(self)


class SavedArray(NamedTuple):
    """An array of one layer that forward keeps for backward, on one device.

    Attributes:
      name: "x" for the input of the layer, a name of `moax.CHECKPOINT_NAMES`, or else the scope that makes the array.
        An array that has no name and no scope has "".
      dtype, shape: those of the part on one device.
      bytes: the size of this part.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The cost of blocks on a mesh. Bytes, operations and seconds are of one device and one step, forward and backward.

    Attributes:
      config, mesh, tokens, layers, hardware, microbatches, kept: the arguments of `estimate`.
      plan: how the experts run: transport, implementation, and the sizes of all buffers.
      memory: see `Memory`.
      saved_arrays: the arrays of one layer that `memory.saved` counts, the input first.
      once: what a step does once for one layer, before its microbatches; see `Once`.
      transfers: the arrays that one layer sends in each microbatch, by the name of their scope in a profile; `sum` has
        those of none.
      operations: (wi, wo), the operations of one layer's products with each in a microbatch, with the shared expert and
        latent experts.
      traffic: the bytes of device memory that one layer reads and writes in each microbatch.
    """

    config: MoEConfig
    mesh: Mapping[str, int]
    tokens: int
    layers: int
    hardware: Hardware
    microbatches: int
    kept: Kept | None
    plan: BlockPlan
    memory: Memory
    saved_arrays: tuple[SavedArray, ...]
    once: Once
    transfers: Mapping[str, list[Transfer]]
    operations: tuple[int, int]
    traffic: int

    @property
    def fits(self) -> bool:
        """Whether `memory` fits into the memory of a GPU, less a reserve of a tenth for XLA and NCCL."""
        return self.memory.total <= (1 - RESERVE) * self.hardware.memory

    @property
    def verdict(self) -> str:
        """A sentence that says whether `memory` fits, and what is left out of it."""
        usable = (1 - RESERVE) * self.hardware.memory / 1e9
        words = "fits" if self.fits else "does not fit"
        text = (
            f"{words}: {self.memory.total / 1e9:.1f} GB of {usable:.1f} GB, which are {self.hardware.memory / 1e9:.0f} "
            f"GB less a reserve of {RESERVE:.0%}"
        )
        if not self.memory.optimizer:
            text += "; the state of the optimizer is left out"
        if not self.memory.other:
            text += "; embeddings, attention and other layers are left out"
        return text

    @property
    def seconds(self) -> float:
        """The seconds of all layers."""
        return sum(self.times.values())

    @property
    def times(self) -> dict[str, float]:
        """The seconds of the products, of device memory, and of the collectives of each scope, all layers together."""
        products = 0.0
        recipes = self.plan.recipe
        for operations, recipe in zip(self.operations, (recipes.wi, recipes.wo), strict=True):
            products += operations / self._rate_of_products(recipe)
        traffic = self.microbatches * self.traffic + self.once.traffic
        times = {"products": self.microbatches * products, "device memory": traffic / self.hardware.hbm}
        for scope, transfers in self._sent.items():
            times[scope] = sum(transfer.bytes / self.link(transfer.axes) for transfer in transfers)
        return {name: self.layers * seconds for name, seconds in times.items()}

    @property
    def _sent(self) -> dict[str, list[Transfer]]:
        """The arrays that one layer sends in a step: those before the microbatches, then those of each one."""
        sent = {scope: list(transfers) for scope, transfers in self.once.transfers.items()}
        for scope, transfers in self.transfers.items():
            sent[scope] = sent.get(scope, []) + self.microbatches * transfers
        return sent

    def _rate_of_products(self, recipe: Recipe) -> float:
        """Returns the operations/s of products by a recipe."""
        if self.plan.kernels == "xla":
            return self.hardware.xla
        if supports_fp8(self.plan.kernels, recipe):
            return self.hardware.fp8
        return self.hardware.bf16

    def link(self, axes: Names) -> float:
        """Returns the bytes/s of a device in a ring along `axes`: of NVLink, or of all NICs of the ring on one host."""
        stride = 1  # devices from one to the next along an axis
        devices_of_host = 1
        devices = 1
        for name, size in reversed(tuple(self.mesh.items())):
            if name in axes:
                devices *= size
                devices_of_host *= min(size, max(1, self.hardware.host // stride))
            stride *= size
        if devices_of_host == devices:
            return self.hardware.nvlink
        return min(self.hardware.nvlink, devices_of_host * self.hardware.network)

    def __str__(self) -> str:
        """The layout of parameters, the memory, and the bytes and times of a step, as text."""
        memory = align(self._memory_rows(), right=(1,))
        steps = align(self._step_rows(), right=(1, 2))
        return "\n\n".join([self._head(), align(self._param_rows()), f"{memory}\n\n{self.verdict}", steps])

    def _head(self) -> str:
        """Returns the lines before the tables."""
        config = self.config
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh.items()) or "one GPU"
        further = ""
        if config.shared_d_ff:
            further += f", a shared expert of {config.shared_d_ff}"
        if config.d_latent:
            further += f", latent experts of rows of {config.d_latent}"
        parts = ""
        if self.microbatches > 1:
            parts = f" in {self.microbatches} microbatches"
        weights = ""
        if self.kept is not None:
            weights = f", weights {self.kept} for the step"
        return (
            f"{plural(self.layers, 'MoE layer')} of {config.num_experts} experts, {config.top_k} a "
            f"token; width {config.d_model}, experts of {config.d_ff}, "
            f"{config.activation}{further}\n{self.hardware.kind}, mesh {mesh}: {self.tokens} "
            f"tokens a GPU{parts}, exchange {self.plan.first.exchange.transport}, kernels "
            f"{self.plan.kernels}{weights}"
        )

    def _param_rows(self) -> list[Any]:
        """Returns the rows of the table of parameters."""
        axes = self.plan.axes
        specs = expert_specs(self.config, Axes(), axes)
        rows: list[Any] = [("parameter", "shape", "mesh axes", "shard"), None]
        for name, shape in vars(param_shapes(self.config)).items():
            if shape is not None:
                spec = getattr(specs, name)
                shard = local_shape(shape, spec, axes)
                rows.append((name, str(shape), str(tuple(spec)), str(shard)))
        return rows

    def _memory_rows(self) -> list[Any]:
        """Returns the rows of the table of memory."""
        sizes = self.memory._asdict()
        for name in ("quantized", "gradient_sum", "other"):
            if not sizes[name]:
                del sizes[name]
        sizes |= {"total": self.memory.total}
        rows = [(name, f"{size / 1e9:.2f}") for name, size in sizes.items()]
        return [("memory of a device", "GB"), None, *rows]

    def _step_rows(self) -> list[Any]:
        """Returns the rows of the table of a step."""
        rows: list[Any] = [("in a step", "MB sent", "ms"), None]
        for name, seconds in self.times.items():
            sent = ""
            if name in self._sent:
                sent = f"{self.wire_bytes(name) / 1e6:,.1f}"
            rows.append((name, sent, f"{seconds * 1e3:,.2f}"))
        total_sent = f"{self.wire_bytes() / 1e6:,.1f}"
        rows.append(("total", total_sent, f"{self.seconds * 1e3:,.2f}"))
        return rows

    def wire_bytes(self, scope: str | None = None) -> int:
        """Returns the bytes that a device sends in a step over all layers, of one scope or of all."""
        sent = self._sent
        scopes = sent if scope is None else (scope,)
        transfers = [transfer for name in scopes for transfer in sent.get(name, ())]
        return self.layers * sum(transfer.bytes for transfer in transfers)


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
    other_bytes: int = 0,
    microbatches: int = 1,
    kept: Kept | None = None,
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
      other_bytes: the bytes of a device for the rest of the model, such as embeddings and attention with their
        gradients, optimizer and activations. They count in `Estimate.fits`.
      microbatches: the parts of a step, each with tokens / microbatches tokens of a GPU. Their gradients are summed in
        the dtype of the parameters. The time of the sum is left out, as the optimizer's is.
      kept: what is done once a step, for all layers and microbatches. "kept" quantizes the weights of the experts, by
        `moax.quantize_params`. "gathered" also gathers them over fsdp (`gather=True`), so that each device holds its
        experts whole. None leaves both to each microbatch.
      **keywords: fields of `Options` that replace those of `options`.

    Raises:
      ValueError: a name is unknown, a number of bytes is negative, the mesh axes of a dim do not divide its size, or
        the microbatches do not divide the tokens.
      Unsupported: the transport or the kernels cannot run on this hardware and mesh.
    """
    if isinstance(model, str):
        config = find_model(model).config
        layers_of_model = find_model(model).layers
    else:
        config = model
        layers_of_model = 1
    check_value("model", config, MoEConfig)
    if layers is None:
        layers = layers_of_model
    options = replace_options("estimate", options, keywords)
    if not isinstance(hardware, Hardware):
        if hardware not in HARDWARE:
            raise ValueError(f"hardware={hardware!r} must be one of {', '.join(map(repr, HARDWARE))}, or a Hardware")
        hardware = HARDWARE[hardware]
    for name, value in {**mesh, "tokens": tokens, "layers": layers, "microbatches": microbatches}.items():
        check_value(name, value, int)
    if tokens % microbatches:
        nearest = -(-tokens // microbatches) * microbatches
        raise ValueError(f"tokens={tokens} must be a multiple of microbatches={microbatches}, such as {nearest}")
    if kept is not None:
        check_value("kept", kept, KEPT)
    for name, value in {"optimizer_bytes": optimizer_bytes, "other_bytes": other_bytes}.items():
        check_value(name, value, int, least=0)
    for name, value in {"dtype": dtype, "param_dtype": param_dtype}.items():
        check_value(name, value, jax.numpy.floating)
    check_value("remat", remat, bool)

    sizes = dict(mesh) or {"dp": 1}
    kinds = (AxisType.Explicit,) * len(sizes)
    device = AbstractDevice(hardware.kind, hardware.cores, "gpu")
    shape = tuple(sizes.values())
    abstract_mesh = AbstractMesh(shape, tuple(sizes), axis_types=kinds, abstract_device=device)
    axes = options.axes.resolve(abstract_mesh)
    tokens_of_shard = tokens // microbatches * axes.size(axes.tp)

    with jax.sharding.use_abstract_mesh(abstract_mesh):
        plan = _plan(config, axes, tokens_of_shard, options, np.dtype(dtype), hardware, gathered=kept == "gathered")
        transport = plan.first.exchange.transport
        traced_transport = transport
        if not TRANSPORTS[transport].portable:
            traced_transport = "all_to_all"  # which has the same buffers
        options = dataclasses.replace(options, exchange=traced_transport)
        rows = tokens_of_shard * axes.size(axes.tokens)
        params, x = operand_shapes(config, rows, options.axes, abstract_mesh, np.dtype(dtype), np.dtype(param_dtype))
        quantized, once = trace_once(kept, params, config, options, np.dtype(dtype), axes)
        saved: list[Any] = []

        def step(quantized, params, x, dy):
            def block(params, x):
                y, stats = moe(x, params, config, options, quantized=quantized)
                return y, stats.aux_loss + stats.z_loss

            run = jax.checkpoint(block) if remat else block
            (y, loss), pull = jax.vjp(run, params, x)
            saved[:] = jax.tree.leaves(pull)
            return saved, y, loss, pull((dy, jax.numpy.ones_like(loss)))

        steps = trace(step, quantized, params, x, x)
    saved_arrays = {array for array in steps.outputs[: len(saved)] if array not in steps.inputs}
    *weight_arrays, x_array, _ = steps.inputs
    param_arrays = weight_arrays[len(jax.tree.leaves(quantized)) :]
    weights = layers * steps.total(param_arrays)
    is_trained = jax.tree.leaves(trainable_mask(params))
    trained = [array for array, trains in zip(param_arrays, is_trained, strict=True) if trains]
    optimizer = layers * steps.total(trained) // np.dtype(param_dtype).itemsize * optimizer_bytes
    gradient_sum = 0
    if microbatches > 1:
        gradient_sum = weights
    memory = Memory(
        weights=weights,
        quantized=layers * once.bytes,
        gradients=weights,
        gradient_sum=gradient_sum,
        optimizer=optimizer,
        saved=layers * (steps.bytes[x_array] + steps.total(saved_arrays)),
        temporary=steps.peak(saved_arrays),
        other=other_bytes,
    )
    named_arrays = [SavedArray("x", *steps.shards[x_array], steps.bytes[x_array])]
    for array in sorted(saved_arrays):
        named_arrays.append(SavedArray(steps.origin(array), *steps.shards[array], steps.bytes[array]))
    transfers = steps.transfers(axes)
    if traced_transport != transport:
        transfers |= _puts(plan, config, transfers)
    return Estimate(
        config=config,
        mesh=dict(mesh),
        tokens=tokens,
        layers=layers,
        hardware=hardware,
        microbatches=microbatches,
        kept=kept,
        plan=plan,
        memory=memory,
        saved_arrays=tuple(named_arrays),
        once=once,
        transfers=transfers,
        operations=_count_operations(config, axes.size(axes.tp), tokens_of_shard, remat),
        traffic=steps.traffic(),
    )


def _count_operations(config: MoEConfig, tp: int, tokens: int, remat: bool) -> tuple[int, int]:
    """Returns the operations of the products of a step with wi, and with wo."""
    columns_of_expert = config.d_rows * config.top_k * (config.d_ff // tp)
    columns_of_shared = config.d_model * (config.shared_d_ff // tp)
    product = 2 * tokens * (columns_of_expert + columns_of_shared)
    latent = 2 * tokens * config.d_model * (config.d_latent or 0)
    # With remat, forward runs again up to the last product whose result backward reads: wo's for latent_up alone.
    repeats_wo = remat and latent > 0
    return (3 + remat) * (config.gates * product + latent), (3 + repeats_wo) * product + 3 * latent


def _plan(
    config: MoEConfig,
    axes: ResolvedAxes,
    tokens: int,
    options: Options,
    dtype: np.dtype,
    hardware: Hardware,
    *,
    gathered: bool,
) -> BlockPlan:
    """Returns the plan of the experts on the mesh in force."""
    name = find_transport(options.exchange, axes)
    gpus = axes.size(axes.all)
    if gpus > hardware.host and not TRANSPORTS[name].portable:
        raise Unsupported(f"exchange={name!r} runs on the {hardware.host} GPUs of one host, and the mesh has {gpus}")
    select_transport(name)
    declared = expert_specs(config, options.axes, axes)
    exchange = None if options.exchange == "auto" else name
    return make_plan(
        config,
        options,
        exchange,
        axes=axes,
        declared=declared,
        tokens=tokens,
        dtype=dtype,
        gathered=gathered,
    )


def _puts(
    plan: BlockPlan,
    config: MoEConfig,
    traced: Mapping[str, list[Transfer]],
) -> dict[str, list[Transfer]]:
    """Returns the transfers of the plan's transport, whose kernels are no collectives, in the place of all_to_all's."""
    exchange = plan.first.exchange
    transport = TRANSPORTS[exchange.transport]
    puts_of_scope = {}
    for scope in traced.keys() & {*STEPS}:
        transfers = traced[scope]
        times = transfers.count(transfers[0])  # 2 where remat dispatches again
        puts = transport.cost(exchange, config.top_k, scope, transfers[: len(transfers) // times])
        puts_of_scope[scope] = puts * times
    return puts_of_scope
