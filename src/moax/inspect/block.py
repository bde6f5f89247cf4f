"""The collectives of the MoE block on a mesh, beside those of the block without quantization."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from moax.config import MoEConfig
from moax.inspect.program import Collective, collectives, table, total_bytes, weight_gathers
from moax.mesh.axes import Axes
from moax.mesh.place import named
from moax.mesh.specs import check_divides
from moax.options import Engine
from moax.params import param_shapes
from moax.recipe import Recipe
from moax.sharding import param_specs, token_spec


def inspect_block(
    config: MoEConfig,
    *,
    tokens: int,
    recipe: str | Recipe | None = None,
    exchange: str = "auto",
    engine: Engine = "auto",
    mesh: jax.sharding.Mesh | None = None,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    param_dtype: jax.typing.DTypeLike = jnp.float32,
    axes: Axes = Axes(),
    backward: bool = True,
) -> list[Collective]:
    """The collectives of `y, stats = moax.moe(x, params, config)` on a mesh; the block is compiled, and nothing runs.

    Args:
      config: the block.
      tokens: rows of x [tokens, H] of the whole mesh; x is split over the token axes, dp, fsdp and ep.
      recipe, exchange, engine: as `moax.moe` takes them.
      mesh: the mesh; None takes the one set by `jax.set_mesh`.
      dtype: of x, and of what products see.
      param_dtype: of the parameters, which lie as `moax.param_specs` says.
      axes: which mesh axes play which role.
      backward: compile forward and backward; False compiles forward alone. Gradients have the sharding of their
        parameters, as a training step wants them.

    Returns:
      The collectives, whose `bytes` are what one device sends each time that the collective runs.

    Raises:
      ValueError: no mesh, or tokens that do not divide over the token axes.
    """
    from moax.block.layer import moe

    mesh = mesh or jax.sharding.get_mesh()
    if mesh.empty:
        raise ValueError("inspect_block: no mesh; pass mesh=, or call it under `with jax.set_mesh(mesh)`")
    of_tokens = token_spec(axes, 2, mesh)
    check_divides("tokens", (tokens, config.d_model), of_tokens, axes.on(dict(mesh.shape)))
    x = jax.ShapeDtypeStruct((tokens, config.d_model), dtype, sharding=named(mesh, of_tokens))
    laid_out = named(mesh, param_specs(config, axes, mesh))
    params = jax.tree.map(
        lambda place, shape: jax.ShapeDtypeStruct(shape, param_dtype, sharding=place), laid_out, param_shapes(config)
    )

    def forward(params, x):
        return moe(x, params, config, recipe=recipe, axes=axes, exchange=exchange, engine=engine)

    def loss(params, x):
        y, stats = forward(params, x)
        return jnp.square(y.astype(jnp.float32)).mean() + stats.aux_loss + stats.z_loss

    step = jax.value_and_grad(loss, argnums=(0, 1))
    with jax.set_mesh(mesh):
        jitted = jax.jit(step, out_shardings=(None, (laid_out, x.sharding))) if backward else jax.jit(forward)
        return collectives(jitted, params, x, mesh=mesh)


@dataclasses.dataclass(frozen=True)
class Report:
    """A block's collectives with a recipe, and without one (`plain`). `str()` is what `moax inspect` prints."""

    recipe: str | Recipe | None
    found: list[Collective]
    plain: list[Collective]
    axes: Axes

    @property
    def gathered(self) -> int:
        """Bytes of weights and scales that a device sends over fsdp."""
        return total_bytes(weight_gathers(self.found, self.axes))

    @property
    def plain_gathered(self) -> int:
        """The same without quantization."""
        return total_bytes(weight_gathers(self.plain, self.axes))

    def __str__(self) -> str:
        text = f"weights gathered: {self.gathered:,} bytes a device"
        if self.recipe is not None and self.plain_gathered:
            ratio = self.gathered / self.plain_gathered
            text += f", {self.plain_gathered:,} without quantization ({ratio:.3f} of it)"
        return f"{table(self.found)}\n\n{text}"


def report(config: MoEConfig, *, recipe: str | Recipe | None = None, axes: Axes = Axes(), **options: Any) -> Report:
    """The collectives of the block with a recipe beside those of the block without one.

    Args:
      config: the block.
      recipe: as `moax.moe` takes it; None makes both sides the same.
      axes: which mesh axes play which role.
      options: the other arguments of `inspect_block`: tokens, mesh, exchange, engine, dtype, param_dtype, backward.

    Returns:
      A `Report`, whose text is what `moax inspect` prints. Its `gathered` and `plain_gathered` are bytes of weights
      and scales that one device sends over fsdp in one call, with the recipe and without.

    Raises:
      ValueError: as `inspect_block`.
    """
    plain = inspect_block(config, recipe=None, axes=axes, **options)
    found = plain if recipe is None else inspect_block(config, recipe=recipe, axes=axes, **options)
    return Report(recipe, found, plain, axes)
