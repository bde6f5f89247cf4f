"""Checks of arguments. Each check raises a ValueError that names the argument, its value, and a value that would work.

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
from typing import Any, Literal, NamedTuple, NoReturn, cast

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
    name: str,
    value: Any,
    kind: Any,
    source: str = "",
    *,
    least: float | None = None,
    above: float | None = None,
) -> None:
    """Raises ValueError unless value is of a kind: bool, int, float, a tuple of names, str, or a public class of moax.

    An int is at least 1 and a float finite and at least 0, or at least `least`, or above `above`. Numbers may be those
    of NumPy, and no flag is a number. The kind `jnp.floating` is float32, bfloat16 or float16, or a name of one of
    them. `source` is the function that returns instances of the class.
    """
    if kind is jnp.floating:
        _check_float_dtype(name, value)
    elif kind is bool:
        _require(isinstance(value, bool | np.bool_), name, value, "True or False")
    elif kind is int or kind is float:
        _check_number(name, value, kind, least, above)
    elif isinstance(kind, tuple):
        allowed = ", ".join(map(repr, kind))
        _require(isinstance(value, str) and value in kind, name, value, f"one of {allowed}")
    elif not isinstance(value, kind):
        expected = f"a moax.{kind.__name__}"
        if kind is str:
            expected = "a name"
        elif source:
            expected = f"{_with_article(kind.__name__)}, as {source} returns it"
        raise ValueError(f"{name} is {_describe(value)}; it must be {expected}")


def _check_float_dtype(name: str, value: Any) -> None:
    """Raises ValueError unless value is float32, bfloat16 or float16, or the name of one of them."""
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        raise ValueError(f"{name}={value!r} must be a dtype: float32, bfloat16 or float16") from None
    if dtype == np.float64:
        raise ValueError(f"{name} has dtype float64; moax computes in float32 at most; {name} must be float32 or less")
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise ValueError(f"{name} has dtype {dtype}; it must be floating point: float32, bfloat16 or float16")


def _check_number(name: str, value: Any, kind: type, least: float | None, above: float | None) -> None:
    """Raises ValueError unless value is a finite number of the kind int or float, within its bound."""
    if least is None:
        least = int(kind is int)
    if kind is int:
        number = numbers.Integral
        expected = f"an int of at least {least}"
    else:
        number = numbers.Real
        expected = "a finite number"
        if above is not None:
            expected += f" > {above}"
        elif math.isfinite(least):
            expected += f" >= {least}"
    is_number = issubclass(type(value), number) and not isinstance(value, bool)
    _require(is_number and _is_finite(value), name, value, expected)
    if above is None:
        _require(value >= least, name, value, expected)
    else:
        _require(value > above, name, value, expected)


def _is_finite(number: Any) -> bool:
    """Returns whether a number is finite, as a float."""
    try:
        return math.isfinite(number)
    except OverflowError:  # an int that no float holds
        return False


def _require(fits: bool, name: str, value: Any, expected: str) -> None:
    """Raises ValueError for a value that does not fit."""
    if not fits:
        raise ValueError(f"{name}={value!r} must be {expected}")


def check_fields(config: Any, owner: str, *, positive: Sequence[str] = (), zero: Sequence[str] = ()) -> None:
    """Checks the fields of a dataclass by `check_value` of their annotations, and replaces NumPy's numbers by Python's.

    A float that `positive` names is above 0, and an int that `zero` names may be 0. A field that may be of several
    classes is not checked. A message begins with `owner`.
    """
    for field, (kind, names) in _kinds(type(config)).items():
        value = getattr(config, field)
        is_name = value is None or isinstance(value, str)
        if kind is None or (is_name and value in names):
            continue
        above = 0 if field in positive else None
        least = 0 if field in zero else None
        check_value(f"{owner}{field}", value, kind, least=least, above=above)
        if isinstance(value, np.generic):  # equal configs have equal text
            object.__setattr__(config, field, value.item())


class FieldKind(NamedTuple):
    """The kind of a field for `check_value`, None where the field has several, and what else the field may be.

    Attributes:
      kind: float for `float | Literal["auto"] | None`, and ("on", "off") for `Literal["on", "off"]`.
      names: the names that the field may have, and None where it may be None.
    """

    kind: Any
    names: tuple[str | None, ...]


@functools.cache
def _kinds(cls: type) -> dict[str, FieldKind]:
    """Returns the kind of each field of a dataclass."""
    hints = typing.get_type_hints(cls)
    kind_of_field = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        alternatives = (hint,)
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            alternatives = typing.get_args(hint)
        kinds = []
        names = []
        for alternative in alternatives:
            if typing.get_origin(alternative) is Literal:
                names.extend(typing.get_args(alternative))
            elif alternative is type(None):
                names.append(None)
            else:
                kinds.append(alternative)
        if not kinds:
            kinds.append(tuple(name for name in names if name is not None))
        kind = None
        if len(kinds) == 1:
            (kind,) = kinds
        kind_of_field[field.name] = FieldKind(kind, tuple(names))
    return kind_of_field


def check_keywords(caller: str, keywords: Iterable[str], known: Sequence[str], owner: str) -> None:
    """Raises TypeError, in the name of the caller, for a keyword that is not known.

    The message names the nearest known keyword. Where none is near, it lists all that are known, as fields of `owner`.
    """
    for name in keywords:
        if name in known:
            continue
        hint = f"the fields of {owner} are {', '.join(known)}"
        near = difflib.get_close_matches(name, known, 1)
        if near:
            hint = f"did you mean {near[0]!r}?"
        raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}; {hint}")


def suggest_fields[C](cls: type[C]) -> type[C]:
    """Wraps the constructor of a public dataclass, so that `check_keywords` reads its keywords first."""
    construct: Any = cls.__init__
    known = [field.name for field in dataclasses.fields(cast(Any, cls)) if field.init]

    @functools.wraps(construct)
    def checked(self, *args, **keywords):
        check_keywords(cls.__name__, keywords, known, f"moax.{cls.__name__}")
        construct(self, *args, **keywords)

    # By `setattr`, a type checker keeps the signature of the dataclass.
    setattr(cls, "__init__", checked)  # noqa: B010
    return cls


class RuledArray(NamedTuple):
    """An array, and its entry in a rule of `check_arrays`."""

    name: str
    kind: str  # "int" or "bool"; empty for floating point
    dims: str  # such as "T, H"
    value: Any


def check_arrays(rule: str, /, *values: Any, local: bool = False, **sizes: Any) -> None:
    """Raises ValueError unless arrays have the dtypes and dims of a rule: "x [T, H], ids int [T, K], bias? [*C]".

    An array is floating point, or `int` or `bool` where the rule says so; one with a "?" may be None. A letter has one
    size in all arrays, or that of `sizes`; "*C" and "..." are any dims, and their size is a tuple. `local` arrays may
    be shards: a dim divides its size in `sizes`, and the sizes of two arrays are not compared.
    """
    arrays = []
    entries = re.findall(r"([\w.]+)(\??)(?: (int|bool))? \[(.*?)\]", rule)
    for (name, optional, kind, dims), value in zip(entries, values, strict=True):
        if value is None and optional:
            continue
        arrays.append(RuledArray(name, kind, dims, value))
    for array in arrays:
        _check_dtype(array)
    known_sizes = dict(sizes)
    for array in arrays:
        if not _fit(array, known_sizes, local):
            fits_alone = _fit(array, dict(sizes), local)
            _refuse_shapes(arrays if fits_alone else [array], sizes)


def _check_dtype(array: RuledArray) -> None:
    """Raises ValueError unless the array is one, and of the kind that the rule says."""
    dtype = getattr(array.value, "dtype", None)
    if not isinstance(dtype, np.dtype) or not hasattr(array.value, "shape"):
        raise ValueError(f"{array.name} is {_describe(array.value)}; it must be an array [{array.dims}]")
    # float32 for NumPy's float64 without `jax_enable_x64`
    dtype = jax.dtypes.canonicalize_dtype(dtype)
    if not array.kind:
        check_value(array.name, dtype, jnp.floating)
    elif array.kind == "int" and not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(f"{array.name} has dtype {dtype}; it must be an array of integers [{array.dims}]")
    elif array.kind == "bool" and not jnp.issubdtype(dtype, jnp.bool_):
        raise ValueError(f"{array.name} has dtype {dtype}; it must be bool, such as segment_ids > 0")


def _fit(array: RuledArray, known_sizes: dict[str, Any], local: bool) -> bool:
    """Returns whether each dim has the known size of its letter; learns sizes that are new, unless `local`."""
    letters = array.dims.split(", ") if array.dims else []
    shape = list[Any](array.value.shape)
    for i, letter in enumerate(letters):
        if letter[0] not in "*.":
            continue
        end = i + len(shape) - len(letters) + 1
        if end >= i:
            shape[i:end] = [tuple(shape[i:end])]
    if len(letters) != len(shape):
        return False
    for letter, size in zip(letters, shape, strict=True):
        name = letter.strip("*")
        known_size = known_sizes.get(name, size)
        if not local:
            known_sizes[name] = known_size
        if size == known_size:
            continue
        is_shard = local and size > 0 and known_size % size == 0
        if not is_shard:
            return False
    return True


def _refuse_shapes(arrays: Sequence[RuledArray], sizes: dict[str, Any]) -> NoReturn:
    """Raises ValueError for an array with wrong dims, or for arrays that do not fit each other."""

    def add_size(letter: re.Match) -> str:
        name = letter[0]
        if name not in sizes:
            return name
        return f"{name}={sizes[name]}"

    names = ", ".join(array.name for array in arrays)
    shapes = ", ".join(str(array.value.shape) for array in arrays)
    rules = ", ".join(f"[{array.dims}]" for array in arrays)
    expected = re.sub(r"\w+", add_size, rules)
    if len(arrays) == 1:
        raise ValueError(f"{names} has shape {shapes}; it must be {expected}")
    raise ValueError(f"{names} have shapes {shapes}; they must be {expected}")


def check_key(name: str, value: Any) -> None:
    """Raises ValueError unless value is one key of `jax.random`, typed or of unsigned integers."""
    dtype = getattr(value, "dtype", None)
    if dtype is None or not (jnp.issubdtype(dtype, jax.dtypes.prng_key) or dtype == jnp.uint32):
        raise ValueError(f"{name} is {_describe(value)}; it must be a PRNG key, such as jax.random.key(0)")
    ndim = int(dtype == jnp.uint32)
    if value.ndim != ndim:
        raise ValueError(f"{name} has shape {value.shape}; it must be one PRNG key, such as jax.random.key(0)")


def _describe(value: Any) -> str:
    """Returns `None`, or the name of the value's class after an article."""
    if value is None:
        return "None"
    return _with_article(type(value).__name__)


def _with_article(noun: str) -> str:
    """Returns the noun after "a" or "an"."""
    article = "an" if noun[0] in "aeiouAEIOU" else "a"
    return f"{article} {noun}"
