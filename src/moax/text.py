"""Tables of text, for what the tools print."""

from __future__ import annotations

from collections.abc import Sequence


def align_columns(rows: Sequence[tuple[str, ...] | None], right: tuple[int, ...]) -> str:
    """Rows as aligned columns, one row a line.

    Args:
      rows: cells of each row; None is a rule over all columns.
      right: the columns that are flush right, by index.
    """
    widths = [max(map(len, column)) for column in zip(*(row for row in rows if row), strict=True)]
    rule = tuple("-" * width for width in widths)
    flush = [str.rjust if i in right else str.ljust for i in range(len(widths))]
    lines = [
        "  ".join(f(cell, width) for f, cell, width in zip(flush, row or rule, widths, strict=True)) for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
