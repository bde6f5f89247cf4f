"""README.md and docs/: their programs run as they stand and print what they say; the pages build, and miss nothing.

Covers: two pages here, all of them in `make test-more`; commands; the public names of the reference.
"""

import re
import subprocess
import sys
from pathlib import Path

import processes
import pytest

from support import pages

pytest.importorskip("flax")
pytest.importorskip("optax")

import moax
from moax import estimate, hf, inspect

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAMES = {path: path.relative_to(ROOT).as_posix() for path in pages.PAGES}


# Two pages stand for all of them here; one of them makes a CPU act as eight devices.
PROGRAMS = [p for p in NAMES if pages.programs(p)]
SHORT = ("README.md", "docs/concepts/mesh.md")


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=NAMES[p], marks=() if NAMES[p] in SHORT else pytest.mark.more) for p in PROGRAMS],
)
def test_programs_run(path):
    """Breaks if a reader who pastes a page into a new interpreter gets an error, a warning, or other output."""
    if NAMES[path] in SHORT:
        pages.run_page(path)
    else:
        pages.run_page(path, XLA_FLAGS=processes.FLAGS)  # most of a page's time is compilation


@pytest.mark.parametrize("path", PROGRAMS, ids=NAMES.get)
def test_a_page_says_how_many_devices_it_needs(path):
    """Breaks if a page makes a mesh, and its first block sets no emulated devices, or its text does not count them."""
    programs = [block.text for block in pages.programs(path)]
    if path == ROOT / "README.md" or not any("make_mesh(" in text for text in programs):
        return  # the mesh of README.md has the devices that are there
    count = re.findall(r'^jax\.config\.update\("jax_num_cpu_devices", ([48])\)', programs[0], re.M)
    prose = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    assert len(count) == 1 and re.search({"4": r"\bfour\b", "8": r"\beight\b"}[count[0]] + r"[\w ]* devices", prose)


@pytest.mark.parametrize("path", NAMES, ids=NAMES.get)
def test_what_is_not_run_says_why(path):
    """Breaks if a page opts out of these tests by a language that they do not know."""
    for block in pages.read(path):
        assert block.language not in ("py", "python3", "pycon", "shell"), f"{block}: call it python, console or sh"
        assert block.not_run is None or len(block.not_run) > 10, f"{block}: say why it is not run"


@pytest.mark.more
def test_pages_build(tmp_path):
    """Breaks if `make docs` fails: a dead link, a page in no table of contents, a docstring that cannot be rendered; if
    a page is left out; or if something public has no entry in the reference, or is not in the list of its page."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", str(tmp_path / ".doctrees")]
    done = subprocess.run(
        [*command, "-b", "html", str(DOCS), str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]

    built_pages = {path.relative_to(tmp_path).with_suffix("").as_posix() for path in tmp_path.rglob("*.html")}
    assert {path.relative_to(DOCS).with_suffix("").as_posix() for path in NAMES if DOCS in path.parents} <= built_pages

    text = "".join(path.read_text() for path in (tmp_path / "reference").rglob("*.html"))
    documented = set(re.findall(r'<dt class="sig sig-object py" id="(moax[\w.]*)"', text))
    assert not public() - documented, f"not in docs/reference: {sorted(public() - documented)}"
    lists = "".join(re.findall(r'<ul class="on-this-page.*?</ul>', text, re.S))
    listed = set(re.findall(r'href="#(moax[\w.]*)"', lists))
    assert not public() - listed, f"not in the list at the top of its page: {sorted(public() - listed)}"


def public() -> set[str]:
    """Full names of what a user may call; of packages also what they re-export."""
    names = {
        "moax.CHECKPOINT_NAMES",
        "moax.inspect.Value",
        "moax.nnx.MoE",
        "moax.nnx.Dense",
        "moax.linen.MoEBlock",
        "moax.linen.Dense",
    }
    for module in (moax, moax.ops, hf, inspect, estimate):
        package = module in (moax, moax.ops, hf, estimate)
        for name in dir(module):
            value = getattr(module, name)
            home = getattr(value, "__module__", None) or ""
            own = home.startswith("moax.") if package else home == module.__name__
            if own and callable(value) and not name.startswith("_"):
                names.add(f"{module.__name__}.{name}")
    return names


def test_every_command_has_its_help_on_a_page():
    """Breaks if a command is new, and the page of the command line does not know."""
    page = (DOCS / "reference" / "cli.md").read_text()
    assert set(re.findall(r"^```\{cli-help\} ([\w-]+)$", page, re.M)) == {
        "benchmarks",
        "lm-train",
        "moax-estimate",
    }
