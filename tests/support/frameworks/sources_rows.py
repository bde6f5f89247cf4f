"""The names of Megatron-Core and Transformer Engine on the migration pages, looked up in the sources of both.

Neither package can run on a CPU; each is installed without what it depends on, and read.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

from rows import names_of, names_row

SOURCES = [  # package, module, page, heading of the column, files that must have the names
    ("megatron-core", "megatron.core", "maxtext-megatron.md", "Megatron-Core", "**/*.py"),
    (
        "transformer-engine",
        "transformer_engine",
        "transformer-engine.md",
        "Transformer Engine",
        "jax/**/*.py",
    ),
]


def main() -> None:
    """Prints a row for each package: how many of its names no source file has as a word."""
    for package, module, page, heading, files in SOURCES:
        spec = importlib.util.find_spec(module.partition(".")[0])
        folder = Path(spec.submodule_search_locations[0]).joinpath(*module.split(".")[1:])
        words = {word for path in folder.glob(files) for word in re.findall(r"\w+", path.read_text())}
        assert len(words) > 1000, f"{folder} has no sources"
        names_row(
            f"{heading} {importlib.metadata.version(package)}",
            names_of(page, heading),
            words,
        )


if __name__ == "__main__":
    main()
