"""The families of MoE models whose layers moax computes: one entry a family, as transformers 5.23 computes its layer.

A family has the name of its folder in transformers. A new family is one entry of `FAMILIES`, and one of
scripts/hf_models.py, by which `make hf-parity` holds it against transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal

from moax.config import SWIGLU_OAI_ALPHA, Activation
from moax.hf import spellings as names
from moax.hf.keys import Key, Values
from moax.hf.layers import (
    after_dense,
    all_layers,
    between,
    by_pattern,
    by_period,
    by_step,
    interleaved,
)
from moax.hf.spellings import Row, Spelling

NONE: Mapping[str, Any] = MappingProxyType({})
SHARED = Key("n_shared_experts", 1, "num_shared_experts")
GROUPS = (Key("n_group", 1, "num_expert_group"), Key("topk_group", 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How the config.json and the tensors of a family say what its MoE layers are.

    Attributes:
      published: the tensors of a published checkpoint.
      memory: the tensors as transformers 5 holds them in memory and also saves them; None where they are the same.
      types: the values of `model_type` in config.json; the first one is written. () means the name of the family.
      d_model, d_ff, experts, top_k: the keys of the sizes.
      act: the key of the activation of the gate; None where the family has one activation.
      activation: that activation.
      limit: the key of the limit of gate and up.
      score, order, bias, logits_bias, expert_scale, group_score: see `RouterConfig`.
      normalize: whether the weights of a token are divided by their sum, or the key that says it.
      scale: the key of the factor on the weights.
      groups: the keys of the number of groups and of the chosen groups.
      group_method: the value of `topk_method` with which groups count; None where they always count.
      shared: the keys whose values multiply to the width of the shared expert; () where the family has none.
      shared_fixed: the one value that moax supports of keys that count only with a shared expert.
      shared_gate, use_bias, weights_at: see `MoEConfig`.
      fixed: the one value that moax supports of further keys; a missing key has it.
      layers: returns the indices of the MoE layers, from the values of config.json and the number of layers.
      num_layers: the key of the number of layers.
    """

    published: Spelling
    memory: Spelling | None = None
    types: tuple[str, ...] = ()
    d_model: Key = Key("hidden_size")
    d_ff: Key = Key("moe_intermediate_size")
    experts: Key = Key("num_experts", None, "num_local_experts", "n_routed_experts")
    top_k: Key = Key("num_experts_per_tok", None, "experts_per_token")
    act: Key | None = Key("hidden_act", "silu")
    activation: Activation = "swiglu"
    limit: Key | None = None
    score: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    order: Literal["score_then_topk", "topk_then_score"] = "score_then_topk"
    normalize: bool | Key = True
    scale: Key | None = None
    bias: bool = False
    logits_bias: bool = False
    expert_scale: bool = False
    groups: tuple[Key, ...] = ()
    group_method: str | None = None
    group_score: Literal["top2", "max"] = "top2"
    shared: tuple[Key, ...] = ()
    shared_fixed: tuple[tuple[Key, Any], ...] = ()
    shared_gate: bool = False
    use_bias: bool = False
    weights_at: Literal["output", "input"] = "output"
    fixed: Mapping[str, Any] = NONE
    layers: Callable[[Values, int], tuple[int, ...]] = all_layers
    num_layers: Key = Key("num_hidden_layers")


def spell(
    block: str, *rows: Row | tuple[Row, ...], outside: tuple[str, ...] = (), stem: str = "model.layers."
) -> Spelling:
    """Returns a spelling of rows and of groups of rows."""
    flat = tuple(row for part in rows for row in (part if isinstance(part[0], tuple) else (part,)))
    return Spelling(block, flat, outside, stem)  # pyrefly: ignore[bad-argument-type]


PROJ = spell("mlp", names.GATE, names.CORRECTION, names.ALL_SHARED, names.PROJ)
STACKED = spell("mlp", names.GATE, names.CORRECTION, names.ALL_SHARED, names.STACKED)
W123 = spell("block_sparse_moe", names.GATE, names.CORRECTION, names.ALL_SHARED, names.W123)
ONE_PROJ = spell("mlp", names.GATE, names.ONE_SHARED, names.SHARED_GATE, names.PROJ)
ONE_STACKED = spell("mlp", names.GATE, names.ONE_SHARED, names.SHARED_GATE, names.STACKED)
BIASES = (Row("experts.down_proj_bias", "bo", ("E", "H")), Row("router.bias", "logits_bias", ("E",)))
GRANITE_SHARED = names.fused_shared("../shared_mlp.input_linear.weight", "../shared_mlp.output_linear.weight")
GRANITE_LINEAR = ("input_linear.weight", "output_linear.weight")
WIDTH = Key("intermediate_size")
ONE_WIDTH = (Key("shared_expert_intermediate_size"),)
NORMALIZE = Key("norm_topk_prob", False)

MIXTRAL = Family(
    published=W123, memory=STACKED, d_ff=WIDTH, experts=Key("num_local_experts", None, "num_experts"),
    fixed={"router_jitter_noise": 0.0},
)  # fmt: skip
QWEN3 = Family(published=PROJ, memory=STACKED, normalize=NORMALIZE, layers=by_step())
OLMOE = Family(published=PROJ, memory=STACKED, d_ff=WIDTH, normalize=NORMALIZE)
QWEN2 = Family(
    published=ONE_PROJ, memory=ONE_STACKED, normalize=NORMALIZE, shared=ONE_WIDTH, shared_gate=True, layers=by_step()
)
DEEPSEEK_V3 = Family(
    published=PROJ, memory=STACKED, experts=Key("n_routed_experts", None, "num_local_experts", "num_experts"),
    score="sigmoid", bias=True, normalize=Key("norm_topk_prob", True), scale=Key("routed_scaling_factor", 2.5),
    groups=(Key("n_group", 8), Key("topk_group", 4)), shared=(Key("moe_intermediate_size"), SHARED),
    fixed={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "mlp_bias": False},
    layers=after_dense("first_k_dense_replace", 3),
)  # fmt: skip
GLM4 = replace(
    DEEPSEEK_V3, scale=Key("routed_scaling_factor", 1.0), groups=GROUPS, layers=after_dense("first_k_dense_replace", 1)
)
DEEPSEEK_V2 = replace(
    DEEPSEEK_V3, score="softmax", bias=False, normalize=False, scale=Key("routed_scaling_factor", 1.0), groups=GROUPS,
    group_score="max", group_method="group_limited_greedy",
    shared=(Key("moe_intermediate_size"), Key("n_shared_experts", 2)),
    fixed={"scoring_func": "softmax", "norm_topk_prob": False, "mlp_bias": False},
    layers=after_dense("first_k_dense_replace", 0),
)  # fmt: skip
KIMI = replace(
    GLM4, experts=Key("num_experts"), top_k=Key("num_experts_per_token", None, "num_experts_per_tok"),
    normalize=Key("moe_renormalize", True), groups=(Key("num_expert_group", 1), Key("topk_group", 1)),
    shared=(Key("moe_intermediate_size"), Key("num_shared_experts", 1)),
)  # fmt: skip
MISTRAL4 = replace(
    DEEPSEEK_V2, normalize=Key("norm_topk_prob", True), group_score="top2", group_method=None, fixed=NONE,
    shared=(Key("moe_intermediate_size"), SHARED), types=("mistral4",),
)  # fmt: skip
GRANITE = Family(
    published=spell("block_sparse_moe", names.router_row("router.layer.weight"), names.stacked(*GRANITE_LINEAR),
                    GRANITE_SHARED),
    memory=spell("block_sparse_moe", names.ROUTER, names.STACKED, GRANITE_SHARED),
    d_ff=WIDTH, experts=Key("num_local_experts"), shared=(Key("shared_intermediate_size", 0),),
)  # fmt: skip
GPT_OSS = Family(
    published=spell("mlp", names.ROUTER, Row("experts.gate_up_proj", "wi", ("E", "H", "FG")),
                    Row("experts.gate_up_proj_bias", "bi", ("E", "FG")), names.TRANSPOSED[1], BIASES),
    d_ff=WIDTH, experts=Key("num_local_experts", None, "num_experts"), act=None, activation="swiglu_oai",
    limit=Key("swiglu_limit", 7.0), logits_bias=True, use_bias=True, fixed={"swiglu_alpha": SWIGLU_OAI_ALPHA},
)  # fmt: skip
GEMMA4 = Family(
    published=spell("", names.router_row("router.proj.weight"), names.STACKED,
                    Row("router.per_expert_scale", "expert_scale", ("E",)), outside=("router.scale",)),
    types=("gemma4_text", "gemma4"), top_k=Key("top_k_experts"), act=Key("hidden_activation", "gelu_pytorch_tanh"),
    expert_scale=True, fixed={"enable_moe_block": True},
)  # fmt: skip
ARIA = Family(
    published=spell("mlp", names.ROUTER, names.ALL_SHARED,
                    names.transposed("experts.fc1.weight", "experts.fc2.weight")),
    memory=spell("mlp", names.ROUTER, names.ALL_SHARED, names.TRANSPOSED), types=("aria_text", "aria"),
    d_ff=WIDTH, experts=Key("moe_num_experts", 8), top_k=Key("moe_topk", 2),
    shared=(WIDTH, Key("moe_num_shared_experts", 2)), fixed={"mlp_bias": False},
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3,
    "olmoe": OLMOE,
    "deepseek_v3": replace(DEEPSEEK_V3, types=("deepseek_v3", "kimi_k2")),
    "gpt_oss": GPT_OSS,
    "qwen2_moe": QWEN2,
    "afmoe": replace(
        DEEPSEEK_V3, published=spell("mlp", names.router_row("router.gate.weight"), names.bias_row("expert_bias"),
                                     names.ALL_SHARED, names.PROJ),
        memory=spell("mlp", names.router_row("router.gate.weight"), names.bias_row("expert_bias"), names.ALL_SHARED,
                     names.STACKED),
        experts=Key("num_experts"), normalize=True, scale=Key("route_scale", 1.0), groups=(), fixed=NONE,
        shared=(Key("moe_intermediate_size"), Key("num_shared_experts", 2)), layers=after_dense("num_dense_layers", 1),
    ),
    "aria": ARIA,
    "axk1": replace(
        DEEPSEEK_V3, memory=STACKED._replace(outside=("post_mlp_layernorm.weight",)),
        layers=after_dense("first_k_dense_replace", 1),
    ),
    "axk2": replace(DEEPSEEK_V3, groups=GROUPS, layers=after_dense("first_k_dense_replace", 1)),
    "bailing_hybrid": replace(
        KIMI, published=spell("mlp", names.GATE, names.bias_row("gate.expert_bias"), names.ALL_SHARED, names.PROJ),
        scale=Key("routed_scaling_factor", 2.5), groups=(Key("num_expert_group", 8), Key("topk_group", 4)),
        layers=after_dense("first_k_dense_replace", 2),
    ),
    "beam": replace(DEEPSEEK_V3, experts=Key("num_experts"), shared=(), layers=after_dense(None, 3)),
    "cohere2_moe": replace(
        OLMOE, normalize=True, shared=(WIDTH, Key("num_shared_experts", 0)), fixed={"expert_selection_fn": "softmax"},
        shared_fixed=((Key("shared_expert_combination_strategy", "average"), "sum"),),
        layers=after_dense("first_k_dense_replace", 0),
    ),
    "dbrx": Family(
        published=spell("ffn", names.router_row("router.layer.weight"), Row("experts.mlp.w1", "wi", ("EF", "H"), 0),
                        Row("experts.mlp.v1", "wi", ("EF", "H"), 1), Row("experts.mlp.w2", "wo", ("EF", "H")),
                        stem="transformer.blocks."),
        d_model=Key("d_model"), d_ff=Key("ffn_config.ffn_hidden_size"), experts=Key("ffn_config.moe_num_experts"),
        top_k=Key("ffn_config.moe_top_k"), act=Key("ffn_config.ffn_act_fn.name", "silu"),
        fixed={"ffn_config.moe_normalize_expert_weights": 1.0, "ffn_config.moe_jitter_eps": None},
        num_layers=Key("n_layers"),
    ),
    "deepseek_ocr2": replace(
        DEEPSEEK_V2, types=("deepseek_ocr2_text", "deepseek_ocr2"), layers=after_dense("first_k_dense_replace", 1)
    ),
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v32": DEEPSEEK_V3,
    "deepseek_v4": replace(
        DEEPSEEK_V3, published=spell("ffn", names.GATE, names.bias_row("gate.bias"),
                                     names.shared("shared_experts", "w1", "w3", "w2"), names.W123),
        score="sqrt_softplus", normalize=True, scale=Key("routed_scaling_factor", 1.5), groups=(),
        shared=(Key("moe_intermediate_size"),), limit=Key("swiglu_limit", 10.0),
        fixed={"scoring_func": "sqrtsoftplus", "router_jitter_noise": 0.0, "mlp_bias": False, "n_shared_experts": 1},
        layers=after_dense("num_hash_layers", 3, kind="moe"),
    ),
    "diffusion_gemma": replace(GEMMA4, types=("diffusion_gemma_text", "diffusion_gemma"), fixed=NONE),
    "dots1": replace(GLM4, normalize=NORMALIZE, layers=after_dense("first_k_dense_replace", 0)),
    "dots3_note": replace(
        GLM4, types=("dots3_note_text", "dots3_note"), shared=(Key("shared_experts_intermediate_size", 1536), SHARED)
    ),
    "ernie4_5_moe": Family(
        published=spell("mlp", names.GATE, names.ALL_SHARED, names.PROJ,
                        Row("moe_statics.e_score_correction_bias", "router_bias", ("", "E"))),
        memory=spell("mlp", names.GATE, names.ALL_SHARED, names.STACKED,
                     Row("gate.moe_statics.e_score_correction_bias", "router_bias", ("", "E"))),
        experts=Key("moe_num_experts", 64, "num_experts"), top_k=Key("moe_k", 6, "num_experts_per_tok"), bias=True,
        shared=(Key("moe_intermediate_size", 1536), Key("moe_num_shared_experts", 2)), fixed={"use_bias": False},
        layers=between,
    ),
    "exaone_moe": replace(
        GLM4, published=spell("mlp", names.GATE, names.BLOCK_CORRECTION, names.ALL_SHARED, names.PROJ),
        experts=Key("num_experts"), shared=(Key("moe_intermediate_size"), Key("num_shared_experts", 1)),
        scale=Key("routed_scaling_factor", 2.5),
    ),
    "flex_olmo": OLMOE,
    "flint": replace(
        QWEN2, score="sigmoid", normalize=Key("norm_topk_prob", True), shared_gate=False,
        layers=by_step(dense=(0, 1)),
    ),
    "gemma4": GEMMA4,
    "glm4_moe": GLM4,
    "glm4_moe_lite": replace(GLM4, scale=Key("routed_scaling_factor", 1.8)),
    "glm4v_moe": replace(GLM4, types=("glm4v_moe_text", "glm4v_moe")),
    "glm5_next": replace(
        GLM4, types=("glm5_next_text", "glm5_next"), scale=Key("routed_scaling_factor", 2.5),
        limit=Key("swiglu_limit", 10.0), layers=after_dense(None, 3),
    ),
    "glm_moe_dsa": replace(DEEPSEEK_V3, groups=GROUPS),
    "granitemoe": replace(GRANITE, shared=()),
    "granitemoe_swa": replace(GRANITE, published=GRANITE.memory or GRANITE.published),
    "granitemoehybrid": replace(GRANITE, shared=(Key("shared_intermediate_size", 1024),)),
    "granitemoeshared": GRANITE,
    "hunyuan_v1_moe": Family(
        published=spell("mlp", names.router_row("gate.wg.weight"), names.shared("shared_mlp"), names.PROJ),
        memory=spell("mlp", names.router_row("gate.wg.weight"), names.shared("shared_mlp"), names.STACKED),
        d_ff=WIDTH, top_k=Key("moe_topk", 1, "num_experts_per_tok"), shared=(WIDTH,),
    ),
    "hy_v3": replace(
        GLM4, published=spell("mlp", names.router_row("router.gate.weight"), names.bias_row("expert_bias"),
                              names.shared("shared_mlp"), names.PROJ),
        memory=spell("mlp", names.GATE, names.BLOCK_CORRECTION, names.ALL_SHARED, names.STACKED),
        experts=Key("num_experts"), normalize=True, scale=Key("router_scaling_factor", 2.826), groups=(),
        shared=(Key("moe_intermediate_size"), Key("num_shared_experts", 1)), layers=after_dense(None, 1),
    ),
    "jamba": Family(
        published=spell("feed_forward", names.ROUTER, names.PROJ),
        memory=spell("feed_forward", names.ROUTER, names.STACKED), d_ff=WIDTH, normalize=False, layers=by_period,
    ),
    "kimi_linear": replace(KIMI, published=W123, scale=Key("routed_scaling_factor", 2.446)),
    "kolibri1": replace(
        OLMOE, published=spell("mlp", names.GATE, names.bias_row("../moe.router.expert_bias"), names.ALL_SHARED,
                               names.PROJ),
        experts=Key("num_local_experts", None, "num_experts"), d_ff=Key("moe_intermediate_size"), score="sigmoid",
        order="topk_then_score", bias=True, shared=(Key("shared_expert_intermediate_size", 512),),
    ),
    "laguna": replace(
        GLM4, published=spell("mlp", names.GATE, names.bias_row("experts.e_score_correction_bias"), names.ONE_SHARED,
                              names.PROJ),
        experts=Key("num_experts"), normalize=True, groups=(), scale=Key("moe_routed_scaling_factor", 1.0),
        shared=(Key("shared_expert_intermediate_size", 512),), layers=after_dense(None, 1),
        fixed={"moe_router_logit_softcapping": 0.0, "moe_apply_router_weight_on_input": False},
    ),
    "lfm2_moe": replace(
        GLM4, published=spell("feed_forward", names.GATE, names.bias_row("expert_bias"), names.W123),
        memory=spell("feed_forward", names.GATE, names.bias_row("expert_bias"), names.STACKED),
        experts=Key("num_experts"), act=None, groups=(), shared=(), fixed={"use_expert_bias": True},
        layers=after_dense("num_dense_layers", 2),
    ),
    "llama4": Family(
        published=spell("feed_forward", names.ROUTER, names.ONE_SHARED, names.TRANSPOSED),
        types=("llama4_text", "llama4"), d_ff=WIDTH, experts=Key("num_local_experts", 16),
        top_k=Key("num_experts_per_tok", 1), score="sigmoid", order="topk_then_score", normalize=False,
        shared=(WIDTH,), weights_at="input", layers=interleaved,
    ),
    "mellum": replace(
        QWEN3, experts=Key("num_local_experts", None, "num_experts"), normalize=Key("norm_topk_prob", True),
        layers=all_layers,
    ),
    "mimo_v2_flash": replace(GLM4, shared=(), layers=after_dense(None, 1)),
    "minimax": MIXTRAL,
    "minimax_m2": replace(
        MIXTRAL, published=spell("block_sparse_moe", names.GATE, names.BLOCK_CORRECTION, names.W123),
        memory=spell("mlp", names.GATE, names.BLOCK_CORRECTION, names.STACKED), score="sigmoid", bias=True,
    ),
    "minimax_m3_vl": Family(
        published=spell("block_sparse_moe", names.GATE, names.BLOCK_CORRECTION, names.ALL_SHARED, names.W123),
        memory=spell("mlp", names.GATE, names.CORRECTION, names.STACKED,
                     names.fused_shared("shared_experts.gate_up_proj.weight", "shared_experts.down_proj.weight")),
        types=("minimax_m3_vl_text", "minimax_m3_vl"), d_ff=WIDTH, act=None, activation="swiglu_oai",
        experts=Key("num_local_experts", None, "num_experts"), limit=Key("swiglu_limit", 7.0), score="sigmoid",
        bias=True, scale=Key("routed_scaling_factor", 2.0), shared=(Key("shared_intermediate_size", 3072),),
        fixed={"swiglu_alpha": SWIGLU_OAI_ALPHA, "router_jitter_noise": 0.0}, layers=after_dense(None, 0),
    ),
    "mistral4": MISTRAL4,
    "mistral_large4": replace(
        MISTRAL4, published=spell("", names.GATE, names.ALL_SHARED, names.W123, stem="layers."),
        types=("mistral_large4_text", "mistral_large4"), normalize=True, layers=after_dense("first_k_dense_replace", 1),
    ),
    "nemotron_h": replace(
        GLM4, published=spell("mixer", names.GATE, names.CORRECTION,
                              Row("experts.{e}.up_proj.weight", "wi", ("F", "H"), 0),
                              Row("experts.{e}.down_proj.weight", "wo", ("H", "F")),
                              Row("shared_experts.up_proj.weight", "shared_wi", ("S", "H"), 0),
                              Row("shared_experts.down_proj.weight", "shared_wo", ("H", "S")), stem="backbone.layers."),
        memory=spell("mixer", names.GATE, names.CORRECTION, Row("experts.up_proj", "wi", ("E", "F", "H"), 0),
                     Row("experts.down_proj", "wo", ("E", "H", "F")),
                     Row("shared_experts.up_proj.weight", "shared_wi", ("S", "H"), 0),
                     Row("shared_experts.down_proj.weight", "shared_wo", ("H", "S"))),
        act=None, activation="relu2", shared=(Key("moe_shared_expert_intermediate_size", 7688),),
        fixed={"mlp_hidden_act": "relu2", "mlp_bias": False, "moe_latent_size": None}, layers=by_pattern,
        num_layers=Key("num_hidden_layers", 0),
    ),
    "openai_privacy_filter": replace(
        GPT_OSS, published=spell("mlp", names.ROUTER, names.TRANSPOSED,
                                 Row("experts.gate_up_proj_bias", "bi", ("E", "GF")), BIASES),
    ),
    "qwen3_5_moe": replace(QWEN2, types=("qwen3_5_moe_text", "qwen3_5_moe"), normalize=True, layers=all_layers),
    "qwen3_next": replace(QWEN2, normalize=Key("norm_topk_prob", True)),
    "qwen3_omni_moe": replace(
        QWEN3, types=("qwen3_omni_moe_text", "qwen3_omni_moe_thinker", "qwen3_omni_moe"),
        normalize=Key("norm_topk_prob", True),
    ),
    "qwen3_vl_moe": replace(
        QWEN3, published=spell("mlp", names.GATE, names.TRANSPOSED), types=("qwen3_vl_moe_text", "qwen3_vl_moe"),
        experts=Key("num_local_experts", None, "num_experts"), normalize=True,
    ),
    "qwen4_exp": replace(
        QWEN2, types=("qwen4_exp_text", "qwen4_exp"), normalize=Key("norm_topk_prob", True), layers=all_layers
    ),
    "solar_open": replace(GLM4, layers=all_layers),
    "step3p7": replace(
        GLM4, published=spell("moe", names.GATE, names.bias_row("router_bias"),
                              Row("gate_proj.weight", "wi", ("E", "F", "H"), 0),
                              Row("up_proj.weight", "wi", ("E", "F", "H"), 1),
                              Row("down_proj.weight", "wo", ("E", "H", "F")), names.shared("../share_expert")),
        types=("step3p5", "step3p7"), experts=Key("n_routed_experts", 288, "moe_num_experts"),
        top_k=Key("num_experts_per_tok", 8, "moe_top_k"), normalize=True, groups=(),
        scale=Key("moe_router_scaling_factor", 1.0), shared=(Key("share_expert_dim", 1280, "share_expert_dims"),),
        fixed={"mlp_bias": False, "swiglu_limits": None, "swiglu_limits_shared": None}, layers=after_dense(None, 3),
    ),
    "unlimited_ocr": replace(
        DEEPSEEK_V2, types=("unlimited_ocr_text", "unlimited_ocr"), layers=after_dense("first_k_dense_replace", 1)
    ),
}  # fmt: skip


def types_of(family: str) -> tuple[str, ...]:
    """Returns the values of `model_type` of a family; the first one is written."""
    return FAMILIES[family].types or (family,)


FAMILY_OF = {model_type: family for family in FAMILIES for model_type in types_of(family)}
MODEL_TYPES = tuple(FAMILY_OF)
