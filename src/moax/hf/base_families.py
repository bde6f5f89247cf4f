"""The families of MoE models from which others of `families.py` differ in a few fields."""

from __future__ import annotations

from dataclasses import replace

from moax.activations import SWIGLU_OAI_ALPHA
from moax.config import RouterConfig
from moax.hf.family import (
    GATE,
    GROUPS,
    MAYBE_NORMALIZED,
    MIXTRAL_LAYOUT,
    NORMALIZED,
    ONE_SHARED,
    ROUTER,
    STACKED,
    TEXT_AND_WHOLE,
    WIDTH,
    Family,
    Layers,
    after,
    per_expert,
)
from moax.hf.tensor_layouts import block_layout

SIGMOID = RouterConfig(score="sigmoid", bias=True)
QWEN_LAYERS = Layers("", step="decoder_sparse_step=1", dense="mlp_only_layers=[]")
MIXTRAL = Family(
    published=MIXTRAL_LAYOUT,
    d_ff=WIDTH,
    experts="num_local_experts|num_experts",
    fixed={"router_jitter_noise": 0.0},
)
OLMOE = Family(d_ff=WIDTH, normalize=MAYBE_NORMALIZED)
QWEN3 = Family(normalize=MAYBE_NORMALIZED, layers=QWEN_LAYERS)
QWEN2 = Family(
    **per_expert("mlp", GATE, ONE_SHARED, "shared_expert_gate.weight shared_gate 1 H"),
    normalize=MAYBE_NORMALIZED,
    shared=("shared_expert_intermediate_size",),
    shared_gate=True,
    layers=QWEN_LAYERS,
)
QWEN3_5 = replace(
    QWEN2,
    published=QWEN2.memory or QWEN2.published,
    memory=None,
    read=QWEN2.published,
    types=TEXT_AND_WHOLE,
    normalize=None,
    layers=Layers(),
)
DEEPSEEK_V3 = Family(
    experts="n_routed_experts|num_local_experts|num_experts",
    router=SIGMOID,
    normalize=NORMALIZED,
    scale="routed_scaling_factor=2.5",
    groups=("n_group=8", "topk_group=4"),
    layers=after("first_k_dense_replace=3"),
    shared=("moe_intermediate_size", "n_shared_experts|num_shared_experts=1"),
    fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "mlp_bias": False},
)
GLM4 = replace(
    DEEPSEEK_V3,
    scale="routed_scaling_factor=1.0",
    groups=GROUPS,
    layers=after("first_k_dense_replace=1"),
)
UNGROUPED = replace(GLM4, experts="num_experts", normalize=None, groups=(), layers=after("=1"))
DEEPSEEK_V2 = replace(
    GLM4,
    router=RouterConfig(normalize=False, group_score="max"),
    normalize=None,
    group_method="group_limited_greedy",
    shared=("moe_intermediate_size", "n_shared_experts=2"),
    layers=after("first_k_dense_replace=0"),
    fixed={"scoring_func": "softmax", "norm_topk_prob": False, "mlp_bias": False},
)
MISTRAL4 = replace(
    DEEPSEEK_V2,
    router=RouterConfig(),
    normalize=NORMALIZED,
    group_method=None,
    fixed={},
    shared=DEEPSEEK_V3.shared,
)
KIMI = replace(
    GLM4,
    published=MIXTRAL_LAYOUT,
    experts="num_experts",
    top_k="num_experts_per_token|num_experts_per_tok",
    normalize="moe_renormalize=true",
    groups=("num_expert_group=1", "topk_group=1"),
    scale="routed_scaling_factor=2.446",
    shared=("moe_intermediate_size", "num_shared_experts=1"),
)
GRANITE_SHARED = (
    "../shared_mlp.input_linear.weight shared_wi GS H",
    "../shared_mlp.output_linear.weight shared_wo H S",
)
GRANITE = Family(
    published=block_layout(
        "block_sparse_moe",
        "router.layer.weight router E H",
        *GRANITE_SHARED,
        "input_linear.weight wi E GF H; output_linear.weight wo E H F",
    ),
    memory=block_layout("block_sparse_moe", ROUTER, STACKED, *GRANITE_SHARED),
    d_ff=WIDTH,
    experts="num_local_experts",
    shared=("shared_intermediate_size=0",),
)
GPT_OSS_BIASES = "experts.down_proj_bias bo E H; router.bias logits_bias E"
GPT_OSS = Family(
    published=block_layout(
        "mlp",
        ROUTER,
        "experts.gate_up_proj wi E H FG; experts.gate_up_proj_bias bi E FG",
        "experts.down_proj wo E F H",
        GPT_OSS_BIASES,
    ),
    memory=None,
    d_ff=WIDTH,
    experts=MIXTRAL.experts,
    act=None,
    activation="swiglu_oai",
    limit="swiglu_limit=7.0",
    router=RouterConfig(logits_bias=True),
    use_bias=True,
    fixed={"swiglu_alpha": SWIGLU_OAI_ALPHA},
)
GEMMA4 = Family(
    published=block_layout(
        "",
        "router.proj.weight router E H; router.per_expert_scale expert_scale E",
        STACKED,
        outside=("router.scale",),
    ),
    memory=None,
    types=TEXT_AND_WHOLE,
    top_k="top_k_experts",
    act='hidden_activation="gelu_pytorch_tanh"',
    router=RouterConfig(expert_scale=True),
    fixed={"enable_moe_block": True},
)
