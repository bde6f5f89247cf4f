"""This module lists the collectives of the MoE block on a mesh; `moax inspect` prints them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from typing import Unpack

import jax
import jax.numpy as jnp

from moax import program
from moax.config import MoEConfig
from moax.inspect.listing import Collective, collectives, table, total_bytes, weight_gathers
from moax.mesh.specs import check_divides, named
from moax.options import OptionKeywords, Options, replace_options
from moax.params import param_shapes
from moax.sharding import param_specs, token_spec

DESCRIPTION = "Compiles one MoE block, and lists its collectives: kind, dtype, shape, mesh axes, bytes and op."
MESH = (("fsdp", 2), ("ep", 4))


def inspect_block(
    config: MoEConfig,
    tokens: int,
    options: Options = Options(),
    *,
    mesh: jax.sharding.Mesh | None = None,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    param_dtype: jax.typing.DTypeLike = jnp.float32,
    backward: bool = True,
    **keywords: Unpack[OptionKeywords],
) -> list[Collective]:
    """Compiles `y, stats = moax.moe(x, params, config)` on a mesh, and lists its collectives; it runs nothing.

    The step takes one pass over its buffers; see `moax.Options.buffer_factor`.

    Args:
      config: the block.
      tokens: rows of x [tokens, H] of the whole mesh; x is sharded over the token axes, dp, fsdp, ep and cp.
      options: how the block runs.
      mesh: the mesh; None takes the mesh that `jax.set_mesh` set.
      dtype: dtype of x, and of the operands of products.
      param_dtype: dtype of the parameters, which are sharded as `moax.param_specs` says.
      backward: True compiles forward and backward; False compiles forward alone. Gradients have the sharding of their
        parameters, as in a training step.
      **keywords: fields of `Options` that replace those of `options`.

    Returns:
      The collectives. Their `bytes` are those that one device sends in one execution.

    Raises:
      ValueError: there is no mesh, or the tokens do not divide over the token axes.
    """
    from moax.block.layer import moe

    options, mesh = replace_options("inspect_block", options, keywords), mesh or jax.sharding.get_mesh()
    if mesh.empty:
        raise ValueError("inspect_block: no mesh; pass mesh=, or call it under `with jax.set_mesh(mesh)`")
    axes = options.axes
    of_tokens, laid_out = token_spec(axes, 2, mesh), named(mesh, param_specs(config, axes, mesh))
    check_divides("tokens", (tokens, config.d_model), of_tokens, axes.resolve(dict(mesh.shape)))
    x = jax.ShapeDtypeStruct((tokens, config.d_model), dtype, sharding=named(mesh, of_tokens))
    params = jax.tree.map(
        lambda place, shape: jax.ShapeDtypeStruct(shape, param_dtype, sharding=place), laid_out, param_shapes(config)
    )

    def forward(params, x):
        return moe(x, params, config, options)

    def loss(params, x):
        y, stats = forward(params, x)
        return jnp.square(y.astype(jnp.float32)).mean() + stats.aux_loss + stats.z_loss

    step = jax.value_and_grad(loss, argnums=(0, 1))
    with jax.set_mesh(mesh):
        jitted = jax.jit(step, out_shardings=(None, (laid_out, x.sharding))) if backward else jax.jit(forward)
        return [c for c in collectives(jitted, params, x, mesh=mesh) if not c.open_loop]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `moax inspect` to `parser`."""
    program.add_execution(parser, mesh=",".join(f"{n}={s}" for n, s in MESH), dtypes=("float32", "bfloat16"))
    program.add_sizes(parser, d_model=1024, d_ff=2048, experts=8, top_k=2)
    add = parser.add_argument
    add("--tokens", type=int, default=4096, metavar="T", help="tokens of the whole mesh (default: %(default)s)")
    add("--forward-only", action="store_true", help="leave the backward pass out")
    add("--json", action="store_true", help="print JSON, for programs")


def run(args: argparse.Namespace) -> int:
    """Compiles the block on as many emulated devices as the mesh has, and prints its collectives. Returns 0."""
    sizes = args.mesh or MESH
    program.emulate(math.prod(size for _, size in sizes) if args.cpu_devices is None else args.cpu_devices)
    config = program.read_sizes(args)
    options = Options(
        recipe=None if args.recipe == "none" else args.recipe,
        exchange=args.exchange or "auto",
        engine=args.engine or "auto",
        grad_reduce_dtype=args.grad_reduce_dtype,
    )
    mesh, dtype = program.mesh_over_devices(sizes), args.dtype or "bfloat16"
    how = dict(mesh=mesh, dtype=dtype, backward=not args.forward_only)
    found = inspect_block(config, args.tokens, options, **how)
    plain = inspect_block(config, args.tokens, options, **how, recipe=None) if options.recipe else found
    sent, unquantized = (total_bytes(weight_gathers(of)) for of in (found, plain))
    if args.json:
        rows = [dataclasses.asdict(c) | {at: [v.name for v in getattr(c, at)] for at in ("carries", "reaches")}
                for c in found]  # fmt: skip
        weights = {"gathered": sent, "gathered_unquantized": unquantized}
        print(json.dumps({"collectives": rows, "weights": weights}, indent=2))
        return 0
    ratio = f", {sent / unquantized:.3f} of the {unquantized:,} bytes without quantization" if unquantized else ""
    print(f"{table(found)}\n\nweight gathers: a device sends {sent:,} bytes{ratio if options.recipe else ''}")
    return 0
