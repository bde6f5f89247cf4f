"""This module lists the collectives of the MoE block on a mesh; `moax inspect` prints them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from typing import Any

import jax
import jax.numpy as jnp

from moax import program
from moax.config import MoEConfig
from moax.inspect.listing import Collective, collectives, table, total_bytes, weight_gathers, weight_scatters
from moax.mesh.axes import Axes
from moax.mesh.specs import check_divides, named
from moax.options import Engine, Options
from moax.params import param_shapes
from moax.recipe import Recipe, Recipes
from moax.sharding import param_specs, token_spec

DESCRIPTION = "Compiles one MoE block, and lists its collectives: kind, dtype, shape, mesh axes, bytes and op."
MESH = (("fsdp", 2), ("ep", 4))


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

    The step takes one pass over its buffers; see `moax.Options.buffer_factor`.

    Args:
      config: the block.
      tokens: rows of x [tokens, H] of the whole mesh; x is sharded over the token axes, dp, fsdp, ep and cp.
      recipe, exchange, engine, axes, grad_reduce_dtype: see `moax.Options`.
      mesh: the mesh; None takes the mesh that `jax.set_mesh` set.
      dtype: dtype of x, and of the operands of products.
      param_dtype: dtype of the parameters, which are sharded as `moax.param_specs` says.
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
    check_divides("tokens", (tokens, config.d_model), of_tokens, axes.resolve(dict(mesh.shape)))
    x = jax.ShapeDtypeStruct((tokens, config.d_model), dtype, sharding=named(mesh, of_tokens))
    laid_out = named(mesh, param_specs(config, axes, mesh))
    params = jax.tree.map(
        lambda place, shape: jax.ShapeDtypeStruct(shape, param_dtype, sharding=place), laid_out, param_shapes(config)
    )
    options = Options(recipe, axes, exchange, engine=engine, grad_reduce_dtype=grad_reduce_dtype)

    def forward(params, x):
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
    """The collectives of a block with a recipe, `found`, and without one, `plain`. `str(report)` is their table."""

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
        names = (".wi", ".wo", ".shared_wi", ".shared_wo", ".latent_down", ".latent_up")
        rest = [c for c in self.found if c.kind == "all-reduce" and any(v.name.endswith(names) for v in c.reaches)]
        return [*weight_scatters(self.found, self.axes), *rest]

    def __str__(self) -> str:
        text = f"weight gathers: a device sends {self.gathered:,} bytes"
        if self.recipe is not None and self.plain_gathered:
            ratio = self.gathered / self.plain_gathered
            text += f", {ratio:.3f} of the {self.plain_gathered:,} bytes without quantization"
        kinds: dict[str, int] = {}
        for c in self.summed:
            kind = f"{c.kind} {c.dtype}"
            kinds[kind] = kinds.get(kind, 0) + total_bytes([c])
        if kinds:
            parts = ", ".join(f"{sent:,} by {kind}" for kind, sent in kinds.items())
            text += f"\nweight gradients: a device sends {sum(kinds.values()):,} bytes: {parts}"
        return f"{table(self.found)}\n\n{text}"


def report(
    config: MoEConfig, *, recipe: str | Recipe | Recipes | None = None, axes: Axes = Axes(), **options: Any
) -> Report:
    """Lists the collectives of the block with a recipe beside those of the block without one.

    Args:
      config, recipe, axes, options: the arguments of `inspect_block`; a recipe of None makes both sides the same.

    Returns:
      The report, which `moax inspect` prints.

    Raises:
      ValueError: `inspect_block` raises it.
    """
    plain = inspect_block(config, recipe=None, axes=axes, **options)
    found = plain if recipe is None else inspect_block(config, recipe=recipe, axes=axes, **options)
    return Report(recipe, found, plain, axes)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `moax inspect` to `parser`."""
    program.add_execution(parser, mesh=",".join(f"{n}={s}" for n, s in MESH), dtypes=("float32", "bfloat16"))
    for name, default, metavar, what in (
        ("d-model", 1024, "H", "model width"),
        ("d-ff", 2048, "F", "width of an expert"),
        ("experts", 8, "E", "number of experts"),
        ("top-k", 2, "K", "experts of a token"),
        ("tokens", 4096, "T", "tokens of the whole mesh"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar=metavar, help=f"{what} (default: {default})"
        )
    parser.add_argument("--forward-only", action="store_true", help="leave the backward pass out")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Compiles the block on as many emulated devices as the mesh has, and prints its collectives. Returns 0."""
    sizes = args.mesh or MESH
    program.emulate(math.prod(size for _, size in sizes) if args.cpu_devices is None else args.cpu_devices)
    made = report(
        MoEConfig(d_model=args.d_model, d_ff=args.d_ff, num_experts=args.experts, top_k=args.top_k),
        tokens=args.tokens,
        recipe=None if args.recipe == "none" else args.recipe,
        exchange=args.exchange or "auto",
        engine=args.engine or "auto",
        mesh=program.mesh_over_devices(sizes),
        dtype=args.dtype or "bfloat16",
        backward=not args.forward_only,
        grad_reduce_dtype=args.grad_reduce_dtype,
    )
    found = [dataclasses.asdict(c) | {at: [v.name for v in getattr(c, at)] for at in ("carries", "reaches")}
             for c in made.found]  # fmt: skip
    weights = {"gathered": made.gathered, "gathered_unquantized": made.plain_gathered}
    print(json.dumps({"collectives": found, "weights": weights}, indent=2) if args.json else made)
    return 0
