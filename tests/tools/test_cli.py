"""The command line: what a stranger sees, what goes wrong, exit codes."""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest
from packaging.requirements import Requirement

pytest.importorskip("optax")

import moax
from moax import arguments, backend, cli, extras, info, program
from moax.errors import Unsupported
from moax.kernels import IMPLEMENTATIONS, select_kernels
from moax.ops.exchange import EXCHANGES
from moax.recipe import RECIPES
from moax.train.command import train_config
from moax.train.presets import PRESETS
from moax.train.run import Run

pytestmark = pytest.mark.loose


def parse(*argv):
    return train_config(cli.parsers()[0].parse_args(["train", *argv]))


def test_help_shows_what_to_type(capsys):
    for argv, wanted in [
        (
            ["--help"],
            ["info", "train", "inspect", "--cpu-devices 8", "examples:", "exit codes: 0 success, 1", "--json"],
        ),
        (["train", "--help"], ["--preset", "tiny, small, medium, large", "--mesh", "standard library", "Ctrl-C"]),
        (["inspect", "--help"], ["--forward-only", "--json"]),
        (["estimate", "--help"], ["--model", "deepseek-v3", "--sweep", "h100, h200, b200", "--plot"]),
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
        (["train", "--mesh", "pp=2"], "unknown axis 'pp'; the axes are dp, fsdp, cp, ep, tp"),
        (["train", "--recipe", "fp4"], "--recipe: 'fp4' must be none, fp8_block"),
        (["train", "--recipe", "wi=fp4"], "'wi=fp4' must be none, fp8_block"),
        (["train", "--steps", "many"], "invalid int value: 'many'"),
        (["train", "--preset", "huge"], "choose from"),
        (["train", "--fly"], "moax train: error: unrecognized arguments: --fly"),
        (["inspect", "--tokens", "many"], "moax inspect: error: argument --tokens"),
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
        (["--mesh", "fsdp=2,ep=3"], "mesh of 6 devices, but JAX has 8"),
        (["--mesh", "fsdp=2,ep=4", "--batch", "12"], "--batch 12 does not divide"),
        (["--cpu-devices", "3"], "--cpu-devices 3: JAX already runs"),
        (["--cpu-devices", "0"], "--cpu-devices 0 must be at least 1"),
        (["--steps", "0"], "steps=0"),
        (["--top-k", "9"], "top_k=9 must be at most num_experts=8"),
        (["--text", "/nowhere"], "--text /nowhere: no such file or folder"),
        (["--resume", "--name", "lost"], "no run 'lost'"),
        (["--resume"], "there are no runs"),
        (["--resume", "--preset", "tiny"], "leave --preset out"),
        (["--seeds", "2"], "--seeds 2 without --recipes"),
        (["--recipes", "none,fp4"], "--recipes has 'fp4'"),
        (["--recipes", "none,fp8_block", "--recipe", "mxfp8"], "--recipe mxfp8 with several runs"),
        (["--recipes", "none,fp8_block", "--text", "/nowhere"], "--text /nowhere: no such file or folder"),
    ],
)
def test_arguments_that_cannot_work(argv, message, capsys, tmp_path):
    assert cli.main(["train", "--out", str(tmp_path / "runs"), *argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith("moax train: error: ") and message in said
    assert not (tmp_path / "runs").exists(), "an error left a run behind"


def test_traceback_on_request(tmp_path):
    with pytest.raises(ValueError, match="no runs"):
        cli.main(["train", "--resume", "--out", str(tmp_path), "--traceback"])


def test_missing_extra_is_named(monkeypatch, capsys):
    """Breaks if a package of an extra is missing and the error does not name the extra, or if a bug passes for that."""

    def run(args):
        raise ModuleNotFoundError("No module named 'optax'", name="optax")

    monkeypatch.setattr("moax.train.command.run", run)
    assert cli.main(["train"]) == 1
    assert capsys.readouterr().err == "moax train: error: optax is missing: pip install 'moax[train]'\n"
    assert program.explain(ModuleNotFoundError("No module named 'mine'", name="mine")) is None


def test_flags_over_preset():
    config = parse("--preset", "small", "--experts", "32", "--recipe", "none", "--lr", "0.5", "--tied")
    assert config.model.num_experts == 32 and config.model.tied
    assert config.recipe is None and config.lr == 0.5 and config.name == "small"
    assert config.model.d_ff == PRESETS["small"].model.d_ff
    assert parse().name == "tiny"
    assert parse("--capacity-factor", "1.5").model.capacity_factor == 1.5
    assert parse("--capacity-factor", "none").model.capacity_factor is None


def fresh(*argv: str, **environment: str) -> subprocess.CompletedProcess:
    """`moax ARGV` in a process of its own."""
    command = [sys.executable, "-m", "moax", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)


def test_info_says_what_runs(capsys):
    """Breaks if a stranger cannot see what this machine runs, or is told another reason than `moax.moe` would give."""
    assert cli.main(["info"]) == 0
    said = capsys.readouterr().out
    assert "8 x cpu (platform cpu)" in said and "--mesh fsdp=2,ep=4" in said and f"jax {jax.__version__}" in said
    with pytest.raises(Unsupported, match=re.escape(backend.device_kind())) as refused:
        select_kernels("hopper")
    assert str(refused.value).removeprefix("kernels='hopper': ") in said
    assert cli.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] | {"processes": 1} == found["devices"] and found["devices"]["count"] == 8
    choices = {(choice["argument"], choice["value"]): choice for choice in found["choices"]}
    assert {value for argument, value in choices if argument == "exchange"} == set(EXCHANGES)
    assert {value for argument, value in choices if argument == "kernels"} == {"auto", *IMPLEMENTATIONS}
    assert {value for argument, value in choices if argument == "recipe"} == set(RECIPES)
    assert not choices["kernels", "hopper"]["runs"] and choices["kernels", "auto"]["note"] == "xla"
    for (argument, _), choice in choices.items():
        assert choice["runs"] or argument != "recipe" and choice["note"], choice


def test_info_on_a_gpu_that_runs_kernels(monkeypatch):
    """Breaks if `moax info` on a Hopper GPU says that XLA runs, or that MXFP8 multiplies in FP8 there."""
    monkeypatch.setattr(backend, "on_hopper", lambda: True)
    assert {choice.value for choice in info.kernels() if choice.runs} == {"auto", "hopper", "xla"}
    assert info.kernels()[0].note.startswith("hopper for bfloat16")
    assert [choice.value for choice in info.recipes() if choice.note.startswith("FP8")] == ["fp8_block", "fp8_tensor"]


def test_info_suggests_a_mesh():
    sizes = {(1, 1): None, (2, 2): "ep=2", (3, 3): "ep=3", (6, 6): "fsdp=2,ep=3", (7, 7): "fsdp=7"}
    sizes |= {(64, 8): "fsdp=16,ep=4", (16, 1): "fsdp=16"}
    for (count, local), mesh in sizes.items():
        assert info.suggest_mesh(count, local) == mesh, (count, local)


def test_info_names_the_extras_of_the_project(monkeypatch):
    """Breaks if an extra gets or loses a package, and `moax info` does not know."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    known = {k: v for k, v in project["optional-dependencies"].items() if k not in ("dev", "docs")}
    assert extras.EXTRAS.keys() == known.keys()
    for name in ("flax", "train"):
        assert list(extras.EXTRAS[name].values()) == [Requirement(text).name for text in known[name]]
    monkeypatch.setattr(info, "version", lambda name: None if name in ("flax", "moax") else "1")
    said = info.render(info.describe())
    assert "flax missing: pip install 'moax[flax]'" in said and "source tree" in said


@pytest.mark.parametrize("name", ("nnx", "linen"))
def test_layer_without_flax_names_its_extra(name):
    """Breaks if `import moax.nnx` without flax does not say what to install."""
    code = f"import sys; sys.modules['flax'] = None\nimport moax.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    last = done.stderr.splitlines()[-1]
    assert last == "ModuleNotFoundError: flax is missing: pip install 'moax[flax]'"


def test_help_imports_no_jax():
    """Breaks if `moax --help` or `import moax` imports JAX, which takes a second."""
    code = "import sys, moax, moax.cli\ntry: moax.cli.main(['--help'])\nexcept SystemExit: pass\n"
    code += "print('jax' in sys.modules or 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_commands_need_no_extra_to_print_their_help():
    """Breaks if a command imports a package of an extra before it runs, or `moax inspect` the language model."""
    code = (
        "import sys\nfrom moax import cli\n"
        "for command in cli.parsers()[1].values(): command.format_help()\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(*loaded & {'flax', 'matplotlib', 'optax', 'orbax', 'rich'})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [], done.stderr
    code = "import sys, moax.inspect.command\nprint(*(name for name in sys.modules if name.startswith('moax.train')))"
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


@pytest.mark.more
def test_train_runs_and_resumes(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 300)
    out = str(tmp_path / "runs")
    small = ["--d-model", "32", "--d-ff", "32", "--layers", "1", "--heads", "2", "--experts", "8", "--seq", "16"]
    text = ["--text", str(tmp_path / "text.txt"), "--batch", "8", "--eval-every", "4", "--lr", "0.02"]
    where = ["--mesh", "fsdp=2,ep=4", "--recipe", "fp8_block", "--cpu-devices", "8", "--engine", "shard_map"]
    assert cli.main(["train", *small, *text, *where, "--steps", "4", "--name", "a", "--out", out]) == 0
    said = capsys.readouterr().out
    ((first, last),) = re.findall(r"held-out loss +([0-9.]+) -> ([0-9.]+)", said)
    assert float(last) < float(first) - 0.1
    for word in ("held-out loss", "weight gathers", "curves.png", "dropped", "busiest"):
        assert word in said
    assert cli.main(["train", "--resume", "--out", out, "--steps", "5", "--save-every", "2", "--json"]) == 0
    said = capsys.readouterr()
    assert "resumed at step 4" in said.err
    found = json.loads(said.out)
    assert found["steps"] == found["held_out_loss"]["step"] == 5 and found["dropped"] == 0 and not found["interrupted"]
    assert 0 < found["held_out_loss"]["last"] < found["held_out_loss"]["first"] and found["tokens_per_s"] > 0
    assert 0 < found["weight_gathers"]["bytes"] < found["weight_gathers"]["unquantized_bytes"]
    assert found["folder"].endswith("runs/a") and found["curves"].endswith("curves.png")
    config = json.loads((tmp_path / "runs" / "a" / "config.json").read_text())
    assert config["steps"] == 5 and config["mesh"] == {"fsdp": 2, "ep": 4} and config["model"]["d_ff"] == 32


def test_mesh_type_is_told_by_argparse():
    with pytest.raises(argparse.ArgumentTypeError):
        arguments.mesh_of("x=1")


def test_emulated_devices_in_a_fresh_process():
    code = "from moax import program; program.emulate(4); import jax; print(jax.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "4", done.stderr


def test_inspect_prints_a_table(capsys):
    argv = ["inspect", "--mesh", "fsdp=2,ep=4", "--d-model", "64", "--d-ff", "64", "--tokens", "64", "--forward-only"]
    assert cli.main([*argv, "--recipe", "fp8_block"]) == 0
    said = capsys.readouterr().out
    assert "all-gather" in said and "uint8" in said
    assert cli.main([*argv, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["collectives"] and {"kind", "dtype", "bytes"} <= found["collectives"][0].keys()
    assert found["weights"]["gathered"] == found["weights"]["gathered_unquantized"] > 0
    gathers = [c for c in found["collectives"] if c["kind"] == "all-gather" and c["axes"] == ["fsdp"]]
    assert {name for c in gathers for name in c["carries"]} == {"params.wi", "params.wo"}


def test_compare(tmp_path, capsys):
    """One plot of several runs, and their gap at the end; a run without losses is named."""
    for name, losses in (("one", (3.0, 2.0)), ("two", (3.0, 2.25))):
        run = Run(tmp_path / name)
        run.path.mkdir()
        for step, loss in enumerate(losses, 1):
            run.log(step=step, loss=loss, tokens_per_s=100.0 * step)
        run.log(step=2, held_out_loss=losses[-1], tokens_per_expert=[[1]])
    plot = tmp_path / "both.png"
    assert cli.main(["compare", str(tmp_path / "one"), str(tmp_path / "two"), "--out", str(plot)]) == 0
    assert plot.stat().st_size > 10_000
    assert "two" in (printed := capsys.readouterr().out)
    assert "2.2500 (+0.2500)" in printed
    assert cli.main(["compare", str(tmp_path / "two"), "--out", str(plot), "--json"]) == 0
    found = {"runs": [{"name": "two", "held_out_loss": 2.25, "tokens_per_s": 150.0}], "plot": str(plot)}
    assert json.loads(capsys.readouterr().out) == found
    assert cli.main(["compare", str(tmp_path / "none"), "--out", str(plot)]) == 2
    assert "none has no step" in capsys.readouterr().err
