"""Checks of arguments. Each check raises a ValueError that names the argument, its value and what would be right.

`Unsupported` is the one exception class of moax, and `log_once` the one way to its log.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import math
import numbers
import re
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

logger = logging.getLogger("moax")


class Unsupported(NotImplementedError):
    """An implementation that was chosen by name cannot do its task; the message says why."""


@functools.cache
def log_once(message: str, level: int = logging.WARNING) -> None:
    """Logs a message, once in a process."""
    logger.log(level, message)


def check_value(
    name: str, value: Any, kind: Any, source: str = "", *, least: float | None = None, above: float | None = None
) -> None:
    """Raises ValueError unless value is of a kind: bool, int, float, a tuple of names, str, or a public class of moax.

    An int is at least 1 and a float finite and at least 0, or at least `least`, or above `above`. Numbers may be those
    of NumPy, and no flag is a number. The kind `jnp.floating` is float32, bfloat16 or float16, or a name of one of
    them. `source` is the function that returns instances of the class.
    """
    if kind is jnp.floating:
        try:
            dtype = jnp.dtype(value)
        except TypeError:
            raise ValueError(f"{name}={value!r} must be a dtype: float32, bfloat16 or float16") from None
        if dtype == np.float64:
            raise ValueError(
                f"{name} has dtype float64; moax computes in float32 at most; {name} must be float32 or less"
            )
        if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise ValueError(f"{name} has dtype {dtype}; it must be floating point: float32, bfloat16 or float16")
        return
    if kind is bool:
        fits, wanted = isinstance(value, bool | np.bool_), "True or False"
    elif kind is int or kind is float:
        least = int(kind is int) if least is None else least
        number = numbers.Integral if kind is int else numbers.Real
        fits = issubclass(type(value), number) and not isinstance(value, bool)
        fits = fits and math.isfinite(value) and (value >= least if above is None else value > above)
        bound = f" > {above}" if above is not None else f" >= {least}" if math.isfinite(least) else ""
        wanted = f"an int of at least {least}" if kind is int else f"a finite number{bound}"
    elif isinstance(kind, tuple):
        fits, wanted = isinstance(value, str) and value in kind, f"one of {', '.join(map(repr, kind))}"
    elif isinstance(value, kind):
        return
    else:
        wanted = f"a {kind.__name__}, as {source} returns it" if source else f"a moax.{kind.__name__}"
        wanted = "a name" if kind is str else wanted
        raise ValueError(f"{name} is {_describe(value)}; it must be {wanted}")
    if not fits:
        raise ValueError(f"{name}={value!r} must be {wanted}")


def check_fields(config: Any, owner: str, *, positive: Sequence[str] = (), zero: Sequence[str] = ()) -> None:
    """Checks the fields of a dataclass by `check_value` of their annotations, and replaces NumPy's numbers by Python's.

    A float that `positive` names is above 0, and an int that `zero` names may be 0. A field that may be of several
    classes is not checked. A message begins with `owner`.
    """
    for field, (kind, optional) in _kinds(type(config)).items():
        value = getattr(config, field)
        if kind is None or (value is None and optional):
            continue
        above, least = 0 if field in positive else None, 0 if field in zero else None
        check_value(f"{owner}{field}", value, kind, least=least, above=above)
        if isinstance(value, np.generic):  # equal configs have equal text
            object.__setattr__(config, field, value.item())


@functools.cache
def _kinds(cls: type) -> dict[str, tuple[Any, bool]]:
    """Returns the kind of each field, None where there are several, and whether it may be None."""
    hints, found = typing.get_type_hints(cls), {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        several = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        kinds = [typing.get_args(k) if typing.get_origin(k) is Literal else k for k in several if k is not type(None)]
        found[field.name] = kinds[0] if len(kinds) == 1 else None, type(None) in several
    return found


def check_keywords(caller: str, keywords: Iterable[str], known: Sequence[str], owner: str) -> None:
    """Raises TypeError, in the name of the caller, for a keyword that is not known; it names the nearest field.

    Without a near one it lists the fields of `owner`, which are all that is known.
    """
    for name in keywords:
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"the fields of {owner} are {', '.join(known)}"
        raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}; {hint}")


def suggest_fields[C](cls: type[C]) -> type[C]:
    """Wraps the constructor of a public dataclass, so that `check_keywords` reads its keywords first."""
    construct: Any = cls.__init__
    known = [field.name for field in dataclasses.fields(cast(Any, cls)) if field.init]

    @functools.wraps(construct)
    def checked(self, *args, **keywords):
        check_keywords(cls.__name__, keywords, known, f"moax.{cls.__name__}")
        construct(self, *args, **keywords)

    setattr(cls, "__init__", checked)  # noqa: B010 (a type checker keeps the signature of the dataclass)
    return cls


def check_arrays(rule: str, /, *values: Any, local: bool = False, **sizes: Any) -> None:
    """Raises ValueError unless arrays have the dtypes and dims of a rule: "x [T, H], ids int [T, K], bias? [*C]".

    An array is floating point, or `int` or `bool` where the rule says so; one with a "?" may be None. A letter has one
    size in all arrays, or that of `sizes`; "*C" and "..." are any dims, and their size is a tuple. `local` arrays may
    be shards: a dim divides its size in `sizes`, and the sizes of two arrays are not compared.
    """
    parts = re.findall(r"([\w.]+)(\??)(?: (int|bool))? \[(.*?)\]", rule)
    given = [(name, kind, dims, value) for (name, optional, kind, dims), value in zip(parts, values, strict=True)
             if value is not None or not optional]  # fmt: skip
    for name, kind, dims, value in given:
        dtype = getattr(value, "dtype", None)
        if not isinstance(dtype, np.dtype) or not hasattr(value, "shape"):
            raise ValueError(f"{name} is {_describe(value)}; it must be an array [{dims}]")
        dtype = jax.dtypes.canonicalize_dtype(dtype)  # float32 for NumPy's float64 without `jax_enable_x64`
        if not kind:
            check_value(name, dtype, jnp.floating)
        elif not jnp.issubdtype(dtype, jnp.integer if kind == "int" else jnp.bool_):
            wanted = f"an array of integers [{dims}]" if kind == "int" else "bool, such as segment_ids > 0"
            raise ValueError(f"{name} has dtype {dtype}; it must be {wanted}")
    found = dict(sizes)
    for array in given:
        letters, shape, fits = array[2].split(", ") if array[2] else [], list[Any](array[3].shape), []
        for i, letter in enumerate(letters):
            if letter[0] in "*." and (rest := len(shape) - len(letters) + 1) >= 0:
                shape[i : i + rest] = [tuple(shape[i : i + rest])]
        for known in (found, dict(sizes)):  # the sizes of the arrays before, and of none
            get = known.get if local else known.setdefault
            want = [(size, get(letter.strip("*"), size)) for letter, size in zip(letters, shape, strict=False)]
            fit = all(size == of or (local and size > 0 and of % size == 0) for size, of in want)
            fits.append(fit and len(letters) == len(shape))
        if not fits[0]:
            wrong = given if fits[1] else [array]  # arrays that do not fit each other
            names, shapes = ", ".join(a[0] for a in wrong), ", ".join(str(a[3].shape) for a in wrong)
            wanted = ", ".join(f"[{dims}]" for _, _, dims, _ in wrong)
            wanted = re.sub(r"\w+", lambda m: f"{m[0]}={sizes[m[0]]}" if m[0] in sizes else m[0], wanted)
            verb = f"has shape {shapes}; it" if len(wrong) == 1 else f"have shapes {shapes}; they"
            raise ValueError(f"{names} {verb} must be {wanted}")


def check_key(name: str, value: Any) -> None:
    """Raises ValueError unless value is a key of `jax.random`, typed or of unsigned integers."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or not (jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == jnp.uint32):
        raise ValueError(f"{name} is {_describe(value)}; it must be a PRNG key, such as jax.random.key(0)")


def _describe(value: Any) -> str:
    """Returns `None`, or the name of the value's class after an article."""
    kind = type(value).__name__
    return "None" if value is None else f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"
