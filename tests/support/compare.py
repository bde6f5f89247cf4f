"""Relative errors that a NaN, a small slice or a wrong shape cannot pass."""

from __future__ import annotations

import numpy as np


def rel_error(got, want, per: int | None = None) -> float:
    """max |got - want| / max |want|; with `per` the greatest of those of each slice of that dim (an expert, say), so
    that a small slice hides behind no large one. Infinite where want is all zero and got is not; a NaN is never
    small."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise AssertionError(f"shape {got.shape}, want {want.shape}")
    dims = tuple(d for d in range(want.ndim) if d != per)
    off, scale = np.abs(got - want).max(dims, initial=0.0), np.abs(want).max(dims, initial=0.0)
    ratio = np.where(scale > 0, off / np.where(scale > 0, scale, 1.0), np.where(off == 0, 0.0, np.inf))
    return float(np.max(ratio, initial=0.0))


def rel_norm(got, want, per: int | None = None) -> float:
    """|got - want| / |want| in the Euclidean norm; with `per` the greatest of those of each slice of that dim. For sums
    over many tokens, whose single elements may cancel to nearly nothing. A NaN is never small."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise AssertionError(f"shape {got.shape}, want {want.shape}")
    dims = tuple(d for d in range(want.ndim) if d != per)
    off, scale = np.sqrt(((got - want) ** 2).sum(dims)), np.sqrt((want**2).sum(dims))
    ratio = np.where(scale > 0, off / np.where(scale > 0, scale, 1.0), np.where(off == 0, 0.0, np.inf))
    return float(np.max(ratio, initial=0.0))
