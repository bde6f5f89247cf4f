"""The optimizer is AdamW with a clipped global norm and a warm-up-cosine schedule; only matrices decay."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jaxtyping import PyTree

from moax.mesh.specs import spec
from moax.train.model import Params
from moax.train.presets import TrainConfig


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
    """Returns the PartitionSpecs of `tx.init(params)`.

    Args:
      tx: the optimizer.
      params: the parameters, or their ShapeDtypeStructs.
      specs: the PartitionSpecs of the parameters.

    Returns:
      The state as a tree of specs: each moment has the spec of its parameter, and counts lie on every device.
    """
    state = jax.eval_shape(tx.init, params)
    return optax.tree_utils.tree_map_params(tx, lambda _, own: own, state, specs, transform_non_params=lambda _: spec())


def _decays(params: Params) -> PyTree:
    """Returns a tree that is True for matrices; the vectors (biases, gains) have two dims in a stack of layers."""
    names = ("norm", "bi", "bo", "logits_bias")
    return jax.tree_util.tree_map_with_path(
        lambda path, _: not str(getattr(path[-1], "name", "")).startswith(names), params
    )
