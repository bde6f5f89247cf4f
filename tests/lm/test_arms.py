"""`python -m lm train --recipes`: runs that differ in recipe or seed, and what tells them apart.

Covers: a comparison that stops and goes on; gaps, gradient errors and lost values; settings that are refused.
"""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")

from lm import experiments, plots
from lm import run as runs
from lm import step as steps
from lm.config import ModelConfig, TrainConfig
from lm.experiments import Arms
from moax import Format
from moax.program import mesh_over_devices

pytestmark = pytest.mark.loose

MODEL = ModelConfig(d_model=32, d_ff=32, num_layers=1, num_heads=2, num_experts=8, top_k=2)


def make_config(folder, **changes):
    return TrainConfig(
        model=MODEL, name="both", out=str(folder), mesh=(("fsdp", 2), ("ep", 4)), steps=4, batch=8, seq=32, lr=1e-2,
        warmup=2, dtype="float32", engine="shard_map", eval_every=2, eval_batches=1, save_every=0, **changes,
    )  # fmt: skip


def test_gaps(tmp_path):
    """Breaks if a recipe is compared with another seed, at another step, or the spread of seeds is that of a recipe."""
    arms = Arms(make_config(tmp_path), ("none", "fp8_block"), 2)
    held_out = {("none", 0): [5, 3, 2], ("fp8_block", 0): [5, 3.5, 2.25], ("none", 1): [6, 3.25], ("fp8_block", 1): [6]}
    for (recipe, seed), losses in held_out.items():
        run = runs.Run(tmp_path / "both" / f"{recipe}-seed{seed}")
        run.path.mkdir(parents=True)
        for i, loss in enumerate(losses):
            run.log(step=2 * i, held_out_loss=loss)
    results = experiments.compare(arms, [])
    rows = [(row["step"], row["gaps"], row["mean"], row["between_seeds"]) for row in results["gaps"]]
    assert rows == [(0, [0, 0], 0, 1), (2, [0.5], 0.5, 0.25), (4, [0.25], 0.25, None)]
    assert "fp8_block less none at step 4: +0.2500" in experiments.lines(results)
    plots.draw_experiment(results, tmp_path / "arms.png")
    assert (tmp_path / "arms.png").read_bytes().startswith(b"\x89PNG")
    json.dumps(results)


@pytest.mark.parametrize(
    ("batch", "seq", "want"),
    [(128, 128, (32, 1)), (8, 32, (8, 1)), (24, 1024, (8, 1)), (12, 32, (12, 2))],  # 8 devices have tokens
)
def test_the_probe_reads_few_tokens(tmp_path, batch, seq, want):
    """Breaks if gradients in float32 are computed for a whole large batch, or for a part that no mesh can divide."""
    config = dataclasses.replace(make_config(tmp_path), batch=batch, seq=seq, microbatches=2)
    probed = experiments._with_few_tokens(config, mesh_over_devices(config.mesh))
    assert (probed.batch, probed.microbatches) == want


@pytest.mark.parametrize(("rows", "scale"), [(True, "float32"), (False, "pow2")])
def test_lost_values(rows, scale):
    """Breaks if a value that becomes 0 is not counted, or one that was 0 is."""
    x = np.zeros((2, 8), np.float32)
    x[0, :4] = 448, 448 * 2.0**-20, 0, 1  # the second is below half of the least value of the block's format
    x[1, 4:] = -3, 3, 1e-7, 1e-7
    format = Format(block=4, scale=scale)
    found = experiments.count_lost(jnp.asarray(x if rows else x.T[None]), format)
    assert {n: int(v) for n, v in found.items()} == dict(
        values=7, underflow=3, saturated=3 if scale == "float32" else 1
    )


@pytest.mark.parametrize(
    ("recipes", "seeds", "message"),
    [
        (("none", "fp4"), 1, "--recipes has 'fp4'"),
        (("none", "none"), 1, "once"),
        (("none",), 0, "at least one of each"),
    ],
)
def test_settings_are_checked(tmp_path, recipes, seeds, message):
    """Breaks if a run is trained twice into one folder, or a typing error is found after the first run."""
    with pytest.raises(ValueError, match=message):
        Arms(make_config(tmp_path), recipes, seeds)


def test_gradients_are_compared_with_float32(tmp_path):
    """Breaks if a GPU computes the gradients that others are compared with in TF32, which errs by as much as bfloat16
    may, or compiles them anew for each recipe."""
    configs = [
        dataclasses.replace(make_config(tmp_path), mesh=(), engine="auto", recipe=recipe, name=name, dtype=dtype)
        for recipe, name, dtype in ((None, "a", "bfloat16"), ("fp8_block", "b", "bfloat16"), (None, "a", "float32"))
    ]
    exact = {experiments._in_float32(config) for config in configs}
    (config,) = exact
    state = jax.eval_shape(lambda: steps.init_state(config))
    batch = jax.ShapeDtypeStruct((2, 33), jnp.uint8)
    products = [
        [
            line
            for line in experiments._gradients.lower(state, batch, of).as_text().splitlines()
            if "dot_general" in line
        ]
        for of in (config, configs[0])
    ]
    assert products[0] and all("precision = [HIGHEST, HIGHEST]" in line for line in products[0])
    assert not all("HIGHEST" in line for line in products[1])


@pytest.mark.more
def test_a_comparison_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """Breaks if runs of a seed begin or read otherwise, a run is trained again or not at all after a stop, the
    gradients of a recipe are compared with those of another state, or losses are lost with gradients that fail."""
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"part{i}.txt").write_text(
            f"chapter {i}: the quick brown fox jumps over the lazy dog. " * 20
        )
    arms = Arms(make_config(tmp_path / "runs", text=str(tmp_path / "text")), ("none", "fp8_block"), 2)
    steps = []

    def stop(row):
        steps.append(row["step"])
        if len(steps) == 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(experiments, "probe", lambda *_: 1 / 0)
        experiments.train(arms, on_step=stop)
    first = json.loads((tmp_path / "runs" / "both" / "results.json").read_text())
    assert first["interrupted"] and steps == [1, 2, 3, 4, 1, 2]
    assert [run["steps"] for run in first["held_out"]] == [[0, 2, 4], [0, 2], [], []]
    results = experiments.train(experiments.read(tmp_path / "runs" / "both" / "arms.json"), resume=True, on_step=stop)
    assert not results["interrupted"] and steps[6:] == [3, 4, 1, 2, 3, 4, 1, 2, 3, 4]
    assert [run["steps"] for run in results["held_out"]] == [[0, 2, 4]] * 4
    assert first["held_out"][0] == results["held_out"][0]
    assert all(abs(gap) < 0.02 and row["between_seeds"] > 0 for row in results["gaps"] for gap in row["gaps"])
    none, fp8 = ({n: p["by_expert"] for n, p in found["projections"].items()} for found in results["gradients"])
    for name in ("gate", "up", "down"):
        assert np.shape(none[name]) == np.shape(fp8[name]) == (1, 8)
        assert np.max(none[name]) < 1e-4 and 0.01 < np.median(fp8[name]) < 0.5
    none, lost = (found["operands"] for found in results["gradients"])
    tokens = 8 * 32 * 2
    assert none == {} and set(lost) == {"x", "a", "dy", "dh", "wi", "wo"}
    assert lost["wi"]["values"] == [8 * 32 * 2 * 32]
    assert all(0.99 * tokens * 32 <= values <= tokens * 32 for values in lost["x"]["values"])
    assert all(0 <= max(of["underflow"]) < 0.1 * min(of["values"]) for of in lost.values())
    assert dataclasses.asdict(experiments.read(tmp_path / "runs" / "both" / "arms.json")) == dataclasses.asdict(arms)
    for checkpoints in (tmp_path / "runs").glob("*/*/checkpoints"):
        shutil.rmtree(checkpoints)
    again = experiments.train(arms, resume=True, on_step=stop)
    assert steps[16:] == [] and again == results  # as on another machine, where the checkpoints did not come along
