"""Weights with scales under a name of their own, as DeepSeek-V4 is published: `w1.weight` and `w1.scale`.

fp8 128 x 128 (Base)    w[r, c] = e4m3(weight[r, c]) * scale[r // 128, c // 128]              scale f32 or e8m0
fp4 1 x 32 (Flash, Pro) w[r, 2 j + i] = e2m1(nibble i of weight[r, j]) * scale[r, j // 16]    scale e8m0

NVIDIA-NeMo/Automodel#2034 lists the shapes and dtypes of both. Nibbles 0 and 1 are the low and the high
half of a byte. bfloat16 holds fp4 exactly. The product of an fp8 value and its scale is rounded once, to bfloat16 or to
the wanted dtype.
"""

from __future__ import annotations

from typing import cast

import jax.numpy as jnp
import numpy as np

from moax.hf.files import FP8_BLOCK, MOST_OF_FP4, State, Stored, check_scales, decode_fp8, decode_mxfp4, find_entry
from moax.hf.headers import Entry

WEIGHT = ".weight"
SCALE = ".scale"
FP4_GROUP = 32  # values with one scale
FP4_BYTES = 16  # of a group
PACKED = (np.dtype(np.int8), np.dtype(np.uint8))
E8M0 = np.dtype(jnp.float8_e8m0fnu)
E4M3 = np.dtype(jnp.float8_e4m3fn)
# The dtypes of the scales, by the dtype of the weights.
SCALES = {E4M3: (np.dtype(np.float32), E8M0), **dict.fromkeys(PACKED, (E8M0,))}


class Scaled(Stored):
    """A quantized weight and its scales."""

    def check(self, expected_shape: tuple[int, ...]) -> None:
        """Raises ValueError where `read` cannot decode the tensor, or its values have another shape."""
        name, _, dtype, shape, _ = self.data
        scales = cast(Entry, self.scales)
        if scales.dtype not in SCALES[dtype]:
            known = " or ".join(map(str, SCALES[dtype]))
            raise ValueError(f"{scales.name} has dtype {scales.dtype}; scales of {name}, {dtype}, must be {known}")
        if len(shape) < 2:
            raise ValueError(f"{name} has shape {shape}; this config needs {expected_shape}")
        if dtype in PACKED:
            shape = (*shape[:-1], 2 * shape[-1])
            blocks = (*shape[:-1], -(-shape[-1] // FP4_GROUP))
        else:
            blocks = (*shape[:-2], *(-(-size // FP8_BLOCK) for size in shape[-2:]))
        if shape != expected_shape:
            raise ValueError(f"{name} holds values of shape {shape}; this config needs {expected_shape}")
        if dtype in PACKED and shape[-1] % FP4_GROUP:
            raise ValueError(f"{name} holds {shape[-1]} values in a row; fp4 has groups of {FP4_GROUP}")
        if scales.shape != blocks:
            raise ValueError(f"{scales.name} has shape {scales.shape}; the scales of {name} must be {blocks}")

    def read(self, dtype: np.dtype, part: int = 0, parts: int = 1) -> np.ndarray:
        """Returns the values in `dtype`, or one of equal parts along the first dim."""
        entry = cast(Entry, self.scales)
        data = self.data.read(part, parts)
        scales = entry.read(part, parts)
        numbers = scales.astype(np.float32)
        if data.dtype not in PACKED:
            check_scales(entry.name, numbers)
            return decode_fp8(data, numbers, dtype)
        check_scales(entry.name, numbers, MOST_OF_FP4)
        blocks = data.view(np.uint8).reshape(*scales.shape, FP4_BYTES)
        return decode_mxfp4(blocks, scales.view(np.uint8)).swapaxes(-1, -2).astype(dtype)


def locate_scaled(state: State, name: str) -> Scaled | None:
    """Returns the quantized weight of this name, with the scales beside it; None where there is none."""
    scale = name.removesuffix(WEIGHT) + SCALE
    if not name.endswith(WEIGHT) or name not in state or scale not in state:
        return None
    data = find_entry(state, name)
    if data.dtype not in SCALES:
        return None
    return Scaled(data, find_entry(state, scale))
