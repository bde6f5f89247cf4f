"""A stable name for a `custom_partitioning` call, so that JAX's compilation cache hits in another process.

JAX lowers such a call to a custom call that names a Python object by its address (jax issue 21159). The address is part
of the key of the compilation cache, and differs in each process. `name_by_content` replaces the address by a digest of
all that decides what the object does: the op, its static arguments, the source of moax, and the settings of JAX that
change a trace. Where this cannot be done the address stays, and the program compiles anew in each process.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import inspect
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from moax.backend import log_once

PACKAGE = Path(__file__).parents[1]
# These settings change what a function of moax traces to. The module of a program shows all others.
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion")

PLAIN = (bool, int, float, complex, str, bytes, enum.Enum, np.dtype, np.generic)


class Nameless(Exception):
    """A value has no text that is the same in every process."""


def name_by_content(call: Any, mesh: Mesh, operand_types, result_types) -> None:
    """Names the custom call that JAX has just inserted by a digest of its content.

    Args:
      call: the `AutoCall`, whose methods are the callbacks of the custom call.
      mesh: the mesh of the program.
      operand_types, result_types: the MLIR types of the custom call.
    """
    try:
        from jax._src.custom_partitioning import _sharding_callbacks as callbacks  # JAX has no public name for it

        operations = mlir.ir.InsertionPoint.current.block.operations
        inserted = operations[len(operations) - 1].attributes
        target, address = (mlir.ir.StringAttr(inserted[name]).value for name in ("call_target_name", "backend_config"))
        if target != "CustomSPMDPartitioning":
            raise Nameless("JAX has inserted another operation")
        info = callbacks[address.encode()]
        content = (
            describe(call), describe(mesh), str(operand_types), str(result_types), str(info.in_tree),
            str(info.out_tree), str(info.module_context.platforms), source(), settings(),
        )  # fmt: skip
        name = f"moax:{hashlib.sha256(repr(content).encode()).hexdigest()}"
        # Equal content does equal work, so the first object of a name serves all calls of that name. Each of the others
        # keeps the first one alive: XLA asks for it by name until the programs of all of them are compiled.
        first = callbacks.setdefault(name.encode(), info)
        if first is not info:
            info.serves = first
        inserted["backend_config"] = mlir.ir.StringAttr.get(name)
    except (ImportError, AttributeError, KeyError, Nameless) as error:
        log_once(
            f"{call.op.__name__}: its program will compile anew in each process, for it has no stable key in JAX's "
            f"compilation cache: {error!r}"
        )


def describe(value: Any) -> str:
    """Returns a text of a static value that is the same in every process, and differs for values that differ.

    Raises:
      Nameless: the value holds something that has no such text, such as a function inside a function.
    """
    if value is None or isinstance(value, PLAIN):
        return repr(value)
    if isinstance(value, PartitionSpec):
        return f"spec({describe(tuple(value))})"
    if value is PartitionSpec.UNCONSTRAINED:
        return "UNCONSTRAINED"
    if isinstance(value, Mesh | AbstractMesh):
        return f"mesh{value.axis_names}{value.axis_sizes}{value.axis_types}"
    if isinstance(value, frozenset | set):
        return f"set({', '.join(sorted(map(describe, value)))})"
    if isinstance(value, dict):
        return f"dict({', '.join(sorted(f'{describe(k)}: {describe(v)}' for k, v in value.items()))})"
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        parts = [f"{f.name}={describe(getattr(value, f.name))}" for f in dataclasses.fields(kind)]
        return f"{kind.__module__}.{kind.__qualname__}({', '.join(parts)})"
    if isinstance(value, tuple | list):
        return f"{kind.__module__}.{kind.__qualname__}({', '.join(map(describe, value))})"
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return _describe_code(value)
    if hasattr(value, "local") and hasattr(value, "contract"):  # a Partitioned op
        return f"{value.__name__}({_describe_code(value.local)}, {_describe_code(value.contract)})"
    raise Nameless(f"a {kind.__qualname__} has no stable text")


def _describe_code(value: Any) -> str:
    """Returns the full name of a function or a class of a module of moax."""
    module = getattr(inspect.getmodule(value), "__name__", "")
    if module.partition(".")[0] != "moax" or "<" in value.__qualname__:
        raise Nameless(f"{module}.{value.__qualname__} is no function of a module of moax")
    return f"{module}.{value.__qualname__}"


@functools.cache
def source() -> str:
    """Returns a digest of every file of moax, and of the user's own files, such as the table that `moax tune` writes.

    A change of moax then changes the key, so that no program of another version is taken.
    """
    digest = hashlib.sha256()
    for path in [p for p in sorted(PACKAGE.rglob("*")) if p.suffix in (".py", ".json")] + own_files():
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def own_files() -> list[Path]:
    """Returns the user's files that change kernels, in ~/.cache/moax."""
    try:
        return sorted((Path.home() / ".cache" / "moax").glob("*.json"))
    except RuntimeError:  # the user has no home folder
        return []


def settings() -> tuple[str, ...]:
    """Returns the settings of JAX that change what a function of moax traces to."""
    return tuple(f"{name}={getattr(jax.config, name)}" for name in SETTINGS)
