"""`MoEBlock` is the block as a flax.linen module, and `Dense` a dense layer. Both compute on variables that flax holds.

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

from moax.block.moe import CallKeywords
from moax.checks import check_value
from moax.config import BufferFactor, MoEConfig, MoEStats, Options
from moax.layers import DenseLayer, LaidOutArray, LogicalAxes, MoELayer, check_is_array, struct
from moax.layers import linen as nn
from moax.mesh.axes import Axes
from moax.mesh.specs import Engine, Spec, mesh_sizes
from moax.params import DIMS, Initializer
from moax.recipe import Recipe

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
        entries = []
        for name in self.names:
            splits = isinstance(name, tuple) or name in self.mesh_axes
            entries.append(name if splits else None)
        return Spec(*entries)


def _box(array: LaidOutArray) -> Any:
    """Returns the array of a variable, in a box where it has logical names or a spec."""
    if array.names is not None:
        return nn.LogicallyPartitioned(array.value, array.names)
    if array.spec is None:
        return array.value
    return MeshPartitioned(array.value, tuple(array.spec), mesh_axes=tuple(mesh_sizes()))


class MoEBlock(MoELayer, nn.Module):
    """y[t] = sum_k weights[t, k] expert[experts[t, k]](x[t]) + shared(x[t]), for x [..., H].

    Variables have the names of the fields of `moax.MoEParams`. The selection bias `router_bias` is in the collection
    `moax_state`, which no optimizer sees, and the other variables are in `params`. Either of `bi` and `bo` may be
    missing. `init(key, x)` makes the values of `moax.init(key, config)`. Inside another module, Flax folds the path of
    the module into the key. For the attributes see `moax.layers.MoELayer`; each field of `moax.Options` is one.

    With a mesh in force each variable is an `nn.Partitioned` box with its spec. With `logical_axes` it is an
    `nn.LogicallyPartitioned` box with the logical names of its dims, with a mesh and without.
    """

    config: MoEConfig
    recipe: str | Recipe | None = None
    axes: Axes = Axes()
    exchange: str = "auto"
    kernels: str = "auto"
    engine: Engine = "auto"
    buffer_factor: BufferFactor = "auto"
    save_rows: bool | None = None
    grad_reduce_dtype: jax.typing.DTypeLike | None = None
    dtype: jax.typing.DTypeLike | None = None
    param_dtype: jax.typing.DTypeLike = jnp.float32
    logical_axes: LogicalAxes | None = None
    initializers: Mapping[str, Initializer] | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch H"], **keywords: Unpack[CallKeywords]
    ) -> tuple[Float[Array, "*batch H"], MoEStats]:
        """Returns (y, stats) of `moax.moe` on x [..., H], with its keywords; y has the dtype of the computation."""
        if not self.has_variable("params", "router") and self.is_mutable_collection("params"):
            # One key makes all variables, as in `moax.init`; `self.param` would give each variable a key of its own.
            rngs = cast(Any, self.scope).rngs
            if "params" not in rngs:
                raise ValueError(f"rngs has the keys {sorted(rngs)}; it must be a PRNG key, or have one of 'params'")
            key = rngs["params"].as_jax_rng()
            has_state = self.has_variable(STATE, "router_bias") or self.is_mutable_collection(STATE)
            if self.config.router.bias and not has_state:
                raise ValueError(
                    f"router_bias has no place, since the collection {STATE!r} is not mutable; it must be so in init, "
                    f"and a transform such as nn.scan needs variable_axes={{'params': 0, {STATE!r}: 0}}"
                )
            for name, array in self._make(key, self.logical_axes, self.initializers).items():
                if COLLECTIONS[name] == STATE:
                    self.variable(STATE, name, _box, array)
                else:
                    self.param(name, lambda _, array=array: _box(array))
        return super().__call__(x, **keywords)

    @property
    def options(self) -> Options:  # pyrefly: ignore[bad-override]
        """The options, from the fields of the module."""
        names = [field.name for field in dataclasses.fields(Options)]
        return Options(**{name: getattr(self, name) for name in names})

    def _get(self, name: str) -> Array | None:
        return nn.unbox(self.get_variable(COLLECTIONS[name], name))

    def _set_router_bias(self, bias: Array) -> None:
        box = self.get_variable(STATE, "router_bias")
        self.put_variable(STATE, "router_bias", nn.meta.replace_boxed(box, bias))


class Dense(DenseLayer, nn.Module):
    """y = x kernel + bias, for x [..., K], with `features` columns; see `moax.layers.DenseLayer`.

    `init` makes the variables `kernel` [K, features] and `bias` [features], boxed as in `MoEBlock`.
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
        check_value("features", self.features, int)
        check_is_array(x)
        shape = x.shape[-1], self.features

        def make(key, initializer: Initializer, name: str) -> Any:
            return _box(self._make(key, initializer, shape, name))

        kernel = self.param("kernel", make, self.kernel_init, "kernel")
        bias = None
        if self.use_bias:
            bias = self.param("bias", make, self.bias_init, "bias")
        return self._compute(x, kernel, bias)
