"""The benchmarks are a room of the repository: they import moax, moax never imports them, the wheel leaves them out."""

import ast
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.more

ROOT = Path(__file__).parent.parent.parent
FILES = sorted((ROOT / "benchmarks").rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The first names of what a file imports."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return {name.split(".")[0] for name in plain | {n.module or "" for n in nodes if isinstance(n, ast.ImportFrom)}}


def test_moax_does_not_import_the_benchmarks():
    """Breaks if the installed library needs a package that the wheel does not hold."""
    found = [path for path in sorted((ROOT / "src").rglob("*.py")) if imported(path) & {"benchmarks", "tests"}]
    assert not found and any("moax" in imported(path) for path in FILES)


def test_the_wheel_holds_moax_alone_and_the_sdist_all():
    """Breaks if benchmarks enter the wheel, or if the source distribution lacks them."""
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"] == {"packages": ["src/moax"]} and "/benchmarks" in targets["sdist"]["include"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_long_file(path):
    """Breaks if a file is not read in one go."""
    assert len(path.read_text().splitlines()) <= 400
