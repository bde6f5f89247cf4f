"""`MoEBlock`: the block as a flax.linen module; `moax.moe` on variables that flax holds.

    block = MoEBlock(config)
    variables = block.init(key, x)
    y, stats = block.apply(variables, x)
    _, state = block.apply(variables, stats, method="update_router_bias", mutable="moax_state")

Made under `jax.set_mesh`, the variables are shards, in boxes that say so.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moax.block.layer import moe
from moax.config import MoEConfig
from moax.extras import missing
from moax.initialize import init
from moax.mesh.axes import Axes
from moax.mesh.partition import Engine
from moax.mesh.specs import mesh_sizes
from moax.ops.balance import update_router_bias
from moax.options import Options
from moax.params import MoEParams
from moax.recipe import Recipe
from moax.sharding import param_specs
from moax.types import MoEStats

try:
    from flax import linen as nn
except ModuleNotFoundError as error:
    raise missing(error) from error

STATE = "moax_state"
COLLECTIONS = {f.name: STATE if f.name == "router_bias" else "params" for f in dataclasses.fields(MoEParams)}


class MoEBlock(nn.Module):
    """y [..., H] = sum over a token's experts of weight * expert(x) + shared(x), of x [..., H].

    Variables are named as in `moax.MoEParams`: the selection bias `router_bias` in the collection `moax_state`, which
    no optimizer sees, the rest in `params`. `bi` and `bo` may each be there or not. `init(key, x)` makes the values of
    `moax.init(key, config)`; inside another module, those of the key that flax folds the module's path into.

    With a mesh in force (`jax.set_mesh`) each device makes its shards alone, boxed as `nn.Partitioned` by
    `moax.param_specs`, for `nn.get_partition_spec` and `nn.get_sharding`. Without a mesh nothing is boxed.

    Attributes:
      config: which parameters there are, and their sizes.
      recipe, axes, exchange, kernels, engine, chunks: see `moax.Options`.
      dtype: x is cast to it, and the block computes in it; None: in x.dtype.
      param_dtype: of all parameters, and of the bias.
    """

    config: MoEConfig
    recipe: str | Recipe | None = None
    axes: Axes = Axes()
    exchange: str = "auto"
    kernels: str = "auto"
    engine: Engine = "auto"
    chunks: int = 1
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Float[Array, "*batch H"]) -> tuple[Float[Array, "*batch H"], MoEStats]:
        """(y, stats) of `moax.moe`; y has `dtype`, or that of x."""
        if not self.has_variable("params", "router") and self.is_mutable_collection("params"):
            for name, value in self._make().items():
                if COLLECTIONS[name] == STATE:
                    self.variable(STATE, name, lambda value=value: value)
                else:
                    self.param(name, lambda _, value=value: value)
        found = {name: nn.unbox(self.get_variable(of, name)) for name, of in COLLECTIONS.items()}
        return moe(
            x if self.dtype is None else x.astype(self.dtype),
            MoEParams(**found),
            self.config,
            Options(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Options)}),
        )

    def update_router_bias(self, stats: MoEStats, rate: float = 1e-3) -> None:
        """router_bias += rate * sign(mean(tokens) - tokens), by `moax.update_router_bias`.

        Raises:
          ValueError: the config has no router bias.
        """
        if not self.config.router.bias:
            raise ValueError("update_router_bias: config.router.bias=False; it must be True for a bias to update")
        box = self.get_variable(STATE, "router_bias")
        bias = update_router_bias(nn.unbox(box), stats.tokens_per_expert, rate)
        self.put_variable(STATE, "router_bias", nn.meta.replace_boxed(box, bias))

    def _make(self) -> dict[str, Array | nn.Partitioned]:
        """The values, in boxes where there is a mesh. One key for all of them: `self.param` would give each its own."""
        key = cast(Any, self.scope).rngs["params"].as_jax_rng()
        values = init(key, self.config, dtype=self.param_dtype, axes=self.axes)
        specs = param_specs(self.config, self.axes) if mesh_sizes() else None
        made = {name: v for name in COLLECTIONS if (v := getattr(values, name)) is not None}
        return made if specs is None else {n: nn.Partitioned(v, tuple(getattr(specs, n))) for n, v in made.items()}
