"""`init` makes the parameters of a block; on a mesh each device makes its own shards."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from moax.config import MoEConfig
from moax.mesh.axes import Axes
from moax.mesh.place import make_sharded
from moax.mesh.specs import mesh_sizes
from moax.params import MoEParams, param_shapes, params_by_name
from moax.sharding import param_specs


def init(
    key: PRNGKeyArray | Array, config: MoEConfig, *, dtype: jax.typing.DTypeLike = jnp.float32, axes: Axes = Axes()
) -> MoEParams[Array]:
    """Makes the parameters of a block: weights ~ truncated normal of variance 1 / fan-in, biases 0.

    Args:
      key: a PRNG key.
      config: the sizes of the block, which decide the parameters and their shapes; see `MoEParams`.
      dtype: the dtype of every parameter.
      axes: the role of each mesh axis. With a mesh in force (`jax.set_mesh`) each device makes its shards alone, laid
        out by `param_specs`. The values do not depend on the mesh.

    Returns:
      The parameters; None where the config has no such parameter.

    Raises:
      ValueError: the mesh axes of a dim do not divide its size.
    """
    shapes = param_shapes(config)
    names = [f.name for f in dataclasses.fields(MoEParams) if getattr(shapes, f.name) is not None]
    fan_in = dict(router=config.d_model, wi=config.d_model, wo=config.d_ff)
    fan_in |= dict(shared_wi=config.d_model, shared_wo=config.shared_d_ff)

    def make(key):
        keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
        values = {}
        for name in names:
            shape = getattr(shapes, name)
            if name in fan_in:
                # A standard normal that is cut off at two sigma has the variance 0.7737.
                std = 1.0 / math.sqrt(fan_in[name] * 0.7737)
                values[name] = (std * jax.random.truncated_normal(keys[name], -2.0, 2.0, shape)).astype(dtype)
            else:
                values[name] = jnp.zeros(shape, dtype)
        return params_by_name({f.name: values.get(f.name) for f in dataclasses.fields(MoEParams)})

    return make_sharded(make, param_specs(config, axes) if mesh_sizes() else None)(key)
