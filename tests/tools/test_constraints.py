"""constraints.txt: two clones install the same versions, and a CPU machine downloads nothing of an accelerator.

Covers: every dependency of pyproject.toml, and what those need.
"""

import importlib.metadata
import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support import ROOT


def declared() -> dict[str, Requirement]:
    """What constraints.txt answers for: the core and every extra but an accelerator's, by canonical name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {k: v for k, v in project["optional-dependencies"].items() if not k.startswith("cuda")}
    results = map(Requirement, [*project["dependencies"], *sum(extras.values(), [])])
    return {canonicalize_name(r.name): r for r in results}


def pinned() -> dict[str, str]:
    """The version of each package of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    entries = [line for line in lines if line.strip() and not line.startswith("#")]
    bad = [line for line in entries if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.!+]*", line)]
    assert not bad, f"constraints.txt holds NAME==VERSION and nothing else, for every platform: {bad}"
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in entries)}


def test_each_dependency_is_pinned():
    """Breaks if a dependency has no version, or one that pyproject.toml does not admit."""
    pins = pinned()
    unpinned = sorted(declared().keys() - pins.keys())
    assert not unpinned, f"two clones would install different versions of {unpinned}: `make constraints`"
    outside = [str(r) for name, r in declared().items() if not r.specifier.contains(pins[name])]
    assert not outside, f"constraints.txt pins a version that pyproject.toml does not admit: {outside}"


def requires(name: str) -> list[str]:
    """What an installed package says that it needs."""
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []  # an environment without that extra; `make test` has them all


def test_what_those_need_is_pinned():
    """Breaks if a dependency of a dependency has no version."""
    pins = pinned()
    todo = list(declared().values())
    seen = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        for extra in (requirement.extras | {""}) - {e for n, e in seen if n == name}:
            seen.add((name, extra))
            needs = map(Requirement, requires(name))
            todo += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
    unpinned = sorted({name for name, _ in seen} - pins.keys())
    assert not unpinned, f"two clones would install different versions of {unpinned}: `make constraints`"


def test_no_accelerator_package():
    """Breaks if a CPU machine would download the packages of an accelerator."""
    bad = [name for name in pinned() if re.match(r"nvidia-|jax-cuda|libtpu|torch$", name)]
    assert not bad, f"a CPU machine would download {bad}"
