"""`python -m benchmarks block --mesh`: the block on emulated devices."""

import json

import pytest

from benchmarks import command
from benchmarks.block import block, block_worker
from benchmarks.timing import Repeats
from support.benchmarks import InThisProcess

pytestmark = pytest.mark.more

KERNELS = [
    ("sort_1", 1.0), ("grouped_matmul_mosaic_gpu_kernel", 4.0), ("ncclDevKernel_AllGather_RING_LL", 2.0),
    ("all_reduce_kernel_impl", 1.0), ("put_rows_mosaic_gpu_kernel", 0.5), ("psum_9_0_fusion_1", 0.5),
]  # fmt: skip


def test_kernels_of_several_devices():
    """Breaks if times are sums over devices, if a collective counts as computing, or if kernels that are not every
    device's are taken for the mean."""
    found = block_worker.split("", [kernel for kernel in KERNELS for _ in range(2)], 2, 10.0)
    wanted = {"route": 1.0, "gemm fwd + dgrad": 4.0, "communication": 4.0}
    assert {name: us for name, us in found["stages_us"].items() if us} == wanted
    assert found["kernel_us"] == 9.0 and found["exposed_us"] == 5.0
    assert block_worker.split("", KERNELS, 2, 10.0) == {} == block_worker.split("", [], 2, 10.0)


def test_mesh_that_does_not_fit(monkeypatch):
    """Breaks if a mesh of more GPUs than there are fails in eight processes, each with another error."""
    monkeypatch.setattr(block.backend, "platform", lambda: "gpu")
    how = block.How((("fsdp", 16), ("ep", 4)))
    with pytest.raises(ValueError, match="--mesh fsdp=16,ep=4 is a mesh of 64 devices, but JAX has 8"):
        next(block.rows(list(block.TINY), how, Repeats(1, 1), {}))


def test_mesh_is_a_mesh_and_of_a_block(capsys):
    """Breaks if --mesh is taken and does nothing."""
    assert command.main(["gemm", "--cases", "tiny", "--mesh", "ep=2"]) == 2
    assert "--mesh with gemm" in capsys.readouterr().err
    assert command.main(["block", "--cases", "tiny", "--mesh", "ep=2", "--recipe", "fp8_block+kept"]) == 2
    assert "--recipe fp8_block+kept with --mesh: it is for one device" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["block", "--mesh", "up=2"])
    assert "unknown axis 'up'" in capsys.readouterr().err


@pytest.mark.loose
@pytest.mark.more
def test_block_on_a_mesh(tmp_path, capsys, monkeypatch):
    """Breaks if the block does not run on a mesh, or if its rows do not say on which."""
    monkeypatch.setattr(block, "Worker", InThisProcess)
    out = tmp_path / "f.json"
    argv = ["block", "--cases", "tiny", "--recipe", "none", "--mesh", "ep=2", "--quick", "--peers", "none"]
    assert command.main([*argv, "--exchange", "all_to_all", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "params_bytes 2" in said
    rows = json.loads(out.read_text())["rows"]
    assert [row["direction"] for row in rows] == ["fwd", "fwd+bwd"]
    for row in rows:
        assert row["us"] > 0 and row["case"] == "tiny T64 ep=2" and row["extra"]["mesh"] == {"fsdp": 1, "ep": 2}
        assert row["impl"] == "moax" and row["recipe"] == "none" and row["extra"]["exchange"] == "all_to_all"
        assert row["extra"]["params_bytes"] == 2 * (64 * 4 + 2 * 3 * 64 * 32)  # bf16: the router, two of four experts
