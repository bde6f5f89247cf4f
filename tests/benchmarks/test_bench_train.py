"""The benchmark `train`: the same model from the same seed by each layer, and what is said of those that do not run."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("rich")


from benchmarks import command
from benchmarks.block import train
from lm.config import ModelConfig
from support.benchmarks import InThisProcess

pytestmark = pytest.mark.more


@pytest.mark.loose
@pytest.mark.more
def test_all_train_alike(tmp_path, capsys, monkeypatch):
    """Breaks if a layer in the place of `moax.moe` trains another model, or if a row does not say what it measured."""
    model = ModelConfig(d_model=64, d_ff=32, num_layers=1, num_heads=2, num_experts=4, top_k=2, balance="none")
    monkeypatch.setattr(train, "TINY", (train.Run("tiny", model, 1, 16, "float32"),))
    monkeypatch.setattr("benchmarks.command.OTHERS", {"train": (train.PERF, train.TINY)})
    monkeypatch.setattr(train, "Worker", InThisProcess)
    out = tmp_path / "f.json"
    argv = ["train", "--cases", "tiny", "--recipe", "none", "--mesh", "ep=2", "--quick", "--peers", "native"]
    assert command.main([*argv, "--exchange", "all_to_all", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["impl"] for row in rows] == ["native", "moax"]
    ours = rows[-1]["extra"]
    assert ours["losses"][0] == pytest.approx(np.log(256), rel=0.05) and ours["losses"][-1] < ours["losses"][0] - 0.05
    for row in rows:
        np.testing.assert_allclose(row["extra"]["losses"], ours["losses"], rtol=1e-4)
        assert row["us"] > 0 and row["case"] == "tiny T16 ep=2" and row["direction"] == "step"
        assert row["extra"]["tokens_per_s"] == pytest.approx(16e6 / row["us"])
    assert sum(rows[0]["extra"]["tokens_per_expert"]) == 0, "the layer that was measured is moax.moe"
    assert set(rows[-1]["peers"]) == {"native"} and sum(ours["tokens_per_expert"]) == 2 * 32
    assert f"{ours['tokens_per_s']:,.0f} tokens/s of a device; loss" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "train without --mesh"),
        (["--mesh", "ep=2", "--tokens", "64"], "--tokens with train: it is for block and imbalance alone"),
        (["--mesh", "ep=2", "--kernels", "xla"], "--kernels with train: it is for block and imbalance alone"),
        (["--mesh", "ep=2", "--peers", "torch"], "unknown torch; use all, none, or some of native"),
    ],
)
def test_options_that_do_nothing(capsys, options, said):
    """Breaks if an option is taken and does nothing."""
    assert command.main(["train", "--cases", "tiny", *options]) == 2
    assert said in capsys.readouterr().err


def test_work():
    """Breaks if the work of a step counts experts that a token does not meet, or places that attention does not see."""
    run = train.TINY[0]
    m = run.model
    experts = 3 * m.d_model * m.d_ff * m.top_k
    dense = 4 * m.d_model**2 + 2 * m.d_model + m.d_model * m.num_experts
    met = m.num_layers * (experts + dense) + 2 * 256 * m.d_model + m.d_model
    attention = 3 * 2 * 2 * m.num_layers * m.d_model * sum(range(run.length)) / run.length  # without itself
    itself = 12 * m.num_layers * m.d_model
    assert run.tokens * (6 * met + attention) <= run.work <= run.tokens * (6 * met + attention + itself)
