"""One MoE block on a mesh of described GPUs: its plan, the trace of its microbatch, and what the trace does not show.

The trace has every array and every collective of forward and backward. It does not have the operations of the matmuls,
which `count_operations` adds.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from moax.block.moe import moe, quantize_params
from moax.block.plan import BlockPlan, make_plan
from moax.config import MoEConfig, Options
from moax.estimate.result import Once
from moax.estimate.tracing import Trace, trace
from moax.mesh.axes import ResolvedAxes
from moax.params import MoEParams, expert_specs, operand_shapes, trainable_mask
from moax.types import Kept, QuantizedParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """A block, and how a microbatch runs it.

    Attributes:
      config, options, remat, kept: see `moax.estimate.estimate`.
      mesh, axes: the described GPUs, and the mesh axes by role.
      tokens: those of a shard in a microbatch. The devices along tp share a shard.
      dtype, param_dtype: the dtypes of activations and of parameters.
    """

    config: MoEConfig
    options: Options
    mesh: AbstractMesh
    axes: ResolvedAxes
    tokens: int
    dtype: np.dtype
    param_dtype: np.dtype
    remat: bool
    kept: Kept | None


class BlockTrace(NamedTuple):
    """The trace of a microbatch of one block, and the arrays in it by their numbers.

    Attributes:
      once: what a step does before its microbatches.
      steps: forward and backward of the microbatch.
      x: the input.
      params, trained: the parameters, and those of them that the optimizer trains.
      saved: the arrays that forward makes and keeps for backward, in the order of their numbers.
    """

    once: Once
    steps: Trace
    x: int
    params: tuple[int, ...]
    trained: tuple[int, ...]
    saved: tuple[int, ...]


def plan_block(block: BlockSpec) -> BlockPlan:
    """Returns the plan of the experts. The mesh of `block` is in force.

    Raises:
      Unsupported: the kernels cannot run on this hardware.
    """
    return make_plan(
        block.config,
        block.options,
        axes=block.axes,
        declared=expert_specs(block.config, block.options.axes, block.axes),
        tokens=block.tokens,
        dtype=block.dtype,
        gathered=block.kept == "gathered",
    )


def trace_block(block: BlockSpec) -> BlockTrace:
    """Returns the trace of a microbatch, forward and backward. The mesh of `block` is in force."""
    options = block.options
    rows = block.tokens * block.axes.size(block.axes.tokens)
    params, x = operand_shapes(block.config, rows, options.axes, block.mesh, block.dtype, block.param_dtype)
    quantized, once = _trace_once(block, params)
    steps = _trace_step(block, quantized, params, x)

    *weights, x_array, _ = steps.inputs
    param_arrays = weights[len(jax.tree.leaves(quantized)) :]
    is_trained = jax.tree.leaves(trainable_mask(params))
    trained = [array for array, trains in zip(param_arrays, is_trained, strict=True) if trains]
    num_others = 2 + len(param_arrays) + 1  # y, the loss, the gradients of params, and that of x
    saved = {array for array in steps.outputs[:-num_others] if array not in steps.inputs}
    return BlockTrace(
        once=once,
        steps=steps,
        x=x_array,
        params=tuple(param_arrays),
        trained=tuple(trained),
        saved=tuple(sorted(saved)),
    )


def count_traffic(steps: Trace, plan: BlockPlan) -> int:
    """Returns the bytes of device memory that a microbatch reads and writes under a balanced load."""
    if plan.kernels == "xla":  # XLA's operations touch whole buffers
        return steps.traffic()
    hidden = [array for array, name in steps.names.items() if name == "moax_hidden"]
    num_rows = max(steps.shards[array].shape[0] for array in hidden)

    def is_sorted(array: int) -> bool:
        # Operands of wgrad are [C, N]. A dim of a weight [E, ...] or of an input may be as large as N by chance.
        shape = steps.shards[array].shape
        has_rows = shape[:1] == (num_rows,) or (len(shape) == 2 and shape[1] == num_rows)
        return has_rows and array not in steps.inputs

    without_rows = max(0.0, 1 - plan.expected / num_rows)
    sorted_arrays = filter(is_sorted, range(len(steps.shards)))
    return steps.traffic(dict.fromkeys(sorted_arrays, without_rows))


def count_operations(block: BlockSpec) -> int:
    """Returns the operations of the matmuls of a microbatch."""
    config = block.config
    tp = block.axes.size(block.axes.tp)
    columns_of_expert = config.d_rows * config.top_k * (config.d_ff // tp)
    columns_of_shared = config.d_model * (config.shared_d_ff // tp)
    product = 2 * block.tokens * (columns_of_expert + columns_of_shared)
    latent = 2 * block.tokens * config.d_model * (config.d_latent or 0)
    # With remat, forward runs again up to the last matmul whose result backward reads: wo's for latent_up alone.
    repeats_wo = block.remat and latent > 0
    of_wi = (3 + block.remat) * (config.gates * product + latent)
    of_wo = (3 + repeats_wo) * product + 3 * latent
    return of_wi + of_wo


def _trace_once(
    block: BlockSpec, params: MoEParams[jax.ShapeDtypeStruct]
) -> tuple[QuantizedParams[jax.ShapeDtypeStruct] | None, Once]:
    """Returns the quantized weights of a step as shapes, None where each call quantizes, and what making them costs."""
    if block.kept is None:
        return None, Once()

    def quantize(params):
        gather = block.kept == "gathered"
        return quantize_params(params, block.config, block.options, dtype=block.dtype, gather=gather)

    steps = trace(quantize, params)
    new_arrays = [array for array in steps.outputs if array not in steps.inputs]
    size = sum(steps.bytes[array] for array in new_arrays)
    return jax.eval_shape(quantize, params), Once(size, steps.transfers(block.axes), steps.traffic())


def _trace_step(
    block: BlockSpec,
    quantized: QuantizedParams[jax.ShapeDtypeStruct] | None,
    params: MoEParams[jax.ShapeDtypeStruct],
    x: jax.ShapeDtypeStruct,
) -> Trace:
    """Returns the trace of forward and backward; its first results are the arrays that forward keeps."""

    def step(quantized, params, x, dy):
        def forward(params, x):
            y, stats = moe(x, params, block.config, block.options, quantized=quantized)
            return y, stats.aux_loss + stats.z_loss

        if block.remat:
            forward = jax.checkpoint(forward)
        (y, loss), pull = jax.vjp(forward, params, x)
        saved = jax.tree.leaves(pull)
        return saved, y, loss, pull((dy, jnp.ones_like(loss)))

    return trace(step, quantized, params, x, x)
