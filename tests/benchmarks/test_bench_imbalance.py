"""The benchmark `imbalance`: its routing, its programs, and its ratios."""

import json

import jax
import numpy as np
import pytest

import moax
from benchmarks import command
from benchmarks.block import block, block_worker, imbalance
from benchmarks.block.block import How
from benchmarks.block.imbalance import choose_experts
from benchmarks.timing import Repeats
from moax.models import MODELS
from support.benchmarks import InThisProcess

pytestmark = pytest.mark.more

QWEN = MODELS["qwen3-30b"].config
EP2 = How((("ep", 2),), recipes=("fp8_block",))


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


def test_buffers_have_their_bytes():
    """Breaks if saved bytes are not those of a device, if they count weights, or if a program ignores its factor."""
    mesh = moax.make_mesh({"fsdp": 1, "ep": 2}, devices=jax.devices()[:2])
    options = dict(recipe=None, kernels="xla", exchange="all_gather")
    with jax.set_mesh(mesh):
        shapes = block_worker.param_shapes(QWEN, mesh)
        of = [options | {"buffer_factor": factor} for factor in (1.25, None)]
        built = [block_worker.build(QWEN, how, mesh, shapes, None, 1024, True) for how in of]
        saved = [memory["saved_bytes"] for _, memory in built]
    hidden, rows = 2 * QWEN.d_ff * 2, QWEN.d_model * 2
    for found, loads in zip(saved, (1.25, 2.0), strict=True):
        assert found == pytest.approx(loads * 1024 * QWEN.top_k * (hidden + rows), rel=0.6)
        assert found >= loads * 1024 * QWEN.top_k * (hidden + rows)
    assert saved[0] < saved[1]


class Answers:
    """A worker whose steps take 10 us for each balanced load and 2 us for each overflow round; the last row is lost."""

    def __init__(self, module, request):
        self.request = request

    def wait(self):
        pass

    close = wait

    def measure(self):
        for x, factor in self.request["loads"][:-1]:
            rounds = 1 if factor is None else int(np.ceil(x / factor))
            measured = {"us": 10 * x + 2 * (rounds - 1), "path": "xla", "rounds": rounds, "dropped": 0}
            yield {"tokens": 64, "load": [x, factor], "memory": {"saved_bytes": 1}, "fwd+bwd": measured}


def test_ratio_is_of_balanced_steps(monkeypatch):
    """Breaks if a ratio takes another balanced row, or if a lost row is silent."""
    monkeypatch.setattr(imbalance, "Worker", Answers)
    found = list(imbalance.rows(list(block.TINY), EP2, Repeats(1, 1)))
    by = {(row.extra["imbalance"], row.extra["buffer_factor"]): row for row in found}
    assert len(by) == 12 and by[1.0, 1.25].extra["ratio"] == 1.0
    assert by[1.75, None].extra["ratio"] == 1.0 and by[2.0, 1.25].extra["ratio"] == pytest.approx(1.1)
    assert by[2.0, None].us is None and "ended" in by[2.0, None].note


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
    """Breaks if a row does not run, if buffers of a factor take no overflow round, or if a step drops a token."""
    monkeypatch.setattr(imbalance, "Worker", InThisProcess)
    monkeypatch.setattr(imbalance, "IMBALANCES", (1.0, 2.0, 4.0))
    out = tmp_path / "f.json"
    argv = ["imbalance", "--cases", "tiny", "--recipe", "none", "--mesh", "ep=2", "--quick", "--out", str(out)]
    assert command.main(argv) == 0
    rows = [row["extra"] | {"us": row["us"]} for row in json.loads(out.read_text())["rows"]]
    rounds = {(row["imbalance"], row["buffer_factor"]): row["rounds"] for row in rows}
    assert rounds == {(1.0, 1.25): 1, (2.0, 1.25): 2, (1.0, None): 1, (2.0, None): 1}
    assert all(row["us"] > 0 and row["dropped"] == 0 for row in rows)
