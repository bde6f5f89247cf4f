"""`python -m benchmarks scatter`: the sum of a block's weight gradients, over a mesh of all devices as fsdp.

    bfloat16   a ring of reduce-scatters, whose sums are bfloat16
    float32    the same in float32: twice the bytes

The program is `scatter_gradient` of the backward pass on gradients in float32, as its matmuls make them; that of
bfloat16 starts from gradients in bfloat16. Times are the wall clock of back-to-back calls; bytes are those that a
device sends by the ring algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from benchmarks.block.block import Block
from benchmarks.report import Row, why
from benchmarks.timing import Repeats, call_time
from moax.block.plan import make_plan
from moax.config import Options
from moax.inspect import collectives, total_bytes
from moax.mesh.axes import Axes, make_mesh
from moax.mesh.collectives import GradReduce, scatter_gradient, sum_dtype
from moax.mesh.specs import Spec, named
from moax.ops.weights import find_layout
from moax.params import expert_specs, param_shapes

CHOICES: tuple[GradReduce, ...] = ("bfloat16", "float32")


def rows(blocks: list[Block], repeats: Repeats) -> Iterator[Row]:
    """Yields a row for each block and choice; `extra["speedup"]` is the time of bfloat16 over its own."""
    if jax.device_count() < 2:
        raise ValueError("scatter needs two devices or more; JAX has one")
    mesh = make_mesh({"fsdp": jax.device_count()})
    for block in blocks:
        ring = None
        for choice in CHOICES:
            row = _row(block, choice, mesh, repeats)
            if choice == "bfloat16":
                ring = row.us
            if row.us and ring:
                row.extra["speedup"] = ring / row.us
            yield row


def scatter_gradients(
    block: Block,
    choice: GradReduce,
    mesh: Mesh,
) -> tuple[Callable, tuple[jax.Array, ...]]:
    """Returns (the jitted sum, the gradients of wi and wo): each device has its own term of the whole weight."""
    config = block.config
    axes = Axes().resolve(mesh)
    shapes = param_shapes(block.config)
    specs = expert_specs(config, Axes(), axes)
    plan = make_plan(
        config,
        Options(kernels="xla"),
        axes=axes,
        declared=specs,
        tokens=1,
        dtype="float32",
    )
    layouts = find_layout(plan.wi), find_layout(plan.wo)
    whole = shapes.wi, shapes.wo

    def local(*terms):
        pairs = zip(terms, layouts, strict=True)
        return tuple(scatter_gradient(term[0], layout.gather, choice) for term, layout in pairs)

    of_device = Spec("fsdp")
    results = (specs.wi, specs.wo)
    scatter = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=of_device, out_specs=results, check_vma=False),
        out_shardings=named(mesh, results),
    )

    def draw(key):
        keys = jax.random.split(key)
        terms = (jax.random.normal(k, (mesh.size, *shape)) for k, shape in zip(keys, whole, strict=True))
        return tuple(term.astype(sum_dtype(choice, "float32")) for term in terms)

    return scatter, jax.jit(draw, out_shardings=named(mesh, of_device))(jax.random.key(0))


def _row(block: Block, choice: GradReduce, mesh: Mesh, repeats: Repeats) -> Row:
    row = Row("scatter", block.name, "backward", recipe=choice, path="xla")
    extra: dict[str, Any] = {"devices": mesh.size, "block_note": block.note}
    try:
        scatter, terms = scatter_gradients(block, choice, mesh)
        timing = call_time(scatter, terms, repeats)
        row.us = timing.us
        row.method = timing.method
        extra["sent_bytes"] = total_bytes(collectives(scatter, *terms))
        extra["elements"] = sum(math.prod(term.shape[1:]) for term in terms)
        row.tb_s = extra["sent_bytes"] / timing.us * 1e-6
    except Exception as failure:
        row.us = None
        row.note = why(failure)
    row.extra = extra
    return row
