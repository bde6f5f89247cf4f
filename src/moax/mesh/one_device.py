"""A program in which nothing names a mesh must be one device's; this file refuses any other when JAX lowers it."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jaxtyping import PyTree


def refuse_many_devices(name: str, operands: PyTree) -> PyTree:
    """Returns the operands. Lowering fails with a ValueError where the program is for more than one device.

    `jax.jit(f, in_shardings=...)` on shapes tells a function nothing of the mesh while JAX traces the function. The op
    would then run as on one device, and XLA would gather every weight in full precision.

    Args:
      name: the name of the op, for the message.
      operands: a tree of arrays, of which the first array takes part.
    """
    leaves, tree = jax.tree.flatten(operands)
    return tree.unflatten([_guard(name)(leaves[0]), *leaves[1:]])


@functools.cache
def _guard(name: str) -> Callable:
    """Returns the identity that cannot be lowered for more than one device, and whose tangent is not guarded."""

    @custom_partitioning
    def identity(x):
        return x

    def rule(mesh, operand_types, result_types):
        devices = "" if mesh.empty else f" (mesh axes {dict(mesh.shape)})"
        raise ValueError(
            f"moax {name}: this program is for more than one device{devices}, and no mesh was in force when jax.jit "
            "traced it, so every device would gather all weights in full precision. Trace it under "
            "`with jax.set_mesh(mesh):`, or pass arrays, or shapes, that have shardings"
        )

    identity.def_partition(lambda *_: None, sharding_rule=rule)
    batched = custom_vmap(identity)
    batched.def_vmap(lambda size, is_batched, x: (batched(x), is_batched[0]))
    guard = jax.custom_jvp(batched)
    guard.defjvp(lambda primals, tangents: (guard(*primals), *tangents))
    return guard
