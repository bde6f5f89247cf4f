"""A tensor as a checkpoint holds it: plain, or quantized, as data and scales.

    mxfp4 (GPT-OSS)       w[32 g + i, r] = e2m1(nibble i of blocks[r, g]) * 2^(scales[r, g] - 127); the low nibble first
    fp8 (DeepSeek-V3)     w[r, c] = e4m3(data[r, c]) * scale_inv[r // 128, c // 128]

mxfp4 is exact in bfloat16. A product of fp8 and a float32 scale is not: it is rounded once, to bfloat16 or to the
dtype that is asked for.
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
MXFP4, FP8 = ("_blocks", "_scales"), ("", "_scale_inv")  # what ends the names of data and scales
QUANTIZED = (*MXFP4, FP8[1])


class Stored(NamedTuple):
    """A tensor of `state`. scales: the name of its scales; "" where it is plain."""

    state: Mapping[str, Any]
    name: str
    scales: str = ""

    @property
    def mxfp4(self) -> bool:
        """Whether data and scales are mxfp4's."""
        return self.scales.endswith(MXFP4[1])

    def shape(self) -> tuple[int, ...]:
        """Of the values."""
        shape = _describe(self.state, self.name)[0]
        if not self.mxfp4:
            return shape
        experts, rows, groups, _ = shape  # the contracted dim is the last here, and the middle one of the values
        return experts, groups * 32, rows

    def dtype(self) -> np.dtype:
        """Of the values, where nobody asks for another."""
        return BF16 if self.scales else _describe(self.state, self.name)[1]

    def check(self) -> None:
        """Raises Unsupported, or ValueError, where data and scales are not what this module reads."""
        shape, dtype = _describe(self.state, self.name)
        if not self.scales:
            if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
                raise Unsupported(f"{self.name} has dtype {dtype}, and no scales beside it that moax.hf knows")
            return
        if self.mxfp4 and (len(shape) != 4 or shape[-1] != 16 or dtype != np.uint8):
            raise ValueError(f"{self.name} has shape {shape}, dtype {dtype}; it must be [E, rows, C / 32, 16] uint8")
        if not self.mxfp4 and dtype != jnp.float8_e4m3fn:
            raise Unsupported(f"{self.name} has dtype {dtype} and scales; with scales moax.hf reads float8_e4m3fn")
        want = shape[:-1] if self.mxfp4 else (*shape[:-2], *(-(-n // FP8_BLOCK) for n in shape[-2:]))
        have = _describe(self.state, self.scales)[0]
        if have != want:
            raise Unsupported(f"{self.scales} has shape {have}; moax.hf reads blocks whose scales are {want}")

    def read(self, index: int | None, dtype: np.dtype) -> np.ndarray:
        """The whole, or one entry of the first dim, in `dtype`."""
        data = _load(self.state, self.name, index)
        if not self.scales:
            return data.astype(dtype, copy=False)
        scales = _load(self.state, self.scales, index)
        return decode_mxfp4(data, scales).T.astype(dtype) if self.mxfp4 else decode_fp8(data, scales, dtype)


def locate(state: Mapping[str, Any], name: str) -> Stored | None:
    """The tensor of this name, plain or quantized; None where it is not there."""
    for data, scales in (FP8, MXFP4):
        if name + data in state and name + scales in state:
            return Stored(state, name + data, name + scales)
    return Stored(state, name) if name in state else None


def decode_mxfp4(blocks: UInt8[np.ndarray, "R B 16"], scales: UInt8[np.ndarray, "R B"]) -> BFloat16[np.ndarray, "R C"]:
    """Exact. C = 32 B. A scale of 255 is NaN (OCP MX 1.0)."""
    values = np.empty((*blocks.shape, 2), np.float32)
    values[..., 0], values[..., 1] = E2M1[blocks & 15], E2M1[blocks >> 4]
    values = values.reshape(*scales.shape, 32)
    factor = np.ldexp(np.float32(1), np.minimum(scales.astype(np.int32), 254) - 127)
    factor[scales == 255] = np.nan
    with np.errstate(over="ignore"):
        values *= factor[..., None]
    return values.reshape(len(blocks), -1).astype(BF16)


def decode_fp8(
    data: Float8e4m3fn[np.ndarray, "R C"], scale_inv: Float[np.ndarray, "A B"], dtype: np.dtype
) -> Float[np.ndarray, "R C"]:
    """The product in float32, then rounded to `dtype`. A = ceil(R / 128), B = ceil(C / 128)."""
    values = data.astype(np.float32)
    for i, row in enumerate(scale_inv.astype(np.float32)):
        rows = values[i * FP8_BLOCK : (i + 1) * FP8_BLOCK]
        rows *= np.repeat(row, FP8_BLOCK)[None, : data.shape[1]]
    return values.astype(dtype)


def _describe(state: Mapping[str, Any], name: str) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype, without reading it."""
    if isinstance(state, Checkpoint):
        entry = state.entry(name)
        if entry.dtype not in DTYPES:
            raise Unsupported(f"{name} has dtype {entry.dtype}; moax.hf reads {', '.join(DTYPES)}")
        return entry.shape, DTYPES[entry.dtype]
    value = state[name]
    if not isinstance(value, np.ndarray | jax.Array):
        raise ValueError(f"{name} is a {type(value).__name__}; it must be an array of NumPy or JAX")
    return tuple(value.shape), np.dtype(value.dtype)


def _load(state: Mapping[str, Any], name: str, index: int | None) -> np.ndarray:
    """The whole, or one entry of the first dim."""
    if isinstance(state, Checkpoint):
        return state.entry(name).read(index)
    return np.asarray(state[name] if index is None else state[name][index])
