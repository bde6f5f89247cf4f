"""Puts moax's block in the place of Levanter's MoE layers; parameters, mappings and checkpoints stay Levanter's.

    from moax.adapters import levanter

    levanter.install(recipe="fp8_block")  # then Levanter's own training

Qwen3-MoE and Mixtral have such layers.
"""

from __future__ import annotations

from typing import Any, Unpack

import jax.numpy as jnp
from jaxtyping import Array, Float

from moax.adapters.versions import check_version
from moax.block.moe import moe
from moax.checks import Unsupported
from moax.config import MoEConfig, MoEStats, OptionKeywords, Options, RouterConfig, replace_options
from moax.mesh.axes import Axes
from moax.params import MoEParams

AXES = Axes(dp=("replica_dcn", "replica"), fsdp="data", tp="model", fsdp_dim="model")


def install(**options: Unpack[OptionKeywords]) -> None:
    """Replaces the calls of Levanter's layers of Qwen3-MoE and Mixtral in this process.

    Args:
      **options: the fields of `moax.Options`. The default of `axes` is `AXES`, which names Levanter's mesh axes.

    Raises:
      ModuleNotFoundError: Levanter is not installed.
      Unsupported: moax is not tested with the installed version of Levanter.
      TypeError: `moax.Options` has no such field.
      ValueError: an option has a value that it cannot have.
    """
    check_version("marin-levanter")
    layer_options = replace_options("install", Options(axes=AXES), options)

    from levanter.models.mixtral import MixtralSparseMoeBlock
    from levanter.models.qwen3_moe import Qwen3MoeSparseMoeBlock

    def call_qwen3(layer, x, *, key=None):
        weights = [layer.experts.gate_proj, layer.experts.up_proj, layer.experts.down_proj]
        return run_layer(layer, x, weights, layer.config.MoeMlp, qwen3_router(layer.config), layer_options)

    def call_mixtral(layer, x, *, key=None):
        weights = [layer.experts.w1, layer.experts.w3, layer.experts.w2]
        return run_layer(layer, x, weights, layer.config.Mlp, mixtral_router(layer.config), layer_options)

    Qwen3MoeSparseMoeBlock.__call__ = call_qwen3
    MixtralSparseMoeBlock.__call__ = call_mixtral


def qwen3_router(config: Any) -> RouterConfig:
    """Returns the router of a `Qwen3MoeConfig`, whose balanced router pays K times the coefficient of its loss."""
    coefficient = config.router_aux_loss_coef or 0.0
    return RouterConfig(
        normalize=config.norm_topk_prob,
        aux_loss=config.num_experts_per_tok * coefficient,
    )


def mixtral_router(config: Any) -> RouterConfig:
    """Returns the router of a `MixtralConfig`, whose balanced router pays the coefficient of its loss over K."""
    coefficient = config.lbl_coef or 0.0
    return RouterConfig(
        aux_loss=coefficient / config.num_experts_per_tok,
        z_loss=config.rzl_coef or 0.0,
    )


def run_layer(
    layer: Any,
    x: Any,
    weights: list[Any],
    width: Any,
    router: RouterConfig,
    options: Options,
) -> tuple[Any, dict[str, Any]]:
    """Runs a layer of Levanter by `moax.moe`.

    Args:
      layer: a layer, which has `gate`, the router.
      x: a NamedArray, with the model width in any place.
      weights: the linear layers of gate, up and down.
      width: the axis of the expert width.
      router: the router of the layer.
      options: the options of `moax.moe`.

    Returns:
      y: a NamedArray with the axes of x, the model width last.
      extras: the losses and the loads of the experts, as Levanter's layer names them.

    Raises:
      Unsupported: the layer has a gradient or an activation that moax's block does not have.
    """
    import haliax as hax

    check_layer(layer)
    experts = layer.gate.Out
    embed = layer.gate.In
    gate, up, down = weights
    # The cast comes before the stack, which then copies fewer bytes.
    pair = [array_of(linear, experts, embed, width).astype(x.dtype) for linear in (gate, up)]
    params = MoEParams(
        router=array_of(layer.gate, embed, experts),
        wi=jnp.stack(pair, axis=2),
        wo=array_of(down, experts, width, embed).astype(x.dtype),
    )
    config = MoEConfig(embed.size, width.size, experts.size, layer.config.num_experts_per_tok, router=router)
    tokens = x.rearrange((..., embed))
    y, stats = moe(tokens.array, params, config, options)
    return hax.named(y, tokens.axes), extras_of(stats, experts)


def array_of(linear: Any, *axes: Any) -> Float[Array, "..."]:
    """Returns the weight of a linear layer of haliax, with its dims in the order of these axes."""
    return linear.weight.rearrange(axes).array


def extras_of(stats: MoEStats, experts: Any) -> dict[str, Any]:
    """Returns the losses and the loads of the experts as NamedArrays, by Levanter's names."""
    import haliax as hax

    loads = stats.tokens_per_expert / stats.tokens_per_expert.sum()
    return {
        "load_balancing_loss": hax.named(stats.aux_loss, ()),
        "router_z_loss": hax.named(stats.z_loss, ()),
        "expert_loads": hax.named(loads, experts),
    }


def check_layer(layer: Any) -> None:
    """Raises Unsupported where a layer of Levanter has what moax's block does not have."""
    if layer.config.dense_router_gradient:
        raise Unsupported("dense_router_gradient=True: moax has the gradient of the chosen experts")
    activation = str(layer.config.activation_function)
    if activation not in ("silu", "swish"):
        raise Unsupported(f"activation_function={activation!r}: the adapter has silu")
