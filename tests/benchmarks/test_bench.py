"""`python -m benchmarks`: cases, timing, errors, rows, peers that are not there, and the command, all on a CPU."""

import json
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import cases, command, error, report
from benchmarks.block import stages
from benchmarks.kernels import gemm, ours
from benchmarks.peers import jax_peers, torch_grouped
from benchmarks.problem import Problem
from benchmarks.report import HOPPER, Row
from benchmarks.timing import Repeats
from benchmarks.wires import wire
from moax import MoEConfig
from moax.models import Model
from support.gpus import pretend

pytestmark = [pytest.mark.more, pytest.mark.loose]

ONCE = Repeats(1, 1)
L2 = 60e6
LIMITS = {name: {"value": 1.0, "unit": "TFLOP/s"} for name in ("bf16", "fp8", "memory")}
TINY = cases.SETS["tiny"][0]
EVERY = [case for name in cases.SETS for case in cases.SETS[name]]


@pytest.fixture(scope="module")
def problem():
    return Problem(TINY)


def test_cases_exceed_the_cache():
    """Operands that stay in the L2 cache would be faster than any in training."""
    for case in (case for case in EVERY if "tiny" not in case.name):
        assert min(case.rows * case.contracted + case.weights, case.rows * case.columns + case.weights) > L2, case


@pytest.mark.parametrize("direction", cases.DIRECTIONS)
def test_error_sees_one_wrong_expert(problem, direction):
    """An error over all experts alone would hide a small one that is wrong."""
    sampled = error.sample(problem, direction)
    call = ours.gemm(problem, direction, None)
    right = call.f(*call.args)
    assert error.measure(right, sampled, direction, problem).worst < 4e-3
    start = int(problem.starts[1])
    rows = slice(start, start + int(problem.sizes[1]))
    wrong = right.at[1].mul(1.5) if direction == "wgrad" else right.at[rows].mul(1.5)
    measured = error.measure(wrong, sampled, direction, problem)
    assert measured.worst == pytest.approx(0.5, rel=0.02) and measured.total < measured.worst
    assert np.isnan(error.measure(right.at[:].mul(jnp.nan), sampled, direction, problem).worst)


def test_gemm_rows(problem):
    """Ours and `ragged_dot` are measured, and agree; the others are rows that say why not."""
    rows = list(gemm.rows([TINY], gemm.PEERS, ONCE, LIMITS, quick=True))
    for row in rows:
        measured = row.impl in ("moax", "ragged_dot")
        assert (row.us is not None) == measured, row
        assert measured or row.note, f"{row.impl} is missing without a reason"
        if measured:
            assert row.error_worst < 6e-3 and row.tflops > 0 and row.fraction > 0 and row.path
    impls = {row.impl for row in rows}
    assert impls == {"moax", *jax_peers.CALLS, "torch_grouped_mm", "torch_scaled_grouped_mm"}
    mine = [row for row in rows if row.impl == "moax" and row.recipe == "none"]
    assert all(set(row.peers) == {"ragged_dot"} for row in mine)
    (fp8,) = [row for row in rows if row.impl == "moax" and row.recipe != "none" and row.direction == "fwd"]
    assert fp8.error < 6e-3 and not fp8.peers


def test_a_peer_that_fails_is_a_row(problem, monkeypatch):
    """A bug in a peer must neither end the run nor vanish."""

    def calls(*_):
        raise RuntimeError("its kernel\nexploded")

    monkeypatch.setitem(jax_peers.CALLS, "pallas_mgpu", calls)
    row = gemm.peer("pallas_mgpu", problem, "fwd", ONCE, quick=True)
    assert row.us is None and row.note == "RuntimeError: its kernel" and row.impl == "pallas_mgpu"


@pytest.mark.parametrize("recipe", gemm.RECIPES)
@pytest.mark.parametrize("direction", cases.DIRECTIONS)
def test_our_kernels_lower_for_a_gpu(problem, direction, recipe, monkeypatch):
    """The benchmark calls the kernels with arguments that they take."""
    pretend(monkeypatch, platform="gpu")
    operands = problem.quantized(direction) if recipe != "none" else None
    call = ours.gemm(problem, direction, operands)
    monkeypatch.undo()
    assert call.path == HOPPER and call.tile
    assert "mosaic_gpu_v2" in call.f.trace(*call.args).lower(lowering_platforms=("cuda",)).as_text()


def test_torch_process_that_dies(monkeypatch):
    """What it measured before it died is kept; the rest says that it died."""
    said = json.dumps(
        {
            "case": "tiny",
            "direction": "fwd",
            "recipe": "none",
            "us": 8.0,
            "error": 1e-3,
            "error_worst": 2e-3,
        }
    )
    dead = subprocess.CompletedProcess([], -9, f"warming up\n{said}\n", "device-side assert")
    monkeypatch.setattr(torch_grouped.subprocess, "run", lambda *_, **__: dead)
    lost_row, *rest = torch_grouped.rows([TINY], ONCE)
    assert lost_row.us == 8.0 and lost_row.tflops == pytest.approx(TINY.flops / 8e6)
    assert len(rest) == 5 and all("exit code -9: device-side assert" in row.note for row in rest)


def test_table_and_file(tmp_path, capsys):
    """Breaks if the file is not JSON of a line a row, or holds lists of kernels or empty fields, or if the table lacks
    rows or does not name what is missing."""
    extra = {"kernels": ["a", "b"], "M": 8}
    rows = [
        Row(
            "gemm",
            "a",
            "fwd",
            us=10.0,
            tflops=700.0,
            error=float("nan"),
            tile="t256",
            fraction=0.9,
            extra=extra,
        ),
        Row("gemm", "a", "fwd", "torch_grouped_mm", us=11.0, tflops=636.0),
        Row("gemm", "a", "fwd", "tokamax", note="not installed"),
    ]
    report.compare(rows)
    assert rows[0].peers == {"torch_grouped_mm": pytest.approx(1.1)}
    head = report.header(
        ["python", "-m", "benchmarks", "gemm"],
        "abc",
        {"bf16": {"value": 790.0, "unit": "TFLOP/s"}},
    )
    report.save(str(tmp_path / "new" / "rows.json"), head, rows)
    text = (tmp_path / "new" / "rows.json").read_text()
    read = json.loads(text)
    printed = json.loads(report.to_json(head, rows))
    assert read["header"]["git_sha"] == "abc"
    assert read["header"]["versions"]["jax"] == jax.__version__
    assert read["header"]["command"] == printed["header"]["command"] == "python -m benchmarks gemm"
    row_of_kernels = {
        "op",
        "case",
        "direction",
        "impl",
        "recipe",
        "dtype",
        "tile",
        "us",
        "tflops",
        "fraction",
        "error",
        "peers",
    }
    assert read["rows"][0].keys() == row_of_kernels | {"extra"}
    assert read["rows"][0]["error"] == "nan"
    assert read["rows"][0]["extra"] == {"M": 8} and printed["rows"][0]["extra"] == extra
    assert len([line for line in text.splitlines() if line.startswith("  {")]) == 3
    report.save(tmp_path / "none.json", head, [])
    assert json.loads((tmp_path / "none.json").read_text())["rows"] == []
    report.show(head, rows)
    said = capsys.readouterr().out
    assert "700" in said and "torch_grouped_mm 1.10x" in said and "bf16 790 TFLOP/s" in said
    assert "not available: gemm a fwd none tokamax: not installed" in said


HLO = """
ENTRY %main {
  %sort.1 = s32[8] sort(%p), metadata={op_name="jit(f)/jvp(_moe)/route/sort" scheduling_name="sort.1"}
  %mpmd_map.2 = bf16[8] custom-call(%x), metadata={op_name="jit(f)/experts/expert_up/grouped_matmul_fp8/mpmd_map"}
  %loop_fusion.3 = bf16[8] fusion(%x), metadata={op_name="jit(f)/experts/activate/mul"}
  ROOT %mpmd_map.4 = bf16[8] custom-call(%x), metadata={op_name="jit(f)/experts_grad/grouped_matmul_fp8/mpmd_map"}
}
"""


def test_stages():
    """One kernel name serves forward and dgrad: the order of launches tells them apart."""
    mosaic = "grouped_matmul_fp8_mosaic_gpu_kernel"
    kernels = [
        ("sort_1", 1.0),
        (mosaic, 2.0),
        ("loop_fusion_3", 3.0),
        (mosaic, 4.0),
        ("memset", 5.0),
    ]
    total, listed = stages.split(HLO, kernels)
    wanted = {"route": 1.0, "gemm fwd": 2.0, "activation": 3.0, "gemm dgrad": 4.0, "other": 5.0}
    assert {name: us for name, us in total.items() if us} == wanted
    assert [entry["us"] for entry in listed] == [5.0, 4.0, 3.0, 2.0, 1.0]
    for kernel, stage in (
        ("grouped_wgrad_mosaic_gpu_kernel", "gemm wgrad"),
        ("activate_quantize_mosaic_gpu_kernel", "activation"),
        ("quantize_rows_mosaic_gpu_kernel", "quantize"),
        ("gather_sum_mosaic_gpu_kernel", "unpermute"),
        ("gather_rows_mosaic_gpu_kernel", "permute"),
    ):
        assert stages.stage_of(kernel, "") == stage
    for scope, stage in (
        ("jit(f)/jvp(_moe)/experts/jit(argsort)/sort", "plan"),
        ("jit(f)/jvp(_moe)/experts/scatter", "plan"),
        ("jit(f)/jvp(_moe)/dot_general", "route"),
        ("jit(f)/transpose(jvp(_moe))/experts_grad/expert_up/dot_general", "gemm dgrad"),
        ("jit(f)/jvp(_moe)/experts/expert_down/dot_general", "gemm fwd"),
    ):
        assert stages.stage_of("loop_fusion", scope) == stage


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["gemm", "--cases", "huge"], "unknown huge"),
        (["gemm", "--only", "zzz"], "no case of --cases perf"),
        (["gemm", "--peers", "numpy"], "unknown numpy"),
        (["scatter", "--cases", "groups"], "scatter has perf and tiny"),
        (
            ["block", "--peers", "torch", "--cases", "tiny"],
            "unknown torch; give some of all, none, sonic",
        ),
        (
            ["gemm", "scatter", "--tokens", "8"],
            "--tokens with gemm, scatter: it is for block and imbalance alone",
        ),
        (["gemm", "scatter", "--only", "zzz"], "no case of --cases perf"),
        (["gemm", "wire"], "give it alone"),
    ],
)
def test_arguments_that_cannot_work(argv, message, capsys):
    assert command.main([*argv]) == 2
    assert message in capsys.readouterr().err


def test_command(tmp_path, capsys):
    out = tmp_path / "f.json"
    argv = ["gemm", "--cases", "tiny", "--only", "zipf", "--peers", "none"]
    assert command.main([*argv, "--quick", "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert "fp8_block" in said.out
    assert "limits of this run: bf16" in said.out
    assert "tiny zipf fwd" in said.err
    written = json.loads(out.read_text())
    assert len(written["rows"]) == 6
    assert all(row["us"] > 0 and row["path"] == "xla" for row in written["rows"])
    assert written["header"]["command"].startswith("python -m benchmarks gemm --cases tiny")
    assert written["header"]["limits"]["memory"]["value"] > 0
    assert command.main([*argv, "--quick", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 6


def test_several_at_once(tmp_path, capsys):
    """Breaks if a part of a run is left out, or takes a word of --only that another part's case has for an error."""
    out = tmp_path / "f.json"
    argv = ["gemm", "scatter", "--cases", "tiny", "--peers", "none", "--quick"]
    assert command.main([*argv, "--only", "zipf", "--out", str(out), "--json"]) == 0
    said = capsys.readouterr()
    assert {row["op"] for row in json.loads(said.out)["rows"]} == {"gemm"}
    assert "gemm: 1 case;" in said.err
    assert command.main([*argv, "--json"]) == 0
    assert {row["op"] for row in json.loads(capsys.readouterr().out)["rows"]} == {"gemm", "scatter"}


@pytest.mark.more
def test_wire(tmp_path, monkeypatch, capsys):
    """Breaks if the file lacks a model or recipe, or if a recipe's weights are gathered as wide as without one."""
    small = Model(MoEConfig(d_model=64, d_ff=64, num_experts=8, top_k=2), layers=1, source="none")
    monkeypatch.setattr(wire, "MODELS", {"small": small})
    monkeypatch.setattr(wire, "NAMES", ("small",))
    monkeypatch.setattr(wire, "RECIPES", (None, "fp8_block"))
    monkeypatch.setattr(wire, "TOKENS", 64)
    out = tmp_path / "wire.json"
    assert command.main(["wire", "--out", str(out), "--sha", "abc"]) == 0
    written = json.loads(out.read_text())
    head = written["header"]
    assert head["git_sha"] == "abc"
    assert head["mesh"] == {"fsdp": 2, "ep": 4}
    assert "fp8_block" in capsys.readouterr().out
    plain, quantized = (row["gathered"] for row in written["rows"])
    assert plain / 2 < quantized < 0.6 * plain


@pytest.mark.parametrize(
    "options",
    [["--cases", "perf"], ["--cases", "all", "--peers", "none"]],
    ids=" ".join,
)
@pytest.mark.parametrize(
    "what",
    [["gemm"], ["block", "--mesh", "ep=2"], ["scatter"]],
    ids=" ".join,
)
def test_a_cpu_refuses_the_shapes_of_models(what, options, capsys):
    """Breaks if a run that would take hours on a CPU begins there in the place of one line."""
    assert command.main([*what, *options]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "on a CPU" in said and "--cases tiny" in said


@pytest.mark.more
def test_block_in_its_own_process(tmp_path, capsys):
    out = tmp_path / "f.json"
    argv = ["block", "--cases", "tiny", "--recipe", "fp8_block", "--quick", "--out", str(out)]
    assert command.main(argv) == 0
    said = capsys.readouterr().out
    assert "saved_bytes" in said
    assert "not available: block tiny T64 fwd none sonic: Unsupported" in said
    peer, rows = (json.loads(out.read_text())["rows"][span] for span in (slice(2), slice(2, None)))
    assert all(row["impl"] == "sonic" and row["us"] is None and row["note"] for row in peer)
    assert [row["direction"] for row in rows] == ["fwd", "fwd+bwd"]
    assert all(row["us"] > 0 and row["path"] == "xla" and row["extra"]["saved_bytes"] > 0 for row in rows)
