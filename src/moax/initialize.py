"""`init` makes the parameters of a block; on a mesh each device makes its own shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from moax.checks import check_float_dtype, check_key, check_kind
from moax.config import MoEConfig
from moax.mesh.axes import Axes
from moax.mesh.specs import Spec, make_sharded, mesh_in_force
from moax.params import BY_EXPERT, DIMS, ROUTER, MoEParams, param_shapes
from moax.sharding import param_specs

Initializer = Callable[..., Array]
CONSTANT = dict(router_bias=0.0, logits_bias=0.0, bi=0.0, bo=0.0, expert_scale=1.0)


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
      dtype: the dtype of every parameter.
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
    check_kind("config", config, MoEConfig)
    check_kind("axes", axes, Axes)
    check_float_dtype("dtype", dtype)
    check_key("key", key)
    shapes, given = param_shapes(config), dict(initializers or {})
    names = [name for name in DIMS if getattr(shapes, name) is not None]
    for name in given:
        if name not in names:
            raise ValueError(f"initializers has {name!r}; the parameters of this config are {', '.join(names)}")

    def make(key):
        keys, values = jax.random.split(key, len(names)), dict.fromkeys(DIMS)
        for name, own in zip(names, keys, strict=True):
            shape = getattr(shapes, name)
            if name in given:
                values[name] = _make_with(given[name], own, name, shape, dtype)
            elif name in CONSTANT:
                values[name] = jnp.full(shape, CONSTANT[name], dtype)
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
    """Makes each matrix or bias by one call: `wi` [E, H, G, F] by E G calls of (H, F), transposed from [E, G, H, F]."""
    letters = DIMS[name]
    stacked = [dim for dim, letter in enumerate(letters) if letter in "EG" and name not in ROUTER]
    core = [dim for dim in range(len(letters)) if dim not in stacked]
    wanted = tuple(shape[dim] for dim in core)

    def make_one(key):
        made = initializer(key, wanted, dtype)
        if getattr(made, "shape", None) != wanted:
            what = f"shape {made.shape}" if hasattr(made, "shape") else f"a {type(made).__name__}"
            raise ValueError(f"initializers[{name!r}] returned {what}; it must return an array of shape {wanted}")
        return jnp.asarray(made, dtype)

    if not stacked:
        return make_one(key)
    calls = math.prod(shape[dim] for dim in stacked)
    values = jax.vmap(make_one)(jax.random.split(key, calls))
    values = values.reshape(*(shape[dim] for dim in stacked), *wanted)
    order = [*stacked, *core]
    return values.transpose([order.index(dim) for dim in range(len(letters))])
