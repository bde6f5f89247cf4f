"""Hatchling calls this hook: it makes the page of a package index from README.md, where links into the clone are dead.

A link to a file of the repository becomes its text and the file's path, which the source distribution has too.
"""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

NOTE = "\nPaths such as `docs/index.md` name files of the source distribution and of the repository.\n"


def index_readme(text: str) -> str:
    """Returns the text of README.md without relative links: `[nnx](docs/nnx.md)` becomes ``nnx (`docs/nnx.md`)``.

    A picture becomes its alternative text and its path, as a link does.
    """

    def plain(match: re.Match) -> str:
        words, path = match.groups()
        return f"`{path}`" if words == path else f"{words} (`{path}`)"

    return re.sub(r"!?\[([^\]]+)\]\((?!https?://|#)([^)]+)\)", plain, text) + NOTE


class IndexReadme(MetadataHookInterface):
    """The hook: it sets the field `readme`, which pyproject.toml names as dynamic."""

    def update(self, metadata: dict) -> None:
        """Sets `readme` in the metadata of the distribution."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": index_readme(text)}
