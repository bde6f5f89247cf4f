"""Reads a tensor of a checkpoint, which is plain, or quantized as data and scales.

    mxfp4 (GPT-OSS)       w[32 g + i, r] = e2m1(nibble i of blocks[r, g]) * 2^(scales[r, g] - 127)
    fp8 (DeepSeek-V3)     w[r, c] = e4m3(data[r, c]) * scale_inv[r // 128, c // 128]

Nibbles 2 j and 2 j + 1 are the low and the high half of byte j. bfloat16 holds mxfp4 exactly. The product of an fp8
value and a float32 scale is rounded once, to bfloat16 or to the wanted dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import BFloat16, Float, Float8e4m3fn, UInt8

from moax.errors import Unsupported
from moax.hf.files import DTYPES, Checkpoint

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
BF16 = np.dtype(jnp.bfloat16)
FP8_BLOCK = 128
MXFP4, FP8 = ("_blocks", "_scales"), ("", "_scale_inv")  # the ends of the names of data and of scales
QUANTIZED = (*MXFP4, FP8[1])


class Stored(NamedTuple):
    """A tensor of the checkpoint `state`: the names of its data and of its scales, "" for a plain tensor."""

    state: Mapping[str, Any]
    name: str
    scales: str = ""

    @property
    def mxfp4(self) -> bool:
        return self.scales.endswith(MXFP4[1])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values: [E, 32 G, R] for mxfp4 data [E, R, G, 16], whose contracted dim is the last one."""
        shape = _describe(self.state, self.name)[0]
        return (shape[0], shape[2] * 32, shape[1]) if self.mxfp4 else shape

    @property
    def dtype(self) -> np.dtype:
        """The default dtype of the values: bfloat16 for a quantized tensor, else the dtype of the data."""
        return BF16 if self.scales else _describe(self.state, self.name)[1]

    def check(self) -> None:
        """Raises Unsupported or ValueError where `read` cannot decode the data and scales."""
        shape, dtype = _describe(self.state, self.name)
        if not self.scales:
            if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
                raise Unsupported(f"{self.name} has dtype {dtype}, and no scales that moax.hf knows")
            return
        if self.mxfp4 and (len(shape) != 4 or shape[-1] != 16 or dtype != np.uint8):
            raise ValueError(f"{self.name} has shape {shape}, dtype {dtype}; it must be [E, rows, C / 32, 16] uint8")
        if not self.mxfp4 and dtype != jnp.float8_e4m3fn:
            raise Unsupported(f"{self.name} has dtype {dtype} and scales; moax.hf reads scales of float8_e4m3fn alone")
        want = shape[:-1] if self.mxfp4 else (*shape[:-2], *(-(-n // FP8_BLOCK) for n in shape[-2:]))
        have = _describe(self.state, self.scales)[0]
        if have != want:
            raise Unsupported(f"{self.scales} has shape {have}; moax.hf reads blocks whose scales have shape {want}")

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the tensor can be read and has this shape."""
        try:
            self.check()
        except (Unsupported, ValueError):
            return False
        return self.shape == shape

    def read(self, dtype: np.dtype, index: int | None = None, parts: int = 1) -> np.ndarray:
        """Returns the values in `dtype`, all, or part `index` of `parts` along the first dim; see `_load`."""
        data = _load(self.state, self.name, index, parts)
        if not self.scales:
            return data.astype(dtype, copy=False)
        scales = _load(self.state, self.scales, index, parts)
        return decode_mxfp4(data, scales).T.astype(dtype) if self.mxfp4 else decode_fp8(data, scales, dtype)


def locate(state: Mapping[str, Any], name: str) -> Stored | None:
    """Returns the tensor of this name, plain or quantized; None where the checkpoint does not have it."""
    for data, scales in (FP8, MXFP4):
        if name + data in state and name + scales in state:
            return Stored(state, name + data, name + scales)
    return Stored(state, name) if name in state else None


def decode_mxfp4(blocks: UInt8[np.ndarray, "R B 16"], scales: UInt8[np.ndarray, "R B"]) -> BFloat16[np.ndarray, "R C"]:
    """Decodes mxfp4 exactly, with C = 32 B; a scale of 255 is NaN (OCP MX 1.0)."""
    values = np.stack([E2M1[blocks & 15], E2M1[blocks >> 4]], -1).reshape(*scales.shape, 32)
    factor = np.ldexp(np.float32(1), np.minimum(scales.astype(np.int32), 254) - 127)
    factor[scales == 255] = np.nan
    with np.errstate(over="ignore"):
        values *= factor[..., None]
    return values.reshape(len(blocks), -1).astype(BF16)


def decode_fp8(
    data: Float8e4m3fn[np.ndarray, "R C"], scale_inv: Float[np.ndarray, "A B"], dtype: np.dtype
) -> Float[np.ndarray, "R C"]:
    """Multiplies in float32 and rounds to `dtype`; A = ceil(R / 128), B = ceil(C / 128)."""
    values = data.astype(np.float32)
    for i, row in enumerate(scale_inv.astype(np.float32)):
        values[i * FP8_BLOCK : (i + 1) * FP8_BLOCK] *= np.repeat(row, FP8_BLOCK)[None, : data.shape[1]]
    return values.astype(dtype)


def _describe(state: Mapping[str, Any], name: str) -> tuple[tuple[int, ...], np.dtype]:
    """Returns the shape and dtype of a tensor without reading it."""
    if isinstance(state, Checkpoint):
        entry = state.entry(name)
        if entry.dtype not in DTYPES:
            raise Unsupported(f"{name} has dtype {entry.dtype}; moax.hf reads {', '.join(DTYPES)}")
        return entry.shape, DTYPES[entry.dtype]
    value = state[name]
    if not isinstance(value, np.ndarray | jax.Array):
        raise ValueError(f"{name} is a {type(value).__name__}; it must be an array of NumPy or JAX")
    return tuple(value.shape), np.dtype(value.dtype)


def _load(state: Mapping[str, Any], name: str, index: int | None, parts: int) -> np.ndarray:
    """Reads a tensor, or one part: part 3 of 8 of [8, 4, 2] is [4, 2], and of [16, 2] the rows 6 and 7."""
    size = _describe(state, name)[0][0] // parts
    if isinstance(state, Checkpoint):
        return state.entry(name).read(index, size)
    if index is None:
        return np.asarray(state[name])
    return np.asarray(state[name][index] if size == 1 else state[name][index * size : (index + 1) * size])
