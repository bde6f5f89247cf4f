"""`MoEParams` holds the parameters of a block; this file also has their shapes and checks them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

import jax.numpy as jnp
from jaxtyping import Array

from moax.config import MoEConfig
from moax.types import pytree


@pytree()
class MoEParams[Leaf]:
    """The parameters of one block. A field is None where the config has no such parameter.

    Attributes:
      router: [H, E], replicated over the mesh.
      wi: [E, H, 2, F]. `wi[:, :, 0]` is the gate and `wi[:, :, 1]` the up projection. Without a gate [E, H, 1, F].
      wo: [E, F, H], the down projection.
      router_bias: [E], added to the scores for selection alone; it has no gradient.
      logits_bias: [E], a trained bias of the logits.
      bi: [E, 2, F], or [E, 1, F] without a gate: the bias of wi. Either of bi and bo may be given alone.
      bo: [E, H], the bias of wo.
      shared_wi: [H, 2, S], or [H, 1, S] without a gate: the first weight of the shared expert of width S.
      shared_wo: [S, H], the second weight of the shared expert.
    """

    router: Leaf
    wi: Leaf
    wo: Leaf
    router_bias: Leaf | None = None
    logits_bias: Leaf | None = None
    bi: Leaf | None = None
    bo: Leaf | None = None
    shared_wi: Leaf | None = None
    shared_wo: Leaf | None = None


def params_by_name[Leaf](values: Mapping[str, Leaf | None]) -> MoEParams[Leaf]:
    """Returns the MoEParams whose fields have these names and values."""
    return MoEParams(**cast(Mapping[str, Any], values))


def param_shapes(config: MoEConfig) -> MoEParams[tuple[int, ...]]:
    """Returns the global shape of each parameter that `init` makes; None where the config has no such parameter."""
    c, e, h, f, s = config, config.num_experts, config.d_model, config.d_ff, config.shared_d_ff
    return MoEParams(
        router=(h, e),
        wi=(e, h, c.gates, f),
        wo=(e, f, h),
        router_bias=(e,) if c.router.bias else None,
        logits_bias=(e,) if c.router.logits_bias else None,
        bi=(e, c.gates, f) if c.use_bias else None,
        bo=(e, h) if c.use_bias else None,
        shared_wi=(h, c.gates, s) if s else None,
        shared_wo=(s, h) if s else None,
    )


def full_shapes(config: MoEConfig) -> MoEParams[tuple[int, ...]]:
    """Returns `param_shapes` with the shapes of both expert biases, even where `init` makes none."""
    return param_shapes(dataclasses.replace(config, use_bias=True))


def check_params(params: MoEParams[Array], config: MoEConfig, *, local: bool = False) -> None:
    """Checks that the config allows each parameter.

    Args:
      params: the parameters.
      config: the sizes of the block.
      local: whether the parameters are shards inside a `shard_map`; a size may then be any divisor of the whole size.

    Raises:
      ValueError: the config does not allow the presence, the shape or the dtype of a parameter. The message names it.
    """
    if not isinstance(params, MoEParams):
        raise ValueError(f"params is a {type(params).__name__}; it must be a moax.MoEParams")
    made, allowed = param_shapes(config), full_shapes(config)
    for field in dataclasses.fields(MoEParams):
        name, value = field.name, getattr(params, field.name)
        want, may = getattr(made, name), getattr(allowed, name)
        if value is None:
            if want is not None and name not in ("bi", "bo"):
                raise ValueError(f"params.{name} is None; this config needs an array of shape {want}")
            continue
        if may is None:
            raise ValueError(f"params.{name} is given, but the config has no such parameter; pass None")
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise ValueError(f"params.{name} has dtype {value.dtype}; it must be floating point")
        shape = tuple(value.shape)
        fits = len(shape) == len(may) and all(
            n == m or (local and n > 0 and m % n == 0) for n, m in zip(shape, may, strict=True)
        )
        if not fits:
            raise ValueError(f"params.{name} has shape {shape}; this config needs {may}")
