"""`python -m benchmarks gather`: the gather of a block's weights, over a mesh of all devices as fsdp.

    none     gathers each shard in bf16
    others   quantizes each shard, and gathers bytes and scales

Times are the wall clock of back-to-back calls; bytes are those that a device receives. The program is
`gather_weight` of the forward pass. With the Hopper kernels, quantizing FP8 weights transposes them too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks.block.block import Block
from benchmarks.report import HOPPER, Row, why
from benchmarks.timing import Repeats, call_time
from moax.block.plan import weight_specs
from moax.initialize import init
from moax.kernels import select_kernels
from moax.mesh.axes import Axes
from moax.mesh.devices import make_mesh
from moax.mesh.specs import Spec, named
from moax.ops.weights import find_layout, gather_shard
from moax.recipe import get_recipes
from moax.sharding import expert_specs

RECIPES = ("none", "fp8_block", "mxfp8", "fp8_tensor")
DTYPE = jnp.bfloat16


def rows(blocks: list[Block], repeats: Repeats) -> Iterator[Row]:
    """Yields a row for each block and recipe; `extra["speedup"]` is the time of bf16 over the time of the recipe."""
    if jax.device_count() < 2:
        raise ValueError("gather needs two devices or more; JAX has one")
    mesh = make_mesh({"fsdp": jax.device_count()})
    for block in blocks:
        plain = None
        for recipe in RECIPES:
            row = _row(block, recipe, mesh, repeats)
            plain = row.us if recipe == "none" else plain
            if row.us and plain:
                row.extra["speedup"] = plain / row.us
            yield row


def gather_weights(block: Block, recipe: str, mesh: Mesh) -> tuple[Callable, tuple[jax.Array, jax.Array], str]:
    """Returns (the jitted gather, the sharded wi and wo, the name of the kernels that quantize)."""
    config, axes = block.config, Axes().resolve(mesh.shape)
    specs = expert_specs(config, Axes(), axes)
    kernels = select_kernels("auto", DTYPE, d_model=config.d_model, d_ff=config.d_ff)
    form = get_recipes(None if recipe == "none" else recipe)
    weights = weight_specs(specs, axes, form, kernels, DTYPE)

    def local(*shards):
        pairs = zip(weights, shards, strict=True)
        return tuple(gather_shard(weight, find_layout(weight), w, None, "rows") for weight, w in pairs)

    ins = (specs.wi, specs.wo)
    gather = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=ins, out_specs=Spec(), check_vma=False))

    def draw(key):
        params = init(key, config, dtype=DTYPE)
        return params.wi, params.wo

    shards = jax.jit(draw, out_shardings=named(mesh, ins))(jax.random.key(0))
    return gather, shards, kernels


def received_bytes(gather: Callable, shards: tuple[jax.Array, ...], devices: int) -> int:
    """Returns the bytes of data and scales that a device receives: all but its own share."""
    leaves = jax.tree.leaves(jax.eval_shape(gather, *shards))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves) * (devices - 1) // devices


def _row(block: Block, recipe: str, mesh: Mesh, repeats: Repeats) -> Row:
    row = Row("gather", block.name, "forward", recipe=recipe)
    extra: dict[str, Any] = {"devices": mesh.size, "block_note": block.note}
    try:
        gather, shards, kernels = gather_weights(block, recipe, mesh)
        row.path = "xla" if kernels == "xla" else HOPPER
        timing = call_time(gather, shards, repeats)
        row.us, row.method = timing.us, timing.method
        extra["received_bytes"] = received_bytes(gather, shards, mesh.size)
        row.tb_s = extra["received_bytes"] / timing.us * 1e-6
    except Exception as failure:
        row.us, row.note = None, why(failure)
    row.extra = extra
    return row
