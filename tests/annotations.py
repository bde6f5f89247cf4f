"""The annotations of moax, executed: conftest.py has jaxtyping's import hook put `checked` on every function of moax.

A call is checked when it has returned, its arguments and its result together, so that a wrong argument meets the error
that moax itself raises first.
"""

import inspect
from collections.abc import Callable
from types import GenericAlias
from typing import Annotated, Any, Generic, get_args, get_origin

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeCallHintViolation
from beartype.vale import IsInstance
from jax.errors import InconclusiveDimensionOperation
from jax.sharding import AxisType

CONF = BeartypeConf(is_pep484_tower=True)  # an int where a float is annotated


def checked(function: Callable) -> Callable:
    """The typechecker of jaxtyping's hook, which makes two functions with empty bodies of each function: one takes the
    arguments before the call and returns Any; the other takes the arguments and the result after the call."""
    hints = {name: _known(hint) for name, hint in function.__annotations__.items()}
    if hints.get("return", Any) is Any or all(hint is Any for hint in hints.values()):
        return lambda *args, **kwargs: None
    function.__annotations__ = hints
    check = beartype(conf=CONF)(function)
    is_init = function.__name__ == "__init__"

    def check_call(*args, **kwargs):
        # JAX rebuilds a pytree with any leaves, such as specs: the annotations of its fields do not bind `__init__`.
        # Inside a `shard_map` a weight may be a shard, [E, K / 2, C], and rows [M, K] not: one name has two sizes.
        in_shard_map = AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types
        if in_shard_map or (is_init and not jax.tree_util.all_leaves(args[:1])):
            return
        try:
            check(*args, **kwargs)
        except (BeartypeCallHintViolation, InconclusiveDimensionOperation):
            if any(map(_is_symbolic, jax.tree.leaves((args, kwargs)))):
                return
            args, kwargs = jax.tree.map(_as_jax, (args, kwargs))
            check(*args, **kwargs)

    return check_call


def _is_symbolic(value: Any) -> bool:
    """Whether the value is a symbolic dimension of `jax.export`, or an array that has one: annotations say `int`."""
    return any(jax.export.is_symbolic_dim(size) for size in (value, *getattr(value, "shape", ())))


def _as_jax(value: Any) -> Any:
    """JAX takes an array of NumPy wherever it takes its own."""
    with jax.ensure_compile_time_eval():
        return jnp.asarray(value) if isinstance(value, np.ndarray | np.generic) else value


def _known(hint: Any) -> Any:
    """The hint as beartype knows it: a generic NamedTuple by its class alone."""
    kind = get_origin(hint) or hint
    if kind is tuple and get_args(hint):
        return GenericAlias(tuple, tuple(map(_known, get_args(hint))))
    generic = inspect.isclass(kind) and issubclass(kind, Generic) and hasattr(kind, "_fields")
    return Annotated[object, IsInstance[kind]] if generic else hint
