"""What README.md, CONTRIBUTING.md, benchmarks/README.md and docs/ name in code type is there.

Covers: files of the repository, names of moax, modules that `python -m` runs, targets of the Makefile; messages of the
log that no CPU prints.
"""

import importlib.util
import pkgutil
import re
import types

import pytest

from moax import checks, kernels
from moax.block.experts import OVERLAP_HINT
from moax.kernels import device
from support import pages

pytest.importorskip("flax")

ROOT = pages.ROOT
PATHS = [*pages.PAGES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
FOLDERS = ("", "src/moax", "benchmarks/results")  # from which pages name files
# Files that the repository does not hold: programs write them, and published checkpoints have them.
ELSEWHERE = re.compile(r"[~/]|runs/|\.trainer/|(comparison|gradients|config)\.json$")
TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))


def code(text: str) -> list[str]:
    """Returns what a page has in code type, without its fenced blocks."""
    prose = re.sub(r"^(`{3,}).*?^\1$", "", text, flags=re.M | re.S)
    return [" ".join(found.split()) for found in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]


def is_a_file(name: str, page) -> bool:
    """Whether a file of the repository has the path; a name without a folder may be that of a file of any folder."""
    if any((ROOT / folder / name).exists() for folder in FOLDERS) or (page.parent / name).exists():
        return True
    folders = ("src", "examples", "tests", "lm", "benchmarks", "scripts")
    return "/" not in name and any(True for folder in folders for _ in (ROOT / folder).rglob(name))


def is_a_name(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def missing(text: str, page=ROOT / "README.md") -> list[str]:
    """Returns what the code type of a page names, and what is not there."""
    found = []
    for span in code(text):
        for name in re.findall(r"(?<![\w./~*-])([\w./~-]*\w\.(?:py|md|sh|json|toml|svg|txt))(?![\w*])", span):
            if not ELSEWHERE.match(name) and not is_a_file(name, page):
                found.append(f"file {name}")
        for name in re.findall(r"(?<![\w./])moax(?:\.[A-Za-z_]\w*)+", span):
            if not is_a_name(name):
                found.append(f"name {name}")
        for name in re.findall(r"\bpython -m ((?:moax|lm|benchmarks)[\w.]*)", span):
            if importlib.util.find_spec(name) is None:
                found.append(f"module {name}")
        if (target := re.match(r"make ([a-z][\w-]*)", span)) and target[1] not in TARGETS:
            found.append(f"target {target[1]}")
    return found


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_are_there(path):
    """Breaks if a page names a file, a name of moax, a module or a target that is gone or never was."""
    assert not missing(path.read_text(encoding="utf-8"), path)


def test_what_is_gone_is_found():
    """Breaks if the tests here pass by reading nothing."""
    gone = "`examples/gone.py`, `ops/gone.py`, `moax.gone`, `moax.Axes.gone()`, `python -m lm.gone`, `make gone`"
    assert len(missing(gone)) == 6
    there = "`block/chain.py`, `chain.py`, `wire.json`, `moax.ops.dense(x)`, `python -m benchmarks x`, `make test-more`"
    assert not missing(there) and not missing("```python\n`moax.gone`\n```\n")


def test_messages_are_those_of_the_log(monkeypatch, caplog):
    """Breaks if docs/how-to/troubleshooting.md quotes a line that moax does not log on a GPU."""
    gpu = types.SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H100")
    for module in (device, kernels):
        monkeypatch.setattr(module, "find_device", lambda: gpu)
    checks.log_once.cache_clear()
    assert kernels.select_kernels("auto", "float32") == "xla"
    blocks = pages.read(ROOT / "docs" / "how-to" / "troubleshooting.md")
    assert [block.text for block in blocks if block.language == "text"] == [*caplog.messages, OVERLAP_HINT]
