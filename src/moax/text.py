"""How tables and counts are printed."""

from __future__ import annotations

from collections.abc import Sequence


def align(rows: Sequence[tuple[str, ...] | None], right: tuple[int, ...] = ()) -> str:
    """Returns rows of cells as lines of aligned columns; None in place of a row draws a rule of dashes.

    The columns of the indices `right` are flush right, and the others flush left.
    """
    widths = [max(map(len, column)) for column in zip(*(row for row in rows if row), strict=True)]
    rule = tuple("-" * width for width in widths)
    flush = [str.rjust if i in right else str.ljust for i in range(len(widths))]
    return "\n".join(
        "  ".join(f(cell, width) for f, cell, width in zip(flush, row or rule, widths, strict=True)).rstrip()
        for row in rows
    )


def plural(count: int, noun: str) -> str:
    """Returns a count with its noun: `plural(1, "layer")` is "1 layer", `plural(2, "layer")` is "2 layers"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
