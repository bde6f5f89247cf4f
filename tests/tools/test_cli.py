"""The command `moax`, and what `import moax` loads."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest
from packaging.requirements import Requirement

import moax
from moax import __main__ as cli
from moax.checks import Unsupported
from moax.exchange import EXCHANGES
from moax.kernels import IMPLEMENTATIONS, select_kernels
from moax.kernels.device import find_device
from moax.recipe import RECIPES
from support import ROOT
from support.gpus import pretend

pytestmark = pytest.mark.loose


def test_info_says_what_runs(capsys):
    """Breaks if a stranger cannot see what this machine runs, or is told another reason than `moax.moe` would give."""
    cli.main([])
    said = capsys.readouterr().out
    assert "8 x cpu (platform cpu)" in said and f"jax {jax.__version__}" in said
    with pytest.raises(Unsupported, match=re.escape(find_device().device_kind)) as refused:
        select_kernels("hopper")
    assert str(refused.value).removeprefix("kernels='hopper': ") in said
    choices = {(c.argument, c.value): c for c in cli.choices()}
    assert all(re.search(rf"^  {argument} +{value} ", said, re.MULTILINE) for argument, value in choices)
    assert {value for argument, value in choices if argument == "exchange"} == set(EXCHANGES)
    expected = {"auto", *IMPLEMENTATIONS}
    assert {value for argument, value in choices if argument == "kernels"} == expected
    assert {value for argument, value in choices if argument == "recipe"} == set(RECIPES)
    assert not choices["kernels", "hopper"].runs and choices["kernels", "auto"].note == "xla"
    assert all(choice.runs or argument != "recipe" and choice.note for (argument, _), choice in choices.items())


SMALL = ["estimate", str(ROOT / "tests" / "data" / "hf" / "qwen3_moe"), "--mesh", "fsdp=2, ep=2", "--tokens", "64"]


def test_estimate_of_a_folder(capsys):
    """Breaks if the command does not say whether the layers of a config.json fit, or exits alike where they do not."""
    assert cli.print_estimate([*SMALL, "--recipe", "fp8_block"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("1 MoE layer of 8 experts") and "\nNVIDIA H200, mesh fsdp=2,ep=2: 64 tokens a GPU" in said
    assert re.search(r"^fits: 0.0 GB of 126.9 GB", said, re.MULTILINE)
    assert cli.print_estimate([*SMALL, "--microbatches", "2", "--kept", "gathered"]) == 0
    said = capsys.readouterr().out
    assert "64 tokens a GPU in 2 microbatches, " in said and ", weights gathered for the step\n" in said
    with pytest.raises(SystemExit) as ended:
        cli.main([*SMALL, "--layers", "3", "--hardware", "h100", "--other-gb", "73"])
    said = capsys.readouterr().out
    assert ended.value.code == 1 and said.startswith("3 MoE layers")
    assert "\ndoes not fit: 73.0 GB of 72.0 GB" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mesh", "fsdp"], "'fsdp' must have the devices along each axis, each once: fsdp=32,ep=8"),
        (["--mesh", "ep=2,ep=4"], "'ep=2,ep=4' must have"),
        (["--hardware", "tpu"], "invalid choice: 'tpu'"),
        (["--mesh", "ep=3"], "is not divisible by"),
        (["--mesh", "pp=2"], "mesh axis 'pp' of 2 devices has no role"),
        (["--layers", "0"], "layers=0 must be"),
        (["--microbatches", "3"], "tokens=64 must be a multiple of microbatches=3"),
        (["--kept", "all"], "invalid choice: 'all'"),
        (["--other-gb", "-1"], "other_bytes=-1000000000 must be"),
        (["--other-gb", "inf"], "--other-gb: 'inf' must be a finite number of GB"),
        (["--other-gb", "1e300"], "--other-gb: '1e300' must be a finite number of GB"),
        (["--tokens", "99999999999999"], "its 99999999999999 tokens on a device"),
        (["--other-gb", "nan"], "--other-gb: 'nan' must be a finite number of GB"),
    ],
)
def test_estimate_refuses(words, message, capsys):
    """Breaks if a wrong word of the command ends in a traceback, or in success."""
    with pytest.raises(SystemExit) as ended:
        cli.main([*SMALL, *words])
    assert ended.value.code not in (0, None)
    assert message in f"{ended.value.code}{capsys.readouterr().err}"


def test_info_on_a_gpu_that_runs_kernels(monkeypatch):
    """Breaks if the command `moax` on a Hopper GPU says that XLA runs, or that MXFP8 multiplies in FP8 there."""
    pretend(monkeypatch)
    kernels = [choice for choice in cli.choices() if choice.argument == "kernels"]
    assert {choice.value for choice in kernels if choice.runs} == {"auto", "hopper", "xla"}
    assert kernels[0].note.startswith("hopper for bfloat16")
    assert [choice.value for choice in cli.choices() if choice.note.startswith("FP8")] == ["fp8_block"]


def test_info_names_the_extras_of_the_project(monkeypatch):
    """Breaks if an extra gets or loses a package, and the command `moax` does not know."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    known = {k: v for k, v in project["optional-dependencies"].items() if k not in ("dev", "docs")}
    assert cli.EXTRAS.keys() == known.keys()
    assert [cli.EXTRAS["flax"]] == [Requirement(text).name for text in known["flax"]]
    monkeypatch.setattr(cli, "version", lambda name: None if name in ("flax", "moax") else "1")
    said = cli.describe()
    assert "missing: pip install 'moax[flax]'" in said and "source tree" in said


@pytest.mark.parametrize("name", ("nnx", "linen"))
def test_layer_without_flax_names_its_extra(name):
    """Breaks if `import moax.nnx` without flax does not say what to install."""
    code = f"import sys; sys.modules['flax'] = None\nimport moax.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    last = done.stderr.splitlines()[-1]
    assert last == "ModuleNotFoundError: flax is missing: pip install 'moax[flax]'"


def test_import_imports_no_jax():
    """Breaks if `import moax` imports JAX, which takes a second."""
    code = "import sys, moax; print('jax' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_public_names_are_typed():
    """Breaks if a name of `moax` is there at run time alone, or for type checkers alone."""
    tree = ast.parse(Path(moax.__file__).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {alias.name: node.module for node in typed.body for alias in node.names}
    homes = {name: home for name, home in imported.items() if home != "moax"}
    assert homes == moax._HOMES
    assert imported.keys() - homes.keys() == set(moax._MODULES) - {"nnx", "linen"}
    for name in dir(moax):
        assert getattr(moax, name) is not None
    with pytest.raises(AttributeError, match="module 'moax' has no attribute 'mou'"):
        moax.mou  # noqa: B018


def test_no_device_is_an_error_of_one_line():
    """Breaks if a machine without the platform that JAX was told to use shows JAX's traceback."""
    command = [sys.executable, "-m", "moax"]
    rocm = os.environ | {"JAX_PLATFORMS": "rocm"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=rocm)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.splitlines()[-1].startswith("moax: JAX cannot start: ")
    assert "Traceback" not in done.stderr
