"""`MoE` is the block as a flax.nnx module: it holds the parameters and calls `moax.moe`.

    layer = MoE(config, rngs=nnx.Rngs(0))
    y, stats = layer(x)
    layer.update_router_bias(stats)  # once a step, after the optimizer, where config.router.bias

Under `jax.set_mesh` the layer makes and holds shards, and the metadata of its variables names their specs.
"""

from __future__ import annotations

import dataclasses
from typing import Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moax.block.layer import moe
from moax.config import MoEConfig
from moax.extras import missing
from moax.initialize import init
from moax.mesh.specs import mesh_sizes
from moax.ops.balance import update_router_bias
from moax.options import OptionKeywords, Options
from moax.params import MoEParams, params_by_name
from moax.sharding import param_specs
from moax.types import MoEStats

try:
    from flax import nnx
except ModuleNotFoundError as error:
    raise missing(error) from error

NAMES = tuple(field.name for field in dataclasses.fields(MoEParams))


class RouterBias(nnx.Variable):
    """The selection bias [E].

    It is state and no `nnx.Param`, so that no optimizer and no gradient of parameters sees it.
    """


class MoE(nnx.Module):
    """y[t] = sum_k weights[t, k] expert[experts[t, k]](x[t]) + shared(x[t]), for x [..., H].

    Attributes:
      router, wi, wo, logits_bias, bi, bo, shared_wi, shared_wo: each an `nnx.Param` with the shape of the same field of
        `moax.MoEParams`, or None where the config has no such parameter. A user may set or delete `bi` and `bo`
        afterwards.
      router_bias: a `RouterBias`, or None where the config has none.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        options: Options = Options(),
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
        **keywords: Unpack[OptionKeywords],
    ):
        """Makes the parameters `moax.init(rngs.params(), config)`.

        With a mesh in force (`jax.set_mesh`) each device makes its shards alone, and `out_sharding` of each variable
        is its entry of `moax.param_specs`, for `nnx.get_partition_spec` and `nnx.get_named_sharding`.

        Args:
          config: the sizes of the block and its equations.
          options: how the block runs; see `moax.Options`.
          dtype: x is cast to this dtype, and the block computes in it. None computes in x.dtype.
          param_dtype: the dtype of all parameters and of the selection bias.
          rngs: the stream `params` gives one key.
          **keywords: fields of `moax.Options` (recipe, axes, exchange, kernels, engine, chunks) that replace those of
            `options`.

        Raises:
          ValueError: an option has a value that it cannot have, or the mesh axes of a dim do not divide its size.
        """
        self.config, self.options = config, dataclasses.replace(options, **keywords)
        self.dtype, self.param_dtype = dtype, param_dtype

        values = init(rngs.params(), config, dtype=param_dtype, axes=self.options.axes)
        specs = param_specs(config, self.options.axes) if mesh_sizes() else None
        for name in NAMES:
            value, kind = getattr(values, name), RouterBias if name == "router_bias" else nnx.Param
            metadata = {} if specs is None else {"out_sharding": getattr(specs, name)}
            setattr(self, name, nnx.data(None) if value is None else kind(value, **metadata))

    @property
    def params(self) -> MoEParams[Array]:
        """The arrays of the parameters, as `moax.moe` takes them."""
        variables = {name: getattr(self, name) for name in NAMES}
        return params_by_name({name: None if v is None else v.get_value() for name, v in variables.items()})

    def __call__(self, x: Float[Array, "*batch H"]) -> tuple[Float[Array, "*batch H"], MoEStats]:
        """Returns (y, stats) of `moax.moe` on x [..., H]; y is in `dtype`, or in x.dtype where `dtype` is None."""
        return moe(
            x if self.dtype is None else x.astype(self.dtype),
            self.params,
            self.config,
            self.options,
        )

    def update_router_bias(self, stats: MoEStats, rate: float = 1e-3) -> None:
        """Adds rate * sign(mean(tokens) - tokens) to router_bias, by `moax.update_router_bias`.

        In layers that `nnx.vmap` stacked, the bias is [L, E], and `stats` are those that `nnx.scan` stacks.

        Args:
          stats: the stats of the step; `stats.tokens_per_expert` counts over the whole mesh.
          rate: the step of the bias, in units of the score.

        Raises:
          ValueError: the config has no router bias.
        """
        bias: RouterBias | None = getattr(self, "router_bias")  # noqa: B009 (set by name in __init__)
        if bias is None:
            raise ValueError("update_router_bias: config.router.bias=False; it must be True for a bias to update")
        bias.set_value(update_router_bias(bias.get_value(), stats.tokens_per_expert, rate))
