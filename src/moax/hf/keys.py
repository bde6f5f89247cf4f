"""The keys of config.json that a family reads, and the types and ranges of their values.

A key string of `moax.hf.family.Family` has names, of which the first one that is there counts, and a default.
"""

from __future__ import annotations

import functools
import json
import math
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from moax.checks import Unsupported
from moax.hf.family import Family

Values = Mapping[str, Any]
NUM_LAYERS = "num_hidden_layers|n_layers"
LAYER_LIST = "moe_layers_enum|moe_layers"  # the indices of the MoE layers
MAX_SIZE = 2**31 - 1
MAX_COUNT = 2**12  # of experts and of layers, which loops run over


class Kind(NamedTuple):
    """What the value of a key may be, beside null: the types of JSON, and the range of numbers."""

    words: str
    types: tuple[type, ...]
    least: float = -math.inf
    largest: float = math.inf
    items: tuple[type, ...] = ()  # the types of the items of a list

    def fits(self, value: Any) -> bool:
        """Whether a value is of this kind."""
        if not isinstance(value, self.types) or (isinstance(value, bool) and bool not in self.types):
            return False
        if isinstance(value, list | tuple):
            item = self._replace(types=self.items)
            return all(item.fits(inner) for inner in value)
        return not isinstance(value, int | float) or self.least <= value <= self.largest


def integer(least: int, largest: int) -> Kind:
    """Returns the kind of integers of a range."""
    return Kind(f"an integer from {least} to {largest}", (int,), least, largest)


def size(least: int, largest: int) -> Kind:
    """Returns the kind of sizes, of which a list may have one for each layer."""
    words = f"an integer from {least} to {largest}, or a list of such integers"
    return Kind(words, (int, list, tuple), least, largest, (int,))


FLAG = Kind("true or false", (bool,))
NAME = Kind("a string", (str,))
POSITIVE = Kind("a finite number above 0", (int, float), math.ulp(0.0), math.nextafter(math.inf, 0))
INDICES = Kind(f"a list of integers from 0 to {MAX_COUNT}", (list, tuple), 0, MAX_COUNT, (int,))
LISTED = INDICES._replace(words=f"{INDICES.words}, or a string of them", types=(str, list, tuple))
# A list of marks and a step may have one name.
MARKS = Kind(
    f"an integer from 0 to {MAX_COUNT}, a string, or a list of them", (int, str, list, tuple), 0, MAX_COUNT, (int, str)
)
# the kinds of the keys that a field of `Family` names
FAMILY_KINDS = {
    "d_model": size(1, MAX_SIZE),
    "d_ff": size(1, MAX_SIZE),
    "experts": size(1, MAX_COUNT),
    "top_k": size(1, MAX_COUNT),
    "act": NAME,
    "limit": POSITIVE,
    "normalize": FLAG,
    "scale": POSITIVE,
    "groups": integer(1, MAX_COUNT),
    "shared": integer(0, MAX_SIZE),
    "latent": integer(1, MAX_SIZE),
}
# the kinds of the keys that a field of `Layers` names
LAYERS_KINDS = {
    "marks": MARKS,
    "first": integer(0, MAX_COUNT),
    "last": integer(-1, MAX_COUNT),
    "step": MARKS,
    "offset": integer(-1, MAX_COUNT),
    "dense": INDICES,
}
KINDS = {NUM_LAYERS: size(0, MAX_COUNT), LAYER_LIST: LISTED}  # of the keys of every family


def check_values(values: Values, family: Family) -> None:
    """Raises ValueError for a value of config.json that has another type or range than its key may have."""
    for key, kind in _kinds(family):
        for name in parse_key(key)[0]:
            value = _find(values, name).get(name.rpartition(".")[2])
            if value is not None and not kind.fits(value):
                raise ValueError(f"config.json has {name}={reprlib.repr(value)}; it must be {kind.words}")


def _kinds(family: Family) -> Iterator[tuple[str, Kind]]:
    """Yields each key string that the family reads, with the kind of its values."""
    for owner, kinds in ((family, FAMILY_KINDS), (family.layers, LAYERS_KINDS)):
        for field, kind in kinds.items():
            keys = getattr(owner, field) or ()
            if isinstance(keys, str):
                keys = (keys,)
            for key in keys:
                yield key, kind
    yield from KINDS.items()


@functools.cache
def parse_key(key: str) -> tuple[tuple[str, ...], Any]:
    """Returns the names and the default of a key string (see `Family`); the first name is written."""
    names, _, default = key.partition("=")
    if not default:
        return tuple(names.split("|")), None
    return tuple(names.split("|")), json.loads(default)


def _find(values: Values, name: str) -> Values:
    """Returns the dict in which the last part of a name is; an empty one has no name, or lacks a part before."""
    if not name:
        return {}
    for part in name.split(".")[:-1]:
        inner = values.get(part)
        if not isinstance(inner, Mapping | None):
            raise ValueError(f"config.json has {part}={reprlib.repr(inner)}; it must be an object")
        values = inner or {}
    return values


def read_key(values: Values, key: str | None, default: Any = None) -> Any:
    """Returns the first value that is not null; the default where no name exists, None where all values are null."""
    names, own_default = parse_key(key or "")
    present = []
    for name in names:
        inner = _find(values, name)
        last = name.rpartition(".")[2]
        if last in inner:
            present.append(inner[last])
    if not present:
        return default if own_default is None else own_default
    return next((value for value in present if value is not None), None)


def read_size(values: Values, key: str) -> int:
    """Returns a size, which may be a list of one equal size for each layer."""
    names, default = parse_key(key)
    value = read_key(values, key)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"config of model_type={values.get('model_type')!r} has no {' or '.join(names)}")
    sizes = set(value) if isinstance(value, list | tuple) else {value}
    if len(sizes) != 1:
        raise Unsupported(f"{names[0]}={value!r} differs from layer to layer; moax.hf reads one size for all")
    return sizes.pop()
