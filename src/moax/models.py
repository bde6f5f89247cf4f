"""The MoE blocks of published models: `MODELS["qwen3-30b"].config` is the block of one layer."""

from __future__ import annotations

import dataclasses
from typing import Any

from moax.config import MoEConfig, RouterConfig


@dataclasses.dataclass(frozen=True)
class Model:
    """The MoE block of a published model: the config of one layer, the number of MoE layers, and the repository whose
    `config.json` has the sizes."""

    config: MoEConfig
    layers: int
    source: str


# The weights are the softmax of the K chosen logits, which sums to 1 by itself.
_LATE = RouterConfig(order="topk_then_score", normalize=False)
_SIGMOID = RouterConfig(score="sigmoid", bias=True, scale=2.827)
_GROUPED = dataclasses.replace(_SIGMOID, num_groups=8, top_groups=4, scale=2.5)
_GPT_OSS = {"activation": "swiglu_oai", "use_bias": True, "router": dataclasses.replace(_LATE, logits_bias=True)}
_SHARED = {"router": _LATE, "shared_d_ff": 512, "shared_gate": True}


def _model(
    source: str,
    layers: int,
    d_model: int,
    d_ff: int,
    num_experts: int,
    top_k: int,
    **config: Any,
) -> Model:
    return Model(MoEConfig(d_model, d_ff, num_experts, top_k, **config), layers, source)


# Leading dense layers (first_k_dense_replace) are no MoE layers.
MODELS: dict[str, Model] = {
    "qwen3-30b": _model("Qwen/Qwen3-30B-A3B", 48, 2048, 768, 128, 8, router=_LATE),
    "qwen3-235b": _model("Qwen/Qwen3-235B-A22B", 94, 4096, 1536, 128, 8, router=_LATE),
    "qwen3-next": _model("Qwen/Qwen3-Next-80B-A3B-Instruct", 48, 2048, 512, 512, 10, **_SHARED),
    "olmoe": _model("allenai/OLMoE-1B-7B-0924", 16, 2048, 1024, 64, 8, router=RouterConfig(normalize=False)),
    "mixtral-8x7b": _model("mistralai/Mixtral-8x7B-v0.1", 32, 4096, 14336, 8, 2, router=_LATE),
    "deepseek-v3": _model("deepseek-ai/DeepSeek-V3", 58, 7168, 2048, 256, 8, router=_GROUPED, shared_d_ff=2048),
    "kimi-k2": _model("moonshotai/Kimi-K2-Instruct", 60, 7168, 2048, 384, 8, router=_SIGMOID, shared_d_ff=2048),
    "gpt-oss-120b": _model("openai/gpt-oss-120b", 36, 2880, 2880, 128, 4, **_GPT_OSS),
}


def find_model(name: str) -> Model:
    """Returns the model of a name, a key of `MODELS`; ValueError where there is none."""
    if name not in MODELS:
        raise ValueError(f"model={name!r} must be one of {', '.join(map(repr, MODELS))}, or a MoEConfig")
    return MODELS[name]
