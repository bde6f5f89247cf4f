"""What a step of several microbatches does once: `moax.quantize_params` quantizes the weights of the experts."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from moax.block.moe import quantize_params
from moax.config import MoEConfig, Options
from moax.estimate.tracing import trace
from moax.exchange.transport import Transfer
from moax.mesh.axes import ResolvedAxes
from moax.params import MoEParams
from moax.types import Kept, QuantizedParams


class Once(NamedTuple):
    """What a step does once for one layer, before its microbatches, on one device.

    Attributes:
      bytes: the bytes of the quantized weights that the step holds beside the parameters. A weight that already has the
        dtype of the products, and that no device gathers, is the parameter itself: it adds none.
      transfers: the arrays that are sent, by the name of their scope in a profile.
      traffic: the bytes of device memory that are read and written.
    """

    bytes: int = 0
    transfers: Mapping[str, list[Transfer]] = types.MappingProxyType({})
    traffic: int = 0


def trace_once(
    kept: Kept | None,
    params: MoEParams[jax.ShapeDtypeStruct],
    config: MoEConfig,
    options: Options,
    dtype: np.dtype,
    axes: ResolvedAxes,
) -> tuple[QuantizedParams[jax.ShapeDtypeStruct] | None, Once]:
    """Returns the quantized weights of one layer as shapes, None where each call quantizes, and what making them costs.

    The mesh of `axes` is in force, and has Explicit axes.
    """
    if kept is None:
        return None, Once()

    def quantize(params):
        return quantize_params(params, config, options, dtype=dtype, gather=kept == "gathered")

    steps = trace(quantize, params)
    new_arrays = [array for array in steps.outputs if array not in steps.inputs]
    size = sum(steps.bytes[array] for array in new_arrays)
    return jax.eval_shape(quantize, params), Once(size, steps.transfers(axes), steps.traffic())
