"""config.json of a published model <-> MoEConfig of its MoE layers.

| model_type | router | activation |
|---|---|---|
| mixtral | softmax over the best K logits | swiglu |
| qwen3_moe, olmoe | softmax over all, the best K; over the best K alone where `norm_topk_prob` | swiglu |
| deepseek_v3 | sigmoid, selection bias, groups by their two best, `routed_scaling_factor`; shared experts | swiglu |
| gpt_oss | softmax over the best K logits, which have a bias; experts have biases | swiglu_oai |

A softmax over all that is divided by the sum of the best K is the softmax over those K.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moax.config import SWIGLU_OAI_ALPHA, SWIGLU_OAI_LIMIT, Activation, MoEConfig, RouterConfig
from moax.errors import Unsupported

MODEL_TYPES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")
# The key of config.json for each field; where there are several, the first is written.
D_FF = dict(mixtral="intermediate_size", olmoe="intermediate_size", gpt_oss="intermediate_size")
EXPERTS = dict(
    mixtral=("num_local_experts", "num_experts"),
    qwen3_moe=("num_experts", "num_local_experts"),
    olmoe=("num_experts", "num_local_experts"),
    deepseek_v3=("n_routed_experts", "num_local_experts"),
    gpt_oss=("num_local_experts", "num_experts"),
)
TOP_K = ("num_experts_per_tok", "experts_per_token")
ACTIVATIONS: dict[str, Activation] = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu"}
# What this module reads one value of; a model with another is refused.
FIXED = dict(
    mixtral={"router_jitter_noise": 0.0},
    deepseek_v3={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    gpt_oss={"swiglu_alpha": SWIGLU_OAI_ALPHA, "swiglu_limit": SWIGLU_OAI_LIMIT},
)
SOFTMAX_OF_BEST = RouterConfig(order="topk_then_score", normalize=False)


def read_config(source: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """The values of a config.json: given as such, or as the path of the file or of its folder."""
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"config {str(path)!r} is no file; give a config.json, its folder, or its values as a dict")
    return json.loads(path.read_text(encoding="utf-8"))


def config_from_hf(source: Mapping[str, Any] | str | Path) -> MoEConfig:
    """The MoEConfig of a published model's MoE layers.

    Args:
      source: the values of config.json, or the path of that file or of its folder. Options that are not there are
        what transformers takes them for.

    Returns:
      MoEConfig. The balance losses are 0: transformers computes one over all layers at once, which no layer can; set
      `router.aux_loss` yourself to train with the loss of each layer.

    Raises:
      Unsupported: a `model_type` that is not in `MODEL_TYPES`, or an option of one of them that moax has not.
      ValueError: a size that is missing, or makes no MoEConfig.

    Sources: the modeling files of transformers 5.23.
    """
    values = read_config(source)
    family = _family(values.get("model_type"))
    for key, only in FIXED.get(family, {}).items():
        if values.get(key, only) != only:
            raise Unsupported(f"{family}: {key}={values[key]!r}; moax has {only!r} alone")
    act = values.get("hidden_act", "silu")
    if family != "gpt_oss" and act not in ACTIVATIONS:
        raise Unsupported(f"{family}: hidden_act={act!r}; moax has {', '.join(map(repr, ACTIVATIONS))}")
    d_ff = _size(values, D_FF.get(family, "moe_intermediate_size"))
    top_k = _size(values, *TOP_K)
    shared = d_ff * (values.get("n_shared_experts", 1) or 0) if family == "deepseek_v3" else 0
    return MoEConfig(
        d_model=_size(values, "hidden_size"),
        d_ff=d_ff,
        num_experts=_size(values, *EXPERTS[family]),
        top_k=top_k,
        activation="swiglu_oai" if family == "gpt_oss" else ACTIVATIONS[act],
        use_bias=family == "gpt_oss",
        router=_router(family, values, top_k),
        shared_d_ff=shared,
    )


def config_to_hf(config: MoEConfig, model_type: str) -> dict[str, Any]:
    """The keys of config.json that `config` decides, for a model of this type; balance losses are left out.

    Raises:
      Unsupported: models of this type cannot be what `config` is; the message names the fields.
    """
    family = _family(model_type)
    router, act = config.router, {v: k for k, v in reversed(ACTIVATIONS.items())}
    values: dict[str, Any] = {"model_type": family, "hidden_size": config.d_model}
    values |= {D_FF.get(family, "moe_intermediate_size"): config.d_ff, EXPERTS[family][0]: config.num_experts}
    values |= {TOP_K[0]: config.top_k, "hidden_act": act.get(config.activation, "silu")} | FIXED.get(family, {})
    if family in ("qwen3_moe", "olmoe"):
        values["norm_topk_prob"] = _canonical(config).router.order == "topk_then_score"
    if family == "deepseek_v3":
        values |= {"n_group": router.num_groups, "topk_group": router.top_groups, "norm_topk_prob": router.normalize}
        values |= {"routed_scaling_factor": router.scale, "n_shared_experts": config.shared_d_ff // config.d_ff}
    made, given = _canonical(config_from_hf(values)), _canonical(config)
    differ = _differences(given, made) + _differences(given.router, made.router, "router.")
    if differ:
        raise Unsupported(f"model_type={model_type!r} has no {'; no '.join(differ)}")
    return values


def moe_layers(source: Mapping[str, Any] | str | Path) -> tuple[int, ...]:
    """The indices of the layers that are MoE layers; the others are dense.

    Args:
      source: the values of config.json, or the path of that file or of its folder.

    Raises:
      Unsupported, ValueError: as `config_from_hf`.
    """
    values = read_config(source)
    family, layers = _family(values.get("model_type")), range(_size(values, "num_hidden_layers"))
    if family == "deepseek_v3":
        return tuple(layers[values.get("first_k_dense_replace", 3) or 0 :])
    if family == "qwen3_moe":
        dense, step = values.get("mlp_only_layers") or (), values.get("decoder_sparse_step", 1)
        return tuple(i for i in layers if i not in dense and (i + 1) % step == 0)
    return tuple(layers)


def _family(model_type: Any) -> str:
    if model_type not in MODEL_TYPES:
        raise Unsupported(f"model_type={model_type!r}; moax.hf has {', '.join(map(repr, MODEL_TYPES))}")
    return model_type


def _size(values: Mapping[str, Any], *keys: str) -> int:
    """The first of these keys that is there."""
    found = next((values[key] for key in keys if values.get(key) is not None), None)
    if found is None:
        raise ValueError(f"config of model_type={values['model_type']!r} has no {' or '.join(keys)}")
    return found


def _router(family: str, values: Mapping[str, Any], top_k: int) -> RouterConfig:
    if family == "gpt_oss":
        return dataclasses.replace(SOFTMAX_OF_BEST, logits_bias=True)
    if family == "deepseek_v3":
        normalize = values.get("norm_topk_prob", True)
        if normalize and top_k == 1:
            raise Unsupported("deepseek_v3: norm_topk_prob with one expert a token: a weight of 1 that never learns")
        return RouterConfig(
            score="sigmoid",
            normalize=normalize,
            num_groups=values.get("n_group", 8) or 1,
            top_groups=values.get("topk_group", 4) or 1,
            scale=float(values.get("routed_scaling_factor", 2.5)),
            bias=True,
        )
    if family == "mixtral" or values.get("norm_topk_prob", False):
        return SOFTMAX_OF_BEST
    return RouterConfig(normalize=False)


def _canonical(config: MoEConfig) -> MoEConfig:
    """One of the configs that are the same function, less what config.json says nothing about."""
    router = dataclasses.replace(config.router, aux_loss=0.0, z_loss=0.0)
    if router.num_groups == 1:
        router = dataclasses.replace(router, top_groups=1, group_score="top2")
    if router.score == "softmax" and router.num_groups == 1 and not router.bias:
        best = router.order == "topk_then_score" or (router.normalize and config.top_k > 1)
        router = dataclasses.replace(router, normalize=False, order="topk_then_score" if best else "score_then_topk")
    return dataclasses.replace(config, router=router, capacity_factor=None, weights_at="output")


def _differences(given, made, owner: str = "") -> list[str]:
    names = [f.name for f in dataclasses.fields(given) if f.name != "router"]
    return [f"{owner}{n}={getattr(given, n)!r}" for n in names if getattr(given, n) != getattr(made, n)]
