"""The command line: what a stranger sees, what goes wrong, exit codes."""

import argparse
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
from moax import backend, info, program
from moax.checks import Unsupported
from moax.exchange import EXCHANGES
from moax.kernels import IMPLEMENTATIONS, select_kernels
from moax.recipe import RECIPES

pytestmark = pytest.mark.loose


def test_help_shows_what_to_type(capsys):
    for argv, wanted in [
        (
            ["--help"],
            ["info", "estimate", "examples:", "exit codes: 0 success, 1"],
        ),
        (["estimate", "--help"], ["--model", "deepseek-v3", "--hf", "{h100,h200}"]),
    ]:
        with pytest.raises(SystemExit) as stop:
            cli.main(argv)
        said = capsys.readouterr().out
        assert stop.value.code == 0
        assert all(word in said for word in wanted), said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["estimate", "--mesh", "pp=2"], "unknown axis 'pp'; the axes are dp, fsdp, cp, ep, tp"),
        (["estimate", "--recipe", "fp4"], "--recipe: 'fp4' must be none, fp8_block"),
        (["estimate", "--recipe", "wi=fp4"], "'wi=fp4' must be none, fp8_block"),
        (["estimate", "--fly"], "moax: error: unrecognized arguments: --fly"),
        (["estimate", "--tokens", "many"], "moax estimate: error: argument --tokens"),
    ],
)
def test_unreadable_arguments(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["info", "--cpu-devices", "3"], "--cpu-devices 3: JAX already runs"),
        (["info", "--cpu-devices", "0"], "--cpu-devices 0 must be at least 1"),
        (["estimate", "--top-k", "0"], "top_k=0"),
    ],
)
def test_arguments_that_cannot_work(argv, message, capsys):
    """Breaks if a wrong argument does not end with its message and the exit code 2, or --traceback shows no place."""
    assert jax.device_count() == 8 and cli.main(argv) == 2  # JAX runs already
    said = capsys.readouterr().err
    assert said.startswith(f"moax {argv[0]}: error: ") and message in said
    with pytest.raises(ValueError, match=message):
        cli.main([*argv, "--traceback"])


def test_missing_extra_is_named(monkeypatch, capsys):
    """Breaks if a package of an extra is missing and the error does not name the extra, or if a bug passes for that."""

    def run(args):
        raise ModuleNotFoundError("No module named 'flax'", name="flax")

    monkeypatch.setattr("moax.estimate.command.run", run)
    assert cli.main(["estimate"]) == 1
    assert capsys.readouterr().err == "moax estimate: error: flax is missing: pip install 'moax[flax]'\n"
    assert program.explain(ModuleNotFoundError("No module named 'mine'", name="mine")) is None


def fresh(*argv: str, **environment: str) -> subprocess.CompletedProcess:
    """`moax ARGV` in a process of its own."""
    command = [sys.executable, "-m", "moax", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)


def test_info_says_what_runs(capsys):
    """Breaks if a stranger cannot see what this machine runs, or is told another reason than `moax.moe` would give."""
    assert cli.main(["info"]) == 0
    said = capsys.readouterr().out
    assert "8 x cpu (platform cpu)" in said and f"jax {jax.__version__}" in said
    with pytest.raises(Unsupported, match=re.escape(backend.device_kind())) as refused:
        select_kernels("hopper")
    assert str(refused.value).removeprefix("kernels='hopper': ") in said
    choices = {(c.argument, c.value): c for c in info.choices()}
    assert all(re.search(rf"^  {argument} +{value} ", said, re.MULTILINE) for argument, value in choices)
    assert {value for argument, value in choices if argument == "exchange"} == set(EXCHANGES)
    assert {value for argument, value in choices if argument == "kernels"} == {"auto", *IMPLEMENTATIONS}
    assert {value for argument, value in choices if argument == "recipe"} == set(RECIPES)
    assert not choices["kernels", "hopper"].runs and choices["kernels", "auto"].note == "xla"
    assert all(choice.runs or argument != "recipe" and choice.note for (argument, _), choice in choices.items())


def test_info_on_a_gpu_that_runs_kernels(monkeypatch):
    """Breaks if `moax info` on a Hopper GPU says that XLA runs, or that MXFP8 multiplies in FP8 there."""
    monkeypatch.setattr(backend, "on_hopper", lambda: True)
    kernels = [choice for choice in info.choices() if choice.argument == "kernels"]
    assert {choice.value for choice in kernels if choice.runs} == {"auto", "hopper", "xla"}
    assert kernels[0].note.startswith("hopper for bfloat16")
    assert [choice.value for choice in info.choices() if choice.note.startswith("FP8")] == ["fp8_block", "fp8_tensor"]


def test_info_names_the_extras_of_the_project(monkeypatch):
    """Breaks if an extra gets or loses a package, and `moax info` does not know."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    known = {k: v for k, v in project["optional-dependencies"].items() if k not in ("dev", "docs")}
    assert program.EXTRAS.keys() == known.keys()
    assert [program.EXTRAS["flax"]] == [Requirement(text).name for text in known["flax"]]
    monkeypatch.setattr(info, "version", lambda name: None if name in ("flax", "moax") else "1")
    said = info.describe()
    assert "missing: pip install 'moax[flax]'" in said and "source tree" in said


@pytest.mark.parametrize("name", ("nnx", "linen"))
def test_layer_without_flax_names_its_extra(name):
    """Breaks if `import moax.nnx` without flax does not say what to install."""
    code = f"import sys; sys.modules['flax'] = None\nimport moax.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    last = done.stderr.splitlines()[-1]
    assert last == "ModuleNotFoundError: flax is missing: pip install 'moax[flax]'"


def test_help_imports_no_jax():
    """Breaks if `moax --help` or `import moax` imports JAX, which takes a second."""
    code = "import sys, moax.__main__\ntry: moax.__main__.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print('jax' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_commands_need_no_extra_to_print_their_help():
    """Breaks if a command imports a package of an extra before it runs, such as flax."""
    code = (
        "import sys\nfrom moax import __main__ as cli\n"
        "for command in cli.parsers()[1].values(): command.format_help()\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(*loaded & {'flax', 'matplotlib', 'optax', 'orbax', 'rich'})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [], done.stderr


def test_public_names_are_typed():
    """Breaks if a name of `moax` is there at run time alone, or for type checkers alone."""
    tree = ast.parse(Path(moax.__file__).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {alias.name: node.module for node in typed.body for alias in node.names}
    homes = {name: home for name, home in imported.items() if home != "moax"}
    assert homes == moax._HOMES and imported.keys() - homes.keys() == set(moax._MODULES) - {"nnx", "linen"}
    for name in dir(moax):
        assert getattr(moax, name) is not None
    with pytest.raises(AttributeError, match="module 'moax' has no attribute 'mou'"):
        moax.mou  # noqa: B018


def test_no_device_is_an_error_of_one_line():
    """Breaks if a machine without the platform that JAX was told to use shows JAX's traceback."""
    done = fresh("info", JAX_PLATFORMS="rocm")
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.splitlines()[-1].startswith("moax info: error: JAX cannot start: ")
    assert "Traceback" not in done.stderr


def test_output_that_nobody_reads():
    """Breaks if `moax info | head -1` ends in a traceback or in an error about a broken pipe."""
    closed, out = os.pipe()
    os.close(closed)
    command = [sys.executable, "-m", "moax", "info"]
    done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(out)
    assert done.returncode == 141 and not done.stderr


def test_mesh_type_is_told_by_argparse():
    """Breaks if a wrong mesh is an error without its reason, or the axes come out in another order."""
    assert program.mesh_of("ep=4, fsdp=2") == (("fsdp", 2), ("ep", 4))
    for text, message in [
        ("pp=2", "unknown axis 'pp'; the axes are dp, fsdp, cp, ep, tp"),
        ("ep", "size of ep must be an int of at least 1"),
        ("ep=0", "size of ep"),
        ("ep=2,ep=4", "ep is given twice"),
    ]:
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            program.mesh_of(text)


def test_emulated_devices_in_a_fresh_process():
    code = "from moax import program; program.emulate(4); import jax; print(jax.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "4", done.stderr
