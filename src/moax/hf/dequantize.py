"""Finds a tensor of a checkpoint, which is plain, or quantized as data and scales, and reads its values.

    mxfp4 (GPT-OSS)       w[32 g + i, r] = e2m1(nibble i of blocks[r, g]) * 2^(scales[r, g] - 127)
    fp8 (DeepSeek-V3)     w[r, c] = e4m3(data[r, c]) * scale_inv[r // 128, c // 128]

Nibbles 2 j and 2 j + 1 are the low and the high half of byte j. bfloat16 holds mxfp4 exactly. The product of an fp8
value and a float32 scale is rounded once, to bfloat16 or to the wanted dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import BFloat16, Float, Float8e4m3fn, UInt8

from moax.checks import Unsupported
from moax.hf.files import Entry, find_entry

BF16 = np.dtype(jnp.bfloat16)
FP8_BLOCK = 128
MXFP4, FP8 = ("_blocks", "_scales"), ("", "_scale_inv")  # the ends of the names of data and of scales
QUANTIZED = (*MXFP4, FP8[1])


class Stored(NamedTuple):
    """A tensor of a checkpoint: its data, and its scales if it is quantized."""

    data: Entry
    scales: Entry | None

    @property
    def mxfp4(self) -> bool:
        return self.scales is not None and self.scales.name.endswith(MXFP4[1])

    @property
    def dtype(self) -> np.dtype:
        """The default dtype of the values: bfloat16 for a quantized tensor, else the dtype of the data."""
        return self.data.dtype if self.scales is None else BF16

    def check(self, want: tuple[int, ...]) -> None:
        """Raises Unsupported or ValueError where `read` cannot decode the tensor, or its values have another shape."""
        name, _, dtype, have, _ = self.data
        blocks = ()
        if self.scales is None:
            if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
                raise Unsupported(f"{name} has dtype {dtype}, and no scales that moax.hf knows")
        elif self.mxfp4:
            if len(have) != 4 or have[-1] != 16 or dtype != np.uint8:
                raise ValueError(f"{name} has shape {have}, dtype {dtype}; it must be [E, rows, C / 32, 16] uint8")
            blocks, have = have[:-1], (have[0], have[2] * 32, have[1])
        else:
            if dtype != jnp.float8_e4m3fn:
                raise Unsupported(f"{name} has dtype {dtype} and scales; moax.hf reads scales of float8_e4m3fn alone")
            blocks = (*have[:-2], *(-(-n // FP8_BLOCK) for n in have[-2:]))
        if self.scales is not None and self.scales.shape != blocks:
            raise Unsupported(f"{self.scales.name} has shape {self.scales.shape}; moax.hf reads scales of {blocks}")
        if have != want:
            raise ValueError(f"{name} has shape {have}; this config needs {want}")

    def read(self, dtype: np.dtype, part: int = 0, parts: int = 1) -> np.ndarray:
        """Returns the values in `dtype`, or one of equal parts along the first dim."""
        data = self.data.read(part, parts)
        if self.scales is None:
            return data.astype(dtype, copy=False)
        scales = self.scales.read(part, parts)
        if self.mxfp4:
            return decode_mxfp4(data, scales).swapaxes(-1, -2).astype(dtype)
        return decode_fp8(data, scales, dtype)


def locate(state: Mapping[str, Any], name: str) -> Stored | None:
    """Returns the tensor of this name, plain or quantized; None where the checkpoint does not have it."""
    for data, scales in (FP8, MXFP4):
        if name + data in state and name + scales in state:
            return Stored(find_entry(state, name + data), find_entry(state, name + scales))
    return Stored(find_entry(state, name), None) if name in state else None


def decode_mxfp4(
    blocks: UInt8[np.ndarray, "*E R B 16"], scales: UInt8[np.ndarray, "*E R B"]
) -> BFloat16[np.ndarray, "*E R C"]:
    """Decodes mxfp4 exactly, with C = 32 B; a scale of 255 is NaN (OCP MX 1.0)."""
    values = np.stack([blocks & 15, blocks >> 4], -1).view(jnp.float4_e2m1fn).astype(np.float32)
    with np.errstate(over="ignore"):
        values = values.reshape(*scales.shape, 32) * scales.view(jnp.float8_e8m0fnu).astype(np.float32)[..., None]
    return values.reshape(*scales.shape[:-1], -1).astype(BF16)


def decode_fp8(
    data: Float8e4m3fn[np.ndarray, "*E R C"], scale_inv: Float[np.ndarray, "*E A B"], dtype: np.dtype
) -> Float[np.ndarray, "*E R C"]:
    """Multiplies in float32 and rounds to `dtype`; A = ceil(R / 128), B = ceil(C / 128)."""
    values = data.astype(np.float32)
    for i in range(scale_inv.shape[-2]):
        row = scale_inv[..., i, None, :].astype(np.float32).repeat(FP8_BLOCK, -1)
        values[..., i * FP8_BLOCK : (i + 1) * FP8_BLOCK, :] *= row[..., : data.shape[-1]]
    return values.astype(dtype)
