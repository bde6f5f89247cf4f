"""The parameters of a block: their shapes, checks and layouts, and `init`, which makes them as shards.

A layout is a PartitionSpec. Specs are computed from axis names and sizes alone, after `Axes.resolve` has dropped absent
axes and axes of size 1; `mesh/specs.py` has their algebra.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, PRNGKeyArray, PyTree

from moax.checks import check_arrays, check_fields, check_key, check_value, log_once, suggest_fields
from moax.config import MoEConfig
from moax.mesh.axes import AnyMesh, Axes, Names, ResolvedAxes
from moax.mesh.specs import Spec, WholeWeight, check_divides, constrain, local_shape, make_sharded, mesh_in_force, named
from moax.types import pytree

Initializer = Callable[..., Array]


@pytree()
class MoEParams[Leaf]:
    """The parameters of one block. A field is None where the config has no such parameter.

    Attributes:
      router: [H, E], replicated over the mesh.
      wi: [E, H, 2, F]. `wi[:, :, 0]` is the gate and `wi[:, :, 1]` the up projection. Without a gate [E, H, 1, F].
      wo: [E, F, H], the down projection.
      router_bias: [E] f32, added to the scores for selection alone. It is state: it has no gradient, and
        `moax.update_router_bias` alone changes it.
      logits_bias: [E], a trained bias of the logits.
      bi: [E, 2, F], or [E, 1, F] without a gate: the bias of wi. Either of bi and bo may be given alone.
      bo: [E, H], the bias of wo.
      shared_wi: [H, 2, S], or [H, 1, S] without a gate: the first weight of the shared expert of width S.
      shared_wo: [S, H], the second weight of the shared expert.
      shared_gate: [H], whose product with x is the logit of the shared expert's gate.
      expert_scale: [E], a trained factor on the weights of each expert.
      latent_down: [H, L], the projection of x that latent experts read. Their wi, wo and bo have L in the place of H.
      latent_up: [L, H], the projection of the sum of their outputs.
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
    shared_gate: Leaf | None = None
    expert_scale: Leaf | None = None
    latent_down: Leaf | None = None
    latent_up: Leaf | None = None


# The letters of the dims of each parameter: E experts, H model width, F expert width, G gate and up, S the width of the
# shared expert, L the width of latent experts. The H of `BY_EXPERT` is L in latent experts.
DIMS = dict(
    router="HE", wi="EHGF", wo="EFH", router_bias="E", logits_bias="E", bi="EGF", bo="EH", shared_wi="HGS",
    shared_wo="SH", shared_gate="H", expert_scale="E", latent_down="HL", latent_up="LH",
)  # fmt: skip
BY_EXPERT = ("wi", "wo", "bi", "bo")
# the parameters that belong to no single expert
ROUTER = ("router", "router_bias", "logits_bias", "expert_scale")
# The weights of matmuls; the others are small, and the block moves them as it needs them.
LARGE = ("wi", "wo", "shared_wi", "shared_wo", "latent_down", "latent_up")
# State, which no optimizer changes. It is float32: a narrower dtype rounds the small steps of an update away.
STATE = ("router_bias",)
# the value that `init` gives to each element
CONSTANT = dict(router_bias=0.0, logits_bias=0.0, bi=0.0, bo=0.0, expert_scale=1.0)


@suggest_fields
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
        check_fields(self, "LogicalAxes: ")
        for param in DIMS:
            names = [name for name in self.names(param) if name is not None]
            if len(set(names)) < len(names):
                raise ValueError(f"LogicalAxes: {param} has the names {names}; each dim needs a name of its own")

    def names(self, param: str) -> tuple[str | None, ...]:
        """Returns the names of the dims of a parameter: `names("wo")` is `("exp", "mlp", "embed")`."""
        names = []
        for letter in DIMS[param]:
            is_router_dim = letter == "E" and param in ROUTER
            names.append(None if is_router_dim else getattr(self, letter))
        return tuple(names)


def param_shapes(config: MoEConfig, *, optional: bool = False) -> MoEParams[tuple[int, ...]]:
    """Returns the global shape of each parameter that `init` makes; None where the config has no such parameter.

    With `optional` both expert biases have a shape wherever the config allows them.
    """
    has_biases = config.weights_at != "input" if optional else config.use_bias
    exists = dict(
        router_bias=config.router.bias,
        logits_bias=config.router.logits_bias,
        bi=has_biases,
        bo=has_biases,
        shared_gate=config.shared_gate,
        expert_scale=config.router.expert_scale,
    )
    sizes = dict(
        E=config.num_experts,
        H=config.d_model,
        F=config.d_ff,
        G=config.gates,
        S=config.shared_d_ff,
        L=config.d_latent or 0,
    )
    sizes_by_expert = sizes | dict(H=config.d_rows)
    shapes: dict[str, Any] = dict.fromkeys(DIMS)
    for name, letters in DIMS.items():
        sizes_of_param = sizes_by_expert if name in BY_EXPERT else sizes
        shape = tuple(sizes_of_param[letter] for letter in letters)
        if exists.get(name, 0 not in shape):
            shapes[name] = shape
    return MoEParams(**shapes)


def param_dtype_of(name: str, dtype: Any) -> np.dtype:
    """Returns the dtype of a parameter where the others have `dtype`."""
    return np.dtype(np.float32 if name in STATE else dtype)


def trainable_mask(tree: PyTree) -> PyTree[bool]:
    """Returns a bool for each array of a tree: False for the `router_bias` of a MoEParams, and True for all others.

    Weight decay moves a parameter without a gradient, so an optimizer needs the mask:
    `optax.adamw(1e-3, mask=moax.trainable_mask)`. The tree may have values of MoEParams in any place.
    """

    def mask(node):
        if not isinstance(node, MoEParams):
            return True
        masks: dict[str, Any] = {}
        for name, leaf in vars(node).items():
            trained = name not in STATE
            masks[name] = jax.tree.map(lambda _, trained=trained: trained, leaf)
        return MoEParams(**masks)

    return jax.tree.map(mask, tree, is_leaf=lambda node: isinstance(node, MoEParams))


def check_params(
    params: MoEParams[Array],
    config: MoEConfig,
    *,
    local: bool = False,
    quantized: bool = False,
) -> None:
    """Checks that params is a MoEParams of floating-point arrays, and that the config allows each of them.

    With `local` the parameters are shards inside a `shard_map`; a size may then be any divisor of the whole size. With
    `quantized` wi and wo may be None.

    Raises:
      ValueError: a parameter has a presence, a dtype or a shape that does not fit. The message names it.
    """
    check_value("params", params, MoEParams)
    optional = ("bi", "bo", "wi", "wo") if quantized else ("bi", "bo")
    for name, shape in vars(param_shapes(config, optional=True)).items():
        value = getattr(params, name)
        if value is not None:
            sizes = dict(zip(DIMS[name], shape or (), strict=False))
            check_arrays(f"params.{name} [{', '.join(DIMS[name])}]", value, local=local, **sizes)
            if shape is None:
                raise ValueError(f"params.{name} is given, but the config has no such parameter; pass None")
        elif shape is not None and name not in optional:
            raise ValueError(f"params.{name} is None; this config needs an array of shape {shape}")


def token_spec(axes: Axes, ndim: int = 2, mesh: AnyMesh | None = None) -> PartitionSpec:
    """Returns the spec of tokens [T, ...] of `ndim` dims, with T over (dp, fsdp, ep, cp).

    Tokens [B, ..., S, H] have B over (dp, fsdp, ep) and S over cp, or as `axes.tokens` says. `mesh` None means the mesh
    in force.
    """
    resolved = axes.resolve(mesh or mesh_in_force())
    dims = resolved.over(max(1, ndim - 1))
    whole_dims = [None] * min(1, ndim - 1)
    return Spec(*dims, *whole_dims)


def operand_shapes(
    config: MoEConfig, tokens: int, axes: Axes, mesh: AnyMesh, dtype: Any, param_dtype: Any
) -> tuple[MoEParams[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    """Returns the parameters and x [tokens, H] of a block on a mesh as shapes, with the shardings that it declares.

    Raises:
      ValueError: the mesh axes of a dim do not divide its size.
    """
    shape = (tokens, config.d_model)
    spec = token_spec(axes, 2, mesh)
    check_divides("tokens", shape, spec, axes.resolve(mesh or mesh_in_force()))
    shardings = named(mesh, param_specs(config, axes, mesh))
    params: dict[str, Any] = dict.fromkeys(DIMS)
    for name, param_shape in vars(param_shapes(config)).items():
        if param_shape is not None:
            sharding = getattr(shardings, name)
            dtype_of_param = param_dtype_of(name, param_dtype)
            params[name] = jax.ShapeDtypeStruct(param_shape, dtype_of_param, sharding=sharding)
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=named(mesh, spec))
    return MoEParams(**params), x


def dense_spec_on(resolved: ResolvedAxes, shape: Sequence[int]) -> PartitionSpec:
    """Returns `dense_spec` for resolved axes."""
    for names in (resolved.fsdp + resolved.ep, resolved.fsdp):
        for dim, size in enumerate(shape):
            if names and size % resolved.size(names) == 0:
                entries: list[Names] = [()] * len(shape)
                entries[dim] = names
                return Spec(*entries)
    return Spec(*[()] * len(shape))


def dense_spec(axes: Axes, shape: Sequence[int], mesh: AnyMesh | None = None) -> PartitionSpec:
    """Returns the spec of a dense weight of this shape; `mesh` None means the mesh in force.

    (fsdp, ep) split the first dim that they divide, or else fsdp splits the first dim that it divides, or else the
    weight is replicated. With fsdp=4 and ep=2, the shape (12, 16) gives PartitionSpec(None, ("fsdp", "ep")).
    """
    return dense_spec_on(axes.resolve(mesh or mesh_in_force()), shape)


def expert_specs(
    config: MoEConfig, axes: Axes, resolved: ResolvedAxes, *, check: bool = True
) -> MoEParams[PartitionSpec]:
    """Returns the spec of each parameter that a block may have; None where the config allows no such parameter.

    Raises:
      ValueError: the mesh axes of a dim do not divide its size, and `check` asks for that.
    """
    ep = resolved.ep
    tp = resolved.tp
    by_experts = axes.fsdp_dim == "experts"
    if axes.fsdp_dim == "auto":
        by_experts = config.num_experts % resolved.size(ep + resolved.fsdp) == 0
    experts = ep
    model = resolved.fsdp
    if by_experts:
        experts = ep + resolved.fsdp
        model = ()
    split: dict[str, dict[str, Any]] = {
        "wi": dict(E=experts, H=model, F=tp),
        "wo": dict(E=experts, H=model, F=tp),
        "bi": dict(E=ep, F=tp),
        "bo": dict(E=ep, F=tp),
    }
    if config.shared_d_ff:
        shared = dict(H=dense_spec_on(resolved, (config.d_model,))[0], S=tp)
        split |= dict(shared_wi=shared, shared_wo=shared)
    specs: dict[str, Any] = dict.fromkeys(DIMS)
    for name, shape in vars(param_shapes(config, optional=True)).items():
        if shape is None:
            continue
        if "L" in DIMS[name]:
            specs[name] = dense_spec_on(resolved, shape)
        else:
            entry_of_dim = split.get(name, {})
            specs[name] = Spec(*(entry_of_dim.get(dim) for dim in DIMS[name]))
        if check:
            check_divides(f"params.{name}", shape, specs[name], resolved)
    return MoEParams(**specs)


def shard_specs(
    params: MoEParams[Array], config: MoEConfig, axes: Axes, resolved: ResolvedAxes
) -> MoEParams[PartitionSpec]:
    """Returns the spec of each parameter inside a `shard_map` of the caller, who knows the shapes of the shards alone.

    ep splits the experts and tp splits F. The shape of a shard then shows whether fsdp splits the experts, H, or
    no dim. With E = 8, ep=2 and fsdp=2, a `wi` of 2 experts is split by both axes, and a `wi` of 4 experts by ep alone.

    Raises:
      ValueError: no such layout has shards of the shape of a parameter.
    """
    without_fsdp = dataclasses.replace(resolved, fsdp=())
    without_ep = dataclasses.replace(without_fsdp, ep=())
    layouts = [
        expert_specs(config, dataclasses.replace(axes, fsdp_dim=dim), resolved_axes, check=False)
        for resolved_axes in (resolved, without_fsdp, without_ep)
        for dim in ("experts", "model")
    ]
    specs: dict[str, Any] = dict.fromkeys(DIMS)
    for name, shape in vars(param_shapes(config, optional=True)).items():
        shard = getattr(params, name)
        if shard is None:
            continue
        # ep splits the experts in the first four layouts.
        num_layouts = 4 if name in BY_EXPERT else 6
        possible_specs = [getattr(layout, name) for layout in layouts[:num_layouts]]
        shard_shapes = [local_shape(shape, spec, resolved) for spec in possible_specs]
        if shard.shape not in shard_shapes:
            expected = " or ".join(sorted(set(map(str, shard_shapes))))
            raise ValueError(f"params.{name} has shape {shard.shape} inside the shard_map; a shard has {expected}")
        specs[name] = possible_specs[shard_shapes.index(shard.shape)]
    return MoEParams(**specs)


def param_specs(
    config: MoEConfig,
    axes: Axes = Axes(),
    mesh: AnyMesh | None = None,
) -> MoEParams[PartitionSpec]:
    """Returns the PartitionSpec of every parameter that `init` makes.

    Args:
      config: the sizes of the block.
      axes: the role of each mesh axis.
      mesh: the mesh; None means the mesh in force (`jax.set_mesh`).

    Returns:
      A MoEParams of specs; None where the config has no such parameter.

    Raises:
      ValueError: there is no mesh, a mesh axis of more than one device has no role, or the mesh axes of a dim do not
        divide its size.
    """
    check_value("config", config, MoEConfig)
    check_value("axes", axes, Axes)
    if mesh is None and mesh_in_force() is None:
        raise ValueError("param_specs: no mesh; pass mesh=, or call it under `with jax.set_mesh(mesh)`")
    specs = expert_specs(config, axes, axes.resolve(mesh or mesh_in_force()))
    if not config.use_bias:
        specs = dataclasses.replace(specs, bi=None, bo=None)
    return specs


def reshard_params(
    params: MoEParams[Array], declared: MoEParams[PartitionSpec], *, warn: bool = True
) -> MoEParams[Array]:
    """Returns the parameters on Explicit axes, resharded as declared where the type of a parameter names no axis.

    With `warn` the log says once that every device holds wi or wo whole.
    """
    resharded = {}
    for name, param in vars(params).items():
        if param is None or any(jax.typeof(param).sharding.spec):
            continue
        spec = getattr(declared, name)
        if warn and name in ("wi", "wo") and any(spec):
            log_once(WholeWeight.WARNING)
        resharded[name] = constrain(param, spec)
    return dataclasses.replace(params, **resharded)


def init(
    key: PRNGKeyArray | Array,
    config: MoEConfig,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
    axes: Axes = Axes(),
    initializers: Mapping[str, Initializer] | None = None,
    specs: MoEParams[Spec] | None = None,
) -> MoEParams[Array]:
    """Makes the parameters of a block: weights ~ truncated normal of variance 1 / fan-in, biases 0, factors 1.

    Args:
      key: a PRNG key.
      config: the sizes of the block, which decide the parameters and their shapes; see `MoEParams`.
      dtype: the dtype of every parameter but `router_bias`, which is float32.
      axes: the role of each mesh axis. With a mesh in force (`jax.set_mesh`) each device makes its shards alone, laid
        out by `param_specs`. The values do not depend on the mesh.
      initializers: an initializer for each of some parameters, by its name; the others have the distribution above. An
        initializer is a callable (key, shape, dtype) -> array, as in `jax.nn.initializers`. It makes one matrix or one
        bias at a time: for `wi` [E, H, G, F] it is called for each expert, and for each of gate and up, with the shape
        (H, F); for `wo` with (F, H), for `bi` with (F,), for `bo` with (H,). The router is one call with (H, E).
      specs: the layout of the parameters on the mesh in force; None means `param_specs(config, axes)`.

    Returns:
      The parameters; None where the config has no such parameter.

    Raises:
      ValueError: an argument is of the wrong kind, the mesh axes of a dim do not divide its size, `initializers` has a
        name that no parameter of the config has, or an initializer returns no array of the shape that it was asked for.
    """
    check_value("config", config, MoEConfig)
    check_value("axes", axes, Axes)
    check_value("dtype", dtype, jnp.floating)
    check_key("key", key)
    if not isinstance(initializers, Mapping | None):
        raise ValueError(f"initializers={initializers!r} must be a mapping from names of parameters to functions")
    initializer_of = dict(initializers or {})
    shapes = {name: shape for name, shape in vars(param_shapes(config)).items() if shape is not None}
    for name in initializer_of:
        if name not in shapes:
            raise ValueError(f"initializers has {name!r}; the parameters of this config are {', '.join(shapes)}")
        if not callable(initializer_of[name]):
            value = initializer_of[name]
            raise ValueError(f"initializers[{name!r}]={value!r} must be a function (key, shape, dtype) -> array")

    def make(key):
        values: dict[str, Any] = dict.fromkeys(DIMS)
        keys = jax.random.split(key, len(shapes))
        for (name, shape), param_key in zip(shapes.items(), keys, strict=True):
            param_dtype = param_dtype_of(name, dtype)
            if name in initializer_of:
                values[name] = _make_with(initializer_of[name], param_key, name, shape, param_dtype)
            elif name in CONSTANT:
                values[name] = jnp.full(shape, CONSTANT[name], param_dtype)
            else:
                fan_in = shape[1] if name in BY_EXPERT else shape[0]
                # A standard normal that is cut off at two sigma has the variance 0.7737.
                std = 1.0 / math.sqrt(fan_in * 0.7737)
                normal = jax.random.truncated_normal(param_key, -2.0, 2.0, shape)
                values[name] = (std * normal).astype(dtype)
        return MoEParams(**values)

    if specs is None and mesh_in_force() is not None:
        specs = param_specs(config, axes)
    return make_sharded(make, specs)(key)


def _make_with(initializer: Initializer, key, name: str, shape: tuple[int, ...], dtype) -> Array:
    """Makes each matrix or bias by one call: `wi` [E, H, G, F] by E G calls of (H, F), moved from [E, G, H, F]."""
    stacked = []
    if name not in ROUTER:
        stacked = [dim for dim, letter in enumerate(DIMS[name]) if letter in "EG"]
    matrix_shape = tuple(size for dim, size in enumerate(shape) if dim not in stacked)

    def make_one(key):
        value = initializer(key, matrix_shape, dtype)
        if getattr(value, "shape", None) != matrix_shape:
            kind = f"shape {value.shape}" if hasattr(value, "shape") else f"a {type(value).__name__}"
            raise ValueError(f"initializers[{name!r}] returned {kind}; it must return an array of shape {matrix_shape}")
        return jnp.asarray(value, dtype)

    if not stacked:
        return make_one(key)
    sizes = [shape[dim] for dim in stacked]
    keys = jax.random.split(key, math.prod(sizes))
    values = jax.vmap(make_one)(keys).reshape(*sizes, *matrix_shape)
    return jnp.moveaxis(values, range(len(sizes)), stacked)
