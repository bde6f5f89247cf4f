"""The benchmark `imbalance`: its routing, its programs, its ratios, and its plot."""

import json

import jax
import numpy as np
import pytest

pytest.importorskip("rich")

import moax
from benchmarks import command
from benchmarks.block import block, imbalance, imbalance_worker
from benchmarks.block.imbalance_worker import choose_experts
from benchmarks.block.mesh_block import How
from moax.inspect import Kernel
from moax.models import MODELS
from moax.tune.timing import Repeats
from support.benchmarks import InThisProcess

QWEN = MODELS["qwen3-30b"].config
EP2 = How((("ep", 2),), recipes=("fp8_block",), peers=())


@pytest.mark.parametrize(("ranks", "load"), [(2, 1.0), (2, 1.125), (2, 1.75), (2, 2.0), (4, 3.0), (8, 4.0)])
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
    assert [set(token) for token in choose_experts(config, 2, 4, 1.5).tolist()] == [{0, 2}, {0, 1}, {1, 3}, {0, 1}]
    with pytest.raises(ValueError, match=r"imbalance 3.0 on 4 ranks: one rank has 1 experts.*at most 2"):
        choose_experts(config, 4, 4, 3.0)


def test_smaller_buffers_stand_for_more_ranks():
    """Breaks if buffers of a stand-in are not as full as those of the imbalance that it stands for."""
    pairs = imbalance.make_pairs(2, 1.25)
    assert max(x for x, _ in pairs) == 2.0 and len(pairs) == 14
    filled = {x: load / factor for (load, factor), x in pairs.items() if factor not in (1.25, None)}
    assert filled == {3.0: pytest.approx(3 / 1.25), 4.0: pytest.approx(4 / 1.25)}
    assert set(imbalance.make_pairs(4, None)) == {(x, None) for x in imbalance.IMBALANCES}


def test_buffers_have_their_bytes():
    """Breaks if saved bytes are not those of a device, if they count arguments, or if a program ignores its factor."""
    mesh = moax.make_mesh({"fsdp": 1, "ep": 2}, devices=jax.devices()[:2])
    request = dict(recipe="none", kernels="xla", exchange="all_gather")
    with jax.set_mesh(mesh):
        saved = [imbalance_worker.lower(request, QWEN, mesh, 1024, factor)[1] for factor in (1.25, None)]
    hidden, rows = 2 * QWEN.d_ff * 2, QWEN.d_model * 2
    for found, loads in zip(saved, (1.25, 2.0), strict=True):
        assert found == pytest.approx(loads * 1024 * QWEN.top_k * (hidden + rows), rel=0.6)
        assert found >= loads * 1024 * QWEN.top_k * (hidden + rows)
    assert saved[0] < saved[1]


class Answers:
    """A worker with kernels of two GPUs; rank 0 takes 10 us for each balanced load and 2 us for each pass."""

    def __init__(self, module, request):
        self.request = request

    def wait(self):
        pass

    close = wait

    def measure(self):
        for x, factor in self.request["pairs"][:-1]:
            passes = 1 if factor is None else int(np.ceil(x / factor))
            times = [{"compute_us": us, "moving_us": 1.0} for us in (10 * x + 2 * (passes - 1), 5.0)]
            memory = {"saved_bytes": 1, "temp_bytes": 2, "peak_bytes": None}
            yield {
                "tokens": 64, "pair": [x, factor], "us": 100.0, "path": "xla", "passes": passes, "dropped": 0,
                "devices": times, "memory": memory,
            }  # fmt: skip


def test_ratio_is_of_the_busiest(monkeypatch, tmp_path):
    """Breaks if a ratio takes another GPU or another balanced row, if a lost row is silent, or if none is drawn."""
    pytest.importorskip("matplotlib")
    from benchmarks.block import plot_imbalance

    monkeypatch.setattr(imbalance, "Worker", Answers)
    found = list(imbalance.rows(list(block.TINY), EP2, Repeats(1, 1)))
    by = {(row.extra["imbalance"], row.extra["buffer_factor"]): row for row in found}
    assert by[2.0, 1.25].extra["ratio"] == pytest.approx((20 + 2 + 1) / (2 * 11))
    assert by[2.0, 1.25].extra["busiest_compute_ratio"] == pytest.approx(22 / 20)
    assert by[2.0, None].extra["wall_ratio"] == 0.5 and by[1.0, None].extra["ratio"] == 1.0
    assert by[2.0, 1.25 * 2 / 3].extra["ratio"] == pytest.approx((20 + 4 + 1) / (2 * 11))
    assert by[2.0, 0.625].us is None and "ended" in by[2.0, 0.625].note
    file, plot = tmp_path / "rows.json", tmp_path / "plot.png"
    command.report.save(str(file), command.report.header(["x"], "sha", {}), found)
    assert plot_imbalance.main([str(file), "--out", str(plot)]) == 0 and plot.stat().st_size > 10_000
    command.report.save(str(file), command.report.header(["x"], "sha", {}), [])
    assert plot_imbalance.main([str(file), "--out", str(plot)]) == 2


def test_kernels_of_each_gpu():
    """Breaks if kernels of two GPUs are taken for one's, if copies count, or if a time is not that of one step."""
    names = [("GPU:0", "gemm", 3000), ("GPU:1", "gemm", 1000), ("GPU:0", "MemcpyD2D", 9000)]
    names += [("GPU:0", "ncclDevKernel_AllGather", 500), ("GPU:1", "pmax_16_0_fusion_1", 2000)]
    found = imbalance_worker.split_moving([Kernel(gpu, name, "", 1000, 1000 + ns) for gpu, name, ns in names], 2)
    assert found == [{"compute_us": 1.5, "moving_us": 0.25}, {"compute_us": 0.5, "moving_us": 1.0}]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "imbalance without --mesh"),
        (["--mesh", "fsdp=2,ep=1"], "--mesh fsdp=2,ep=1 has one rank of ep"),
    ],
)
def test_mesh_without_ranks(capsys, options, said):
    """Breaks if a mesh that cannot be out of balance is measured."""
    assert command.main(["imbalance", "--cases", "tiny", *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.loose
@pytest.mark.more
def test_block_by_imbalance(tmp_path, monkeypatch):
    """Breaks if a row does not run, if buffers of a factor take no further passes, or if a step drops a token."""
    monkeypatch.setattr(imbalance, "Worker", InThisProcess)
    monkeypatch.setattr(imbalance, "IMBALANCES", (1.0, 2.0, 4.0))
    out = tmp_path / "f.json"
    argv = ["imbalance", "--cases", "tiny", "--recipe", "none", "--mesh", "ep=2", "--quick", "--out", str(out)]
    assert command.main(argv) == 0
    rows = [row["extra"] | {"us": row["us"]} for row in json.loads(out.read_text())["rows"]]
    passes = {(row["imbalance"], row["buffer_factor"]): row["passes"] for row in rows}
    assert passes == {(1.0, 1.25): 1, (2.0, 1.25): 2, (1.0, None): 1, (2.0, None): 1, (2.0, 0.625): 3}
    assert all(row["us"] > 0 and row["dropped"] == 0 and row["ratio_of"] == "wall" for row in rows)
