"""Levanter's Qwen3-MoE and Mixtral beside the same models with moax.adapters.levanter."""

from __future__ import annotations

import dataclasses

from rows import DEVICES, compare, emulate, perturb

emulate()

import equinox as eqx  # noqa: E402
import haliax as hax  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from levanter.layers.attention import AttentionMask  # noqa: E402
from levanter.models.mixtral import MixtralConfig, MixtralSparseMoeBlock  # noqa: E402
from levanter.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeSparseMoeBlock  # noqa: E402
from levanter.utils.mesh import MeshConfig  # noqa: E402

from moax.adapters import levanter as adapter  # noqa: E402

NAME = "Levanter"
THEIRS = {layer: layer.__call__ for layer in (Qwen3MoeSparseMoeBlock, MixtralSparseMoeBlock)}
COMMON = dict(
    max_seq_len=16,
    hidden_dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    num_experts_per_tok=2,
    attn_backend="vanilla",
    reference_checkpoint="none",
    tokenizer="none",
)
CONFIGS = {
    "Qwen3-MoE": Qwen3MoeConfig(
        **COMMON,
        intermediate_dim=128,
        moe_intermediate_dim=128,
        head_dim=16,
        num_experts=8,
        router_aux_loss_coef=0.01,
    ),
    "Qwen3-MoE, norm_topk_prob=False": Qwen3MoeConfig(
        **COMMON,
        intermediate_dim=128,
        moe_intermediate_dim=128,
        head_dim=16,
        num_experts=8,
        norm_topk_prob=False,
    ),
    "Mixtral": MixtralConfig(
        **COMMON,
        intermediate_dim=128,
        n_routed_experts=8,
        lbl_coef=0.01,
        rzl_coef=0.001,
    ),
}
MESHES = {
    "one device": {"data": 1, "model": 1},
    "data8": {"data": 8, "model": 1},
    "data4 model2": {"data": 4, "model": 2},
}


def results(config, axes: dict[str, int]):
    """Returns the logits with the losses of the routers, and all gradients, on the mesh of these axes.

    Levanter's default mapping leaves its axis `token` whole. Where a mapping splits `token`, the count of rows of each
    expert is that of one device, and its `ragged_dot` of the CPU, which runs outside of its `shard_map`, is wrong.
    """
    mapping = MeshConfig()
    count = axes["data"] * axes["model"]
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), types, devices=jax.devices()[:count])
    compute = mapping.resolved_compute_mapping | {"batch": "data"}
    vocab = hax.Axis("vocab", 256)
    batch = hax.Axis("batch", DEVICES)
    position = config.max_Pos
    with jax.set_mesh(mesh), hax.axis_mapping(compute):
        init = hax.named_jit(
            config.model_type.init,
            out_axis_resources=mapping.resolved_param_mapping,
        )
        model = init(vocab, config, key=jax.random.key(0))
        params, static = eqx.partition(model, eqx.is_inexact_array)
        params = jax.jit(perturb)(params)
        tokens = hax.random.randint(jax.random.key(1), (batch, position), 0, vocab.size)
        dy = hax.random.normal(jax.random.key(2), (batch, position, vocab)) / tokens.size

        def loss(params):
            model = eqx.combine(params, static)
            hidden, aux = model.activations(tokens, attn_mask=AttentionMask.causal())
            logits = hax.dot(hidden, model.get_lm_head(), axis=config.Embed)
            aux = aux.array if isinstance(aux, hax.NamedArray) else jnp.asarray(aux)
            return hax.sum(logits * dy).scalar() + aux.sum(), (logits.array, aux)

        (_, outputs), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return outputs, grads


def main() -> None:
    """Prints a row for each config and mesh, and one of a single layer with fp8_block.

    A second layer would route a few tokens to other experts, since its logits are those of quantized values.
    """
    cases = [("Qwen3-MoE", CONFIGS["Qwen3-MoE"], mesh, None) for mesh in MESHES]
    cases += [(what, config, "data4 model2", None) for what, config in CONFIGS.items() if what != "Qwen3-MoE"]
    single = dataclasses.replace(CONFIGS["Qwen3-MoE"], num_layers=1)
    for what, config, mesh, recipe in [
        *cases,
        ("Qwen3-MoE, one layer", single, "data4 model2", "fp8_block"),
    ]:
        for layer, call in THEIRS.items():
            layer.__call__ = call
        want = results(config, MESHES[mesh])
        adapter.install(recipe=recipe)
        compare(NAME, what, mesh, recipe, results(config, MESHES[mesh]), want)


if __name__ == "__main__":
    main()
