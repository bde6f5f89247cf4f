"""The command line of the language model: what a stranger sees, what goes wrong, exit codes.

Covers: `python -m lm train`.
"""

import argparse
import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("matplotlib")

from lm import command, program
from lm.config import PRESETS

pytestmark = pytest.mark.loose


def parse(*argv):
    return command.train_config(command.parser().parse_args(["train", *argv]))


def test_help_shows_what_to_type(capsys):
    """Breaks if a stranger does not find the presets, the mesh, the text or how to stop."""
    with pytest.raises(SystemExit) as stop:
        command.main(["train", "--help"])
    said = capsys.readouterr().out
    assert stop.value.code == 0
    wanted = [
        "python -m lm train",
        "--preset",
        "tiny, small, medium, large",
        "--mesh",
        "standard library",
        "Ctrl-C",
    ]
    assert all(word in said for word in wanted), said


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "--mesh", "pp=2"], "'pp=2' must have sizes of the axes dp, fsdp, cp, ep, tp"),
        (["train", "--steps", "many"], "invalid int value: 'many'"),
        (["train", "--preset", "huge"], "choose from"),
        (["train", "--fly"], "unrecognized arguments: --fly"),
    ],
)
def test_unreadable_arguments(argv, message, capsys):
    """Breaks if a typing error is ignored."""
    with pytest.raises(SystemExit) as stop:
        command.main(argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--mesh", "fsdp=2,ep=3"], "fsdp=2, ep=3 make a mesh of 6 devices; there are 8"),
        (["--mesh", "fsdp=2,ep=4", "--batch", "12"], "--batch 12 is not divisible by"),
        (["--cpu-devices", "3"], "--cpu-devices 3: JAX already runs"),
        (["--cpu-devices", "0"], "--cpu-devices 0 must be at least 1"),
        (["--steps", "0"], "steps=0"),
        (["--seed", "4294967296"], "seed=4294967296 must be an int of at most 4294967295"),
        (["--batch", "99999999999999999999"], "batch=99999999999999999999 must be an int of at most"),
        (["--top-k", "9"], "top_k=9 must be at most num_experts=8"),
        (["--text", "/nowhere"], "--text /nowhere: no such file or folder"),
        (["--resume", "--name", "lost"], "no run 'lost'"),
        (["--resume"], "there are no runs"),
        (["--resume", "--preset", "tiny"], "leave --preset out"),
        (["--resume", "--from", "runs/a"], "--resume with --from"),
        (["--from", "/nowhere"], "--from /nowhere: /nowhere has no config.json"),
    ],
)
def test_arguments_that_cannot_work(argv, message, capsys, tmp_path):
    """Breaks if settings that cannot train are found after the folder of the run is made, or in a traceback."""
    assert command.main(["train", "--out", str(tmp_path / "runs"), *argv]) == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m lm train: error: ") and message in said
    assert not (tmp_path / "runs").exists(), "an error left a run behind"


def test_flags_over_preset():
    """Breaks if an option does not override the preset, or changes another setting."""
    config = parse(
        "--preset",
        "small",
        "--experts",
        "32",
        "--recipe",
        "none",
        "--lr",
        "0.5",
        "--tied",
    )
    assert config.model.num_experts == 32 and config.model.tied
    assert config.recipe is None and config.lr == 0.5 and config.name == "small"
    assert config.model.d_ff == PRESETS["small"].model.d_ff
    assert parse().name == "tiny"
    assert parse("--capacity-factor", "1.5").model.capacity_factor == 1.5
    assert parse("--capacity-factor", "none").model.capacity_factor is None


@pytest.mark.more
def test_train_runs_and_resumes(tmp_path, capsys):
    """Breaks if a run does not learn, a resumed run begins anew, or the report at the end is not of the run."""
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 300)
    out = str(tmp_path / "runs")
    small = [
        "--d-model",
        "32",
        "--d-ff",
        "32",
        "--layers",
        "1",
        "--heads",
        "2",
        "--experts",
        "8",
        "--seq",
        "16",
    ]
    text = [
        "--text",
        str(tmp_path / "text.txt"),
        "--batch",
        "8",
        "--eval-every",
        "4",
        "--lr",
        "0.02",
    ]
    where = [
        "--mesh",
        "fsdp=2,ep=4",
        "--recipe",
        "fp8_block",
        "--cpu-devices",
        "8",
        "--engine",
        "shard_map",
    ]
    assert command.main(["train", *small, *text, *where, "--steps", "4", "--name", "a", "--out", out]) == 0
    said = capsys.readouterr().out
    ((loss_before, last),) = re.findall(r"held-out loss +([0-9.]+) -> ([0-9.]+)", said)
    assert float(last) < float(loss_before) - 0.1
    for word in ("held-out loss", "weight gathers", "curves.png", "dropped", "busiest"):
        assert word in said
    assert "saving the state after step 4 ...\n" in said and "without a recipe, to compare its bytes" in said
    assert command.main(["train", "--resume", "--out", out, "--steps", "5", "--save-every", "2"]) == 0
    said = capsys.readouterr().out
    ((loss_before, last, steps),) = re.findall(
        r"held-out loss +([0-9.]+) -> ([0-9.]+) nats .* after (\d+) steps",
        said,
    )
    assert "resumed at step 4" in said and "dropped         0 of" in said and steps == "5"
    assert 0 < float(last) < float(loss_before)
    assert float(re.findall(r"speed +([0-9.,]+)", said)[0].replace(",", "")) > 0
    ((sent, ratio, plain),) = re.findall(
        r"sends ([0-9.]+) MB .* ([0-9.]+) of the ([0-9.]+) MB in",
        said,
    )
    assert 0 < float(sent) < float(plain) and 0.5 < float(ratio) < 1
    assert re.search(r"curves +.*runs/a/curves.png", said)
    config = json.loads((tmp_path / "runs" / "a" / "config.json").read_text())
    assert config["steps"] == 5
    assert config["mesh"] == {"fsdp": 2, "ep": 4}
    assert config["model"]["d_ff"] == 32


def test_mesh_type_is_told_by_argparse():
    """Breaks if a wrong mesh is an error without its reason, or the axes come out in another order."""
    assert program.mesh_of("ep=4, fsdp=2") == (("fsdp", 2), ("ep", 4))
    for text in ("pp=2", "ep", "ep=0", "ep=two", "ep=2,ep=4"):
        with pytest.raises(
            argparse.ArgumentTypeError,
            match=f"'{text}' must have sizes of the axes dp",
        ):
            program.mesh_of(text)


def test_emulated_devices_in_a_fresh_process():
    code = "from lm import program; program.emulate(4); import jax; print(jax.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "4", done.stderr
