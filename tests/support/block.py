"""The whole block as a program on a mesh, and what it must give: the numbers of `support.oracle.block`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import moax
from support.compare import rel_norm
from support.inputs import make_params, random
from support.meshes import TOKENS, make_mesh, put, size, spec
from support.oracle.block import Layout, Result
from support.oracle.block import block as block_by_numpy
from support.programs import Program, program

# float32: sums in another order; on a mesh, over devices too. Quantized: against matmuls of rounded operands, where a
# value between two values of the format may be rounded to the other one.
ONE_DEVICE, MESH, QUANTIZED = 2e-6, 5e-6, 3e-3
BASE = moax.MoEConfig(
    32,
    48,
    8,
    2,
    use_bias=True,
    shared_d_ff=16,
    router=moax.RouterConfig(aux_loss=1e-2, z_loss=1e-3),
)
B, L = 16, 6
BY_EXPERT = ("wi", "wo", "bi", "bo")


def make_x(config: moax.MoEConfig, *leading: int, rows_differ: bool = False) -> jax.Array:
    """Returns tokens [B, L, H]. With rows_differ their sizes are from 2^-4 to 2^3, so that a scale of another row
    shows."""
    x = random(7, *(leading or (B, L)), config.d_model)
    if rows_differ:
        x = x * np.exp2(np.arange(x[..., 0].size) % 8 - 4.0).reshape(*x.shape[:-1], 1).astype(np.float32)
    return jnp.asarray(x)


def cotangent(shape: tuple[int, ...]) -> np.ndarray:
    """Returns the cotangent of y: another weight for each of its elements."""
    return np.cos(np.arange(np.prod(shape), dtype=np.float32)).reshape(shape)


def loss_of(y, stats):
    """Returns a loss that gives every output its own weight, and the losses of the router theirs."""
    return jnp.vdot(y.astype(jnp.float32), jnp.asarray(cotangent(y.shape))), stats.aux_loss + stats.z_loss


def layout_of(mesh: str) -> Layout:
    """Returns what of the mesh of this name reaches the numbers of a quantized block; "" is one device."""
    if not mesh:
        return Layout()
    return Layout(groups=size(mesh, "dp", "fsdp"), shards=size(mesh, *TOKENS), tp=size(mesh, "tp"))


@functools.cache
def expected(config: moax.MoEConfig, recipe=None, mesh: str = "") -> Result:
    """Returns the result and every gradient, for `make_x`, `make_params` and `loss_of`."""
    x = np.asarray(make_x(config, rows_differ=recipe is not None)).reshape(-1, config.d_model)
    layout = layout_of(mesh if recipe is not None else "")
    return block_by_numpy(
        x,
        make_params(config),
        config,
        cotangent(x.shape),
        recipe,
        layout=layout,
        d_losses=(1, 1),
    )


def block(
    way: str,
    mesh: str,
    config: moax.MoEConfig = BASE,
    *,
    fsdp_dim: str = "auto",
    exchange: str = "all_gather",
    recipe=None,
    **options,
) -> Program:
    """Returns the block with every gradient: ((y, stats), (dx, dparams)). way "none" is one device."""
    axes = moax.Axes(fsdp_dim=fsdp_dim)
    x = make_x(config, rows_differ=recipe is not None)
    params = make_params(config)
    options |= dict(axes=axes, exchange=exchange, recipe=recipe)

    def graded(fn, x, params):
        def total(x, params):
            out = fn(x, params)
            return sum(loss_of(*out)), out

        grads, outputs = jax.grad(total, argnums=(0, 1), has_aux=True)(x, params)
        return outputs, grads

    def anywhere(x, params, engine):
        return graded(lambda x, p: moax.moe(x, p, config, engine=engine, **options), x, params)

    if way == "none":
        return program(way, mesh, anywhere, (x, params))
    on = make_mesh(mesh)
    tokens = spec(mesh, TOKENS)
    weights = moax.param_specs(config, axes, mesh=on)
    if not way.startswith("user"):
        return program(way, mesh, anywhere, (x, params), (tokens, weights))
    mapped = jax.shard_map(
        lambda x, p: moax.moe(x, p, config, **options), mesh=on, in_specs=(tokens, weights),
        out_specs=(tokens, PartitionSpec()), check_vma=way == "user_vma",
    )  # fmt: skip
    return Program(
        jax.jit(functools.partial(graded, mapped)),
        put(on, (tokens, weights), (x, params)),
        on,
    )


def check_outputs(got, want: Result, limit: float) -> None:
    """Checks y to `limit`, the losses to 5e-6, and the counts exactly."""
    y, stats = got
    error = rel_norm(np.asarray(y).reshape(want.y.shape), want.y)
    assert error <= limit, f"y: {error:.2e} > {limit:.0e}"
    for name in ("aux_loss", "z_loss"):
        np.testing.assert_allclose(
            getattr(stats, name),
            want.stats[name],
            rtol=5e-6,
            atol=1e-12,
            err_msg=name,
        )
    np.testing.assert_array_equal(stats.tokens_per_expert, want.stats["tokens_per_expert"])
    assert int(stats.dropped) == want.stats["dropped"], f"dropped {int(stats.dropped)}, not {want.stats['dropped']}"


def check_gradients(dx, dparams: moax.MoEParams, want: Result, limit: float) -> None:
    """Checks every gradient to `limit`, those of experts expert by expert, and that it has the dtype of its
    parameter."""
    error = rel_norm(np.asarray(dx).reshape(want.dx.shape), want.dx)
    assert error <= limit, f"dx: {error:.2e} > {limit:.0e}"
    for name, value in want.dparams.items():
        got = getattr(dparams, name)
        assert got.dtype == jnp.float32, f"d {name} is {got.dtype}"
        error = rel_norm(got, value, per=0 if name in BY_EXPERT else None)
        assert error <= limit, f"d {name}: {error:.2e} > {limit:.0e}"


def check(got, want: Result, limit: float) -> None:
    """Checks what `block` returns: outputs and gradients."""
    outputs, (dx, dparams) = got
    check_outputs(outputs, want, limit)
    check_gradients(dx, dparams, want, limit)
