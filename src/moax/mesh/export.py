"""`refuse_export` says which engine `jax.export` can take, where the engine in use is the other one."""

from __future__ import annotations

from jax.interpreters import mlir

from moax.errors import Unsupported


def refuse_export(name: str) -> None:
    """Raises Unsupported while JAX lowers a `custom_partitioning` call for `jax.export`, from its rule callback.

    XLA asks such a call for the layout of its shards by calling back into this process, which no serialized program can
    do. JAX says so after the whole program is lowered, without the name of an engine.

    Args:
      name: the name of the op, for the message.
    """
    try:
        from jax._src.custom_partitioning import _sharding_callbacks as callbacks  # JAX has no public name for it

        operations = mlir.ir.InsertionPoint.current.block.operations
        inserted = operations[len(operations) - 1].attributes["backend_config"]
        context = callbacks[mlir.ir.StringAttr(inserted).value.encode()].module_context
        exporting = context.lowering_parameters.for_export
    except (ImportError, AttributeError, KeyError, IndexError):
        return  # JAX's own error follows
    if exporting:
        raise Unsupported(
            f"{name}: jax.export cannot serialize engine='custom_partitioning', which engine='auto' is on Auto mesh "
            "axes; use engine='shard_map'"
        )
