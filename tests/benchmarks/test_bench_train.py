"""The benchmark `train`: what a step is, the parts of its time, and the options that it does not take."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import command, limits
from benchmarks.block import stages, train, train_worker
from benchmarks.block.block import How
from benchmarks.profiles import Kernel
from lm.config import ModelConfig
from support.benchmarks import InThisProcess

pytestmark = pytest.mark.more


@pytest.mark.loose
@pytest.mark.more
def test_a_step_trains(tmp_path, capsys, monkeypatch):
    """Breaks if the model does not learn, or if a row does not say what it measured."""
    model = ModelConfig(d_model=64, d_ff=32, num_layers=1, num_heads=2, num_experts=4, top_k=2, balance="none")
    monkeypatch.setattr(train, "TINY", (train.Run("tiny", model, 1, 16, "float32"),))
    monkeypatch.setitem(command.BENCHMARKS["train"].cases, "tiny", train.TINY)
    monkeypatch.setattr(train, "Worker", InThisProcess)
    out = tmp_path / "f.json"
    argv = ["train", "--cases", "tiny", "--recipe", "none", "--mesh", "ep=2", "--quick"]
    assert command.main([*argv, "--exchange", "all_to_all", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    (row,) = rows
    ours = row["extra"]
    assert ours["losses"][0] == pytest.approx(np.log(256), rel=0.05) and ours["losses"][-1] < ours["losses"][0] - 0.05
    assert row["us"] > 0 and row["case"] == "tiny T16 ep=2" and row["direction"] == "step"
    assert ours["tokens_per_s"] == pytest.approx(16e6 / row["us"]) and sum(ours["tokens_per_expert"]) == 2 * 32
    assert f"tokens_per_s {ours['tokens_per_s']:,.4g}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "train without --mesh"),
        (["--mesh", "ep=2", "--tokens", "64"], "--tokens with train: it is for block and imbalance alone"),
        (["--mesh", "ep=2", "--kernels", "xla"], "--kernels with train: it is for block and imbalance alone"),
        (["--mesh", "ep=2", "--peers", "torch"], "unknown torch; give some of all, none"),
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


def test_microbatches():
    """Breaks if a step of more microbatches has other sequences in each, or its work or batch is that of one."""
    one, two, *_ = train._qwen3(4)
    assert (one.tokens, two.tokens) == (16384, 32768) and two.work == 2 * one.work
    config = two.config(How(mesh=(("fsdp", 1),)), "fp8_block")
    assert (config.batch, config.microbatches, config.model.heads) == (8, 2, (32, 4, 128))
    attention = 6 * one.tokens * 4 * 4096 * 32 * 128
    assert one.work > attention and one.work - attention == 6 * one.tokens * train.count(one.model)[1]
    draw = train_worker.batches_of(config, random=True)
    assert draw(0).shape == (8, 4097) and draw(0).dtype == np.uint8 and np.any(draw(0) != draw(1))
    np.testing.assert_array_equal(draw(1), draw(1))


SCOPES = (
    ("attention", "jit(train_step)/jvp()/while/body/eval_jaxpr/attention/gather_weight/convert_element_type"),
    ("experts' products", "transpose(jvp())/while/body/moe/jit(_moe)/experts_grad/expert_up/grouped_wgrad/mpmd_map"),
    ("experts' products", "jvp()/while/body/moe/jit(_moe)/experts/expert_up/grouped_matmul_activate/mpmd_map"),
    ("casts of weights", "jvp()/while/body/moe/jit(_moe)/gather_weight/convert_element_type"),
    ("quantization of weights", "jit(train_step)/quantize_weights/while/body/quantize_weight/mpmd_map"),
    ("quantization of weights", "jvp()/while/body/moe/jit(_moe)/quantize_weight/quantize/mpmd_map"),
    ("quantization of rows", "jvp()/while/body/moe/jit(_moe)/experts/quantize/quantize_rows/mpmd_map"),
    ("activation", "transpose(jvp())/while/body/moe/jit(_moe)/experts_grad/activate/activate_grad_rows/mpmd_map"),
    ("permutation and rows", "jvp()/while/body/moe/jit(_moe)/experts/unpermute/gather_sum/mpmd_map"),
    ("permutation and rows", "jvp()/while/body/moe/jit(_moe)/experts/build_permutation/mpmd_map"),
    ("router", "transpose(jvp())/while/body/moe/jit(_moe)/router_grad/dot_general"),
    ("optimizer", "jit(train_step)/optimizer/add"),
    ("accumulation", "jit(train_step)/while/body/accumulate/add"),
    ("slices of the scan", "jvp()/while/body/jit(dynamic_update_index_in_dim)/dynamic_update_slice"),
    ("rest", "jvp()/while/body/moe/rsqrt"),
    ("rest", ""),
)


def test_parts_of_a_step():
    """Breaks if a kernel's time goes to another part, to no part, or is not that of one step."""
    line = '  %fusion.{} = f32[] fusion(), metadata={{op_name="{}"}}\n'
    hlo = "".join(line.format(i, scope) for i, (_, scope) in enumerate(SCOPES))
    kernels = [Kernel("GPU:0", "k", f"fusion.{i}", 1000.0 * i, 1000.0 * i + 500) for i in range(len(SCOPES))]
    late = [kernel._replace(name="fusion_13", op="", end=kernel.end + 500) for kernel in kernels[13:14]]
    found = stages.split_step(hlo, [*kernels, *late], 2)
    want = dict.fromkeys(stages.PARTS, 0.0)
    for part, _ in SCOPES:
        want[part] += 0.25
    assert found["stages_us"] == want | {"slices of the scan": 0.75}
    assert found["busy_us"] == pytest.approx((len(SCOPES) * 500 + 500) / 2000)
    assert found["largest"][0]["part"] == "slices of the scan" and found["largest"][0]["us"] == 0.5


def test_fsdp8_is_computed_from_the_step_and_its_quantization():
    """Breaks if the row of one GPU calls a computation a measurement, or computes it from other parts."""
    run = train.TINY[1]
    extra = {"stages_us": {"quantization of weights": 80.0}, "losses": [1.0], "peak_bytes": None}
    answer = {"us": 200.0, "path": "hopper", "extra": extra}
    row = train._row(run, "fp8_block", How(mesh=(("fsdp", 1),)), answer, limits.measure(()))
    assert row.extra["fsdp8_computed"]["us"] == 130 and row.us == 200
    assert row.extra["fsdp8_computed"]["tokens_per_s"] == pytest.approx(64 / 130e-6)
