"""Relative errors that a NaN, a small slice or a wrong shape cannot pass."""

from __future__ import annotations

import numpy as np


def rel_error(got, want, per: int | None = None) -> float:
    """Returns max |got - want| / max |want|; with `per` the greatest of those of each slice of that dim (an expert,
    say), so
    that a small slice hides behind no large one. Infinite where want is all zero and got is not; a NaN is never
    small."""
    return _ratio(got, want, per, lambda v, dims: np.abs(v).max(dims, initial=0.0))


def rel_norm(got, want, per: int | None = None) -> float:
    """Returns what `rel_error` does, in the Euclidean norm: for sums over many tokens, whose single elements may
    cancel."""
    return _ratio(got, want, per, lambda v, dims: np.sqrt((v**2).sum(dims)))


def _ratio(got, want, per, size) -> float:
    got = np.asarray(got, np.float64)
    want = np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise AssertionError(f"shape {got.shape}, want {want.shape}")
    dims = tuple(d for d in range(want.ndim) if d != per)
    off = size(got - want, dims)
    scale = size(want, dims)
    ratio = np.where(
        scale > 0,
        off / np.where(scale > 0, scale, 1.0),
        np.where(off == 0, 0.0, np.inf),
    )
    return float(np.max(ratio, initial=0.0))
