"""Puts moax's block in the place of tunix's MoE layer of Qwen3. Parameters, shardings and checkpoints stay tunix's.

`install(recipe="fp8_block")` replaces the call of `MoELayer` (tunix 0.1.7) in this process, before a model is jitted:
`import tunix_adapter; tunix_adapter.install(recipe="fp8_block")`, then tunix's own training or sampling.
"""

import jax.numpy as jnp
from tunix.models.qwen3.model import MoELayer

import moax

AXES = moax.Axes(fsdp=("fsdp", "sp"), tp="tp", fsdp_dim="experts")


def install(**options) -> None:
    """Replaces the call of tunix's layer; `options` are those of `moax.moe`."""

    def call(layer, x):
        wi = jnp.stack([layer.gate_proj[...], layer.up_proj[...]], axis=2)
        params = moax.MoEParams(layer.router.kernel[...], wi, layer.down_proj[...])
        experts, d_model, _, d_ff = wi.shape
        config = moax.MoEConfig(d_model, d_ff, experts, layer.experts_per_tok)
        return moax.moe(x.astype(layer.dtype), params, config, **{"axes": AXES} | options)[0]

    MoELayer.__call__ = call
