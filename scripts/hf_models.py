"""A tiny model of random weights for each family of `moax.hf.families`, made by transformers."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

SIZES = dict(
    vocab_size=8, hidden_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=12, max_position_embeddings=64, pad_token_id=0,
    intermediate_size=8, moe_intermediate_size=8, num_experts=8, num_local_experts=8,
    n_routed_experts=8, moe_num_experts=8, num_experts_per_tok=3, num_experts_per_token=3,
    moe_topk=3, moe_k=3, top_k_experts=3, n_shared_experts=2, num_shared_experts=2,
    moe_num_shared_experts=2, shared_expert_intermediate_size=12, shared_intermediate_size=12,
    n_group=4, num_expert_group=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=8,
    kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, norm_topk_prob=True,
    swiglu_limit=1.0, routed_scaling_factor=1.75,
)  # fmt: skip


class Tiny(NamedTuple):
    """How a family differs from `SIZES`.

    Attributes:
      changes: values of its config; those of None keep the default of transformers.
      model: the class of the model; "" takes the one that the auto classes know.
      config: the class of its config; "" takes that of the language model.
      loads: the layouts of moax that this class loads; a multimodal class would load the other one too.
    """

    changes: dict[str, Any] = {}
    model: str = ""
    config: str = ""
    loads: tuple[str, ...] = ("written", "stacked")


FAMILIES = """
    mixtral qwen3_moe olmoe deepseek_v3 gpt_oss qwen2_moe afmoe aria axk1 axk2 bailing_hybrid beam
    cohere2_moe dbrx deepseek_ocr2 deepseek_v2 deepseek_v32 deepseek_v4 diffusion_gemma dots1
    dots3_note ernie4_5_moe exaone_moe flex_olmo flint gemma4 glm4_moe glm4_moe_lite glm4v_moe
    glm5_next glm_moe_dsa granitemoe granitemoe_swa granitemoehybrid granitemoeshared
    hunyuan_v1_moe hy_v3 jamba kimi_linear kolibri1 laguna lfm2_moe llama4 mellum mimo_v2_flash
    minimax minimax_m2 minimax_m3_vl mistral4 mistral_large4 nemotron_h openai_privacy_filter
    qwen3_5_moe qwen3_next qwen3_omni_moe qwen3_vl_moe qwen4_exp solar_open step3p7 unlimited_ocr
""".split()
TEXT_ALONE = Tiny(loads=("stacked",))
TINY = {
    "aria": Tiny(loads=("written",)),
    "beam": Tiny(dict(mlp_layer_types=["dense", "sparse"])),
    "cohere2_moe": Tiny(dict(shared_expert_combination_strategy="sum")),
    "dbrx": Tiny(
        dict(d_model=24, n_heads=2, n_layers=2, max_seq_len=64,
             attn_config=dict(kv_n_heads=2, rope_theta=1e4),
             rope_parameters=dict(rope_type="default", rope_theta=1e4),
             ffn_config=dict(hidden_size=24, ffn_hidden_size=8, moe_num_experts=8, moe_top_k=3)),
        config="DbrxConfig",
    ),
    "deepseek_ocr2": Tiny(
        dict(topk_method="group_limited_greedy", mlp_layer_types=["dense", "sparse"]),
        model="DeepseekOcr2TextModel", loads=("stacked",),
    ),
    "deepseek_v2": Tiny(dict(topk_method="group_limited_greedy", norm_topk_prob=None)),
    "deepseek_v4": Tiny(dict(mlp_layer_types=["hash_moe", "moe"], n_shared_experts=1)),
    "diffusion_gemma": Tiny(model="DiffusionGemmaEncoderTextModel"),
    "dots3_note": Tiny(dict(shared_experts_intermediate_size=12)),
    "flint": Tiny(dict(mlp_only_layers=[0])),
    "gemma4": Tiny(dict(enable_moe_block=True, hidden_size_per_layer_input=0)),
    "glm5_next": Tiny(dict(qk_rope_head_dim=0, mlp_layer_types=["dense", "sparse"])),
    "glm4v_moe": TEXT_ALONE,
    "gpt_oss": Tiny(dict(swiglu_limit=7.0)),
    "granitemoehybrid": Tiny(dict(mamba_n_heads=4, mamba_d_head=12, mamba_expand=2)),
    "hunyuan_v1_moe": Tiny(dict(num_experts=8)),
    "jamba": Tiny(dict(attn_layer_period=2, attn_layer_offset=0)),
    "lfm2_moe": Tiny(dict(num_dense_layers=1, layer_types=["full_attention", "full_attention"])),
    "mistral4": TEXT_ALONE,
    "mistral_large4": Tiny(model="MistralLarge4TextModel"),
    "nemotron_h": Tiny(
        dict(num_hidden_layers=None, layers_block_type=["full_attention", "moe"],
             moe_shared_expert_intermediate_size=12, moe_latent_size=16),
    ),
    "qwen3_omni_moe": Tiny(model="Qwen3OmniMoeThinkerTextModel", loads=("stacked",)),
    "qwen3_vl_moe": TEXT_ALONE,
    "step3p7": Tiny(dict(share_expert_dim=12, mlp_layer_types=["dense", "sparse"]),
                    model="Step3p7TextModel", loads=("stacked",)),
    "minimax_m3_vl": TEXT_ALONE,
    "openai_privacy_filter": Tiny(model="OpenAIPrivacyFilterModel"),
    "unlimited_ocr": Tiny(dict(topk_method="group_limited_greedy"), model="UnlimitedOcrTextModel"),
}  # fmt: skip
SPARSE = re.compile(r"^class \w*(?:Experts?|Sparse(?:Moe|MoE|MLP)\w*|MoE|Moe|Moe\w*MLP)\(", re.MULTILINE)
SIDE = r"Vision|Audio|Encoder|Code|Projector|Attention|FFN|Thinker|Talker"
BLOCK = (  # the names of the MoE block of layer {}
    r"(?:layers|blocks)\.{}\.(?:mlp|block_sparse_moe|feed_forward|mixer|ffn|moe|share_expert|"
    r"shared_mlp|experts|shared_experts|router|gate)\."
)


def module_of(family: str, kind: str):
    """Returns the module of a family: kind "configuration" or "modeling"."""
    return importlib.import_module(f"transformers.models.{family}.{kind}_{family}")


def config_of(family: str) -> transformers.PreTrainedConfig:
    """Returns the tiny config of a family."""
    tiny = TINY.get(family, Tiny())
    module = module_of(family, "configuration")
    classes = {}
    for value in vars(module).values():
        is_own = inspect.isclass(value) and value.__module__ == module.__name__
        if is_own and value.__name__.endswith("Config"):
            classes[value.__name__] = value
    without_talker = [name for name in classes if not re.search("Talker", name)]
    texts = [name for name in without_talker if name.endswith("TextConfig")]
    plain = [name for name in classes if not re.search(SIDE, name)]
    chosen = classes[tiny.config or (texts or plain)[0]]
    known = chosen().to_dict()
    values = {name: value for name, value in SIZES.items() if name in known} | tiny.changes
    return chosen(**{name: value for name, value in values.items() if value is not None})


def model_of(family: str) -> torch.nn.Module:
    """Returns the tiny model of a family, with random weights of transformers."""
    config = config_of(family)
    config._experts_implementation = "eager"
    tiny = TINY.get(family, Tiny())
    if tiny.model:
        return getattr(module_of(family, "modeling"), tiny.model)(config).float()
    try:
        return transformers.AutoModelForCausalLM.from_config(config).float()
    except ValueError:
        return transformers.AutoModel.from_config(config).float()


class Layer(NamedTuple):
    """The MoE layer of a model.

    Attributes:
      run: computes y of x and of the input of the router, which is x in most families.
      named: its parameters and buffers by their names in the model.
      own_input: whether the router has an input of its own.
    """

    run: Any
    named: dict[str, torch.Tensor]
    own_input: bool


def layer_of(model: torch.nn.Module) -> Layer:
    """Returns the last MoE layer, without the norms and scales that moax leaves to the layer around it."""
    # An MoE block has experts and a router; the layers of Gemma 4 have both themselves.
    blocks = []
    for module_name, module in model.named_modules():
        has_router = hasattr(module, "router") or hasattr(module, "gate")
        if hasattr(module, "experts") and has_router:
            blocks.append(module_name)
    name = blocks[-1]
    block = model.get_submodule(name)
    if "." in name:
        around = model.get_submodule(name.rpartition(".")[0])
    else:
        around = model
    parts = {name: block}
    own_input = hasattr(getattr(block, "router", None), "per_expert_scale")
    if own_input:
        parts = {f"{name}.experts": block.experts, f"{name}.router": block.router}
        block.router.norm = torch.nn.Identity()
        block.router.scalar_root_size = 1.0
        block.router.scale.data.fill_(1.0)
        block.router.scale.requires_grad_(False)

        def run(x, router_x):
            _, weights, chosen = block.router(router_x.reshape(-1, x.shape[-1]))
            return block.experts(x.reshape(-1, x.shape[-1]), chosen, weights).reshape(x.shape)
    else:
        if hasattr(block, "post_mlp_layernorm"):
            block.post_mlp_layernorm = torch.nn.Identity()
        beside = getattr(around, "shared_mlp", None)
        if beside is not None:
            parts[f"{name.rpartition('.')[0]}.shared_mlp"] = beside

        def run(x, router_x):
            y = block(x)
            if isinstance(y, tuple):
                y = y[0]
            y = y.reshape(x.shape)
            return y if beside is None else y + beside(x)

    named = {
        f"{prefix}.{n}": p
        for prefix, part in parts.items()
        for n, p in [*part.named_parameters(), *part.named_buffers()]
    }
    return Layer(run, {n: p for n, p in named.items() if not n.endswith("router.scale")}, own_input)


@contextlib.contextmanager
def recorded_margins():
    """Yields a list that gets the smallest gap between the last chosen and the first rejected value of each top-k."""
    margins = []
    real = torch.topk

    def topk(values, k, dim=-1, **rest):
        if k < values.shape[dim]:
            ranked = values.detach().float().sort(dim=dim, descending=True)[0]
            gaps = ranked.select(dim, k - 1) - ranked.select(dim, k)
            margins.append(gaps[~gaps.isnan()].min().item())
        return real(values, k, dim=dim, **rest)

    method = torch.Tensor.topk
    torch.topk = topk
    torch.Tensor.topk = topk
    try:
        yield margins
    finally:
        torch.topk = real
        torch.Tensor.topk = method


def families_of_transformers() -> dict[str, list[str]]:
    """Returns the folders of transformers whose models have sparse experts, with the model types of their configs."""
    families = {}
    root = Path(transformers.__file__).parent / "models"
    for file in sorted(root.glob("*/modeling_*.py")):
        text = file.read_text(encoding="utf-8")
        if SPARSE.search(text):
            family = file.parent.name
            config = file.with_name(f"configuration_{family}.py").read_text(encoding="utf-8")
            model_types = re.findall(r'^    model_type = "(.+)"', config, re.MULTILINE)
            families[family] = sorted(set(model_types))
    return families
