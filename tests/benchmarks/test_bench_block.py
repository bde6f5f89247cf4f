"""`python -m benchmarks` block --mesh, imbalance, train and scatter, on emulated devices."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import moax
from benchmarks import command, limits
from benchmarks.block import block, block_worker, imbalance, overlap, stages, train, train_worker
from benchmarks.block.block import How
from benchmarks.block.imbalance import choose_experts
from benchmarks.block.worker import READY
from benchmarks.profiles import Kernel
from benchmarks.timing import Repeats
from lm.config import ModelConfig
from moax.mesh.collectives import GRAD_REDUCE
from moax.models import MODELS
from support.gpus import pretend

pytestmark = pytest.mark.more

QWEN = MODELS["qwen3-30b"].config
KERNELS = [
    ("sort_1", 1.0),
    ("grouped_matmul_mosaic_gpu_kernel", 4.0),
    ("ncclDevKernel_AllGather_RING_LL", 2.0),
    ("all_reduce_kernel_impl", 1.0),
    ("psum_9_0_fusion_1", 0.5),
]


class InThisProcess:
    """A worker in the process of the test: a process of its own would start JAX and compile again."""

    def __init__(self, module, request):
        self.main = importlib.import_module(module).main
        self.request = request

    def wait(self):
        pass

    close = wait

    def measure(self) -> Iterable[Any]:
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(io.StringIO()) as said,
        ):
            # This process has its devices already.
            patch.setattr(jax.config, "update", lambda *_: None)
            patch.setattr("sys.stdin", io.StringIO("go\n"))
            assert self.main([json.dumps(self.request)]) == 0
        ready, *answers = said.getvalue().splitlines()
        assert ready == READY
        return [json.loads(answer) for answer in answers]


def test_kernels_of_several_devices():
    """Breaks if times are sums over devices, if a collective counts as computing, or if kernels that are not every
    device's are taken for the mean."""
    results = block_worker.split("", [kernel for kernel in KERNELS for _ in range(2)], 2, 10.0)
    wanted = {"route": 1.0, "gemm fwd + dgrad": 4.0, "communication": 3.5}
    assert {name: us for name, us in results["stages_us"].items() if us} == wanted
    assert results["kernel_us"] == 8.5 and results["exposed_us"] == 5.0
    assert block_worker.split("", KERNELS, 2, 10.0) == {} == block_worker.split("", [], 2, 10.0)


def test_mesh_that_does_not_fit(monkeypatch):
    """Breaks if a mesh of more GPUs than there are fails in eight processes, each with another error."""
    pretend(monkeypatch, platform="gpu")
    settings = block.How((("fsdp", 16), ("ep", 4)))
    with pytest.raises(
        ValueError,
        match="--mesh fsdp=16,ep=4 is a mesh of 64 devices, but JAX has 8",
    ):
        next(block.rows(list(block.TINY), [settings], Repeats(1, 1), {}))


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["imbalance"], "imbalance without --mesh"),
        (["imbalance", "--mesh", "fsdp=2,ep=1"], "--mesh fsdp=2,ep=1 has one rank of ep"),
        (["train"], "train without --mesh"),
        (
            ["train", "--mesh", "ep=2", "--tokens", "64"],
            "--tokens with train: it is for block and imbalance alone",
        ),
        (
            ["train", "--mesh", "ep=2", "--kernels", "xla"],
            "--kernels with train: it is for block and imbalance alone",
        ),
        (["train", "--mesh", "ep=2", "--peers", "torch"], "unknown torch; give some of all, none"),
        (["gemm", "--mesh", "ep=2"], "--mesh with gemm"),
        (
            ["imbalance", "--mesh", "ep=2", "--exchange", "all_gather", "--exchange", "all_to_all"],
            "--exchange all_gather and all_to_all with imbalance: block alone takes several",
        ),
    ],
)
def test_options_that_cannot_work(capsys, argv, said):
    """Breaks if an option is taken and does nothing, or a mesh that cannot be out of balance is measured."""
    assert command.main([argv[0], "--cases", "tiny", *argv[1:]]) == 2
    assert said in capsys.readouterr().err


def test_an_unknown_axis_is_named(capsys):
    with pytest.raises(SystemExit):
        command.main(["block", "--mesh", "up=2"])
    assert "'up=2' must have sizes of the axes" in capsys.readouterr().err


@pytest.mark.loose
def test_block_on_a_mesh(tmp_path, capsys, monkeypatch):
    """Breaks if the block does not run on a mesh, or if its rows do not say on which."""
    monkeypatch.setattr(block, "Worker", InThisProcess)
    out = tmp_path / "f.json"
    argv = [
        "block",
        "--cases",
        "tiny",
        "--recipe",
        "none",
        "--mesh",
        "ep=2",
        "--quick",
        "--peers",
        "none",
    ]
    assert command.main([*argv, "--exchange", "all_to_all", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "params_bytes 2" in said
    rows = json.loads(out.read_text())["rows"]
    assert [row["direction"] for row in rows] == ["fwd", "fwd+bwd"]
    for row in rows:
        assert row["us"] > 0
        assert row["case"] == "tiny T64 ep=2 all_to_all"
        assert row["extra"]["mesh"] == {"fsdp": 1, "ep": 2}
        assert row["impl"] == "moax"
        assert row["recipe"] == "none"
        assert row["extra"]["exchange"] == "all_to_all"
        # The bf16 weights are the router and two of four experts.
        assert row["extra"]["params_bytes"] == 2 * (64 * 4 + 2 * 3 * 64 * 32)


@pytest.mark.parametrize(
    ("ranks", "load"),
    [(2, 1.0), (2, 1.125), (2, 1.75), (2, 2.0), (4, 3.0), (8, 4.0)],
)
def test_load_is_exact(ranks, load):
    """Breaks if the busiest rank has another load, if experts of a rank differ, or if a token has an expert twice."""
    experts = choose_experts(QWEN, ranks, 2048, load)
    assert all(len(set(token)) == QWEN.top_k for token in experts.tolist())
    counts = np.bincount(experts.reshape(-1), minlength=QWEN.num_experts).reshape(ranks, -1)
    balanced = 2048 * QWEN.top_k // ranks
    assert counts[0].sum() == load * balanced and np.ptp(counts[0]) == 0
    assert np.ptp(counts[1:]) <= 1 and counts.sum() == 2048 * QWEN.top_k


def test_routing_of_the_docstring():
    """Breaks if a token's experts of the busiest rank do not go on where those of the token before end."""
    config = moax.MoEConfig(d_model=8, d_ff=8, num_experts=4, top_k=2)
    expected = [{0, 2}, {0, 1}, {1, 3}, {0, 1}]
    assert [set(token) for token in choose_experts(config, 2, 4, 1.5).tolist()] == expected
    with pytest.raises(
        ValueError,
        match=r"imbalance 3.0 on 4 ranks: one rank has 1 experts.*at most 2",
    ):
        choose_experts(config, 4, 4, 3.0)


def test_buffers_have_their_bytes():
    """Breaks if saved bytes are not those of a device, if they count weights, or if a program ignores its factor."""
    mesh = moax.make_mesh({"fsdp": 1, "ep": 2}, devices=jax.devices()[:2])
    options = dict(recipe=None, kernels="xla", exchange="all_gather")
    with jax.set_mesh(mesh):
        shapes = block_worker.param_shapes(QWEN, mesh)
        options_by_factor = [options | {"buffer_factor": factor} for factor in (1.25, None)]
        built = [
            block_worker.build(QWEN, own_options, None, mesh, shapes, None, 1024, True)
            for own_options in options_by_factor
        ]
        saved = [memory["saved_bytes"] for _, memory in built]
    hidden = 2 * QWEN.d_ff * 2
    rows = QWEN.d_model * 2
    for saved_bytes, loads in zip(saved, (1.25, 2.0), strict=True):
        assert saved_bytes == pytest.approx(loads * 1024 * QWEN.top_k * (hidden + rows), rel=0.6)
        assert saved_bytes >= loads * 1024 * QWEN.top_k * (hidden + rows)
    assert saved[0] < saved[1]


class Answers(InThisProcess):
    """A worker whose steps take 10 us for each balanced load and 2 us for each overflow round; the last row is lost."""

    def measure(self):
        for x, factor in self.request["loads"][:-1]:
            rounds = 1 if factor is None else int(np.ceil(x / factor))
            measured = {
                "us": 10 * x + 2 * (rounds - 1),
                "path": "xla",
                "rounds": rounds,
                "dropped": 0,
            }
            yield {"tokens": 64, "load": [x, factor], "memory": {"saved_bytes": 1}, "fwd+bwd": measured}


def test_ratio_is_of_balanced_steps(monkeypatch):
    """Breaks if a ratio takes another balanced row, or if a lost row is silent."""
    monkeypatch.setattr(imbalance, "Worker", Answers)
    results = list(
        imbalance.rows(
            list(block.TINY),
            How((("ep", 2),), recipes=("fp8_block",)),
            Repeats(1, 1),
        )
    )
    by = {(row.extra["imbalance"], row.extra["buffer_factor"]): row for row in results}
    assert len(by) == 12 and by[1.0, 1.25].extra["ratio"] == 1.0
    assert by[1.75, None].extra["ratio"] == 1.0
    assert by[2.0, 1.25].extra["ratio"] == pytest.approx(1.1)
    assert by[2.0, None].us is None and "ended" in by[2.0, None].note


@pytest.mark.loose
def test_block_by_imbalance(tmp_path, monkeypatch):
    """Breaks if a row does not run, if buffers of a factor take no overflow round, or if a step drops a token."""
    monkeypatch.setattr(imbalance, "Worker", InThisProcess)
    monkeypatch.setattr(imbalance, "IMBALANCES", (1.0, 2.0, 4.0))
    out = tmp_path / "f.json"
    argv = [
        "imbalance",
        "--cases",
        "tiny",
        "--recipe",
        "none",
        "--mesh",
        "ep=2",
        "--quick",
        "--out",
        str(out),
    ]
    assert command.main(argv) == 0
    rows = [row["extra"] | {"us": row["us"]} for row in json.loads(out.read_text())["rows"]]
    rounds = {(row["imbalance"], row["buffer_factor"]): row["rounds"] for row in rows}
    assert rounds == {(1.0, 1.25): 1, (2.0, 1.25): 2, (1.0, None): 1, (2.0, None): 1}
    assert all(row["us"] > 0 and row["dropped"] == 0 for row in rows)


@pytest.mark.loose
def test_a_step_trains(tmp_path, capsys, monkeypatch):
    """Breaks if the model does not learn, or if a row does not say what it measured."""
    model = ModelConfig(
        d_model=64,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        num_experts=4,
        top_k=2,
        balance="none",
    )
    monkeypatch.setattr(train, "TINY", (train.Run("tiny", model, 1, 16, "float32"),))
    monkeypatch.setitem(command.BENCHMARKS["train"].cases, "tiny", train.TINY)
    monkeypatch.setattr(train, "Worker", InThisProcess)
    out = tmp_path / "f.json"
    argv = ["train", "--cases", "tiny", "--recipe", "none", "--mesh", "ep=2", "--quick"]
    assert command.main([*argv, "--exchange", "all_to_all", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    (row,) = rows
    ours = row["extra"]
    assert ours["losses"][0] == pytest.approx(np.log(256), rel=0.05)
    assert ours["losses"][-1] < ours["losses"][0] - 0.05
    assert row["us"] > 0 and row["case"] == "tiny T16 ep=2" and row["direction"] == "step"
    assert ours["tokens_per_s"] == pytest.approx(16e6 / row["us"])
    assert sum(ours["tokens_per_expert"]) == 2 * 32
    assert f"tokens_per_s {ours['tokens_per_s']:,.4g}" in capsys.readouterr().out


@pytest.mark.loose
def test_layers_in_a_scan(tmp_path, monkeypatch):
    """Breaks if a mesh is not compared with one device, or if options of the compiler or one gather change a number."""
    monkeypatch.setattr(overlap, "Worker", InThisProcess)
    out = tmp_path / "f.json"
    argv = [
        "--model",
        "tiny",
        "--layers",
        "2",
        "--tokens",
        "64",
        "--installed",
        "64",
        "--recipes",
        "none",
        "--ways",
        "scan",
        "gathered",
        "--out",
        str(out),
    ]
    monkeypatch.setattr("sys.argv", ["overlap", *argv])
    assert overlap.main() == 0
    body = json.loads(out.read_text())
    alone, alone_gathered, with_options, installed, gathered, _ = body["rows"]
    assert body["header"]["options"] == moax.OVERLAP_OPTIONS
    assert (alone["fsdp"], with_options["options"], installed["options"]) == (1, True, False)
    for row in (with_options, installed):
        expected = pytest.approx(row["ms_a_layer"] / alone["ms_a_layer"], abs=1e-3)
        assert row["times_fsdp_1"] == expected
    same = ("loss", "gradient_norm")
    assert [with_options[name] for name in same] == [installed[name] for name in same]
    for row, of_scan in ((alone_gathered, alone), (gathered, with_options)):
        assert row["way"] == "gathered"
        assert [row[name] for name in same] == pytest.approx([of_scan[name] for name in same], rel=5e-4)


def test_cases_of_layers_in_a_scan():
    """Breaks if a mesh has no run with the options, the peer runs on a mesh of ep, or a row is compared with one of
    another exchange of tokens, recipe or program."""
    args = SimpleNamespace(
        model="tiny",
        layers=2,
        tokens="64,128",
        installed="64",
        recipes="none",
        ways=["scan"],
        mesh="1,2,1x2,2x2,1x1x2",
        peer=True,
    )
    cases = overlap.list_cases(args)
    ours = [(c.fsdp, c.ep, *c.tokens, c.options) for c in cases if c.impl == "moax" and c.dp == 1]
    of_dp = [(c.impl, *c.tokens, c.options) for c in cases if c.dp == 2]
    assert of_dp == [("moax", 64, True), ("moax", 64, False), ("moax", 128, True)]
    assert [case for case in ours if case[:2] == (2, 2)] == [(2, 2, 64, True), (2, 2, 64, False), (2, 2, 128, True)]
    assert [case for case in ours if case[:2] == (1, 2)] == [(1, 2, 64, True), (1, 2, 64, False), (1, 2, 128, True)]
    assert [case for case in ours if case[:2] == (1, 1)] == [(1, 1, 64, False), (1, 1, 128, False)]
    assert [(c.fsdp, c.ep, c.tokens) for c in cases if c.impl == overlap.FSDP2] == [
        (1, 1, (64, 128)),
        (2, 1, (64, 128)),
    ]
    rows = [vars(case) | {"tokens": tokens} for case in cases for tokens in case.tokens]
    for ms, row in enumerate(rows, 1):
        row["ms_a_layer"] = float(ms)
    overlap.compare(rows)
    for row in rows:
        if row["fsdp"] > 1:
            same = ("tokens", "ep", "recipe", "way", "impl")
            bases = [r for r in rows if r["fsdp"] == r["dp"] == 1 and all(r[name] == row[name] for name in same)]
            (alone,) = [r for r in bases if r["options"] == (row["options"] and row["ep"] > 1)]
            assert row["times_fsdp_1"] == pytest.approx(row["ms_a_layer"] / alone["ms_a_layer"], abs=1e-3)


def test_work():
    """Breaks if the work of a step counts experts that a token does not meet, or places that attention does not see."""
    run = train.TINY[0]
    m = run.model
    experts = 3 * m.d_model * m.d_ff * m.top_k
    dense = 4 * m.d_model**2 + 2 * m.d_model + m.d_model * m.num_experts
    met = m.num_layers * (experts + dense) + 2 * 256 * m.d_model + m.d_model
    # A token with itself is not counted.
    attention = 3 * 2 * 2 * m.num_layers * m.d_model * sum(range(run.length)) / run.length
    itself = 12 * m.num_layers * m.d_model
    assert run.tokens * (6 * met + attention) <= run.work <= run.tokens * (6 * met + attention + itself)


def test_microbatches():
    """Breaks if a step of more microbatches has other sequences in each, or its work or batch is that of one."""
    one, two, *_ = train._qwen3(4)
    assert (one.tokens, two.tokens) == (16384, 32768) and two.work == 2 * one.work
    config = two.config(How(mesh=(("fsdp", 1),)), "fp8_block")
    assert (config.batch, config.microbatches, config.model.heads) == (8, 2, (32, 4, 128))
    attention = 6 * one.tokens * 4 * 4096 * 32 * 128
    assert one.work > attention
    assert one.work - attention == 6 * one.tokens * train.count(one.model)[1]
    draw = train_worker.batches_of(config, random=True)
    assert draw(0).shape == (8, 4097) and draw(0).dtype == np.uint8 and np.any(draw(0) != draw(1))
    np.testing.assert_array_equal(draw(1), draw(1))


SCOPES = (
    (
        "attention",
        "jit(train_step)/jvp()/while/body/eval_jaxpr/attention/gather_weight/convert_element_type",
    ),
    (
        "experts' products",
        "transpose(jvp())/while/body/moe/jit(_moe)/experts_grad/expert_up/grouped_wgrad/mpmd_map",
    ),
    (
        "experts' products",
        "jvp()/while/body/moe/jit(_moe)/experts/expert_up/grouped_matmul_activate/mpmd_map",
    ),
    ("casts of weights", "jvp()/while/body/moe/jit(_moe)/gather_weight/convert_element_type"),
    (
        "quantization of weights",
        "jit(train_step)/quantize_weights/while/body/quantize_weight/mpmd_map",
    ),
    ("quantization of weights", "jvp()/while/body/moe/jit(_moe)/quantize_weight/quantize/mpmd_map"),
    (
        "quantization of rows",
        "jvp()/while/body/moe/jit(_moe)/experts/quantize/quantize_rows/mpmd_map",
    ),
    ("activation", "transpose(jvp())/while/body/moe/jit(_moe)/experts_grad/activate/activate_grad_rows/mpmd_map"),
    (
        "permutation and rows",
        "jvp()/while/body/moe/jit(_moe)/experts/unpermute/gather_sum/mpmd_map",
    ),
    ("permutation and rows", "jvp()/while/body/moe/jit(_moe)/experts/build_permutation/mpmd_map"),
    ("router", "transpose(jvp())/while/body/moe/jit(_moe)/router_grad/dot_general"),
    ("optimizer", "jit(train_step)/optimizer/add"),
    ("accumulation", "jit(train_step)/while/body/accumulate/add"),
    (
        "slices of the scan",
        "jvp()/while/body/jit(dynamic_update_index_in_dim)/dynamic_update_slice",
    ),
    ("rest", "jvp()/while/body/moe/rsqrt"),
    ("rest", ""),
)


def test_parts_of_a_step():
    """Breaks if a kernel's time goes to another part, to no part, or is not that of one step; or if it is not said
    that the scope of a kernel was guessed, as in a command buffer, whose kernels have its name for an op."""
    line = '  %fusion.{} = f32[] fusion(), metadata={{op_name="{}"}}\n'
    hlo = "".join(line.format(i, scope) for i, (_, scope) in enumerate(SCOPES))
    kernels = [Kernel("GPU:0", "k", f"fusion.{i}", 1000.0 * i, 1000.0 * i + 500) for i in range(len(SCOPES))]
    late = [kernel._replace(name="fusion_13", op="", end=kernel.end + 500) for kernel in kernels[13:14]]
    results = stages.split_step(hlo, [*kernels, *late], 2)
    want = dict.fromkeys(stages.PARTS, 0.0)
    for part, _ in SCOPES:
        want[part] += 0.25
    assert results["stages_us"] == want | {"slices of the scan": 0.75}
    assert results["busy_us"] == pytest.approx((len(SCOPES) * 500 + 500) / 2000)
    assert results["largest"][0]["part"] == "slices of the scan"
    assert results["largest"][0]["us"] == 0.5
    named = kernels[1]._replace(name="grouped_wgrad_mosaic_gpu_kernel")
    for op, guessed in ((named.op, 0.0), ("command_buffer_56", 0.25)):
        assert stages.split_step(hlo, [named._replace(op=op)], 2)["guessed_us"] == guessed


def test_fsdp8_is_computed_from_the_step_and_its_quantization():
    """Breaks if the row of one GPU calls a computation a measurement, or computes it from other parts."""
    run = train.TINY[1]
    extra = {"stages_us": {"quantization of weights": 80.0}, "losses": [1.0], "peak_bytes": None}
    answer = {"us": 200.0, "path": "hopper", "extra": extra}
    row = train._row(run, "fp8_block", How(mesh=(("fsdp", 1),)), answer, limits.measure(()))
    assert row.extra["fsdp8_computed"]["us"] == 130 and row.us == 200
    assert row.extra["fsdp8_computed"]["tokens_per_s"] == pytest.approx(64 / 130e-6)


@pytest.mark.loose
def test_scatter(capsys):
    """Breaks if a choice of `grad_reduce_dtype` sends other bytes than it says."""
    assert command.main(["scatter", "--cases", "tiny", "--quick", "--json"]) == 0
    written = {row["recipe"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert set(written) == set(GRAD_REDUCE) and all(row["us"] > 0 for row in written.values()), written
    elements = 4 * 3 * 64 * 32  # of the tiny block
    sent = {choice: row["extra"]["sent_bytes"] for choice, row in written.items()}
    half = 2 * elements * 7 // 8
    assert sent == {"bfloat16": half, "float32": 2 * half}
    assert "speedup" in written["float32"]["extra"]
