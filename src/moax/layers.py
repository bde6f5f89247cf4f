"""The base classes of the layers of `moax.nnx` and `moax.linen`: their arguments, and how they make parameters.

The logical axis rules of Flax map a logical name to mesh axes: with the rules (("exp", "expert"), ("embed", "fsdp"),
("mlp", "tensor")) `wi`, whose dims have the names ("exp", "embed", None, "mlp"), has PartitionSpec("expert", "fsdp",
None, "tensor").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moax.block.moe import CallKeywords, moe, quantize_params
from moax.checks import check_arrays, check_value
from moax.config import MoEConfig, MoEStats, Options
from moax.mesh.axes import Axes
from moax.mesh.specs import Engine, Spec, make_sharded, mesh_in_force, mesh_sizes
from moax.ops.balance import Rule, update_router_bias
from moax.ops.matmul import dense
from moax.params import DIMS, Initializer, LogicalAxes, MoEParams, dense_spec, init, param_specs
from moax.recipe import Recipe
from moax.types import QuantizedParams

try:
    from flax import linen
    from flax import nnx as nnx
    from flax import struct as struct
    from flax.core import meta
    from flax.core.spmd import apply_rules
except ModuleNotFoundError as error:
    if error.name != "flax":
        raise
    raise ModuleNotFoundError("flax is missing: pip install 'moax[flax]'", name="flax") from error

Names = tuple[str | None, ...]


class LaidOutArray(NamedTuple):
    """An array, its spec on the mesh in force, and the logical names of its dims; None where it has none."""

    value: Array
    spec: Spec | None
    names: Names | None

    def flax_agrees(self) -> bool:
        """Returns whether Flax finds a mesh, and by its rules the same spec, where it lays out a variable itself."""
        if self.spec is None or not meta.global_mesh_defined():
            return False
        return (*apply_rules(self.names or self.spec, ()),) == (*self.spec,)


def find_specs(names: Mapping[str, Names], default: dict[str, Any]) -> dict[str, Any]:
    """Returns the spec of each array by the rules in force, or `default` where no rule and no mesh axis has a name.

    Raises:
      ValueError: a name has no rule, and is no mesh axis.
    """
    mesh = mesh_sizes()
    rules = linen.get_logical_axis_rules()
    known = {rule[0] for rule in rules}.union(mesh)
    if known.isdisjoint(name for dims in names.values() for name in dims):
        return default
    for array, dims in names.items():
        for name in dims:
            if name is not None and name not in known:
                raise ValueError(
                    f"logical_axes: {name!r} of {array} has no rule, and is no axis of the mesh "
                    f"{tuple(mesh)}; add a rule, for example ({name!r}, None), or name the dim None"
                )
    names_with_rule = {rule[0] for rule in rules}
    rules = (*rules, *((name, name) for name in mesh if name not in names_with_rule))
    return {array: linen.logical_to_mesh_axes(dims, rules) for array, dims in names.items()}


def check_is_array(x: Any) -> None:
    """Raises ValueError for an x that is no array; the layer casts an array of any dtype."""
    if not hasattr(x, "astype"):
        check_arrays("x [*batch, H]", x)


class MoELayer:
    """A layer that holds the parameters of `moax.moe`, and calls it.

    The parameters have the values of `moax.init(key, config, initializers=initializers)`. With a mesh in force
    (`jax.set_mesh`) each device makes its shards alone, laid out by `moax.param_specs`, and Flax knows the specs. With
    `logical_axes` Flax knows the logical names of the dims in their place, with a mesh and without. The rules of
    `flax.linen.logical_axis_rules` then lay out the arrays, if a rule or a mesh axis has one of the names.

    Attributes:
      config: the sizes of the block and its equations.
      options: how the block runs; a layer also takes the fields of `moax.Options` as arguments.
      dtype: x is cast to this dtype, and the block computes in it. None computes in x.dtype.
      param_dtype: the dtype of all parameters; the selection bias is float32.
      logical_axes: the logical name of each dim of the parameters; None for no names.
      initializers: an initializer for each of some parameters, by name; see `moax.init`.

    Raises:
      ValueError: an option has a value that it cannot have, the mesh axes of a dim do not divide its size, a logical
        name has no rule, or `initializers` does not fit.
    """

    config: MoEConfig
    options: Options
    dtype: jax.typing.DTypeLike | None
    param_dtype: jax.typing.DTypeLike

    @property
    def params(self) -> MoEParams[Array]:
        """The arrays of the parameters, as `moax.moe` takes them."""
        return MoEParams(**{name: self._get(name) for name in DIMS})

    def quantize(self, dtype: jax.typing.DTypeLike | None = None, *, gather: bool = False) -> QuantizedParams:
        """Returns `moax.quantize_params` of the parameters, for several calls of the layer with `quantized=`.

        `dtype` is the dtype of x in these calls; None means that of the layer, or bfloat16 where it has none.
        """
        dtype = dtype or self.dtype or jnp.bfloat16
        return quantize_params(self.params, self.config, self.options, dtype=dtype, gather=gather)

    def update_router_bias(self, stats: MoEStats, rate: float | None = None, rule: Rule = "sign") -> None:
        """Updates the selection bias by `moax.update_router_bias`.

        Stacked layers have a bias [L, E], and take the stats that a scan over them stacks.

        Args:
          stats: the stats of the step; its counts are over the whole mesh.
          rate, rule: see `moax.update_router_bias`.

        Raises:
          ValueError: `stats` are no stats, or the config has no router bias, or no histogram for the rule.
        """
        check_value("stats", stats, MoEStats)
        if not self.config.router.bias:
            raise ValueError("update_router_bias: config.router.bias=False; it must be True for a bias to update")
        bias = self._get("router_bias")
        tokens = stats.tokens_per_expert
        new_bias = update_router_bias(bias, tokens, rate, rule, histogram=stats.histogram)
        self._set_router_bias(new_bias)

    def _get(self, name: str) -> Any:
        raise NotImplementedError

    def _set_router_bias(self, bias: Array) -> None:
        raise NotImplementedError

    def _make(
        self, key, logical: LogicalAxes | None, initializers: Mapping[str, Initializer] | None
    ) -> dict[str, LaidOutArray]:
        names: dict[str, Names] = {}
        if logical is not None:
            check_value("logical_axes", logical, LogicalAxes)
            names = {name: logical.names(name) for name in DIMS}
        specs: dict[str, Any] = {}
        if mesh_sizes():
            specs = vars(param_specs(self.config, self.options.axes))
        existing = {name: dims for name, dims in names.items() if specs.get(name) is not None}
        specs = find_specs(existing, specs)
        values = init(
            key,
            self.config,
            dtype=self.param_dtype,
            axes=self.options.axes,
            initializers=initializers,
            specs=MoEParams(**specs) if specs else None,
        )
        variables = {}
        for name, value in vars(values).items():
            if value is not None:
                variables[name] = LaidOutArray(value, specs.get(name), names.get(name))
        return variables

    def __call__(
        self, x: Float[Array, "*batch H"], **keywords: Unpack[CallKeywords]
    ) -> tuple[Float[Array, "*batch H"], MoEStats]:
        """Returns (y, stats) of `moax.moe` on x [..., H], with its keywords; y has the dtype of the computation."""
        check_is_array(x)
        if self.dtype is not None:
            x = x.astype(self.dtype)
        return moe(x, self.params, self.config, self.options, **keywords)


class DenseLayer:
    """A layer y = x kernel + bias, for x [..., K]; the kernel is quantized on its shard and gathered as bytes.

    Without a recipe it has the values of the dense layer of Flax, and makes the same parameters from the same key.
    With a mesh in force (`jax.set_mesh`) each device makes its shard alone. `moax.params.dense_spec` gives the layout
    of the kernel, or the rules of `flax.linen.logical_axis_rules` where one has a name of `logical_axes`. A dim over tp
    stays split in the matmul: `logical_axes=("embed", "mlp")` with a rule ("mlp", "tp") splits the columns of y.

    Attributes:
      recipe: the name of a recipe, a Recipe, or None to quantize nothing.
      use_bias: whether there is a bias.
      dtype: x is cast to this dtype, and the layer computes in it. None takes the wider one of x.dtype and
        `param_dtype`, as Flax does.
      param_dtype: the dtype of kernel and bias.
      kernel_init, bias_init: callables (key, shape, dtype) -> array.
      logical_axes: the logical names of the kernel's two dims; the bias has the second one. None gives no names.
      axes, engine, kernels: see `moax.Options`.

    Raises:
      ValueError: `logical_axes` is not two names, or one of them has no rule.
    """

    recipe: str | Recipe | None
    dtype: jax.typing.DTypeLike | None
    param_dtype: jax.typing.DTypeLike
    logical_axes: tuple[str | None, str | None] | None
    axes: Axes
    engine: Engine
    kernels: str

    def _make(self, key, initializer: Initializer, shape: tuple[int, int], name: str) -> LaidOutArray:
        dims = slice(1, 2) if name == "bias" else slice(2)  # the bias has the columns alone
        spec = self._find_specs(shape)[name]
        make = make_sharded(lambda key: initializer(key, shape[dims], self.param_dtype), spec)
        names = None if self.logical_axes is None else self.logical_axes[dims]
        return LaidOutArray(make(key), spec, names)

    def _compute(self, x: Array, kernel: Array, bias: Array | None) -> Array:
        check_is_array(x)
        dtype = self.dtype or jnp.promote_types(x.dtype, kernel.dtype)
        return dense(
            x.astype(dtype),
            kernel,
            bias,
            w_spec=self._find_specs(kernel.shape)["kernel"],
            recipe=self.recipe,
            axes=self.axes,
            engine=self.engine,
            kernels=self.kernels,
        )

    def _find_specs(self, shape: Sequence[int]) -> dict[str, Any]:
        """Returns the specs of kernel and bias; None without a mesh and in a `shard_map`."""
        names = self.logical_axes
        is_pair = isinstance(names, tuple) and len(names) == 2
        if names is not None and not (is_pair and all(isinstance(n, str | None) for n in names)):
            raise ValueError(f"logical_axes={names!r} must be the names of two dims, such as ('embed', 'mlp'), or None")
        mesh = mesh_in_force()
        if mesh is None or mesh.manual_axes:
            return {"kernel": None, "bias": None}
        specs = {"kernel": dense_spec(self.axes, shape), "bias": Spec(None)}
        if names is None:
            return specs
        return find_specs({"kernel": names, "bias": names[1:]}, specs)
