"""`python -m lm probe`: the errors of a run's gradients, expert by expert.

Covers: a run in FP8 and its checkpoint; the tokens that are read; the precision of what errors are measured against.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")

from lm import command, loop, probe
from lm import step as steps
from lm.config import ModelConfig, TrainConfig

pytestmark = pytest.mark.loose

MODEL = ModelConfig(d_model=32, d_ff=32, num_layers=1, num_heads=2, num_experts=8, top_k=2)
CONFIG = TrainConfig(
    MODEL,
    name="one",
    steps=2,
    batch=8,
    seq=32,
    engine="shard_map",
    eval_batches=1,
    dtype="float32",
)


@pytest.mark.parametrize(
    ("batch", "seq", "want"),
    [(128, 128, 32), (8, 32, 8), (24, 1024, 8)],
    ids=("part", "whole", "least"),
)
def test_few_tokens_are_read(batch, seq, want):
    """Breaks if gradients in float32 are computed for a whole large batch, or for a part that no mesh can divide."""
    config = dataclasses.replace(CONFIG, batch=batch, seq=seq, microbatches=2)
    probed = probe.with_few_tokens(config, 8)
    assert (probed.batch, probed.microbatches) == (want, 1)


def test_gradients_are_compared_with_float32():
    """Breaks if a GPU computes the gradients that others are compared with in TF32, which errs as bfloat16 may."""
    state = jax.eval_shape(lambda: steps.init_state(CONFIG))
    batch = jax.ShapeDtypeStruct((2, 33), jnp.uint8)
    for dtype, exact in (("float32", True), ("bfloat16", False)):
        config = dataclasses.replace(CONFIG, mesh=(), engine="auto", dtype=dtype)
        text = probe._gradients.lower(state, batch, config).as_text().splitlines()
        products = [line for line in text if "dot_general" in line]
        assert products
        assert exact == all("precision = [HIGHEST, HIGHEST]" in line for line in products)


@pytest.mark.more
def test_errors_of_a_run(tmp_path, capsys):
    """Breaks if errors are those of another state, batch or recipe, or of one expert under the name of another."""
    mesh = (("fsdp", 2), ("ep", 4))
    for recipe in (None, "fp8_block"):
        name = recipe or "none"
        loop.train(
            dataclasses.replace(
                CONFIG,
                mesh=mesh,
                out=str(tmp_path),
                name=name,
                recipe=recipe,
            )
        )
    assert command.main(["probe", str(tmp_path / "none"), str(tmp_path / "fp8_block")]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "none, seed 0, step 2", "fp8_block, seed 0, step 2",
    ]  # fmt: skip
    none = json.loads((tmp_path / "none" / "gradients.json").read_text())["errors"]
    fp8 = json.loads((tmp_path / "fp8_block" / "gradients.json").read_text())["errors"]
    for projection in ("gate", "up", "down"):
        assert np.shape(none[projection]["by_expert"]) == np.shape(fp8[projection]["by_expert"]) == (1, 8)
        assert none[projection]["most"] < 1e-4 and 0.01 < fp8[projection]["median"] < 0.5


def test_a_folder_without_a_run(tmp_path, capsys):
    """Breaks if a wrong folder ends in a traceback."""
    assert command.main(["probe", str(tmp_path)]) == 2
    assert f"{tmp_path} has no config.json" in capsys.readouterr().err
