"""The language model of `python -m lm train`: what it reads, that it learns, and that it resumes exactly.

Covers: runs, interruptions and resumption; metrics; settings that are refused; variants of the model; its batches.
"""

import contextlib
import dataclasses
import io
import json
import os
import shutil
import signal
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support import rel_norm

pytest.importorskip("optax")
pytest.importorskip("orbax.checkpoint")

import moax
from lm import config as lm_config
from lm import data, plots, report
from lm import model as lm
from lm import run as runs
from lm import step as steps
from lm.config import PRESETS, TrainConfig, check_batch, mesh_over_devices
from lm.loop import train
from support.training import MODEL, STEPS, tiny_run

pytestmark = pytest.mark.loose


@pytest.fixture(scope="module")
def corpus_folder(tmp_path_factory):
    """Forty small text files."""
    root = tmp_path_factory.mktemp("text")
    for number in range(40):
        (root / f"part{number}.txt").write_text(
            f"chapter {number}: the quick brown fox jumps over the lazy dog. " * 20,
        )
    return root


@pytest.fixture(scope="module")
def config(corpus_folder, tmp_path_factory):
    mesh = (("fsdp", 2), ("ep", 4))
    return tiny_run(corpus_folder, tmp_path_factory.mktemp("runs"), name="whole", mesh=mesh, eval_every=3, save_every=0)


@pytest.fixture(scope="module")
def whole(config):
    """A run from start to end."""
    return train(config)


@pytest.fixture(scope="module")
def stopped(config):
    """The same run, stopped by Ctrl-C after half its steps."""

    def ctrl_c(row):
        if row["step"] == STEPS // 2:
            os.kill(os.getpid(), signal.SIGINT)

    return train(dataclasses.replace(config, name="stopped"), on_step=ctrl_c)


def losses(run):
    return {row["step"]: row["loss"] for row in run.rows() if "loss" in row}


def continued(stopped, name, **changes):
    """A copy of the stopped run, resumed."""
    shutil.copytree(stopped.run.path, stopped.run.path.parent / name)
    return train(dataclasses.replace(stopped.config, name=name, **changes), resume=True)


def test_it_learns(whole):
    held_out = [row["held_out_loss"] for row in whole.run.rows() if "held_out_loss" in row]
    assert len(held_out) == 3 and not whole.interrupted
    assert abs(held_out[0] - np.log(256)) < 0.2
    assert held_out[-1] < held_out[0] - 0.5


def test_metrics_of_a_run(whole):
    rows = whole.run.rows("loss")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["dropped"] == 0 and 1 / 8 <= row["busiest"] <= 1 / 2 and row["tokens_per_s"] > 0 for row in rows)
    evaluations = whole.run.rows("held_out_loss")
    routed = np.asarray(evaluations[1]["tokens_per_expert"])
    assert routed.shape == (2, 8)
    assert (routed.sum(1) == 3 * 8 * 32 * MODEL.top_k).all()


def test_ctrl_c_saves_and_resuming_is_exact(whole, stopped):
    assert stopped.interrupted and stopped.steps == STEPS // 2
    resumed = continued(stopped, "resumed")
    assert not resumed.interrupted
    assert losses(resumed.run) == losses(whole.run)


@pytest.mark.more
@pytest.mark.parametrize(
    "mesh",
    [(("ep", 8),), (("fsdp", 2), ("cp", 2), ("ep", 2))],
    ids=["ep", "cp"],
)
def test_resuming_on_another_mesh(mesh, whole, stopped):
    """Another order of the sums, and the same numbers but for it. (FP8 would turn a last bit into a step of 6 %.)"""
    moved = losses(continued(stopped, f"moved{len(mesh)}", mesh=mesh).run)
    expected = losses(whole.run)
    assert moved.keys() == expected.keys()
    np.testing.assert_allclose(list(moved.values()), list(expected.values()), rtol=1e-5)


def test_keyboard_interrupt_from_a_callback_saves_too(config):
    def stop(row):
        raise KeyboardInterrupt

    result = train(dataclasses.replace(config, name="called"), on_step=stop)
    assert result.interrupted and result.steps == 1
    assert [path.name for path in result.run.checkpoints.iterdir()] == ["1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "seed was 0, and is now 1"),
        ({"batch": 16}, "batch was 8, and is now 16"),
        ({"model": dataclasses.replace(MODEL, d_ff=64)}, "model was"),
        ({"text": None}, "the text .* is not the text that the run began with"),
        ({"name": "nowhere"}, "has no run 'nowhere'"),
    ],
)
def test_resuming_something_else_is_refused(whole, changes, message):
    with pytest.raises(ValueError, match=message):
        train(dataclasses.replace(whole.config, **changes), resume=True)


def test_no_run_is_overwritten(tmp_path):
    config = TrainConfig(model=MODEL, name="a", out=str(tmp_path))
    assert [runs.create(config).name for _ in range(3)] == ["a", "a-2", "a-3"]


def test_plot(whole, stopped):
    for result in (whole, stopped):
        plots.draw_run(result.run, result.config)
        assert result.run.curves.read_bytes().startswith(b"\x89PNG")


def test_report(whole, tmp_path):
    """Breaks if a run does not say what it trains, what it computes after its last step and how it ends, or not with
    which factor a step makes one round."""
    stream = io.StringIO()
    corpus = data.load(whole.config.text, whole.config.seq)
    said = report.Report(stream)
    said.start(whole.config, mesh_over_devices(whole.config.mesh), corpus)
    said.ready(whole.run, 0, 1.0)
    for row in whole.run.rows():
        said.held_out(row["step"], row["held_out_loss"]) if "held_out_loss" in row else said.step(row)
    words = stream.getvalue()
    assert "fsdp=2, ep=4: 8 cpu devices" in words and "dropped 0" in words
    assert f"step {STEPS:>6}/{STEPS}  held-out loss" in words
    stages = io.StringIO()
    said = "\n".join(report.finish(whole, report.Report(stages)))
    assert "bytes of weights" in stages.getvalue()
    assert stages.getvalue().splitlines()[-1] == "drawing the curves ..."
    assert "rounds" not in said and "curves" in said and f"after {STEPS} steps" in said
    again = runs.Run(tmp_path)
    for row in whole.run.rows():
        again.log(**row | {"rounds": 4})
    # An interrupted run compiles no program again.
    said = report.finish(dataclasses.replace(whole, run=again, interrupted=True))
    assert "--buffer-factor 5 (now 1.25) makes one" in "\n".join(said)
    assert lm_config.LIMITED_FACTOR == moax.config.LIMITED_FACTOR


def test_config_survives_json(config):
    assert TrainConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    with pytest.raises(ValueError, match="ModelConfig has no field depth"):
        TrainConfig.from_json({"model": {"depth": 3}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"lr": 0.0}, "lr=0.0"),
        ({"seed": -1}, "seed=-1"),
        ({"dtype": "float16"}, "dtype='float16' must be one of 'float32', 'bfloat16'"),
        ({"remat": "some"}, "remat='some'"),
        ({"save_every": -1}, "save_every=-1"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"name": "a/b"}, "name='a/b'"),
        ({"microbatches": 3}, "microbatches=3 must divide batch=8"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
        ({"num_heads": 3}, "d_model=32 must be a multiple of 2 \\* num_heads=6"),
        ({"top_k": 9}, "top_k=9 must be at most num_experts=8"),
        ({"balance": "hope"}, "balance='hope'"),
        ({"num_layers": 0}, "num_layers=0"),
    ],
)
def test_settings_are_checked(config, changes, message):
    """Breaks if a setting that cannot be is found after the run began, or is not named."""
    owner = MODEL if hasattr(MODEL, next(iter(changes))) else config
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(owner, **changes)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_as_large_as_they_say(name):
    total, active = lm.count(PRESETS[name].model)
    said = {"tiny": (3.5e6, 1.1e6), "small": (109e6, 21e6), "medium": (655e6, 127e6), "large": (3.49e9, 673e6)}[name]
    assert (total, active) == pytest.approx(said, rel=0.02)


@pytest.mark.more
@pytest.mark.parametrize(
    "changes",
    [{"tied": True, "balance": "aux"}, {"balance": "none", "shared_d_ff": 16}],
)
def test_variants_of_the_model(changes, getkey):
    """Causal: a later byte changes nothing before it. Every parameter has a gradient."""
    model = dataclasses.replace(MODEL, **changes)
    params = jax.jit(lm.init, static_argnums=1)(getkey(), model)
    assert (params.predict is None) == model.tied
    tokens = jax.random.randint(getkey(), (2, 12), 0, 256)
    bias = jnp.zeros((2, 8)) if model.balance == "bias" else None

    @jax.jit
    def run(params, tokens):
        logits, stats = lm.forward(params, bias, tokens, TrainConfig(model, dtype="float32"))
        return jax.nn.log_softmax(logits)[..., 0].mean() + stats.aux_loss.sum(), logits

    (_, logits), grads = jax.value_and_grad(run, has_aux=True)(params, tokens)
    later = run(params, tokens.at[:, 8].set(7))[1]
    np.testing.assert_allclose(later[:, :8], logits[:, :8], atol=1e-5)
    assert not np.allclose(later[:, 8:], logits[:, 8:], atol=1e-3)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))


@pytest.mark.more
@pytest.mark.parametrize("recipe", [None, "fp8_block"])
def test_microbatches_are_one_batch(config, recipe):
    """Breaks if a part of a batch is left out, counted twice or weighed wrongly, or kept weights are not those of the
    step: the gradients of four parts would not be those of the whole. (FP8 on a mesh; a part has blocks of other rows.)
    """
    config = dataclasses.replace(config, recipe=recipe, batch=32)
    rounding, mesh = (5e-6, None) if recipe is None else (5e-2, mesh_over_devices(config.mesh))
    batch = jnp.asarray(data.load(config.text, config.seq).batch(0, 0, 32, config.seq))
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        where = steps.shardings(config, mesh) if mesh else None
        state = jax.jit(lambda: steps.init_state(config), out_shardings=where)()
        results = []
        for count in (1, 4):
            parts = dataclasses.replace(config, microbatches=count)
            results.append(jax.jit(lambda state, batch, c=parts: steps.gradients(state, batch, c))(state, batch))
    ((want, (want_entropy, want_stats)), want_grads), ((total, (entropy, stats)), grads) = results
    np.testing.assert_allclose([total, entropy], [want, want_entropy], rtol=min(rounding, 2e-3))
    assert np.abs(stats.tokens_per_expert - want_stats.tokens_per_expert).sum() <= (0 if recipe is None else 8)
    assert stats.dropped.sum() == want_stats.dropped.sum() == 0
    for got, wanted in zip(jax.tree.leaves(grads), jax.tree.leaves(want_grads), strict=True):
        assert rel_norm(got, wanted) < rounding


@pytest.mark.more
def test_remat_changes_no_gradient(getkey):
    params = jax.jit(lm.init, static_argnums=1)(getkey(), MODEL)
    tokens = jax.random.randint(getkey(), (2, 12), 0, 256)

    def gradients(remat):
        run = TrainConfig(MODEL, dtype="float32", remat=remat)
        return jax.jit(jax.grad(lambda p: lm.forward(p, jnp.zeros((2, 8)), tokens, run)[0].std()))(params)

    for a, b in zip(
        jax.tree.leaves(gradients("moe")),
        jax.tree.leaves(gradients("none")),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_batches_are_a_function_of_seed_and_step(corpus_folder):
    corpus = data.load(str(corpus_folder), 16)
    batch = corpus.batch(3, 5, 4, 16)
    assert batch.shape == (4, 17) and batch.dtype == np.uint8
    assert (batch == data.load(str(corpus_folder), 16).batch(3, 5, 4, 16)).all()
    assert (batch != corpus.batch(3, 6, 4, 16)).any() and (batch != corpus.batch(4, 5, 4, 16)).any()
    held_out = np.concatenate([corpus.held_out_batch(i, 3, 2, 16) for i in range(3)])
    assert held_out.shape == (6, 17)
    assert all(row.tobytes() in corpus.held_out.tobytes() for row in held_out)


def test_files_are_held_out_by_the_hash_of_their_path(corpus_folder, tmp_path):
    corpus = data.load(str(corpus_folder), 16)
    shutil.copytree(corpus_folder, tmp_path / "elsewhere")
    assert data.load(str(tmp_path / "elsewhere"), 16).fingerprint == corpus.fingerprint
    held_out = [path for path in corpus_folder.iterdir() if data.is_held_out(path.name)]
    assert 0 < len(held_out) < 10
    for path in corpus_folder.iterdir():
        chapter = path.read_bytes()[:40]
        assert (chapter in corpus.held_out.tobytes()) == (path in held_out)
        assert (chapter in corpus.train.tobytes()) == (path not in held_out)


def test_standard_library_is_the_default_text():
    corpus = data.load(None, 128, limit=2**20)
    assert corpus.train.size + corpus.held_out.size > 2**20 * 0.99
    assert b"def " in corpus.train.tobytes() and corpus.held_out.size > 1000


def test_one_file_is_cut_at_its_end(tmp_path):
    (tmp_path / "book.txt").write_bytes(bytes(range(1, 201)) * 10)
    for path in (tmp_path, tmp_path / "book.txt"):
        corpus = data.load(str(path), 16)
        assert (corpus.train.size, corpus.held_out.size) == (1900, 100)


def test_binary_and_hidden_files_are_left_out(corpus_folder, tmp_path):
    shutil.copytree(corpus_folder, tmp_path / "text")
    (tmp_path / "text" / "picture.bin").write_bytes(b"a\0b" * 1000)
    (tmp_path / "text" / ".secret").write_text("b" * 1000)
    expected = data.load(str(corpus_folder), 16).fingerprint
    assert data.load(str(tmp_path / "text"), 16).fingerprint == expected


def test_too_little_text(tmp_path):
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(ValueError, match="too few for seq=128: give at least 2580 bytes"):
        data.load(str(tmp_path), 128)
    with pytest.raises(ValueError, match="nowhere: no such file"):
        data.load(str(tmp_path / "nowhere"), 128)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 12}, "--batch 12 is not divisible by fsdp x ep = 8 devices; 8 or 16 would do"),
        ({"batch": 16, "microbatches": 4, "mesh": ()},
         "--batch 16 is not divisible into 4 microbatches over fsdp = 8 devices; 32 would"),
    ],
)  # fmt: skip
def test_meshes_that_do_not_fit(config, changes, message):
    """Breaks if parts of a batch of unequal size are not refused with what would do."""
    config = dataclasses.replace(config, **changes)
    with pytest.raises(ValueError, match=message):
        check_batch(config, mesh_over_devices(config.mesh))
    assert dict(mesh_over_devices(()).shape) == {"fsdp": 8}


@pytest.mark.parametrize(
    ("hopper", "dtype", "width", "taken"),
    [
        (True, "bfloat16", 64, "cudnn"),
        (True, "bfloat16", 60, "xla"),
        (True, "bfloat16", 256, "xla"),
        (True, "float32", 64, "xla"),
        (False, "bfloat16", 64, "xla"),
    ],
)
def test_attention_takes_what_runs(config, monkeypatch, hopper, dtype, width, taken):
    """Breaks if attention asks cuDNN for what it refuses, or holds every score where it need not."""
    monkeypatch.setattr(
        jax,
        "devices",
        lambda: [SimpleNamespace(compute_capability="9.0" if hopper else None)],
    )
    config = dataclasses.replace(
        config,
        dtype=dtype,
        model=dataclasses.replace(MODEL, head_dim=width),
    )
    assert lm.pick_attention(config) == taken
    assert lm.pick_attention(dataclasses.replace(config, attention="xla")) == "xla"
    named = dataclasses.replace(config, attention="cudnn")
    if taken == "cudnn" or not hopper:  # another device refuses it when it compiles
        assert lm.pick_attention(named) == "cudnn"
    else:
        with pytest.raises(
            moax.Unsupported,
            match=f"attention='cudnn' takes .*; the run has {dtype} and heads of",
        ):
            lm.pick_attention(named)


def test_grouped_heads():
    """Breaks if a head of queries meets another's keys and values, or the width of a head is that of the model."""
    grouped = dataclasses.replace(MODEL, num_heads=4, num_kv_heads=2, head_dim=6, num_layers=1)
    layer = jax.eval_shape(lambda: lm.init(jax.random.key(0), grouped)).layers
    assert layer.wqkv.shape == (1, 32, (4 + 2 * 2) * 6) and layer.wo.shape == (1, 24, 32)
    draw = np.random.default_rng(0)
    layer = dataclasses.replace(
        layer,
        wqkv=draw.normal(size=(32, 48)),
        wo=draw.normal(size=(24, 32)),
    )
    q, k, v = np.split(layer.wqkv.reshape(32, 8, 6), (4, 6), axis=1)
    repeated = np.concatenate([q, np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)], 1).reshape(
        32,
        -1,
    )
    x = draw.normal(size=(2, 16, 32)).astype(np.float32)
    got, want = (
        lm._attention(x, dataclasses.replace(layer, wqkv=w), lm._rotation(16, 6), heads, jnp.dot, "xla")
        for w, heads in ((layer.wqkv, grouped.heads), (repeated, (4, 4, 6)))
    )
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
