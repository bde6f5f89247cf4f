"""The versions of JAX that moax runs on: pyproject.toml, requirements/ and the pages say the same range.

Covers: both ends of the range; the extras of JAX's CUDA wheels; the files of requirements/; what the wheel holds.
`make test-versions` runs tests on both ends.
"""

import re
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from moax.__main__ import EXTRAS
from support import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
PAGES = ("README.md",)


def admitted() -> SpecifierSet:
    """What pyproject.toml says of jax."""
    return next(r.specifier for r in map(Requirement, PROJECT["dependencies"]) if r.name == "jax")


def end_of_range(end: str) -> Version:
    """The version of jax that `make test-versions` installs for that end of the range."""
    path = ROOT / "requirements" / f"{end}.txt"
    match = re.search(r"^jax==(\S+)$", path.read_text(), re.M)
    assert match, f"{path} names no version of jax"
    return Version(match[1])


def test_oldest_is_the_lower_bound():
    """Breaks if pyproject.toml admits a jax that is older than what `make test-versions` runs, or the reverse."""
    assert [Version(s.version) for s in admitted() if s.operator == ">="] == [end_of_range("oldest")]


def test_newest_is_below_the_upper_bound():
    """Breaks if the newest minor version that pyproject.toml admits is not the one that `make test-versions` runs."""
    (bound,) = [Version(s.version) for s in admitted() if s.operator == "<"]
    newest = end_of_range("newest")
    assert newest in admitted() and bound.release == (newest.major, newest.minor + 1)


def test_test_more_runs_both_ends():
    """Breaks if `make test-more`, which guards every submission, leaves the ends of the range out."""
    recipe = re.search(r"^test-more:.*\n((?:\t.*\n)+)", MAKEFILE, re.M)
    assert recipe and "$(MAKE) test-versions" in recipe[1]


@pytest.mark.parametrize("page", PAGES)
def test_pages_say_the_range(page):
    """Breaks if a page promises a version of JAX that is not tested, or leaves out an extra for GPUs."""
    text = (ROOT / page).read_text()
    newest = end_of_range("newest")
    assert f"JAX {end_of_range('oldest')} to {newest.major}.{newest.minor}" in " ".join(text.split())
    for extra in ("cuda12", "cuda13"):
        assert extra in text, f"{page} does not name the extra {extra}"


@pytest.mark.parametrize("extra", ("cuda12", "cuda13"))
def test_extra_brings_the_cuda_wheels(extra):
    """Breaks if an extra installs the wheels of another CUDA, or the command `moax` looks for another package."""
    (requirement,) = map(Requirement, PROJECT["optional-dependencies"][extra])
    assert requirement.name == "jax" and requirement.extras == {extra}
    assert EXTRAS[extra] == f"jax-{extra}-plugin"


def test_requirements_are_read():
    """Breaks if no target reads a file of requirements/, or if a target names a version that such a file could hold."""
    commands = MAKEFILE + (ROOT / "benchmarks" / "trainer" / "wheels.sh").read_text()
    assert not re.findall(r"[\w.-]+==\d[\w.*]*", commands), "requirements/*.txt has the versions"
    named = set(re.findall(r"requirements/([\w-]+)\.txt", commands))
    environments = set(re.findall(r"^\w+_VENV := \.venv-(\w+)$", MAKEFILE, re.M))
    (frameworks,) = re.findall(r"^FRAMEWORKS := (.+)$", MAKEFILE, re.M)
    read = named | environments | {*frameworks.split()}
    read |= {f"{name}-needs" for name in frameworks.split() if "requirements/$*-needs.txt" in commands}
    unread = {path.stem for path in (ROOT / "requirements").iterdir()} - read
    assert not unread, f"no target reads {sorted(unread)}"


def test_the_wheel_holds_moax_alone_and_the_sdist_all():
    """Breaks if benchmarks enter the wheel, or if the source distribution lacks them."""
    targets = PYPROJECT["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"] == {"packages": ["src/moax"]}
    assert "/benchmarks" in targets["sdist"]["include"]
