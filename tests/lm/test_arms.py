"""`--from` and `python -m lm arms`: runs that go on from a checkpoint of another run.

Covers: the state, the data and the evaluations of such a run; other meshes, recipes and capacities; what is refused.
"""

import dataclasses
import json
import re

import numpy as np
import pytest

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("matplotlib")

from lm import arms, command
from lm.loop import train
from support.training import MODEL, STEPS, tiny_run

pytestmark = pytest.mark.loose

HALF = STEPS // 2


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The mesh has fsdp of four devices."""
    root = tmp_path_factory.mktemp("arms")
    text = root / "text.txt"
    text.write_text("".join(f"chapter {n}: the quick brown fox. " for n in range(2000)))
    mesh = (("dp", 2), ("fsdp", 4))
    return tiny_run(text, root / "runs", name="base", mesh=mesh, eval_every=HALF, save_every=HALF)


@pytest.fixture(scope="module")
def base(config):
    """A run that goes on unbroken, and saves its state after half its steps."""
    return train(config)


def half_way(base) -> str:
    return str(base.run.checkpoints / str(HALF))


def series(run, name: str) -> dict[int, float]:
    return {row["step"]: row[name] for row in run.rows(name)}


def after_half(values: dict[int, float]) -> dict[int, float]:
    return {step: value for step, value in values.items() if step > HALF}


def test_a_run_from_a_checkpoint_is_exact(base, config):
    """Breaks if the state, the data, the learning rates or the step of the other run are not those it goes on with."""
    arm = train(dataclasses.replace(config, name="same", origin=half_way(base)))
    for name in ("loss", "lr"):
        assert series(arm.run, name) == after_half(series(base.run, name))
    whole = series(base.run, "held_out_loss")
    assert series(arm.run, "held_out_loss") == {HALF: whole[HALF], STEPS: whole[STEPS]}
    assert json.loads(arm.run.config.read_text())["origin"] == half_way(base)


def test_another_mesh_has_the_same_losses(base, config):
    """Breaks if shards of fsdp=4 do not become those of fsdp=2, ep=2. The order of sums changes the last bits."""
    mesh = (("dp", 2), ("fsdp", 2), ("ep", 2))
    arm = train(dataclasses.replace(config, name="moved", origin=half_way(base), mesh=mesh))
    moved = series(arm.run, "loss")
    expected = after_half(series(base.run, "loss"))
    assert moved.keys() == expected.keys()
    np.testing.assert_allclose(list(moved.values()), list(expected.values()), rtol=1e-5)


def test_a_run_without_a_checkpoint_of_its_own_begins_again(base, config):
    """Breaks if a run that was killed before its first save resumes with new weights, or keeps rows twice."""

    def kill(row):
        raise RuntimeError("killed")

    arm = dataclasses.replace(config, name="killed", origin=half_way(base))
    with pytest.raises(RuntimeError, match="killed"):
        train(arm, on_step=kill)
    resumed = train(arm, resume=True)
    assert series(resumed.run, "loss") == after_half(series(base.run, "loss"))
    assert [row["step"] for row in resumed.run.rows("held_out_loss")] == [HALF, STEPS]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "--from .*: seed was 0, and is now 1"),
        ({"model": dataclasses.replace(MODEL, d_ff=64)}, "--from .*: model was"),
        ({"text": None}, "the text .* is not the text that the run began with"),
        ({"origin": "/nowhere"}, "--from /nowhere: /nowhere has no config.json; give the folder of a run"),
        ({"origin": "RUN/checkpoints/4"}, "no such checkpoint; .* has those of the steps 3, 6"),
        ({"origin": "RUN"}, "the checkpoint has 6 steps; give --steps of more"),
    ],
)
def test_what_cannot_go_on_is_refused(base, config, changes, message):
    """Breaks if a run begins from a state that does not fit it, or the message has no cure."""
    changes = {"origin": half_way(base), "name": "refused"} | changes
    changes["origin"] = changes["origin"].replace("RUN", str(base.run.path))
    with pytest.raises(ValueError, match=message):
        train(dataclasses.replace(config, **changes))
    assert not (base.run.path.parent / "refused").exists()


def test_settings_come_from_the_other_run(base):
    """Breaks if `--from` takes its settings from a preset, or an option does not override them."""
    argv = ["train", "--from", str(base.run.path), "--recipe", "fp8_block", "--name", "b"]
    config = command.train_config(command.parser().parse_args(argv))
    expected = dataclasses.replace(base.config, recipe="fp8_block", name="b", out="runs", origin=str(base.run.path))
    assert config == expected
    with pytest.raises(ValueError, match="--preset with --from: each names where the settings come from"):
        command.train_config(command.parser().parse_args([*argv, "--preset", "tiny"]))


def options(config, *extra: str) -> list[str]:
    """The options of `python -m lm arms` for the runs of `config`, in a folder of their own."""
    model = ["--d-model", "32", "--d-ff", "32", "--layers", "2", "--heads", "2", "--experts", "8", "--top-k", "2"]
    data = ["--text", config.text, "--batch", "8", "--seq", "32", "--lr", "0.01", "--warmup", "2", "--eval-every", "3"]
    run_options = ["--mesh", "dp=2,fsdp=4", "--dtype", "float32", "--engine", "shard_map", "--steps", str(STEPS)]
    return ["arms", *model, *data, *run_options, "--eval-batches", "1", *extra]


@pytest.mark.more
def test_arms_are_compared(config, tmp_path, capsys):
    """Breaks if an arm is not named by what it changes, its drops are not counted, or the result lacks a run."""
    dropping = "--mesh dp=2,ep=4 --capacity-factor 1"
    out = ["--out", str(tmp_path / "runs"), "--results", str(tmp_path / "results"), "--bar", "0.01", "--sha", "abc"]
    argv = options(config, *out, "--arm", "--mesh dp=2,fsdp=2,ep=2", "--arm", dropping)
    assert command.main(argv) == 0
    results = json.loads((tmp_path / "results" / "comparison.json").read_text())
    assert results["arms"] == ["none", "none on dp=2,fsdp=2,ep=2", "none with capacity 1 on dp=2,ep=4"]
    assert [run["steps"] for run in results["held_out"]] == [[0, HALF, STEPS], [HALF, STEPS], [HALF, STEPS]]
    unbroken, moved, bounded = results["held_out"]
    assert unbroken["dropped"] == moved["dropped"] == 0 < bounded["dropped"] < 1
    assert all(run["tokens_per_s"] > 0 for run in results["held_out"])
    assert results["header"]["git_sha"] == "abc" and results["header"]["command"].startswith("python -m lm arms")
    far = results["furthest"][0]
    assert abs(far["held_out"]["gap"]) < 1e-4 and HALF < far["training"]["step"] <= STEPS
    said = capsys.readouterr().out
    assert re.search(r"none on dp=2,fsdp=2,ep=2 less none at step 6: [+-]0.0000; within the bar of 0.01", said)
    picture = tmp_path / "results" / "comparison.png"
    picture.unlink()
    assert command.main(["compare", str(tmp_path / "results" / "comparison.json")]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_arms_that_find_no_time_are_named(config, tmp_path, capsys):
    """Breaks if an arm is left out in silence when the seconds are over, or the run at hand goes on."""
    argv = options(config, "--out", str(tmp_path), "--seconds", "0", "--arm", "--recipe fp8_block")
    assert command.main(argv) == 0
    said = capsys.readouterr().out
    assert '--arm "--recipe fp8_block" is left out' in said and "saving the state after step 1 " in said
    assert json.loads((tmp_path / "comparison.json").read_text())["arms"] == ["none"]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--arm", "--d-ff 64"], '--arm "--d-ff 64": model was .* it cannot change'),
        (["--arm", "--steps 9"], '--arm "--steps 9": --steps is the same in all arms'),
        (["--arm", "--lr 0.1"], 'lr is in --arm "--lr 0.1" 0.1, and in the run itself 0.01; compare runs that differ'),
        (["--arm", "--recipe none"], "--arm \"--recipe none\" is the arm 'none', which the run itself is too"),
        (["--arm", "--mesh ep=3"], "ep=3 make a mesh of 3 devices"),
        (["--arm", "--recipe fp8_block", "--at", "2"], "--at 2 must be at least 3"),
        (["--arm", "--recipe fp8_block", "--at", "6"], "--at 6 must be .* below --steps 6"),
        (["--arm", "--recipe fp8_block", "--resume"], "--resume, --from and the options of several processes"),
    ],
)
def test_arms_that_cannot_run(config, tmp_path, capsys, extra, message):
    """Breaks if an arm that cannot run is told after the run before it, or in a traceback."""
    assert command.main(options(config, "--out", str(tmp_path / "runs"), *extra)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"{arms.NAME}: error: ") and re.search(message, said), said
    assert not (tmp_path / "runs").exists()
