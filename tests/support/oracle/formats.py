"""Round trips through FP8 formats, in NumPy: `x -> (values of the format, a scale a block) -> values * scale`."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from moax.recipe import Format, Recipe

# The bits of a mantissa, the least exponent of a normal value, and NumPy's dtype of each format.
BITS = {"e4m3": (3, -6, ml_dtypes.float8_e4m3fn), "e5m2": (2, -14, ml_dtypes.float8_e5m2)}


def round_to(y, dtype: str) -> np.ndarray:
    """Rounds y in float32 to the nearest value of the format, ties to even, as float64; Inf and NaN become NaN."""
    y = np.asarray(y, np.float32)
    rounded = np.where(np.isfinite(y), y, np.float32(0)).astype(BITS[dtype][2]).astype(np.float64)
    return np.where(np.isfinite(y), rounded, np.nan)


def by_blocks(x: np.ndarray, block: tuple) -> np.ndarray:
    """Returns the largest |x| of each block; the last block of a dim may be short. (4, 5) in blocks of (1, 2) gives
    (4, 3)."""
    for dim, b in enumerate(block):
        starts = np.arange(0, x.shape[dim], b)
        x = np.maximum.reduceat(np.abs(x), starts, axis=dim)
    return x


def expand(scales: np.ndarray, shape: tuple, block: tuple) -> np.ndarray:
    """Returns the scale of each element of an array of that shape: the inverse of `by_blocks`."""
    for dim, (n, b) in enumerate(zip(shape, block, strict=True)):
        scales = np.repeat(scales, b, axis=dim).take(np.arange(n), axis=dim)
    return scales


def scale_of(amax: np.ndarray, format: Format) -> np.ndarray:
    """Returns the float32 scale of a block whose largest |x| is amax."""
    scale = amax.astype(np.float32) * np.float32(1 / float(ml_dtypes.finfo(BITS[format.dtype][2]).max))
    scale = np.where(scale < 2.0**-126, np.float32(1), scale)
    if format.scale != "float32":
        scale = np.exp2(np.ceil(np.log2(scale.astype(np.float64)))).astype(np.float32)
    return scale


def quantize(x: np.ndarray, format: Format, block: tuple) -> tuple[np.ndarray, np.ndarray]:
    """Returns (values of the format in float64, scales in float32) of an array that one device holds."""
    x = np.asarray(x, np.float32)
    scales = scale_of(by_blocks(np.where(np.isfinite(x), x, np.float32(0)), block), format)
    return round_to(x * expand(np.float32(1) / scales, x.shape, block), format.dtype), scales


def round_trip(x: np.ndarray, format: Format | None, block: tuple | None) -> np.ndarray:
    """Returns x quantized and dequantized, as float64; x itself without a format."""
    if format is None:
        return np.asarray(x, np.float64)
    values, scales = quantize(x, format, block)
    return (values * expand(scales, values.shape, block)).astype(np.float32).astype(np.float64)


def round_weight(
    w: np.ndarray,
    format: Format | None,
    contracted: str,
    tp_dim: int | None = None,
    tp: int = 1,
):
    """Returns w [E, K, *C] as a product over K ("rows") or over C ("columns") sees it.

    The columns are one flat dim: of wi [E, H, 2, F] a block may lie over the end of the gate and the start of the up
    projection. How FSDP shards w does not matter; each of `tp` parts of the dim `tp_dim` is quantized by itself.
    """
    if format is None:
        return np.asarray(w, np.float64)
    parts = []
    block = format.weight_block(3, "fprop" if contracted == "rows" else "dgrad")
    for part in np.split(np.asarray(w, np.float32), tp, axis=tp_dim or 0):
        flat = part.reshape(*part.shape[:2], -1)
        parts.append(round_trip(flat, format, block).reshape(part.shape))
    return np.concatenate(parts, axis=tp_dim or 0)


def round_rows(
    x: np.ndarray,
    format: Format | None,
    contracted: str,
    segments=None,
    tp: int = 1,
) -> np.ndarray:
    """Returns rows x [M, *C] as a product over C ("columns") or over M ("rows") sees them.

    segments: slices of rows in which blocks of rows start anew, those of an expert on a device. tp: in how many parts,
    each quantized by itself, the last dim is split.
    """
    if format is None:
        return np.asarray(x, np.float64)
    x = np.array(x, np.float32)
    if contracted == "columns":
        parts = []
        for part in np.split(x, tp, axis=-1):
            flat = part.reshape(len(part), -1)
            parts.append(round_trip(flat, format, (1, format.block)).reshape(part.shape))
        return np.concatenate(parts, axis=-1)
    out = np.zeros(x.shape)
    for rows in [slice(0, len(x))] if segments is None else segments:
        if rows.stop > rows.start:
            flat = x[rows].reshape(rows.stop - rows.start, -1)
            out[rows] = round_trip(flat, format, (format.block, 1)).reshape(x[rows].shape)
    return out


def fake_operands(
    x,
    w,
    dy,
    recipe: Recipe,
    real=None,
    *,
    shards: int = 1,
    tp_dim: int | None = None,
    tp: int = 1,
):
    """Returns what the matmuls see of x [M, K], w [E, K, *C] and dy [M, *C], each rounded along the dim that is
    contracted:

        (x, w) of forward, (x of wgrad, w of dgrad), (dy of dgrad, dy of wgrad)

    real: which rows count; the others are 0. shards: on how many devices the rows lie, each with blocks of its own;
    every expert's rows begin at a multiple of the block, so that blocks of rows hold one expert. tp_dim: the dim of w
    of which each of `tp` parts is quantized by itself: 1 (x is split with it) or the last one (dy is).
    """
    real = np.ones(len(x), bool) if real is None else real
    x = np.where(real.reshape(-1, *[1] * (x.ndim - 1)), x, 0.0).astype(np.float32)
    dy = np.where(real.reshape(-1, *[1] * (dy.ndim - 1)), dy, 0.0).astype(np.float32)
    n = len(x) // shards
    segments = [slice(i * n, (i + 1) * n) for i in range(shards)]
    of_x, of_dy = (tp if tp_dim == dim else 1 for dim in (1, np.ndim(w) - 1))
    return (
        round_rows(x, recipe.x, "columns", tp=of_x), round_weight(w, recipe.w, "rows", tp_dim, tp),
        round_rows(x, recipe.x, "rows", segments), round_weight(w, recipe.w, "columns", tp_dim, tp),
        round_rows(dy, recipe.dy, "columns", tp=of_dy), round_rows(dy, recipe.dy, "rows", segments),
    )  # fmt: skip
