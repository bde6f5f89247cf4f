"""Values of config.json by key strings, and the rules by which config.json says which layers are MoE layers.

A key string has a name, further names that are read where the first one is missing, and the default of transformers in
JSON: "n_group|num_expert_group=1". A value without a default must exist. A dot enters a dict: "ffn_config.moe_top_k".
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

from moax.errors import Unsupported

Values = Mapping[str, Any]
Rule = Callable[[Values, int], tuple[int, ...]]  # (values of config.json, number of layers) -> indices of MoE layers


@functools.cache
def parse_key(key: str) -> tuple[tuple[str, ...], Any]:
    """Returns the names and the default of a key string; the first name is written."""
    names, _, default = key.partition("=")
    return tuple(names.split("|")), json.loads(default) if default else None


def read_key(values: Values, key: str, default: Any = None) -> Any:
    """Returns the first value that is not null; the default where no name exists, None where all values are null."""
    names, own = parse_key(key)
    found = []
    for name in names:
        *path, last = name.split(".")
        inner = functools.reduce(lambda inner, part: inner.get(part) or {}, path, values)
        found += [inner[last]] if last in inner else []
    if not found:
        return default if own is None else own
    return next((value for value in found if value is not None), None)


def read_size(values: Values, key: str) -> int:
    """Returns a size, which may be a list of one equal size for each layer."""
    (names, default), value = parse_key(key), read_key(values, key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"config of model_type={values.get('model_type')!r} has no {' or '.join(names)}")
    if not isinstance(value, list | tuple):
        return value
    if len(set(value)) != 1:
        raise Unsupported(f"{names[0]}={value!r} differs from layer to layer; moax.hf reads one size for all")
    return value[0]


def write_key(values: MutableMapping[str, Any], key: str, value: Any) -> None:
    """Sets the value under the first name of a key string."""
    *path, last = parse_key(key)[0][0].split(".")
    for part in path:
        values = values.setdefault(part, {})
    values[last] = value


def all_layers(values: Values, layers: int) -> tuple[int, ...]:
    """Returns the layers of `mlp_layer_types`; all layers without such a list."""
    listed = _listed(values, ("sparse", "moe"))
    return tuple(range(layers)) if listed is None else listed


def after_dense(dense: str | int, kinds: Sequence[str] = ("sparse", "moe")) -> Rule:
    """Returns the rule that the first `dense` layers (a number or a key) are dense, unless the config has a list."""

    def rule(values: Values, layers: int) -> tuple[int, ...]:
        listed = _listed(values, kinds)
        if listed is not None:
            return listed
        first, step = read_key(values, dense) if isinstance(dense, str) else dense, values.get("moe_layer_freq", 1)
        if isinstance(step, list | tuple):
            return tuple(i for i in range(layers) if step[i])
        return tuple(i for i in range(layers) if i >= (first or 0) and i % (step or 1) == 0)

    return rule


def by_step(dense: Sequence[int] = ()) -> Rule:
    """Returns the rule of Qwen: every `decoder_sparse_step`-th layer, without `mlp_only_layers` (default: `dense`)."""

    def rule(values: Values, layers: int) -> tuple[int, ...]:
        without, step = values.get("mlp_only_layers"), values.get("decoder_sparse_step", 1)
        without = dense if without is None else without
        return tuple(i for i in range(layers) if i not in without and (i + 1) % step == 0)

    return rule


def by_period(values: Values, layers: int) -> tuple[int, ...]:
    """Returns the layers i with i % expert_layer_period == expert_layer_offset (Jamba)."""
    period, offset = values.get("expert_layer_period", 2), values.get("expert_layer_offset", 1)
    return tuple(i for i in range(layers) if i % period == offset)


def between(values: Values, layers: int) -> tuple[int, ...]:
    """Returns every `moe_layer_interval`-th layer from `moe_layer_start_index` to `moe_layer_end_index` (ERNIE)."""
    first, last = values.get("moe_layer_start_index", 1), values.get("moe_layer_end_index", -1)
    step, last = values.get("moe_layer_interval", 1), layers - 1 if last == -1 else last
    return tuple(i for i in range(layers) if (i + 1) % step == 0 and first <= i <= last)


def interleaved(values: Values, layers: int) -> tuple[int, ...]:
    """Returns `moe_layers`, or every `interleave_moe_layer_step`-th layer (Llama 4)."""
    listed, step = values.get("moe_layers"), values.get("interleave_moe_layer_step", 1)
    return tuple(range(step - 1, layers, step) if listed is None else listed)


def by_pattern(values: Values, layers: int) -> tuple[int, ...]:
    """Returns the layers that `hybrid_override_pattern` marks by E, or `layers_block_type` by "moe" (Nemotron-H)."""
    pattern = values.get("hybrid_override_pattern")
    kinds = values.get("layers_block_type") or values.get("layer_types") or ()
    marks = [mark == "E" for mark in pattern] if pattern else [kind == "moe" for kind in kinds]
    return tuple(i for i, moe in enumerate(marks) if moe)


def _listed(values: Values, kinds: Sequence[str]) -> tuple[int, ...] | None:
    """Returns the layers that a list of the config names as MoE layers; None without a list."""
    named, types = values.get("moe_layers_enum"), values.get("mlp_layer_types")
    if named is not None:
        return tuple(int(i) for i in (named.split(",") if isinstance(named, str) else named))
    return None if types is None else tuple(i for i, kind in enumerate(types) if kind in kinds)
