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

from moax.block.layer import CallKeywords, moe, quantize_params
from moax.config import MoEConfig
from moax.extras import missing
from moax.initialize import Initializer, init
from moax.logical import LogicalAxes, check_dense_names, find_dense_layout, find_layout, named_params
from moax.mesh.axes import Axes
from moax.mesh.specs import make_sharded
from moax.mesh.view import Engine
from moax.ops.balance import Rule, update_router_bias
from moax.ops.matmul import dense
from moax.options import OptionKeywords, Options, replace_options
from moax.params import DIMS, MoEParams, params_by_name
from moax.recipe import Recipe
from moax.types import MoEStats, QuantizedParams

try:
    from flax import nnx
    from flax.core import meta
    from flax.core.spmd import apply_rules
    from flax.linen import get_logical_axis_rules, logical_to_mesh_axes
    from flax.nnx.nn.linear import default_kernel_init
except ModuleNotFoundError as error:
    raise missing(error) from error


class _Laid(nnx.Variable):
    """A variable whose metadata `out_sharding` has an entry for each dim of the value.

    `nnx.vmap` without `transform_metadata` stacks the values of layers and leaves the metadata of one layer. The dims
    that the metadata lacks are then the first ones, and no mesh axis splits them: ("exp", "embed", None, "mlp") of a
    stacked `wi` [L, E, H, G, F] is read as (None, "exp", "embed", None, "mlp").
    """

    def get_metadata(self, *args: Any, **keywords: Any) -> Any:
        """Returns what `nnx.Variable.get_metadata` returns, with `out_sharding` of the rank of the value."""
        found = super().get_metadata(*args, **keywords)
        if args[:1] == ("out_sharding",):
            return self._padded(found)
        if isinstance(found, dict) and "out_sharding" in found:
            found["out_sharding"] = self._padded(found["out_sharding"])
        return found

    def _padded(self, entries: Any) -> Any:
        """Returns the entries of `out_sharding`, after one None for each dim that they lack."""
        lacking = getattr(self.get_value(), "ndim", 0) - len(entries or ())
        if not entries or lacking <= 0:
            return entries
        padded = (*[None] * lacking, *entries)
        return padded if isinstance(entries, tuple) else type(entries)(*padded)


class MoEParam(_Laid, nnx.Param):
    """A trained parameter of the layer. It is an `nnx.Param`."""


class RouterBias(_Laid):
    """The selection bias [E].

    It is state and no `nnx.Param`, so that no optimizer and no gradient of parameters sees it.
    """


def _metadata(entries: Any, spec: Any) -> dict[str, Any]:
    """Returns the metadata of a variable whose array has the layout `spec`.

    Flax lays out an eagerly sharded variable, and an optimizer's copy of it, as `out_sharding` says. It can do so where
    it finds a mesh, and its rules give `spec`.
    """
    asked = spec is not None and entries is not None and meta.global_mesh_defined()
    same = asked and tuple(apply_rules(entries, ())) == tuple(spec)
    return {"out_sharding": entries} | ({} if same else {"eager_sharding": False})


class MoE(nnx.Module):
    """y[t] = sum_k weights[t, k] expert[experts[t, k]](x[t]) + shared(x[t]), for x [..., H].

    Attributes:
      router, wi, wo, logits_bias, bi, bo, shared_wi, shared_wo, shared_gate, expert_scale, latent_down, latent_up: each
        a `MoEParam`, which is an `nnx.Param`, with the shape of the same field of `moax.MoEParams`, or None where the
        config has no such parameter. A user may set or delete `bi` and `bo` afterwards.
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
        """Makes the parameters `moax.init(rngs.params(), config, initializers=initializers)`.

        With a mesh in force (`jax.set_mesh`) each device makes its shards alone. `nnx.get_partition_spec` and
        `nnx.get_named_sharding` read the metadata `out_sharding` of each variable.

        Without `logical_axes`, the metadata is the entry of `moax.param_specs`, and there is none without a mesh.

        With `logical_axes`, the metadata has the logical names of the dims, with a mesh and without. The arrays lie by
        the rules of `flax.linen.logical_axis_rules`, or by `moax.param_specs` where no rule and no mesh axis has one of
        the names.

        Args:
          config: the sizes of the block and its equations.
          options: how the block runs; see `moax.Options`.
          dtype: x is cast to this dtype, and the block computes in it. None computes in x.dtype.
          param_dtype: the dtype of all parameters and of the selection bias.
          logical_axes: the logical name of each dim of the parameters; None for no names. See `moax.LogicalAxes`.
          initializers: an initializer for each of some parameters, by name; see `moax.init`.
          rngs: the stream `params` gives one key.
          **keywords: fields of `moax.Options` (recipe, axes, exchange, kernels, engine, buffer_factor, save_rows,
            grad_reduce_dtype) that replace those of `options`.

        Raises:
          ValueError: an option has a value that it cannot have, the mesh axes of a dim do not divide its size, a
            logical name has no rule, or `initializers` does not fit.
        """
        self.config, self.options = config, replace_options("MoE", options, keywords)
        self.dtype, self.param_dtype = dtype, param_dtype

        axes = self.options.axes
        specs = find_layout(config, axes, logical_axes, get_logical_axis_rules(), logical_to_mesh_axes)
        values = init(rngs.params(), config, dtype=param_dtype, axes=axes, initializers=initializers, specs=specs)
        entries = specs if logical_axes is None else named_params(config, logical_axes)
        for name in DIMS:
            value, kind = getattr(values, name), RouterBias if name == "router_bias" else MoEParam
            metadata = {} if entries is None else _metadata(getattr(entries, name), getattr(specs, name, None))
            setattr(self, name, nnx.data(None) if value is None else kind(value, **metadata))

    @property
    def params(self) -> MoEParams[Array]:
        """The arrays of the parameters, as `moax.moe` takes them."""
        variables = {name: getattr(self, name) for name in DIMS}
        return params_by_name({name: None if v is None else v.get_value() for name, v in variables.items()})

    def __call__(
        self, x: Float[Array, "*batch H"], **keywords: Unpack[CallKeywords]
    ) -> tuple[Float[Array, "*batch H"], MoEStats]:
        """Returns (y, stats) of `moax.moe` on x [..., H]; y is in `dtype`, or in x.dtype where `dtype` is None.

        The keywords are `router_input`, `routing`, `mask`, `segment_ids`, `return_routing`, `quantized` and `adapters`
        of `moax.moe`.
        """
        return moe(
            x if self.dtype is None else x.astype(self.dtype),
            self.params,
            self.config,
            self.options,
            **keywords,
        )

    def quantize(self, dtype: jax.typing.DTypeLike | None = None) -> QuantizedParams:
        """Returns `moax.quantize_params` of the parameters, for several calls of the layer with `quantized=`.

        `dtype` is the dtype of x in these calls; None means that of the layer, or bfloat16 where it has none.
        """
        return quantize_params(self.params, self.config, self.options, dtype=dtype or self.dtype or jnp.bfloat16)

    def update_router_bias(self, stats: MoEStats, rate: float | None = None, rule: Rule = "sign") -> None:
        """Updates router_bias by `moax.update_router_bias`.

        In layers that `nnx.vmap` stacked, the bias is [L, E], and `stats` are those that `nnx.scan` stacks.

        Args:
          stats: the stats of the step; its counts are over the whole mesh.
          rate, rule: see `moax.update_router_bias`.

        Raises:
          ValueError: the config has no router bias, or no histogram for the rule.
        """
        bias: RouterBias | None = getattr(self, "router_bias")  # noqa: B009 (set by name in __init__)
        if bias is None:
            raise ValueError("update_router_bias: config.router.bias=False; it must be True for a bias to update")
        of = bias.get_value(), stats.tokens_per_expert
        bias.set_value(update_router_bias(*of, rate, rule, histogram=stats.histogram))


class Dense(nnx.Module):
    """y = x kernel + bias, for x [..., K]; the kernel is quantized on its shard and gathered as bytes.

    Without a recipe it computes what `nnx.Linear` computes, and makes the same parameters from the same `rngs`.

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
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = jax.nn.initializers.zeros,
        logical_axes: tuple[str | None, str | None] | None = None,
        axes: Axes = Axes(),
        engine: Engine = "auto",
        kernels: str = "auto",
        rngs: nnx.Rngs,
    ):
        """Makes the kernel and the bias.

        With a mesh in force (`jax.set_mesh`) each device makes its shard alone. The kernel lies by
        `moax.sharding.dense_spec`, or by the rules of `flax.linen.logical_axis_rules` where one has a name of
        `logical_axes`. A dim over tp stays split in the product: `logical_axes=("embed", "mlp")` with a rule ("mlp",
        "tp") splits the columns of y.

        Args:
          in_features: K.
          out_features: the number of columns of y.
          recipe: the name of a recipe, a Recipe, or None to quantize nothing.
          use_bias: whether there is a bias.
          dtype: x is cast to this dtype, and the layer computes in it. None takes the wider one of x.dtype and
            `param_dtype`, as Flax does.
          param_dtype: the dtype of kernel and bias.
          kernel_init, bias_init: callables (key, shape, dtype) -> array.
          logical_axes: the logical names of the kernel's two dims, which the metadata `out_sharding` then has; the bias
            has the second one. None gives no names.
          axes, engine, kernels: see `moax.Options`.
          rngs: the stream `params` gives a key to the kernel and then one to the bias.

        Raises:
          ValueError: `logical_axes` is not two names, or one of them has no rule.
        """
        check_dense_names(logical_axes)
        self.in_features, self.out_features, self.use_bias = in_features, out_features, use_bias
        self.dtype, self.param_dtype, self.logical_axes = dtype, param_dtype, logical_axes
        self.recipe, self.axes, self.engine, self.kernels = recipe, axes, engine, kernels

        specs = self._layout() or (None, None)
        entries = specs if logical_axes is None else (logical_axes, logical_axes[1:])

        def make(initializer: Initializer, shape: tuple[int, ...], i: int) -> MoEParam:
            made = make_sharded(lambda key: initializer(key, shape, param_dtype), specs[i])(rngs.params())
            return MoEParam(made, **({} if entries[i] is None else _metadata(entries[i], specs[i])))

        self.kernel = make(kernel_init, (in_features, out_features), 0)
        self.bias = make(bias_init, (out_features,), 1) if use_bias else nnx.data(None)

    def __call__(self, x: Float[Array, "*rows K"]) -> Float[Array, "*rows C"]:
        """Returns y [..., out_features] of x [..., in_features]; see `moax.ops.dense`."""
        kernel, specs = self.kernel.get_value(), self._layout()
        return dense(
            x.astype(self.dtype or jnp.promote_types(x.dtype, kernel.dtype)),
            kernel,
            None if self.bias is None else self.bias.get_value(),
            recipe=self.recipe,
            w_spec=None if specs is None else specs[0],
            axes=self.axes,
            engine=self.engine,
            kernels=self.kernels,
        )

    def _layout(self) -> Any:
        """Returns the specs of kernel and bias on the mesh in force, or None."""
        shape = self.in_features, self.out_features
        return find_dense_layout(shape, self.axes, self.logical_axes, get_logical_axis_rules(), logical_to_mesh_axes)
