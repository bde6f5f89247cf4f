"""config.json of a published model <-> MoEConfig of its MoE layers, by the table of `moax.hf.families`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moax.config import SWIGLU_OAI_LIMIT, Activation, MoEConfig, RouterConfig
from moax.errors import Unsupported
from moax.hf.config_keys import Values, after_dense, parse_key, read_key, read_size, write_key
from moax.hf.families import FAMILIES, Family, family_of

ACTIVATIONS: dict[str, Activation] = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu"}
NESTED = ("thinker_config", "text_config")  # the part of a multimodal config.json that describes its language model


def read_config(source: Values | str | Path) -> Values:
    """Returns the values of a config.json (a dict, file or folder); of a multimodal one, those of its text model."""
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
    """Returns the MoEConfig of the MoE layers of a published model, as transformers 5.23 computes them.

    Args:
      source: the values of config.json, or the path of that file or of its folder. A missing option has the default of
        transformers. The language model of a multimodal config is its `text_config`.

    Returns:
      MoEConfig. Its balance losses are 0, because transformers computes one loss over all layers at once. Set
      `router.aux_loss` yourself to train with a loss of each layer.

    Raises:
      Unsupported: the `model_type` is not in `MODEL_TYPES`, or moax does not have an option of the model.
      ValueError: a size is missing, or the sizes make no MoEConfig.
    """
    values = read_config(source)
    name = family_of(values.get("model_type"))
    family = FAMILIES[name]
    _check_fixed(name, family.fixed, values)
    d_ff, top_k = read_size(values, family.d_ff), read_size(values, family.top_k)
    shared = 1 if family.shared else 0
    for key in family.shared_keys:
        shared *= read_key(values, key) or 0
    if shared:
        _check_fixed(name, family.shared_fixed, values)
    activation = _activation(name, family, values)
    limit = read_key(values, family.limit) if family.limit else None
    limit = None if activation == "swiglu_oai" and limit == SWIGLU_OAI_LIMIT else limit
    return MoEConfig(
        d_model=read_size(values, family.d_model), d_ff=d_ff, num_experts=read_size(values, family.experts),
        top_k=top_k, activation=activation, activation_limit=limit, use_bias=family.use_bias,
        router=_router(name, family, values, top_k), shared_d_ff=shared,
        shared_gate=family.shared_gate and shared > 0, weights_at=family.weights_at,
        d_latent=read_key(values, family.latent) if family.latent else None,
    )  # fmt: skip


def config_to_hf(config: MoEConfig, model_type: str) -> dict[str, Any]:
    """Returns the values of config.json that `config` decides; balance losses are left out.

    Args:
      config: see `MoEConfig`.
      model_type: one of `MODEL_TYPES`.

    Raises:
      Unsupported: no model of this type has this config; the message names the fields that differ.
    """
    family, router = FAMILIES[family_of(model_type)], config.router
    values: dict[str, Any] = {"model_type": model_type}
    written: dict[str | None, Any] = {**family.fixed}
    if family.shared:
        width, *count = family.shared_keys
        written |= dict.fromkeys(count, 1)
        if count and parse_key(width)[0][0] == parse_key(family.d_ff)[0][0] and config.shared_d_ff % config.d_ff == 0:
            written[count[0]] = config.shared_d_ff // config.d_ff
        written[width] = config.shared_d_ff
    written |= {**family.shared_fixed, family.d_model: config.d_model, family.d_ff: config.d_ff}
    written |= {family.experts: config.num_experts, family.top_k: config.top_k}
    names = {activation: name for name, activation in reversed(ACTIVATIONS.items())}
    written[family.act] = names.get(config.activation, "silu")
    written[family.limit] = config.activation_limit or SWIGLU_OAI_LIMIT
    if isinstance(family.normalize, str):
        plain = family.score == "softmax" and not family.bias and router.num_groups == 1
        best = _canonical(config).router.order == "topk_then_score"
        written[family.normalize] = best if plain else router.normalize
    written |= dict(zip(family.groups, (router.num_groups, router.top_groups), strict=False))
    if family.group_method:
        written["topk_method"] = family.group_method if router.num_groups > 1 else "greedy"
    written |= {family.scale: router.scale, family.latent: config.d_latent}
    for key, value in written.items():
        if key is not None:
            write_key(values, key, value)
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
    rule = family.layers if callable(family.layers) else after_dense(family.layers)
    return rule(values, read_size(values, family.num_layers))


def _check_fixed(name: str, fixed: Values, values: Values) -> None:
    """Raises Unsupported where a key has another value than the one that moax supports."""
    for key, only in fixed.items():
        value = read_key(values, key, only)
        if value != only:
            raise Unsupported(f"{name}: {parse_key(key)[0][0]}={value!r}; moax supports {only!r} alone")


def _activation(name: str, family: Family, values: Values) -> Activation:
    if family.act is None:
        return family.activation
    (key, *_), default = parse_key(family.act)
    act = read_key(values, family.act) or default
    if act not in ACTIVATIONS:
        raise Unsupported(f"{name}: {key}={act!r}; moax supports {', '.join(map(repr, ACTIVATIONS))}")
    return ACTIVATIONS[act]


def _router(name: str, family: Family, values: Values, top_k: int) -> RouterConfig:
    normalize = family.normalize
    if isinstance(normalize, str):
        normalize = bool(read_key(values, normalize))
    num_groups, top_groups = (read_key(values, key) or 1 for key in family.groups) if family.groups else (1, 1)
    method = values.get("topk_method", "greedy")
    if family.group_method and method not in ("greedy", family.group_method):
        raise Unsupported(f"{name}: topk_method={method!r}; moax supports 'greedy' and {family.group_method!r}")
    if num_groups == 1 or (family.group_method and method == "greedy"):
        num_groups = top_groups = 1
    order = family.order
    if family.score == "softmax" and num_groups == 1 and not family.bias and normalize:
        order, normalize = "topk_then_score", False  # the softmax over all logits, divided by the sum of its K largest
    if normalize and top_k == 1:
        raise Unsupported(
            f"{name}: norm_topk_prob with num_experts_per_tok=1 makes every weight 1: the router cannot learn"
        )
    return RouterConfig(
        score=family.score, order=order, normalize=normalize, num_groups=num_groups, top_groups=top_groups,
        group_score=family.group_score if num_groups > 1 else "top2",
        scale=float(read_key(values, family.scale) or 1.0) if family.scale else 1.0,
        bias=family.bias, logits_bias=family.logits_bias, expert_scale=family.expert_scale,
    )  # fmt: skip


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
