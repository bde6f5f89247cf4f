"""The families of MoE models that moax computes, one entry each, as transformers 5.23 computes their layers.

A family has the name of its folder in transformers. A new family is one entry of `FAMILIES`, and one of
scripts/hf_models.py, by which `make hf-parity` compares it with transformers. `family.py` says what an entry has.
"""

from __future__ import annotations

import reprlib
from dataclasses import replace
from typing import Any

from moax.activations import SWIGLU_OAI_ALPHA
from moax.checks import Unsupported
from moax.config import RouterConfig
from moax.hf.base_families import (
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GEMMA4,
    GLM4,
    GPT_OSS,
    GPT_OSS_BIASES,
    GRANITE,
    KIMI,
    MISTRAL4,
    MIXTRAL,
    OLMOE,
    QWEN2,
    QWEN3,
    QWEN3_5,
    QWEN_LAYERS,
    SIGMOID,
    UNGROUPED,
)
from moax.hf.family import (
    BLOCK_CORRECTION,
    CORRECTION,
    GATE,
    GROUPS,
    IN_MEMORY,
    MAYBE_NORMALIZED,
    MOE_WIDTH,
    NORMALIZED,
    ONE_SHARED,
    PROJ,
    ROUTER,
    SHARED,
    STACKED,
    TEXT_AND_WHOLE,
    TRANSPOSED,
    W123,
    WIDTH,
    Family,
    Layers,
    after,
    glu,
    per_expert,
)
from moax.hf.impossible import IMPOSSIBLE
from moax.hf.tensor_layouts import BlockLayout, block_layout

LATENT = "fc1_latent_proj.weight latent_down L H; fc2_latent_proj.weight latent_up H L"
NEMOTRON_SHARED = (
    "shared_experts.up_proj.weight shared_wi:0 S H",
    "shared_experts.down_proj.weight shared_wo H S",
)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("mixtral", "minimax"), MIXTRAL),
    "minimax_m2": replace(
        MIXTRAL,
        published=block_layout("block_sparse_moe", GATE, BLOCK_CORRECTION, W123),
        memory=block_layout("mlp", GATE, BLOCK_CORRECTION, STACKED),
        router=SIGMOID,
    ),
    "minimax_m3_vl": replace(
        MIXTRAL,
        published=block_layout("block_sparse_moe", GATE, BLOCK_CORRECTION, SHARED, W123),
        memory=block_layout(
            "mlp",
            GATE,
            CORRECTION,
            STACKED,
            "shared_experts.gate_up_proj.weight shared_wi GS H",
            "shared_experts.down_proj.weight shared_wo H S",
        ),
        types=TEXT_AND_WHOLE,
        act=None,
        activation="swiglu_oai",
        limit="swiglu_limit=7.0",
        router=SIGMOID,
        scale="routed_scaling_factor=2.0",
        shared=("shared_intermediate_size=3072",),
        layers=after("=0"),
        fixed={"swiglu_alpha": SWIGLU_OAI_ALPHA, "router_jitter_noise": 0.0},
    ),
    **dict.fromkeys(("olmoe", "flex_olmo"), OLMOE),
    "cohere2_moe": replace(
        OLMOE,
        normalize=None,
        shared=("intermediate_size", "num_shared_experts=0"),
        fixed={"expert_selection_fn": "softmax"},
        shared_fixed={'shared_expert_combination_strategy="average"': "sum"},
        layers=DEEPSEEK_V2.layers,
    ),
    "kolibri1": replace(
        OLMOE,
        published=block_layout("mlp", GATE, "../moe.router.expert_bias router_bias E", SHARED, PROJ),
        experts=MIXTRAL.experts,
        d_ff=MOE_WIDTH,
        router=replace(SIGMOID, order="topk_then_score"),
        shared=("shared_expert_intermediate_size=512",),
    ),
    "hunyuan_v1_moe": Family(
        **per_expert("mlp", "gate.wg.weight router E H", glu("shared_mlp")),
        d_ff=WIDTH,
        top_k="moe_topk|num_experts_per_tok=1",
        shared=("intermediate_size",),
    ),
    "jamba": Family(
        **per_expert("feed_forward", ROUTER),
        d_ff=WIDTH,
        router=RouterConfig(normalize=False),
        layers=Layers("", step="expert_layer_period=2", offset="expert_layer_offset=1"),
    ),
    "dbrx": Family(
        published=block_layout(
            "ffn",
            "router.layer.weight router E H; experts.mlp.w1 wi:0 EF H",
            "experts.mlp.v1 wi:1 EF H; experts.mlp.w2 wo EF H",
            stem="transformer.blocks.",
        ),
        memory=None,
        d_model="d_model",
        d_ff="ffn_config.ffn_hidden_size",
        experts="ffn_config.moe_num_experts",
        top_k="ffn_config.moe_top_k",
        act='ffn_config.ffn_act_fn.name="silu"',
        fixed={"ffn_config.moe_normalize_expert_weights": 1.0, "ffn_config.moe_jitter_eps": None},
    ),
    "aria": Family(
        published=block_layout(
            "mlp",
            ROUTER,
            SHARED,
            "experts.fc1.weight wi E H GF; experts.fc2.weight wo E F H",
        ),
        memory=block_layout("mlp", ROUTER, SHARED, TRANSPOSED),
        types=TEXT_AND_WHOLE,
        d_ff=WIDTH,
        experts="moe_num_experts=8",
        top_k="moe_topk=2",
        shared=("intermediate_size", "moe_num_shared_experts=2"),
        fixed={"mlp_bias": False},
    ),
    "ernie4_5_moe": Family(
        published=block_layout(
            "mlp",
            GATE,
            SHARED,
            PROJ,
            "moe_statics.e_score_correction_bias router_bias 1 E",
        ),
        memory=block_layout(
            "mlp",
            GATE,
            SHARED,
            STACKED,
            "gate.moe_statics.e_score_correction_bias router_bias 1 E",
        ),
        experts="moe_num_experts|num_experts=64",
        top_k="moe_k|num_experts_per_tok=6",
        router=RouterConfig(bias=True),
        shared=("moe_intermediate_size=1536", "moe_num_shared_experts=2"),
        fixed={"use_bias": False},
        layers=Layers("", "moe_layer_start_index=1", "moe_layer_end_index=-1", step="moe_layer_interval=1"),
    ),
    "llama4": Family(
        published=block_layout("feed_forward", ROUTER, ONE_SHARED, TRANSPOSED),
        memory=None,
        types=TEXT_AND_WHOLE,
        d_ff=WIDTH,
        experts="num_local_experts=16",
        top_k="num_experts_per_tok=1",
        shared=("intermediate_size",),
        router=RouterConfig(score="sigmoid", order="topk_then_score", normalize=False),
        weights_at="input",
        layers=Layers("", step="interleave_moe_layer_step=1"),
    ),
    "qwen3_moe": QWEN3,
    "mellum": replace(QWEN3, experts=MIXTRAL.experts, normalize=NORMALIZED, layers=Layers()),
    "qwen3_omni_moe": replace(QWEN3, types=("{}_text", "{}_thinker", "{}"), normalize=NORMALIZED),
    "qwen3_vl_moe": replace(
        QWEN3,
        published=block_layout("mlp", GATE, TRANSPOSED),
        types=TEXT_AND_WHOLE,
        experts=MIXTRAL.experts,
        normalize=None,
    ),
    "qwen2_moe": QWEN2,
    "qwen3_next": replace(QWEN2, normalize=NORMALIZED),
    "qwen3_5_moe": QWEN3_5,
    "qwen4_exp": replace(QWEN3_5, normalize=NORMALIZED),
    "flint": replace(
        QWEN2,
        router=RouterConfig(score="sigmoid"),
        normalize=NORMALIZED,
        shared_gate=False,
        layers=QWEN_LAYERS._replace(dense="mlp_only_layers=[0, 1]"),
    ),
    "deepseek_v3": replace(DEEPSEEK_V3, types=("{}", "kimi_k2")),
    "deepseek_v32": DEEPSEEK_V3,
    "deepseek_v4": replace(
        DEEPSEEK_V3,
        published=block_layout(
            "ffn",
            GATE,
            "gate.bias router_bias E",
            glu("shared_experts", "w1 w3 w2"),
            W123,
        ),
        router=RouterConfig(score="sqrt_softplus", bias=True),
        normalize=None,
        scale="routed_scaling_factor=1.5",
        groups=(),
        shared=(MOE_WIDTH,),
        limit="swiglu_limit=10.0",
        layers=after("num_hash_layers=3"),
        fixed={
            "scoring_func": "sqrtsoftplus",
            "router_jitter_noise": 0.0,
            "mlp_bias": False,
            "n_shared_experts": 1,
        },
    ),
    "axk1": replace(
        DEEPSEEK_V3,
        memory=IN_MEMORY._replace(outside=("post_mlp_layernorm.weight",)),
        layers=GLM4.layers,
    ),
    "axk2": replace(DEEPSEEK_V3, groups=GROUPS, layers=GLM4.layers),
    "beam": replace(DEEPSEEK_V3, experts="num_experts", shared=(), layers=after("=3")),
    "glm_moe_dsa": replace(DEEPSEEK_V3, groups=GROUPS),
    "glm4_moe": GLM4,
    "glm4_moe_lite": replace(GLM4, scale="routed_scaling_factor=1.8"),
    "glm4v_moe": replace(GLM4, types=TEXT_AND_WHOLE),
    "glm5_next": replace(
        GLM4,
        types=TEXT_AND_WHOLE,
        scale="routed_scaling_factor=2.5",
        limit="swiglu_limit=10.0",
        layers=after("=3"),
    ),
    "dots1": replace(GLM4, normalize=MAYBE_NORMALIZED, layers=DEEPSEEK_V2.layers),
    "dots3_note": replace(
        GLM4,
        types=TEXT_AND_WHOLE,
        shared=("shared_experts_intermediate_size=1536", "n_shared_experts|num_shared_experts=1"),
    ),
    "exaone_moe": replace(
        GLM4,
        published=block_layout("mlp", GATE, BLOCK_CORRECTION, SHARED, PROJ),
        experts="num_experts",
        shared=KIMI.shared,
        scale="routed_scaling_factor=2.5",
    ),
    "mimo_v2_flash": replace(GLM4, shared=(), layers=after("=1")),
    "solar_open": replace(GLM4, layers=Layers()),
    "nemotron_h": replace(
        GLM4,
        published=block_layout(
            "mixer",
            GATE,
            CORRECTION,
            LATENT,
            *NEMOTRON_SHARED,
            "experts.{e}.up_proj.weight wi:0 F H; experts.{e}.down_proj.weight wo H F",
            stem="backbone.layers.",
        ),
        memory=block_layout(
            "mixer",
            GATE,
            CORRECTION,
            LATENT,
            *NEMOTRON_SHARED,
            "experts.up_proj wi:0 E F H; experts.down_proj wo E H F",
        ),
        act=None,
        activation="relu2",
        shared=("moe_shared_expert_intermediate_size=7688",),
        latent="moe_latent_size",
        fixed={"mlp_hidden_act": "relu2", "mlp_bias": False},
        layers=Layers("hybrid_override_pattern|layers_block_type|layer_types=[]"),
    ),
    "afmoe": replace(
        UNGROUPED,
        **per_expert("mlp", "router.gate.weight router E H; expert_bias router_bias E", SHARED),
        scale="route_scale=1.0",
        shared=("moe_intermediate_size", "num_shared_experts=2"),
        fixed={},
        layers=after("num_dense_layers=1"),
    ),
    "hy_v3": replace(
        UNGROUPED,
        memory=block_layout("mlp", GATE, BLOCK_CORRECTION, SHARED, STACKED),
        shared=KIMI.shared,
        published=block_layout(
            "mlp",
            "router.gate.weight router E H; expert_bias router_bias E",
            glu("shared_mlp"),
            PROJ,
        ),
        scale="router_scaling_factor=2.826",
    ),
    "laguna": replace(
        UNGROUPED,
        scale="moe_routed_scaling_factor=1.0",
        shared=("shared_expert_intermediate_size=512",),
        published=block_layout(
            "mlp",
            GATE,
            "experts.e_score_correction_bias router_bias E",
            ONE_SHARED,
            PROJ,
        ),
        fixed={"moe_router_logit_softcapping": 0.0, "moe_apply_router_weight_on_input": False},
    ),
    "lfm2_moe": replace(
        UNGROUPED,
        **per_expert("feed_forward", GATE, "expert_bias router_bias E", experts=W123),
        act=None,
        normalize=NORMALIZED,
        shared=(),
        fixed={"use_expert_bias": True},
        layers=after("num_dense_layers=2"),
    ),
    "step3p7": replace(
        UNGROUPED,
        published=block_layout(
            "moe",
            GATE,
            "router_bias router_bias E; gate_proj.weight wi:0 E F H",
            "up_proj.weight wi:1 E F H; down_proj.weight wo E H F",
            glu("../share_expert"),
        ),
        types=("step3p5", "step3p7"),
        experts="n_routed_experts|moe_num_experts=288",
        top_k="num_experts_per_tok|moe_top_k=8",
        scale="moe_router_scaling_factor=1.0",
        shared=("share_expert_dim|share_expert_dims=1280",),
        layers=after("=3"),
        fixed={"mlp_bias": False, "swiglu_limits": None, "swiglu_limits_shared": None},
    ),
    "deepseek_v2": DEEPSEEK_V2,
    **dict.fromkeys(
        ("deepseek_ocr2", "unlimited_ocr"),
        replace(DEEPSEEK_V2, types=TEXT_AND_WHOLE, layers=GLM4.layers),
    ),
    "mistral4": MISTRAL4,
    "mistral_large4": replace(
        MISTRAL4,
        published=block_layout("", GATE, SHARED, W123, stem="layers."),
        types=TEXT_AND_WHOLE,
        normalize=None,
        layers=GLM4.layers,
    ),
    "kimi_linear": KIMI,
    "bailing_hybrid": replace(
        KIMI,
        published=block_layout("mlp", GATE, "gate.expert_bias router_bias E", SHARED, PROJ),
        scale="routed_scaling_factor=2.5",
        groups=("num_expert_group=8", "topk_group=4"),
        layers=after("first_k_dense_replace=2"),
    ),
    "gpt_oss": GPT_OSS,
    "openai_privacy_filter": replace(
        GPT_OSS,
        published=block_layout(
            "mlp",
            ROUTER,
            TRANSPOSED,
            "experts.gate_up_proj_bias bi E GF",
            GPT_OSS_BIASES,
        ),
    ),
    "gemma4": GEMMA4,
    "diffusion_gemma": replace(GEMMA4, fixed={}),
    "granitemoe": replace(GRANITE, shared=()),
    "granitemoe_swa": replace(GRANITE, published=GRANITE.memory or GRANITE.published),
    "granitemoehybrid": replace(GRANITE, shared=("shared_intermediate_size=1024",)),
    "granitemoeshared": GRANITE,
}


# The values of `model_type` of each family; the first one is written.
TYPES_OF = {name: tuple(pattern.format(name) for pattern in family.types) for name, family in FAMILIES.items()}
FAMILY_OF = {model_type: name for name, types in TYPES_OF.items() for model_type in types}
MODEL_TYPES = tuple(FAMILY_OF)


def family_of(model_type: Any) -> str:
    """Returns the family of a `model_type`, or raises Unsupported or ValueError."""
    if not isinstance(model_type, str):
        text = reprlib.repr(model_type)
        raise ValueError(f"model_type={text} must be a string, one of MODEL_TYPES")
    if model_type in IMPOSSIBLE:
        raise Unsupported(f"model_type={model_type!r}: {IMPOSSIBLE[model_type]}")
    if model_type not in FAMILY_OF:
        known = ", ".join(map(repr, MODEL_TYPES))
        raise Unsupported(f"model_type={model_type!r}; moax.hf supports {known}")
    return FAMILY_OF[model_type]


def layout_of(model_type: str, stacked: bool = False) -> BlockLayout:
    """Returns the layout in which a model is written: with `stacked` as in memory, else as published."""
    family = FAMILIES[family_of(model_type)]
    if stacked and family.memory:
        return family.memory
    return family.published


def layouts_of(model_type: str) -> tuple[BlockLayout, ...]:
    """Returns the layouts in which a model of this type may be read."""
    family = FAMILIES[family_of(model_type)]
    return tuple(layout for layout in (family.published, family.memory, family.read) if layout)
