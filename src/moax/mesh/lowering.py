"""Primitives that refuse a wrong use of an op while JAX lowers a program, and the stable name of a call.

Two identities raise an error where the program would be wrong without one: one identity refuses a second derivative,
the other a program of many devices that was traced for one. A mark refuses forward-mode derivatives, because JAX's own
error names no function. All three are primitives: partial evaluation, as of a scan, drops the rule of a
`jax.custom_jvp`. A `custom_partitioning` call gets a stable name, and `jax.export` refuses it.
"""

from __future__ import annotations

import functools
import hashlib
import re
import uuid
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import PyTree

from moax.checks import Unsupported, log_once

PACKAGE = Path(__file__).parents[1]
# These settings change the trace of a function of moax. The module of a program shows all other settings.
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion")
UNSTABLE = re.compile(r"\S+ at 0x|frozenset")  # an address, or an order of its own in each process


def refuse_derivative[Tree: PyTree](name: str, tree: Tree) -> Tree:
    """Returns the tree. A derivative of it raises Unsupported in the name of an op."""
    return jax.tree.map(lambda x: _once.bind(x, name=name), tree)


def refuse_forward_mode(name: str, tree: PyTree) -> Any:
    """Returns a mark, f32 [], for a `jax.custom_vjp` to take beside the tree.

    Forward mode computes the tangent of the mark from the tangents of the tree, and this raises Unsupported in the name
    of the function. Reverse mode only transposes the tangent. The leaves do not pass through a primitive: JAX would
    save each of them a second time for backward, where it is not differentiated.
    """
    smooth = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return _mark.bind(*smooth, name=name)


def refuse_many_devices[Tree: PyTree](name: str, tree: Tree) -> Tree:
    """Returns the tree. Lowering raises ValueError where the program is for more than one device.

    `jax.jit(f, in_shardings=...)` on shapes tells a function nothing of the mesh while JAX traces the function. The op
    would then run as on one device, and XLA would gather every weight in full precision.
    """
    leaves, structure = jax.tree.flatten(tree)
    leaves[0] = _alone.bind(leaves[0], name=name)
    return jax.tree.unflatten(structure, leaves)


def _constant(name: str) -> Primitive:
    """Returns a primitive of any operands that returns 0."""
    primitive = Primitive(name)
    primitive.def_impl(lambda *operands, name: np.float32(0))
    primitive.def_abstract_eval(lambda *operands, name: jax.core.ShapedArray((), np.dtype(np.float32)))
    mlir.register_lowering(primitive, mlir.lower_fun(lambda *operands, name: jnp.float32(0), multiple_results=False))
    batching.primitive_batchers[primitive] = lambda operands, dims, name: (primitive.bind(*operands, name=name), None)
    return primitive


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


def _mark_jvp(primals, tangents, *, name: str):
    nonzero = [tangent for tangent in tangents if not isinstance(tangent, ad.Zero)]
    return np.float32(0), _mark_tangent.bind(*nonzero, name=name)


def _refuse_forward(*operands, name: str):
    raise Unsupported(
        f"moax: {name} has no forward-mode derivative, nor has a block that runs it: jax.jvp, "
        "jax.jacfwd and the function of jax.linearize cannot run; use reverse mode: jax.grad, "
        "jax.vjp or jax.jacrev"
    )


def _lower_alone(ctx, x, *, name: str):
    context = ctx.module_context.axis_context
    if hasattr(context, "mesh"):
        devices = context.mesh.size
    else:
        devices = context.num_devices
    if devices > 1:
        raise ValueError(
            f"moax {name}: this program is for {devices} devices, and no mesh was in force when "
            "jax.jit traced it, so every device would gather all weights in full precision. Trace "
            "it under `with jax.set_mesh(mesh):`, or pass arrays, or shapes, that have shardings"
        )
    return [x]


_once = _identity("moax_first_derivative")
ad.primitive_jvps[_once] = _refuse_jvp
_alone = _identity("moax_one_device")
ad.primitive_jvps[_alone] = lambda primals, tangents, name: (_alone.bind(*primals, name=name), *tangents)
mlir.register_lowering(_alone, _lower_alone)
_mark = _constant("moax_reverse_mode")
_mark_tangent = _constant("moax_forward_mode")
ad.primitive_jvps[_mark] = _mark_jvp
ad.deflinear2(_mark_tangent, lambda d, *operands, name: [ad.Zero(x.aval) for x in operands])
_mark_tangent.def_impl(_refuse_forward)
batching.primitive_batchers[_mark_tangent] = lambda operands, dims, name: _refuse_forward(name=name)
mlir.register_lowering(_mark_tangent, lambda ctx, *operands, name: _refuse_forward(name=name))


def name_call(op: str, call: Any, operand_types, result_types) -> None:
    """Names the custom call that JAX has just inserted by a digest of its content; raises Unsupported for an export.

    JAX lowers such a call to a custom call that names a Python object by its address (jax-ml/jax#21159). The address is
    part of the key of JAX's compilation cache, and differs in each process. The digest covers everything on which the
    work of the object depends: the op, its static arguments, the source of moax, and the settings of JAX that change a
    trace. A part may have no stable text, such as an `Op` of a function outside of moax, whose text is an address. A
    later process could reuse the address for a function that has changed. The name is then random, and the program
    compiles anew in each process.

    XLA asks for the layout of shards by calling back into this process, which no exported program can do. JAX says so
    after the whole program is lowered, without the name of an engine.
    """
    anew = f"{op}: its program will compile anew in each process, for it has no stable key in JAX's compilation cache"
    try:
        from jax._src.custom_partitioning import _sharding_callbacks as callbacks  # JAX has no public name for it

        operations = mlir.ir.InsertionPoint.current.block.operations
        inserted = operations[len(operations) - 1].attributes
        info = callbacks[mlir.ir.StringAttr(inserted["backend_config"]).value.encode()]
        if info.module_context.lowering_parameters.for_export:
            raise Unsupported(
                f"{op}: jax.export cannot serialize engine='custom_partitioning', which "
                "engine='auto' is on Auto mesh axes; use engine='shard_map'"
            )
        settings = [getattr(jax.config, setting) for setting in SETTINGS]
        state_of_jax = info.in_tree, info.out_tree, info.module_context.platforms, settings
        content = repr((call, operand_types, result_types, state_of_jax, source()))
        if unstable := UNSTABLE.search(content):
            log_once(f"{anew}: no stable text: {unstable[0]}")
            content = uuid.uuid4().hex
        name = f"moax:{hashlib.sha256(content.encode()).hexdigest()}"
        # Equal content does equal work, so the first object of a name serves all calls of that name. Each other object
        # keeps the first one alive: XLA asks for it by name until the programs of all calls are compiled.
        first_info = callbacks.setdefault(name.encode(), info)
        if first_info is not info:
            info.serves = first_info
        inserted["backend_config"] = mlir.ir.StringAttr.get(name)
    except (ImportError, AttributeError, KeyError, IndexError, ValueError) as error:
        log_once(f"{anew}: {error!r}")


@functools.cache
def source() -> str:
    """Returns a digest of every file of moax, and of the user's tables of tiles in ~/.cache/moax."""
    files = [path for path in sorted(PACKAGE.rglob("*")) if path.suffix in (".py", ".json")]
    try:
        files += sorted((Path.home() / ".cache" / "moax").glob("*.json"))
    except RuntimeError:  # the user has no home folder
        pass
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
