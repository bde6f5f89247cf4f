"""Puts moax's block in the place of Levanter's MoE layers; parameters, mappings and checkpoints stay Levanter's.

`install(recipe="fp8_block")` replaces the calls of the layers of Qwen3-MoE and Mixtral in this process (the package is
marin-levanter 0.2.227.dev40316220070):
`import levanter_adapter; levanter_adapter.install(recipe="fp8_block")`, then Levanter's own training.
"""

import haliax as hax
import jax.numpy as jnp
from levanter.models.mixtral import MixtralSparseMoeBlock
from levanter.models.qwen3_moe import Qwen3MoeSparseMoeBlock

import moax

AXES = moax.Axes(dp=("replica_dcn", "replica"), fsdp="data", tp="model", fsdp_dim="model")


def run(layer, x, names: tuple[str, ...], mlp, router: dict, options: dict):
    if layer.config.dense_router_gradient:
        raise moax.Unsupported("dense_router_gradient=True: moax has the gradient of the chosen experts")
    experts, embed, k = layer.gate.Out, layer.gate.In, layer.config.num_experts_per_tok
    gate, up, down = (getattr(layer.experts, name).weight for name in names)
    wi = jnp.stack([w.rearrange((experts, embed, mlp)).array for w in (gate, up)], axis=2)
    wo, gate = down.rearrange((experts, mlp, embed)).array, layer.gate.weight.rearrange((embed, experts)).array
    config = moax.MoEConfig(embed.size, mlp.size, experts.size, k, router=moax.RouterConfig(**router))
    params = moax.MoEParams(gate, wi.astype(x.dtype), wo.astype(x.dtype))
    y, stats = moax.moe(x.rearrange((..., embed)).array, params, config, **{"axes": AXES} | options)
    loads = hax.named(stats.tokens_per_expert / stats.tokens_per_expert.sum(), experts)
    losses = dict(load_balancing_loss=hax.named(stats.aux_loss, ()), router_z_loss=hax.named(stats.z_loss, ()))
    return hax.named(y, x.rearrange((..., embed)).axes), losses | dict(expert_loads=loads)


def install(**options) -> None:
    """Replaces the calls of Levanter's layers; `options` are those of `moax.moe`."""

    def qwen3(layer, x, *, key=None):
        c = layer.config
        router = dict(normalize=c.norm_topk_prob, aux_loss=c.num_experts_per_tok * (c.router_aux_loss_coef or 0.0))
        return run(layer, x, ("gate_proj", "up_proj", "down_proj"), c.MoeMlp, router, options)

    def mixtral(layer, x, *, key=None):
        c = layer.config
        router = dict(aux_loss=(c.lbl_coef or 0.0) / c.num_experts_per_tok, z_loss=c.rzl_coef or 0.0)
        return run(layer, x, ("w1", "w3", "w2"), c.Mlp, router, options)

    Qwen3MoeSparseMoeBlock.__call__, MixtralSparseMoeBlock.__call__ = qwen3, mixtral
