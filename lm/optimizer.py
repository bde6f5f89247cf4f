"""The optimizer is AdamW with a clipped global norm and a warm-up-cosine schedule; only matrices decay."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from lm.config import TrainConfig
from lm.model import Params


def schedule(config: TrainConfig) -> optax.Schedule:
    """Returns the schedule step -> learning rate: linear from 0 over `warmup`, then a cosine to a tenth at `steps`."""
    warmup = min(config.warmup, max(1, config.steps // 2))
    return optax.warmup_cosine_decay_schedule(0.0, config.lr, warmup, max(config.steps, warmup + 1), config.lr / 10)


def optimizer(config: TrainConfig) -> Any:
    """Returns the `optax.GradientTransformation` of `Params`; its type is Any, as optax's types admit no dataclass."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(schedule(config), b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=_decays),
    )


def state_specs(tx: Any, params: Params, specs: Params) -> PyTree:
    """Returns the specs of `tx.init(params)`: a moment has the spec of its parameter, and counts are replicated."""
    state, replicated = jax.eval_shape(tx.init, params), PartitionSpec()
    own = optax.tree_utils.tree_map_params
    return own(tx, lambda _, spec: spec, state, specs, transform_non_params=lambda _: replicated)


def _decays(params: Params) -> PyTree:
    """Returns a tree that is True for matrices; the vectors (biases, gains) have two dims in a stack of layers."""
    names = ("norm", "bi", "bo", "logits_bias")
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not str(getattr(path[-1], "name", "")).startswith(names), params
    )
