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
from moax.mesh.axes import AnyMesh, Axes, ResolvedAxes
from moax.mesh.specs import (
    Spec,
    WholeWeight,
    check_divides,
    constrain,
    local_shape,
    make_sharded,
    mesh_in_force,
    named,
)  # fmt: skip
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
ROUTER = ("router", "router_bias", "logits_bias", "expert_scale")  # the parameters that belong to no single expert
# State, which no optimizer changes. It is float32: a narrower dtype rounds the small steps of an update away.
STATE = ("router_bias",)
CONSTANT = dict(router_bias=0.0, logits_bias=0.0, bi=0.0, bo=0.0, expert_scale=1.0)  # what `init` makes them of


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
            named = [name for name in self.names(param) if name is not None]
            if len(set(named)) < len(named):
                raise ValueError(f"LogicalAxes: {param} has the names {named}; each dim needs a name of its own")

    def names(self, param: str) -> tuple[str | None, ...]:
        """Returns the names of the dims of a parameter: `names("wo")` is `("exp", "mlp", "embed")`."""
        return tuple(None if n == "E" and param in ROUTER else getattr(self, n) for n in DIMS[param])


def param_shapes(config: MoEConfig, *, optional: bool = False) -> MoEParams[tuple[int, ...]]:
    """Returns the global shape of each parameter that `init` makes; None where the config has no such parameter.

    With `optional` both expert biases have a shape wherever the config allows them.
    """
    c, biases = config, config.weights_at != "input" if optional else config.use_bias
    flags = dict(router_bias=c.router.bias, logits_bias=c.router.logits_bias, bi=biases, bo=biases)
    flags |= dict(shared_gate=c.shared_gate, expert_scale=c.router.expert_scale)
    sizes = dict(E=c.num_experts, H=c.d_model, F=c.d_ff, G=c.gates, S=c.shared_d_ff, L=c.d_latent or 0)
    shapes: dict[str, Any] = {}
    for name, letters in DIMS.items():
        own = sizes | dict(H=c.d_rows) if name in BY_EXPERT else sizes
        shape = tuple(own[letter] for letter in letters)
        shapes[name] = shape if flags.get(name, 0 not in shape) else None
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
        return MoEParams(**{n: jax.tree.map(lambda _, n=n: n not in STATE, leaf) for n, leaf in vars(node).items()})

    return jax.tree.map(mask, tree, is_leaf=lambda node: isinstance(node, MoEParams))


def check_params(params: MoEParams[Array], config: MoEConfig, *, local: bool = False, quantized: bool = False) -> None:
    """Checks that params is a MoEParams of floating-point arrays, and that the config allows each of them.

    With `local` the parameters are shards inside a `shard_map`; a size may then be any divisor of the whole size. With
    `quantized` wi and wo may be None.

    Raises:
      ValueError: a parameter has a presence, a dtype or a shape that does not fit. The message names it.
    """
    check_value("params", params, MoEParams)
    optional = ("bi", "bo", "wi", "wo") if quantized else ("bi", "bo")
    for name, want in vars(param_shapes(config, optional=True)).items():
        value, sizes = getattr(params, name), dict(zip(DIMS[name], want or (), strict=False))
        if value is not None:
            check_arrays(f"params.{name} [{', '.join(DIMS[name])}]", value, local=local, **sizes)
            if want is None:
                raise ValueError(f"params.{name} is given, but the config has no such parameter; pass None")
        elif want is not None and name not in optional:
            raise ValueError(f"params.{name} is None; this config needs an array of shape {want}")


def token_spec(axes: Axes, ndim: int = 2, mesh: AnyMesh | None = None) -> PartitionSpec:
    """Returns the spec of tokens [T, ...] of `ndim` dims, with T over (dp, fsdp, ep, cp).

    Tokens [B, ..., S, H] have B over (dp, fsdp, ep) and S over cp, or as `axes.tokens` says. `mesh` None means the mesh
    in force.
    """
    return Spec(*axes.resolve(mesh or mesh_in_force()).over(max(1, ndim - 1)), *[None] * min(1, ndim - 1))


def operand_shapes(
    config: MoEConfig, tokens: int, axes: Axes, mesh: AnyMesh, dtype: Any, param_dtype: Any
) -> tuple[MoEParams[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
    """Returns the parameters and x [tokens, H] of a block on a mesh as shapes, with the shardings that it declares.

    Raises:
      ValueError: the mesh axes of a dim do not divide its size.
    """
    spec, shape = token_spec(axes, 2, mesh), (tokens, config.d_model)
    check_divides("tokens", shape, spec, axes.resolve(mesh or mesh_in_force()))
    at, shapes = named(mesh, param_specs(config, axes, mesh)), param_shapes(config)
    of_name = {
        name: jax.tree.map(lambda _, n=name: param_dtype_of(n, param_dtype), at) for name, at in vars(at).items()
    }
    params = jax.tree.map(lambda p, of, to: jax.ShapeDtypeStruct(of, to, sharding=p), at, shapes, MoEParams(**of_name))
    return params, jax.ShapeDtypeStruct(shape, dtype, sharding=named(mesh, spec))


def dense_spec_on(resolved: ResolvedAxes, shape: Sequence[int]) -> PartitionSpec:
    """Returns `dense_spec` for resolved axes."""
    for names in (resolved.fsdp + resolved.ep, resolved.fsdp):
        for dim, size in enumerate(shape):
            if names and size % resolved.size(names) == 0:
                return Spec(*[()] * dim, names, *[()] * (len(shape) - dim - 1))
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
    c, ep, tp = config, resolved.ep, resolved.tp
    whole = c.num_experts % resolved.size(ep + resolved.fsdp) == 0
    by_experts = axes.fsdp_dim == "experts" or (axes.fsdp_dim == "auto" and whole)
    experts, model = (ep + resolved.fsdp, ()) if by_experts else (ep, resolved.fsdp)
    split = dict.fromkeys(("wi", "wo"), dict(E=experts, H=model, F=tp)) | dict.fromkeys(("bi", "bo"), dict(E=ep, F=tp))
    if c.shared_d_ff:
        split |= dict.fromkeys(("shared_wi", "shared_wo"), dict(H=dense_spec_on(resolved, (c.d_model,))[0], S=tp))
    specs: dict[str, Any] = dict.fromkeys(DIMS)
    for name, shape in vars(param_shapes(config, optional=True)).items():
        if shape is not None:
            dims = DIMS[name]
            specs[name] = dense_spec_on(resolved, shape) if "L" in dims else Spec(*map(split.get(name, {}).get, dims))
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
    whole = dataclasses.replace(resolved, fsdp=())
    layouts = [
        expert_specs(config, dataclasses.replace(axes, fsdp_dim=dim), r, check=False)
        for r in (resolved, whole, dataclasses.replace(whole, ep=()))
        for dim in ("experts", "model")
    ]
    found: dict[str, Any] = dict.fromkeys(DIMS)
    for name, shape in vars(param_shapes(config, optional=True)).items():
        shard = getattr(params, name)
        if shard is None:
            continue
        # The experts are over ep in the first four layouts.
        specs = [getattr(layout, name) for layout in layouts[: 4 if name in BY_EXPERT else 6]]
        shards = [local_shape(shape, s, resolved) for s in specs]
        if shard.shape not in shards:
            wanted = " or ".join(sorted(set(map(str, shards))))
            raise ValueError(f"params.{name} has shape {shard.shape} inside the shard_map; a shard has {wanted}")
        found[name] = specs[shards.index(shard.shape)]
    return MoEParams(**found)


def param_specs(config: MoEConfig, axes: Axes = Axes(), mesh: AnyMesh | None = None) -> MoEParams[PartitionSpec]:
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
    if mesh is None and mesh_in_force() is None:
        raise ValueError("param_specs: no mesh; pass mesh=, or call it under `with jax.set_mesh(mesh)`")
    specs = expert_specs(config, axes, axes.resolve(mesh or mesh_in_force()))
    return specs if config.use_bias else dataclasses.replace(specs, bi=None, bo=None)


def reshard_params(
    params: MoEParams[Array], declared: MoEParams[PartitionSpec], *, warn: bool = True
) -> MoEParams[Array]:
    """Returns the parameters on Explicit axes, resharded as declared where the type of a parameter names no axis.

    With `warn` the log says once that every device holds wi or wo whole.
    """
    given = {name: p for name, p in vars(params).items() if p is not None and not any(jax.typeof(p).sharding.spec)}
    if warn and any(any(getattr(declared, name)) for name in given if name in ("wi", "wo")):
        log_once(WholeWeight.WARNING)
    return dataclasses.replace(params, **{name: constrain(p, getattr(declared, name)) for name, p in given.items()})


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
    given = dict(initializers or {})
    shapes = {name: shape for name, shape in vars(param_shapes(config)).items() if shape is not None}
    for name in given:
        if name not in shapes:
            raise ValueError(f"initializers has {name!r}; the parameters of this config are {', '.join(shapes)}")

    def make(key):
        values: dict[str, Any] = dict.fromkeys(DIMS)
        for (name, shape), own in zip(shapes.items(), jax.random.split(key, len(shapes)), strict=True):
            if name in given:
                values[name] = _make_with(given[name], own, name, shape, param_dtype_of(name, dtype))
            elif name in CONSTANT:
                values[name] = jnp.full(shape, CONSTANT[name], param_dtype_of(name, dtype))
            else:
                fan_in = shape[1 if name in BY_EXPERT else 0]
                # A standard normal that is cut off at two sigma has the variance 0.7737.
                std = 1.0 / math.sqrt(fan_in * 0.7737)
                values[name] = (std * jax.random.truncated_normal(own, -2.0, 2.0, shape)).astype(dtype)
        return MoEParams(**values)

    if specs is None and mesh_in_force() is not None:
        specs = param_specs(config, axes)
    return make_sharded(make, specs)(key)


def _make_with(initializer: Initializer, key, name: str, shape: tuple[int, ...], dtype) -> Array:
    """Makes each matrix or bias by one call: `wi` [E, H, G, F] by E G calls of (H, F), moved from [E, G, H, F]."""
    stacked = [dim for dim, letter in enumerate(DIMS[name]) if letter in "EG" and name not in ROUTER]
    wanted = tuple(size for dim, size in enumerate(shape) if dim not in stacked)

    def make_one(key):
        made = initializer(key, wanted, dtype)
        if getattr(made, "shape", None) != wanted:
            what = f"shape {made.shape}" if hasattr(made, "shape") else f"a {type(made).__name__}"
            raise ValueError(f"initializers[{name!r}] returned {what}; it must return an array of shape {wanted}")
        return jnp.asarray(made, dtype)

    if not stacked:
        return make_one(key)
    sizes = [shape[dim] for dim in stacked]
    values = jax.vmap(make_one)(jax.random.split(key, math.prod(sizes))).reshape(*sizes, *wanted)
    return jnp.moveaxis(values, range(len(sizes)), stacked)
