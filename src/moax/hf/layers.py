"""Rules by which config.json says which layers are MoE layers. Each one takes the values and the number of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from moax.hf.keys import Values

Rule = Callable[[Values, int], tuple[int, ...]]
SPARSE = ("sparse", "moe")


def all_layers(values: Values, layers: int) -> tuple[int, ...]:
    """Returns the layers of `mlp_layer_types`; all where the config has no such list."""
    listed = _listed(values)
    return tuple(range(layers)) if listed is None else listed


def after_dense(key: str | None, default: int, kind: Sequence[str] = SPARSE) -> Rule:
    """Returns the rule that the first layers are dense, unless a list of the config says something else.

    Args:
      key: the key of the number of dense layers; None where the family has no such key.
      default: the number of dense layers where the config does not say it.
      kind: the values of `mlp_layer_types` that mean an MoE layer with a router.
    """

    def rule(values: Values, layers: int) -> tuple[int, ...]:
        listed = _listed(values, (kind,) if isinstance(kind, str) else kind)
        if listed is not None:
            return listed
        dense, step = values.get(key, default) if key else default, values.get("moe_layer_freq", 1)
        if isinstance(step, list | tuple):
            return tuple(i for i in range(layers) if step[i])
        return tuple(i for i in range(layers) if i >= (dense or 0) and i % (step or 1) == 0)

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


def _listed(values: Values, kinds: Sequence[str] = SPARSE) -> tuple[int, ...] | None:
    """Returns the layers that a list of the config names as MoE layers; None where there is no list."""
    named = values.get("moe_layers_enum")
    if named is not None:
        return tuple(int(i) for i in (named.split(",") if isinstance(named, str) else named))
    types = values.get("mlp_layer_types")
    return None if types is None else tuple(i for i, kind in enumerate(types) if kind in kinds)
