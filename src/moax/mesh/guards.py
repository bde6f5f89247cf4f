"""Identities that refuse what would go wrong later without a word: a second derivative, and a program of many devices.

They are primitives. A `jax.custom_jvp` would not do: partial evaluation, as of a scan, drops its rule.
"""

from __future__ import annotations

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, PyTree

from moax.errors import Unsupported


def refuse_derivative(name: str, tree: PyTree[Array]) -> PyTree[Array]:
    """Returns the tree. A derivative of it raises Unsupported in the name of an op."""
    return jax.tree.map(lambda x: _once.bind(x, name=name), tree)


def refuse_many_devices(name: str, tree: PyTree[Array]) -> PyTree[Array]:
    """Returns the tree. Lowering raises ValueError where the program is for more than one device.

    `jax.jit(f, in_shardings=...)` on shapes tells a function nothing of the mesh while JAX traces the function. The op
    would then run as on one device, and XLA would gather every weight in full precision.

    Args:
      name: the name of the op, for the message.
      tree: a tree of arrays, of which the first array takes part.
    """
    first, *others = jax.tree.leaves(tree)
    return jax.tree.unflatten(jax.tree.structure(tree), [_alone.bind(first, name=name), *others])


def _identity(name: str) -> Primitive:
    """Returns a primitive that returns its operand."""
    primitive = Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda x, **_: x)
    mlir.register_lowering(primitive, lambda ctx, x, **_: [x])
    batching.defvectorized(primitive)
    return primitive


def _refuse_jvp(primals, tangents, *, name: str):
    raise Unsupported(f"moax: {name} has first derivatives and no second ones; moax.route and the losses have both")


def _lower_alone(ctx, x, *, name: str):
    context = ctx.module_context.axis_context
    devices = context.mesh.size if hasattr(context, "mesh") else context.num_devices
    if devices > 1:
        raise ValueError(
            f"moax {name}: this program is for {devices} devices, and no mesh was in force when jax.jit traced it, so "
            "every device would gather all weights in full precision. Trace it under `with jax.set_mesh(mesh):`, or "
            "pass arrays, or shapes, that have shardings"
        )
    return [x]


_once, _alone = _identity("moax_first_derivative"), _identity("moax_one_device")
ad.primitive_jvps[_once] = _refuse_jvp
ad.primitive_jvps[_alone] = lambda primals, tangents, name: (_alone.bind(*primals, name=name), *tangents)
mlir.register_lowering(_alone, _lower_alone)
