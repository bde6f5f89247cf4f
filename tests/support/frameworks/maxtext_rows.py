"""MaxText's models beside the same models with moax.adapters.maxtext, on each of its meshes."""

from __future__ import annotations

from pathlib import Path

from rows import DEVICES, compare, emulate, perturb, shape_of

emulate()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import maxtext  # noqa: E402
from flax import nnx  # noqa: E402
from flax.core.spmd import logical_axis_rules  # noqa: E402
from maxtext.configs import pyconfig  # noqa: E402
from maxtext.layers.moe import RoutedMoE  # noqa: E402
from maxtext.utils import maxtext_utils, maxtext_utils_nnx, model_creation_utils  # noqa: E402

from moax.adapters import maxtext as adapter  # noqa: E402

NAME = "MaxText 0.2.5"
THEIRS = RoutedMoE.__call__
BASE = Path(maxtext.__file__).parent / "configs" / "base.yml"
SMALL = """base_emb_dim=64 base_num_query_heads=4 base_num_kv_heads=4 head_dim=16 base_mlp_dim=128 base_moe_mlp_dim=128
base_num_decoder_layers=2 vocab_size=256 max_target_length=32 max_prefill_predict_length=16 num_experts=8
num_experts_per_tok=2 per_device_batch_size=1 enable_checkpointing=False run_name=parity base_output_directory=runs
dtype=float32 weight_dtype=float32 matmul_precision=highest attention=dot_product dataset_type=synthetic megablox=False
override_model_config=True log_config=False skip_jax_distributed_system=True load_balance_loss_weight=0.0""".split()
DEEPSEEK = """model_name=deepseek3-tiny first_num_dense_layers=1 n_routing_groups=4 topk_routing_group=2
num_experts_per_tok=4"""
MIXTRAL = "model_name=mixtral-8x7b"
# XLA:CPU has no ragged all-to-all, so MaxText's experts on CPUs need its dense product
DENSE = "sparse_matmul=False"
RING = "use_ring_of_experts=True megablox=True"
CUBE = f"ici_fsdp_parallelism=2 ici_expert_parallelism=2 ici_tensor_parallelism=2 {DENSE}"
PIPELINE = "ici_pipeline_parallelism=2 num_pipeline_microbatches=2 per_device_batch_size=2"
MODELS = [  # what is compared, settings of MaxText, options of moax
    ("Mixtral", f"{MIXTRAL} ici_fsdp_parallelism=8", {}),
    ("Mixtral", f"{MIXTRAL} ici_expert_parallelism=8 {DENSE}", {}),
    (
        "Mixtral, ring of experts",
        f"{MIXTRAL} ici_fsdp_parallelism=2 ici_expert_parallelism=4 {RING}",
        {},
    ),
    (
        "Mixtral",
        f"{MIXTRAL} ici_data_parallelism=2 ici_fsdp_parallelism=2 ici_tensor_parallelism=2",
        {},
    ),
    ("Qwen3-MoE", f"model_name=qwen3-30b-a3b {CUBE}", {}),
    (
        "GPT-OSS",
        f"model_name=gpt-oss-20b ici_fsdp_parallelism=4 ici_expert_parallelism=2 {DENSE}",
        {},
    ),
    ("DeepSeek-V3", f"{DEEPSEEK} ici_fsdp_parallelism=4 ici_expert_parallelism=2 {DENSE}", {}),
    ("Mixtral", f"{MIXTRAL} ici_fsdp_parallelism=4 ici_fsdp_transpose_parallelism=2", {}),
    ("Mixtral", f"{MIXTRAL} ici_fsdp_parallelism=4 ici_context_parallelism=2", {}),
    ("Mixtral, pipeline", f"{MIXTRAL} ici_fsdp_parallelism=4 {PIPELINE}", {}),
    ("Mixtral, one layer", f"{MIXTRAL} base_num_decoder_layers=1 {CUBE}", dict(recipe="fp8_block")),
]


def configure(settings: str):
    """Returns MaxText's config."""
    return pyconfig.initialize(["", str(BASE), *SMALL, *settings.split()])


def model_results(settings: str, call, devices=None):
    """Returns MaxText's logits and all gradients, with `call` as the call of its layer, and the mesh."""
    RoutedMoE.__call__ = call
    config = configure(settings)
    mesh = maxtext_utils.get_mesh_from_config(config, devices)
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        create, abstract = model_creation_utils.create_nnx_abstract_model(config, mesh)
        model = maxtext_utils_nnx.create_nnx_sharded_model(abstract, create, mesh=mesh)
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        params = jax.jit(perturb)(params)
        tokens = jax.random.randint(
            jax.random.key(1),
            (DEVICES, config.max_target_length),
            0,
            config.vocab_size,
        )
        tokens = jnp.tile(tokens, (max(int(config.per_device_batch_size), 1), 1))
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        dy = jax.random.normal(jax.random.key(2), (*tokens.shape, config.vocab_size)) / tokens.size

        def loss(params):
            model = nnx.merge(graph, params, rest, copy=True)
            logits = model(
                tokens,
                positions,
                decoder_segment_ids=jnp.ones_like(tokens),
                enable_dropout=False,
            )
            return jnp.vdot(logits, dy), logits

        (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return (logits, nnx.to_pure_dict(grads)), mesh


def models() -> None:
    """Prints a row for each of MODELS."""
    for what, settings, options in MODELS:
        want, mesh = model_results(settings, THEIRS)
        adapter.install(**options)
        got, _ = model_results(settings, RoutedMoE.__call__)
        compare(NAME, what, shape_of(mesh), options.get("recipe"), got, want)


if __name__ == "__main__":
    models()
