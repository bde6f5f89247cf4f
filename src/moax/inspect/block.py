"""This module lists the collectives of the MoE block on a mesh, beside those of the block without quantization."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from moax.config import MoEConfig
from moax.inspect.program import Collective, collectives, table, total_bytes, weight_gathers, weight_scatters
from moax.mesh.axes import Axes
from moax.mesh.place import named
from moax.mesh.specs import check_divides
from moax.options import Engine, Options
from moax.params import param_shapes
from moax.recipe import Recipe, Recipes
from moax.sharding import param_specs, token_spec


def inspect_block(
    config: MoEConfig,
    *,
    tokens: int,
    recipe: str | Recipe | Recipes | None = None,
    exchange: str = "auto",
    engine: Engine = "auto",
    mesh: jax.sharding.Mesh | None = None,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    param_dtype: jax.typing.DTypeLike = jnp.float32,
    axes: Axes = Axes(),
    backward: bool = True,
    grad_reduce_dtype: jax.typing.DTypeLike | None = None,
) -> list[Collective]:
    """Compiles `y, stats = moax.moe(x, params, config)` on a mesh, and lists its collectives; it runs nothing.

    They are those of a step that takes one pass over the buffers; see `moax.Options.buffer_factor`.

    Args:
      config: the block.
      tokens: rows of x [tokens, H] of the whole mesh; x is sharded over the token axes, dp, fsdp, ep and cp.
      recipe, exchange, engine, grad_reduce_dtype: the arguments of `moax.moe`.
      mesh: the mesh; None takes the mesh that `jax.set_mesh` set.
      dtype: dtype of x, and of the operands of products.
      param_dtype: dtype of the parameters, which lie as `moax.param_specs` says.
      axes: the roles of the mesh axes.
      backward: True compiles forward and backward; False compiles forward alone. Gradients have the sharding of their
        parameters, as in a training step.

    Returns:
      The collectives. Their `bytes` are those that one device sends in one execution.

    Raises:
      ValueError: there is no mesh, or the tokens do not divide over the token axes.
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
        options = Options(recipe, axes, exchange, engine=engine, grad_reduce_dtype=grad_reduce_dtype)
        return moe(x, params, config, options)

    def loss(params, x):
        y, stats = forward(params, x)
        return jnp.square(y.astype(jnp.float32)).mean() + stats.aux_loss + stats.z_loss

    step = jax.value_and_grad(loss, argnums=(0, 1))
    with jax.set_mesh(mesh):
        jitted = jax.jit(step, out_shardings=(None, (laid_out, x.sharding))) if backward else jax.jit(forward)
        return [c for c in collectives(jitted, params, x, mesh=mesh) if not c.open_loop]


@dataclasses.dataclass(frozen=True)
class Report:
    """The collectives of a block with a recipe, and without one. `moax inspect` prints `str(report)`.

    Attributes:
      recipe: the recipe.
      found: the collectives with the recipe.
      plain: the collectives without a recipe.
      axes: the roles of the mesh axes.
    """

    recipe: str | Recipe | Recipes | None
    found: list[Collective]
    plain: list[Collective]
    axes: Axes

    @property
    def gathered(self) -> int:
        """Bytes of weights and scales that one device sends over fsdp in one call."""
        return total_bytes(weight_gathers(self.found, self.axes))

    @property
    def plain_gathered(self) -> int:
        """Bytes of weights that one device sends over fsdp in one call without quantization."""
        return total_bytes(weight_gathers(self.plain, self.axes))

    @property
    def summed(self) -> list[Collective]:
        """The collectives that sum gradients of weights: `weight_scatters`, and the all-reduces over other axes."""
        names = (".wi", ".wo", ".shared_wi", ".shared_wo")
        rest = [c for c in self.found if c.kind == "all-reduce" and any(v.name.endswith(names) for v in c.reaches)]
        return [*weight_scatters(self.found, self.axes), *rest]

    def __str__(self) -> str:
        text = f"weight gathers: a device sends {self.gathered:,} bytes"
        if self.recipe is not None and self.plain_gathered:
            ratio = self.gathered / self.plain_gathered
            text += f", {ratio:.3f} of the {self.plain_gathered:,} bytes without quantization"
        if self.summed:
            kinds: dict[str, list[Collective]] = {}
            for c in self.summed:
                kinds.setdefault(f"{c.kind} {c.dtype}", []).append(c)
            parts = ", ".join(f"{total_bytes(members):,} by {kind}" for kind, members in kinds.items())
            text += f"\nweight gradients: a device sends {total_bytes(self.summed):,} bytes: {parts}"
        return f"{table(self.found)}\n\n{text}"


def report(
    config: MoEConfig, *, recipe: str | Recipe | Recipes | None = None, axes: Axes = Axes(), **options: Any
) -> Report:
    """Lists the collectives of the block with a recipe beside those of the block without one.

    Args:
      config: the block.
      recipe: the argument of `moax.moe`; None makes both sides the same.
      axes: the roles of the mesh axes.
      options: the other arguments of `inspect_block`: tokens, mesh, exchange, engine, dtype, param_dtype, backward,
        grad_reduce_dtype.

    Returns:
      A `Report`, which `moax inspect` prints. Its `gathered` and `plain_gathered` are the bytes of weights and scales
      that one device sends over fsdp in one call, with the recipe and without.

    Raises:
      ValueError: `inspect_block` raises it.
    """
    plain = inspect_block(config, recipe=None, axes=axes, **options)
    found = plain if recipe is None else inspect_block(config, recipe=recipe, axes=axes, **options)
    return Report(recipe, found, plain, axes)
