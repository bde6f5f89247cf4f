"""The names of Megatron-Core and Transformer Engine on the migration pages, looked up in the sources of both.

Neither package can run on a CPU; each is installed without what it depends on, and read.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

from rows import row

PAGES = Path(__file__).parents[3] / "docs" / "how-to"
SOURCES = [  # package, module, page, heading of the column, files that must have the names
    ("megatron-core", "megatron.core", "maxtext-megatron.md", "Megatron-Core", "**/*.py"),
    ("transformer-engine", "transformer_engine", "transformer-engine.md", "Transformer Engine", "jax/**/*.py"),
]


def names_of(page: Path, heading: str) -> set[str]:
    """Returns the names in backticks, of three or more letters, in the columns of this heading."""
    column, found = None, set()
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if heading in cells:
            column = cells.index(heading)
        elif not cells:
            column = None
        elif column is not None and len(cells) > column:
            found |= set(re.findall(r"`\"?([a-z0-9_]{3,})\"?(?:=[^`]*)?`", cells[column]))
    return found


def main() -> None:
    """Prints a row for each package: how many of its names no source file has as a word."""
    for package, module, page, heading, files in SOURCES:
        spec = importlib.util.find_spec(module.partition(".")[0])
        folder = Path(spec.submodule_search_locations[0]).joinpath(*module.split(".")[1:])
        words = {word for path in folder.glob(files) for word in re.findall(r"\w+", path.read_text())}
        found = names_of(PAGES / page, heading)
        assert len(found) > 10 and len(words) > 1000, f"{page} or {folder} has not what is looked for"
        unknown = sorted(found - words)
        what = f"{len(found)} names of the page, unknown: {', '.join(unknown) or 'none'}"
        row(f"{heading} {importlib.metadata.version(package)}", what, "-", None, limit=0, unknown=len(unknown))


if __name__ == "__main__":
    main()
