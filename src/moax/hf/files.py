"""Reads and writes safetensors files, one tensor at a time, and decodes quantized tensors.

`moax.hf.headers` reads the list of tensors of a file. The library `safetensors` has no FP8 in its NumPy interface, maps
files into the memory of this process, and writes a file from all of its tensors at once. Plain reads and writes have
one tensor in memory, or a part of one.
"""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import BFloat16, Float, Float8e4m3fn, Float32, UInt8

from moax.checks import Unsupported
from moax.hf.headers import DTYPES, NAMES, Entry, read_header, read_json

INDEX = "model.safetensors.index.json"
BF16 = np.dtype(jnp.bfloat16)
FP8_BLOCK = 128
# the ends of the names of data and of scales
MXFP4 = ("_blocks", "_scales")
FP8 = ("", "_scale_inv")
QUANTIZED = (*MXFP4, FP8[1])
# The dtypes of the scales. The bytes of mxfp4 are float8_e8m0fnu, which GPT-OSS stores as uint8.
MXFP4_SCALES = ("uint8", "float8_e8m0fnu")
FP8_SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
MOST_OF_FP4 = 2.0**125  # the largest scale of fp4, whose largest value is 6, in bfloat16
State = Mapping[str, Any]  # a `Checkpoint`, or arrays by name


class Checkpoint(Mapping[str, np.ndarray]):
    """The tensors of safetensors files, by name. Each access `checkpoint[name]` reads the tensor from its file.

    Args:
      path: one file, or a folder. A folder has the files that `model.safetensors.index.json` names; without an index,
        it has all of its safetensors files.

    Raises:
      ValueError: the path does not exist, has no safetensors file, or has one that is broken; the index is broken, or
        names a file outside the folder; without an index, two files have a tensor of one name.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._entries: dict[str, Entry | str] = {}
        if (self.path / INDEX).is_file():
            self._read_index(self.path / INDEX)
            return
        files = [self.path] if self.path.is_file() else sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ValueError(f"checkpoint {str(path)!r}: a safetensors file is not there")
        file_of_name: dict[str, Path] = {}
        for file in files:
            for name, entry in self._read_file(file).items():
                if name in file_of_name:
                    raise ValueError(
                        f"checkpoint {str(path)!r}: {name} is in {file_of_name[name].name} and in "
                        f"{file.name}; give one of the files, or an index"
                    )
                file_of_name[name] = file
                self._entries[name] = entry

    def _read_index(self, index: Path) -> None:
        """Reads the tensors of an index, each from the one file that the index maps its name to."""
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(
                f"{index}: weight_map is {reprlib.repr(weight_map)}; it must map names of tensors to files"
            )
        names_of_file: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or not _is_inside(file):
                raise ValueError(
                    f"{index}: weight_map has {name!r} in {reprlib.repr(file)}; it must be a file in this folder"
                )
            names_of_file.setdefault(file, []).append(name)
        # A file may hold further tensors, such as an older copy of one that the index maps to another file.
        for file, names in sorted(names_of_file.items()):
            entries = self._read_file(self.path / file)
            for name in names:
                if name not in entries:
                    raise ValueError(f"checkpoint {str(self.path)!r}: {name} is in the index, but not in {file}")
                self._entries[name] = entries[name]

    def _read_file(self, file: Path) -> dict[str, Entry | str]:
        """Reads the header of a file that must be there."""
        if not os.path.isfile(file):  # `Path.is_file` raises OSError for a name that is too long.
            raise ValueError(f"checkpoint {str(self.path)!r}: {file} is not there")
        return read_header(file)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.entry(name).read()

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # `Mapping.__contains__` would read the tensor.

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, name: str) -> Entry:
        """Returns a tensor without reading it."""
        entry = self._entries[name]
        if isinstance(entry, str):
            raise Unsupported(f"{self.path}: {name} has dtype {entry}; moax.hf knows {', '.join(DTYPES)}")
        return entry


def _is_inside(file: str) -> bool:
    """Whether a relative path stays in its folder by its names alone; a link of the hub's cache leads out of it."""
    paths = PurePosixPath(file), PureWindowsPath(file)
    return not any(path.anchor or ".." in path.parts for path in paths)


def find_entry(state: State, name: str) -> Entry:
    """Returns a tensor of a `Checkpoint` or of a mapping of arrays, without reading it."""
    if isinstance(state, Checkpoint):
        return state.entry(name)
    value = state[name]
    if not isinstance(value, np.ndarray | jax.Array):
        raise ValueError(f"{name} is a {type(value).__name__}; it must be an array of NumPy or JAX")
    return Entry(name, value, np.dtype(value.dtype), tuple(value.shape))


class Stored(NamedTuple):
    """A tensor of a checkpoint, plain, or quantized as data and scales.

    mxfp4 (GPT-OSS)       w[32 g + i, r] = e2m1(nibble i of blocks[r, g]) * 2^(scales[r, g] - 127)
    fp8 (DeepSeek-V3)     w[r, c] = e4m3(data[r, c]) * scale_inv[r // 128, c // 128]

    Rows of concatenated experts are counted from the first expert: with 100 rows an expert, r = 128 is row 28 of
    expert 1. Nibbles 2 j and 2 j + 1 are the low and the high half of byte j. bfloat16 holds mxfp4 exactly. The product
    of an fp8 value and a float32 scale is rounded once, to bfloat16 or to the wanted dtype.
    """

    data: Entry
    scales: Entry | None = None

    @property
    def dtype(self) -> np.dtype:
        """The default dtype of the values: bfloat16 for a quantized tensor, else the dtype of the data."""
        if self.scales is None:
            return self.data.dtype
        return BF16

    @property
    def is_mxfp4(self) -> bool:
        """Whether the name of the scales says mxfp4; other scales are those of fp8."""
        return self.scales is not None and self.scales.name.endswith(MXFP4[1])

    def check(self, expected_shape: tuple[int, ...]) -> None:
        """Raises Unsupported or ValueError where `read` cannot decode the tensor, or its values have another shape."""
        name, _, dtype, shape, _ = self.data
        blocks = ()
        scale_dtypes = FP8_SCALES
        if self.scales is None:
            if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
                raise Unsupported(f"{name} has dtype {dtype}, and no scales that moax.hf knows")
        elif self.is_mxfp4:
            scale_dtypes = MXFP4_SCALES
            if len(shape) != 4 or shape[-1] != 16 or dtype != np.uint8:
                raise ValueError(f"{name} has shape {shape}, dtype {dtype}; it must be [E, rows, C / 32, 16] uint8")
            blocks = shape[:-1]
            shape = (shape[0], shape[2] * 32, shape[1])
        else:
            if dtype != jnp.float8_e4m3fn:
                raise Unsupported(f"{name} has dtype {dtype} and scales; moax.hf reads scales of float8_e4m3fn alone")
            blocks = (*shape[:-2], *(-(-size // FP8_BLOCK) for size in shape[-2:]))
        if self.scales is not None:
            scales = self.scales
            if scales.dtype.name not in scale_dtypes:
                known = " or ".join(scale_dtypes)
                raise ValueError(f"{scales.name} has dtype {scales.dtype}; scales of {name} must be {known}")
            if scales.shape != blocks:
                raise Unsupported(f"{scales.name} has shape {scales.shape}; moax.hf reads scales of {blocks}")
        if shape != expected_shape:
            raise ValueError(f"{name} has shape {shape}; this config needs {expected_shape}")

    def read(self, dtype: np.dtype, part: int = 0, parts: int = 1) -> np.ndarray:
        """Returns the values in `dtype`, or one of equal parts along the first dim; ValueError for a broken scale."""
        data = self.data.read(part, parts)
        if self.scales is None:
            return data.astype(dtype, copy=False)
        if self.is_mxfp4:
            scales = self.scales.read(part, parts)
            numbers = scales.view(jnp.float8_e8m0fnu).astype(np.float32)
            check_scales(self.scales.name, numbers, MOST_OF_FP4)
            return decode_mxfp4(data, scales.view(np.uint8)).astype(dtype)
        skip = 0
        if data.ndim == 2:
            # The rows of a part, an expert of concatenated ones, may start inside a block.
            begin, skip = divmod(part * len(data), FP8_BLOCK)
            blocks = -(-(skip + len(data)) // FP8_BLOCK)
            scales = self.scales.read()[begin : begin + blocks]
        else:
            scales = self.scales.read(part, parts)
        numbers = scales.astype(np.float32)
        check_scales(self.scales.name, numbers)
        return decode_fp8(data, numbers, dtype, skip)


def locate(state: State, name: str) -> Stored | None:
    """Returns the tensor of this name, plain or quantized; None where the checkpoint does not have it."""
    for data, scales in (FP8, MXFP4):
        if name + data in state and name + scales in state:
            return Stored(find_entry(state, name + data), find_entry(state, name + scales))
    if name not in state:
        return None
    return Stored(find_entry(state, name))


def check_scales(name: str, scales: Float32[np.ndarray, "..."], largest: float = np.inf) -> None:
    """Raises ValueError for a scale that is NaN, infinite, zero or negative, or above `largest`."""
    usable = (scales > 0) & (scales < np.inf) & (scales <= largest)  # False for NaN
    if not usable.all():
        limit = "finite"
        if largest < np.inf:
            limit = f"at most {largest}, since bfloat16 holds no larger values,"
        raise ValueError(f"{name} has a scale of {scales[~usable][0]}; scales must be {limit} and above 0")


def decode_mxfp4(
    blocks: UInt8[np.ndarray, "*E R B 16"], scales: UInt8[np.ndarray, "*E R B"]
) -> BFloat16[np.ndarray, "*E C R"]:
    """Decodes mxfp4 exactly, with C = 32 B; a scale of 255 is NaN (OCP MX 1.0)."""
    nibbles = np.stack([blocks & 15, blocks >> 4], -1)
    values = nibbles.view(jnp.float4_e2m1fn).astype(np.float32).reshape(*scales.shape, 32)
    numbers = scales.view(jnp.float8_e8m0fnu).astype(np.float32)
    with np.errstate(over="ignore"):
        values = values * numbers[..., None]
    return values.reshape(*scales.shape[:-1], -1).swapaxes(-1, -2).astype(BF16)


def decode_fp8(
    data: Float8e4m3fn[np.ndarray, "*E R C"],
    scale_inv: Float[np.ndarray, "*E A B"],
    dtype: np.dtype,
    skip: int = 0,
) -> Float[np.ndarray, "*E R C"]:
    """Multiplies in float32 and rounds to `dtype`; row 0 is row `skip` of a block, A = ceil((skip + R) / 128)."""
    rows, columns = data.shape[-2:]
    scale = scale_inv.astype(np.float32)
    scale = scale.repeat(FP8_BLOCK, -2)[..., skip : skip + rows, :]
    scale = scale.repeat(FP8_BLOCK, -1)[..., :columns]
    return (data.astype(np.float32) * scale).astype(dtype)


class Output(NamedTuple):
    """A tensor to be written; `parts()` yields arrays whose bytes follow one another in the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    parts: Callable[[], Iterator[np.ndarray]]

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_files(folder: Path, tensors: Mapping[str, Output], shard_bytes: int) -> list[Path]:
    """Writes model.safetensors, or files model-i-of-n.safetensors of at most `shard_bytes` and their index.

    A larger tensor has a file of its own. Returns the paths of the files.
    """
    shards: list[dict[str, Output]] = [{}]
    room = shard_bytes
    for name, output in tensors.items():
        if shards[-1] and output.size > room:
            shards.append({})
            room = shard_bytes
        shards[-1][name] = output
        room -= output.size
    if len(shards) == 1:
        files = {"model.safetensors": shards[0]}
    else:
        files = {f"model-{i + 1:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards)}
        weight_map = {tensor: name for name, shard in files.items() for tensor in shard}
        total = sum(output.size for output in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for name, shard in files.items():
        _write(folder / name, shard)
    return [folder / name for name in files]


def _write(path: Path, tensors: Mapping[str, Output]) -> None:
    """Writes one file. As in the library `safetensors`, wide dtypes come first, so that each tensor is aligned."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, output in ordered:
        end = start + output.size
        header[name] = dict(dtype=NAMES[output.dtype], shape=list(output.shape), data_offsets=[start, end])
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, output in ordered:
            for array in output.parts():
                file.write(np.ascontiguousarray(array).view(np.uint8).data)
    os.replace(part, path)
