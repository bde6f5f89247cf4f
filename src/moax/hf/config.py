"""config.json of a published model <-> MoEConfig of its MoE layers, by the table of `moax.hf.families`."""

from __future__ import annotations

import dataclasses
import math
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moax.activations import SWIGLU_OAI_LIMIT, Activation
from moax.checks import Unsupported, check_value
from moax.config import MoEConfig, RouterConfig
from moax.hf.families import FAMILIES, family_of
from moax.hf.family import Family
from moax.hf.headers import name_source, read_json
from moax.hf.keys import LAYER_LIST, NUM_LAYERS, Values, check_values, parse_key, read_key, read_size

ACTIVATIONS: dict[str, Activation] = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu"}
# the part of a multimodal config.json that describes its language model
NESTED = ("thinker_config", "text_config")
# keys that describe quantized tensors
QUANTIZATION = {"quantization_config", "compression_config", "expert_dtype"}
ABSENT = object()


def load_config(source: Values | str | Path) -> Values:
    """Returns all values of a config.json (a dict, file or folder)."""
    if isinstance(source, Mapping):
        return source
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ValueError(f"config {str(path)!r} is no file; give a config.json, its folder, or its values")
    return read_json(path)


def read_config(source: Values | str | Path) -> Values:
    """Returns the values of a config.json (a dict, file or folder); of a multimodal one, those of its text model."""
    source = load_config(source)
    for part in NESTED:
        inner = source.get(part)
        if isinstance(inner, Mapping):
            source = {"model_type": source.get("model_type"), **inner}
        elif inner is not None:
            raise ValueError(f"config.json has {part}={reprlib.repr(inner)}; it must be an object")
    return source


def read_family(source: Values | str | Path) -> tuple[Values, str]:
    """Returns the values of `read_config`, each of the type and range of its key, and the name of the family."""
    values = read_config(source)
    family = family_of(values.get("model_type"))
    check_values(values, FAMILIES[family])
    return values, family


@name_source
def read_model_type(source: Path) -> str:
    """Returns the model type of a config.json, which must be one of MODEL_TYPES."""
    values = read_config(source)
    family_of(values.get("model_type"))
    return values["model_type"]


@name_source
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
      ValueError: the file holds no JSON object, a value has another type or range than its key may have, a size is
        missing, or the sizes make no MoEConfig.
    """
    values, name = read_family(source)
    family = FAMILIES[name]
    shared_d_ff = 0
    if family.shared:
        shared_d_ff = math.prod(read_key(values, key) or 0 for key in family.shared)
    fixed = family.fixed | family.shared_fixed if shared_d_ff else family.fixed
    for key, supported in fixed.items():
        value = read_key(values, key, supported)
        if value != supported:
            raise Unsupported(f"{name}: {parse_key(key)[0][0]}={value!r}; moax supports {supported!r} alone")
    d_model = read_size(values, family.d_model)
    d_ff = read_size(values, family.d_ff)
    num_experts = read_size(values, family.experts)
    top_k = read_size(values, family.top_k)
    activation = family.activation
    if family.act:
        act = read_key(values, family.act) or parse_key(family.act)[1]
        if act not in ACTIVATIONS:
            known = ", ".join(map(repr, ACTIVATIONS))
            raise Unsupported(f"{name}: {parse_key(family.act)[0][0]}={act!r}; moax supports {known}")
        activation = ACTIVATIONS[act]
    config = MoEConfig(
        d_model,
        d_ff,
        num_experts,
        top_k,
        activation=activation,
        activation_limit=read_key(values, family.limit),
        use_bias=family.use_bias,
        router=_router(name, family, values, top_k),
        shared_d_ff=shared_d_ff,
        shared_gate=family.shared_gate and shared_d_ff > 0,
        weights_at=family.weights_at,
        d_latent=read_key(values, family.latent),
    )
    return _canonical(config)


def _router(name: str, family: Family, values: Values, top_k: int) -> RouterConfig:
    normalize = family.router.normalize
    if family.normalize:
        normalize = bool(read_key(values, family.normalize))
    num_groups = 1
    top_groups = 1
    if family.groups:
        num_groups, top_groups = (read_key(values, key) or 1 for key in family.groups)
    method = values.get("topk_method", "greedy")
    if family.group_method and method not in ("greedy", family.group_method):
        raise Unsupported(f"{name}: topk_method={method!r}; moax supports 'greedy' and {family.group_method!r}")
    if num_groups == 1 or (family.group_method and method == "greedy"):
        num_groups = 1
        top_groups = 1
    router = dataclasses.replace(
        family.router,
        normalize=normalize,
        num_groups=num_groups,
        top_groups=top_groups,
        scale=float(read_key(values, family.scale) or 1.0),
    )
    if normalize and top_k == 1:
        raise Unsupported(f"{name}: norm_topk_prob with num_experts_per_tok=1 makes every weight 1: it cannot learn")
    # The weights are the softmax over all logits, divided by the sum of its K largest.
    if _is_plain(router) and normalize:
        return dataclasses.replace(router, order="topk_then_score", normalize=False)
    return router


def config_to_hf(config: MoEConfig, model_type: str) -> dict[str, Any]:
    """Returns the values of config.json that `config` decides; balance losses are left out.

    Args:
      config: see `MoEConfig`.
      model_type: one of `MODEL_TYPES`.

    Raises:
      Unsupported: no model of this type has this config; the message names the fields that differ.
    """
    check_value("config", config, MoEConfig)
    values: dict[str, Any] = {"model_type": model_type}
    for key, value in _written_keys(config, FAMILIES[family_of(model_type)]).items():
        _write_key(values, key, value)
    differ = _differences(config, values)
    if differ:
        raise Unsupported(f"model_type={model_type!r} has no {'; no '.join(differ)}")
    return values


def change_config(base: Values, config: MoEConfig, model_type: str) -> dict[str, Any]:
    """Returns the values `base` of a whole model's config.json, changed where they do not describe `config`.

    The model has no quantized tensors. A multimodal model has the values of its MoE layers in its text model.

    Raises:
      Unsupported: no model of this type has this config.
      ValueError: the changed values describe another config still.
    """
    config_to_hf(config, model_type)  # It raises where no model of this type has the config.
    values: dict[str, Any] = {"model_type": model_type} | _unquantized(base)
    if _describes(values, config):
        return values
    text = values
    for part in NESTED:
        if isinstance(text.get(part), dict):
            text = text[part]
    for key, value in _written_keys(config, FAMILIES[family_of(model_type)]).items():
        _write_key(text, key, value)
    if not _describes(values, config):
        differ = "; ".join(_differences(config, values))
        raise ValueError(f"hf_config of model_type={model_type!r} describes another model than config: {differ}")
    return values


def _unquantized(values: Values) -> dict[str, Any]:
    """Returns a copy of config.json without the keys of quantized tensors, at any depth."""
    copy = {}
    for key, value in values.items():
        if key not in QUANTIZATION:
            copy[key] = _unquantized(value) if isinstance(value, Mapping) else value
    return copy


def _describes(values: Values, config: MoEConfig) -> bool:
    """Whether config.json has this config; values that make no config have none."""
    try:
        return not _differences(config, values)
    except (Unsupported, ValueError):
        return False


def _written_keys(config: MoEConfig, family: Family) -> dict[str, Any]:
    """Returns the value of each key string of a family."""
    router = config.router
    written: dict[str | None, Any] = {**family.fixed}
    if family.shared:
        width, *count = family.shared
        written |= dict.fromkeys(count, 1)
        counts_experts = count and parse_key(width)[0][0] == parse_key(family.d_ff)[0][0]
        if counts_experts and config.shared_d_ff % config.d_ff == 0:
            written[count[0]] = config.shared_d_ff // config.d_ff
        written[width] = config.shared_d_ff
    names = {activation: name for name, activation in reversed(ACTIVATIONS.items())}
    normalize = router.normalize
    if _is_plain(router):
        normalize = _canonical(config).router.order == "topk_then_score"
    written |= {
        **family.shared_fixed,
        family.d_model: config.d_model,
        family.d_ff: config.d_ff,
        family.experts: config.num_experts,
        family.top_k: config.top_k,
        family.normalize: normalize,
        family.act: names.get(config.activation, "silu"),
        family.limit: config.activation_limit or SWIGLU_OAI_LIMIT,
        family.scale: router.scale,
        family.latent: config.d_latent,
    }
    written |= dict(zip(family.groups, (router.num_groups, router.top_groups), strict=False))
    if family.group_method:
        written["topk_method"] = family.group_method if router.num_groups > 1 else "greedy"
    return {key: value for key, value in written.items() if key is not None}


def _write_key(values: dict[str, Any], key: str, value: Any) -> None:
    """Writes a value under each name of a key string that is there, else under its first name."""
    names = parse_key(key)[0]
    present = [name for name in names if read_key(values, name, ABSENT) is not ABSENT]
    for name in present or names[:1]:
        *path, last = name.split(".")
        inner = values
        for part in path:
            if not isinstance(inner.get(part), dict):
                inner[part] = {}
            inner = inner[part]
        inner[last] = value


def _differences(config: MoEConfig, values: Values) -> list[str]:
    """Returns the fields of a config, with their values, that config.json does not have."""
    ours = _canonical(config)
    theirs = config_from_hf(values)
    differences = []
    for owner, our_part, their_part in (("", ours, theirs), ("router.", ours.router, theirs.router)):
        for field in dataclasses.fields(our_part):
            value = getattr(our_part, field.name)
            if field.name != "router" and value != getattr(their_part, field.name):
                differences.append(f"{owner}{field.name}={value!r}")
    return differences


def _is_plain(router: RouterConfig) -> bool:
    """Whether normalizing the weights gives the softmax of the K largest logits."""
    return router.score == "softmax" and not router.bias and router.num_groups == 1


def _canonical(config: MoEConfig) -> MoEConfig:
    """Returns one config for all configs of the same function, with the defaults of fields unknown to config.json."""
    router = dataclasses.replace(config.router, aux_loss=0.0, z_loss=0.0, sequence_aux_loss=0.0, histogram=False)
    if router.num_groups == 1:
        router = dataclasses.replace(router, group_score="top2")
    if _is_plain(router):
        best_first = router.order == "topk_then_score" or (router.normalize and config.top_k > 1)
        order = "topk_then_score" if best_first else "score_then_topk"
        router = dataclasses.replace(router, normalize=False, order=order)
    limit = config.activation_limit
    if config.activation == "swiglu_oai" and limit == SWIGLU_OAI_LIMIT:
        limit = None
    return dataclasses.replace(config, router=router, capacity_factor=None, activation_limit=limit)


@name_source
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
    values, family = read_family(source)
    rule = FAMILIES[family].layers
    listed = read_key(values, LAYER_LIST)
    marks = read_key(values, rule.marks)
    count = None
    if read_key(values, NUM_LAYERS) is not None:
        count = read_size(values, NUM_LAYERS)
    if listed is not None:
        indices = _parse_indices(listed) if isinstance(listed, str) else set(listed)
        return tuple(sorted(i for i in indices if count is None or i < count))
    if isinstance(marks, str | list | tuple):
        if count is not None and len(marks) < count:
            name = parse_key(rule.marks)[0][0]
            raise ValueError(f"config.json has {len(marks)} marks of layers ({name}) for {count} layers")
        marks = marks[:count]
        return tuple(i for i, mark in enumerate(marks) if mark in ("sparse", "moe", "E", 1))
    # A value that is null has the default.
    first_layer = read_key(values, rule.first) or 0
    step = read_key(values, rule.step) or 1
    dense = read_key(values, rule.dense) or []
    last_layer = read_key(values, rule.last)
    if last_layer is None:
        last_layer = -1
    offset = read_key(values, rule.offset)
    if offset is None:
        offset = -1
    layers = range(read_size(values, NUM_LAYERS))[first_layer : last_layer + 1 or None]
    return tuple(i for i in layers if i % step == offset % step and i not in dense)


def _parse_indices(text: str) -> set[int]:
    """Returns the indices of a string such as "4,5"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,9}", part) for part in parts):
        raise ValueError(f"config.json has {LAYER_LIST.partition('|')[0]}={reprlib.repr(text)}; it must be as '4,5'")
    return {int(part) for part in parts}
