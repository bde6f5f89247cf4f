"""benchmarks.profiles: hidden and exposed times; intervals beside a count of nanoseconds, and hand-written profiles."""

import os

import numpy as np
import pytest
from jax.profiler import ProfileData

from benchmarks.profiles import Kernel, intersect, length, main, overlap_table, overlaps, read_profile, union

pytestmark = pytest.mark.more

GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
NAMES = {
    "all-gather": GATHER,
    "reduce-scatter": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL",
    "copy": "MemcpyD2D",
    "compute": "grouped_matmul_fp8_mosaic_gpu_kernel",
}


def ticks(intervals) -> set[int]:
    """Every nanosecond t of [t, t + 1) that an interval covers."""
    return {t for start, end in intervals for t in range(start, end)}


def some_intervals(rng, count_limit: int = 8, span: int = 30) -> list[tuple[int, int]]:
    starts = rng.integers(0, span, rng.integers(0, count_limit))
    return [(int(start), int(start + rng.integers(0, span // 3))) for start in starts]


def test_intervals_of_any_kind():
    """Breaks if a union or an intersection differs from the set of the nanoseconds that it covers."""
    rng = np.random.default_rng(0)
    for _ in range(1000):
        a = some_intervals(rng)
        b = some_intervals(rng)
        joined = union(a)
        shared = intersect(union(a), union(b))
        assert ticks(joined) == ticks(a) and length(joined) == len(ticks(a))
        assert ticks(shared) == ticks(a) & ticks(b) and length(shared) == len(ticks(a) & ticks(b))
        for results in (joined, shared):
            assert (
                all(before[1] < after[0] for before, after in zip(results, results[1:], strict=False))
                or results is shared
            )


def test_overlaps_of_any_kernels():
    """Breaks if an exposed, hidden or idle time differs from a count of nanoseconds, by kind and by GPU."""
    rng = np.random.default_rng(1)
    for _ in range(60):
        kernels = [
            Kernel(f"GPU:{device}", name, "", *interval)
            for device in (0, 1)
            for name in NAMES.values()
            for interval in some_intervals(rng)
        ]
        for one in overlaps(kernels):
            mine = [k for k in kernels if k.device == one.device]
            busy = {kind: ticks((k.start, k.end) for k in mine if k.kind == kind) for kind in NAMES}
            wire = {kind: busy[kind] for kind in NAMES if kind not in ("compute", "copy")}
            start = min(k.start for k in mine)
            last = max(k.end for k in mine)
            ns = {name: pytest.approx(1e-6 * value) for name, value in {
                "ms": last - start,
                "compute_ms": len(busy["compute"]),
                "idle_ms": last - start - len(set().union(*busy.values())),
                "exposed_ms": len(set().union(*wire.values()) - busy["compute"]),
            }.items()}  # fmt: skip
            assert {name: getattr(one, name) for name in ns} == ns
            for row in one.kinds[1:]:
                assert row.count == sum(k.kind == row.kind for k in mine)
                assert row.hidden_ms == pytest.approx(1e-6 * len(wire[row.kind] & busy["compute"]))
                assert row.exposed_ms == pytest.approx(1e-6 * len(wire[row.kind] - busy["compute"]))
            exposed = [row.exposed_ms for row in one.kinds[1:]]
            assert exposed == sorted(exposed, reverse=True)


@pytest.mark.parametrize(
    ("name", "op", "kind"),
    [
        *((name, "", kind) for kind, name in NAMES.items()),
        ("ncclDevKernel_AllReduce_Sum_f32_TREE_LL", "all-reduce-start.2", "all-reduce"),
        ("ncclSymkDevKernel_AllGather_LL", "", "all-gather"),
        ("ncclDevKernel_SendRecv", "", "send-receive"),
        ("ncclDevKernel_SendRecv", "all-to-all-start.7.clone.1", "all-to-all"),
        ("ncclDevKernel_SendRecv", "collective-permute-start", "collective-permute"),
        ("ncclDevKernel_SendRecv", "all_to_all.3", "all-to-all"),
        ("ncclDevKernel_SendRecv", "ppermute.1", "collective-permute"),
        ("pmax_16_0_fusion_1", "", "all-reduce"),
        ("ncclDevKernel_Unknown_Kernel", "psum.3", "all-reduce"),
        ("ncclDevKernel_Broadcast_RING_LL", "", "other collective"),
        ("stream_executor::gpu::RaggedAllToAllKernelImpl", "", "ragged-all-to-all"),
        ("MemcpyP2P", "all-gather-start.1", "all-gather"),
        ("loop_add_fusion", "all_gather_fusion.1", "compute"),
        ("input_all-reduce_fusion", "loop_fusion", "compute"),
        ("nvjet_hsh_128x256", "custom-call.1", "compute"),
    ],
)
def test_kinds(name, op, kind):
    """Breaks if a kernel that computes counts as a collective, or the other way round."""
    assert Kernel("GPU:0", name, op, 0, 1).kind == kind


def profile(*events: tuple[str, str, int, int], device: int = 0) -> str:
    """A profile, in protobuf's text, with each (kernel, op, start, end) in us on a stream of its own."""
    lines = []
    names = []
    for i, (name, op, start, end) in enumerate(events, 10):
        stat = f'stats {{ metadata_id: 1 str_value: "{op}" }}' if op else ""
        times = f"offset_ps: {start * 10**6} duration_ps: {(end - start) * 10**6}"
        lines.append(f'lines {{ name: "Stream #{i}(Compute)" events {{ metadata_id: {i} {times} {stat} }} }}')
        names.append(f'event_metadata {{ key: {i} value {{ id: {i} name: "{name}" }} }}')
    whole = 'lines { name: "XLA Modules" events { metadata_id: 10 offset_ps: 0 duration_ps: 90000000 } }'
    stats = 'stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }'
    return f'planes {{ name: "/device:GPU:{device}" {" ".join(lines)} {whole} {" ".join(names)} {stats} }}'


def save(folder, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(text))


def test_reads_the_newest_profile_of_all_hosts(tmp_path):
    """Breaks if an older profile, a line that is no stream, or another host's GPU of the same number is mixed in."""
    runs = tmp_path / "plugins" / "profile"
    save(runs / "old", "a", profile(("old", "", 0, 9)))
    os.utime(runs / "old" / "a.xplane.pb", (1, 1))
    host = 'planes { name: "/host:CPU" lines { name: "Stream" events { metadata_id: 1 duration_ps: 9 } } }'
    save(
        runs / "new",
        "a",
        host + profile(("nccl", "all-gather-start.1", 10, 30), ("product", "", 20, 50)),
    )
    assert read_profile(tmp_path) == [
        Kernel("GPU:0", "nccl", "all-gather-start.1", 10_000, 30_000),
        Kernel("GPU:0", "product", "", 20_000, 50_000),
    ]
    save(runs / "new", "b", profile(("product", "", 0, 1)))
    assert [k.device for k in read_profile(tmp_path)] == ["a GPU:0", "a GPU:0", "b GPU:0"]


def test_command(tmp_path, capsys):
    """Breaks if the table of the command does not hold the exposed milliseconds of a step."""
    events = (GATHER, "all-gather-start.1", 0, 4000), (NAMES["compute"], "", 1000, 5000)
    save(tmp_path, "host", profile(*events) + profile(*events, device=1))
    assert main([str(tmp_path), "--steps", "2"]) == 0
    said = capsys.readouterr().out
    assert "GPU:1" in said and "75%" in said
    assert "all-gather         0.5  2.000   1.500    0.500" in said, said
    assert said.strip() == overlap_table(overlaps(read_profile(tmp_path), 2))
    (of_device, _) = overlaps(read_profile(tmp_path / "host.xplane.pb"))
    assert of_device.exposed_ms == 1 and of_device.kinds[1].hidden_ms == 3


def test_errors(tmp_path, capsys):
    """Breaks if a folder without a profile, a profile of a CPU or steps of 0 give a traceback or a table of nothing."""
    assert main([str(tmp_path)]) == 2
    assert "there is no *.xplane.pb" in capsys.readouterr().err
    save(tmp_path, "host", 'planes { name: "/host:CPU" }')
    with pytest.raises(ValueError, match="nothing in it ran on a GPU|nothing ran on a GPU"):
        read_profile(tmp_path)
    with pytest.raises(ValueError, match="steps=0 must be at least 1"):
        overlaps([], 0)
