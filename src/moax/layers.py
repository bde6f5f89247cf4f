"""The parameters of layers, their names and layouts, and the methods of layers, which nnx.py and linen.py bind to Flax.

`Rules` are the logical axis rules of Flax. A rule maps a logical name to mesh axes: with the rules (("exp", "expert"),
("embed", "fsdp"), ("mlp", "tensor")) `wi`, whose dims have the names ("exp", "embed", None, "mlp"), has
PartitionSpec("expert", "fsdp", None, "tensor").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from moax.block.layer import CallKeywords, moe, quantize_params
from moax.config import MoEConfig
from moax.initialize import Initializer, init
from moax.mesh.axes import Axes
from moax.mesh.specs import Engine, Spec, make_sharded, mesh_in_force, mesh_sizes
from moax.ops.balance import Rule, update_router_bias
from moax.ops.matmul import dense
from moax.options import Options
from moax.params import DIMS, ROUTER, MoEParams
from moax.recipe import Recipe
from moax.sharding import dense_spec, param_specs
from moax.types import MoEStats, QuantizedParams

Names = tuple[str | None, ...]


class Rules(NamedTuple):
    """The logical axis rules in force, pairs (logical name, mesh axes), and `flax.linen.logical_to_mesh_axes`."""

    rules: Sequence[Any]
    to_mesh_axes: Callable

    def decide(self, names: Sequence[str | None]) -> bool:
        """Returns whether one of these names has a rule or is a mesh axis."""
        return not {rule[0] for rule in self.rules}.union(mesh_sizes()).isdisjoint(names)

    def find_spec(self, what: str, names: Names) -> Any:
        """Returns the PartitionSpec of the array `what`; a name without a rule maps to the mesh axis of this name."""
        mesh, ruled = mesh_sizes(), {rule[0] for rule in self.rules}
        for name in names:
            if name is not None and name not in ruled and name not in mesh:
                raise ValueError(
                    f"logical_axes: {name!r} of {what} has no rule, and is no axis of the mesh {tuple(mesh)}; "
                    f"add a rule, for example ({name!r}, None), or name the dim None"
                )
        return self.to_mesh_axes(names, (*self.rules, *((name, name) for name in mesh if name not in ruled)))


@dataclasses.dataclass(frozen=True)
class LogicalAxes:
    """The logical name of each dim letter of the parameters; None gives a dim no name.

    These are the dims of each parameter, and their names by default:

        router                      H E        ("embed", None)
        router_bias, logits_bias    E          (None,)
        expert_scale                E          (None,)
        wi                          E H G F    ("exp", "embed", None, "mlp")
        wo                          E F H      ("exp", "mlp", "embed")
        bi                          E G F      ("exp", None, "mlp")
        bo                          E H        ("exp", "embed")
        shared_wi                   H G S      ("embed", None, "mlp")
        shared_wo                   S H        ("mlp", "embed")
        shared_gate                 H          ("embed",)
        latent_down                 H L        ("embed", None)
        latent_up                   L H        (None, "embed")

    Attributes:
      E: the experts. The E of the router, of its biases and scales has no name, because every device needs all logits.
      H: the model width. The rows of latent experts, whose wi, wo and bo have L for H, have its name too.
      F: the expert width.
      G: gate and up, a dim of size 2 or 1.
      S: the width of the shared expert.
      L: the width of latent experts, in their two projections.

    Raises:
      ValueError: a field is neither a name nor None, or two dims of one parameter have the same name.
    """

    E: str | None = "exp"
    H: str | None = "embed"
    F: str | None = "mlp"
    G: str | None = None
    S: str | None = "mlp"
    L: str | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            name = getattr(self, field.name)
            if name is not None and not isinstance(name, str):
                raise ValueError(f"LogicalAxes: {field.name}={name!r} must be a name or None")
        for param in DIMS:
            named = [name for name in self.names(param) if name is not None]
            if len(set(named)) < len(named):
                raise ValueError(f"LogicalAxes: {param} has the names {named}; each dim needs a name of its own")

    def names(self, param: str) -> Names:
        """Returns the names of the dims of a parameter: `names("wo")` is `("exp", "mlp", "embed")`."""
        return tuple(None if n == "E" and param in ROUTER else getattr(self, n) for n in DIMS[param])


class Made(NamedTuple):
    """An array, its spec on the mesh in force, and the logical names of its dims; None where it has none."""

    value: Array
    spec: Spec | None
    names: Names | None


def make_params(
    key,
    config: MoEConfig,
    axes: Axes,
    dtype: jax.typing.DTypeLike,
    logical: LogicalAxes | None,
    initializers: Mapping[str, Initializer] | None,
    rules: Rules,
) -> dict[str, Made]:
    """Makes the parameters of `moax.init(key, config)`, by name.

    Logical names decide their layout if one of them has a rule or is a mesh axis; else `param_specs` does.
    """
    names = {} if logical is None else {name: logical.names(name) for name in DIMS}
    specs = param_specs(config, axes) if mesh_sizes() else None
    if specs is not None and logical is not None and rules.decide(dataclasses.astuple(logical)):
        made = [name for name in DIMS if getattr(specs, name) is not None]
        specs = MoEParams(**{n: rules.find_spec(f"params.{n}", names[n]) for n in made})
    values = init(key, config, dtype=dtype, axes=axes, initializers=initializers, specs=specs)
    return {
        name: Made(value, getattr(specs, name, None), names.get(name))
        for name in DIMS
        if (value := getattr(values, name)) is not None
    }


class MoELayer:
    """The methods of a layer that computes `moax.moe`."""

    config: MoEConfig
    dtype: jax.typing.DTypeLike | None
    options: Options

    @property
    def params(self) -> MoEParams[Array]:
        """The arrays of the parameters, as `moax.moe` takes them."""
        return MoEParams(**{name: self._get(name) for name in DIMS})

    def quantize(self, dtype: jax.typing.DTypeLike | None = None) -> QuantizedParams:
        """Returns `moax.quantize_params` of the parameters, for several calls of the layer with `quantized=`.

        `dtype` is the dtype of x in these calls; None means that of the layer, or bfloat16 where it has none.
        """
        return quantize_params(self.params, self.config, self.options, dtype=dtype or self.dtype or jnp.bfloat16)

    def update_router_bias(self, stats: MoEStats, rate: float | None = None, rule: Rule = "sign") -> None:
        """Updates the selection bias by `moax.update_router_bias`.

        Stacked layers have a bias [L, E], and take the stats that a scan over them stacks.

        Args:
          stats: the stats of the step; its counts are over the whole mesh.
          rate, rule: see `moax.update_router_bias`.

        Raises:
          ValueError: the config has no router bias, or no histogram for the rule.
        """
        if not self.config.router.bias:
            raise ValueError("update_router_bias: config.router.bias=False; it must be True for a bias to update")
        bias, counts = self._get("router_bias"), stats.tokens_per_expert
        self._set_router_bias(update_router_bias(bias, counts, rate, rule, histogram=stats.histogram))

    def _get(self, name: str) -> Any:
        raise NotImplementedError

    def _set_router_bias(self, bias: Array) -> None:
        raise NotImplementedError

    def _compute(self, x: Array, keywords: CallKeywords) -> tuple[Array, MoEStats]:
        x = x if self.dtype is None else x.astype(self.dtype)
        return moe(x, self.params, self.config, self.options, **keywords)


class DenseLayer:
    """The methods of a layer that computes `moax.ops.dense`."""

    recipe: str | Recipe | None
    dtype: jax.typing.DTypeLike | None
    param_dtype: jax.typing.DTypeLike
    logical_axes: tuple[str | None, str | None] | None
    axes: Axes
    engine: Engine
    kernels: str

    def _make(self, key, initializer: Initializer, shape: tuple[int, int], name: str, rules: Rules) -> Made:
        """Makes the kernel, of this shape, or its bias."""
        skip = ("kernel", "bias").index(name)  # the bias has the columns alone
        at, names = self._find_layout(shape, rules)[skip], self.logical_axes
        make = make_sharded(lambda key: initializer(key, shape[skip:], self.param_dtype), at)
        return Made(make(key), at, None if names is None else names[skip:])

    def _compute(self, x: Array, kernel: Array, bias: Array | None, rules: Rules) -> Array:
        return dense(
            x.astype(self.dtype or jnp.promote_types(x.dtype, kernel.dtype)),
            kernel,
            bias,
            recipe=self.recipe,
            w_spec=self._find_layout(kernel.shape, rules)[0],
            axes=self.axes,
            engine=self.engine,
            kernels=self.kernels,
        )

    def _find_layout(self, shape: Sequence[int], rules: Rules) -> tuple[Spec | None, Spec | None]:
        """Returns the specs of kernel and bias; None without a mesh and in a `shard_map`."""
        names = self.logical_axes
        pair = isinstance(names, tuple) and len(names) == 2 and all(isinstance(n, str | None) for n in names)
        if names is not None and not pair:
            raise ValueError(f"logical_axes={names!r} must be the names of two dims, such as ('embed', 'mlp'), or None")
        mesh = mesh_in_force()
        if mesh is None or mesh.manual_axes:
            return None, None
        if names is None or not rules.decide(names):
            return dense_spec(self.axes, shape), Spec(None)
        return rules.find_spec("kernel", names), rules.find_spec("bias", names[1:])
