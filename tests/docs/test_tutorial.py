"""docs/tutorial: its program, the code that it shows, the output that it quotes. tests/docs/test_docs.py runs the page.

Covers: the code and the output that the page quotes.
"""

import importlib.util
import re

import jax
import pytest

from support import pages

TUTORIAL = pages.ROOT / "docs" / "tutorial"
PAGE = TUTORIAL / "layer.md"


def load():
    spec = importlib.util.spec_from_file_location("layer", TUTORIAL / "layer.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_script_runs_the_page():
    """Breaks if `python docs/tutorial/layer.py` runs anything but the blocks of the page, which tests run."""
    assert load().program() == "\n".join(block.text + "\n" for block in pages.programs(PAGE))


def test_script_refuses_what_is_not_there(monkeypatch):
    """Breaks if --gpus without GPUs writes times of a CPU into the file for GPUs."""
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # this process keeps its devices
    with pytest.raises(SystemExit, match="--gpus needs two GPUs or four; here are"):
        load().main(gpus=True, keep=True)


def test_captured_output():
    """Breaks if the captured file does not say where it comes from."""
    head, printed = (TUTORIAL / "layer_gpus.txt").read_text().split("\n\n", 1)
    assert re.match(r"# [24] x .*\n# jax [\d.]+, moax \w+, \d{4}\S+: python docs/tutorial/layer.py", head)
    assert len(printed.splitlines()) > 10 and all(b.output for b in pages.programs(PAGE) if "print(" in b.text)
