"""`MoEBlock` is the block as a flax.linen module: it calls `moax.moe` on variables that flax holds. `Dense` is
`moax.ops.dense`.

    block = MoEBlock(config)
    variables = block.init(key, x)
    y, stats = block.apply(variables, x)
    _, state = block.apply(variables, stats, method="update_router_bias", mutable="moax_state")

Under `jax.set_mesh` the variables are shards, boxed as `nn.Partitioned` with their specs. With `logical_axes=` they are
boxed as `nn.LogicallyPartitioned` with the logical names of their dims, which need no mesh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Unpack, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moax.block.layer import CallKeywords, moe, quantize_params
from moax.config import MoEConfig
from moax.extras import missing
from moax.initialize import Initializer, init
from moax.logical import LogicalAxes, check_dense_names, find_dense_layout, find_layout, named_params
from moax.mesh.axes import Axes
from moax.mesh.specs import Spec, make_sharded, mesh_sizes
from moax.mesh.view import Engine
from moax.ops.balance import Rule, update_router_bias
from moax.ops.matmul import dense
from moax.options import Options
from moax.params import DIMS, MoEParams
from moax.recipe import Recipe, Recipes
from moax.types import MoEStats, QuantizedParams

try:
    from flax import linen as nn
    from flax import struct
except ModuleNotFoundError as error:
    raise missing(error) from error

STATE = "moax_state"
COLLECTIONS = {name: STATE if name == "router_bias" else "params" for name in DIMS}


class MeshPartitioned(nn.Partitioned):
    """An `nn.Partitioned` whose spec leaves out the names that are no mesh axes.

    `nn.scan` over layers adds a name for the new dim of a variable: the names ("layers", "ep", None, "tp") of the box
    are then PartitionSpec(None, "ep", None, "tp") on a mesh of the axes ep and tp.

    Attributes:
      mesh_axes: the axes of the mesh that was in force when the variable was made.
    """

    mesh_axes: tuple[str, ...] = struct.field(default=(), pytree_node=False)

    def get_partition_spec(self) -> Spec:
        """Returns the PartitionSpec of the variable."""
        return Spec(*(n if isinstance(n, tuple) or n in self.mesh_axes else None for n in self.names))


class MoEBlock(nn.Module):
    """y[t] = sum_k weights[t, k] expert[experts[t, k]](x[t]) + shared(x[t]), for x [..., H].

    Variables have the names of the fields of `moax.MoEParams`. The selection bias `router_bias` is in the collection
    `moax_state`, which no optimizer sees, and the other variables are in `params`. Either of `bi` and `bo` may be
    missing. `init(key, x)` makes the values of `moax.init(key, config)`. Inside another module, flax folds the path of
    the module into the key.

    With a mesh in force (`jax.set_mesh`) each device makes its shards alone.

    Without `logical_axes`, a variable made under a mesh is an `nn.Partitioned` box with its entry of
    `moax.param_specs`, for `nn.get_partition_spec` and `nn.get_sharding`. Without a mesh there are no boxes.

    With `logical_axes`, a variable is an `nn.LogicallyPartitioned` box with the logical names of its dims, for
    `nn.get_partition_spec` and `nn.logical_to_mesh_sharding`, with a mesh and without. The arrays lie by the rules of
    `nn.logical_axis_rules`, or by `moax.param_specs` where no rule and no mesh axis has one of the names.

    Attributes:
      config: the sizes of the block and its equations.
      recipe, axes, exchange, kernels, engine, buffer_factor, save_rows, grad_reduce_dtype: see `moax.Options`.
      dtype: x is cast to this dtype, and the block computes in it. None computes in x.dtype.
      param_dtype: the dtype of all parameters and of the selection bias.
      logical_axes: the logical name of each dim of the parameters; None for no names. See `moax.LogicalAxes`.
      initializers: an initializer for each of some parameters, by name; see `moax.init`.
    """

    config: MoEConfig
    recipe: str | Recipe | Recipes | None = None
    axes: Axes = Axes()
    exchange: str = "auto"
    kernels: str = "auto"
    engine: Engine = "auto"
    buffer_factor: float | None = 1.25
    save_rows: bool = True
    grad_reduce_dtype: jax.typing.DTypeLike | None = None
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    logical_axes: LogicalAxes | None = None
    initializers: Mapping[str, Initializer] | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch H"], **keywords: Unpack[CallKeywords]
    ) -> tuple[Float[Array, "*batch H"], MoEStats]:
        """Returns (y, stats) of `moax.moe` on x [..., H]; y is in `dtype`, or in x.dtype where `dtype` is None.

        The keywords are `router_input`, `routing`, `mask`, `segment_ids`, `return_routing`, `quantized` and `adapters`
        of `moax.moe`.
        """
        if not self.has_variable("params", "router") and self.is_mutable_collection("params"):
            for name, value in self._make().items():
                if COLLECTIONS[name] == STATE:
                    self.variable(STATE, name, lambda value=value: value)
                else:
                    self.param(name, lambda _, value=value: value)
        return moe(
            x if self.dtype is None else x.astype(self.dtype),
            self._params(),
            self.config,
            self._options(),
            **keywords,
        )

    def quantize(self, dtype: jax.typing.DTypeLike | None = None) -> QuantizedParams:
        """Returns `moax.quantize_params` of the parameters, for several calls of the layer with `quantized=`.

        `layer.apply(variables, method="quantize")` calls it outside of a module.

        `dtype` is the dtype of x in these calls; None means that of the layer, or bfloat16 where it has none.
        """
        return quantize_params(self._params(), self.config, self._options(), dtype=dtype or self.dtype or jnp.bfloat16)

    def _params(self) -> MoEParams[Array]:
        """Returns the arrays of the parameters."""
        found = {name: self.get_variable(collection, name) for name, collection in COLLECTIONS.items()}
        return MoEParams(**{name: nn.unbox(value) for name, value in found.items()})

    def _options(self) -> Options:
        """Returns the options, from the fields of the module."""
        return Options(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Options)})

    def update_router_bias(self, stats: MoEStats, rate: float | None = None, rule: Rule = "sign") -> None:
        """Updates router_bias by `moax.update_router_bias`.

        Args:
          stats: the stats of the step; its counts are over the whole mesh.
          rate, rule: see `moax.update_router_bias`.

        Raises:
          ValueError: the config has no router bias, or no histogram for the rule.
        """
        if not self.config.router.bias:
            raise ValueError("update_router_bias: config.router.bias=False; it must be True for a bias to update")
        box = self.get_variable(STATE, "router_bias")
        bias = update_router_bias(nn.unbox(box), stats.tokens_per_expert, rate, rule, histogram=stats.histogram)
        self.put_variable(STATE, "router_bias", nn.meta.replace_boxed(box, bias))

    def _make(self) -> dict[str, Array | nn.Partitioned]:
        """Returns the values of all variables, in boxes where there is a mesh or a logical name.

        One key makes all of them, as in `moax.init`; `self.param` would give each variable a key of its own.
        """
        key = cast(Any, self.scope).rngs["params"].as_jax_rng()
        specs = find_layout(
            self.config, self.axes, self.logical_axes, nn.get_logical_axis_rules(), nn.logical_to_mesh_axes
        )
        values = init(
            key, self.config, dtype=self.param_dtype, axes=self.axes, initializers=self.initializers, specs=specs
        )
        made = {name: v for name in COLLECTIONS if (v := getattr(values, name)) is not None}
        if self.logical_axes is not None:
            named = named_params(self.config, self.logical_axes)
            return {name: nn.LogicallyPartitioned(v, getattr(named, name)) for name, v in made.items()}
        if specs is None:
            return made
        mesh_axes = tuple(mesh_sizes())
        return {n: MeshPartitioned(v, tuple(getattr(specs, n)), mesh_axes=mesh_axes) for n, v in made.items()}


class Dense(nn.Module):
    """y = x kernel + bias, for x [..., K]; the kernel is quantized on its shard and gathered as bytes.

    Without a recipe it computes what `flax.linen.Dense` computes, and `init` makes the same variables `kernel` [K,
    features] and `bias` [features] from the same key.

    With a mesh in force (`jax.set_mesh`) each device makes its shard alone, and the variables are boxed as those of
    `MoEBlock`: `nn.Partitioned`, or `nn.LogicallyPartitioned` with `logical_axes`. The kernel lies by
    `moax.sharding.dense_spec`, or by the rules of `nn.logical_axis_rules` where one has a name of `logical_axes`. A dim
    over tp stays split in the product.

    Attributes:
      features: the number of columns of y.
      recipe: the name of a recipe, a Recipe, or None to quantize nothing.
      use_bias: whether there is a bias.
      dtype: x is cast to this dtype, and the layer computes in it. None takes the wider one of x.dtype and that of the
        kernel, as Flax does.
      param_dtype: the dtype of kernel and bias.
      kernel_init, bias_init: callables (key, shape, dtype) -> array.
      logical_axes: the logical names of the kernel's two dims; the bias has the second one. None gives no names.
      axes, engine, kernels: see `moax.Options`.
    """

    features: int
    recipe: str | Recipe | None = None
    use_bias: bool = True
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()
    logical_axes: tuple[str | None, str | None] | None = None
    axes: Axes = Axes()
    engine: Engine = "auto"
    kernels: str = "auto"

    @nn.compact
    def __call__(self, x: Float[Array, "*rows K"]) -> Float[Array, "*rows C"]:
        """Returns y [..., features] of x [..., K]; see `moax.ops.dense`."""
        check_dense_names(self.logical_axes)
        names, shape = self.logical_axes, (x.shape[-1], self.features)
        specs = find_dense_layout(shape, self.axes, names, nn.get_logical_axis_rules(), nn.logical_to_mesh_axes)

        def make(key, initializer: Initializer, shape: tuple[int, ...], i: int) -> Any:
            made = make_sharded(lambda key: initializer(key, shape, self.param_dtype), specs and specs[i])(key)
            if names is not None:
                return nn.LogicallyPartitioned(made, names[i:])
            return made if specs is None else MeshPartitioned(made, tuple(specs[i]), mesh_axes=tuple(mesh_sizes()))

        kernel = self.param("kernel", make, self.kernel_init, shape, 0)
        bias = self.param("bias", make, self.bias_init, shape[1:], 1) if self.use_bias else None
        return dense(
            x.astype(self.dtype or jnp.promote_types(x.dtype, kernel.dtype)),
            kernel,
            bias,
            recipe=self.recipe,
            w_spec=None if specs is None else specs[0],
            axes=self.axes,
            engine=self.engine,
            kernels=self.kernels,
        )
