"""The cost of a model's blocks: one block is traced, and its cost counts for each layer and each microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Unpack

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from moax.checks import check_value
from moax.config import MoEConfig, OptionKeywords, Options, replace_options
from moax.estimate.block import BlockSpec, BlockTrace, count_operations, count_traffic, plan_block, trace_block
from moax.estimate.hardware import Hardware, find_hardware
from moax.estimate.result import Estimate, Memory, SavedArray
from moax.mesh.axes import AnyMesh
from moax.models import find_model
from moax.types import KEPT, Kept


def estimate(
    model: MoEConfig | str,
    mesh: Mapping[str, int] | AnyMesh,
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
      mesh: the number of devices along each mesh axis, {"fsdp": 4, "ep": 8}, or a mesh of JAX with these. Neighbours
        along the last axis are neighbouring devices.
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
      Unsupported: the kernels cannot run on this hardware.
    """
    config, layers = _find_model(model, layers)
    options = replace_options("estimate", options, keywords)
    hardware = find_hardware(hardware)
    if isinstance(mesh, AnyMesh):
        mesh = mesh.shape
    _check_sizes(mesh, tokens, layers, microbatches)
    if kept is not None:
        check_value("kept", kept, KEPT)
    check_value("optimizer_bytes", optimizer_bytes, int, least=0)
    check_value("other_bytes", other_bytes, int, least=0)
    check_value("dtype", dtype, jax.numpy.floating)
    check_value("param_dtype", param_dtype, jax.numpy.floating)
    check_value("remat", remat, bool)

    abstract_mesh = _make_mesh(mesh, hardware)
    axes = options.axes.resolve(abstract_mesh)
    block = BlockSpec(
        config=config,
        options=options,
        mesh=abstract_mesh,
        axes=axes,
        tokens=tokens // microbatches * axes.size(axes.tp),
        dtype=np.dtype(dtype),
        param_dtype=np.dtype(param_dtype),
        remat=remat,
        kept=kept,
    )
    with jax.sharding.use_abstract_mesh(abstract_mesh):
        plan = plan_block(block)
        traced = trace_block(block)

    return Estimate(
        config=config,
        mesh=dict(mesh),
        tokens=tokens,
        layers=layers,
        hardware=hardware,
        microbatches=microbatches,
        kept=kept,
        plan=plan,
        memory=_sum_memory(block, traced, layers, microbatches, optimizer_bytes, other_bytes),
        saved_arrays=_describe_saved(traced),
        once=traced.once,
        transfers=traced.steps.transfers(axes),
        operations=count_operations(block),
        traffic=count_traffic(traced.steps, plan),
    )


def _find_model(model: MoEConfig | str, layers: int | None) -> tuple[MoEConfig, int]:
    """Returns the config of a block and the number of layers: the caller's, or else that of the model."""
    if isinstance(model, str):
        published = find_model(model)
        config = published.config
        layers_of_model = published.layers
    else:
        config = model
        layers_of_model = 1
    check_value("model", config, MoEConfig)
    if layers is None:
        layers = layers_of_model
    return config, layers


def _check_sizes(mesh: Mapping[str, int], tokens: int, layers: int, microbatches: int) -> None:
    """Raises ValueError unless all sizes are positive, and the microbatches divide the tokens."""
    for name, value in {**mesh, "tokens": tokens, "layers": layers, "microbatches": microbatches}.items():
        check_value(name, value, int)
    if tokens % microbatches:
        nearest = -(-tokens // microbatches) * microbatches
        raise ValueError(f"tokens={tokens} must be a multiple of microbatches={microbatches}, such as {nearest}")


def _make_mesh(mesh: Mapping[str, int], hardware: Hardware) -> AbstractMesh:
    """Returns a mesh of described GPUs, of which this machine need not have one. Its axes are Explicit."""
    sizes = dict(mesh) or {"dp": 1}
    device = AbstractDevice(hardware.kind, hardware.cores, "gpu")
    return AbstractMesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Explicit,) * len(sizes),
        abstract_device=device,
    )


def _sum_memory(
    block: BlockSpec,
    traced: BlockTrace,
    layers: int,
    microbatches: int,
    optimizer_bytes: int,
    other_bytes: int,
) -> Memory:
    """Returns the memory of all layers, and of the rest of the model."""
    steps = traced.steps
    weights = layers * steps.total(traced.params)
    gradient_sum = 0
    if microbatches > 1:
        gradient_sum = weights
    trained = layers * steps.total(traced.trained) // block.param_dtype.itemsize
    saved = steps.bytes[traced.x] + steps.total(traced.saved)
    return Memory(
        weights=weights,
        quantized=layers * traced.once.bytes,
        gradients=weights,
        gradient_sum=gradient_sum,
        optimizer=trained * optimizer_bytes,
        saved=layers * saved,
        temporary=steps.peak(traced.saved),
        other=other_bytes,
    )


def _describe_saved(traced: BlockTrace) -> tuple[SavedArray, ...]:
    """Returns the arrays of one layer that forward keeps for backward, the input first."""
    steps = traced.steps
    arrays = [SavedArray("x", *steps.shards[traced.x], steps.bytes[traced.x])]
    for array in traced.saved:
        arrays.append(SavedArray(steps.origin(array), *steps.shards[array], steps.bytes[array]))
    return tuple(arrays)
