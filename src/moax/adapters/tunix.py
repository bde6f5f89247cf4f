"""Puts moax's block in the place of tunix's MoE layer of Qwen3; parameters, shardings and checkpoints stay tunix's.

    from moax.adapters import tunix

    tunix.install(recipe="fp8_block")  # then tunix's own training or sampling

tunix makes the model after this call, so that its jitted functions trace moax's block.
"""

from __future__ import annotations

from typing import Any, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float

from moax.adapters.versions import check_version
from moax.block.moe import moe
from moax.config import MoEConfig, OptionKeywords, Options, replace_options
from moax.mesh.axes import Axes
from moax.params import MoEParams

AXES = Axes(fsdp=("fsdp", "sp"), tp="tp", fsdp_dim="experts")


def install(**options: Unpack[OptionKeywords]) -> None:
    """Replaces the call of tunix's layer `MoELayer` in this process; call it before a model is jitted.

    Args:
      **options: the fields of `moax.Options`. The default of `axes` is `AXES`, which names tunix's mesh axes.

    Raises:
      ModuleNotFoundError: tunix is not installed.
      Unsupported: moax is not tested with the installed version of tunix.
      TypeError: `moax.Options` has no such field.
      ValueError: an option has a value that it cannot have.
    """
    check_version("google-tunix")
    layer_options = replace_options("install", Options(axes=AXES), options)

    from tunix.models.qwen3.model import MoELayer

    def call(layer, x, use_megablox=True):
        return run_layer(layer, x, layer_options)

    MoELayer.__call__ = call


def run_layer(layer: Any, x: Float[Array, "B S H"], options: Options) -> Float[Array, "B S H"]:
    """Runs a layer of tunix by `moax.moe`.

    Args:
      layer: a `MoELayer`.
      x: [B, S, H].
      options: the options of `moax.moe`.

    Returns:
      y, [B, S, H] in the dtype of the layer.
    """
    wi = jnp.stack([layer.gate_proj[...], layer.up_proj[...]], axis=2)
    experts, d_model, _, d_ff = wi.shape
    params = MoEParams(layer.router.kernel[...], wi, layer.down_proj[...])
    config = MoEConfig(d_model, d_ff, experts, layer.experts_per_tok)
    y, _ = moe(x.astype(layer.dtype), params, config, options)
    return y
