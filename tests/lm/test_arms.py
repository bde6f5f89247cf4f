"""`python -m lm train --from`: runs that go on from a checkpoint of another run.

Covers: the state, the data and the evaluations of such a run; other meshes, recipes and capacities; what is refused.
"""

import dataclasses
import json

import numpy as np
import pytest

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")
pytest.importorskip("matplotlib")

from lm import command
from lm.config import ModelConfig, TrainConfig
from lm.loop import train

pytestmark = pytest.mark.loose

MODEL = ModelConfig(d_model=32, d_ff=32, num_layers=2, num_heads=2, num_experts=8, top_k=2)
STEPS = 6
HALF = STEPS // 2


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """The mesh has fsdp of four devices. shard_map's programs come out of the compilation cache."""
    root = tmp_path_factory.mktemp("arms")
    (root / "text.txt").write_text("".join(f"chapter {n}: the quick brown fox. " for n in range(2000)))
    return TrainConfig(
        model=MODEL,
        name="base",
        out=str(root / "runs"),
        text=str(root / "text.txt"),
        mesh=(("dp", 2), ("fsdp", 4)),
        steps=STEPS,
        batch=8,
        seq=32,
        lr=1e-2,
        warmup=2,
        dtype="float32",
        engine="shard_map",
        eval_every=HALF,
        eval_batches=1,
        save_every=HALF,
    )


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
