"""`Key` reads and writes a value of config.json, whatever its name in a family."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from moax.errors import Unsupported

Values = Mapping[str, Any]


class Key:
    """A value of config.json.

    Args:
      name: its name, under which it is written. "ffn_config.moe_top_k" is the value `moe_top_k` of the dict
        `ffn_config`.
      default: what transformers takes where config.json does not have it; None where it must be there.
      *others: further names, which are read where the ones before are missing.
    """

    def __init__(self, name: str, default: Any = None, *others: str):
        self.name, self.default, self.names = name, default, (name, *others)

    def read(self, values: Values) -> Any:
        """Returns the value, the default where no name of it exists, and None where config.json says null."""
        found = list(self._found(values))
        return next((value for value in found if value is not None), None) if found else self.default

    def read_size(self, values: Values) -> int:
        """Returns the value of a size, which may be a list of one equal size for each layer.

        Raises:
          ValueError: config.json has no such value.
          Unsupported: the sizes of the layers differ.
        """
        value = self.read(values)
        value = self.default if value is None else value
        if value is None:
            raise ValueError(f"config of model_type={values.get('model_type')!r} has no {' or '.join(self.names)}")
        if isinstance(value, list | tuple):
            if len(set(value)) != 1:
                raise Unsupported(f"{self.name}={value!r} differs from layer to layer; moax.hf reads one size for all")
            return value[0]
        return value

    def write(self, values: MutableMapping[str, Any], value: Any) -> None:
        """Sets the value under its first name."""
        *path, last = self.name.split(".")
        for part in path:
            values = values.setdefault(part, {})
        values[last] = value

    def _found(self, values: Values) -> Iterator[Any]:
        """Yields the value of each name that exists, null included."""
        for name in self.names:
            *path, last = name.split(".")
            inner: Any = values
            for part in path:
                inner = inner.get(part) or {}
            if last in inner:
                yield inner[last]
