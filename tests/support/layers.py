"""The MoE layer of each flax library, as tests ask both: its parameters, the metadata of each by name, and its call as
a function of parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx

import moax
from moax.linen import MoEBlock
from moax.nnx import MoE
from moax.params import DIMS

KEY = jax.random.key(3)


class NnxLayer:
    """`moax.nnx.MoE`. With `shapes` it is traced for its shapes alone."""

    key = nnx.Rngs(0).params()  # of which the parameters are made

    def __init__(self, config: moax.MoEConfig, shapes: bool = False, **options):
        def make():
            return MoE(config, rngs=nnx.Rngs(0), **options)

        self.module: Any = nnx.eval_shape(make) if shapes else make()

    @property
    def state(self) -> nnx.State:
        return nnx.state(self.module)

    @property
    def arrays(self) -> dict[str, jax.Array]:
        return {name: variable.get_value() for name, variable in self.state.items()}

    @property
    def trained(self) -> set[str]:
        return set(nnx.state(self.module, nnx.Param).keys())

    def labels(self) -> dict:
        return {name: v.get_value() for name, v in nnx.get_partition_spec(self.state).items()}

    def shardings(self, mesh: jax.sharding.Mesh) -> dict:
        return {name: v.get_value() for name, v in nnx.get_named_sharding(self.state, mesh).items()}

    def __call__(self, params: moax.MoEParams, x, **arguments):
        graph, state = nnx.split(self.module)
        values = jax.tree.leaves({name: getattr(params, name) for name in state.keys()})
        return nnx.merge(graph, jax.tree.structure(state).unflatten(values))(x, **arguments)

    def drop(self, name: str) -> None:
        setattr(self.module, name, None)

    def quantize(self) -> moax.QuantizedParams:
        return self.module.quantize()


class LinenLayer:
    """`moax.linen.MoEBlock` and its variables, with boxes where it makes some."""

    key = KEY

    def __init__(self, config: moax.MoEConfig, shapes: bool = False, **options):
        x = jnp.zeros((8, config.d_model))
        self.module: Any = MoEBlock(config, **options)
        # Jitted, so that the forward pass of `init`, which nobody asks for, is not run.
        self.variables = (jax.eval_shape if shapes else lambda f, *a: jax.jit(f)(*a))(
            self.module.init,
            KEY,
            x,
        )

    @property
    def arrays(self) -> dict[str, jax.Array]:
        return by_name(linen.unbox(self.variables))

    @property
    def trained(self) -> set[str]:
        return set(self.variables["params"])

    def labels(self) -> dict:
        return by_name(linen.get_partition_spec(self.variables))

    def shardings(self, mesh: jax.sharding.Mesh) -> dict:
        return by_name(linen.get_sharding(self.variables, mesh))

    def __call__(self, params: moax.MoEParams, x, **arguments):
        values = {c: {name: getattr(params, name) for name in names} for c, names in self.variables.items()}
        return self.module.apply(linen.meta.replace_boxed(self.variables, values), x, **arguments)

    def drop(self, name: str) -> None:
        self.variables = {
            **self.variables,
            "params": {n: v for n, v in self.variables["params"].items() if n != name},
        }

    def quantize(self) -> moax.QuantizedParams:
        return self.module.apply(self.variables, method="quantize")


LAYERS = {"nnx": NnxLayer, "linen": LinenLayer}


def stack(config: moax.MoEConfig, layers: int, transform=None, **options):
    """Returns a function of rngs that makes so many layers of nnx by `nnx.vmap`."""
    make = nnx.vmap(
        lambda rngs: MoE(config, rngs=rngs, **options),
        in_axes=0,
        out_axes=0,
        **(transform or {}),
    )
    return nnx.split_rngs(splits=layers)(make)


class Stack(linen.Module):
    """x + block(x), `layers` times, each time with remat, by `linen.scan`, whose new dim has the name `partition`."""

    config: moax.MoEConfig
    layers: int
    partition: str | None = None
    logical_axes: moax.LogicalAxes | None = None

    @linen.compact
    def __call__(self, x):
        def body(block, x, _):
            y, stats = block(x)
            return x + y, stats

        scan = linen.scan(
            linen.remat(body),
            variable_axes={"params": 0, "moax_state": 0},
            split_rngs={"params": True},
            length=self.layers,
            metadata_params={linen.PARTITION_NAME: self.partition},
        )
        return scan(MoEBlock(self.config, name="moe", logical_axes=self.logical_axes), x, None)


def by_name(variables) -> dict:
    """Returns the variables of linen without their collections."""
    return {name: value for collection in variables.values() for name, value in collection.items()}


def params_of(arrays: dict[str, jax.Array]) -> moax.MoEParams:
    return moax.MoEParams(**{name: arrays.get(name) for name in DIMS})
