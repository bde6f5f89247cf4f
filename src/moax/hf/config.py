"""config.json of a published model <-> MoEConfig of its MoE layers, by the table of `moax.hf.families`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moax.config import SWIGLU_OAI_LIMIT, Activation, MoEConfig, RouterConfig
from moax.errors import Unsupported
from moax.hf.families import FAMILIES, FAMILY_OF, MODEL_TYPES, Family, types_of
from moax.hf.impossible import IMPOSSIBLE
from moax.hf.keys import Key, Values

ACTIVATIONS: dict[str, Activation] = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu"}
NESTED = ("thinker_config", "text_config")  # the part of a multimodal config.json that describes its language model


def read_config(source: Values | str | Path) -> Values:
    """Returns the values of a config.json, of a multimodal one those of its language model.

    Args:
      source: the values themselves, or the path of the file or of its folder.

    Raises:
      ValueError: the path is no file.
    """
    if not isinstance(source, Mapping):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(
                f"config {str(path)!r} is no file; give a config.json, its folder, or its values as a dict"
            )
        source = json.loads(path.read_text(encoding="utf-8"))
    for part in NESTED:
        inner = source.get(part)
        if isinstance(inner, Mapping):
            source = {"model_type": source.get("model_type"), **inner}
    return source


def config_from_hf(source: Values | str | Path) -> MoEConfig:
    """Returns the MoEConfig of the MoE layers of a published model.

    The mapping follows the modeling files of transformers 5.23.

    Args:
      source: the values of config.json, or the path of that file or of its folder. A missing option has the default of
        transformers. The language model of a multimodal config is its `text_config`.

    Returns:
      MoEConfig. The balance losses are 0, since transformers computes one loss over all layers at once, which a layer
      cannot do. Set `router.aux_loss` yourself to train with a loss of each layer.

    Raises:
      Unsupported: the `model_type` is not in `MODEL_TYPES`, or moax does not have an option of the model.
      ValueError: a size is missing, or the sizes make no MoEConfig.
    """
    values = read_config(source)
    name = family_of(values.get("model_type"))
    family = FAMILIES[name]
    for key, only in family.fixed.items():
        value = Key(key, only).read(values)
        if value != only:
            raise Unsupported(f"{name}: {key}={value!r}; moax supports {only!r} alone")
    d_ff, top_k = family.d_ff.read_size(values), family.top_k.read_size(values)
    shared = 1 if family.shared else 0
    for key in family.shared:
        shared *= key.read(values) or 0
    for key, only in family.shared_fixed if shared else ():
        if key.read(values) != only:
            raise Unsupported(f"{name}: {key.name}={key.read(values)!r}; moax supports {only!r} alone")
    config = MoEConfig(
        d_model=family.d_model.read_size(values),
        d_ff=d_ff,
        num_experts=family.experts.read_size(values),
        top_k=top_k,
        activation=_activation(name, family, values),
        activation_limit=family.limit.read(values) if family.limit else None,
        use_bias=family.use_bias,
        router=_router(name, family, values, top_k),
        shared_d_ff=shared,
        shared_gate=family.shared_gate and shared > 0,
        weights_at=family.weights_at,
    )
    standard = config.activation == "swiglu_oai" and config.activation_limit == SWIGLU_OAI_LIMIT
    return dataclasses.replace(config, activation_limit=None) if standard else config


def config_to_hf(config: MoEConfig, model_type: str) -> dict[str, Any]:
    """Returns the keys of config.json that `config` decides; balance losses are left out.

    Args:
      config: see `MoEConfig`.
      model_type: one of `MODEL_TYPES`.

    Raises:
      Unsupported: no model of this type has this config; the message names the fields that differ.
    """
    name = family_of(model_type)
    family, router = FAMILIES[name], config.router
    values: dict[str, Any] = {"model_type": model_type}
    for key, only in family.fixed.items():
        Key(key).write(values, only)
    if family.shared:
        width, *count = family.shared
        if count:
            counted = width.name == family.d_ff.name and config.shared_d_ff % config.d_ff == 0
            count[0].write(values, config.shared_d_ff // config.d_ff if counted else 1)
        width.write(values, config.shared_d_ff)
    for key, only in family.shared_fixed:
        key.write(values, only)
    family.d_model.write(values, config.d_model)
    family.d_ff.write(values, config.d_ff)
    family.experts.write(values, config.num_experts)
    family.top_k.write(values, config.top_k)
    if family.act:
        names = {v: k for k, v in reversed(ACTIVATIONS.items())}
        family.act.write(values, names.get(config.activation, "silu"))
    if family.limit:
        family.limit.write(values, config.activation_limit or SWIGLU_OAI_LIMIT)
    if isinstance(family.normalize, Key):
        plain = family.score == "softmax" and not family.bias and router.num_groups == 1
        best = _canonical(config).router.order == "topk_then_score"
        family.normalize.write(values, best if plain else router.normalize)
    if family.groups:
        family.groups[0].write(values, router.num_groups)
        family.groups[1].write(values, router.top_groups)
        if family.group_method:
            values["topk_method"] = family.group_method if router.num_groups > 1 else "greedy"
    if family.scale:
        family.scale.write(values, router.scale)
    made, given = _canonical(config_from_hf(values)), _canonical(config)
    differ = _differences(given, made) + _differences(given.router, made.router, "router.")
    if differ:
        raise Unsupported(f"model_type={model_type!r} has no {'; no '.join(differ)}")
    return values


def moe_layers(source: Values | str | Path) -> tuple[int, ...]:
    """Returns the indices of the MoE layers; the other layers are dense.

    Args:
      source: the values of config.json, or the path of that file or of its folder.

    Returns:
      Indices from 0: (3, 4, ..., 60) for DeepSeek-V3. The layers of DeepSeek-V4 that choose experts by the id of a
      token, without a router, are left out.

    Raises:
      Unsupported, ValueError: as `config_from_hf`.
    """
    values = read_config(source)
    family = FAMILIES[family_of(values.get("model_type"))]
    return family.layers(values, family.num_layers.read_size(values))


def family_of(model_type: Any) -> str:
    """Returns the family of a `model_type`.

    Raises:
      Unsupported: moax.hf does not know it, or its layer is none that moax computes.
    """
    if model_type in IMPOSSIBLE:
        raise Unsupported(f"model_type={model_type!r}: {IMPOSSIBLE[model_type]}")
    if model_type not in FAMILY_OF:
        raise Unsupported(f"model_type={model_type!r}; moax.hf supports {', '.join(map(repr, MODEL_TYPES))}")
    return FAMILY_OF[model_type]


def _activation(name: str, family: Family, values: Values) -> Activation:
    """Returns the activation of a model."""
    if family.act is None:
        return family.activation
    act = family.act.read(values) or family.act.default
    if act not in ACTIVATIONS:
        raise Unsupported(f"{name}: {family.act.name}={act!r}; moax supports {', '.join(map(repr, ACTIVATIONS))}")
    return ACTIVATIONS[act]


def _router(name: str, family: Family, values: Values, top_k: int) -> RouterConfig:
    """Returns the router of a model."""
    normalize = family.normalize
    if isinstance(normalize, Key):
        normalize = bool(normalize.read(values))
    num_groups, top_groups = (key.read(values) or 1 for key in family.groups) if family.groups else (1, 1)
    method = values.get("topk_method", "greedy")
    if family.group_method and method not in ("greedy", family.group_method):
        raise Unsupported(f"{name}: topk_method={method!r}; moax supports 'greedy' and {family.group_method!r}")
    if num_groups == 1 or (family.group_method and method == "greedy"):
        num_groups = top_groups = 1
    scale = 1.0 if family.scale is None else float(family.scale.read(values) or 1.0)
    order, group_score = family.order, family.group_score if num_groups > 1 else "top2"
    plain = family.score == "softmax" and num_groups == 1 and not family.bias
    if plain and normalize:  # The softmax over all logits, divided by the sum of its K largest values.
        order, normalize = "topk_then_score", False
    if normalize and top_k == 1:
        raise Unsupported(
            f"{name}: norm_topk_prob with num_experts_per_tok=1 makes every weight 1: the router cannot learn"
        )
    return RouterConfig(
        score=family.score,
        order=order,
        normalize=normalize,
        num_groups=num_groups,
        top_groups=top_groups,
        group_score=group_score,
        scale=scale,
        bias=family.bias,
        logits_bias=family.logits_bias,
        expert_scale=family.expert_scale,
    )


def _canonical(config: MoEConfig) -> MoEConfig:
    """Returns one config for all configs of the same function, with the defaults of fields unknown to config.json."""
    router = dataclasses.replace(config.router, aux_loss=0.0, z_loss=0.0)
    if router.num_groups == 1:
        router = dataclasses.replace(router, group_score="top2")
    if router.score == "softmax" and router.num_groups == 1 and not router.bias:
        best = router.order == "topk_then_score" or (router.normalize and config.top_k > 1)
        router = dataclasses.replace(router, normalize=False, order="topk_then_score" if best else "score_then_topk")
    limit, at = config.activation_limit, "input" if config.weights_at == "input" else "output"
    if config.activation == "swiglu_oai" and limit == SWIGLU_OAI_LIMIT:
        limit = None
    return dataclasses.replace(config, router=router, capacity_factor=None, weights_at=at, activation_limit=limit)


def _differences(given, made, owner: str = "") -> list[str]:
    """Returns the fields of `given` that differ from those of `made`, as "router.scale=2.0"."""
    names = [f.name for f in dataclasses.fields(given) if f.name != "router"]
    return [f"{owner}{n}={getattr(given, n)!r}" for n in names if getattr(given, n) != getattr(made, n)]


__all__ = ["MODEL_TYPES", "config_from_hf", "config_to_hf", "moe_layers", "types_of"]
