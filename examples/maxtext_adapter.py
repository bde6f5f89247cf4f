"""Puts moax's block in the place of MaxText's routed MoE layer; parameters, rules and checkpoints stay MaxText's.

`install(recipe="fp8_block")` replaces the call of `RoutedMoE` (MaxText 0.2.5) in this process. The file is also
MaxText's training command with moax's block, by the name of a recipe or by `none`:
`python examples/maxtext_adapter.py fp8_block base.yml model_name=qwen3-30b-a3b run_name=first ...`
"""

import sys

import jax.numpy as jnp
from absl import app
from maxtext.layers.moe import RoutedMoE
from maxtext.trainers.pre_train import train

import moax

# The roles are dp, fsdp, ep, tp and other.
AXES = moax.Axes("data", ("fsdp", "fsdp_transpose", "context"), "expert", "tensor", "stage", fsdp_dim="model")


def config_of(layer: RoutedMoE) -> moax.MoEConfig:
    c, block, score = layer.config, layer.config.decoder_block.value, layer.config.routed_score_func
    router = dict(order="topk_then_score", logits_bias=c.routed_bias)
    if block == "deepseek":
        router = dict(score=score, normalize=score == "sigmoid", scale=c.routed_scaling_factor, bias=c.routed_bias)
        router |= dict(num_groups=abs(c.n_routing_groups), top_groups=abs(c.topk_routing_group))  # -1 is one group
    elif score or block in ("llama4", "gemma4"):
        raise moax.Unsupported(f"decoder_block={block!r}, routed_score_func={score!r}: moax has no such router")
    act = "swiglu_oai" if block == "gpt_oss" else {"silu": "swiglu", "gelu": "geglu"}[c.mlp_activations[0]]
    sizes = layer.moe_expert_input_dim, layer.intermediate_dim, layer.num_experts, layer.num_experts_per_tok
    return moax.MoEConfig(*sizes, act, c.mlp_bias, moax.RouterConfig(**router, aux_loss=c.load_balance_loss_weight))


def pair(layer: RoutedMoE, name: str = ""):
    return jnp.stack([getattr(layer, f"wi_{i}{name}")[...] for i in range(2)], axis=-2)  # gate and up


def install(**options) -> None:
    """Replaces the call of MaxText's layer; `options` are those of `moax.moe`."""

    def call(layer, x, input_ids=None, gate_inputs=None, out_sharding=None, forced_routed_experts=None):
        c, config, bias, x = layer.config, config_of(layer), layer.gate.bias, x.astype(layer.config.dtype)
        if (forced := forced_routed_experts) is not None and c.decoder_block.value == "deepseek":
            raise moax.Unsupported("forced_routed_experts in DeepSeek's block: MaxText adds the bias to their weights")
        routing = forced if forced is None else jnp.where(forced < 0, config.num_experts, forced)  # E is no expert
        biases = dict(bi=pair(layer, "_bias"), bo=layer.wo_bias[...]) if c.mlp_bias else {}
        biases |= {} if bias is None else {"router_bias" if config.router.bias else "logits_bias": bias[...]}
        params = moax.MoEParams(layer.gate.kernel[...], pair(layer), layer.wo[...], **biases)
        given = dict(router_input=gate_inputs, routing=routing, quantized=getattr(layer, "kept", None))
        y, stats = moax.moe(x, params, config, **given, **{"axes": AXES} | options)
        update = moax.update_router_bias(0.0 * (n := stats.tokens_per_expert), n, c.routed_bias_update_rate)
        return y, stats.aux_loss, update if layer.should_update_load_balance() else None

    RoutedMoE.__call__ = call


if __name__ == "__main__":
    install(recipe=None if sys.argv[1] == "none" else sys.argv[1])
    app.run(train.main, [sys.argv[0], *sys.argv[2:]])
