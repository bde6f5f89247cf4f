"""`MoE` is the block as a flax.nnx module: it holds the parameters and calls `moax.moe`. `Dense` is `moax.ops.dense`.

    layer = MoE(config, rngs=nnx.Rngs(0))
    y, stats = layer(x)
    layer.update_router_bias(stats)  # once a step, after the optimizer, where config.router.bias

    up = Dense(1024, 4096, recipe="fp8_block", rngs=nnx.Rngs(0))
    h = up(x)

Under `jax.set_mesh` a layer makes and holds shards. The metadata of its variables names their specs, or with
`logical_axes=` the logical names of their dims, which need no mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moax.checks import check_value
from moax.config import MoEConfig, OptionKeywords, Options, replace_options
from moax.layers import DenseLayer, LaidOutArray, LogicalAxes, MoELayer, nnx
from moax.mesh.axes import Axes
from moax.mesh.specs import Engine
from moax.params import DIMS, Initializer
from moax.recipe import Recipe


class _Laid(nnx.Variable):
    """A variable whose metadata `out_sharding` has an entry for each dim of the value.

    `nnx.vmap` without `transform_metadata` stacks the values of layers and leaves the metadata of one layer. The dims
    that the metadata lacks are then the first ones, and no mesh axis splits them: ("exp", "embed", None, "mlp") of a
    stacked `wi` [L, E, H, G, F] is read as (None, "exp", "embed", None, "mlp").
    """

    def get_metadata(self, *args: Any, **keywords: Any) -> Any:
        """Returns the metadata of `nnx.Variable.get_metadata`, with `out_sharding` of the rank of the value."""
        metadata = super().get_metadata(*args, **keywords)
        if args[:1] == ("out_sharding",):
            return self._pad(metadata)
        if isinstance(metadata, dict) and "out_sharding" in metadata:
            metadata["out_sharding"] = self._pad(metadata["out_sharding"])
        return metadata

    def _pad(self, entries: Any) -> Any:
        lacking = getattr(self.get_value(), "ndim", 0) - len(entries or ())
        if not entries or lacking <= 0:
            return entries
        padded = (*[None] * lacking, *entries)
        if isinstance(entries, tuple):
            return padded
        return type(entries)(*padded)


class MoEParam(_Laid, nnx.Param):
    """A trained parameter of a layer, an `nnx.Param`."""


class RouterBias(_Laid):
    """The selection bias [E]. It is no `nnx.Param`, so that no optimizer and no gradient of parameters sees it."""


def _make_variable(kind: Any, array: LaidOutArray) -> Any:
    """Returns a variable whose metadata has the logical names of its dims, or else its spec, where there is one."""
    entries = array.spec if array.names is None else array.names
    if entries is None:
        return kind(array.value)
    if array.flax_agrees():
        return kind(array.value, out_sharding=entries)
    return kind(array.value, out_sharding=entries, eager_sharding=False)


class MoE(MoELayer, nnx.Module):
    """y[t] = sum_k weights[t, k] expert[experts[t, k]](x[t]) + shared(x[t]), for x [..., H].

    The metadata `out_sharding` of a variable has its spec or its logical names; see `moax.layers.MoELayer`.

    Attributes:
      router, wi, wo, logits_bias, bi, bo, shared_wi, shared_wo, shared_gate, expert_scale, latent_down, latent_up: each
        a `MoEParam` with the shape of the same field of `moax.MoEParams`, or None where the config has no such
        parameter. A user may set or delete `bi` and `bo` afterwards.
      router_bias: a `RouterBias`, or None where the config has none.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        options: Options = Options(),
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        logical_axes: LogicalAxes | None = None,
        initializers: Mapping[str, Initializer] | None = None,
        rngs: nnx.Rngs,
        **keywords: Unpack[OptionKeywords],
    ):
        """Makes the parameters. For the arguments see `moax.layers.MoELayer`; `rngs.params()` is the key."""
        self.config = config
        self.options = replace_options("MoE", options, keywords)
        self.dtype = dtype
        self.param_dtype = param_dtype
        check_value("rngs", rngs, nnx.Rngs, "flax.nnx.Rngs(0)")
        values = self._make(rngs.params(), logical_axes, initializers)
        for name in DIMS:
            if name not in values:
                setattr(self, name, nnx.data(None))
            elif name == "router_bias":
                setattr(self, name, _make_variable(RouterBias, values[name]))
            else:
                setattr(self, name, _make_variable(MoEParam, values[name]))

    def _get(self, name: str) -> Array | None:
        variable = getattr(self, name)
        if variable is None:
            return None
        return variable.get_value()

    def _set_router_bias(self, bias: Array) -> None:
        getattr(self, "router_bias").set_value(bias)  # noqa: B009 (set by name in __init__)


class Dense(DenseLayer, nnx.Module):
    """y = x kernel + bias, for x [..., K]; see `moax.layers.DenseLayer`.

    Attributes:
      kernel: a `MoEParam` [in_features, out_features].
      bias: a `MoEParam` [out_features], or None.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        recipe: str | Recipe | None = None,
        use_bias: bool = True,
        dtype: jax.typing.DTypeLike | None = None,
        param_dtype: jax.typing.DTypeLike = jnp.float32,
        kernel_init: Initializer = nnx.nn.linear.default_kernel_init,
        bias_init: Initializer = jax.nn.initializers.zeros,
        logical_axes: tuple[str | None, str | None] | None = None,
        axes: Axes = Axes(),
        engine: Engine = "auto",
        kernels: str = "auto",
        rngs: nnx.Rngs,
    ):
        """Makes the kernel and the bias. For the arguments see `moax.layers.DenseLayer`.

        Args:
          in_features: K.
          out_features: the number of columns of y.
          rngs: the stream `params` gives a key to the kernel and then one to the bias.
        """
        check_value("in_features", in_features, int)
        check_value("out_features", out_features, int)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.logical_axes = logical_axes
        self.recipe = recipe
        self.axes = axes
        self.engine = engine
        self.kernels = kernels

        check_value("rngs", rngs, nnx.Rngs, "flax.nnx.Rngs(0)")
        shape = (in_features, out_features)
        kernel = self._make(rngs.params(), kernel_init, shape, "kernel")
        self.kernel = _make_variable(MoEParam, kernel)
        if use_bias:
            bias = self._make(rngs.params(), bias_init, shape, "bias")
            self.bias = _make_variable(MoEParam, bias)
        else:
            self.bias = nnx.data(None)

    def __call__(self, x: Float[Array, "*rows K"]) -> Float[Array, "*rows C"]:
        """Returns y [..., out_features] of x [..., in_features]; see `moax.ops.dense`."""
        bias = None if self.bias is None else self.bias.get_value()
        return self._compute(x, self.kernel.get_value(), bias)
