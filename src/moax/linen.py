"""`MoEBlock` is the block as a flax.linen module: it calls `moax.moe` on variables that flax holds.

    block = MoEBlock(config)
    variables = block.init(key, x)
    y, stats = block.apply(variables, x)
    _, state = block.apply(variables, stats, method="update_router_bias", mutable="moax_state")

Under `jax.set_mesh` the variables are shards, boxed as `nn.Partitioned` with their specs.
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
    """y[t] = sum_k weights[t, k] expert[experts[t, k]](x[t]) + shared(x[t]), for x [..., H].

    Variables have the names of the fields of `moax.MoEParams`. The selection bias `router_bias` is in the collection
    `moax_state`, which no optimizer sees, and the other variables are in `params`. Either of `bi` and `bo` may be
    missing. `init(key, x)` makes the values of `moax.init(key, config)`. Inside another module, flax folds the path of
    the module into the key.

    With a mesh in force (`jax.set_mesh`) each device makes its shards alone. A variable is then an `nn.Partitioned` box
    with its entry of `moax.param_specs`, for `nn.get_partition_spec` and `nn.get_sharding`. Without a mesh there are no
    boxes.

    Attributes:
      config: the sizes of the block and its equations.
      recipe, axes, exchange, kernels, engine, chunks: see `moax.Options`.
      dtype: x is cast to this dtype, and the block computes in it. None computes in x.dtype.
      param_dtype: the dtype of all parameters and of the selection bias.
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
        """Returns (y, stats) of `moax.moe` on x [..., H]; y is in `dtype`, or in x.dtype where `dtype` is None."""
        if not self.has_variable("params", "router") and self.is_mutable_collection("params"):
            for name, value in self._make().items():
                if COLLECTIONS[name] == STATE:
                    self.variable(STATE, name, lambda value=value: value)
                else:
                    self.param(name, lambda _, value=value: value)
        arrays = {name: nn.unbox(self.get_variable(collection, name)) for name, collection in COLLECTIONS.items()}
        return moe(
            x if self.dtype is None else x.astype(self.dtype),
            MoEParams(**arrays),
            self.config,
            Options(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Options)}),
        )

    def update_router_bias(self, stats: MoEStats, rate: float = 1e-3) -> None:
        """Adds rate * sign(mean(tokens) - tokens) to router_bias, by `moax.update_router_bias`.

        Args:
          stats: the stats of the step; `stats.tokens_per_expert` counts over the whole mesh.
          rate: the step of the bias, in units of the score.

        Raises:
          ValueError: the config has no router bias.
        """
        if not self.config.router.bias:
            raise ValueError("update_router_bias: config.router.bias=False; it must be True for a bias to update")
        box = self.get_variable(STATE, "router_bias")
        bias = update_router_bias(nn.unbox(box), stats.tokens_per_expert, rate)
        self.put_variable(STATE, "router_bias", nn.meta.replace_boxed(box, bias))

    def _make(self) -> dict[str, Array | nn.Partitioned]:
        """Returns the values of all variables, in boxes where there is a mesh.

        One key makes all of them, as in `moax.init`; `self.param` would give each variable a key of its own.
        """
        key = cast(Any, self.scope).rngs["params"].as_jax_rng()
        values = init(key, self.config, dtype=self.param_dtype, axes=self.axes)
        specs = param_specs(self.config, self.axes) if mesh_sizes() else None
        made = {name: v for name in COLLECTIONS if (v := getattr(values, name)) is not None}
        return made if specs is None else {n: nn.Partitioned(v, tuple(getattr(specs, n))) for n, v in made.items()}
