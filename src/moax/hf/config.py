"""config.json of a published model <-> MoEConfig of its MoE layers.

| model_type | router | activation |
|---|---|---|
| mixtral | softmax over the K largest logits | swiglu |
| qwen3_moe, olmoe | softmax over all logits, then the K largest; with `norm_topk_prob` as mixtral | swiglu |
| deepseek_v3 | sigmoid, selection bias, groups by their two largest scores, scaling; shared experts | swiglu |
| gpt_oss | softmax over the K largest logits; the logits and the experts have biases | swiglu_oai |

The softmax over all logits, divided by the sum of its K largest values, equals the softmax over the K largest logits.
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
# These are the keys of config.json for each field. Reading takes the first key that exists, writing the first key.
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
# moax supports one value of these keys, and refuses a model that has another value.
FIXED = dict(
    mixtral={"router_jitter_noise": 0.0},
    deepseek_v3={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    gpt_oss={"swiglu_alpha": SWIGLU_OAI_ALPHA, "swiglu_limit": SWIGLU_OAI_LIMIT},
)
SOFTMAX_OF_BEST = RouterConfig(order="topk_then_score", normalize=False)


def read_config(source: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """Returns the values of a config.json.

    Args:
      source: the values themselves, or the path of the file or of its folder.

    Raises:
      ValueError: the path is no file.
    """
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"config {str(path)!r} is no file; give a config.json, its folder, or its values as a dict")
    return json.loads(path.read_text(encoding="utf-8"))


def config_from_hf(source: Mapping[str, Any] | str | Path) -> MoEConfig:
    """Returns the MoEConfig of the MoE layers of a published model.

    The mapping follows the modeling files of transformers 5.23.

    Args:
      source: the values of config.json, or the path of that file or of its folder. A missing option has the default of
        transformers.

    Returns:
      MoEConfig. The balance losses are 0, since transformers computes one loss over all layers at once, which a layer
      cannot do. Set `router.aux_loss` yourself to train with a loss of each layer.

    Raises:
      Unsupported: the `model_type` is not in `MODEL_TYPES`, or moax does not have an option of the model.
      ValueError: a size is missing, or the sizes make no MoEConfig.
    """
    values = read_config(source)
    family = _family(values.get("model_type"))
    for key, only in FIXED.get(family, {}).items():
        if values.get(key, only) != only:
            raise Unsupported(f"{family}: {key}={values[key]!r}; moax supports {only!r} alone")
    act = values.get("hidden_act", "silu")
    if family != "gpt_oss" and act not in ACTIVATIONS:
        raise Unsupported(f"{family}: hidden_act={act!r}; moax supports {', '.join(map(repr, ACTIVATIONS))}")
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
    """Returns the keys of config.json that `config` decides; balance losses are left out.

    Args:
      config: see `MoEConfig`.
      model_type: one of `MODEL_TYPES`.

    Raises:
      Unsupported: no model of this type has this config; the message names the fields that differ.
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
    """Returns the indices of the MoE layers; the other layers are dense.

    Args:
      source: the values of config.json, or the path of that file or of its folder.

    Returns:
      Indices from 0: (3, 4, ..., 60) for DeepSeek-V3.

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
    """Returns `model_type`, or raises Unsupported."""
    if model_type not in MODEL_TYPES:
        raise Unsupported(f"model_type={model_type!r}; moax.hf supports {', '.join(map(repr, MODEL_TYPES))}")
    return model_type


def _size(values: Mapping[str, Any], *keys: str) -> int:
    """Returns the value of the first of these keys that exists."""
    value = next((values[key] for key in keys if values.get(key) is not None), None)
    if value is None:
        raise ValueError(f"config of model_type={values['model_type']!r} has no {' or '.join(keys)}")
    return value


def _router(family: str, values: Mapping[str, Any], top_k: int) -> RouterConfig:
    """Returns the router of a model; see the table of this module."""
    if family == "gpt_oss":
        return dataclasses.replace(SOFTMAX_OF_BEST, logits_bias=True)
    if family == "deepseek_v3":
        normalize = values.get("norm_topk_prob", True)
        if normalize and top_k == 1:
            raise Unsupported(
                "deepseek_v3: norm_topk_prob with num_experts_per_tok=1 makes every weight 1: the router cannot learn"
            )
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
    """Returns one config for all configs of the same function, with the defaults of fields unknown to config.json."""
    router = dataclasses.replace(config.router, aux_loss=0.0, z_loss=0.0)
    if router.num_groups == 1:
        router = dataclasses.replace(router, top_groups=1, group_score="top2")
    if router.score == "softmax" and router.num_groups == 1 and not router.bias:
        best = router.order == "topk_then_score" or (router.normalize and config.top_k > 1)
        router = dataclasses.replace(router, normalize=False, order="topk_then_score" if best else "score_then_topk")
    return dataclasses.replace(config, router=router, capacity_factor=None, weights_at="output")


def _differences(given, made, owner: str = "") -> list[str]:
    """Returns the fields of `given` that differ from those of `made`, as "router.scale=2.0"."""
    names = [f.name for f in dataclasses.fields(given) if f.name != "router"]
    return [f"{owner}{n}={getattr(given, n)!r}" for n in names if getattr(given, n) != getattr(made, n)]
