"""The README: its numbers are those of committed results, and it stays short. Its programs are run by test_docs.py."""

import json
import re
import runpy
import sys
import types
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

PROSE = " ".join(README.split())  # sentences without their line ends
BENCHMARKS = (ROOT / "benchmarks" / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"


def read_rows(name: str) -> list[dict]:
    return json.loads((RESULTS / name).read_text())["rows"]


def block_times() -> dict[tuple[str, str, str], float]:
    """ms of forward and backward, by model, implementation and recipe, of what ran on two H200s."""
    rows = [row for row in read_rows("h200x2_block.json") if row["direction"] == "fwd+bwd" and row["us"]]
    return {(row["case"].split()[0], row["impl"], row["recipe"]): row["us"] / 1e3 for row in rows}


def test_readme_is_short():
    """Breaks if the README grows beyond what a newcomer reads; what is more belongs into docs/."""
    assert len(README.splitlines()) <= 130


def test_the_page_of_a_package_index_has_no_dead_link(monkeypatch):
    """Breaks if a link into the repository stays in the page of a package index, or its path does not exist."""
    interface = types.SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling", types.ModuleType("hatchling"))
    monkeypatch.setitem(sys.modules, "hatchling.metadata", types.ModuleType("hatchling.metadata"))
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin", types.ModuleType("hatchling.metadata.plugin"))
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    page = runpy.run_path(str(ROOT / "scripts" / "index_readme.py"))["index_readme"](README)
    assert not re.findall(r"\]\((?!https?://)[^)]*\)", page)
    paths = re.findall(r"\]\(((?!https?://)[^)#]+)", README)
    assert len(paths) > 10 and all((ROOT / path).exists() and f"`{path}`" in page for path in paths)


def test_bytes_are_committed():
    """Breaks if the first number is not the bytes that wire.json holds, or is no longer half of bf16."""
    gathered = {(r["model"], r["recipe"]): r["gathered"] for r in read_rows("wire.json")}
    shown = re.search(r"receives ([\d,]+) bytes of weights in a training step instead of ([\d,]+) in bf16", PROSE)
    assert shown, "the README no longer says how many bytes a device receives"
    quantized, plain = (int(value.replace(",", "")) for value in shown.groups())
    assert (quantized, plain) == (gathered["mixtral-8x7b", "fp8_block"], gathered["mixtral-8x7b", None])
    assert f"{quantized / plain:.2f}" == "0.50"


def test_speedup_is_committed():
    """Breaks if the second number is not the quotient of two measured times, or PyTorch has a faster layer."""
    times = block_times()
    ours, theirs = times["qwen3-30b", "moax", "fp8_block"], times["qwen3-30b", "torch", "none"]
    assert theirs == min(time for (model, impl, _), time in times.items() if (model, impl) == ("qwen3-30b", "torch"))
    assert f"**{theirs / ours:.2f} times as fast as PyTorch.**" in PROSE
    assert f"takes {ours:.2f} ms forward and backward" in PROSE and f"takes {theirs:.2f} ms in bf16" in PROSE


def test_loss_is_committed():
    """Breaks if the third number is not the last held-out loss of the two runs."""
    last = {}
    for recipe in ("fp8_block", "none"):
        lines = (RESULTS / f"h200_train_{recipe}.jsonl").read_text().splitlines()
        evaluated = [row for row in map(json.loads, lines) if "held_out_loss" in row]
        assert evaluated[-1]["step"] == 300
        last[recipe] = f"{evaluated[-1]['held_out_loss']:.3f}"
    shown = re.search(r"held-out loss of ([\d.]+) nats a byte in FP8 and of ([\d.]+) without", PROSE)
    assert shown and shown.groups() == (last["fp8_block"], last["none"])


def test_performance_is_committed():
    """Breaks if the table shows a time that was not measured, leaves out a row of ours, or hides PyTorch's."""
    times = block_times()
    rows = {
        "moax, `fp8_block`": ("moax", "fp8_block"),
        "moax, bf16": ("moax", "none"),
        "PyTorch, NCCL and `_grouped_mm`, bf16": ("torch", "none"),
        "PyTorch, the same in row-wise FP8": ("torch", "fp8_rowwise"),
    }
    want = {
        label: tuple(f"{times[model, *row]:.2f}" for model in ("qwen3-30b", "mixtral-8x7b"))
        for label, row in rows.items()
    }
    shown = {label: cells for label, *cells in re.findall(r"^\| (.+?) \| (\d+\.\d\d) \| (\d+\.\d\d) \|$", README, re.M)}
    assert {label: tuple(cells) for label, cells in shown.items()} == want


def test_imbalance_is_committed():
    """Breaks if the README shows times of an uneven load that were not measured."""
    rows = [row["extra"] | row for row in read_rows("h200x2_imbalance.json") if row["case"].startswith("qwen3-30b")]
    times = {(row["imbalance"], row["buffer_factor"]): f"{row['us'] / 1e3:.2f}" for row in rows}
    shown = re.search(r"`h200x2_imbalance.json`\) \| (\d+\.\d\d), (\d+\.\d\d) \|", README)
    assert shown and list(shown.groups()) == [times[1.0, 1.25], times[2.0, 1.25]]


def test_products_are_committed():
    """Breaks if benchmarks/README.md shows a speed that was not measured, or leaves a slower row of ours out."""
    measured = {
        (r["case"], r["direction"], r["impl"], r["recipe"]): f"{r['tflops']:.0f}"
        for r in read_rows("h200_gemm.json")
        if r["us"]
    }
    columns = (
        ("moax", "none"), ("torch_grouped_mm", "none"), ("pallas_mgpu", "none"), ("ragged_dot", "none"),
        ("moax", "fp8_block"), ("torch_scaled_grouped_mm", "fp8_rowwise"),
    )  # fmt: skip
    lines = re.findall(r"^\| (\w+) \| (fwd|dgrad|wgrad) \| (.*) \|$", BENCHMARKS, re.M)
    assert {(case, direction) for case, direction, _ in lines} == {key[:2] for key in measured}
    for case, direction, cells in lines:
        want = [measured[case, direction, *column] for column in columns]
        assert cells.split(" | ") == want, (case, direction)
