"""How tables and counts are printed."""

from __future__ import annotations

from collections.abc import Sequence


def align(rows: Sequence[tuple[str, ...] | None], right: tuple[int, ...] = ()) -> str:
    """Returns rows of cells as lines of aligned columns; None in place of a row draws a rule of dashes.

    The columns of the indices `right` are flush right, and the others flush left.
    """
    cells_of_columns = zip(*(row for row in rows if row), strict=True)
    widths = [max(map(len, cells)) for cells in cells_of_columns]
    dashes = tuple("-" * width for width in widths)
    lines = []
    for row in rows:
        cells = []
        for column, (cell, width) in enumerate(zip(row or dashes, widths, strict=True)):
            cells.append(cell.rjust(width) if column in right else cell.ljust(width))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def plural(count: int, noun: str) -> str:
    """Returns a count with its noun: `plural(1, "layer")` is "1 layer", `plural(2, "layer")` is "2 layers"."""
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}s"
