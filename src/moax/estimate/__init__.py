"""The cost of MoE blocks on a mesh: the memory of a device, the bytes of each collective, and the time.

    seconds = operations / rate of matmuls + bytes of device memory / its rate + bytes of collectives / rate of a link

`estimate` traces `moax.moe` and its gradient on a mesh of described GPUs. It needs no GPU, and compiles nothing. The
bytes are those of the block itself. The times assume a balanced load and no overlap: compare meshes by them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Unpack

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from moax.block.moe import moe
from moax.block.plan import BlockPlan, make_plan
from moax.checks import Unsupported, check_value
from moax.config import MoEConfig, OptionKeywords, Options, replace_options
from moax.estimate.hardware import HARDWARE as HARDWARE
from moax.estimate.hardware import RESERVE as RESERVE
from moax.estimate.hardware import Hardware as Hardware
from moax.estimate.hardware import find_hardware
from moax.estimate.kept import Once as Once
from moax.estimate.kept import trace_once
from moax.estimate.result import Estimate as Estimate
from moax.estimate.result import Memory as Memory
from moax.estimate.result import SavedArray as SavedArray
from moax.estimate.tracing import trace
from moax.exchange import TRANSPORTS, find_transport, select_transport
from moax.exchange.transport import Transfer
from moax.mesh.axes import ResolvedAxes
from moax.models import find_model
from moax.ops.dispatch_combine import STEPS
from moax.params import expert_specs, operand_shapes, trainable_mask
from moax.types import KEPT, Kept


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
    hardware = find_hardware(hardware)
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
