"""Names in code type on the pages: files, names of moax, modules that run and targets of the Makefile exist.

Covers: README.md, CONTRIBUTING.md, benchmarks/README.md and docs/; the line of the log that only a GPU prints.
"""

import importlib
import importlib.util
import re
import types
from collections.abc import Iterator

import pytest

from support import pages

pytest.importorskip("flax")

import moax
from moax import checks, kernels
from moax.kernels import device

ROOT = pages.ROOT
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *pages.PAGES]
FOLDERS = ("benchmarks", "docs", "examples", "lm", "scripts", "src", "tests")
FILES = {path.name for path in ROOT.iterdir()} | {path.name for top in FOLDERS for path in (ROOT / top).rglob("*.*")}
BASES = ("", "src/moax", "benchmarks")  # what a path on a page starts from
WRITTEN = {"comparison.json", "config.json", "gradients.json"}  # what programs write and read elsewhere
TARGETS = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.M))
SHORT = {"stats": "moax.MoEStats", "params": "moax.MoEParams"}  # what pages call such a value
SHORT |= {name: f"moax.{name}" for name in ("estimate", "hf", "inspect", "lora", "ops")}
SHORT |= {name: f"moax.{name}" for name in dir(moax) if isinstance(getattr(moax, name), type)}

FILE = r"(?<![\w./~*-])((?:[\w-]+/)*[\w-]+\.(?:py|json|md|sh|toml|txt|yaml|svg)|(?:[\w-]+/)+)(?![\w/*.-])"
NAME = r"(?<![\w./])((?:moax|" + "|".join(SHORT) + r")(?:\.[a-zA-Z]\w*)+)"


def code(text: str) -> Iterator[str]:
    """Yields what is in code type between the blocks of a page, each on one line."""
    for snippet in re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)):
        yield " ".join(snippet.split())


def missing(text: str) -> list[str]:
    """Returns the names in code type of a page that do not exist."""
    gone = []
    for part in code(text):
        gone += [path for path in re.findall(FILE, part) if not is_file(path)]
        gone += [name for name in re.findall(NAME, re.sub(FILE, "", part)) if not is_name(name)]
        gone += [f"make {name}" for name in re.findall(r"^make ([\w-]+)", part) if name not in TARGETS]
        gone += [f"-m {name}" for name in re.findall(r"\bpython -m ([\w.]+)", part) if not is_module(name)]
    gone += [f"make {name}" for name in re.findall(r"^make ([\w-]+)", text, re.M) if name not in TARGETS]
    return gone


def is_file(path: str) -> bool:
    """Whether a path is one of the repository; a name alone may be that of any file."""
    if "/" not in path:
        return path in FILES or path in WRITTEN
    return path.startswith("runs/") or any((ROOT / base / path).exists() for base in BASES)


def is_name(name: str) -> bool:
    """Whether a name of moax is an attribute, a module or a field, as `moax.ops.dense` and `stats.dropped` are."""
    first, _, rest = name.partition(".")
    *path, last = f"{SHORT.get(first, first)}.{rest}".split(".")
    value = importlib.import_module(path[0])
    for part in path[1:]:
        if not hasattr(value, part) and not is_module(f"{value.__name__}.{part}"):
            return False
        value = getattr(value, part, None) or importlib.import_module(f"{value.__name__}.{part}")
    fields = getattr(value, "__dataclass_fields__", {})
    return hasattr(value, last) or last in fields or is_module(f"{getattr(value, '__name__', '')}.{last}")


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_names_exist(path):
    """Breaks if a page names a file, an attribute of moax, a module or a target of the Makefile that is gone."""
    assert not missing(path.read_text(encoding="utf-8"))


GONE = ["examples/gone.py", "gone.py", "gone/", "moax.gone", "moax.ops.gone", "stats.gone", "Axes.gone", "lora.gone"]
GONE += ["make gone", "python -m lm.gone"]
THERE = [
    "examples/multi_host.py",
    "wire.json",
    "block/",
    "results/wire.json",
    "moax.hf.params_from_hf(moax.hf.Checkpoint)",
]
THERE += ["moax.ops.matmul", "stats.dropped", "Axes.ep", "make check-sass", "python -m lm train", "model.gone"]


def test_a_name_that_is_gone_is_found():
    """Breaks if the check sees no name that is gone, or takes a name that exists for one that is gone."""
    for name in GONE:
        assert [entry.split()[-1] for entry in missing(f"It is `{name}`.")] == [name.split()[-1]]
    assert missing("```sh\nmake gone\n```\n") == ["make gone"]
    assert missing("".join(f"It is `{name}`.\n" for name in THERE)) == []


def test_the_log_of_the_kernels_is_on_the_page(monkeypatch, caplog):
    """Breaks if docs/how-to/troubleshooting.md quotes another line than moax logs on a GPU without kernels."""
    gpu = types.SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H100")
    for module in (device, kernels):
        monkeypatch.setattr(module, "find_device", lambda: gpu)
    checks.log_once.cache_clear()
    assert kernels.select_kernels("auto", "float32") == "xla"
    quoted = [
        part for part in code((ROOT / "docs/how-to/troubleshooting.md").read_text()) if part.startswith("kernels='")
    ]
    assert len(quoted) == 1 and len(caplog.messages) == 1
    before, after = quoted[0].split("...")
    assert caplog.messages[0].startswith(before) and caplog.messages[0].endswith(after)
