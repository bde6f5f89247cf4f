"""Sets of times as sorted lists of disjoint intervals (start, end): their union, intersection and length."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the times that lie in at least one interval.

    (0, 4), (2, 5), (5, 6) and (8, 9) are (0, 6) and (8, 9).

    Args:
      intervals: (start, end) in any order; they may overlap. An interval without length adds nothing.

    Returns:
      Disjoint intervals in ascending order, which do not touch.
    """
    joined: list[Interval] = []
    for start, end in sorted(interval for interval in intervals if interval[0] < interval[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def intersect(a: list[Interval], b: list[Interval]) -> list[Interval]:
    """Returns the times that lie in both unions.

    (0, 6), (8, 9) and (5, 10) share (5, 6) and (8, 9).

    Args:
      a, b: disjoint intervals in ascending order, as `union` returns them.
    """
    shared, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            shared.append((start, end))
        i, j = (i + 1, j) if a[i][1] < b[j][1] else (i, j + 1)
    return shared


def length(intervals: Iterable[Interval]) -> float:
    """Returns the sum of the lengths of disjoint intervals."""
    return sum(end - start for start, end in intervals)
