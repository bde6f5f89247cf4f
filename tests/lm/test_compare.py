"""`python -m lm compare`: what tells runs apart that differ in recipe or seed.

Covers: gaps of losses; the report; runs that cannot be compared.
"""

import dataclasses
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")

from lm import command
from lm.config import ModelConfig, TrainConfig
from lm.run import Run

pytestmark = pytest.mark.loose

MODEL = ModelConfig(d_model=32, d_ff=32, num_layers=1, num_heads=2, num_experts=8, top_k=2)
HELD_OUT = {
    (None, 0): [5, 3, 2],
    ("fp8_block", 0): [5, 3.5, 2.25],
    (None, 1): [6, 3.25],
    ("fp8_block", 1): [6],
}


@pytest.fixture
def folders(tmp_path) -> list[str]:
    """The folders of the runs of `HELD_OUT`."""
    for (recipe, seed), losses in HELD_OUT.items():
        run = Run(tmp_path / f"{recipe}-{seed}")
        run.path.mkdir()
        config = TrainConfig(MODEL, name=run.path.name, out=str(tmp_path), recipe=recipe, seed=seed)
        run.config.write_text(json.dumps(config.to_json() | {"fingerprint": "of the text"}))
        for i, loss in enumerate(losses):
            run.log(step=2 * i, held_out_loss=loss)
    return [str(tmp_path / f"{recipe}-{seed}") for recipe, seed in HELD_OUT]


def test_a_bar_is_of_the_end(folders, tmp_path, capsys):
    """Breaks if an arm that was stopped, or is above the bar, keeps it."""
    for end, verdict in ((4, "; above the bar of 0.2"), (6, "; not at its end, so the bar says nothing")):
        for folder in folders[:2]:
            config = Run(Path(folder)).config
            config.write_text(json.dumps(json.loads(config.read_text()) | {"steps": end}))
        assert command.main(["compare", *folders[:2], "--bar", "0.2"]) == 0
        assert f"fp8_block less none at step 4: +0.2500{verdict}" in capsys.readouterr().out.splitlines()


def test_gaps(folders, tmp_path, capsys):
    """Breaks if a recipe is compared with another seed, at another step, or the spread of seeds is that of a recipe."""
    assert command.main(["compare", *folders]) == 0
    results = json.loads((tmp_path / "comparison.json").read_text())
    expected = (["none", "fp8_block"], 2, "bfloat16")
    assert (results["arms"], results["seeds"], results["dtype"]) == expected
    rows = [(row["step"], row["gaps"], row["mean"], row["between_seeds"]) for row in results["gaps"]]
    assert rows == [(0, [0, 0], 0, 1), (2, [0.5], 0.5, 0.25), (4, [0.25], 0.25, None)]
    assert [run["losses"] for run in results["held_out"]] == list(HELD_OUT.values())
    assert "fp8_block less none at step 4: +0.2500" in capsys.readouterr().out.splitlines()
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"lr": 0.5},
            "lr is in .* 0.5, and in .* 0.001; compare runs that differ in recipe, capacity factor, mesh",
        ),
        ({"model": dataclasses.replace(MODEL, d_ff=64)}, "model is in"),
        ({"fingerprint": "of another text"}, "fingerprint is in"),
        ({"seed": 0}, "has the arm 'fp8_block' and seed 0, as a run before it"),
        (None, "has no config.json"),
    ],
)
def test_runs_that_cannot_be_compared(folders, tmp_path, capsys, change, message):
    """Breaks if runs are compared that differ in more than arm and seed, or one run is counted twice."""
    config = Run(tmp_path / "fp8_block-1").config
    if change is None:
        config.unlink()
    else:
        model = {name: dataclasses.asdict(value) for name, value in change.items() if name == "model"}
        config.write_text(json.dumps(json.loads(config.read_text()) | change | model))
    assert command.main(["compare", *folders]) == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m lm compare: error: ") and re.search(message, said)


def test_a_result_of_an_earlier_moax(tmp_path, capsys):
    """Breaks if a comparison.json whose rows have recipes, and no arms, ends in a traceback."""
    path = tmp_path / "comparison.json"
    path.write_text(json.dumps({"recipes": ["none", "fp8_block"], "held_out": []}))
    assert command.main(["compare", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"{path} has no arms, as an earlier moax wrote it; give the folders of its runs" in said
