"""Reads JSON files and the headers of safetensors files, and refuses files that break their format.

A safetensors file is the length of its header (u64), the header (JSON: dtype, shape and byte range of each tensor), and
the bytes of the tensors. The tensors are in the order of their bytes, without holes, and fill the file.
"""

from __future__ import annotations

import functools
import json
import math
import reprlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from moax.checks import Unsupported

DTYPES = {name: np.dtype(scalar) for name, scalar in dict(
    F64=np.float64, F32=np.float32, F16=np.float16, BF16=jnp.bfloat16, F8_E4M3=jnp.float8_e4m3fn,
    F8_E5M2=jnp.float8_e5m2, F8_E8M0=jnp.float8_e8m0fnu, I64=np.int64, I32=np.int32, I16=np.int16, I8=np.int8,
    U64=np.uint64, U32=np.uint32, U16=np.uint16, U8=np.uint8, BOOL=np.bool_,
).items()}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000  # bytes, the limit of the library safetensors
MAX_DIMS = 64  # the limit of NumPy
MAX_BYTES = 2**63


class Entry(NamedTuple):
    """A tensor of a checkpoint: an array, or the place of its first byte in a file."""

    name: str
    source: Path | np.ndarray | jax.Array
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int = 0

    def read(self, part: int = 0, parts: int = 1) -> np.ndarray:
        """Reads one of equal parts along the first dim: part 3 of 8 of [16, 2] is rows 6 and 7."""
        shape = (self.shape[0] // parts, *self.shape[1:]) if parts > 1 else self.shape
        if not isinstance(self.source, Path):
            if parts == 1:
                return np.asarray(self.source)
            return np.asarray(self.source[part * shape[0] : (part + 1) * shape[0]])
        count = math.prod(shape) * self.dtype.itemsize
        # `fromfile` reads bytes, because it does not know the dtypes of ml_dtypes.
        data = np.fromfile(self.source, np.uint8, count, offset=self.start + part * count)
        if data.size != count:
            raise ValueError(f"{self.source} was cut short after its header was read: {self.name} has lost bytes")
        return data.view(self.dtype).reshape(shape)


def name_source[F: Callable[..., Any]](function: F) -> F:
    """Returns the function of a `source`, whose errors begin with the path of a source that is one, or has one."""

    @functools.wraps(function)
    def named(source: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(source, *args, **kwargs)
        except (Unsupported, ValueError) as error:
            path = source if isinstance(source, str | Path) else getattr(source, "path", None)
            if path is not None and str(path) not in str(error):
                error.args = (f"{path}: {error}",)
            raise

    return cast(F, named)


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object that a JSON file holds; ValueError with the path for any other content."""
    with open(path, "rb") as file:
        text = file.read(MAX_HEADER + 1)
    if len(text) > MAX_HEADER:
        raise ValueError(f"{path} has more than {MAX_HEADER} bytes")
    return parse_json(text, str(path))


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """Returns the object of this text, in which no name occurs twice; the message of a ValueError begins by `where`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            repeated, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise ValueError(f"it has the key {repeated!r} twice")
        return values

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{where} is no JSON that can be read: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} holds a {type(value).__name__}; it must be a JSON object")
    return value


def read_header(path: Path) -> dict[str, Entry | str]:
    """Reads the tensors of one file by name, or the name of an unknown dtype; ValueError for a broken file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > size - 8:
            raise ValueError(f"{path} is no safetensors file, or was cut short: its header has {length} bytes")
        if length > MAX_HEADER:
            raise ValueError(f"{path} has a header of {length} bytes; safetensors has at most {MAX_HEADER}")
        header = parse_json(file.read(length), f"{path} is no safetensors file: its header")
    metadata = header.pop("__metadata__", None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError(f"{path} is broken: __metadata__ must have strings alone")
    entries: dict[str, Entry | str] = {}
    data_start = 8 + length
    ranges = {}
    for name, value in header.items():
        dtype, shape, start, end = _parse_tensor(path, name, value)
        ranges[name] = (start, end)
        if dtype in DTYPES:
            entries[name] = Entry(name, path, DTYPES[dtype], shape, data_start + start)
        else:
            entries[name] = dtype
    reached = 0
    for name in sorted(ranges, key=lambda name: ranges[name]):
        start, end = ranges[name]
        if start != reached:
            fault = "overlaps the tensor before it" if start < reached else "leaves a hole before it"
            raise ValueError(f"{path} is broken: {name} at bytes {start} to {end} {fault}, which ends at {reached}")
        if data_start + end > size:
            raise ValueError(f"{path} was cut short: it has {size} bytes, and {name} ends at {data_start + end}")
        reached = end
    if data_start + reached != size:
        raise ValueError(f"{path} is broken: it has {size} bytes, and its tensors end at {data_start + reached}")
    return entries


def _parse_tensor(path: Path, name: str, value: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Returns (dtype, shape, start, end) of a tensor in a header, checked without the other tensors."""
    if not isinstance(value, dict):
        raise ValueError(f"{path} is broken: {name} is {reprlib.repr(value)}; it must be a JSON object")
    dtype = value.get("dtype")
    if not isinstance(dtype, str):
        raise ValueError(f"{path} is broken: {name} has dtype {reprlib.repr(dtype)}; it must be a string")
    shape = _parse_sizes(path, name, "shape", value.get("shape"))
    offsets = _parse_sizes(path, name, "data_offsets", value.get("data_offsets"))
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{path} is broken: {name} has data_offsets {list(offsets)}; they must be start and end")
    start, end = offsets
    if len(shape) > MAX_DIMS or math.prod(max(n, 1) for n in shape) * 8 >= MAX_BYTES:
        raise ValueError(f"{path} is broken: {name} has shape {reprlib.repr(shape)}, which no array has")
    if dtype in DTYPES and end - start != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{path} is broken: {name}, {dtype} of shape {shape}, has {end - start} bytes")
    return dtype, shape, start, end


def _parse_sizes(path: Path, name: str, key: str, value: Any) -> tuple[int, ...]:
    """Returns a list of integers that are not negative."""
    # The type of a flag is not int.
    if not isinstance(value, list) or not all(type(n) is int and 0 <= n < MAX_BYTES for n in value):
        raise ValueError(
            f"{path} is broken: {name} has {key} {reprlib.repr(value)}; it must be a list of integers from 0 on"
        )
    return tuple(value)
